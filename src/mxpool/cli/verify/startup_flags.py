"""Check: what the config asks for is what the workers do, as in the start-up log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mxpool.cli.verify.asking import graph_is_on
from mxpool.cli.verify.outcome import Outcome, Result


def check(stats: Mapping[str, Any]) -> Iterator[Outcome]:
    """``fixed_inputs``, ``maca_graph`` and ``queue_shared`` of one model, from the broker's ``stats`` of it."""
    config = stats.get("config", {})
    workers = [worker for worker in stats.get("workers", []) if worker.get("state") == "ready"]
    if not workers:
        yield Outcome(
            check="workers",
            compared="ready workers",
            result=Result.FAILED,
            detail=str(stats.get("reason") or f"the model is {stats.get('state')}"),
        )
        return
    fixed = bool(config.get("fixed_input_buffers", True))
    yield _fixed_inputs(fixed, workers)
    yield _graph(str(config.get("graph", "prefer")) if fixed else "off", workers)
    asked, shared = config.get("queue", "shared") == "shared", stats.get("queue") == "shared"
    yield Outcome(
        check="queue_shared",
        compared=f"asked {int(asked)}",
        result=Result.OK if asked == shared else Result.FAILED,
        detail=f"queue_shared={int(shared)}",
        figures={"queue_shared": shared},
    )


def _fixed_inputs(fixed: bool, workers: list[dict[str, Any]]) -> Outcome:
    """As every worker says; without them none replays, since a graph would read memory that is not there any more."""
    others = [worker["worker"] for worker in workers if worker.get("report", {}).get("fixed_inputs") is not fixed]
    replaying = [] if fixed else [worker["worker"] for worker in workers if graph_is_on(worker)]
    detail = f"fixed_inputs={int(fixed)}"
    if others:
        detail = f"not so in {', '.join(others)}"
    elif replaying:
        detail = f"a graph is on in {', '.join(replaying)}"
    return Outcome(
        check="fixed_inputs",
        compared=f"asked {int(fixed)}",
        result=Result.FAILED if others or replaying else Result.OK,
        detail=detail,
        figures={"fixed_inputs": fixed},
    )


def _graph(asked: str, workers: list[dict[str, Any]]) -> Outcome:
    """One that is preferred and not on is a note, with its reason; one that is required and not on has failed."""
    on = [worker for worker in workers if graph_is_on(worker)]
    able = [worker for worker in workers if "graph_setting" in worker.get("report", {})]
    figures = {"asked": asked, "on": len(on), "workers": len(workers)}
    if not able and not on:
        result, detail = Result.SKIPPED, "maca_graph=0: these workers have no graph to replay (CPU)"
        if asked == "require":
            result, detail = Result.FAILED, "maca_graph=0: required, and these workers have none"
    elif asked == "off":
        result = Result.FAILED if on else Result.OK
        detail = f"maca_graph={int(bool(on))}"
    elif len(on) == len(workers):
        result, detail = Result.OK, "maca_graph=1"
    else:
        result = Result.FAILED if asked == "require" else Result.NOTE
        detail = f"maca_graph is on in {len(on)} of {len(workers)} workers: {_reason(workers)}"
    return Outcome(check="maca_graph", compared=f"asked {asked}", result=result, detail=detail, figures=figures)


def _reason(workers: list[dict[str, Any]]) -> str:
    for worker in workers:
        failure = worker.get("report", {}).get("graph_failure")
        if failure:
            where = f" at {failure['size']} rows" if failure.get("size") else ""
            node = f", node {failure['node']}" if failure.get("node") else ""
            return f"{worker['worker']}{where}{node}: {failure.get('reason', 'no reason')}"
    return "no reason is told"
