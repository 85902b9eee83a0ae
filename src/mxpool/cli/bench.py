"""``mxpool bench``: how fast a model answers; with ``--sweep``, with which setting it answers best."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from mxpool.cli import printing, sources
from mxpool.cli.closed_loop import FAILURES_MAX, CpuClock, closed_loop, pids, random_blocks
from mxpool.cli.exits import FAILURE, BadSource, reported
from mxpool.cli.flags import InFlight, Json, Model, Timeout
from mxpool.cli.surroundings import Surroundings, around, rows_of, signature
from mxpool.cli.sweep.plan import Flags, Plan, Traffic, plan

_SWEEP = "--sweep"


@reported()
def bench(
    ctx: typer.Context,
    model: Model,
    *,
    more: Annotated[list[str] | None, typer.Argument(metavar="[AXIS]...", help="With --sweep: more axes.")] = None,
    seconds: Annotated[float, typer.Option(help="How long; with --sweep, each phase.", min=0.01, max=3600)] = 5.0,
    in_flight: InFlight = 64,
    rows: Annotated[int, typer.Option(help="Rows of each request.", min=1)] = 1,
    npz: Annotated[Path | None, typer.Option(help="Send this file's arrays as they are, not random numbers.")] = None,
    timeout: Timeout = 30.0,
    json: Json = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(_SWEEP, metavar="AXIS", help="Compare settings: workers=8,4,2,1 graph=off,on (see AXIS)."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="With --sweep: the TOML file that has MODEL.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="With --sweep: a model file, on the CPU.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="With --sweep: requests/s offered; default: 0.8 of the slowest.", min=0.1)
    ] = None,
    clients: Annotated[int | None, typer.Option(help="With --sweep: client processes; 1.", min=1, max=64)] = None,
    csv: Annotated[Path | None, typer.Option(help="With --sweep: write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="With --sweep: draw them (PNG).")] = None,
) -> None:
    """Keep requests under way for some seconds; report rates, latencies, errors and CPU use of every process.

    Floats are random in 0 to 1, integers 0 or 1. Exit code 1 if nothing was answered, or if the run was cut short by
    errors.

    With --sweep it starts brokers of its own, one after another, and measures each combination twice: saturated, and
    at one rate for all. Exit code 1 if none of them can be recommended.
    """
    surroundings = around(ctx)
    flags = Flags(
        axes=[*(sweep or []), *(more or [])],
        config=config,
        model_path=model_path,
        rate=rate,
        clients=clients,
        csv=csv,
        plot=plot,
    )
    traffic = Traffic(seconds=seconds, in_flight=in_flight, rows=rows, npz=npz, timeout_s=timeout)
    if sweep is None:
        _refuse_stray(flags)
        _once(surroundings, model, traffic, json=json)
        return
    if surroundings.argument is not None:
        raise BadSource("--sweep starts brokers of its own: it takes no -e")
    _swept(surroundings, plan(model, flags, traffic, surroundings.environ), flags, json=json)


def _refuse_stray(flags: Flags) -> None:
    """A flag that does nothing is an error."""
    given = [name.replace("_", "-") for name in Flags.__dataclass_fields__ if getattr(flags, name) not in (None, [])]
    if given:
        what = f"{flags.axes[0]!r}" if given[0] == "axes" else f"--{given[0]}"
        raise BadSource(f"{what} goes with --sweep")


def _once(surroundings: Surroundings, model: str, traffic: Traffic, *, json: bool) -> None:
    """One closed loop against the broker that is there."""
    npz, rows, in_flight = traffic.npz, traffic.rows, traffic.in_flight
    with closing(surroundings.client()) as client:
        served = signature(client, model)
        blocks = [sources.load_arrays(npz, npz.stem)] if npz else random_blocks(served, rows)
        cpu = CpuClock({"client": os.getpid(), **pids(client.status())})
        tally = closed_loop(
            client, model, blocks, in_flight=in_flight, seconds=traffic.seconds, timeout_s=traffic.timeout_s
        )
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
    if tally.cut_short:
        typer.echo(f"cut short after {tally.elapsed_s:.2f} s: {FAILURES_MAX} requests failed", err=True)
    if tally.cut_short or not tally.latencies_s:
        raise typer.Exit(FAILURE)


def _show(figures: Mapping[str, Any]) -> None:
    single = ("requests", "seconds", "requests_per_s", "rows_per_s")
    rows = [(name, figures[name]) for name in single]
    rows += [(f"{name} ms", value) for name, value in figures["latency_ms"].items()]
    rows += [(f"error {code}", count) for code, count in figures["errors"].items()]
    rows += [(f"cores {name}", value) for name, value in figures["cores"].items()]
    title = f"{figures['model']}: {figures['in_flight']} in flight, {figures['rows']} rows each"
    printing.show_table(title, ("figure", "value"), rows)


def _swept(surroundings: Surroundings, planned: Plan, flags: Flags, *, json: bool) -> None:
    from mxpool.cli.sweep import picture, report  # noqa: PLC0415 - no other command needs them
    from mxpool.cli.sweep.run import Sweep  # noqa: PLC0415

    running = Sweep(planned, surroundings, lambda line: typer.echo(line, err=True))
    running.run()
    told = running.told()
    if json:
        printing.show_json(told)
    else:
        report.show(told)
    if flags.csv is not None:
        report.write_csv(flags.csv, told["combinations"])
    if flags.plot is not None:
        picture.write(flags.plot, told)
    if running.interrupted:
        typer.echo("interrupted: the figures end here", err=True)
    if running.interrupted or told["recommended"]["workers"] is None:
        raise typer.Exit(FAILURE)
