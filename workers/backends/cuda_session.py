"""Sessions of ONNX Runtime on one CUDA stream: with a captured graph for each lane and size, or plain.

There is one session at a time. If a capture fails, everything that took part in it is let go of, the stream too, before
another session is opened: a capture that broke off leaves nothing to serve from.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

from mxpool.errors import LoadFailed, ModelInvalid, NotServable
from mxpool.shm.layout import SlotLayout
from mxpool.spec import ModelSpec
from mxpool.workers.backends import ort_session
from mxpool.workers.backends.cuda_device import CudaDevice, CudaError
from mxpool.workers.backends.cuda_lanes import Lane
from mxpool.workers.backends.graph_capture import GraphCapture, GraphFailure, Proof
from mxpool.workers.backends.ort_session import one_line

log = logging.getLogger(__name__)

NO_GRAPH_ID = -1  # neither capture nor replay (onnxruntime_run_options_config_keys.h)
# Provider options of onnxruntime 1.31; the runtime's own errors name neither key nor place. Those that are missing here
# (device_id, user_compute_stream, enable_cuda_graph, do_copy_in_default_stream and allocators) are ours to set.
PROVIDER_OPTIONS = frozenset(
    {
        "arena_extend_strategy",
        "cudnn_conv1d_pad_to_nc1d",
        "cudnn_conv_algo_search",
        "cudnn_conv_use_max_workspace",
        "enable_cudnn",
        "enable_skip_layer_norm_strict_mode",
        "fuse_conv_bias",
        "gpu_mem_limit",
        "prefer_nhwc",
        "sdpa_kernel",
        "tunable_op_enable",
        "tunable_op_max_tuning_duration_ms",
        "tunable_op_tuning_enable",
        "use_ep_level_unified_stream",
        "use_tf32",
    }
)


class CudaSession:
    """The session that serves ``spec``; ``failure`` says why it has no graph although one is wanted.

    ``plain_options`` are run options that neither capture nor replay, and wait for the run.
    """

    def __init__(self, runtime: Any, device: CudaDevice, spec: ModelSpec) -> None:
        self._runtime = runtime
        self._device = device
        self._spec = spec
        self._graph_ids: list[int] = []
        self.plain_options = self._run_options(NO_GRAPH_ID)
        self.failure: GraphFailure | None = None
        self.session: Any = None

    def open(self) -> None:
        """With the graph on where it is asked for and the runtime takes it for this model, else without.

        Raises:
            LoadFailed: one of its kinds; NotServable if a graph is required and the runtime takes none.
        """
        if self._spec.graph == "off" or self._spec.graph_lost:
            if self._spec.graph_lost:
                self._fail(GraphFailure(0, "", self._spec.graph_lost))
            self.session = self._with_graph("0")
            return
        try:
            self.session = self._with_graph("1")
        except ModelInvalid as error:
            self.session = self._with_graph("0")  # a file that is bad anyhow raises here, with its own reason
            self._fail(GraphFailure.of(0, error))

    def _with_graph(self, graph: str) -> Any:
        """A session on the device's stream; ``do_copy_in_default_stream`` would order it with nothing of ours."""
        options = {
            **ort_session.provider_options(self._spec, PROVIDER_OPTIONS),
            "device_id": "0",
            "user_compute_stream": str(self._device.stream),
            "enable_cuda_graph": graph,
        }
        session_options = ort_session.session_options(self._runtime, self._spec)
        return ort_session.open_session(self._runtime, self._spec, session_options, options)

    def _fail(self, failure: GraphFailure) -> None:
        """Note that there is no graph.

        Raises:
            NotServable: if one is required; LoadFailed, which is tried again, if it was for want of memory.
        """
        if self._spec.graph == "require":
            where = f"at {failure.size} rows: " if failure.size else ""
            if ort_session.for_want_of_memory(failure.reason):
                raise LoadFailed(model=self._spec.name, reason=where + failure.reason)
            raise NotServable(path=self._spec.path, what="graph", name="require", reason=where + failure.reason)
        self.failure = failure
        log.info(
            "graph is off model=%s size=%d node=%s reason=%s",
            self._spec.name,
            failure.size,
            failure.node or "-",
            failure.reason,
        )

    def _run_options(self, graph_id: int, *, queue_only: bool = False) -> Any:
        options = ort_session.quiet_run_options(self._runtime)
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        if queue_only:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return options

    def capture(self, lanes: Sequence[Lane], layout: SlotLayout, sizes: Sequence[int]) -> bool:
        """Capture and prove every lane at every size; False if one failed: the session is then another, a plain one.

        Raises:
            NotServable: if a graph is required; the session is gone.
            CudaError, DeviceLost: there is no room, or the device is lost.
        """
        failure = self._capture(lanes, layout, sizes)
        if failure is not None:
            self._fall_back(lanes, failure)
        return failure is None

    def _capture(self, lanes: Sequence[Lane], layout: SlotLayout, sizes: Sequence[int]) -> GraphFailure | None:
        """The first failure; None if all went well."""
        proofs: list[Proof] = []
        capture = GraphCapture(self._device, self.session, layout, self.plain_options)
        try:
            for lane in lanes:
                for size in reversed(sizes):  # the largest first: what it allocates is enough for the others
                    proof = self._capture_one(capture, lane, size)
                    if proof.failure is not None:
                        return proof.failure
                    proofs.append(proof)
        finally:
            capture.close()
        self._log_proofs(proofs)
        return None

    def _capture_one(self, capture: GraphCapture, lane: Lane, size: int) -> Proof:
        graph_id = len(self._graph_ids) + 1  # 0 is the runtime's own
        self._graph_ids.append(graph_id)
        binding = lane.bind(self.session, size, self._run_options(graph_id, queue_only=True))
        return capture.capture(lane.slot, binding, size, self._run_options(graph_id))

    def _log_proofs(self, proofs: list[Proof]) -> None:
        exact, largest = all(proof.exact for proof in proofs), max(proof.largest for proof in proofs)
        log.info(
            "graphs captured model=%s graphs=%d exact=%d largest_difference=%g",
            self._spec.name,
            len(proofs),
            exact,
            largest,
        )

    def _fall_back(self, lanes: Sequence[Lane], failure: GraphFailure) -> None:
        """Serve plain, from a session and a stream that no capture has touched; NotServable if that is not wanted."""
        self._let_go(lanes)
        self._fail(failure)
        self._device.renew_stream()
        self.session = self._with_graph("0")

    def prepare_plain(self, lanes: Sequence[Lane], layout: SlotLayout, sizes: Sequence[int]) -> None:
        """Bind every lane at every size without a graph, and run each once beside the slots.

        Raises:
            LoadFailed: if a size cannot be run. CudaError, DeviceLost: as ``capture``.
        """
        capture = GraphCapture(self._device, self.session, layout, self.plain_options)
        for lane in lanes:
            for size in sizes:
                # Not queued only: the runtime would free host buffers in a callback of the stream, where CUDA may not
                # be called, and end the process; and launching takes as long as the device does.
                binding = lane.bind(self.session, size, self.plain_options)
                try:
                    capture.warm_up(lane.slot, binding, size)
                except CudaError:
                    raise
                except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
                    reason = f"warm-up at {size} rows: {one_line(error)}"
                    raise LoadFailed(model=self._spec.name, reason=reason) from None
        capture.close()

    def close(self, lanes: Sequence[Lane]) -> None:
        """Let go of graphs, bindings and session, in that order; nothing is in flight."""
        if lanes:
            lanes[0].settle(self.plain_options)
        self._device.synchronize()
        self._let_go(lanes)

    def _let_go(self, lanes: Sequence[Lane]) -> None:
        if hasattr(self.session, "release_captured_graph"):  # 1.31 and later; before, they go with the session
            for graph_id in self._graph_ids:
                self.session.release_captured_graph(graph_id)
        self._graph_ids.clear()
        for lane in lanes:
            lane.unbind()
        self.session = None
        gc.collect()  # an exception's frames may hold the session
