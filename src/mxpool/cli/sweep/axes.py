"""What a sweep varies: ``workers=8,4,2,1 graph=off,on``, and the combinations that come of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mxpool.cli.exits import BadSource

WORKERS_MAX = 256  # as the config's
GRAPH_SETTINGS = {"off": "off", "on": "prefer"}  # with `require` a combination without a graph could not be measured
ALLOWED = f"workers=N[,N...] with N from 1 to {WORKERS_MAX}, and graph=off, graph=on or graph=off,on"


class Combination(NamedTuple):
    """So many workers on one device, and the config's word for ``graph``: off, prefer or require."""

    workers: int
    setting: str

    @property
    def graph(self) -> str:
        """``on`` or ``off``, as the axis has it."""
        return "off" if self.setting == "off" else "on"

    def __str__(self) -> str:
        return f"workers={self.workers} graph={self.graph}"


def combinations(words: Iterable[str], present: Combination) -> list[Combination]:
    """Every combination of the axes in ``words``, each of which may hold several; ``present`` fills what is not given.

    Raises:
        BadSource: for an axis or value that there is not, or that is given twice; the text says what is allowed.
    """
    axes: dict[str, list[str]] = {}
    for word in (part for text in words for part in text.split()):
        name, equals, values = word.partition("=")
        if not equals or name not in ("workers", "graph"):
            raise BadSource(f"--sweep {word!r}: no such axis; allowed: {ALLOWED}")
        if name in axes:
            raise BadSource(f"--sweep {word!r}: {name} is given twice")
        axes[name] = _separate(word, values)
    workers = [_workers(value) for value in axes["workers"]] if "workers" in axes else [present.workers]
    settings = [_setting(value) for value in axes["graph"]] if "graph" in axes else [present.setting]
    return [Combination(count, setting) for count in workers for setting in settings]


def _separate(word: str, values: str) -> list[str]:
    found = values.split(",")
    if len(set(found)) < len(found):
        raise BadSource(f"--sweep {word!r}: a value is given twice")
    return found


def _workers(value: str) -> int:
    if value not in map(str, range(1, WORKERS_MAX + 1)):
        raise BadSource(f"--sweep: {value!r} is no number of workers; allowed: {ALLOWED}")
    return int(value)


def _setting(value: str) -> str:
    if value not in GRAPH_SETTINGS:
        raise BadSource(f"--sweep: {value!r} is no value of graph; allowed: {ALLOWED}")
    return GRAPH_SETTINGS[value]
