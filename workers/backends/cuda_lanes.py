"""Device memory in the shape of a slot, and the lanes on which batches travel through it.

A lane is a place for one batch in flight: device buffers at fixed addresses, one binding and one set of run options for
each batch size, and an event. All lanes share one session and one stream, so that their batches follow each other on
the device while the host already queues the next one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from mxpool.shm.layout import PAGE_BYTES, SlotLayout, SlotViews
from mxpool.tensors import TensorSpec
from mxpool.workers.backends.copy_plan import Copy, plan
from mxpool.workers.backends.cuda_device import CudaDevice

# Rows that no batch has are copied along where that saves a copy: a call costs some 5 us, 16 KiB 1 us of the bus.
INPUT_GAP_BYTES_MAX = 16_384


class DeviceSlot:
    """One slot's tensors in device memory, at the offsets that they have in a slot."""

    def __init__(self, device: CudaDevice, layout: SlotLayout) -> None:
        self._device = device
        self._layout = layout
        self.address = device.allocate(layout.slot_bytes)

    def binding(self, session: Any, size: int) -> Any:
        """A binding of ``session`` to these buffers at ``size`` rows; it holds addresses only."""
        layout, signature = self._layout, self._layout.signature
        binding = session.io_binding()
        for spec, offset in zip(signature.inputs, layout.input_offsets(0), strict=True):
            shape = signature.shape(spec, size)
            binding.bind_input(spec.name, "cuda", 0, spec.dtype.type, shape, self.address + offset)
        for spec, offset in zip(signature.outputs, layout.output_offsets(0), strict=True):
            shape = signature.shape(spec, size)
            binding.bind_output(spec.name, "cuda", 0, spec.dtype.type, shape, self.address + offset)
        return binding

    def free(self) -> None:
        """Give the memory back; no binding to it is used any more."""
        self._device.free(self.address)


class HostSlot:
    """One slot's tensors in page-locked host memory of our own: where slots cannot be registered, and for checks."""

    def __init__(self, device: CudaDevice, layout: SlotLayout) -> None:
        self._device = device
        self.address = device.allocate_host(layout.slot_bytes)
        memory = (ctypes.c_char * layout.slot_bytes).from_address(self.address)
        self.views: SlotViews = SlotLayout(layout.signature, 1).views(memoryview(memory).cast("B"), 0)

    def free(self) -> None:
        """Give the memory back; ``views`` dangle from now on."""
        self.views = SlotViews({}, {})
        self._device.free_host(self.address)


class Lane:
    """See the module. ``staging`` is the host end of its copies where the slots themselves cannot be."""

    def __init__(self, device: CudaDevice, layout: SlotLayout, base: int, staging: HostSlot | None) -> None:
        self._device = device
        self._layout = layout
        self._base = base
        self.staging = staging
        self.slot = DeviceSlot(device, layout)
        self.event = device.event()
        self._session: Any = None
        self._bindings: dict[int, Any] = {}
        self._run_options: dict[int, Any] = {}
        self._copies: dict[int, tuple[list[Copy], list[Copy]]] = {}

    def bind(self, session: Any, size: int, run_options: Any) -> Any:
        """Prepare batches of ``size`` rows; the binding, which is the one that they will run with."""
        self._session = session
        self._run_options[size] = run_options
        self._copies[size] = self._plan(size)
        binding = self._bindings[size] = self.slot.binding(session, size)
        return binding

    def settle(self, run_options: Any) -> None:
        """Run once to the end: what the runtime put off to the next run's end is not left to a session's."""
        self._session.run_with_iobinding(next(iter(self._bindings.values())), run_options)

    def unbind(self) -> None:
        """Let go of the session and of every binding; the stream is idle."""
        self._bindings.clear()
        self._run_options.clear()
        self._session = None

    def _plan(self, size: int) -> tuple[list[Copy], list[Copy]]:
        layout, signature = self._layout, self._layout.signature

        def sizes(specs: Sequence[TensorSpec]) -> list[int]:
            return [spec.row_bytes * size for spec in specs]

        inputs = plan(layout.input_offsets(0), sizes(signature.inputs), INPUT_GAP_BYTES_MAX)
        # Only the ends of pages may be written beside the rows: others lie between the tensors of a smaller batch.
        gap = PAGE_BYTES - 1 if size == signature.max_rows else -1
        return inputs, plan(layout.output_offsets(0), sizes(signature.outputs), gap)

    def start(self, slot: int, size: int) -> None:
        """Queue copy in, run and copy out of ``slot``, and the event behind them.

        Raises:
            CudaError, or the runtime's own: part of it may be queued.
        """
        device, address = self._device, self.slot.address
        host = self.staging.address if self.staging else self._base + slot * self._layout.slot_bytes
        inputs, outputs = self._copies[size]
        for offset, count in inputs:
            device.copy_in(address + offset, host + offset, count)
        self._session.run_with_iobinding(self._bindings[size], self._run_options[size])
        for offset, count in outputs:
            device.copy_out(host + offset, address + offset, count)
        device.record(self.event)

    def close(self) -> None:
        """Give back buffers and event."""
        self.slot.free()
        if self.staging is not None:
            self.staging.free()
        self._device.destroy(self.event)
