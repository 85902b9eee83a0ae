"""``mxpool``: look at a broker, use it, and check what it would serve."""

from __future__ import annotations

from typing import Annotated

import typer

from mxpool.cli import bench, check, drain, infer, models, push, slots, status
from mxpool.cli.surroundings import set_endpoint
from mxpool.cli.verify import command as verify

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
app.command("status")(status.status)
app.command("models")(models.models)
app.command("infer")(infer.infer)
app.command("push")(push.push)
app.command("bench")(bench.bench)
app.command("verify")(verify.verify)
app.command("slots")(slots.slots)
app.command("drain")(drain.drain)


def main() -> None:
    """Entry point of ``mxpool``."""
    app()


if __name__ == "__main__":
    main()
