"""How checks ask: one model of one broker, with a count of what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mxpool.cli.surroundings import Arrays, Calls, rows_of
from mxpool.cli.verify.difference import Noise, difference, worst

RUNS = 3


@dataclass(slots=True)
class Asked:
    """A model as its clients see it. ``sent`` counts requests, and ``rows`` their rows: others have run the rest."""

    client: Calls
    model: str
    timeout_s: float = 30.0
    connect: Callable[[], Calls] | None = None
    batched: bool = True
    sent: int = 0
    rows: int = 0
    noise: Noise = field(default_factory=Noise)
    coupled: bool = False

    def infer(self, arrays: Arrays) -> Arrays:
        """One request alone."""
        self._count(arrays)
        return self.client.infer(self.model, arrays, timeout_s=self.timeout_s)

    def push(self, requests: Iterable[Arrays], in_flight: int) -> Iterator[Arrays]:
        """Many at once; answers in order."""
        return self.client.push(self.model, self._counted(requests), in_flight=in_flight, timeout_s=self.timeout_s)

    def _counted(self, requests: Iterable[Arrays]) -> Iterator[Arrays]:
        for request in requests:
            self._count(request)
            yield request

    def _count(self, request: Arrays) -> None:
        self.sent += 1
        self.rows += rows_of(request, batched=self.batched)

    def stats(self) -> dict[str, Any]:
        """What the broker counts of the model."""
        found: dict[str, Any] = self.client.status()["models"][self.model]
        return found

    def workers(self) -> list[dict[str, Any]]:
        """The model's workers that are ready."""
        return [worker for worker in self.stats().get("workers", []) if worker.get("state") == "ready"]

    def slots(self) -> list[dict[str, Any]]:
        """What lies in the model's slots."""
        return list(self.client.control("slots", self.model)["slots"])

    def measure(self, request: Arrays) -> Noise:
        """How far the answers to one request, asked some times, are from each other."""
        first = self.infer(request)
        return Noise(worst(difference(first, self.infer(request)) for _ in range(RUNS - 1)).relative)


def graph_is_on(worker: dict[str, Any]) -> bool:
    """True if ``worker`` replays a captured graph."""
    return bool(worker.get("report", {}).get("graph") == "on")


def sizes_of(workers: Iterable[dict[str, Any]]) -> list[int]:
    """Batch sizes that any of ``workers`` runs, ascending."""
    return sorted({size for worker in workers for size in worker.get("report", {}).get("sizes", [])})


def captured(workers: Iterable[dict[str, Any]]) -> list[int]:
    """Batch sizes at which any of ``workers`` replays a graph, ascending."""
    return sorted({size for worker in workers for size in worker.get("report", {}).get("graph_sizes", [])})
