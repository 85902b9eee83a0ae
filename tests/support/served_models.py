"""A served model without processes: real core, slots and counters; jobs are kept instead of sent."""

from __future__ import annotations

from typing import Any

from recorded_front import RecordedFront

from mxpool import messages
from mxpool.broker.served import ServedModel
from mxpool.config import build
from mxpool.shm.layout import SlotLayout
from mxpool.shm.segment import Segment
from mxpool.tensors import Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("a", "FP32", (3,)), TensorSpec("b", "INT64", ())), (TensorSpec("y", "FP32", (2,)),), 8
)
EPOCH = 99


class Jobs:
    """Implements ``served.Dispatcher``."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, messages.Run]] = []
        self.killed: list[tuple[str, str]] = []

    def run(self, worker: str, job: messages.Run) -> None:
        self.sent.append((worker, job))

    def kill(self, worker: str, reason: str) -> None:
        self.killed.append((worker, reason))


def served(name: str = "ranking", *, front: RecordedFront, jobs: Jobs, **keys: Any) -> ServedModel:
    """A model that is loading; ``keys`` are its config's."""
    config = build({"models": {name: {"path": f"/models/{name}.onnx", **keys}}}, "test")
    return ServedModel(name, config.models[name], EPOCH, front.send, jobs)


def open_slots(model: ServedModel, slots: int = 4, signature: Signature = SIGNATURE) -> None:
    """Give it slots, as its first worker's signature would; close the model at the end."""
    layout = SlotLayout(signature, slots)
    model.signature = signature
    model.open(layout, Segment.create(layout.size_bytes))
