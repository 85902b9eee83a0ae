from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.client.arrays import RequestForm, joined
from mxpool.errors import InvalidRequest, InvalidTensor
from mxpool.tensors import Signature, TensorSpec
from mxpool.wire import decode_tensors

X, N = TensorSpec("x", "FP32", (3, 2)), TensorSpec("n", "INT64", ())
SIGNATURE = Signature((X, N), (TensorSpec("y", "FP32", (1,)),), 8)
FORM = RequestForm("m", SIGNATURE, 1 << 20)


def arrays(rows: int = 2, **others: Any) -> dict[str, Any]:
    """Good arrays, some replaced."""
    x = np.arange(rows * 6, dtype=np.float32).reshape(rows, 3, 2)
    return {"x": x, "n": np.arange(rows, dtype=np.int64), **others}


def body(form: RequestForm, given_arrays: dict[str, Any]) -> tuple[int, bytes]:
    rows, checked = form.check(given_arrays)
    return rows, joined(checked)


def test_good_arrays_pass_uncopied_in_the_models_order() -> None:
    good = arrays()
    for _ in range(2):  # the first time the slow way, then the fast one
        rows, checked = FORM.check({"n": good["n"], "x": good["x"]})
        assert rows == 2
        assert checked[0] is good["x"]
        assert checked[1] is good["n"]
    assert joined(checked) == good["x"].tobytes() + good["n"].tobytes()


STRIDED: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0),
    "reversed": lambda x: x[::-1, ::-1],
    "every second": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "fortran": np.asfortranarray,
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "field of a structure": lambda x: np.repeat(x[..., None], 2, -1).view([("a", "f4"), ("b", "f4")])["a"][..., 0],
    "odd strides on axes of one": lambda x: np.lib.stride_tricks.as_strided(x[:1], (1, 3, 2), (7777, *x.strides[1:])),
}


@pytest.mark.parametrize("way", STRIDED)
def test_any_strides_give_the_bytes_of_the_contiguous_copy(way: str) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    odd = STRIDED[way](x)
    rows, data = body(FORM, arrays(len(odd), x=odd))
    assert data[: rows * 24] == np.ascontiguousarray(odd).tobytes()


def test_a_foreign_byte_order_is_converted() -> None:
    good = arrays()
    assert body(FORM, arrays(x=good["x"].astype(">f4"), n=good["n"].astype(">i8"))) == body(FORM, good)


def test_read_only_arrays_pass() -> None:
    good = arrays()
    good["x"].setflags(write=False)
    assert body(FORM, good)[0] == 2


def test_lists_pass_where_numpy_makes_the_right_dtype_of_them() -> None:
    assert body(FORM, arrays(n=[0, 1])) == body(FORM, arrays())


@pytest.mark.parametrize(
    ("tensor", "value", "got"),
    [
        ("x", np.zeros((2, 3, 2)), "float64"),
        ("x", np.zeros((2, 3, 2), np.int32), "int32"),  # the same number of bytes
        ("x", np.zeros((2, 3, 2), np.float16), "float16"),
        ("n", np.zeros(2, np.int32), "int32"),
        ("n", np.zeros(2, np.uint64), "uint64"),
        ("n", np.zeros(2, bool), "bool"),
        ("x", np.zeros((2, 3, 2), object), "object"),
        ("x", np.full((2, 3, 2), "a"), "<U1"),
        ("n", np.array(["2026-01-01", "2026-01-02"], "M8[s]"), r"datetime64\[s\]"),
        ("x", [[[0.0, 0.0]] * 3] * 2, "list of float64"),
        ("x", None, "NoneType of object"),
        ("n", ["a", "b"], "list of <U1"),
    ],
)
def test_another_dtype_is_refused_by_name_and_never_cast(tensor: str, value: Any, got: str) -> None:
    for _ in range(2):
        with pytest.raises(
            InvalidTensor, match=f"'{tensor}'.*got {got}.*expected {'float32' if tensor == 'x' else 'int64'}"
        ):
            FORM.check(arrays(**{tensor: value}))


