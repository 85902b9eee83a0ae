"""The config file of one combination: its tree, and that as TOML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mxpool.cli.sweep.axes import Combination
from mxpool.config import Config


def tree(config: Config, model: str, device: str, combination: Combination, endpoint: str) -> dict[str, Any]:
    """``config`` with nothing but ``model``, on ``device`` alone, as ``combination`` has it."""
    table = config.models[model].model_dump(exclude_defaults=True)
    table |= {"path": config.models[model].path, "workers": {device: combination.workers}, "graph": combination.setting}
    broker = config.broker.model_dump(exclude_defaults=True, exclude={"endpoints"})
    return {
        "broker": {"endpoint": endpoint, **broker},
        "devices": {device: config.devices[device].model_dump()},
        "models": {model: table},
    }


def to_toml(config: Mapping[str, Any]) -> str:
    """``{"broker": {...}, "models": {"name": {...}}}`` as a file that ``mx-broker`` reads."""
    lines = ["[broker]", *_lines(config["broker"])]
    for kind in ("devices", "models"):
        for name, table in config[kind].items():
            lines += [f"[{kind}.{_text(name)}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_text(key)} = {_value(value)}" for key, value in table.items())


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case Mapping():
            return "{ " + ", ".join(_lines(value)) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case float() if not math.isfinite(value):
            return str(value)  # nan, inf and -inf are TOML's words too
    return repr(value)


def _text(text: str) -> str:
    """A basic string of TOML: JSON's, with the delete character escaped and pairs of surrogates not."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
