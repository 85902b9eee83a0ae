from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.errors import NotServable
from mxpool.tensors import TensorSpec
from mxpool.workers.backends.onnx_signature import DATATYPES, Declared, Probe, Reader, Shape

ROWS = st.lists(st.integers(1, 9), max_size=4).map(tuple)


def declared(*shape: Any, name: str = "x", type_: str = "tensor(float)") -> Declared:
    return Declared(name, type_, shape)


def refusal_of_inputs(*inputs: Declared, max_batch_size: int = 8, dims: dict[str, Shape] | None = None) -> str:
    with pytest.raises(NotServable) as caught:
        Reader("m.onnx", max_batch_size).inputs(inputs, dims or {})
    return caught.value.message


def refusal_of_outputs(*shapes_by_rows: tuple[int, Shape], max_batch_size: int = 8) -> str:
    probes = [Probe(rows, (shape,)) for rows, shape in shapes_by_rows]
    with pytest.raises(NotServable) as caught:
        Reader("m.onnx", max_batch_size).probed_outputs([declared(None, name="y")], probes)
    return caught.value.message


@given(ROWS, st.sampled_from(sorted(DATATYPES)), st.sampled_from(["N", None]))
def test_an_input_with_an_open_batch_axis_has_the_files_dims_for_a_row(row: Shape, type_: str, symbol: Any) -> None:
    found = Reader("m.onnx", 8).inputs([declared(symbol, *row, type_=type_)], {})
    assert found == (TensorSpec("x", DATATYPES[type_], row),)


@given(ROWS)
def test_without_a_batch_axis_an_input_has_all_of_the_files_dims(row: Shape) -> None:
    assert Reader("m.onnx", 0).inputs([declared(*row)], {}) == (TensorSpec("x", "FP32", row),)


@given(ROWS.filter(len), st.data())
def test_dims_fix_what_the_file_leaves_open_and_may_not_contradict_it(row: Shape, data: st.DataObject) -> None:
    kept = [data.draw(st.booleans()) for _ in row]
    shape = ["N", *(dim if keep else None for dim, keep in zip(row, kept, strict=True))]
    assert Reader("m.onnx", 8).inputs([declared(*shape)], {"x": row})[0].dims == row
    wrong = tuple(dim + 1 for dim in row)
    if any(kept):
        axis = kept.index(True)
        assert f"dims gives {wrong[axis]} for dim {axis} of a row, which is {row[axis]}" in refusal_of_inputs(
            declared(*shape), dims={"x": wrong}
        )


def test_an_open_dim_is_refused_with_the_config_line_that_fixes_it() -> None:
    text = refusal_of_inputs(declared("N", 3, "H", None))
    assert "input 'x'" in text
    assert "dim 1 of a row (H) is open" in text
    assert 'dims = { "x" = [3, 128, 128] }' in text


def test_dims_for_an_input_that_does_not_exist_are_refused_with_the_inputs_that_do() -> None:
    assert "dims entry 'z'" in refusal_of_inputs(declared("N", 4), dims={"z": (4,)})


def test_dims_of_another_rank_are_refused() -> None:
    assert "dims gives 1 dims, one row has 2" in refusal_of_inputs(declared("N", 4, 5), dims={"x": (4,)})


@pytest.mark.parametrize(
    "type_",
    [
        "tensor(string)",
        "tensor(bfloat16)",
        "tensor(float8e4m3fn)",
        "tensor(complex64)",
        "seq(tensor(float))",
        "optional(tensor(float))",
        "sparse_tensor(float)",
        "seq(map(int64,tensor(float)))",
    ],
)
def test_a_type_that_is_not_a_tensor_of_numbers_is_refused_by_name(type_: str) -> None:
    assert f"input 'x' cannot be served: its type is {type_}" in refusal_of_inputs(declared("N", type_=type_))
    with pytest.raises(NotServable, match=f"output 'y' .*{re.escape(type_)}"):
        Reader("m.onnx", 8).declared_outputs([declared("N")], [declared("N", name="y", type_=type_)])


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((), "it has no batch axis; set max_batch_size = 0"),
        ((1, 3), "its first dim is fixed at 1; set max_batch_size = 0"),
        ((3, 2), "its first dim is fixed at 3; set max_batch_size = 0, or 3 if that is its batch axis"),
        (("N", 0), "it has a dim of 0 and so holds nothing"),
    ],
)
def test_an_input_that_cannot_be_batched_is_refused_with_what_to_do(shape: tuple[Any, ...], reason: str) -> None:
    assert refusal_of_inputs(declared(*shape)).endswith(reason)