def test_what_to_do_is_said_where_plain_values_do_not_fit() -> None:
    with pytest.raises(InvalidTensor, match=r"pass numpy\.asarray"):
        FORM.check(arrays(x=1.5))
    with pytest.raises(InvalidTensor, match="'n'"):
        FORM.check(arrays(n=[[1], [1, 2]]))


@pytest.mark.parametrize(
    ("given_arrays", "said"),
    [
        ({}, "'x': is missing"),
        ({"x": arrays()["x"]}, "'n': is missing"),
        (arrays(more=1), "'more': is not an input"),
        ({"X": arrays()["x"], "n": arrays()["n"]}, "'x': is missing"),
    ],
)
def test_missing_and_unknown_names_are_refused(given_arrays: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTensor, match=said) as caught:
        FORM.check(given_arrays)
    assert caught.value.fields["expected"] == "x, n"


@pytest.mark.parametrize(
    ("tensor", "shape", "expected"),
    [
        ("x", (2, 2, 3), r"\(2, 3, 2\)"),
        ("x", (2, 6), r"\(2, 3, 2\)"),
        ("x", (3, 2), r"\(3, 3, 2\)"),
        ("n", (2, 1), r"\(2\)"),
        ("n", (3,), r"\(2\)"),
        ("n", (), r"\(rows\)"),
        ("x", (0, 3, 2), r"\(rows, 3, 2\)"),
        ("n", (0,), r"\(rows\)"),
    ],
)
def test_wrong_shapes_and_row_counts_are_refused_with_the_expected_shape(
    tensor: str, shape: tuple[int, ...], expected: str
) -> None:
    wrong: dict[str, Any] = {tensor: np.zeros(shape, np.float32 if tensor == "x" else np.int64)}
    with pytest.raises(InvalidTensor, match=f"expected {expected}"):
        FORM.check({**arrays(), **wrong})


def test_a_model_without_a_batch_axis_takes_arrays_of_its_dims() -> None:
    form = RequestForm("m", Signature((X,), SIGNATURE.outputs, 0), 1 << 20)
    x = np.ones((3, 2), np.float32)
    for _ in range(2):
        assert body(form, {"x": x}) == (1, x.tobytes())
    assert decode_tensors(form.describe(1)) == [("x", "FP32", (3, 2))]
    with pytest.raises(InvalidTensor, match=r"expected \(3, 2\)"):
        form.check({"x": x[None]})


def test_a_row_larger_than_a_frame_may_be_is_refused_with_both_numbers() -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"32 bytes.*is 31"):
            RequestForm("m", SIGNATURE, 31).check(arrays())


@given(st.integers(1, 40), st.integers(32, 32 * 20))
def test_pieces_are_the_rows_in_order_and_none_is_larger_than_batch_or_frame(rows: int, bytes_max: int) -> None:
    form = RequestForm("m", SIGNATURE, bytes_max)
    count, checked = form.check(arrays(rows))
    pieces = form.split(count, checked)
    assert [sum(count for count, _ in pieces), *(len(part) for _, part in pieces)] == [rows, *[2] * len(pieces)]
    for index in (0, 1):
        assert np.array_equal(np.concatenate([part[index] for _, part in pieces]), checked[index])
    for count, part in pieces:
        assert count == len(part[0]) <= 8
        assert len(joined(part)) <= bytes_max
        assert decode_tensors(form.describe(count)) == [("x", "FP32", (count, 3, 2)), ("n", "INT64", (count,))]


@given(st.sampled_from(["<f2", "<f4", "<f8", "<i1", "<u2", "?"]), st.binary(min_size=16, max_size=16))
def test_bits_arrive_as_they_are(dtype: str, data: bytes) -> None:
    words = {"<f2": "FP16", "<f4": "FP32", "<f8": "FP64", "<i1": "INT8", "<u2": "UINT16", "?": "BOOL"}
    form = RequestForm("m", Signature((TensorSpec("x", words[dtype], ()),), (), 64), 1 << 20)
    assert body(form, {"x": np.frombuffer(data, dtype)})[1] == data


def test_a_bare_array_is_told_what_a_request_is() -> None:
    with pytest.raises(InvalidTensor, match=r"not a dict of input name to array \(got ndarray, expected a dict with"):
        FORM.check(np.zeros((1, 4), np.float32))  # type: ignore[arg-type]
