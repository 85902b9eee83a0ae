"""A backend without a model: outputs are inputs, scaled. For tests and for measuring everything around a model.

Options, all optional::

    tensors        "x:FP32:4": name, datatype and dims of one row; several by comma, dims by x ("a:FP32:4,b:INT64:2x3")
    scale, offset  y = scale * x + offset (default 1 and 0), in the tensor's own datatype
    delay_ms       a batch takes this long; batches follow one another, as on one device
    in_flight      1 or 2 batches started and not finished
    gate           path of a FIFO: each batch waits for one byte from it, so that a test says when a batch ends
    crash_on, hang_on, fail_on
                   the first element of a row of the first tensor that kills the process (SIGKILL), never ends,
                   or fails the batch. Every row that runs counts, padding too
    load_delay_ms  loading takes this long
    load_exit      loading ends the process with this code
    abort_on_load  loading ends the process by abort(), as a runtime does on a file that it cannot take

The output is ``y`` if there is one tensor, else ``y_`` and the tensor's name.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mxpool.clock import now_us
from mxpool.errors import NotServable, RunFailed
from mxpool.shm.layout import SlotViews
from mxpool.spec import ModelSpec
from mxpool.tensors import DATATYPES, Signature, TensorSpec
from mxpool.workers.backends.protocol import Loaded, Prepared, Ran

LOOK_AGAIN_US = 100  # at a gate that tells nobody when it opens


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoOptions:
    """The options above, with their defaults."""

    tensors: str = "x:FP32:4"
    scale: float = 1
    offset: float = 0
    delay_ms: float = 0
    in_flight: int = 1
    gate: str = ""
    crash_on: float = math.nan  # equal to nothing
    hang_on: float = math.nan
    fail_on: float = math.nan
    load_delay_ms: float = 0
    load_exit: int = -1
    abort_on_load: bool = False


def parse_options(given: Mapping[str, Any]) -> EchoOptions:
    """The options of a config.

    Raises:
        ValueError: if one is not known.
    """
    known = [option.name for option in fields(EchoOptions)]
    for name in given:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return EchoOptions(**given)


def parse_tensors(text: str) -> tuple[TensorSpec, ...]:
    """Read ``name:DATATYPE:dims,…``.

    Raises:
        ValueError: if it is not of that form, or a datatype is not known.
    """
    found = []
    for part in text.split(","):
        name, datatype, dims = part.strip().split(":")
        if datatype not in DATATYPES:
            raise ValueError(f"{datatype!r} is not one of {', '.join(DATATYPES)}")
        found.append(TensorSpec(name, datatype, tuple(int(dim) for dim in dims.split("x") if dim)))
    return tuple(found)


class EchoBackend:
    """See the module; ``in_flight`` is known after ``load``."""

    in_flight = 1

    def __init__(self) -> None:
        self._model = ""
        self._options = EchoOptions()
        self._batched = True
        self._sizes: tuple[int, ...] = ()
        self._slots: Sequence[SlotViews] = ()
        self._gate = -1
        self._started: deque[tuple[int, int, int, int]] = deque()  # slot, size, started at, due at (us)
        self._due_us = 0

    def load(self, spec: ModelSpec) -> Loaded:
        """Take the options; ``spec.path`` is not read. See Backend.

        Raises:
            NotServable: for an option that is unknown or has no meaning.
        """
        try:
            options = parse_options(spec.options)
            inputs = parse_tensors(options.tensors)
        except ValueError as error:
            raise NotServable(path=spec.path, what="options of", name="echo", reason=str(error)) from None
        time.sleep(options.load_delay_ms / 1000)
        if options.load_exit >= 0:
            os._exit(options.load_exit)
        if options.abort_on_load:
            os.abort()
        if options.gate:
            self._gate = os.open(options.gate, os.O_RDWR)  # for writing too: opening does not wait, and no end of file
        self._model, self._options, self._batched = spec.name, options, spec.max_batch_size > 0
        self.in_flight = options.in_flight
        names = ["y"] if len(inputs) == 1 else [f"y_{tensor.name}" for tensor in inputs]
        outputs = (TensorSpec(name, tensor.datatype, tensor.dims) for name, tensor in zip(names, inputs, strict=True))
        self._sizes = spec.sizes
        return Loaded(Signature(inputs, tuple(outputs), spec.max_batch_size), {"backend": "echo"})

    def bind(self, memory: memoryview, slots: Sequence[SlotViews]) -> Prepared:
        """Keep the views; see Backend."""
        del memory
        self._slots = slots
        return Prepared(self._sizes)

    def start(self, slot: int, size: int) -> None:
        """Begin the batch's delay, after that of the batch before it."""
        started_us = now_us()
        self._due_us = max(self._due_us, started_us) + int(self._options.delay_ms * 1000)
        self._started.append((slot, size, started_us, self._due_us))

    def finish_due_us(self) -> int:
        """The end of the oldest batch's delay; for one that hangs or whose gate is closed, a moment from now."""
        slot, size, _, due_us = self._started[0]
        shut = self._gate >= 0 and not select.select([self._gate], [], [], 0)[0]
        if now_us() >= due_us and (shut or self._holds(slot, size, self._options.hang_on)):
            return now_us() + LOOK_AGAIN_US
        return due_us

    def finish(self) -> Ran:
        """Wait for the oldest batch and write its outputs; see Backend.

        Raises:
            RunFailed: if a row holds ``fail_on``.
        """
        slot, size, started_us, due_us = self._started.popleft()
        time.sleep(max(due_us - now_us(), 0) / 1e6)
        if self._gate >= 0:
            os.read(self._gate, 1)
        if self._holds(slot, size, self._options.crash_on):
            os.kill(os.getpid(), signal.SIGKILL)
        while self._holds(slot, size, self._options.hang_on):
            signal.pause()
        if self._holds(slot, size, self._options.fail_on):
            raise RunFailed(model=self._model, reason=f"a row starts with {self._options.fail_on:g}")
        self._echo(slot, size)
        return Ran(started_us, now_us())

    def _rows(self, array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
        return array[:size] if self._batched else array[None]

    def _holds(self, slot: int, size: int, value: float) -> bool:
        if math.isnan(value):
            return False
        first = next(iter(self._slots[slot].inputs.values()))
        return bool((self._rows(first, size).reshape(size, -1)[:, 0] == value).any())

    def _echo(self, slot: int, size: int) -> None:
        views, options = self._slots[slot], self._options
        for given, made in zip(views.inputs.values(), views.outputs.values(), strict=True):
            source, target = self._rows(given, size), self._rows(made, size)
            if options.scale == 1 and options.offset == 0:
                target[...] = source
            else:
                np.copyto(target, source * options.scale + options.offset, casting="unsafe")

    def unload(self) -> None:
        """Let go of the views and the gate."""
        self._slots = ()
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1
