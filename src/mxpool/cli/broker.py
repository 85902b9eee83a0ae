"""``mx-broker``: serve the models of a config file, or of flags, until SIGTERM."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from mxpool.cli import logs, startup
from mxpool.cli.exits import BadSource, reported
from mxpool.config import Config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _serve(config: Config) -> int:
    from mxpool.broker.service import run  # noqa: PLC0415 - a bad config is told before the broker is imported

    return run(config)


@dataclass(frozen=True, slots=True)
class Start:
    """What the command needs of the process around it."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    serve: Callable[[Config], int] = _serve


@app.command()
@reported()
def serve(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A TOML file: docs/config.md has every key.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="Serve this file on the CPU, with one worker.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option("-e", "--endpoint", help="Where clients connect.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="With --model: rows of one batch; 0 = one request at a time.")
    ] = None,
    dims: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:INPUT=3x48x192", help="With --model: dims of one row where the file leaves them open."
        ),
    ] = None,
    log_level: Annotated[logs.LogLevel, typer.Option(help="The least that is logged.")] = logs.LogLevel.info,
) -> None:
    """Serve models from one queue each to worker processes, until SIGTERM.

    Priority: flag > environment (MX_BROKER_ENDPOINT, MX_MACA_GRAPH, MX_SHARED_QUEUE, MX_FIXED_INPUT_BUFFERS) > file >
    default. Exit codes: 0 stopped as asked, 1 failed, 2 bad config.
    """
    start: Start = ctx.obj or Start()
    if (config is None) == (not model):
        raise BadSource("give a CONFIG file or --model NAME=PATH, and not both")
    if config is not None:
        if dims or max_batch_size is not None:
            raise BadSource("--dims and --max-batch-size go with --model; in a CONFIG file they are keys of a model")
        settled = startup.from_file(config, endpoint, start.environ)
    else:
        settled = startup.from_flags(model or [], dims or [], max_batch_size, endpoint, start.environ)
    logs.set_up(log_level)
    raise typer.Exit(start.serve(settled))


def main() -> None:
    """Entry point of ``mx-broker``."""
    app()


if __name__ == "__main__":
    main()
