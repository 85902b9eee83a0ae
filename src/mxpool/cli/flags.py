"""Flags and arguments that several commands of ``mxpool`` take."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(help="Name of a model.")]
Timeout = Annotated[float, typer.Option(help="Seconds until a request is given up.", min=0.001)]
InFlight = Annotated[int, typer.Option(help="Requests under way at once.", min=1, max=65_536)]
