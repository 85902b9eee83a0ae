"""A sweep as a picture; needs the extra ``plot``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxpool.cli.exits import BadSource
from mxpool.cli.sweep.report import figure

# Title, what the axis says, and the lines of one panel: phase, figure, style.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
    ("throughput, saturated", "rows/s", (("saturated", "rows_per_s", "-"),)),
    (
        "CPU of broker and workers, same load",
        "% of one core (dashed: p99 of 100 ms samples)",
        (("offered", "cpu_percent.mean", "-"), ("offered", "cpu_percent.p99", "--")),
    ),
    (
        "run_us, same load",
        "us a batch (dashed: p99)",
        (("offered", "run_us.p50", "-"), ("offered", "run_us.p99", "--")),
    ),
    (
        "oldest_queue_us, same load",
        "us a batch (dashed: p99)",
        (("offered", "oldest_queue_us.p50", "-"), ("offered", "oldest_queue_us.p99", "--")),
    ),
)
COLOURS = {"off": "tab:orange", "on": "tab:blue"}


def check_possible() -> None:
    """Refuse at once what would fail after minutes.

    Raises:
        BadSource: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BadSource("--plot needs matplotlib: pip install 'mxpool[plot]'")


def write(path: Path, told: Mapping[str, Any]) -> None:
    """Write a PNG with four panels against the number of workers; a line for each value of graph."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    rate = "not measured" if told["rate"] is None else f"{told['rate']:,.0f} requests/s"
    picture = Figure(figsize=(11, 8), layout="constrained")
    picture.suptitle(f"{told['model']} on {told['device']}; same load: {rate}")
    for axes, (title, unit, lines) in zip(picture.subplots(2, 2).flat, PANELS, strict=True):
        for graph in dict.fromkeys(row["graph"] for row in told["combinations"]):
            rows = sorted(
                (row for row in told["combinations"] if row["graph"] == graph), key=lambda row: row["workers"]
            )
            for index, (phase, name, style) in enumerate(lines):
                points = [(row["workers"], value) for row in rows if (value := figure(row[phase], name)) is not None]
                label = f"graph {graph}" if index == 0 else None
                across, up = [x for x, _ in points], [y for _, y in points]
                axes.plot(across, up, style, marker="o", color=COLOURS[graph], label=label)
        axes.set(title=title, xlabel="workers", ylabel=unit)
        axes.set_ylim(0, axes.get_ylim()[1])
        axes.set_xticks(sorted({row["workers"] for row in told["combinations"]}))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    picture.savefig(path, format="png", dpi=110)
