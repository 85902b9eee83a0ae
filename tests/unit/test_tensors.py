from __future__ import annotations

import msgpack

from mxpool.tensors import Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("x", "FP32", (3, 2)), TensorSpec("flag", "BOOL", ())), (TensorSpec("y", "INT64", (5,)),), 16
)


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
