"""ONNX Runtime on the CPU: one session, and one binding for each slot and size that reads and writes the slot in place.

The CPU provider runs on bound memory without a copy, so a batch is one call. Warm-up uses memory of its own: by the
time that a second worker binds, slots hold other workers' batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from mxpool.clock import now_us
from mxpool.errors import LoadFailed, NotServable, RunFailed
from mxpool.shm.layout import SlotViews
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature
from mxpool.workers.backends.ort_session import (
    PROVIDERS,
    check_file,
    import_runtime,
    one_line,
    open_session,
    provider_options,
    quiet_run_options,
    run_on_copies,
    session_options,
)
from mxpool.workers.backends.ort_signature import filled_ones, filled_zeros, read_signature
from mxpool.workers.backends.protocol import Loaded, Prepared, Ran

Arrays = dict[str, npt.NDArray[Any]]


class OrtCpuBackend:
    """One InferenceSession; ``start`` notes a batch and ``finish`` runs it, so one batch is in flight."""

    in_flight = 1

    def __init__(self) -> None:
        self._session: Any = None
        self._spec: ModelSpec
        self._signature: Signature
        self._sizes: tuple[int, ...] = ()
        self._run_options: Any = None
        self._bindings: dict[tuple[int, int], Any] = {}
        self._slots: Sequence[SlotViews] = ()
        self._started: deque[tuple[int, int]] = deque()

    def load(self, spec: ModelSpec) -> Loaded:
        """Open the file and find its signature; see Backend.

        Raises:
            LoadFailed: one of its kinds, with what is wrong by name.
        """
        begin_us = now_us()
        self._spec = spec
        if spec.graph == "require":
            raise NotServable(path=spec.path, what="graph", name="require", reason="the CPU has no device graphs")
        runtime = import_runtime(spec.device_kind)
        check_file(spec.path)
        options = session_options(runtime, spec)
        self._session = open_session(runtime, spec, options, provider_options(spec, frozenset()))
        self._run_options = quiet_run_options(runtime)
        found = read_signature(self._session, spec, self._run_options)
        self._signature = found.signature
        self._sizes = spec.sizes if found.only_size is None else (found.only_size,)
        report = {
            "backend": "onnxruntime",
            "runtime": f"onnxruntime {runtime.__version__}",
            "provider": PROVIDERS[spec.device_kind][0],
            "threads": spec.threads,
            "probed": found.probed,
            "load_us": now_us() - begin_us,
        }
        return Loaded(self._signature, report)

    def bind(self, memory: memoryview, slots: Sequence[SlotViews]) -> Prepared:
        """Bind every slot at every size in place, and run each size once beside the slots; see Backend.

        Raises:
            LoadFailed: if a size cannot be run, or the runtime would not write to the slots.
        """
        del memory  # the views are enough: the CPU registers nothing
        self._slots = slots
        warm_up_us = {size: self._warm_up(size) for size in self._sizes}
        if self._spec.fixed_input_buffers:
            for slot, views in enumerate(slots):
                for size in self._sizes:
                    self._bindings[slot, size] = self._bound(
                        self._rows(views.inputs, size), self._rows(views.outputs, size)
                    )
        report = {"warm_up_us": [[size, took] for size, took in warm_up_us.items()], "bindings": len(self._bindings)}
        return Prepared(self._sizes, report)

    def _rows(self, arrays: Arrays, size: int) -> Arrays:
        return {name: array[:size] for name, array in arrays.items()} if self._signature.batched else arrays

    def _warm_up(self, size: int) -> int:
        """Run ``size`` rows in memory of our own and check that the outputs lie where they were bound; returns us."""
        signature = self._signature
        inputs = {spec.name: filled_ones(signature.shape(spec, size), spec) for spec in signature.inputs}
        outputs = {spec.name: filled_zeros(signature.shape(spec, size), spec) for spec in signature.outputs}
        binding = self._bound(inputs, outputs)
        begin_us = now_us()
        try:
            self._session.run_with_iobinding(binding, self._run_options)
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            raise LoadFailed(model=self._spec.name, reason=f"warm-up at {size} rows: {one_line(error)}") from None
        took_us = now_us() - begin_us
        self._check_in_place(binding, outputs)
        return took_us

    def _bound(self, inputs: Arrays, outputs: Arrays) -> Any:
        """A binding to exactly these arrays. It holds addresses only: the arrays must outlive it."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._check_in_place(binding, outputs)
        return binding

    def _check_in_place(self, binding: Any, outputs: Arrays) -> None:
        for value, (name, array) in zip(binding.get_outputs(), outputs.items(), strict=True):
            if array.size and value.data_ptr() != array.ctypes.data:
                reason = "the runtime does not write it to the memory that it is given"
                raise NotServable(path=self._spec.path, what="output", name=name, reason=reason)

    def start(self, slot: int, size: int) -> None:
        """Note the batch; ``finish`` runs it."""
        self._started.append((slot, size))

    def finish_due_us(self) -> int:
        """Now: the work is done in ``finish``."""
        return 0

    def finish(self) -> Ran:
        """Run the batch in the caller's thread; see Backend.

        Raises:
            RunFailed: with the runtime's message. The slot's outputs are undefined, the session can go on.
        """
        slot, size = self._started.popleft()
        binding = self._bindings[slot, size] if self._spec.fixed_input_buffers else None
        begin_us = now_us()
        try:
            if binding is not None:
                self._session.run_with_iobinding(binding, self._run_options)
            else:
                views = self._slots[slot]
                inputs, outputs = self._rows(views.inputs, size), self._rows(views.outputs, size)
                run_on_copies(self._session, inputs, outputs, self._run_options)
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            raise RunFailed(model=self._spec.name, reason=one_line(error)) from None
        return Ran(begin_us, now_us())

    def unload(self) -> None:
        """Let go of the bindings, then of the views, then of the session."""
        self._bindings.clear()
        self._slots = ()
        self._session = None
