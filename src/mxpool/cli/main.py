"""``mxpool``: look at a broker, use it, and check what it would serve."""

from __future__ import annotations

from typing import Annotated

import typer

from mxpool.cli import asking, check, infer, measure, push
from mxpool.cli.surroundings import set_endpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def common(
    ctx: typer.Context,
    endpoint: Annotated[
        str | None, typer.Option("-e", "--endpoint", help="Where the broker is; over MX_BROKER_ENDPOINT.")
    ] = None,
) -> None:
    """Work with an mxpool broker.

    Exit codes: 0 done, 1 failed, 2 bad config or usage, 3 no broker there, 4 refused by the broker.
    """
    set_endpoint(ctx, endpoint)


app.command("check")(check.check)
app.command("status")(asking.status)
app.command("models")(asking.models)
app.command("infer")(infer.infer)
app.command("push")(push.push)
app.command("bench")(measure.measure)
app.command("slots")(asking.slots)
app.command("drain")(asking.drain)


def main() -> None:
    """Entry point of ``mxpool``."""
    app()