def test_an_input_with_its_batch_on_another_axis_is_refused_with_the_axis() -> None:
    assert "input 'state' cannot be served: its batch axis is 1, not 0" in refusal_of_inputs(
        declared("N", 4), declared(8, "N", 128, name="state")
    )


def test_a_batch_axis_that_the_file_fixes_allows_this_size_only() -> None:
    assert Reader("m.onnx", 8).only_size([declared("N", 2), declared(8, 4, name="z")]) == 8
    assert Reader("m.onnx", 8).only_size([declared("N", 2)]) is None
    assert Reader("m.onnx", 0).only_size([declared(8, 4)]) is None


def test_an_output_that_is_an_input_is_refused_by_name() -> None:
    with pytest.raises(NotServable, match=r"output 'x' .*input of the graph as well"):
        Reader("m.onnx", 8).check_names([declared("N")], [declared("N")])


def test_only_outputs_with_the_symbol_of_the_batch_axis_and_closed_dims_need_no_run() -> None:
    outputs = [declared("N", 3, name="a"), declared("M", 3, name="b"), declared("N", "K", name="c"), declared(name="d")]
    found = Reader("m.onnx", 8).declared_outputs([declared("N", 4)], outputs)
    assert found == [TensorSpec("a", "FP32", (3,)), None, None, None]


def test_without_a_batch_axis_closed_dims_need_no_run_but_no_shape_at_all_does() -> None:
    found = Reader("m.onnx", 0).declared_outputs([declared(1, 4)], [declared(1, 3, name="a"), declared(name="b")])
    assert found == [TensorSpec("a", "FP32", (1, 3)), None]


@given(ROWS)
def test_an_output_whose_batch_axis_alone_moves_has_the_other_dims(row: Shape) -> None:
    probes = [Probe(rows, ((rows, *row),)) for rows in (1, 1, 2, 2)]
    assert Reader("m.onnx", 8).probed_outputs([declared(name="y")], probes) == (TensorSpec("y", "FP32", row),)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((2, (2, 3)), (2, (2, 5))), "its shape depends on the data: (2, 3), (2, 5)"),
        (((1, ()), (2, ())), "it is a scalar and has no batch axis"),
        (((1, (4, 1)), (2, (4, 2))), "its batch axis is 1, not 0 ((4, 1) at 1 rows and (4, 2) at 2 rows)"),
        (((1, (1, 1)), (2, (2, 2))), "axis 0 is not the batch axis, or others change with it"),
        (((1, (7,)), (2, (7,))), "axis 0 is not the batch axis"),
        (((8, (7, 3)),), "axis 0 is not the batch axis"),
        (((1, (1,)), (2, (2, 1))), "axis 0 is not the batch axis, or others change with it"),
    ],
    ids=str,
)
def test_an_output_that_moves_otherwise_is_refused_with_what_was_seen(shapes: Any, reason: str) -> None:
    text = refusal_of_outputs(*shapes)
    assert "output 'y' cannot be served" in text
    assert reason in text


def test_without_a_batch_axis_an_output_may_be_a_scalar_but_not_depend_on_the_data() -> None:
    reader = Reader("m.onnx", 0)
    assert reader.probed_outputs([declared(name="y")], [Probe(1, ((),))] * 3) == (TensorSpec("y", "FP32", ()),)
    assert "depends on the data" in refusal_of_outputs((1, (2,)), (1, (3,)), max_batch_size=0)
