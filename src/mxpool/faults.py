"""What is wrong with a config, in the words of its keys: one line for each fault, with what is allowed instead."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mxpool.errors import ConfigInvalid
from mxpool.spec import BACKENDS

if TYPE_CHECKING:
    from mxpool.config import Config, ModelConfig

# Keys that later releases will have. A file written for one of them must not be served as if they meant nothing.
LATER_KEYS = frozenset(["metrics", "http", "grpc", "memory_budget_mb", "spares", "unload", "replace"])
LATER_VALUES = {("load", "lazy"), ("load", "lru")}
SHOWN_CHARS_MAX = 80
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Fault(NamedTuple):
    """One thing that is wrong: the path of keys to it (tables, names, positions), and why."""

    keys: tuple[str | int, ...]
    reason: str


def key_text(keys: Sequence[str | int]) -> str:
    """``keys`` as TOML writes them: ``models."a.b".dims.x[0]``."""
    parts: list[str] = []
    for key in keys:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        else:
            parts += [".", key if _BARE_KEY.fullmatch(key) else _shown(key)]
    return "".join(parts).removeprefix(".")


def invalid(source: str, faults: Sequence[Fault]) -> ConfigInvalid:
    """The error that lists ``faults``; its fields are those of the first, and ``count``."""
    lines = [": ".join(filter(None, (source, key_text(fault.keys), fault.reason))) for fault in faults]
    first = faults[0]
    return ConfigInvalid(
        "\n".join(lines), source=source, key=key_text(first.keys), reason=first.reason, count=len(faults)
    )


def pydantic_faults(error: ValidationError, root: type[BaseModel]) -> list[Fault]:
    """The validator's errors in our words; ``root`` is the model that was validated."""
    return [_fault(dict(entry), root) for entry in error.errors(include_url=False)]


def _fault(entry: dict[str, Any], root: type[BaseModel]) -> Fault:
    keys = tuple(entry["loc"])
    kind, value, limits = entry["type"], entry["input"], entry.get("ctx", {})
    if keys and keys[-1] == "[key]":
        return Fault(keys[:-1], "a name is made of a-z, 0-9, '.', '_' and '-', at most 64, the first a letter or digit")
    if kind == "extra_forbidden":
        return Fault(keys, _unknown(keys, root))
    field = _field(keys, root)
    allowed = _allowed(field)
    if kind == "missing":
        return Fault(keys, f"is missing; allowed: {allowed}" if allowed else "is missing: there is at least one")
    if (keys[-1], value if isinstance(value, str) else None) in LATER_VALUES:
        return Fault(keys, f"{_shown(value)} is not in this release; allowed: {allowed}")
    return Fault(keys, f"{_shown(value)} {_problem(kind, limits)}" + (f"; allowed: {allowed}" if allowed else ""))


_PROBLEMS = {
    "greater_than_equal": "is less than {ge}",
    "less_than_equal": "is more than {le}",
    "int_type": "is not an integer",
    "float_type": "is not a number",
    "bool_type": "is neither true nor false",
    "string_type": "is not a string",
    "string_unicode": "is not valid text",
    "tuple_type": "is not an array",
    "dict_type": "is not a table",
    "mapping_type": "is not a table",
    "model_type": "is not a table",
    "literal_error": "is not one of them",
    "string_pattern_mismatch": "has other characters",
    "string_too_short": "is empty",
    "too_short": "is empty",
    "too_long": "has more than {max_length} entries",
    "value_error": "is refused: {error}",
}


def _problem(kind: str, limits: Mapping[str, Any]) -> str:
    return _PROBLEMS.get(kind, f"is refused ({kind})").format_map(limits)


def _shown(value: Any) -> str:
    """``value`` in one line of bounded length; JSON is near enough to TOML to be recognised."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


def _table(keys: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """The model class of the table ``keys`` leads to: ``("models", name)`` is an entry of a mapping."""
    if not keys:
        return root
    field = root.model_fields.get(str(keys[0]))
    if field is None:
        return None
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return field.annotation if len(keys) == 1 else None
    entry = getattr(field.annotation, "__args__", (None, None))[1]
    return entry if len(keys) == 2 and isinstance(entry, type) else None


def _field(keys: Sequence[str | int], root: type[BaseModel]) -> FieldInfo | None:
    """The field that ``keys`` leads to or into; None for whole tables and unknown keys."""
    for length in (1, 2):
        table = _table(keys[:length], root)
        if table is not None and len(keys) > length:
            return keyed_fields(table).get(str(keys[length]))
    return None


def keyed_fields(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of ``table`` by the key that a file writes."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def _allowed(field: FieldInfo | None) -> str:
    extra = field.json_schema_extra if field else None
    return str(extra.get("allowed", "")) if isinstance(extra, dict) else ""


def _unknown(keys: Sequence[str | int], root: type[BaseModel]) -> str:
    key, table = str(keys[-1]), _table(keys[:-1], root)
    if key in LATER_KEYS:
        return "this release has not got it; a later one will"
    known = sorted(keyed_fields(table)) if table else []
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known: {', '.join(known)}"


def cross_faults(config: Config) -> list[Fault]:
    """What no single key shows: keys that do not agree with each other."""
    faults = [
        Fault(("models", name, *keys), reason)
        for name, model in config.models.items()
        for keys, reason in _model_faults(model, config)
    ]
    if config.devices["cpu"].kind != "cpu":
        faults.append(Fault(("devices", "cpu", "kind"), "the device named cpu is of kind cpu; choose another name"))
    return faults


def _model_faults(model: ModelConfig, config: Config) -> Iterator[Fault]:
    yield from _backend_faults(model)
    for device in model.workers:
        if device not in config.devices:
            known = ", ".join(sorted(config.devices))
            yield Fault(("workers", device), f"no device of that name is declared; declared: {known}")
        elif config.devices[device].kind == "maca" and len(model.graph_batch_sizes) > 1:
            shown = _shown(model.graph_batch_sizes)
            yield Fault(
                ("graph_batch_sizes",), f"{shown} are several, and a maca session has one graph, at max_batch_size"
            )
    yield from _size_faults("batch_sizes", model.batch_sizes, model.max_batch_size)
    yield from _size_faults("graph_batch_sizes", model.graph_batch_sizes, model.max_batch_size)
    if model.slot_count <= model.worker_count:
        yield Fault(
            ("slots",),
            f"{model.slot_count} is less than {model.worker_count + 1}: one for each worker, and one to fill meanwhile",
        )
    if model.graph == "require" and not model.fixed_input_buffers:
        yield Fault(("graph",), '"require" needs fixed_input_buffers = true: a graph holds the addresses of its inputs')


def _size_faults(key: str, sizes: Sequence[int], max_batch_size: int) -> Iterator[Fault]:
    largest = max(max_batch_size, 1)
    if sizes and list(sizes) != sorted(set(sizes)):
        yield Fault((key,), f"{_shown(sizes)} does not ascend")
    elif sizes and sizes[-1] != largest:
        yield Fault((key,), f"{_shown(sizes)} does not end with {largest}, the largest batch")


def _backend_faults(model: ModelConfig) -> Iterator[Fault]:
    if model.backend_name is None:
        known = ", ".join(BACKENDS)
        yield Fault(("path",), f"{_shown(model.path)} ends in none of {known}; rename it or set backend")
    elif model.backend_name == "tensorrt":
        key = "path" if model.backend is None else "backend"
        shown = _shown(getattr(model, key))
        yield Fault((key,), f"{shown} needs the tensorrt backend, which is not in this release")
