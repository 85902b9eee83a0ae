from __future__ import annotations

import sys

import msgpack
import numpy as np
import pytest

from mxpool.errors import InvalidTensor
from mxpool.tensors import DATATYPES, Signature, TensorSpec, datatype_of

SIGNATURE = Signature(
    (TensorSpec("x", "FP32", (3, 2)), TensorSpec("flag", "BOOL", ())), (TensorSpec("y", "INT64", (5,)),), 16
)


@pytest.mark.parametrize(("datatype", "dtype"), DATATYPES.items())
def test_every_datatype_is_found_again_by_its_dtype(datatype: str, dtype: np.dtype[np.generic]) -> None:
    assert datatype_of(dtype, "x") == datatype
    assert datatype_of(np.zeros(1, dtype).dtype, "x") == datatype


@pytest.mark.parametrize("dtype", ["O", "U5", "S5", "c8", "M8[s]", "V3", "f4,f4"])
def test_a_dtype_without_a_datatype_is_refused_by_the_tensors_name(dtype: str) -> None:
    with pytest.raises(InvalidTensor, match="'x'"):
        datatype_of(np.dtype(dtype), "x")


@pytest.mark.skipif(sys.byteorder == "big", reason="the foreign byte order is the native one here")
def test_a_foreign_byte_order_is_refused() -> None:
    with pytest.raises(InvalidTensor):
        datatype_of(np.dtype(">f4"), "x")


def test_row_bytes_are_those_of_one_row() -> None:
    assert [spec.row_bytes for spec in (*SIGNATURE.inputs, *SIGNATURE.outputs)] == [24, 1, 40]


def test_shapes_carry_the_batch_axis_unless_the_model_has_none() -> None:
    single = Signature(SIGNATURE.inputs, SIGNATURE.outputs, 0)
    assert SIGNATURE.shape(SIGNATURE.inputs[0], 7) == (7, 3, 2)
    assert single.shape(single.inputs[0], 1) == (3, 2)
    assert (SIGNATURE.batched, SIGNATURE.max_rows) == (True, 16)
    assert (single.batched, single.max_rows) == (False, 1)


def test_a_signature_crosses_the_wire_unchanged() -> None:
    assert Signature.from_wire(msgpack.unpackb(msgpack.packb(SIGNATURE.to_wire()))) == SIGNATURE
