from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from mxpool.errors import NotServable
from mxpool.tensors import Signature, TensorSpec
from mxpool.workers.backends.host_block import HostBlock, HostRuns, NothingWritten, host_memory, host_values
from mxpool.workers.backends.replay_check import is_poison, poison

Array = npt.NDArray[Any]
SIGNATURE = Signature((TensorSpec("a", "INT64", (3,)), TensorSpec("b", "FP32", ())), (TensorSpec("y", "FP32", ()),), 8)


class Value:
    """A result as the runtime hands it out, over memory of the test's own."""

    def __init__(self, array: Array, device: str = "cpu") -> None:
        self.array = array
        self.device = device

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def device_name(self) -> str:
        return self.device

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data) if self.device == "cpu" else 0

    def numpy(self) -> Array:
        return self.array.copy()


class Session:
    """Hands out what it was given."""

    def __init__(self, **results: Array) -> None:
        self.results = results
        self.asked: list[str] = []

    def run_with_ort_values(self, names: list[str], values: Any, options: Any) -> list[Value]:
        assert (values, options) == ({}, None)
        self.asked = names
        return [Value(self.results[name]) for name in names]


def blank(**arrays: Array) -> dict[str, Array]:
    return {name: np.zeros_like(array) for name, array in arrays.items()}


def test_inputs_lie_on_pages_of_their_own_at_an_address_that_stays() -> None:
    block = HostBlock(onnxruntime, SIGNATURE, "model.onnx")
    addresses = {name: array.ctypes.data for name, array in block.arrays.items()}
    assert {address % mmap.PAGESIZE for address in addresses.values()} == {0}
    for number in range(3):
        block.fill({"a": np.full((8, 3), number, np.int64), "b": np.full(8, number, np.float32)})
        assert {name: value.data_ptr() for name, value in block.values.items()} == addresses
        assert (block.values["a"].numpy() == number).all()
        assert (block.values["b"].numpy() == number).all()


def test_a_fill_with_another_datatype_is_an_error() -> None:
    block = HostBlock(onnxruntime, SIGNATURE, "model.onnx")
    with pytest.raises(TypeError):
        block.fill({"a": np.zeros((8, 3), np.float64), "b": np.zeros(8, np.float32)})


def test_a_tensor_that_the_runtime_copies_is_refused_by_name() -> None:
    strided = np.zeros((8, 6), np.float32)[:, ::2]
    with pytest.raises(NotServable, match=r"input 'strided'.*copies it"):
        host_values(onnxruntime, {"strided": strided}, "model.onnx")


def test_answers_are_copied_out_and_the_runtimes_memory_is_poisoned() -> None:
    y = np.arange(4, dtype=np.float32)
    session = Session(y=y)
    outputs = blank(y=y)
    HostRuns(session, None).run({}, outputs)
    np.testing.assert_array_equal(outputs["y"], np.arange(4))
    assert is_poison(y)
    with pytest.raises(NothingWritten, match="wrote nothing to output 'y'"):
        HostRuns(session, None).run({}, outputs)


def test_outputs_are_asked_for_in_their_order_and_all_are_poisoned_even_if_one_is_refused() -> None:
    results: dict[str, Array] = {"y": np.ones(3, np.float32), "z": np.ones(2, np.int64), "w": np.ones(2, np.bool_)}
    session = Session(**results)
    outputs = blank(**results)
    poison(results["z"])
    with pytest.raises(NothingWritten, match="'z'"):
        HostRuns(session, None).run({}, outputs)
    assert session.asked == ["y", "z", "w"]
    assert all(is_poison(array) for array in results.values())


def test_one_value_that_was_written_is_enough() -> None:
    y = np.zeros(4, np.float32)
    poison(y)
    y[3] = 1
    outputs = blank(y=y)
    HostRuns(Session(y=y), None).run({}, outputs)
    assert outputs["y"][3] == 1


def test_a_result_of_another_shape_is_refused_and_nothing_is_read_beyond_it() -> None:
    outputs = {"y": np.zeros((2, 2), np.float32), "z": np.zeros(2, np.float32)}
    z = np.ones(2, np.float32)
    with pytest.raises(ValueError, match=r"output 'y' has the shape \(2,\), expected \(2, 2\)"):
        HostRuns(Session(y=np.ones(2, np.float32), z=z), None).run({}, outputs)
    assert is_poison(z)
    assert not outputs["y"].any()


def test_memory_of_a_result_is_used_in_place_unless_it_is_not_on_the_host() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    like = np.zeros_like(array)
    here, there = host_memory(Value(array), like), host_memory(Value(array, "maca"), like)
    array[1, 2] = 9
    assert (here[1, 2], there[1, 2]) == (9, 5)
    assert host_memory(Value(np.zeros((0, 3), np.float32)), np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_a_real_runtime_hands_the_same_memory_out_again_so_that_poison_would_come_back(tmp_path: Path) -> None:
    session: Any = onnxruntime.InferenceSession(made_models.affine(tmp_path), providers=["CPUExecutionProvider"])
    x = np.zeros((4, 4), np.float32)
    values = host_values(onnxruntime, {"x": x}, "model.onnx")
    outputs = {"y": np.zeros((4, 4), np.float32)}
    runs = HostRuns(session, None)
    for number in range(5):
        x[...] = number
        runs.run(values, outputs)
        assert (outputs["y"] == 2 * number + 1).all()
        (value,) = session.run_with_ort_values(["y"], values)
        address = value.data_ptr()
        poison(host_memory(value, outputs["y"]))
        del value
        (again,) = session.run_with_ort_values(["y"], values)
        assert again.data_ptr() == address
