"""A client for the checks of ``mxpool verify``: a model ``y = 2x + 1`` in this process, which a test can spoil."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.cli.surroundings import Arrays, rows_of
from mxpool.cli.verify.asking import Asked
from mxpool.cli.verify.material import Material
from mxpool.errors import Rejected, UnknownModel
from mxpool.histogram import Histogram
from mxpool.tensors import Signature, TensorSpec

LEARNED = 4 * (1 + 2 + 4 + 8 + 16)  # requests by which a check learns four blocks at every batch size
MODEL, PLAIN = "ranking", "ranking@plain"
WIDE = Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),), 16)


@dataclass(slots=True)
class Call:
    """One request: its number from 0, and how many were under way with it."""

    model: str
    number: int
    arrays: Arrays
    at_once: int


Answer = Callable[[Call], Arrays]


def right(call: Call) -> Arrays:
    """What the model says."""
    return {"y": call.arrays["x"] * 2 + 1}


@dataclass
class VerifiedModel:
    """``answer`` may lie. ``graph``: whether the workers say that they replay, and ``replays``: whether they do.

    ``busy`` of the ``workers`` take part. ``resting`` are slots that are never used. ``run_us`` is what a batch takes.
    """

    answer: Answer = right
    signature: Signature = WIDE
    graph: bool = False
    workers: int = 1
    busy: int | None = None
    slots: int = 4
    resting: list[int] = field(default_factory=list)
    run_us: Callable[[int], int] = lambda _: 500
    refusals: dict[str, Exception] = field(default_factory=dict)
    replays: bool = True
    calls: int = 0
    verbs: list[tuple[str, str]] = field(default_factory=list)
    histogram: Histogram = field(default_factory=Histogram)
    ran: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    closed: int = 0
    rows: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    state: str = "ready"
    deaths: int = 0
    connections_max: int = 1_000
    connections: int = 0

    def infer(self, model: str, arrays: Mapping[str, npt.NDArray[Any]], *, timeout_s: float) -> Arrays:
        return next(iter(self.push(model, [arrays], in_flight=1, timeout_s=timeout_s)))

    def push(
        self, model: str, frames: Iterable[Mapping[str, npt.NDArray[Any]]], *, in_flight: int, timeout_s: float
    ) -> Iterator[Arrays]:
        assert model in (MODEL, PLAIN)
        assert timeout_s > 0
        waiting = iter(frames)
        while group := list(itertools.islice(waiting, in_flight)):
            for frame in group:
                with self.lock:  # several clients are threads over one model
                    call = Call(model, self.calls, {name: np.array(array) for name, array in frame.items()}, len(group))
                    self.calls += 1
                    self.ran[model] = self.ran.get(model, 0) + 1
                    if model == MODEL:
                        self.rows += rows_of(call.arrays, batched=self.signature.batched)
                    self.histogram.add(self.run_us(self.calls))
                    answer = self.answer(call)
                yield answer

    def status(self) -> dict[str, Any]:
        return {"broker": {"pid": 0}, "models": {MODEL: self._stats()}}

    def _stats(self) -> dict[str, Any]:
        ran = self.ran.get(MODEL, 0)
        sizes = [1, 8, 16] if self.graph else [1, 2, 4, 8, 16]
        asked = {"graph": "prefer", "queue": "shared", "fixed_input_buffers": True, **self.config}
        report: dict[str, Any] = {"graph": "off", "sizes": sizes, "fixed_inputs": asked["fixed_input_buffers"]}
        if self.graph:
            report |= {"graph": "on", "graph_setting": "prefer", "graph_sizes": sizes, "graph_failure": {}}
        count = self.workers if self.busy is None else self.busy
        return {
            "state": self.state,
            "batch_rows": self.rows,
            "config": asked,
            "queue": asked["queue"],
            "graph": {"hit": ran if self.graph and self.replays else 0, "miss": 0, "off": 0},
            "run_us": {"buckets": self.histogram.to_wire()},
            "workers": [
                {
                    "worker": f"r-{number}",
                    "state": "ready",
                    "restarts": self.deaths if self.calls else 0,
                    "batches": ran if number < count else 0,
                    "report": report,
                }
                for number in range(self.workers)
            ],
        }

    def models(self) -> list[str]:
        return [MODEL]

    def metadata(self, model: str) -> dict[str, Any]:
        if model not in (MODEL, PLAIN):
            raise UnknownModel(model=model)
        return {"name": model, "state": "ready", **self.signature.to_wire()}

    def control(self, verb: str, model: str = "", **args: Any) -> dict[str, Any]:
        assert not args
        self.verbs.append((verb, model))
        if verb in self.refusals:
            raise self.refusals[verb]
        if verb == "slots":
            used = [{"slot": slot, "generation": self.calls} for slot in range(self.slots)]
            return {"slots": [*used, *({"slot": slot, "generation": 0} for slot in self.resting)]}
        return {"model": PLAIN} if verb == "reference" else {"released": True}

    def close(self) -> None:
        self.closed += 1

    def asked(self) -> Asked:
        """The served model."""

        def connect() -> VerifiedModel:
            self.connections += 1
            if self.connections > self.connections_max:
                raise Rejected(reason="too many clients")
            return self

        return Asked(self, MODEL, connect=connect)

    def plain(self) -> Asked:
        """Its private worker."""
        return Asked(self, PLAIN)

    def material(self) -> Material:
        """Random inputs."""
        return Material(self.signature)
