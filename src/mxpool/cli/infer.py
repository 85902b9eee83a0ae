"""``mxpool infer``: one request from files."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from mxpool.cli import answers, printing, sources
from mxpool.cli.exits import BadSource, reported
from mxpool.cli.flags import Json, Model, Timeout
from mxpool.cli.surroundings import Arrays, around, rows_of, signature


@reported()
def infer(
    ctx: typer.Context,
    model: Model,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="One input; once for each.")
    ] = None,
    npz: Annotated[Path | None, typer.Option(help="All inputs, by name.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the outputs: .npz or .jsonl.")] = None,
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Send one request, and show what comes back. Arrays carry the batch axis, if the model has one."""
    arrays = _given(inputs or [], npz)
    with closing(around(ctx).client()) as client:
        batched = signature(client, model).batched
        with answers.open_answers(output, batched=batched) as file:
            started_s = time.monotonic()
            found = client.infer(model, arrays, timeout_s=timeout)
            elapsed_ms = (time.monotonic() - started_s) * 1000
            labels = [str(npz or model)] * rows_of(found, batched=batched)
            file.add(labels, found)
    if json:
        outputs = {name: {"dtype": str(one.dtype), "shape": one.shape, "values": one} for name, one in found.items()}
        printing.show_json({"model": model, "ms": round(elapsed_ms, 3), "outputs": outputs})
        return
    rows = [[name, str(array.dtype), str(list(array.shape)), _summary(array)] for name, array in found.items()]
    printing.show_table(f"{model}: {elapsed_ms:.1f} ms", ("output", "dtype", "shape", "values"), rows)


def _given(inputs: list[str], npz: Path | None) -> Arrays:
    """The arrays of --input and --npz together."""
    arrays = sources.load_arrays(npz, npz.stem) if npz else {}
    for text in inputs:
        name, found, file = text.partition("=")
        if not found or name in arrays:
            raise BadSource(f"--input {text!r}: not NAME=FILE.npy" if not found else f"input {name!r} is given twice")
        loaded = sources.load_arrays(Path(file), name)
        if list(loaded) != [name]:
            raise BadSource(f"{file}: --input takes a .npy file; use --npz for an archive")
        arrays |= loaded
    if not arrays:
        raise BadSource("give --input NAME=FILE.npy or --npz FILE.npz")
    return arrays


def _summary(array: Any) -> str:
    """The first values, and the range where there are more."""
    flat = array.reshape(-1)
    first = ", ".join(f"{value:.6g}" for value in flat[:6])
    return first if flat.size <= 6 else f"{first}, … ({flat.min():.6g} to {flat.max():.6g})"
