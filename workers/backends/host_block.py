"""Input memory that a session keeps for its life, and runs on it: host tensors in, outputs of the runtime's own.

This is how a provider that copies between host and device by itself is fed: the addresses stay, the contents change.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.errors import NotServable
from mxpool.shm.layout import SlotLayout
from mxpool.tensors import Signature
from mxpool.workers.backends.ort_session import Arrays
from mxpool.workers.backends.replay_check import is_poison, poison


class NothingWritten(Exception):
    """A run reported success, and an output still holds the poison that was put there before."""


class HostBlock:
    """One page-aligned block for all inputs of a full batch, and the tensors over it. Zeros at first."""

    def __init__(self, runtime: Any, signature: Signature, path: str) -> None:
        layout = SlotLayout(Signature(signature.inputs, (), signature.max_batch_size), 1)
        self._memory = mmap.mmap(-1, layout.size_bytes)
        self.arrays = layout.views(self._memory, 0).inputs
        self.values = host_values(runtime, self.arrays, path)

    def fill(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy every row of ``inputs`` in."""
        for name, array in self.arrays.items():
            np.copyto(array, inputs[name], casting="no")


def host_values(runtime: Any, arrays: Arrays, path: str) -> dict[str, Any]:
    """Tensors over the very memory of ``arrays``, which must outlive them.

    Raises:
        NotServable: if the runtime made a copy, whose contents would never change again.
    """
    values = {}
    for name, array in arrays.items():
        values[name] = runtime.OrtValue.ortvalue_from_numpy(array)
        if array.size and values[name].data_ptr() != array.ctypes.data:
            reason = "the runtime copies it instead of using the memory that it is given"
            raise NotServable(path=path, what="input", name=name, reason=reason)
    return values


class HostRuns:
    """Runs of one session; it owns nothing but the reference to the session."""

    def __init__(self, session: Any, run_options: Any) -> None:
        self._session = session
        self._options = run_options

    def run(self, values: Mapping[str, Any], outputs: Arrays) -> None:
        """Run on ``values`` and copy what comes into ``outputs``, then poison what the runtime allocated.

        Allocators hand the same memory out again for the same shapes, so that a run which fails in silence gives the
        poison back. All results are poisoned even if one of them is refused.

        Raises:
            NothingWritten: if an output came back as poison; ``outputs`` are undefined.
            ValueError: if one has not the shape of its output. Whatever the runtime raises passes.
        """
        results = self._session.run_with_ort_values([*outputs], values, self._options)
        unwritten, misshapen = "", ""
        for (name, rows), value in zip(outputs.items(), results, strict=True):
            found = tuple(value.shape())
            if found != rows.shape:
                misshapen = misshapen or f"output {name!r} has the shape {found}, expected {rows.shape}"
                continue
            memory = host_memory(value, rows)
            unwritten = unwritten or (name if is_poison(memory) else "")
            rows[...] = memory
            poison(memory)
        if misshapen:
            raise ValueError(misshapen)
        if unwritten:
            raise NothingWritten(f"the runtime reported success and wrote nothing to output {unwritten!r}")


def host_memory(value: Any, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The memory of ``value``, as an array with the shape and dtype of ``like``; dies with ``value``.

    If the tensor does not lie in host memory, this is a copy that the runtime makes: poison does not reach it then.
    """
    if like.size == 0 or value.device_name() != "cpu":
        copied: npt.NDArray[Any] = value.numpy()
        return copied
    buffer = (ctypes.c_ubyte * like.nbytes).from_address(value.data_ptr())
    return np.frombuffer(memoryview(buffer), like.dtype).reshape(like.shape)
