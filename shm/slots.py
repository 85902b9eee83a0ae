"""States of a slot: the only place that assigns one.

::

    FREE ─CLAIM→ FILLING ─PUBLISH→ READY ─DISPATCH→ RUNNING ─FINISH→ DONE ─RELEASE→ FREE

``generation`` counts the dispatches of a slot: a completion that carries another generation belongs to a batch that is
over. Picking a free slot *is* reserving it: ``claim`` moves it to FILLING before it returns.
"""

from __future__ import annotations

from collections import deque
from enum import Enum


class SlotState(Enum):
    """Where a slot is in the life of a batch."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call, five times a batch

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    QUARANTINED = "quarantined"


class SlotEvent(Enum):
    """What moves a slot on."""

    __hash__ = object.__hash__

    CLAIM = "claim"
    PUBLISH = "publish"
    DISPATCH = "dispatch"
    FINISH = "finish"
    RELEASE = "release"
    ABANDON = "abandon"
    RETURN = "return"
    WORKER_LOST = "worker_lost"
    REAPED = "reaped"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.CLAIM): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.PUBLISH): SlotState.READY,
    (SlotState.READY, SlotEvent.DISPATCH): SlotState.RUNNING,
    (SlotState.RUNNING, SlotEvent.FINISH): SlotState.DONE,
    (SlotState.DONE, SlotEvent.RELEASE): SlotState.FREE,
    # No live row is left in it: it never runs.
    (SlotState.FILLING, SlotEvent.ABANDON): SlotState.FREE,
    (SlotState.READY, SlotEvent.ABANDON): SlotState.FREE,
    # Its worker died before it started the batch: another worker takes it as it is.
    (SlotState.RUNNING, SlotEvent.RETURN): SlotState.READY,
    # Its worker died in the batch: the requests are copied to fresh slots, and this one rests until nobody can
    # write to it any more.
    (SlotState.RUNNING, SlotEvent.WORKER_LOST): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.REAPED): SlotState.FREE,
}


class IllegalTransition(Exception):
    """The slot's state does not allow the event; nothing was changed."""


class SlotTable:
    """States and generations of the slots 0 to ``count - 1`` of one model.

    Invariant: a slot is in the free list exactly when its state is FREE. The slot freed last is claimed first:
    its pages are the warmest in the cache.
    """

    def __init__(self, count: int) -> None:
        self._states = [SlotState.FREE] * count
        self._generations = [0] * count
        self._free: deque[int] = deque(range(count))

    def __len__(self) -> int:
        return len(self._states)

    @property
    def free_count(self) -> int:
        """Slots that ``claim`` could return now."""
        return len(self._free)

    def state(self, slot: int) -> SlotState:
        """The state of ``slot``."""
        return self._states[slot]

    def generation(self, slot: int) -> int:
        """How often ``slot`` was dispatched, modulo 2^32."""
        return self._generations[slot]

    def claim(self) -> int | None:
        """Reserve a free slot and return it; None if there is none."""
        if not self._free:
            return None
        slot = self._free[0]
        self.apply(slot, SlotEvent.CLAIM)
        return slot

    def apply(self, slot: int, event: SlotEvent) -> SlotState:
        """Move ``slot`` by ``event`` and return its new state.

        Raises:
            IllegalTransition: if the table has no such move; the slot is unchanged.
        """
        state = self._states[slot]
        following = TRANSITIONS.get((state, event))
        if following is None:
            raise IllegalTransition(f"slot {slot}: {event.value} in state {state.value}")
        self._states[slot] = following
        if event is SlotEvent.CLAIM:
            self._free.remove(slot)
        elif following is SlotState.FREE:
            self._free.appendleft(slot)
        elif event is SlotEvent.DISPATCH:
            self._generations[slot] = (self._generations[slot] + 1) & 0xFFFFFFFF
        return following
