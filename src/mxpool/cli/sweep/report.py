"""A sweep as tables and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from mxpool.cli import printing
from mxpool.cli.sweep.advice import label

MIB = 1 << 20
PHASES = ("saturated", "offered")
COMMON = (
    "cpu_percent.mean",
    "cpu_percent.p99",
    "run_us.p50",
    "run_us.p99",
    "oldest_queue_us.p50",
    "oldest_queue_us.p99",
    "rows_per_batch",
)
FIGURES = (
    *("requests_per_s", "rows_per_s", "offered_per_s", "latency_ms.p50", "latency_ms.p90", "latency_ms.p99"),
    *COMMON,
    *("batches", "graph.hit", "graph.miss", "graph.off", "cores.broker", "cores.workers", "cores.clients"),
    *("late", "kept_up", "fell_behind", "client_bound", "machine_bound", "restarts"),
)
MEMORY = ("device_bytes", "device_used_bytes", "resident_bytes")
CSV_COLUMNS = ("workers", "graph", "graph_on", "phase", *FIGURES, *MEMORY, "errors", "error", "notes")

_SHOWN = {
    "cpu_percent.mean": "CPU %",
    "cpu_percent.p99": "p99",
    "run_us.p50": "run_us p50",
    "run_us.p99": "p99",
    "oldest_queue_us.p50": "oldest_queue_us p50",
    "oldest_queue_us.p99": "p99",
    "rows_per_batch": "rows/batch",
    "rows_per_s": "rows/s",
    "requests_per_s": "requests/s",
    "latency_ms.p50": "latency ms p50",
    "latency_ms.p99": "p99",
    "late": "late",
}


def figure(phase: Mapping[str, Any] | None, path: str) -> Any:
    """``latency_ms.p99`` of a phase; None where there is none."""
    found: Any = phase
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def csv_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """A header, then a line for each combination and phase; nothing where there is no figure."""
    yield list(CSV_COLUMNS)
    for row in rows:
        for name in PHASES:
            phase, memory = row[name], row["memory"]
            figures = {path: figure(phase, path) for path in FIGURES}
            told = {
                **{key: row[key] for key in ("workers", "graph", "graph_on", "error")},
                "phase": name,
                **figures,
                **{key: memory.get(key) for key in MEMORY},
                "errors": sum((phase or {}).get("errors", {}).values()) if phase else None,
                "notes": "; ".join(row["notes"]),
            }
            yield ["" if told[column] is None else told[column] for column in CSV_COLUMNS]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``csv_lines`` to a file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(csv_lines(rows))


def show(told: Mapping[str, Any]) -> None:
    """Print both tables, what is to be noted, and the advice."""
    rows = told["combinations"]
    _table(f"{told['model']} on {told['device']}, saturated", rows, "saturated", ["rows_per_s", "requests_per_s"])
    if told["rate"] is not None:
        title = f"{told['model']} on {told['device']}, {told['rate']:,.1f} requests/s offered, Poisson"
        latencies = ["latency_ms.p50", "latency_ms.p99"]
        _table(title, rows, "offered", ["requests_per_s", *latencies, "late"])
    typer.echo("CPU: broker and workers, of one core, in samples of 100 ms. run_us, oldest_queue_us: of each batch.")
    for row in rows:
        for note in [*row["notes"], *([row["error"]] if row["error"] else [])]:
            typer.echo(f"{label(row)}: {note}")
    advice = told["recommended"]
    if advice is None:
        return
    chosen = advice["workers"] is not None
    typer.echo(f"\nrecommended: workers = {advice['workers']}, graph = {advice['graph']}" if chosen else "")
    for reason in advice["why"]:
        typer.echo(f"  - {reason}")


def _table(title: str, rows: Sequence[Mapping[str, Any]], phase: str, first: Sequence[str]) -> None:
    paths = [*first, *COMMON]
    lines = []
    for row in rows:
        memory = row["memory"]
        # The workers' own figures are of the device's free memory, and overlap where several load at once.
        device = memory.get("device_used_bytes") or memory.get("device_bytes")
        mib = [None if size is None else round(size / MIB, 1) for size in (device, memory.get("resident_bytes"))]
        really = "on" if row["graph_on"] else "off" if row["graph_on"] is False else "-"
        graph = row["graph"] if row["graph"] == really or really == "-" else f"{row['graph']} ({really})"
        lines.append([row["workers"], graph, *(figure(row[phase], path) for path in paths), *mib])
    columns = ["workers", "graph", *(_SHOWN[path] for path in paths), "device MiB", "resident MiB"]
    printing.show_table(title, columns, lines)
