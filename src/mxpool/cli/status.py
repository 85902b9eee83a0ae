"""``mxpool status``: what the broker counts, and whether all that it serves is ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Annotated, Any

import typer

from mxpool.cli import printing
from mxpool.cli.exits import FAILURE, reported
from mxpool.cli.flags import Json
from mxpool.cli.surroundings import Surroundings, around
from mxpool.errors import MxPoolError

POLL_S = 0.1


@reported()
def status(
    ctx: typer.Context,
    wait_ready: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="First wait until every model is ready; exit 1 if not.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the broker, its models and its workers."""
    surroundings = around(ctx)
    if wait_ready is not None:
        _await_ready(surroundings, wait_ready)
    with closing(surroundings.client()) as client:
        answer = client.status()
    if json:
        printing.show_json(answer)
        return
    broker = answer.get("broker", {})
    printing.show_table("broker", ("counter", "value"), ((key, _text(value)) for key, value in broker.items()))
    printing.show_table("models", ("model", *MODEL_COLUMNS, "reason"), _model_rows(answer.get("models", {})))
    printing.show_table("workers", ("model", *WORKER_COLUMNS), _worker_rows(answer.get("models", {})))
    graphs = list(_graph_rows(answer.get("models", {})))
    if graphs:
        printing.show_table("device graphs", ("worker", *GRAPH_COLUMNS, "reason"), graphs)


MODEL_COLUMNS = ("state", "received", "ok", "rejected", "expired", "cancelled", "failed", "worker_died", "queue_depth",
                 "batches", "batch_rows", "padding_rows", "dead_rows")  # fmt: skip
WORKER_COLUMNS = ("worker", "device", "pid", "state", "restarts", "in_flight", "batches")


GRAPH_COLUMNS = ("graph", "setting", "sizes", "capture_ms", "lanes", "host", "model: hit", "miss", "off")


def _text(value: Any) -> str:
    """Pids and epochs are names, not amounts: without separators."""
    return str(value)


def _model_rows(models: Mapping[str, Any]) -> Iterator[list[Any]]:
    for name, model in models.items():
        yield [name, *(model.get(column) for column in MODEL_COLUMNS), model.get("reason") or None]


def _worker_rows(models: Mapping[str, Any]) -> Iterator[list[Any]]:
    for name, model in models.items():
        for worker in model.get("workers", []):
            texts = {**worker, "pid": _text(worker.get("pid", "-"))}
            yield [name, *(texts.get(column) for column in WORKER_COLUMNS)]


def _graph_rows(models: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Workers of devices: what they replay, or why they do not; how the batches of their model ran."""
    for model in models.values():
        counts = model.get("graph", {})
        for worker in model.get("workers", []):
            report = worker.get("report", {})
            if "graph_setting" not in report:
                continue
            sizes = ", ".join(map(str, report.get("graph_sizes", [])))
            failure = report.get("graph_failure", {})
            told = [report.get(key) for key in ("capture_ms", "lanes", "host")]
            counted = [counts.get(word) for word in ("hit", "miss", "off")]
            yield [
                worker.get("worker"),
                report["graph"],
                report["graph_setting"],
                sizes,
                *told,
                *counted,
                _why(failure),
            ]


def _why(failure: Mapping[str, Any]) -> str | None:
    """A failed capture in words: size, node, reason."""
    if not failure:
        return None
    where = [f"at {failure['size']} rows"] if failure.get("size") else []
    node = [f"node {failure['node']}"] if failure.get("node") else []
    return ", ".join([*where, *node, str(failure.get("reason", ""))])


def _await_ready(surroundings: Surroundings, seconds: float) -> None:
    """Ask until every model is ready; a broker that is not there yet counts as not ready."""
    end_s = surroundings.clock() + seconds
    while True:
        state = _readiness(surroundings)
        if state is None:
            return
        if surroundings.clock() >= end_s:
            typer.echo(f"not ready after {seconds:g} s: {state}", err=True)
            raise typer.Exit(FAILURE)
        surroundings.pause(POLL_S)


def _readiness(surroundings: Surroundings) -> str | None:
    """None if all is ready, else what is not."""
    try:
        with closing(surroundings.client()) as client:
            answer = client.control("ready")
    except MxPoolError as error:
        if not error.retryable:
            raise
        return str(error)
    waiting = [f"{name} is {state}" for name, state in answer.get("models", {}).items() if state != "ready"]
    return None if answer.get("ready") else ", ".join(waiting) or "no model is ready"
