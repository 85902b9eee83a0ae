"""What a worker is told about the model it serves; plain values, so that no worker imports the config's validator."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

BACKENDS = {".onnx": "onnxruntime", ".plan": "tensorrt", ".engine": "tensorrt"}  # by the suffix of the model's file


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model on one device, as sent to a worker in LOAD. Checked by ``config`` before.

    ``dims`` fixes open dims: input name to the dims of one row. ``sizes`` are the batch sizes to prepare, ascending,
    the last one ``max(max_batch_size, 1)``; ``graph_sizes`` those where a device graph is replayed, empty for the
    backend's own choice. ``graph_lost``: why none is tried although ``graph`` prefers one: trying took the device down.
    ``options`` are the backend's own, as strings or numbers.
    """

    name: str
    path: str
    backend: str
    device_kind: str = "cpu"
    device_index: int = 0
    max_batch_size: int = 128
    sizes: tuple[int, ...] = ()
    graph_sizes: tuple[int, ...] = ()
    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    graph: str = "prefer"
    graph_lost: str = ""
    fixed_input_buffers: bool = True
    threads: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """A MessagePack-able map."""
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> ModelSpec:
        """Read what ``to_wire`` wrote (MessagePack turns tuples into lists)."""
        dims = {name: tuple(row) for name, row in fields["dims"].items()}
        sizes = {key: tuple(fields[key]) for key in ("sizes", "graph_sizes")}
        return cls(**{**fields, **sizes, "dims": dims})


def default_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch_size``, and itself: every batch pads to less than twice its rows."""
    largest = max(max_batch_size, 1)
    powers = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return (*powers, largest)
