"""Capturing a device graph, and proof that what then runs is a replay of it that computes what a plain run computes.

A capture can fail loudly (the runtime names the node), or leave nothing behind and say nothing: the run after a failed
one succeeds, without a graph. A replay can read addresses that are no longer written. So each graph is asked: the run
that is to be the replay is given a binding to *other* buffers, which a replay ignores and a plain run would write to;
and its answers to two different inputs are compared with plain runs, on outputs that were poisoned before.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from mxpool.errors import ModelInvalid
from mxpool.shm.layout import SlotLayout
from mxpool.workers.backends import replay_check
from mxpool.workers.backends.cuda_device import CudaDevice
from mxpool.workers.backends.cuda_lanes import DeviceSlot, HostSlot
from mxpool.workers.backends.ort_session import Arrays, failed_node, one_line


class GraphFailure(NamedTuple):
    """Why there is no graph. ``size`` 0: at no size; ``node`` "" where the runtime names none."""

    size: int
    node: str
    reason: str

    @classmethod
    def of(cls, size: int, error: BaseException) -> GraphFailure:
        """What ``error`` says, with the node that it names."""
        reason = str(error.fields["reason"]) if isinstance(error, ModelInvalid) else one_line(error)
        return cls(size, failed_node(error), reason)


class Proof(NamedTuple):
    """One lane at one size; ``largest`` is the largest difference to a plain run, absolute."""

    failure: GraphFailure | None
    exact: bool = True
    largest: float = 0.0


class GraphCapture:
    """Captures and proves graphs of ``session``; owns buffers for it, which ``close`` gives back.

    ``plain`` are run options that neither capture nor replay.
    """

    def __init__(self, device: CudaDevice, session: Any, layout: SlotLayout, plain: Any) -> None:
        self._device = device
        self._session = session
        self._layout = layout
        self._plain_options = plain
        self._host = HostSlot(device, layout)
        self._beside = DeviceSlot(device, layout)

    def capture(self, slot: DeviceSlot, binding: Any, size: int, options: Any) -> Proof:
        """Capture ``binding`` (to ``slot``, at ``size`` rows) under the graph id of ``options``, and prove it.

        Whatever the runtime raises meanwhile is the failure; ``DeviceLost`` passes.
        """
        try:
            beside = self._beside.binding(self._session, size)
            plain = partial(self._run, self._beside, beside, size, options=self._plain_options)
            inputs = replay_check.two_inputs(self._layout.signature, size, plain)
            if inputs is None:
                reason = "no two inputs have different answers: nothing would show that a replay reads its input"
                return Proof(GraphFailure(size, "", reason))
            self._run(slot, binding, size, inputs[0], options)
            return self._prove(slot, binding, beside, size, inputs, options)
        except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
            self._device.check()
            return Proof(GraphFailure.of(size, error))

    def warm_up(self, slot: DeviceSlot, binding: Any, size: int) -> None:
        """Run ``binding`` (to ``slot``) once without a graph; raises whatever the runtime does."""
        self._run(slot, binding, size, replay_check.inputs(self._layout.signature, size, 0), self._plain_options)

    def _prove(
        self, slot: DeviceSlot, binding: Any, beside: Any, size: int, inputs: tuple[Arrays, Arrays], options: Any
    ) -> Proof:
        exact, largest = True, 0.0
        for given, through in ((inputs[1], beside), (inputs[0], binding), (inputs[1], binding)):
            self._load(self._beside, inputs[0], size)
            replayed = self._run(slot, through, size, given, options)
            if not self._untouched(size):
                reason = "the capture left no graph behind: the run after it was not a replay"
                return Proof(GraphFailure(size, "", reason))
            plain = self._run(self._beside, beside, size, given, self._plain_options)
            again = self._run(self._beside, beside, size, given, self._plain_options)
            verdict = replay_check.judge(plain, again, replayed)
            if not verdict.ok:
                reason = f"replay and plain run differ by {verdict.largest:g} at {verdict.where}"
                return Proof(GraphFailure(size, "", reason))
            exact, largest = exact and verdict.exact, max(largest, verdict.largest)
        return Proof(None, exact, largest)

    def _load(self, slot: DeviceSlot, inputs: Arrays, size: int) -> None:
        """Put ``inputs`` and poisoned outputs into ``slot``."""
        views = self._host.views
        for name, array in inputs.items():
            self._rows(views.inputs[name], size)[...] = array
        for array in views.outputs.values():
            replay_check.poison(array)
        self._device.copy_in(slot.address, self._host.address, self._layout.slot_bytes)
        self._device.synchronize()

    def _run(self, slot: DeviceSlot, binding: Any, size: int, inputs: Arrays, options: Any) -> Arrays:
        """Load ``slot``, run ``binding``, and return what ``slot`` then holds as outputs."""
        self._load(slot, inputs, size)
        self._session.run_with_iobinding(binding, options)
        return self._outputs(slot, size)

    def _outputs(self, slot: DeviceSlot, size: int) -> Arrays:
        self._device.copy_out(self._host.address, slot.address, self._layout.slot_bytes)
        self._device.synchronize()
        return {name: self._rows(view, size).copy() for name, view in self._host.views.outputs.items()}

    def _untouched(self, size: int) -> bool:
        return all(replay_check.is_poison(array) for array in self._outputs(self._beside, size).values())

    def _rows(self, array: Any, size: int) -> Any:
        return array[:size] if self._layout.signature.batched else array

    def close(self) -> None:
        """Let go of the session, and give the buffers back."""
        self._session = None
        self._device.synchronize()
        self._beside.free()
        self._host.free()
