"""A stand-in for ``cuda.bindings.runtime`` on a machine without a GPU: the calls that mxpool makes, and no others.

Device memory is host memory of its own. A stream is a list of work that runs only when somebody waits for it, so that
what is read too early is seen. Copies need page-locked host memory here: forgetting to register is an error. Names and
signatures are those of cuda-bindings 13.

``MXPOOL_STANDIN_FAULT`` injects what goes wrong (several by comma): ``no_device``, ``no_driver``, ``register``
(registration is refused), ``memory`` (no room on the device), ``context`` (no room for a context), ``lost:N`` (from the
Nth waiting on, every call fails).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any

cudaDeviceScheduleBlockingSync = 4
cudaEventBlockingSync = 1
cudaEventDisableTiming = 2
cudaStreamNonBlocking = 1
TOTAL_BYTES = 8 << 30
PAGE_BYTES = 4096


class cudaError_t(IntEnum):
    """The statuses that are used here."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidResourceHandle = 400
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorLaunchFailure = 719
    cudaErrorNotPermitted = 800


class cudaMemcpyKind(IntEnum):
    """Directions of copies."""

    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


OK = cudaError_t.cudaSuccess


class Stream(int):
    """Work that has not run yet."""

    work: list[Callable[[], None]]


class _Event:
    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.behind = 0


