"""How a benchmark shows its samples: every figure, and what was promised beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

Target = tuple[str, "float | None", str, "float | None"]  # words, figure, comparison, bound; no bound: only told


def show_figures(samples: Mapping[str, Sequence[float]], console: Console) -> None:
    """Median, least and largest of each figure's samples."""
    table = Table("figure", "median", "min", "max", title="figures")
    for name, values in samples.items():
        table.add_row(name, *(f"{value:,.3f}" for value in (median(values), min(values), max(values))))
    console.print(table)


def show_targets(targets: Iterable[Target], console: Console) -> None:
    """Each figure that there is, beside its bound, held or MISSED."""
    table = Table("target", "measured", "must be", "", title="targets")
    for words, value, comparison, bound in targets:
        if value is None:
            continue
        held = bound is not None and (value >= bound if comparison == ">=" else value <= bound)
        word = "" if bound is None else "held" if held else "MISSED"
        table.add_row(words, f"{value:,.3f}", "" if bound is None else f"{comparison} {bound:,}", word)
    console.print(table)
