from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from mxpool.tensors import Signature, TensorSpec
from mxpool.workers.backends.host_block import HostBlock
from mxpool.workers.backends.maca_graph import PLAIN, GraphFailed, Proof, Prover, blank_outputs, graph_options

Array = npt.NDArray[Any]
SIGNATURE = Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),), 8)


class Runs:
    """Doubles its input, give or take: what it adds to each run, in turn, the last for ever."""

    def __init__(self, *added: float, fails: str = "") -> None:
        self.added = [*added] or [0.0]
        self.fails = fails
        self.runs = 0

    def run(self, values: dict[str, Any], outputs: dict[str, Array]) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        outputs["y"][...] = 2 * values["x"].numpy() + np.float32(self.added[min(self.runs, len(self.added) - 1)])
        self.runs += 1


class Forgetful(Runs):
    """Answers to what lay at the first address."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def run(self, values: dict[str, Any], outputs: dict[str, Array]) -> None:
        self.first = self.first or values
        super().run(self.first, outputs)


def prove(plain: Any, graphed: Any, *, beside: bool = False) -> Proof:
    block = HostBlock(onnxruntime, SIGNATURE, "model.onnx")
    other = HostBlock(onnxruntime, SIGNATURE, "model.onnx") if beside else None
    return Prover(SIGNATURE, plain, graphed, block).prove(other)


def test_the_options_of_the_seeds_model() -> None:
    inputs = tuple(TensorSpec(*row) for row in (("numerical", "FP32", (48,)), ("categorical", "FP32", (39,))))
    signature = Signature((*inputs, TensorSpec("keyword_vec", "FP32", (768,))), (), 128)
    assert graph_options(signature) == {
        "maca_graph_switch": "1",
        "maca_graph_opt_shape": "numerical:128x48,categorical:128x39,keyword_vec:128x768",
        "maca_graph_max_opt_batch": "128",
    }
    assert PLAIN == {"maca_graph_switch": "0"}


def test_the_shape_of_a_row_of_one_value_is_the_batch_alone() -> None:
    signature = Signature((TensorSpec("x", "FP32", ()), TensorSpec("z", "INT64", (2, 3))), (), 16)
    assert graph_options(signature)["maca_graph_opt_shape"] == "x:16,z:16x2x3"


def test_blank_outputs_are_those_of_a_full_batch() -> None:
    assert {name: (array.shape, array.dtype) for name, array in blank_outputs(SIGNATURE).items()} == {
        "y": ((8, 4), np.dtype(np.float32))
    }


@pytest.mark.parametrize("beside", [True, False])
def test_equal_answers_prove_a_graph(beside: bool) -> None:
    proof = prove(Runs(), Runs(), beside=beside)
    assert (proof.exact, proof.largest, proof.tolerance) == (True, 0.0, 0.0)
    assert proof.capture_us >= 0


def test_a_difference_as_large_as_between_two_plain_runs_is_told_and_taken() -> None:
    wavering = Runs(0, 0, *(0, 0.5) * 3)
    proof = prove(wavering, Runs(0, 0.25))
    assert not proof.exact
    assert (proof.largest, proof.tolerance) == pytest.approx((0.25, 0.5), rel=1e-3)


@pytest.mark.parametrize("wrong_at", [1, 2, 3])
def test_one_wrong_answer_after_the_capture_is_enough(wrong_at: int) -> None:
    added = [0.0] * wrong_at + [1.0, 0.0]
    with pytest.raises(GraphFailed, match=r"with the graph, y\[\d, \d\] differs by 1 .*\(two of those: 0\)$"):
        prove(Runs(), Runs(*added))


def test_a_session_that_reads_the_captured_address_is_proven_there_and_nowhere_else() -> None:
    assert prove(Runs(), Forgetful()).exact
    with pytest.raises(GraphFailed, match="inputs at another address than the captured one"):
        prove(Runs(), Forgetful(), beside=True)


def test_what_the_runtime_says_is_kept_with_its_node() -> None:
    with pytest.raises(GraphFailed, match="captured badly") as caught:
        prove(Runs(), Runs(fails="running If node. Name:'branch_7' Status Message:\ncaptured badly"))
    assert caught.value.node == "branch_7"
    assert "\n" not in str(caught.value)
    assert GraphFailed.of(ValueError("no place")).node == ""
