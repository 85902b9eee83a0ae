"""Which bytes of a slot travel for a batch: few copies, since each costs more than the bytes between tensors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """``size`` bytes at ``offset`` from the start of the slot."""

    offset: int
    size: int


def plan(offsets: Sequence[int], sizes: Sequence[int], gap_bytes_max: int) -> list[Copy]:
    """One copy for each tensor (its live bytes begin at its offset; offsets ascend), neighbours joined.

    Two are joined when at most ``gap_bytes_max`` bytes that nobody asked for lie between them. A tensor of no bytes
    takes no copy.
    """
    found: list[Copy] = []
    for offset, size in zip(offsets, sizes, strict=True):
        if not size:
            continue
        if found and offset - (found[-1].offset + found[-1].size) <= gap_bytes_max:
            found[-1] = Copy(found[-1].offset, offset + size - found[-1].offset)
        else:
            found.append(Copy(offset, size))
    return found
