"""Small ONNX models, each with one property that a test needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Dims = Sequence[int | str | None]
Port = tuple[str, int, Dims]
FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64


def save(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[Port],
    outputs: list[Port],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    ir_version: int = 8,
) -> str:
    """Write the model, unchecked, and return its path."""

    def values(ports: list[Port]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, list(dims)) for name, kind, dims in ports]

    graph = helper.make_graph(nodes, "made", values(inputs), values(outputs), list(weights))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    path = folder / "made.onnx"
    path.write_bytes(made.SerializeToString())
    return str(path)


def identity(folder: Path, kind: int = FLOAT, dims: Dims = ("N", 4), *, opset: int = 17, ir: int = 8) -> str:
    """``y = x``."""
    return save(
        folder,
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", kind, dims)],
        [("y", kind, dims)],
        opset=opset,
        ir_version=ir,
    )


def affine(folder: Path, dims: Dims = ("N", 4)) -> str:
    """``y = 2x + 1``."""
    weights = [helper.make_tensor("two", FLOAT, [], [2.0]), helper.make_tensor("one", FLOAT, [], [1.0])]
    nodes = [helper.make_node("Mul", ["x", "two"], ["t"]), helper.make_node("Add", ["t", "one"], ["y"])]
    return save(folder, nodes, [("x", FLOAT, dims)], [("y", FLOAT, dims)], weights)


def beyond(folder: Path, threshold: float = 5) -> str:
    """``y = max(x - threshold, 0)``: to everything below it the same answer."""
    weights = [helper.make_tensor("least", FLOAT, [], [threshold])]
    nodes = [helper.make_node("Sub", ["x", "least"], ["t"]), helper.make_node("Relu", ["t"], ["y"])]
    return save(folder, nodes, [("x", FLOAT, ("N", 4))], [("y", FLOAT, ("N", 4))], weights)


def scalar_output(folder: Path) -> str:
    """``y = x`` and ``total`` = the sum of everything, a scalar."""
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)]
    return save(folder, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 4]), ("total", FLOAT, [])])


def transposed_output(folder: Path) -> str:
    """``y`` has the batch on axis 1."""
    node = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])
    return save(folder, [node], [("x", FLOAT, ["N", 4])], [("y", FLOAT, [4, "N"])])


def state_input(folder: Path) -> str:
    """``state`` [2,N,4] has the batch on axis 1, as in recurrent models."""
    node = helper.make_node("Add", ["x", "state"], ["y"])
    return save(folder, [node], [("x", FLOAT, ["N", 4]), ("state", FLOAT, [2, "N", 4])], [("y", FLOAT, [2, "N", 4])])


def nonzero(folder: Path) -> str:
    """``where``: as many columns as ``x`` has values that are not 0."""
    nodes = [helper.make_node("NonZero", ["x"], ["t"]), helper.make_node("Transpose", ["t"], ["where"])]
    return save(folder, nodes, [("x", FLOAT, ["N", 4])], [("where", INT64, ["M", 2])])


def unique(folder: Path) -> str:
    """``y``: the different values of ``x``, as many as there are."""
    node = helper.make_node("Unique", ["x"], ["y"])
    return save(folder, [node], [("x", FLOAT, ["N", 4])], [("y", FLOAT, [None])])


def pairwise(folder: Path) -> str:
    """``y`` [N,N]: every row against every other one."""
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    return save(folder, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", "M"])])


def input_as_output(folder: Path) -> str:
    """``x`` is an input and an output."""
    node = helper.make_node("Relu", ["x"], ["y"])
    ports: list[Port] = [("x", FLOAT, ["N", 4])]
    return save(folder, [node], ports, [("y", FLOAT, ["N", 4]), *ports])


def lying_output(folder: Path) -> str:
    """``y`` is declared [N,3] and computed as [N,4] through a Reshape that no shape inference can see through."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Reshape", ["x", "s"], ["t"]),
        helper.make_node("Identity", ["t"], ["y"]),
    ]
    return save(folder, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 3])])


def shrinking(folder: Path) -> str:
    """``y = x`` as long as no value is above 1.5, else its first row alone."""
    weights = [
        helper.make_tensor("limit", FLOAT, [], [1.5]),
        helper.make_tensor("one", INT64, [1], [1]),
        helper.make_tensor("zero", INT64, [1], [0]),
    ]
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Greater", ["largest", "limit"], ["above"]),
        helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
        helper.make_node("Where", ["above", "one", "rows"], ["kept"]),
        helper.make_node("Slice", ["x", "zero", "kept", "zero"], ["y"]),
    ]
    return save(folder, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, [None, 4])], weights)


def never_runs(folder: Path) -> str:
    """Reshapes rows of 4 into rows of 5."""
    weights = [helper.make_tensor("shape", INT64, [2], [-1, 5])]
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    return save(folder, [node], [("x", FLOAT, ["N", 4])], [("y", FLOAT, [None, 5])], weights)


def unknown_operator(folder: Path) -> str:
    """Holds a node that no runtime knows."""
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    return save(folder, [node], [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 4])])


def lookup(folder: Path) -> str:
    """``y`` = one of 8 numbers by the index ``x`` INT64 [N]; other indices fail the batch."""
    weights = [helper.make_tensor("table", FLOAT, [8], [float(value) for value in range(8)])]
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    return save(folder, [node], [("x", INT64, ["N"])], [("y", FLOAT, ["N"])], weights)


def conditional(folder: Path) -> str:
    """``y = 2x`` if the first value is positive, else ``y = x``: control flow."""

    def branch(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        value = helper.make_tensor_value_info("b", FLOAT, ["N", 4])
        return helper.make_graph([node], name, [], [value])

    then = branch("then", helper.make_node("Add", ["x", "x"], ["b"]))
    other = branch("else", helper.make_node("Identity", ["x"], ["b"]))
    weights = [helper.make_tensor("zero", FLOAT, [], [0.0])]
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], name="Choose", then_branch=then, else_branch=other),
    ]
    return save(folder, nodes, [("x", FLOAT, ("N", 4))], [("y", FLOAT, ("N", 4))], weights)
