from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool import wire
from mxpool.broker.admission import KNOWN_MAX, Admission
from mxpool.errors import BatchTooLarge, InvalidRequest, InvalidTensor, MalformedMessage, MxPoolError
from mxpool.tensors import Signature, TensorSpec

SPECS = (TensorSpec("a", "FP32", (3,)), TensorSpec("b", "INT64", ()))
BATCHED = Signature(SPECS, (TensorSpec("y", "FP32", (1,)),), 8)
SINGLE = Signature(SPECS, (TensorSpec("y", "FP32", (1,)),), 0)
ROW_BYTES = 20


def tensors(rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [("a", "FP32", (rows, 3)), ("b", "INT64", (rows,))]


def request(described: bytes, rows: int) -> wire.Request:
    return wire.Request(wire.INFER, 1, "m", 0, rows, described, {})


def check(described: Any, rows: int, size: int, signature: Signature = BATCHED) -> None:
    Admission("m", signature).check(request(wire.encode_tensors(described), rows), size)


@given(rows=st.integers(1, 8))
def test_the_models_own_tensors_are_taken_the_first_time_and_again(rows: int) -> None:
    admission = Admission("m", BATCHED)
    assert admission.row_bytes == ROW_BYTES
    for _ in range(2):
        admission.check(request(wire.encode_tensors(tensors(rows)), rows), rows * ROW_BYTES)
        assert admission._known == {wire.encode_tensors(tensors(rows)): rows}


def test_a_model_without_a_batch_axis_takes_bare_dims_as_one_row() -> None:
    check([("a", "FP32", (3,)), ("b", "INT64", ())], 1, ROW_BYTES, SINGLE)
    with pytest.raises(InvalidTensor, match=r"'a'.*got \[1, 3\], expected \[3\]"):
        check(tensors(1), 1, ROW_BYTES, SINGLE)


@pytest.mark.parametrize(
    ("described", "rows", "error", "text"),
    [
        (tensors(9), 9, BatchTooLarge, "9 rows are more than max_batch_size 8 of model 'm'"),
        (tensors(0), 0, InvalidRequest, "at least one row"),
        ([("a", "FP32", ()), tensors(1)[1]], 1, InvalidRequest, "at least one row"),
        ([], 1, InvalidTensor, "expected a, b"),
        (tensors(1)[:1], 1, InvalidTensor, "got a, expected a, b"),
        (tensors(1)[::-1], 1, InvalidTensor, "another order"),
        ([*tensors(1), ("c", "FP32", (1,))], 1, InvalidTensor, "got a, b, c"),
        ([("A", "FP32", (1, 3)), tensors(1)[1]], 1, InvalidTensor, "got A, b"),
        ([("a", "FP64", (1, 3)), tensors(1)[1]], 1, InvalidTensor, "'a': wrong datatype .got FP64, expected FP32"),
        ([("a", "INT32", (1, 3)), tensors(1)[1]], 1, InvalidTensor, "wrong datatype"),
        ([("a", "FP32", (1, 4)), tensors(1)[1]], 1, InvalidTensor, r"got \[1, 4\], expected \[1, 3\]"),
        ([("a", "FP32", (3,)), tensors(3)[1]], 3, InvalidTensor, "wrong shape"),
        ([("a", "FP32", (2, 3)), ("b", "INT64", (3,))], 2, InvalidTensor, r"'b'.*got \[3\], expected \[2\]"),
        ([("a", "FP32", (1, 3)), ("b", "INT64", (1, 1))], 1, InvalidTensor, "'b'"),
    ],
)
def test_other_tensors_are_refused_with_what_was_sent_and_what_is_taken(
    described: Any, rows: int, error: type[MxPoolError], text: str
) -> None:
    for size in (0, rows * ROW_BYTES):
        with pytest.raises(error, match=text):
            check(described, rows, size)


@pytest.mark.parametrize("size", [0, ROW_BYTES, 2 * ROW_BYTES - 1, 2 * ROW_BYTES + 1, 3 * ROW_BYTES])
def test_a_body_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidTensor, match=f"got {size} bytes, expected {2 * ROW_BYTES} bytes"):
        check(tensors(2), 2, size)


@pytest.mark.parametrize("rows", [0, 1, 3, 2**31 - 1])
def test_rows_in_the_header_must_be_those_of_the_tensors(rows: int) -> None:
    admission = Admission("m", BATCHED)
    for _ in range(2):  # unknown, then remembered
        with pytest.raises(InvalidRequest, match=f"rows is {rows}, the tensors have 2"):
            admission.check(request(wire.encode_tensors(tensors(2)), rows), rows * ROW_BYTES)


def test_a_refused_description_is_refused_again() -> None:
    admission = Admission("m", BATCHED)
    for _ in range(2):
        with pytest.raises(BatchTooLarge):
            admission.check(request(wire.encode_tensors(tensors(9)), 9), 9 * ROW_BYTES)
        with pytest.raises(MalformedMessage):
            admission.check(request(b"\xc1", 1), ROW_BYTES)
    assert not admission._known


def test_what_is_remembered_is_bounded_whatever_clients_send() -> None:
    wide = Signature((TensorSpec("a", "UINT8", ()),), (TensorSpec("y", "FP32", ()),), 3 * KNOWN_MAX)
    admission = Admission("m", wide)
    for rows in range(1, 3 * KNOWN_MAX):
        admission.check(request(wire.encode_tensors([("a", "UINT8", (rows,))]), rows), rows)
        assert len(admission._known) <= KNOWN_MAX
    admission.check(request(wire.encode_tensors([("a", "UINT8", (5,))]), 5), 5)
