"""``mxpool slots``: what lies in a model's shared memory."""

from __future__ import annotations

from contextlib import closing

import typer

from mxpool.cli import printing
from mxpool.cli.exits import reported
from mxpool.cli.flags import Json, Model
from mxpool.cli.surroundings import around, naming_models

SLOT_COLUMNS = ("slot", "state", "generation", "requests", "rows", "worker", "held_us")


@reported()
def slots(ctx: typer.Context, model: Model, json: Json = False) -> None:
    """Show what each slot of a model's shared memory holds."""
    with closing(around(ctx).client()) as client, naming_models(client):
        answer = client.control("slots", model)
    if json:
        printing.show_json(answer)
        return
    rows = ([slot.get(column) for column in SLOT_COLUMNS] for slot in answer.get("slots", []))
    printing.show_table(model, SLOT_COLUMNS, rows)
