"""The command ``mxpool verify``: flags in, a table or JSON out, and an exit code."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from mxpool.cli import printing, sources
from mxpool.cli.exits import FAILURE, reported
from mxpool.cli.flags import Json, Model, Timeout
from mxpool.cli.surroundings import around, signature
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import all_passed
from mxpool.cli.verify.run import Verification

COLUMNS = ("check", "compared", "result", "detail")


@reported()
def verify(
    ctx: typer.Context,
    model: Model,
    soak: Annotated[float, typer.Option(metavar="MINUTES", help="Also load it that long, and watch.", min=0)] = 0.0,
    npz: Annotated[Path | None, typer.Option(help="Draw rows from this file's arrays, not at random.")] = None,
    clients: Annotated[int, typer.Option(help="Clients at once in the check of that name.", min=1, max=256)] = 4,
    timeout: Timeout = 30.0,
    load_timeout: Annotated[float, typer.Option(help="Seconds for a private worker to load.", min=0.001)] = 120.0,
    json: Json = False,
) -> None:
    """Check a model that is being served: graph on against off, stale answers, mixed-up rows, coupled rows.

    Where a worker replays a graph, the broker starts one private worker without it, for the time of the comparison;
    that takes an administrator. Exit code 1 if a check failed; what was skipped or noted is no failure.
    """
    surroundings = around(ctx)
    with closing(surroundings.client()) as client:
        real = sources.load_arrays(npz, npz.stem) if npz else None
        material = Material(signature(client, model), real)
        run = Verification(
            surroundings,
            client,
            model,
            material,
            timeout_s=timeout,
            load_timeout_s=load_timeout,
            clients=clients,
            soak_s=soak * 60,
        )
        finished = _followed(run)
    passed = finished and all_passed(run.outcomes)
    _show(run, passed, json=json)
    if not passed:
        raise typer.Exit(FAILURE)


def _followed(run: Verification) -> bool:
    """Run it, with a line on stderr for each check; False if it was interrupted."""
    try:
        for outcome in run.run():
            typer.echo(f"{outcome.result.value:8}{outcome.check} {outcome.compared}", err=True)
    except KeyboardInterrupt:
        typer.echo("interrupted: the checks end here", err=True)
        return False
    return True


def _show(run: Verification, passed: bool, *, json: bool) -> None:
    if json:
        found = [outcome.to_json() for outcome in run.outcomes]
        samples = [sample.to_json() for sample in run.samples]
        printing.show_json({"model": run.model, "passed": passed, "checks": found, "soak": samples})
        return
    rows = ((one.check, one.compared, one.result.value, one.detail) for one in run.outcomes)
    printing.show_table(f"{run.model}: {'passed' if passed else 'FAILED'}", COLUMNS, rows)