class _Machine:
    """All state of this process's device."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.device: dict[int, int] = {}
        self.locked: dict[int, int] = {}
        self.streams: dict[int, Stream] = {}
        self.flags = 0
        self.device_is_set = False
        self.waits = 0
        self.lost = False
        self.calls: list[str] = []

    def lies_in(self, spans: dict[int, int], address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in spans.items())


machine = _Machine()
faults = set(filter(None, os.environ.get("MXPOOL_STANDIN_FAULT", "").split(",")))
LOST_AFTER = next((int(fault.partition(":")[2]) for fault in faults if fault.startswith("lost:")), 0)


def _allocate(size: int, spans: dict[int, int]) -> int:
    block = ctypes.create_string_buffer(size + PAGE_BYTES)
    address = -(-ctypes.addressof(block) // PAGE_BYTES) * PAGE_BYTES
    machine.blocks[address] = block
    spans[address] = size
    return address


def _free(address: int, spans: dict[int, int]) -> cudaError_t:
    if spans.pop(address, None) is None:
        return cudaError_t.cudaErrorInvalidValue
    del machine.blocks[address]
    return OK


def drain(stream: Stream) -> None:
    """Run what was queued."""
    while stream.work:
        stream.work.pop(0)()


def find_stream(address: int) -> Stream:
    """The stream that the runtime was given as an address."""
    return machine.streams[address]


def _waited() -> cudaError_t:
    machine.waits += 1
    if LOST_AFTER and machine.waits >= LOST_AFTER:
        machine.lost = True
    return cudaError_t.cudaErrorLaunchFailure if machine.lost else OK


def cudaGetDeviceCount() -> tuple[Any, ...]:
    if "no_driver" in faults:
        return (cudaError_t.cudaErrorInsufficientDriver, None)
    return (OK, 0 if "no_device" in faults else 1)


def cudaSetDeviceFlags(flags: int) -> tuple[Any, ...]:
    machine.flags = flags
    return (OK,)


def cudaSetDevice(device: int) -> tuple[Any, ...]:
    machine.device_is_set = device == 0
    return (OK if device == 0 else cudaError_t.cudaErrorInvalidValue,)


def cudaGetErrorString(error: cudaError_t) -> tuple[Any, ...]:
    return (OK, f"words for {error.name}".encode())


def cudaGetLastError() -> tuple[Any, ...]:
    return (cudaError_t.cudaErrorLaunchFailure if machine.lost else OK,)


def cudaDeviceSynchronize() -> tuple[Any, ...]:
    for stream in machine.streams.values():
        drain(stream)
    return (cudaError_t.cudaErrorLaunchFailure if machine.lost else OK,)


def cudaMemGetInfo() -> tuple[Any, ...]:
    return (OK, TOTAL_BYTES - sum(machine.device.values()), TOTAL_BYTES)


def cudaMalloc(size: int) -> tuple[Any, ...]:
    if "memory" in faults:
        return (cudaError_t.cudaErrorMemoryAllocation, None)
    return (OK, _allocate(size, machine.device))


def cudaFree(devPtr: int) -> tuple[Any, ...]:
    if "context" in faults and devPtr == 0:
        return (cudaError_t.cudaErrorMemoryAllocation,)
    return (OK if devPtr == 0 else _free(devPtr, machine.device),)


def cudaHostAlloc(size: int, flags: int) -> tuple[Any, ...]:
    assert flags == 0
    return (OK, _allocate(size, machine.locked))


def cudaFreeHost(ptr: int) -> tuple[Any, ...]:
    return (_free(ptr, machine.locked),)


def cudaHostRegister(ptr: int, size: int, flags: int) -> tuple[Any, ...]:
    assert flags == 0
    if "register" in faults:
        return (cudaError_t.cudaErrorNotPermitted,)
    if ptr % PAGE_BYTES or size % PAGE_BYTES or not size:
        return (cudaError_t.cudaErrorInvalidValue,)
    if ptr in machine.locked:
        return (cudaError_t.cudaErrorHostMemoryAlreadyRegistered,)
    machine.locked[ptr] = size
    return (OK,)


def cudaHostUnregister(ptr: int) -> tuple[Any, ...]:
    return (OK if machine.locked.pop(ptr, None) else cudaError_t.cudaErrorHostMemoryNotRegistered,)


def cudaStreamCreateWithFlags(flags: int) -> tuple[Any, ...]:
    assert flags == cudaStreamNonBlocking
    stream = Stream(0x5000 + len(machine.streams))
    stream.work = []
    machine.streams[int(stream)] = stream
    return (OK, stream)


def cudaStreamDestroy(stream: Stream) -> tuple[Any, ...]:
    drain(stream)
    return (OK if machine.streams.pop(int(stream), None) is not None else cudaError_t.cudaErrorInvalidResourceHandle,)


def cudaStreamSynchronize(stream: Stream) -> tuple[Any, ...]:
    drain(stream)
    return (_waited(),)


def cudaEventCreateWithFlags(flags: int) -> tuple[Any, ...]:
    assert flags == cudaEventBlockingSync | cudaEventDisableTiming
    return (OK, _Event())


def cudaEventDestroy(event: _Event) -> tuple[Any, ...]:
    event.stream = None
    return (OK,)


def cudaEventRecord(event: _Event, stream: Stream) -> tuple[Any, ...]:
    event.stream = stream
    event.behind = 0

    def reached() -> None:
        event.behind = 1

    stream.work.append(reached)
    return (cudaError_t.cudaErrorLaunchFailure if machine.lost else OK,)


def cudaEventSynchronize(event: _Event) -> tuple[Any, ...]:
    while not event.behind:  # only what was queued before it, as on a device that is fast enough for no more
        assert event.stream is not None
        event.stream.work.pop(0)()
    return (_waited(),)


def cudaMemcpyAsync(dst: int, src: int, count: int, kind: cudaMemcpyKind, stream: Stream) -> tuple[Any, ...]:
    to_device = kind is cudaMemcpyKind.cudaMemcpyHostToDevice
    device, host = (dst, src) if to_device else (src, dst)
    if not machine.lies_in(machine.device, device, count) or not machine.lies_in(machine.locked, host, count):
        return (cudaError_t.cudaErrorInvalidValue,)
    if machine.lost:
        return (cudaError_t.cudaErrorLaunchFailure,)
    stream.work.append(lambda: ctypes.memmove(dst, src, count) and None)
    return (OK,)
