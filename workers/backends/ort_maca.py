"""ONNX Runtime with the MACA provider (MetaX): one session, one fixed input block, one batch size, one batch in flight.

As the provider's users run it: host tensors over memory that never moves, warm-up included; a slot's rows are copied in
and the runtime copies to the device and back. With ``direct_slots = true`` among the options the tensors lie over the
slots themselves and nothing is copied in: only for builds that read the address they are given, which loading tries
with memory of its own and ``mxpool verify`` with every slot.

The provider's public build is ONNX Runtime 1.12: nothing newer is called. It can log a failed device run and still
return success, so outputs are poisoned after each batch and a batch of poison fails. ``docs/maca.md`` says what of all
this ran on a card.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mxpool.clock import now_us
from mxpool.errors import LoadFailed, ModelInvalid, NotServable, ProviderUnavailable, RunFailed
from mxpool.messages import GRAPH_HIT, GRAPH_MISS, GRAPH_OFF
from mxpool.shm.layout import SlotViews
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature
from mxpool.workers.backends import ort_session, replay_check
from mxpool.workers.backends.host_block import HostBlock, HostRuns, host_values
from mxpool.workers.backends.maca_graph import (
    OWN_OPTIONS,
    PLAIN,
    GraphFailed,
    Proof,
    Prover,
    blank_outputs,
    graph_options,
)
from mxpool.workers.backends.ort_session import one_line
from mxpool.workers.backends.ort_signature import read_signature
from mxpool.workers.backends.protocol import DeviceLost, Loaded, Prepared, Ran

log = logging.getLogger(__name__)

DIRECT = "direct_slots"


class OrtMacaBackend:
    """One InferenceSession; ``start`` notes a batch and ``finish`` runs it. Every batch has the full batch size."""

    in_flight = 1

    def __init__(self) -> None:
        self._runtime: Any = None
        self._spec: ModelSpec
        self._signature: Signature
        self._direct = False
        self._run_options: Any = None
        self._session: Any = None
        self._runs: HostRuns
        self._block: HostBlock | None = None
        self._values: dict[int, dict[str, Any]] = {}
        self._slots: Sequence[SlotViews] = ()
        self._graph = GRAPH_OFF
        self._no_switch = ""  # why a session with the graph switched off did not open, where one without the switch did
        self._started: deque[int] = deque()

    def load(self, spec: ModelSpec) -> Loaded:
        """Open the file without a graph and find its signature: a graph's options need the shapes. See Backend.

        Raises:
            LoadFailed: one of its kinds, with what is wrong by name.
        """
        begin_us = now_us()
        self._spec, self._direct = _own_options(spec)
        self._runtime = ort_session.import_runtime(spec.device_kind)
        ort_session.check_file(spec.path)
        self._run_options = ort_session.quiet_run_options(self._runtime)
        self._session = self._open_plain()
        found = read_signature(self._session, self._spec, self._run_options)
        self._signature = found.signature
        report = {
            "backend": "onnxruntime",
            "runtime": f"onnxruntime {self._runtime.__version__}",
            "provider": ort_session.PROVIDERS[spec.device_kind][0],
            "threads": spec.threads,
            "probed": found.probed,
            "load_us": now_us() - begin_us,
        }
        return Loaded(self._signature, report)

    def _open_plain(self) -> Any:
        """A session with the graph switched off, or for a build that knows no such switch, without a word of it."""
        try:
            return self._open(PLAIN)
        except (ModelInvalid, ProviderUnavailable) as refused:
            first = refused
        try:
            session = self._open({})
        except (ModelInvalid, ProviderUnavailable):
            raise first from None
        self._no_switch = first.message
        return session

    def _open(self, own: dict[str, str]) -> Any:
        options = ort_session.session_options(self._runtime, self._spec)
        given = ort_session.provider_options(self._spec, None)
        return ort_session.open_session(self._runtime, self._spec, options, {**given, **own})

    def bind(self, memory: memoryview, slots: Sequence[SlotViews]) -> Prepared:
        """Warm up, capture and prove the graph on the block that will serve; see Backend.

        Raises:
            LoadFailed: if the full batch cannot be run; NotServable if the graph is required and there is none.
        """
        del memory  # the runtime is given host tensors: nothing is registered
        self._slots = slots
        self._block = HostBlock(self._runtime, self._signature, self._spec.path)
        self._runs = HostRuns(self._session, self._run_options)
        warm_up_us = self._warm_up(self._block)
        report = {"warm_up_us": [[self._signature.max_rows, warm_up_us]], **self._prepare_graph()}
        if self._direct:
            for slot, views in enumerate(slots):
                self._values[slot] = host_values(self._runtime, views.inputs, self._spec.path)
        rows = self._signature.max_rows
        report |= {
            "graph_setting": self._spec.graph,
            "sizes": [rows],
            "graph_sizes": [rows] if self._graph == GRAPH_HIT else [],
            "lanes": 1,
            "host": "direct" if self._direct else "copied",
            "in_flight": self.in_flight,
            "provider": ort_session.PROVIDERS[self._spec.device_kind][0],
            "runtime": f"onnxruntime {self._runtime.__version__}",
        }
        return Prepared((rows,), report)

    def _warm_up(self, block: HostBlock) -> int:
        """Run the full batch twice, since only the second run can give the poison of the first back; microseconds."""
        block.fill(replay_check.inputs(self._signature, self._signature.max_rows, 0))
        outputs = blank_outputs(self._signature)
        begin_us = now_us()
        try:
            self._runs.run(block.values, outputs)
            took_us = now_us() - begin_us
            self._runs.run(block.values, outputs)
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            reason = f"warm-up at {self._signature.max_rows} rows: {one_line(error)}"
            raise LoadFailed(model=self._spec.name, reason=reason) from None
        return took_us

    def _prepare_graph(self) -> dict[str, Any]:
        """Let a session with a graph take over, if there is to be one and it proves right; else the plain one stays."""
        if self._spec.graph == "off":
            return {"graph": "off", "graph_failure": {}}
        begin_us = now_us()
        try:
            session, proof = self._proven_session()
        except GraphFailed as failed:
            return self._without_graph(failed)
        self._session, self._runs = session, HostRuns(session, self._run_options)
        self._graph = GRAPH_HIT
        gc.collect()  # the plain session's memory on the device
        log.info(
            "maca graph proven model=%s exact=%d largest=%g tolerance=%g capture_ms=%.1f",
            *(self._spec.name, proof.exact, proof.largest, proof.tolerance, proof.capture_us / 1000),
        )
        check = {"exact": proof.exact, "largest": proof.largest, "tolerance": proof.tolerance}
        times = {"capture_ms": proof.capture_us / 1000, "prove_us": now_us() - begin_us}
        return {"graph": "on", "graph_failure": {}, "graph_check": check, **times}

    def _proven_session(self) -> tuple[Any, Proof]:
        assert self._block is not None
        if self._no_switch:
            raise GraphFailed(f"this build has no graphs: {self._no_switch}")
        try:
            session = self._open(graph_options(self._signature))
        except LoadFailed as error:
            raise GraphFailed(error.message) from None
        graphed = HostRuns(session, self._run_options)
        beside = HostBlock(self._runtime, self._signature, self._spec.path) if self._direct else None
        return session, Prover(self._signature, self._runs, graphed, self._block).prove(beside)

    def _without_graph(self, failed: GraphFailed) -> dict[str, Any]:
        rows = self._signature.max_rows
        node = f" (node {failed.node})" if failed.node else ""
        if self._spec.graph == "require":
            reason = f"no maca graph at {rows} rows{node}: {failed}"
            raise NotServable(path=self._spec.path, what="graph", name="require", reason=reason)
        assert self._block is not None
        self._warm_up(self._block)  # a capture that failed may have left the device in no good state
        self._graph = GRAPH_MISS
        log.warning("maca graph off model=%s size=%d%s reason=%s", self._spec.name, rows, node, failed)
        return {"graph": "off", "graph_failure": {"size": rows, "node": failed.node, "reason": str(failed)}}

    def start(self, slot: int, size: int) -> None:
        """Note the batch; ``finish`` runs it. ``size`` is the only one there is."""
        del size
        self._started.append(slot)

    def finish_due_us(self) -> int:
        """Now: the work is done in ``finish``."""
        return 0

    def finish(self) -> Ran:
        """Run the batch in the caller's thread; see Backend.

        Raises:
            RunFailed: with the runtime's message, or because it wrote nothing. The session can go on.
            DeviceLost: if inputs that ran when the model was loaded do not run any more either.
        """
        slot = self._started.popleft()
        begin_us = now_us()
        try:
            self._run(slot)
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            self._check_device(error)
            raise RunFailed(model=self._spec.name, reason=one_line(error)) from None
        return Ran(begin_us, now_us(), self._graph)

    def _check_device(self, failed: Exception) -> None:
        """A worker without a card fails fast, and would draw the batches of the others: it must leave."""
        assert self._block is not None
        self._block.fill(replay_check.inputs(self._signature, self._signature.max_rows, 0))
        try:
            self._runs.run(self._block.values, blank_outputs(self._signature))
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            raise DeviceLost(f"{one_line(failed)}; and what ran at start: {one_line(error)}") from None

    def _run(self, slot: int) -> None:
        views = self._slots[slot]
        assert self._block is not None
        if not self._spec.fixed_input_buffers:
            anew = {name: array.copy() for name, array in views.inputs.items()}
            self._runs.run(host_values(self._runtime, anew, self._spec.path), views.outputs)
            return
        if not self._direct:
            self._block.fill(views.inputs)
        self._runs.run(self._values[slot] if self._direct else self._block.values, views.outputs)

    def unload(self) -> None:
        """Let go of the tensors, then of the views, then of the session."""
        self._values.clear()
        self._block = None
        self._slots = ()
        del self._runs
        self._session = None


def _own_options(spec: ModelSpec) -> tuple[ModelSpec, bool]:
    """``spec`` without the options that are this backend's own, and whether slots are used directly.

    Raises:
        NotServable: for an option of the provider that is set from ``graph`` and the shapes.
    """
    for key in spec.options:
        if key.removeprefix(ort_session.PROVIDER_PREFIX) in OWN_OPTIONS:
            reason = "it is set from the keys graph and max_batch_size and from the model's shapes"
            raise NotServable(path=spec.path, what="option", name=key, reason=reason)
    direct = spec.options.get(DIRECT, False)
    if not isinstance(direct, bool):
        raise NotServable(path=spec.path, what="option", name=DIRECT, reason=f"{direct!r} is not true or false")
    graph = spec.graph if spec.fixed_input_buffers else "off"
    options = {key: value for key, value in spec.options.items() if key != DIRECT}
    return replace(spec, options=options, graph=graph), direct and spec.fixed_input_buffers
