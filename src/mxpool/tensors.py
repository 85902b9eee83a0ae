"""What a tensor is between processes: a name, a KServe datatype and dims.

Datatypes are KServe's words (Open Inference Protocol v2). BF16 and BYTES (strings) are not served: numpy has
no bfloat16 of its own, and strings have no fixed size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. ``dims`` are those of one row: the batch axis is not among them."""

    name: str
    datatype: str
    dims: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype, little-endian."""
        return DATATYPES[self.datatype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.dims) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a model as served, in the model's order.

    ``max_batch_size`` 0 means that arrays carry no batch axis and requests run one at a time.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int

    @property
    def batched(self) -> bool:
        """True when arrays carry the batch axis in front."""
        return self.max_batch_size > 0

    @property
    def max_rows(self) -> int:
        """Rows of one slot: at least 1."""
        return max(self.max_batch_size, 1)

    def shape(self, spec: TensorSpec, rows: int) -> tuple[int, ...]:
        """The shape of ``spec`` as a client sees it, for ``rows`` rows."""
        return (rows, *spec.dims) if self.batched else spec.dims

    def to_wire(self) -> dict[str, Any]:
        """A MessagePack-able map; ``from_wire`` reads it."""
        return {
            "max_batch_size": self.max_batch_size,
            "inputs": [[t.name, t.datatype, list(t.dims)] for t in self.inputs],
            "outputs": [[t.name, t.datatype, list(t.dims)] for t in self.outputs],
        }

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> Signature:
        """Read what ``to_wire`` wrote (trusted: it comes from our own broker or worker)."""

        def specs(rows: list[list[Any]]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(name, datatype, tuple(dims)) for name, datatype, dims in rows)

        return cls(specs(fields["inputs"]), specs(fields["outputs"]), fields["max_batch_size"])
