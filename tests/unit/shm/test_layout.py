from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.shm.layout import PAGE_BYTES, SlotLayout
from mxpool.tensors import DATATYPES, Signature, TensorSpec

DIMS = st.lists(st.sampled_from([0, 1, 3, 699, 1024]), max_size=2).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(DATATYPES)), DIMS), min_size=1, max_size=4)


def signature(
    inputs: list[tuple[str, tuple[int, ...]]], outputs: list[tuple[str, tuple[int, ...]]], size: int
) -> Signature:
    def specs(prefix: str, rows: list[tuple[str, tuple[int, ...]]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{i}", datatype, dims) for i, (datatype, dims) in enumerate(rows))

    return Signature(specs("in", inputs), specs("out", outputs), size)


@given(inputs=SPECS, outputs=SPECS, max_batch_size=st.integers(0, 20), slots=st.integers(1, 4))
def test_every_tensor_has_whole_pages_of_its_own_and_the_segment_holds_them_exactly(
    inputs: list[tuple[str, tuple[int, ...]]],
    outputs: list[tuple[str, tuple[int, ...]]],
    max_batch_size: int,
    slots: int,
) -> None:
    given_signature = signature(inputs, outputs, max_batch_size)
    layout = SlotLayout(given_signature, slots)
    extents: list[tuple[int, int]] = []
    for slot in range(slots):
        offsets = layout.input_offsets(slot) + layout.output_offsets(slot)
        specs = (*given_signature.inputs, *given_signature.outputs)
        assert len(offsets) == len(specs)
        for offset, spec in zip(offsets, specs, strict=True):
            assert offset % PAGE_BYTES == 0
            pages = max(-(-spec.row_bytes * given_signature.max_rows // PAGE_BYTES), 1)
            extents.append((offset, offset + pages * PAGE_BYTES))
    assert extents[0][0] == 0
    assert all(first[1] == second[0] for first, second in itertools.pairwise(extents))
    assert extents[-1][1] == layout.size_bytes == slots * layout.slot_bytes


def test_views_have_the_batch_axis_and_lie_at_the_offsets() -> None:
    layout = SlotLayout(signature([("FP32", (3,)), ("INT64", ())], [("UINT8", (2, 2))], 5), 3)
    memory = mmap.mmap(-1, layout.size_bytes)
    views = layout.views(memory, 2)
    views.inputs["in0"][4] = (1.0, 2.0, 3.0)
    views.inputs["in1"][:] = range(5)
    views.outputs["out0"][1] = 7
    assert {name: (view.shape, view.dtype.str) for name, view in views.inputs.items()} == {
        "in0": ((5, 3), "<f4"),
        "in1": ((5,), "<i8"),
    }
    assert views.outputs["out0"].shape == (5, 2, 2)
    for view in (*views.inputs.values(), *views.outputs.values()):
        assert view.flags.c_contiguous
        assert view.flags.writeable
    first, second = layout.input_offsets(2)
    assert memory[first + 4 * 12 : first + 5 * 12] == np.array([1, 2, 3], "<f4").tobytes()
    assert memory[second : second + 40] == np.arange(5, dtype="<i8").tobytes()
    assert memory[layout.output_offsets(2)[0] + 4 : layout.output_offsets(2)[0] + 8] == b"\7" * 4
    assert not any(memory[: 2 * layout.slot_bytes])
    del views, view
    memory.close()


def test_views_of_a_model_without_a_batch_axis_have_its_own_dims() -> None:
    layout = SlotLayout(signature([("FP32", (2, 3))], [("FP32", ())], 0), 1)
    memory = mmap.mmap(-1, layout.size_bytes)
    views = layout.views(memory, 0)
    assert (views.inputs["in0"].shape, views.outputs["out0"].shape) == ((2, 3), ())


def test_a_segment_that_is_too_small_is_refused() -> None:
    layout = SlotLayout(signature([("FP32", (3,))], [("FP32", (3,))], 5), 2)
    memory = mmap.mmap(-1, layout.size_bytes - PAGE_BYTES)
    layout.views(memory, 0)
    with pytest.raises(ValueError, match="smaller than requested"):
        layout.views(memory, 1)


def test_a_map_cannot_be_closed_under_a_live_view() -> None:
    layout = SlotLayout(signature([("FP32", (3,))], [("FP32", (3,))], 2), 1)
    memory = mmap.mmap(-1, layout.size_bytes)
    views = layout.views(memory, 0)
    with pytest.raises(BufferError):
        memory.close()
    views.inputs["in0"][...] = 1
    del views
    memory.close()
