"""A closed loop of requests, and what it measures. The time is passed in."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from mxpool.cli.surroundings import Arrays, Calls
from mxpool.errors import BrokerLost, ClientUnusable, MxPoolError
from mxpool.tensors import Signature, TensorSpec

FAILURES_MAX = 100  # a broker that refuses everything is not measured by asking it for all of the time
BLOCKS = 16  # different inputs, so that no cache sees the same bytes each time


@dataclass(slots=True)
class Tally:
    """What a run counted: latencies of answered requests in seconds, failures by error code.

    ``cut_short``: it ended before its time, since FAILURES_MAX requests had failed.
    """

    latencies_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    cut_short: bool = False

    def figures(self, rows: int) -> dict[str, Any]:
        """Rates and percentiles, for requests of ``rows`` rows; latencies in milliseconds, None without any."""
        count, seconds = len(self.latencies_s), max(self.elapsed_s, 1e-9)
        points = np.percentile(self.latencies_s, [50, 90, 99]) * 1000 if count else [None] * 3
        return {
            "requests": count,
            "seconds": round(self.elapsed_s, 3),
            "requests_per_s": round(count / seconds, 1),
            "rows_per_s": round(count * rows / seconds, 1),
            "latency_ms": {
                name: None if point is None else round(float(point), 3)
                for name, point in zip(("p50", "p90", "p99"), points, strict=True)
            },
            "errors": dict(self.failures),
            "cut_short": self.cut_short,
        }


def closed_loop(
    client: Calls,
    model: str,
    blocks: list[Arrays],
    *,
    in_flight: int,
    seconds: float,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Keep ``in_flight`` requests under way for ``seconds``, each sent as soon as another is answered.

    A latency runs from handing a request to the client to getting its answer in order. A request that fails ends
    those sent with it; the loop goes on, up to FAILURES_MAX times.

    Raises:
        BrokerLost, ClientUnusable: there is nothing left to measure.
    """
    tally, start_s = Tally(), clock()
    end_s = start_s + seconds
    while clock() < end_s and tally.failures.total() < FAILURES_MAX:
        sent_s: deque[float] = deque()
        try:
            feed = _feed(blocks, sent_s, end_s, clock)
            for _ in client.push(model, feed, in_flight=in_flight, timeout_s=timeout_s):
                tally.latencies_s.append(clock() - sent_s.popleft())
        except (BrokerLost, ClientUnusable):
            raise
        except MxPoolError as error:
            tally.failures[error.code] += 1
    tally.elapsed_s = clock() - start_s
    tally.cut_short = tally.failures.total() >= FAILURES_MAX and clock() < end_s
    return tally


def _feed(blocks: list[Arrays], sent_s: deque[float], end_s: float, clock: Callable[[], float]) -> Iterator[Arrays]:
    """The blocks in turn until ``end_s``; notes when each was taken."""
    index = 0
    while (now_s := clock()) < end_s:
        sent_s.append(now_s)
        yield blocks[index % len(blocks)]
        index += 1


def random_blocks(signature: Signature, rows: int, seed: int = 0) -> list[Arrays]:
    """Inputs that fit ``signature``: floats in [0, 1), integers 0 or 1 (any table has those indices)."""
    generator = np.random.default_rng(seed)

    def tensor(spec: TensorSpec) -> Any:
        shape = signature.shape(spec, rows)
        if spec.dtype.kind == "f":
            return generator.random(shape, np.float32).astype(spec.dtype)
        return generator.integers(0, 2, shape).astype(spec.dtype)

    return [{spec.name: tensor(spec) for spec in signature.inputs} for _ in range(BLOCKS)]


class CpuClock:
    """CPU seconds of processes, by name; a process that is gone or not ours to see is left out."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Note the present CPU seconds of ``pids``."""
        self._processes = {name: _process(pid) for name, pid in pids.items()}
        self._before = {name: _cpu_s(process) for name, process in self._processes.items()}

    def cores(self, elapsed_s: float) -> dict[str, float]:
        """Cores that each used since the start, on average over ``elapsed_s``."""
        used = {name: _cpu_s(process) - self._before[name] for name, process in self._processes.items()}
        return {name: round(cpu_s / max(elapsed_s, 1e-9), 3) for name, cpu_s in used.items() if not math.isnan(cpu_s)}


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except (psutil.Error, ValueError):
        return None


def _cpu_s(process: psutil.Process | None) -> float:
    try:
        times = process.cpu_times() if process else None
    except psutil.Error:
        times = None
    return math.nan if times is None else float(times.user + times.system)


def pids(status: Mapping[str, Any]) -> dict[str, int]:
    """Process ids of the broker and its workers, by name, from ``Client.status``."""
    found = {"broker": status.get("broker", {}).get("pid")}
    for model in status.get("models", {}).values():
        found.update({worker.get("worker"): worker.get("pid") for worker in model.get("workers", [])})
    return {str(name): pid for name, pid in found.items() if isinstance(pid, int) and pid > 0}
