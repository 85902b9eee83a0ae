from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.broker.copying import SlotMemory
from mxpool.broker.tickets import Batch, Ticket
from mxpool.shm.layout import SlotLayout, SlotViews
from mxpool.shm.segment import Segment
from mxpool.tensors import Signature, TensorSpec

ROWS = 8
SIGNATURE = Signature(
    (TensorSpec("a", "FP32", (3,)), TensorSpec("b", "UINT8", (2, 2))),
    (TensorSpec("y", "FP32", (2,)), TensorSpec("z", "INT64", ())),
    ROWS,
)
SLOTS = 3


class Slots:
    """Memory under test, and numpy's view of the same bytes."""

    def __init__(self, segment: Segment, repeat: bool) -> None:
        layout = SlotLayout(SIGNATURE, SLOTS)
        self.memory = SlotMemory(layout, segment, repeat)
        self.views: list[SlotViews] = [layout.views(segment.map, slot) for slot in range(SLOTS)]

    def fill(self, slot: int, requests: list[int], start: int) -> list[npt.NDArray[Any]]:
        """Place requests of so many rows; the inputs that the slot must now have in its rows."""
        batch = Batch(slot, None)
        bodies: list[list[npt.NDArray[Any]]] = []
        for number, rows in enumerate(requests):
            ticket = Ticket(None, number, rows, 0, 0)
            batch.add(ticket)
            first = np.arange(start, start + rows * 3, dtype="<f4").reshape(rows, 3) + 1
            second = np.full((rows, 2, 2), (start + number) % 255 + 1, np.uint8)
            self.memory.copy_in(ticket, first.tobytes() + second.tobytes())
            assert self.memory.body(slot, ticket.row, rows) == first.tobytes() + second.tobytes()
            bodies.append([first, second])
            start += rows * 3
        return [np.concatenate(parts) for parts in zip(*bodies, strict=True)]

    def inputs(self, slot: int) -> list[npt.NDArray[Any]]:
        return [np.array(view) for view in self.views[slot].inputs.values()]


@contextmanager
def slots(repeat: bool = False) -> Iterator[Slots]:
    segment = Segment.create(SlotLayout(SIGNATURE, SLOTS).size_bytes)
    found = Slots(segment, repeat)
    try:
        yield found
    finally:
        found.memory.release()
        segment.close()


BATCHES = st.lists(
    st.tuples(
        st.integers(0, SLOTS - 1),
        st.lists(st.integers(1, ROWS), min_size=1, max_size=4).filter(lambda rows: sum(rows) <= ROWS),
        st.integers(0, ROWS),
    ),
    max_size=12,
)


@pytest.mark.parametrize("repeat", [False, True])
@given(batches=BATCHES)
def test_any_batches_in_any_slots_are_padded_as_numpy_would(
    repeat: bool, batches: list[tuple[int, list[int], int]]
) -> None:
    with slots(repeat) as found:
        for view in (view for views in found.views for view in views.outputs.values()):
            view[...] = 7
        others = [found.inputs(slot) for slot in range(SLOTS)]
        for start, (slot, requests, more) in enumerate(batches):
            rows = sum(requests)
            size = min(rows + more, ROWS)
            expected = found.fill(slot, requests, start * 50)
            found.memory.pad(slot, rows, size)
            others[slot] = found.inputs(slot)
            for got, want in zip(others[slot], expected, strict=True):
                assert np.array_equal(got[:rows], want)
                assert np.array_equal(got[rows:size], np.repeat(want[-1:] if repeat else want[-1:] * 0, size - rows, 0))
            for other in range(SLOTS):
                assert all(map(np.array_equal, found.inputs(other), others[other]))
        assert all((view == 7).all() for views in found.views for view in views.outputs.values())


def test_zero_padding_touches_only_rows_below_the_dirty_mark() -> None:
    with slots() as found:
        found.fill(1, [4], 0)
        found.views[1].inputs["a"][4:] = -1  # never placed by us: these rows are above the mark
        found.fill(1, [1, 1], 0)
        found.memory.pad(1, 2, 8)
        assert found.inputs(1)[0][2:4].tolist() == [[0.0] * 3] * 2
        assert (found.inputs(1)[0][4:] == -1).all()


def test_mark_falls_when_zeros_were_written_so_that_the_next_batch_pads_nothing() -> None:
    with slots() as found:
        found.fill(0, [8], 0)
        found.fill(0, [2], 0)
        found.memory.pad(0, 2, 8)
        found.views[0].inputs["a"][3] = -1
        found.fill(0, [2], 0)
        found.memory.pad(0, 2, 8)
        assert (found.inputs(0)[0][3] == -1).all()


def test_rows_above_a_smaller_padded_size_stay_marked() -> None:
    with slots() as found:
        found.fill(0, [8], 0)
        found.fill(0, [1], 0)
        found.memory.pad(0, 1, 2)
        found.fill(0, [1], 0)
        found.memory.pad(0, 1, 8)
        assert not found.inputs(0)[0][1:].any()
        assert not found.inputs(0)[1][1:].any()


def test_mark_is_raised_before_bytes_are_written_so_that_half_a_request_leaves_nothing() -> None:
    with slots() as found:
        ticket = Ticket(None, 1, 6, 0, 0)
        Batch(0, None).add(ticket)
        with pytest.raises(ValueError, match="differ"):
            found.memory.copy_in(ticket, np.ones(6 * 3, "<f4").tobytes() + b"short")
        assert found.inputs(0)[0][:6].all(), "the first tensor was written: this test needs that"
        found.fill(0, [1], 0)
        found.memory.pad(0, 1, 8)
        assert not found.inputs(0)[0][1:].any()


def test_repeat_padding_repeats_the_last_row_anew_every_time() -> None:
    with slots(repeat=True) as found:
        for start in (0, 100):
            expected = found.fill(2, [1, 2], start)
            found.memory.pad(2, 3, 8)
            for got, want in zip(found.inputs(2), expected, strict=True):
                assert (got[3:] == want[2]).all()


def test_an_answer_is_a_copy_of_its_rows_of_every_output() -> None:
    with slots() as found:
        views = found.views[1].outputs
        views["y"][:] = np.arange(16).reshape(8, 2)
        views["z"][:] = np.arange(8) * 10
        answer = found.memory.answer(1, 2, 3)
        views["y"][:] = 0
        assert answer == np.arange(4, 10, dtype="<f4").tobytes() + np.array([20, 30, 40], "<i8").tobytes()


def test_after_release_the_segment_can_be_closed() -> None:
    layout = SlotLayout(SIGNATURE, 1)
    segment = Segment.create(layout.size_bytes)
    memory = SlotMemory(layout, segment, False)
    memory.release()
    segment.map.close()
    segment.close()
    assert segment.map.closed
