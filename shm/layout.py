"""Where each tensor of each slot lies in a model's segment.

::

    slot 0: input 0 | input 1 | … | output 0 | …      each at [max_rows, *dims], each on a page of its own
    slot 1: …

Pages keep tensors apart for device registration and keep two writers off one cache line.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.tensors import Signature, TensorSpec

PAGE_BYTES = mmap.PAGESIZE


def _pages(size: int) -> int:
    return max(-(-size // PAGE_BYTES), 1) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SlotViews:
    """The tensors of one slot as numpy arrays over the segment; they own nothing and die with its mapping.

    Arrays are ``[max_rows, *dims]``, or ``dims`` for a model without a batch axis; C-contiguous, page-aligned.
    """

    inputs: dict[str, npt.NDArray[Any]]
    outputs: dict[str, npt.NDArray[Any]]


class SlotLayout:
    """Offsets of a segment that holds ``slots`` slots of ``signature``. Pure; two sides compute the same."""

    def __init__(self, signature: Signature, slots: int) -> None:
        self.signature = signature
        self.slots = slots
        offset = 0
        self._offsets: list[int] = []
        for spec in (*signature.inputs, *signature.outputs):
            self._offsets.append(offset)
            offset += _pages(spec.row_bytes * signature.max_rows)
        self.slot_bytes = offset
        self.size_bytes = offset * slots

    def input_offsets(self, slot: int) -> list[int]:
        """Byte offsets of the slot's inputs, in the signature's order."""
        base = slot * self.slot_bytes
        return [base + offset for offset in self._offsets[: len(self.signature.inputs)]]

    def output_offsets(self, slot: int) -> list[int]:
        """Byte offsets of the slot's outputs, in the signature's order."""
        base = slot * self.slot_bytes
        return [base + offset for offset in self._offsets[len(self.signature.inputs) :]]

    def views(self, buffer: memoryview | mmap.mmap, slot: int) -> SlotViews:
        """Arrays over ``buffer`` (the whole segment) for ``slot``; ``buffer`` cannot be closed while one lives.

        Raises:
            ValueError: if ``buffer`` is too small.
        """

        def array(spec: TensorSpec, offset: int) -> npt.NDArray[Any]:
            shape = self.signature.shape(spec, self.signature.max_rows)
            # frombuffer, because np.ndarray(buffer=…) holds no export: closing the map under it would not be refused.
            return np.frombuffer(buffer, spec.dtype, math.prod(shape), offset).reshape(shape)

        def arrays(specs: Sequence[TensorSpec], offsets: list[int]) -> dict[str, npt.NDArray[Any]]:
            return {spec.name: array(spec, offset) for spec, offset in zip(specs, offsets, strict=True)}

        return SlotViews(
            arrays(self.signature.inputs, self.input_offsets(slot)),
            arrays(self.signature.outputs, self.output_offsets(slot)),
        )
