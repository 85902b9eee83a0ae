from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.client.results import COPY_BYTES, LAYOUTS_KEPT, Layouts, concatenated, split
from mxpool.errors import MalformedMessage
from mxpool.wire import encode_tensors


def message(**tensors: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, np.dtype[np.uint8]]]:
    words = {"float32": "FP32", "bool": "BOOL", "int64": "INT64"}
    description = encode_tensors([(name, words[a.dtype.name], a.shape) for name, a in tensors.items()])
    return description, np.frombuffer(b"".join(a.tobytes() for a in tensors.values()), np.uint8).copy()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_each_request_gets_its_own_rows_of_every_tensor(rows: list[int], width: int) -> None:
    total = sum(rows)
    flags = np.arange(total) % 2 == 0  # one byte each: what follows is not aligned
    y = np.arange(total * width, dtype=np.float32).reshape(total, width)
    description, body = message(flags=flags, y=y, n=np.arange(total))
    parts = split(Layouts().of(description), body, rows)
    assert len(parts) == len(rows)
    assert np.array_equal(np.concatenate([part["y"] for part in parts]), y)
    assert np.array_equal(np.concatenate([part["flags"] for part in parts]), flags)
    for part, count in zip(parts, rows, strict=True):
        assert [len(array) for array in part.values()] == [count] * 3
        for array in part.values():
            assert array.flags.writeable
            assert array.flags.aligned


@pytest.mark.parametrize("width", [1, COPY_BYTES])
def test_writing_into_one_answer_changes_no_other(width: int) -> None:
    description, body = message(y=np.zeros((3, width), np.float32))
    first, second, third = split(Layouts().of(description), body, [1, 1, 1])
    second["y"][:] = 7
    assert first["y"].max() == third["y"].max() == 0
    assert second["y"].min() == 7


def test_an_answer_kept_out_of_a_large_body_keeps_only_itself() -> None:
    description, body = message(y=np.zeros((4, COPY_BYTES), np.float32))
    part = split(Layouts().of(description), body, [1, 3])[0]
    assert part["y"].base is None
    assert part["y"].nbytes == COPY_BYTES * 4


def test_a_model_without_a_batch_axis_answers_with_whole_tensors() -> None:
    y = np.arange(6, dtype=np.float32).reshape(2, 3)
    description, body = message(y=y, scalar=np.array(True))
    (outputs,) = split(Layouts().of(description), body, [1])
    assert np.array_equal(outputs["y"], y)
    assert outputs["scalar"].shape == ()


@pytest.mark.parametrize("rows", [[1, 1], [2, 2], [1, -1, 3], [1, "2"], [3, 0]])
def test_rows_that_are_not_those_of_the_tensors_are_malformed(rows: list[Any]) -> None:
    description, body = message(y=np.zeros((3, 2), np.float32))
    with pytest.raises(MalformedMessage):
        split(Layouts().of(description), body, rows)


def test_a_body_of_another_length_is_malformed() -> None:
    description, body = message(y=np.zeros((3, 2), np.float32))
    with pytest.raises(MalformedMessage):
        split(Layouts().of(description), body[:-1], [3])


def test_an_unknown_datatype_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="BF16"):
        Layouts().of(encode_tensors([("y", "BF16", (1,))]))


def test_layouts_are_remembered_up_to_a_limit() -> None:
    layouts = Layouts()
    known = layouts.of(encode_tensors([("y", "FP32", (0,))]))
    assert layouts.of(encode_tensors([("y", "FP32", (0,))])) is known
    for rows in range(1, LAYOUTS_KEPT + 1):
        layouts.of(encode_tensors([("y", "FP32", (rows,))]))
    assert layouts.of(encode_tensors([("y", "FP32", (0,))])) is not known


def test_pieces_are_joined_in_order_into_memory_of_their_own() -> None:
    parts = [{"y": np.full((count, 2), count, np.float32)} for count in (3, 1)]
    whole = concatenated(parts)
    assert whole["y"].tolist() == [[3, 3]] * 3 + [[1, 1]]
    assert not np.shares_memory(whole["y"], parts[0]["y"])
