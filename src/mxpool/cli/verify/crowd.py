"""Check: several clients and all workers at once, each row of each answer known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked
from mxpool.cli.verify.difference import Difference, worst
from mxpool.cli.verify.known_rows import KnownRows, Stretch, learn
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.errors import MxPoolError

REQUESTS = 100  # of each client
IN_FLIGHT = 8
LONGEST_S = 30.0  # a slow model is sent fewer


@dataclass(slots=True)
class _Told:
    answers: int = 0
    sent: int = 0
    rows: int = 0
    wrong: int = 0
    first: str = ""
    off: Difference = field(default_factory=Difference)

    def add(self, other: _Told) -> None:
        self.answers += other.answers
        self.sent += other.sent
        self.rows += other.rows
        self.wrong += other.wrong
        self.first = self.first or other.first
        self.off = worst((self.off, other.off))


def check(asked: Asked, material: Material, clients: int) -> Outcome:
    """Random stretches of known rows from ``clients`` clients at once."""
    known = learn(asked, material)
    before = _batches(asked)
    plans = [[known.stretch(material) for _ in range(REQUESTS)] for _ in range(clients)]
    told, end_s = _Told(), time.monotonic() + LONGEST_S
    with ThreadPoolExecutor(clients) as threads:
        for one in threads.map(lambda plan: _client(asked, known, plan, end_s), plans):
            told.add(one)
    asked.sent += told.sent
    asked.rows += told.rows
    after = _batches(asked)
    idle = [name for name, count in before.items() if after.get(name) == count]
    return _judged(told, known, idle, clients, len(before))


def _client(asked: Asked, known: KnownRows, plan: list[Stretch], end_s: float) -> _Told:
    """One client's requests; its connection is its own. What has no answer is wrong, and a refused client too."""
    told = _Told()
    assert asked.connect is not None
    try:
        with closing(asked.connect()) as client:
            _ask(replace(asked, client=client, sent=0, rows=0), known, plan, end_s, told)
    except MxPoolError as error:
        told.wrong += max(told.sent - told.answers, 1)
        told.first = told.first or f"{error.code}: {error}"
    return told


def _ask(mine: Asked, known: KnownRows, plan: list[Stretch], end_s: float, told: _Told) -> None:
    try:
        for stretch, answer in zip(plan, mine.push(_requests(known, plan, end_s), IN_FLIGHT), strict=False):
            told.answers += 1
            found = known.difference(stretch, answer)
            told.off = worst((told.off, found))
            if not known.right(found):
                told.wrong += 1
                told.first = told.first or f"{stretch}: {found}"
    finally:
        told.sent, told.rows = mine.sent, mine.rows


def _requests(known: KnownRows, plan: list[Stretch], end_s: float) -> Iterator[Arrays]:
    return (known.request(stretch) for stretch in plan if time.monotonic() < end_s)


def _batches(asked: Asked) -> dict[str, int]:
    return {worker["worker"]: worker.get("batches", 0) for worker in asked.workers()}


def _judged(told: _Told, known: KnownRows, idle: list[str], clients: int, workers: int) -> Outcome:
    what = "full blocks (rows are coupled)" if known.whole else "random rows"
    result, detail = Result.OK, f"{told.answers} answers by {workers} workers, each its own rows'; {told.off}"
    if told.wrong:
        result, detail = Result.FAILED, f"{told.wrong} requests have no answer or a wrong one: {told.first}"
    elif not known.distinct:
        result = Result.NOTE
        detail = "answers of different rows are alike: mixed-up rows would not be seen; try real rows with --npz"
    if idle:
        result = Result.FAILED if told.wrong else Result.NOTE
        detail += f"; no batch went to {', '.join(idle)}"
    return Outcome(
        check="clients at once",
        compared=f"{clients} clients, at most {REQUESTS} requests each of {what}, against answers known before",
        result=result,
        detail=detail,
        figures={"answers": told.answers, "wrong": told.wrong, "idle_workers": idle, **told.off.figures()},
    )
