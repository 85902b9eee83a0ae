"""ONNX Runtime on CUDA: one session on one stream, and two lanes on which batches follow each other.

Every lane has its own device buffers at fixed addresses and, with the graph on, a captured graph for each batch size,
all of one session: ``gpu_graph_id`` tells them apart. Graphs share the memory of intermediate results, so they never
run at the same time; one stream sees to that. What is captured is proven before it serves: see ``graph_capture``.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mxpool.clock import now_us
from mxpool.errors import LoadFailed, ModelInvalid, NotServable, RunFailed
from mxpool.messages import GRAPH_HIT, GRAPH_MISS, GRAPH_OFF
from mxpool.shm.layout import SlotLayout, SlotViews
from mxpool.spec import ModelSpec
from mxpool.workers.backends import ort_session
from mxpool.workers.backends.cuda_device import CudaDevice, CudaError
from mxpool.workers.backends.cuda_lanes import HostSlot, Lane
from mxpool.workers.backends.graph_capture import GraphCapture, GraphFailure, Proof
from mxpool.workers.backends.ort_session import Arrays, one_line
from mxpool.workers.backends.ort_signature import FoundSignature, read_signature
from mxpool.workers.backends.protocol import Loaded, Prepared, Ran

log = logging.getLogger(__name__)

LANES = 2  # one runs while the other is queued
GRAPH_SIZES = (1, 8, 32)  # and max_batch_size; a replay takes little less for few rows, so steps may be large
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


class _Started(NamedTuple):
    slot: int
    size: int
    lane: Lane | None
    begin_us: int
    error: RunFailed | None


class OrtCudaBackend:
    """See the module. ``in_flight`` is 1 where arrays are made anew for each batch."""

    in_flight = LANES

    def __init__(self) -> None:
        self._spec: ModelSpec
        self._runtime: Any = None
        self._device: CudaDevice
        self._session: Any = None
        self._found: FoundSignature
        self._failure: GraphFailure | None = None
        self._graph_word = GRAPH_OFF
        self._free_bytes = 0
        self._slots: Sequence[SlotViews] = ()
        self._registered = 0
        self._lanes: list[Lane] = []
        self._graph_ids: list[int] = []
        self._turn = 0
        self._started: deque[_Started] = deque()
        self._last_end_us = 0
        self._expected_us: dict[int, int] = {}
        self._plain_options: Any = None

    # Loading

    def load(self, spec: ModelSpec) -> Loaded:
        """Open the file on the device and find its signature; see Backend.

        Raises:
            LoadFailed: one of its kinds, with what is wrong by name.
        """
        begin_us = now_us()
        self._spec = spec
        self._runtime = ort_session.import_runtime("cuda")
        ort_session.check_file(spec.path)
        try:
            self._device = CudaDevice.open()
            self._free_bytes = self._device.free_bytes()
        except CudaError as error:
            raise LoadFailed(model=spec.name, reason=str(error)) from None
        self._plain_options = self._run_options(NO_GRAPH_ID)
        self._session = self._open_session()
        self._found = read_signature(self._session, spec, self._plain_options)
        report = {
            "backend": "onnxruntime",
            "runtime": f"onnxruntime {self._runtime.__version__}",
            "provider": ort_session.PROVIDERS["cuda"][0],
            "threads": spec.threads,
            "probed": self._found.probed,
            "load_us": now_us() - begin_us,
        }
        return Loaded(self._found.signature, report)

    def _open_session(self) -> Any:
        """With the graph on where it is asked for and the runtime takes it for this model, else without."""
        if self._spec.graph == "off":
            return self._session_with("0")
        try:
            return self._session_with("1")
        except ModelInvalid as error:
            session = self._session_with("0")  # a file that is bad anyhow raises here, with its own reason
            self._fail(GraphFailure.of(0, error))
            return session

    def _session_with(self, graph: str) -> Any:
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
            NotServable: if one is required.
        """
        if self._spec.graph == "require":
            where = f"at {failure.size} rows: " if failure.size else ""
            raise NotServable(path=self._spec.path, what="graph", name="require", reason=where + failure.reason)
        self._failure = failure
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

    # Binding

    def bind(self, memory: memoryview, slots: Sequence[SlotViews]) -> Prepared:
        """Make the lanes, capture and prove their graphs, or prepare plain runs; see Backend.

        Raises:
            LoadFailed: if there is no room on the device, or a required graph cannot be had.
        """
        self._slots = slots
        spec = self._spec
        if not spec.fixed_input_buffers:
            self.in_flight = 1
            return Prepared(self._plain_sizes(), {"host": "copied", **self._graph_report([], 0)})
        begin_us = now_us()
        try:
            layout = SlotLayout(self._found.signature, len(slots))
            base = _address(memory)
            pinned = self._register(base, layout.size_bytes)
            for _ in range(LANES):
                staging = None if pinned else HostSlot(self._device, layout)
                self._lanes.append(Lane(self._device, layout, base, staging))
            captured: tuple[int, ...] = ()
            if spec.graph != "off" and self._failure is None:
                captured, failure = self._capture(layout)
                if failure is not None:
                    self._fall_back(failure)
            sizes = captured or self._prepare_plain(layout)
            report = {
                "host": "pinned" if pinned else "staged",
                "lanes": LANES,
                **self._graph_report(captured, now_us() - begin_us),
                "device_bytes": self._free_bytes - self._device.free_bytes(),
            }
        except CudaError as error:
            self._device.check()
            raise LoadFailed(model=spec.name, reason=str(error)) from None
        return Prepared(sizes, report)

    def _graph_report(self, captured: Sequence[int], took_us: int) -> dict[str, Any]:
        """What status shows of the graph, and the word that every batch is counted under."""
        self._graph_word = GRAPH_HIT if captured else GRAPH_MISS if self._spec.graph != "off" else GRAPH_OFF
        report: dict[str, Any] = {
            "graph": "on" if captured else "off",
            "graph_setting": self._spec.graph,
            "graph_sizes": list(captured),
            "graph_failure": self._failure._asdict() if self._failure else {},
        }
        return {**report, "capture_ms": round(took_us / 1000, 1)} if captured else report

    def _register(self, base: int, size: int) -> bool:
        """Page-lock the slots themselves; False where the system does not let us."""
        try:
            self._device.register(base, size)
        except CudaError as error:
            log.warning("slots cannot be registered, batches are staged model=%s reason=%s", self._spec.name, error)
            self._device.check()
            return False
        self._registered = base
        return True

    def _plain_sizes(self) -> tuple[int, ...]:
        return self._spec.sizes if self._found.only_size is None else (self._found.only_size,)

    def _capture_sizes(self) -> tuple[int, ...]:
        if self._found.only_size is not None:
            return (self._found.only_size,)
        largest = self._found.signature.max_rows
        return self._spec.graph_sizes or (*(size for size in GRAPH_SIZES if size < largest), largest)

    def _capture(self, layout: SlotLayout) -> tuple[tuple[int, ...], GraphFailure | None]:
        """Capture every lane at every size; the sizes, or () and the first failure."""
        sizes, proofs = self._capture_sizes(), list[Proof]()
        capture = GraphCapture(self._device, self._session, layout, self._plain_options)
        try:
            for lane in self._lanes:
                for size in reversed(sizes):  # the largest first: what it allocates is enough for the others
                    proof = self._capture_one(capture, lane, size)
                    if proof.failure is not None:
                        return (), proof.failure
                    proofs.append(proof)
        finally:
            capture.close()
        self._log_proofs(proofs)
        return sizes, None

    def _capture_one(self, capture: GraphCapture, lane: Lane, size: int) -> Proof:
        graph_id = len(self._graph_ids) + 1  # 0 is the runtime's own
        self._graph_ids.append(graph_id)
        binding = lane.bind(self._session, size, self._run_options(graph_id, queue_only=True))
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

    def _fall_back(self, failure: GraphFailure) -> None:
        """Serve plain, from a session and a stream that no capture has touched; NotServable if that is not wanted."""
        self._let_go_of_session()
        self._fail(failure)
        self._device.renew_stream()
        self._session = self._session_with("0")

    def _prepare_plain(self, layout: SlotLayout) -> tuple[int, ...]:
        """Bind every lane at every size without a graph, and run each size once beside the slots."""
        sizes = self._plain_sizes()
        capture = GraphCapture(self._device, self._session, layout, self._plain_options)
        for lane in self._lanes:
            for size in sizes:
                # Not queued only: the runtime would free host buffers in a callback of the stream, where CUDA may not
                # be called, and end the process; and launching takes as long as the device does.
                binding = lane.bind(self._session, size, self._plain_options)
                try:
                    capture.warm_up(lane.slot, binding, size)
                except CudaError:
                    raise
                except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
                    reason = f"warm-up at {size} rows: {one_line(error)}"
                    raise LoadFailed(model=self._spec.name, reason=reason) from None
        capture.close()
        return sizes

    # Serving

    def start(self, slot: int, size: int) -> None:
        """Queue the batch on the next lane; see Backend.

        Raises:
            DeviceLost: if the device cannot be used any more.
        """
        begin_us, error = now_us(), None
        lane = self._lanes[self._turn] if self._lanes else None
        if lane is not None:
            self._turn = (self._turn + 1) % LANES
            try:
                if lane.staging is not None:
                    _copy_rows(self._rows(self._slots[slot].inputs, size), lane.staging.views.inputs)
                lane.start(slot, size)
            except Exception as raised:  # noqa: BLE001 - the runtime's errors share no base but Exception
                error = self._run_failed(raised)
        self._started.append(_Started(slot, size, lane, begin_us, error))

    def finish_due_us(self) -> int:
        """Three quarters through the time that the last batches of this size took; see Backend."""
        oldest = self._started[0]
        if oldest.error is not None:
            return 0
        begin_us = max(oldest.begin_us, self._last_end_us)
        return begin_us + self._expected_us.get(oldest.size, 0) * 3 // 4

    def finish(self) -> Ran:
        """Wait for the oldest batch by its event; see Backend.

        Raises:
            RunFailed: with the runtime's message; the slot's outputs are undefined, the session can go on.
            DeviceLost: if the device cannot be used any more.
        """
        slot, size, lane, begin_us, error = self._started.popleft()
        if error is not None:
            raise error
        views = self._slots[slot]
        try:
            if lane is None:
                inputs, outputs = self._rows(views.inputs, size), self._rows(views.outputs, size)
                ort_session.run_on_copies(self._session, inputs, outputs, self._plain_options)
            else:
                self._device.wait(lane.event)
                if lane.staging is not None:
                    _copy_rows(self._rows(lane.staging.views.outputs, size), views.outputs)
        except Exception as raised:  # noqa: BLE001 - the runtime's errors share no base but Exception
            raise self._run_failed(raised) from None
        begin_us, end_us = max(begin_us, self._last_end_us), now_us()
        self._last_end_us = end_us
        self._expect(size, end_us - begin_us)
        return Ran(begin_us, end_us, self._graph_word)

    def _expect(self, size: int, took_us: int) -> None:
        """Follow a shorter time at once and a longer one slowly: looking early costs little, late delays answers."""
        expected_us = self._expected_us.get(size, took_us)
        self._expected_us[size] = min(took_us, expected_us + (took_us - expected_us) // 8)

    def _run_failed(self, raised: Exception) -> RunFailed:
        """What to answer for the batch, once it is sure that the device can go on."""
        self._device.check()
        return RunFailed(model=self._spec.name, reason=one_line(raised))

    def _rows(self, arrays: Arrays, size: int) -> Arrays:
        batched = self._found.signature.batched
        return {name: array[:size] for name, array in arrays.items()} if batched else arrays

    # The end

    def unload(self) -> None:
        """Take everything down: stream idle, graphs, bindings, session, buffers, registration."""
        if self._lanes:
            self._lanes[0].settle(self._plain_options)
        self._device.synchronize()
        self._let_go_of_session()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        self._slots = ()
        if self._registered:
            self._device.unregister(self._registered)
            self._registered = 0
        self._device.close()

    def _let_go_of_session(self) -> None:
        if hasattr(self._session, "release_captured_graph"):  # 1.31 and later; before, they go with the session
            for graph_id in self._graph_ids:
                self._session.release_captured_graph(graph_id)
        self._graph_ids.clear()
        for lane in self._lanes:
            lane.unbind()
        self._session = None
        gc.collect()  # an exception's frames may hold the session


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _copy_rows(rows: Arrays, targets: Arrays) -> None:
    for name, array in rows.items():
        target = targets[name]
        (target[: len(array)] if array.ndim else target)[...] = array
