"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 240  # where nobody watches, lines are as long as their content


def console(*, stderr: bool = False) -> Console:
    """A console on the present stdout or stderr."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else PLAIN_WIDTH, highlight=False, markup=False)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print one table under its title; numbers are aligned to the right, None is shown as a dash."""
    table = Table(box=box.SIMPLE)
    listed = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numeric = listed and all(isinstance(row[index], int | float) for row in listed if row[index] is not None)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        table.add_row(*(_cell(value) for value in row))
    out = console()
    if title:
        out.print(title, style="bold", soft_wrap=True)
    out.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def tensor_text(name: str, datatype: str, dims: Sequence[int]) -> str:
    """A tensor as people read it: ``image FP32[3,224,224]``, dims of one row."""
    return f"{name} {datatype}[{','.join(map(str, dims))}]"


def show_json(value: Any) -> None:
    """Print ``value`` as one JSON document that a strict parser takes: NaN and infinities become null."""
    sys.stdout.write(json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """The same as text, in one line unless ``indent`` is given."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` in what JSON has: arrays become nested lists, bytes hexadecimal, numbers that are not finite null."""
    match value:
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case bytes():
            return value.hex()
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [plain(entry) for entry in value]
    return value
