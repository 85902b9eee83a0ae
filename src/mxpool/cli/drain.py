"""``mxpool drain``: finish what was accepted, take nothing more."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from mxpool.cli import printing
from mxpool.cli.exits import reported
from mxpool.cli.flags import Json
from mxpool.cli.surroundings import around, naming_models


@reported()
def drain(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of a model; without it, the whole broker.")] = "",
    json: Json = False,
) -> None:
    """Let a model, or the broker, finish what it has and take nothing more. Needs a user in admin_users."""
    with closing(around(ctx).client()) as client, naming_models(client):
        answer = client.control("drain", model)
    if json:
        printing.show_json(answer)
    else:
        typer.echo(f"{model or 'the broker'} is draining")
