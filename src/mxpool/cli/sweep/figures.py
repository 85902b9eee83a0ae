"""The figures of one phase: what the clients counted, what the broker counted meanwhile, and the CPU it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxpool.cli.sweep.clients import Load
from mxpool.cli.sweep.cpu_samples import rank
from mxpool.histogram import between, percentile

CLIENT_BOUND = 0.9  # of a core: a client that uses more has nothing left to send with
MACHINE_BOUND = 0.95  # of all cores
LATE_SHARE = 0.1  # of the requests: beyond it the client did not keep its schedule
DRAIN_SHARE, DRAIN_S = 0.05, 0.1  # of the run, and beside: the answers that come after it, if the broker keeps up


def load_figures(load: Load) -> dict[str, Any]:
    """Rates, latencies in milliseconds and errors."""
    points = {f"p{percent}": percentile(load.latency_us, percent) for percent in (50, 90, 99)}
    return {
        "requests": load.requests,
        "seconds": round(load.seconds, 3),
        "requests_per_s": round(load.requests_per_s, 1),
        "rows_per_s": round(load.rows_per_s, 1),
        "latency_ms": {name: None if us is None else us / 1000 for name, us in points.items()},
        "errors": dict(load.errors),
        "cut_short": load.cut_short,
    }


def offered_figures(load: Load, seconds: float) -> dict[str, Any]:
    """How the schedule was kept: by the client that sends, and by the broker that answers.

    ``kept_up``: nearly all answers had come when the schedule ended; a queue that grows is not answered by then.
    """
    return {
        "offered_per_s": round(load.sent / seconds, 1),
        "late": load.late,
        "fell_behind": load.late > LATE_SHARE * load.sent,
        "kept_up": not load.errors and load.seconds <= seconds * (1 + DRAIN_SHARE) + DRAIN_S,
    }


def cpu_figures(
    percents: Sequence[float], cores: Mapping[str, float], clients: Sequence[str], cores_here: int
) -> dict[str, Any]:
    """CPU of broker and workers: mean and 99th percentile of samples, in percent of one core; then cores by process."""
    used = {name: round(value, 3) for name, value in cores.items()}
    workers = [name for name in used if name != "broker" and name not in clients]
    groups = {"broker": ["broker"], "workers": workers, "clients": clients}
    sums = {name: round(sum(used.get(each, 0.0) for each in group), 3) for name, group in groups.items()}
    return {
        "cpu_percent": {
            "mean": round(sum(percents) / len(percents), 1) if percents else None,
            "p99": None if not percents else round(rank(percents, 99) or 0.0, 1),
        },
        "cores": sums,
        "cores_by_process": used,
        "client_bound": any(used.get(name, 0.0) >= CLIENT_BOUND for name in clients),
        "machine_bound": sum(used.values()) >= MACHINE_BOUND * cores_here,
    }


def broker_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What the broker counted of a model between two looks at its status; times in microseconds."""
    batches = after["batches"] - before["batches"]
    rows = after["batch_rows"] - before["batch_rows"]
    return {
        **{name: _points(before[name]["buckets"], after[name]["buckets"]) for name in ("run_us", "oldest_queue_us")},
        "batches": batches,
        "rows_per_batch": round(rows / batches, 1) if batches else None,
        "graph": {name: count - before["graph"].get(name, 0) for name, count in after["graph"].items()},
        "restarts": _restarts(after) - _restarts(before),
    }


def _points(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> dict[str, int | None]:
    counted = between(before, after)
    return {"p50": percentile(counted, 50), "p99": percentile(counted, 99)}


def _restarts(model: Mapping[str, Any]) -> int:
    return sum(worker["restarts"] for worker in model["workers"])
