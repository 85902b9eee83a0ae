"""The config of a start: flags over environment over file over defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxpool import config as configs
from mxpool import endpoint, switches
from mxpool.config import Config
from mxpool.errors import ConfigInvalid


def from_file(path: Path, argument: str | None, environ: Mapping[str, str]) -> Config:
    """The file at ``path`` under the flag ``argument`` (an endpoint, or None) and the variables of ``environ``.

    Raises:
        ConfigInvalid: for the first of file, environment and flag that is not as allowed.
    """
    return _settled(configs.read(path), argument, environ)


def from_flags(
    models: Sequence[str],
    dims: Sequence[str],
    max_batch_size: int | None,
    argument: str | None,
    environ: Mapping[str, str],
) -> Config:
    """A config without a file: each of ``models`` is ``NAME=PATH``, each of ``dims`` ``NAME:input=3x48x192``.

    Relative paths start at the working directory.

    Raises:
        ConfigInvalid: as ``from_file``.
    """
    tables: dict[str, dict[str, Any]] = {}
    for text in models:
        name, found, path = text.partition("=")
        if not found or name in tables:
            raise _flag("--model", f"{text!r} is not NAME=PATH" if not found else f"{name!r} is given twice")
        tables[name] = {"path": path} if max_batch_size is None else {"path": path, "max_batch_size": max_batch_size}
    for text in dims:
        name, row, sizes = _dims(text)
        if name not in tables:
            raise _flag("--dims", f"{text!r}: no --model is named {name!r}")
        tables[name].setdefault("dims", {})[row] = sizes
    return _settled(configs.build({"models": tables}, "command line", Path.cwd()), argument, environ)


def _dims(text: str) -> tuple[str, str, list[int]]:
    name, _, rest = text.partition(":")
    row, _, sizes = rest.rpartition("=")
    try:
        return name, row, [int(size) for size in sizes.split("x")]
    except ValueError:
        raise _flag("--dims", f"{text!r} is not NAME:input=3x48x192") from None


def _flag(key: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid(source="command line", key=key, reason=reason)


def _settled(config: Config, argument: str | None, environ: Mapping[str, str]) -> Config:
    endpoints = config.broker.endpoints
    if argument is not None or environ.get(endpoint.ENVIRONMENT_VARIABLE) or not endpoints:
        endpoints = (endpoint.resolve(argument, environ),)
    broker = config.broker.model_copy(update={"endpoints": endpoints})
    return switches.apply(config.model_copy(update={"broker": broker}), environ)
