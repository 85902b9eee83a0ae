"""``mxpool models``: what the broker serves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import typer

from mxpool.cli import printing
from mxpool.cli.exits import reported
from mxpool.cli.flags import Json
from mxpool.cli.surroundings import around
from mxpool.errors import MxPoolError


@reported()
def models(ctx: typer.Context, json: Json = False) -> None:
    """List the models, with the tensors of those that are loaded."""
    with closing(around(ctx).client()) as client:
        found = {name: _described(client.metadata, name) for name in client.models()}
    if json:
        printing.show_json(found)
        return
    rows = [
        [name, about.get("state"), about.get("max_batch_size"), _tensors(about, "inputs"), _tensors(about, "outputs")]
        for name, about in found.items()
    ]
    printing.show_table("", ("model", "state", "batch", "inputs", "outputs"), rows)


def _described(metadata: Any, name: str) -> dict[str, Any]:
    """The metadata of a model, or why there is none yet."""
    try:
        return dict(metadata(name))
    except MxPoolError as error:
        if not error.retryable:
            raise
        return {"name": name, "state": error.message}


def _tensors(about: Mapping[str, Any], side: str) -> str | None:
    return "\n".join(printing.tensor_text(*tensor) for tensor in about.get(side, [])) or None
