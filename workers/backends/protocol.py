"""What a backend must do: load a model, bind slots once, run batches in order.

Built in: ``onnxruntime`` and ``echo`` (tests). Others come by entry point, group ``mxpool.backends``: docs/backends.md
has an example.

Errors of ``load`` and ``bind`` decide about a restart. ModelInvalid, NotServable and ProviderUnavailable mean that the
same file and config will fail again: that worker is never started again. Any other LoadFailed, and any other exception,
is retried with back-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mxpool.messages import GRAPH_OFF
from mxpool.shm.layout import SlotViews
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature


@dataclass(frozen=True, slots=True)
class Loaded:
    """What ``load`` found: the signature, and plain values for status and logs.

    In ``report`` the broker itself reads ``backend`` (a word, shown as the model's platform); the rest is only shown.
    """

    signature: Signature
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What ``bind`` prepared: the batch sizes that ``start`` takes, and more for status and logs.

    ``sizes`` ascend and end at ``max(max_batch_size, 1)``, the rows of a full slot: those of the spec, unless the file
    or the device allows fewer. The broker pads each batch to one of them. In ``report`` the broker itself reads
    ``graph`` ("on" or "off", the default).
    """

    sizes: tuple[int, ...]
    report: dict[str, Any] = field(default_factory=dict)


class DeviceLost(Exception):
    """The device's state in this process is broken for good (a sticky error): only another process can use it."""


class Ran(NamedTuple):
    """One finished batch; times are CLOCK_MONOTONIC in microseconds and span copy in, execute, copy out."""

    t_start_us: int
    t_end_us: int
    graph: int = GRAPH_OFF


class Backend(Protocol):
    """One session or engine. All calls come from one thread, in the order load, bind, (start, done, finish)*, unload.

    ``in_flight`` batches at most are started and not finished; they finish in the order in which they started. A
    synchronous backend has 1, and runs in ``finish``.
    """

    in_flight: int

    def load(self, spec: ModelSpec) -> Loaded:
        """Open the model.

        Raises:
            LoadFailed: the model or the provider cannot be served; the process will exit.
        """
        ...

    def bind(self, memory: memoryview, slots: Sequence[SlotViews]) -> Prepared:
        """Prepare every slot at every batch size.

        ``memory`` is the whole slot segment, page-aligned, in which the views of ``slots`` lie: a device registers it
        once, as a whole. Both stay valid until ``unload`` returns. Warm up and check in memory of your own: the slots
        may hold other workers' batches, and are neither read nor written here.

        Raises:
            LoadFailed: as ``load`` does.
        """
        ...

    def start(self, slot: int, size: int) -> None:
        """Begin the batch that lies in ``slot``, at ``size`` rows (one of those bound).

        Of the slot's outputs only the first ``size`` rows may be written, and of its inputs nothing.

        A failure that the process survives is kept for ``finish``; anything raised here means that it is sick.
        """
        ...

    def finish_due_us(self) -> int:
        """When ``finish`` should be called for the oldest started batch, on CLOCK_MONOTONIC; 0 for now.

        Until then the loop watches its link, so that a second batch can be started meanwhile, and then asks again. A
        device answers with the batch's likely end, less a margin: waiting in ``finish`` is exact and costs no CPU.
        """
        ...

    def finish(self) -> Ran:
        """Wait for the oldest started batch; its outputs then lie in its slot.

        Raises:
            RunFailed: the runtime failed this batch and can go on. Any other error means that the process is sick.
        """
        ...

    def unload(self) -> None:
        """Let go of every view and of the model. Nothing is in flight."""
        ...
