"""One CUDA device as a worker uses it: the calls of ``cuda.bindings.runtime``, with their errors as exceptions.

Everything is queued on one non-blocking stream, by one thread: the state of a capture belongs to the thread, and an
unsafe call of another thread would end it (docs.nvidia.com, cudaStreamBeginCapture, global mode). Waiting is by
blocking event, which leaves the CPU to others; the default policy spins.

Addresses are plain integers. Host memory that takes part in a copy is page-locked: registered, or allocated here.
"""

from __future__ import annotations

import importlib
from typing import Any

from mxpool.errors import ProviderUnavailable
from mxpool.workers.backends.protocol import DeviceLost

PACKAGE = "mxpool[cuda]"
NO_DEVICE = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorInvalidDevice")  # for good


class CudaError(Exception):
    """A call failed; ``name`` is CUDA's own, such as ``cudaErrorMemoryAllocation``."""

    def __init__(self, call: str, name: str, words: str) -> None:
        super().__init__(f"{call}: {name} ({words})")
        self.name = name


class CudaDevice:
    """The first visible device, initialised. ``stream`` is an address too, for ``user_compute_stream``."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.stream = 0
        self._stream: Any = None
        # Four calls a batch: looked up once.
        self._copy, self._record, self._wait = (
            runtime.cudaMemcpyAsync,
            runtime.cudaEventRecord,
            runtime.cudaEventSynchronize,
        )
        kinds = runtime.cudaMemcpyKind
        self._to_device, self._to_host = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost

    @classmethod
    def open(cls) -> CudaDevice:
        """Take the first visible device.

        Raises:
            ProviderUnavailable: without the bindings, a driver or a device; with the loader's or the driver's words.
            CudaError: whatever else is wrong, which may pass.
        """
        try:
            runtime = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise _unavailable("nothing", f"cuda.bindings cannot be imported ({error})") from None
        device = cls(runtime)
        try:
            count = device._call("cudaGetDeviceCount")
            if count == 0:
                raise _unavailable("no device", "the driver shows none to this process (CUDA_VISIBLE_DEVICES)")
            device._call("cudaSetDeviceFlags", runtime.cudaDeviceScheduleBlockingSync)
            device._call("cudaSetDevice", 0)
            device._call("cudaFree", 0)  # makes the context, so that its memory is not taken for the model's
            device._stream = device._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        except CudaError as error:
            if error.name not in NO_DEVICE:
                raise  # another process may hold all memory, or the device recover from one that died
            raise _unavailable("no usable device", str(error)) from None
        device.stream = int(device._stream)
        return device

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call ``name``; its one result, or all but the status as they come.

        Raises:
            CudaError: for any status but success.
        """
        status, *results = getattr(self._runtime, name)(*arguments)
        if status != 0:
            raise self._error(name, status)
        return results[0] if len(results) == 1 else results

    def _error(self, call: str, status: Any) -> CudaError:
        _, words = self._runtime.cudaGetErrorString(status)
        text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
        return CudaError(call, getattr(status, "name", str(status)), text)

    # Memory

    def free_bytes(self) -> int:
        """Free memory of the device, whoever uses the rest."""
        free, _ = self._call("cudaMemGetInfo")
        return int(free)

    def allocate(self, size: int) -> int:
        """Device memory; CudaError without room."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        """Give ``allocate``'s memory back; nothing may run on it."""
        self._call("cudaFree", address)

    def allocate_host(self, size: int) -> int:
        """Page-locked host memory."""
        return int(self._call("cudaHostAlloc", size, 0))

    def free_host(self, address: int) -> None:
        """Give ``allocate_host``'s memory back."""
        self._call("cudaFreeHost", address)

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory that is there already; address and size are whole pages."""
        self._call("cudaHostRegister", address, size, 0)

    def unregister(self, address: int) -> None:
        """Undo ``register``, before the memory is unmapped."""
        self._call("cudaHostUnregister", address)

    # Work on the stream

    def copy_in(self, device: int, host: int, size: int) -> None:
        """Queue a copy from page-locked host memory."""
        (status,) = self._copy(device, host, size, self._to_device, self._stream)
        if status != 0:
            raise self._error("cudaMemcpyAsync", status)

    def copy_out(self, host: int, device: int, size: int) -> None:
        """Queue a copy to page-locked host memory."""
        (status,) = self._copy(host, device, size, self._to_host, self._stream)
        if status != 0:
            raise self._error("cudaMemcpyAsync", status)

    def event(self) -> Any:
        """An event whose waiting blocks instead of spinning."""
        runtime = self._runtime
        flags = runtime.cudaEventBlockingSync | runtime.cudaEventDisableTiming
        return self._call("cudaEventCreateWithFlags", flags)

    def record(self, event: Any) -> None:
        """Let ``event`` stand for what is queued so far."""
        (status,) = self._record(event, self._stream)
        if status != 0:
            raise self._error("cudaEventRecord", status)

    def wait(self, event: Any) -> None:
        """Block until the work that ``event`` stands for is done; its error, if it failed."""
        (status,) = self._wait(event)
        if status != 0:
            raise self._error("cudaEventSynchronize", status)

    def destroy(self, event: Any) -> None:
        """Give an event back."""
        self._call("cudaEventDestroy", event)

    def synchronize(self) -> None:
        """Block until the stream is idle."""
        self._call("cudaStreamSynchronize", self._stream)

    def renew_stream(self) -> None:
        """Another stream for what comes: a capture that failed may have left the old one in no good state."""
        self._runtime.cudaStreamDestroy(self._stream)
        self._stream = self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        self.stream = int(self._stream)

    def check(self) -> None:
        """Find out after an error whether the device can still be used.

        Raises:
            DeviceLost: if a fresh call fails as well, which means that the error is sticky.
        """
        self._runtime.cudaGetLastError()  # takes an error that is not sticky away
        (status,) = self._runtime.cudaDeviceSynchronize()
        if status != 0:
            raise DeviceLost(str(self._error("cudaDeviceSynchronize", status)))

    def close(self) -> None:
        """Give the stream back; nothing is queued and no session uses it."""
        self._call("cudaStreamDestroy", self._stream)


def _unavailable(actual: str, reason: str) -> ProviderUnavailable:
    return ProviderUnavailable(provider="CUDAExecutionProvider", actual=actual, reason=reason, package=PACKAGE)
