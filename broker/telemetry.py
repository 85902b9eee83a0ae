"""What is counted, and the record of one batch. Plain integers on the hot path; formatted only when somebody asks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mxpool.broker.batching import CLOSE_REASONS
from mxpool.histogram import Histogram

RECENT_BATCHES = 1024  # batches that the percentiles of status look back on


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. Times in microseconds.

    ``slot_count`` requests with ``batch_samples`` live rows ran as ``padded_batch`` rows. ``oldest_queue_us`` and
    ``avg_queue_us``: arrival to the worker's start. ``merge_us``: padding (rows were placed as they came). ``run_us``:
    the worker's start to end (copy in, execute, copy out). ``split_us``: completion to last send. ``queue_depth``:
    requests that waited after this batch was taken. ``graph``: hit, miss or off. ``close``: why it was closed.
    """

    model: str
    worker: str
    slot_count: int
    batch_samples: int
    padded_batch: int
    oldest_queue_us: int
    avg_queue_us: int
    merge_us: int
    run_us: int
    split_us: int
    queue_depth: int
    graph: str
    close: str

    def __str__(self) -> str:
        return " ".join(f"{item.name}={getattr(self, item.name)}" for item in fields(self))


OUTCOMES = ("ok", "rejected", "expired", "cancelled", "failed", "worker_died", "client_gone")


@dataclass(slots=True)
class ModelCounters:
    """Counters of one model since the broker's start.

    ``received`` requests equal the sum of the ``outcomes`` and of those still without one. ``batch_rows`` counts live
    rows that ran, ``dead_rows`` those whose request was over before they ran, ``padding_rows`` the rest.
    """

    received: int = 0
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    batches: int = 0
    batch_rows: int = 0
    padding_rows: int = 0
    dead_rows: int = 0
    stale_completions: int = 0
    close: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CLOSE_REASONS, 0)))
    graph: Counter[str] = field(default_factory=lambda: Counter({"off": 0, "hit": 0, "miss": 0}))
    recent_run_us: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))
    recent_queue_us: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))
    run_us: Histogram = field(default_factory=Histogram)
    oldest_queue_us: Histogram = field(default_factory=Histogram)
    last_batch: BatchRecord | None = None

    def batch(self, record: BatchRecord, rows: int, *, failed: bool = False) -> None:
        """Count one batch of ``rows`` placed rows. Of one that failed nobody knows how far its graph came."""
        self.batches += 1
        self.batch_rows += record.batch_samples
        self.dead_rows += rows - record.batch_samples
        self.padding_rows += record.padded_batch - rows
        self.close[record.close] += 1
        if not failed:
            self.graph[record.graph] += 1
        self.recent_run_us.append(record.run_us)
        self.recent_queue_us.append(record.oldest_queue_us)
        self.run_us.add(record.run_us)
        self.oldest_queue_us.add(record.oldest_queue_us)
        self.last_batch = record

    def to_wire(self) -> dict[str, Any]:
        """A MessagePack-able map for the ``stats`` verb.

        ``run_us`` and ``oldest_queue_us`` hold p50 and p99 of the last batches, and all batches as ``buckets``: see
        ``mxpool.histogram``.
        """
        return {
            "received": self.received,
            **self.outcomes,
            "batches": self.batches,
            "batch_rows": self.batch_rows,
            "padding_rows": self.padding_rows,
            "dead_rows": self.dead_rows,
            "stale_completions": self.stale_completions,
            "close": dict(self.close),
            "graph": dict(self.graph),
            "run_us": {**percentiles(self.recent_run_us), "buckets": self.run_us.to_wire()},
            "oldest_queue_us": {**percentiles(self.recent_queue_us), "buckets": self.oldest_queue_us.to_wire()},
            "last_batch": asdict(self.last_batch) if self.last_batch else None,
        }


def percentiles(recent: deque[int]) -> dict[str, int]:
    """p50 and p99 of ``recent``; empty without one."""
    if not recent:
        return {}
    ordered = sorted(recent)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]}
