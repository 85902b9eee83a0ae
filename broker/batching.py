"""Where a row gets its place, and where a batch is closed. Pure: the time is passed in.

A lane is one queue in front of one or more workers: an open batch that fills, closed batches that wait for a worker,
and a backlog of requests that wait, as they came, for a free slot. ``queue = "shared"`` has one lane for all workers,
``"per_worker"`` one for each.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from mxpool.broker.tickets import Batch, Ticket
from mxpool.shm.slots import SlotEvent, SlotTable

CLOSE_REASONS = ("full", "delay", "idle", "drain", "retry")


class Lane:
    """First in, first out; rows never overtake each other.

    Invariants: a batch holds 1 to ``max_rows`` rows; the backlog is empty while this lane could have a slot; a batch
    that no worker has is either ``open`` or in ``ready``. ``held`` counts the slots of its batches, running or not; it
    claims no more than ``held_max``, so that one lane's hung worker does not take the slots of all.
    """

    def __init__(self, slots: SlotTable, max_rows: int, max_queue_delay_us: int) -> None:
        self._slots = slots
        self._max_rows = max_rows
        self._delay_us = max_queue_delay_us
        self.held = 0
        self.held_max = len(slots)
        self.open: Batch | None = None
        self.ready: deque[Batch] = deque()
        self.backlog: OrderedDict[Ticket, None] = OrderedDict()

    def claim(self) -> Batch | None:
        """A new batch in a free slot, to be filled; None if there is none for this lane."""
        slot = self._slots.claim() if self.held < self.held_max else None
        if slot is None:
            return None
        self.held += 1
        return Batch(slot, self)

    def give_back(self, batch: Batch, event: SlotEvent) -> None:
        """``event`` takes the slot of ``batch`` away from this lane."""
        self._slots.apply(batch.slot, event)
        self.held -= 1

    def publish(self, batch: Batch, reason: str, now_us: int) -> None:
        """No more rows are added to ``batch``: it may run."""
        self._slots.apply(batch.slot, SlotEvent.PUBLISH)
        batch.close = reason
        batch.closed_us = now_us
        self.ready.append(batch)

    def add(self, ticket: Ticket, now_us: int) -> bool:
        """Give ``ticket`` its rows in the open slot; False if it went to the backlog instead."""
        ticket.lane = self
        if not self.backlog and self._place(ticket, now_us):
            return True
        self.backlog[ticket] = None
        return False

    def _place(self, ticket: Ticket, now_us: int) -> bool:
        batch = self.open
        if batch is not None and batch.rows + ticket.rows > self._max_rows:
            self.close("full", now_us)
            batch = None
        if batch is None:
            batch = self.open = self.claim()
            if batch is None:
                return False
        batch.add(ticket)
        if batch.rows == self._max_rows:
            self.close("full", now_us)
        return True

    def refill(self, now_us: int) -> list[Ticket]:
        """Place what waits in the backlog while slots are free; the tickets whose bytes must now be copied."""
        placed = []
        while self.backlog:
            ticket = next(iter(self.backlog))
            if not self._place(ticket, now_us):
                break
            del self.backlog[ticket]
            placed.append(ticket)
        return placed

    def close(self, reason: str, now_us: int) -> None:
        """Close the open batch, if there is one."""
        if self.open is not None:
            batch, self.open = self.open, None
            self.publish(batch, reason, now_us)

    def due_us(self, idle: bool, room: bool) -> int | None:
        """When ``close_due`` with the same arguments would close the open batch; None for not before more happens."""
        if self.open is None or self.ready:
            return None
        if not idle and not (room and self._delay_us > 0):
            return None
        return self.open.oldest_us + self._delay_us

    def close_due(self, now_us: int, idle: bool, room: bool) -> None:
        """Close the open batch where a worker can take it.

        ``idle``: a worker has nothing to do. ``room``: a busy one could hold a second batch, which only a batch that
        has waited its ``max_queue_delay_us`` gets (with no delay set, filling up further is worth more).
        """
        due_us = self.due_us(idle, room)
        if due_us is not None and now_us >= due_us:
            self.close("idle" if idle else "delay", now_us)

    def forget(self, ticket: Ticket) -> None:
        """Take a ticket that will not be answered by a run out of the lane; its slot goes free with its last one."""
        batch = ticket.batch
        if batch is None:
            self.backlog.pop(ticket, None)
            return
        batch.live -= 1
        batch.live_rows -= ticket.rows
        if batch.live or batch.worker:
            return  # others want answers, or it is RUNNING: then it runs to its end as dead rows
        if batch is self.open:
            self.open = None
        else:
            self.ready.remove(batch)
        self.give_back(batch, SlotEvent.ABANDON)

    def adopt(self, batch: Batch) -> None:
        """Take over a ready batch from a lane that ends."""
        batch.lane.held -= 1
        self.held += 1
        batch.lane = self
        for ticket in batch.tickets:
            ticket.lane = self
        self.ready.append(batch)
