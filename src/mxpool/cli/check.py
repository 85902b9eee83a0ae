"""``mxpool check``: would this config be served here? Each model is loaded once, by a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mxpool.cli import printing, startup
from mxpool.cli.exits import FAILURE, OK, reported
from mxpool.cli.flags import Json
from mxpool.cli.surroundings import Found, Surroundings, around
from mxpool.config import Config, ModelConfig
from mxpool.errors import MxPoolError, SharedMemoryShort
from mxpool.shm.layout import SlotLayout
from mxpool.shm.segment import SHM_DIRECTORY


@reported()
def check(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(help="The TOML file to check.")],
    timeout: Annotated[float | None, typer.Option(help="Seconds for each model; default: its load_timeout_ms.")] = None,
    json: Json = False,
) -> None:
    """Check a config file, load each of its models once on each kind of device, and add up shared memory.

    Exit codes: 0 all can be served, 1 a model or the memory for it is missing, 2 the file is not as allowed.
    """
    surroundings = around(ctx)
    settled = startup.from_file(config, surroundings.argument, surroundings.environ)
    loaded = [_model_rows(name, model, settled, surroundings, timeout) for name, model in settled.models.items()]
    rows = [row for rows_of_model in loaded for row in rows_of_model]
    report = _report(settled, rows, _free_bytes())
    if json:
        printing.show_json(report)
    else:
        _show(report)
    raise typer.Exit(OK if report["ok"] else FAILURE)


def _model_rows(
    name: str, model: ModelConfig, config: Config, surroundings: Surroundings, timeout_s: float | None
) -> list[dict[str, Any]]:
    """One row for each kind of device that the model has workers on."""
    kinds: dict[str, str] = {}
    for device in model.workers:
        kinds.setdefault(config.devices[device].kind, device)
    rows: list[dict[str, Any]] = []
    for device in kinds.values():
        row: dict[str, Any] = {"model": name, "device": device, "path": model.path, "slots": model.slot_count}
        try:
            spec = model.spec(name, config.devices[device])
            found = surroundings.probe(spec, timeout_s or model.load_timeout_ms / 1000)
            rows.append(row | _figures(model, found))
        except MxPoolError as error:
            rows.append(row | {"error": {"code": error.code, "message": error.message}})
    return rows


def _figures(model: ModelConfig, found: Found) -> dict[str, Any]:
    signature = found.signature
    return {
        "inputs": [printing.tensor_text(spec.name, spec.datatype, spec.dims) for spec in signature.inputs],
        "outputs": [printing.tensor_text(spec.name, spec.datatype, spec.dims) for spec in signature.outputs],
        "max_batch_size": signature.max_batch_size,
        "segment_bytes": SlotLayout(signature, model.slot_count).size_bytes,
        "report": found.report,
    }


def _free_bytes() -> int:
    room = os.statvfs(SHM_DIRECTORY)
    return room.f_bavail * room.f_frsize


def _report(config: Config, rows: list[dict[str, Any]], free_bytes: int) -> dict[str, Any]:
    """What is printed. A model has one segment, however many kinds of device run it."""
    segments = {row["model"]: row["segment_bytes"] for row in rows if "segment_bytes" in row}
    needed_bytes = sum(segments.values())
    return {
        "ok": needed_bytes <= free_bytes and not any("error" in row for row in rows),
        "endpoints": list(config.broker.endpoints),
        "models": rows,
        "shm": {"needed_bytes": needed_bytes, "free_bytes": free_bytes},
    }


def _show(report: Mapping[str, Any]) -> None:
    columns = ("model", "device", "inputs", "outputs", "batch", "slots", "segment bytes", "result")
    printing.show_table("", columns, (_shown(row) for row in report["models"]))
    needed_bytes, free_bytes = report["shm"]["needed_bytes"], report["shm"]["free_bytes"]
    typer.echo(f"shared memory: {needed_bytes:,} bytes needed, {free_bytes:,} free in {SHM_DIRECTORY}")
    if needed_bytes > free_bytes:
        typer.echo(str(SharedMemoryShort(needed_bytes=needed_bytes, free_bytes=free_bytes)), err=True)
    for row in report["models"]:
        if "error" in row:
            typer.echo(
                f"{row['model']} on {row['device']}: {row['error']['code']}: {row['error']['message']}", err=True
            )


def _shown(row: Mapping[str, Any]) -> list[Any]:
    tensors = ["\n".join(row.get(side, ())) or None for side in ("inputs", "outputs")]
    result = row["error"]["code"] if "error" in row else "ok"
    batch = row.get("max_batch_size")
    return [row["model"], row["device"], *tensors, batch, row["slots"], row.get("segment_bytes"), result]
