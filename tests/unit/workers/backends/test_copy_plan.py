from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mxpool.workers.backends.copy_plan import plan


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=6), st.integers(-1, 300))
def test_every_live_byte_travels_and_no_gap_larger_than_allowed(tensors: list[tuple[int, int]], gap: int) -> None:
    """``tensors``: bytes that travel, and bytes behind them that do not."""
    offsets, sizes, offset = [], [], 0
    for live, rest in tensors:
        offsets.append(offset)
        sizes.append(live)
        offset += live + rest
    copies = plan(offsets, sizes, gap)
    travels = {byte for copy in copies for byte in range(copy.offset, copy.offset + copy.size)}
    live_bytes = {byte for start, size in zip(offsets, sizes, strict=True) for byte in range(start, start + size)}
    assert live_bytes <= travels
    assert sum(copy.size for copy in copies) == len(travels), "no byte travels twice"
    if gap < 0:
        assert travels == live_bytes
        assert len(copies) == sum(size > 0 for size in sizes)
    for first, second in itertools.pairwise(copies):
        assert second.offset - (first.offset + first.size) > gap
    assert all(copy.offset in live_bytes and copy.offset + copy.size - 1 in live_bytes for copy in copies)


def test_tensors_of_a_full_slot_travel_together() -> None:
    assert plan([0, 4096, 8192], [4000, 100, 4096], 4095) == [(0, 12_288)]
    assert plan([0, 4096, 8192], [40, 100, 32], -1) == [(0, 40), (4096, 100), (8192, 32)]
