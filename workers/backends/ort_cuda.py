"""ONNX Runtime on CUDA: one session on one stream, and two lanes on which batches follow each other.

Every lane has its own device buffers at fixed addresses and, with the graph on, a captured graph for each batch size,
all of one session: ``gpu_graph_id`` tells them apart. Graphs share the memory of intermediate results, so they never
run at the same time; one stream sees to that. What is captured is proven before it serves: see ``graph_capture``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mxpool.clock import now_us
from mxpool.errors import LoadFailed, RunFailed
from mxpool.messages import GRAPH_HIT, GRAPH_MISS, GRAPH_OFF
from mxpool.shm.layout import SlotLayout, SlotViews
from mxpool.spec import ModelSpec
from mxpool.workers.backends import ort_session
from mxpool.workers.backends.cuda_device import CudaDevice, CudaError
from mxpool.workers.backends.cuda_lanes import HostSlot, Lane
from mxpool.workers.backends.cuda_session import CudaSession
from mxpool.workers.backends.ort_session import Arrays, one_line
from mxpool.workers.backends.ort_signature import FoundSignature, read_signature
from mxpool.workers.backends.protocol import Loaded, Prepared, Ran

log = logging.getLogger(__name__)

LANES = 2  # one runs while the other is queued
GRAPH_SIZES = (1, 8, 32)  # and max_batch_size; a replay takes little less for few rows, so steps may be large


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
        self._device: CudaDevice
        self._session: CudaSession
        self._found: FoundSignature
        self._graph_word = GRAPH_OFF
        self._free_bytes = 0
        self._slots: Sequence[SlotViews] = ()
        self._registered = 0
        self._lanes: list[Lane] = []
        self._turn = 0
        self._started: deque[_Started] = deque()
        self._last_end_us = 0
        self._expected_us: dict[int, int] = {}

    # Loading

    def load(self, spec: ModelSpec) -> Loaded:
        """Open the file on the device and find its signature; see Backend.

        Raises:
            LoadFailed: one of its kinds, with what is wrong by name.
        """
        begin_us = now_us()
        self._spec = spec
        runtime = ort_session.import_runtime("cuda")
        ort_session.check_file(spec.path)
        try:
            self._device = CudaDevice.open()
            self._free_bytes = self._device.free_bytes()
        except CudaError as error:
            raise LoadFailed(model=spec.name, reason=str(error)) from None
        self._session = CudaSession(runtime, self._device, spec)
        self._session.open()
        self._found = read_signature(self._session.session, spec, self._session.plain_options)
        report = {
            "backend": "onnxruntime",
            "runtime": f"onnxruntime {runtime.__version__}",
            "provider": ort_session.PROVIDERS["cuda"][0],
            "threads": spec.threads,
            "probed": self._found.probed,
            "load_us": now_us() - begin_us,
        }
        return Loaded(self._found.signature, report)

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
            sizes, captured = self._prepare(layout)
            report = {
                "host": "pinned" if pinned else "staged",
                "lanes": LANES,
                **self._graph_report(sizes if captured else (), now_us() - begin_us),
                "device_bytes": self._free_bytes - self._device.free_bytes(),
            }
        except CudaError as error:
            self._device.check()
            raise LoadFailed(model=spec.name, reason=str(error)) from None
        return Prepared(sizes, report)

    def _prepare(self, layout: SlotLayout) -> tuple[tuple[int, ...], bool]:
        """Make the lanes ready to run; at which sizes, and whether by graph."""
        session = self._session
        if self._spec.graph != "off" and session.failure is None:
            sizes = self._capture_sizes()
            if session.capture(self._lanes, layout, sizes):
                return sizes, True
        sizes = self._plain_sizes()
        session.prepare_plain(self._lanes, layout, sizes)
        return sizes, False

    def _graph_report(self, captured: Sequence[int], took_us: int) -> dict[str, Any]:
        """What status shows of the graph, and the word that every batch is counted under."""
        self._graph_word = GRAPH_HIT if captured else GRAPH_MISS if self._spec.graph != "off" else GRAPH_OFF
        failure = self._session.failure
        report: dict[str, Any] = {
            "graph": "on" if captured else "off",
            "graph_setting": self._spec.graph,
            "graph_sizes": list(captured),
            "graph_failure": failure._asdict() if failure else {},
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
                ort_session.run_on_copies(self._session.session, inputs, outputs, self._session.plain_options)
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
        self._session.close(self._lanes)
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        self._slots = ()
        if self._registered:
            self._device.unregister(self._registered)
            self._registered = 0
        self._device.close()


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _copy_rows(rows: Arrays, targets: Arrays) -> None:
    for name, array in rows.items():
        target = targets[name]
        (target[: len(array)] if array.ndim else target)[...] = array
