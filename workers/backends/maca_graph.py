"""Maca graphs: the provider's options for one, and the proof that a session with a graph answers as one without does.

A graph is for one shape: every batch has the full batch size. Nobody outside of the provider can see whether a run was
a replay. What can be seen is whether its answers are right and follow the inputs, and that is what is proven.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mxpool.clock import now_us
from mxpool.tensors import Signature
from mxpool.workers.backends import replay_check
from mxpool.workers.backends.host_block import HostBlock, HostRuns
from mxpool.workers.backends.ort_session import Arrays, failed_node, one_line

SWITCH, SHAPE, MAX_BATCH = "maca_graph_switch", "maca_graph_opt_shape", "maca_graph_max_opt_batch"
OWN_OPTIONS = frozenset((SWITCH, SHAPE, MAX_BATCH))
PLAIN = {SWITCH: "0"}  # the other two stay away: the C++ interface takes a null pointer and 0 for them


class GraphFailed(Exception):
    """There is no graph that may serve; ``node`` is the one that the runtime names, or empty."""

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason)
        self.node = node

    @classmethod
    def of(cls, error: BaseException) -> GraphFailed:
        """What the runtime says, with the node that it names."""
        return cls(one_line(error), failed_node(error))


class Proof(NamedTuple):
    """``largest`` difference of a graph's answer to a plain one, and of two plain ones (``tolerance``)."""

    capture_us: int
    exact: bool
    largest: float
    tolerance: float


def graph_options(signature: Signature) -> dict[str, str]:
    """The provider's options: inputs in the session's order with their full shapes, ``numerical:128x48,…``."""
    rows = signature.max_rows
    shapes = [f"{spec.name}:{'x'.join(map(str, signature.shape(spec, rows)))}" for spec in signature.inputs]
    return {SWITCH: "1", SHAPE: ",".join(shapes), MAX_BATCH: str(rows)}


def blank_outputs(signature: Signature) -> Arrays:
    """Arrays for the outputs of a full batch."""
    return {spec.name: np.zeros(signature.shape(spec, signature.max_rows), spec.dtype) for spec in signature.outputs}


class Prover:
    """Compares a session that has a graph with one that has none, on the input block that will serve."""

    def __init__(self, signature: Signature, plain: HostRuns, graphed: HostRuns, block: HostBlock) -> None:
        self._signature = signature
        self._plain = plain
        self._graphed = graphed
        self._block = block

    def prove(self, beside: HostBlock | None) -> Proof:
        """Capture, then hold answers to two inputs that differ against plain ones.

        ``beside`` is another block, for sessions that are to read their inputs wherever they lie: the same is asked of
        it, with what it holds differing from what the first block holds.

        Raises:
            GraphFailed: with what was wrong.
        """
        try:
            first, second = self._two_inputs()
            begin_us = now_us()
            self._answer(self._graphed, first, self._block)  # captures
            capture_us = now_us() - begin_us
            verdicts = [self._compare(given, self._block) for given in (first, second, first)]
            if beside is not None:
                verdicts.append(self._compare(second, beside))
        except GraphFailed:
            raise
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            raise GraphFailed.of(error) from None
        exact = all(verdict.exact for verdict in verdicts)
        largest = max(verdict.largest for verdict in verdicts)
        return Proof(capture_us, exact, largest, max(verdict.tolerance for verdict in verdicts))

    def _two_inputs(self) -> tuple[Arrays, Arrays]:
        rows = self._signature.max_rows
        found = replay_check.two_inputs(
            self._signature, rows, lambda given: self._answer(self._plain, given, self._block)
        )
        if found is None:
            raise GraphFailed("no two inputs have different answers: nothing would show that a replay reads its input")
        return found

    def _compare(self, given: Arrays, block: HostBlock) -> replay_check.Verdict:
        replayed = self._answer(self._graphed, given, block)
        plain, again = (self._answer(self._plain, given, block) for _ in range(2))
        verdict = replay_check.judge(plain, again, replayed)
        if not verdict.ok:
            place = "" if block is self._block else ", with inputs at another address than the captured one"
            raise GraphFailed(
                f"with the graph, {verdict.where} differs by {verdict.largest:g} from a run without it "
                f"(two of those: {verdict.tolerance:g}){place}"
            )
        return verdict

    def _answer(self, runs: HostRuns, given: Arrays, block: HostBlock) -> Arrays:
        block.fill(given)
        outputs = blank_outputs(self._signature)
        runs.run(block.values, outputs)
        return outputs
