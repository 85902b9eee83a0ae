"""``mxpool bench``: how fast a model answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from mxpool.cli import printing, sources
from mxpool.cli.closed_loop import CpuClock, closed_loop, pids, random_blocks
from mxpool.cli.exits import FAILURE, reported
from mxpool.cli.flags import InFlight, Json, Model, Timeout
from mxpool.cli.surroundings import around, rows_of, signature


@reported()
def bench(
    ctx: typer.Context,
    model: Model,
    seconds: Annotated[float, typer.Option(help="How long.", min=0.01, max=3600)] = 5.0,
    in_flight: InFlight = 64,
    rows: Annotated[int, typer.Option(help="Rows of each request.", min=1)] = 1,
    npz: Annotated[Path | None, typer.Option(help="Send this file's arrays as they are, not random numbers.")] = None,
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Keep requests under way for some seconds; report rates, latencies, errors and CPU use of every process.

    Floats are random in 0 to 1, integers 0 or 1. Exit code 1 if nothing was answered.
    """
    with closing(around(ctx).client()) as client:
        served = signature(client, model)
        blocks = [sources.load_arrays(npz, npz.stem)] if npz else random_blocks(served, rows)
        cpu = CpuClock({"client": os.getpid(), **pids(client.status())})
        tally = closed_loop(client, model, blocks, in_flight=in_flight, seconds=seconds, timeout_s=timeout)
        per_request = rows_of(blocks[0], batched=served.batched)
        figures = {
            "model": model,
            "in_flight": in_flight,
            "rows": per_request,
            **tally.figures(per_request),
            "cores": cpu.cores(tally.elapsed_s),
        }
    if json:
        printing.show_json(figures)
    else:
        _show(figures)
    if not tally.latencies_s:
        raise typer.Exit(FAILURE)


def _show(figures: Mapping[str, Any]) -> None:
    single = ("requests", "seconds", "requests_per_s", "rows_per_s")
    rows = [(name, figures[name]) for name in single]
    rows += [(f"{name} ms", value) for name, value in figures["latency_ms"].items()]
    rows += [(f"error {code}", count) for code, count in figures["errors"].items()]
    rows += [(f"cores {name}", value) for name, value in figures["cores"].items()]
    title = f"{figures['model']}: {figures['in_flight']} in flight, {figures['rows']} rows each"
    printing.show_table(title, ("figure", "value"), rows)
