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

    Invariants: a batch holds 1 to ``max_rows`` rows; the backlog is empty while a slot is free; a batch is in exactly
    one of ``open``, ``closed`` (padding not yet written) and ``ready``.
    """

    def __init__(self, slots: SlotTable, max_rows: int, max_queue_delay_us: int) -> None:
        self._slots = slots
        self._max_rows = max_rows
        self._delay_us = max_queue_delay_us
        self.open: Batch | None = None
        self.closed: deque[Batch] = deque()
        self.ready: deque[Batch] = deque()
        self.backlog: OrderedDict[Ticket, None] = OrderedDict()

    @property
    def empty(self) -> bool:
        """True if nothing waits here."""
        return not (self.open or self.closed or self.ready or self.backlog)

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
            slot = self._slots.claim()
            if slot is None:
                return False
            batch = self.open = Batch(slot, self)
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
        batch = self.open
        if batch is None:
            return
        self.open = None
        batch.close = reason
        batch.closed_us = now_us
        self.closed.append(batch)

    def due_us(self, idle: bool, room: bool) -> int | None:
        """When ``close_due`` with the same arguments would close the open batch; None for not before more happens."""
        if self.open is None or self.closed or self.ready:
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
        if batch.live > 0:
            return
        if batch is self.open:
            self.open = None
        elif batch in self.closed:
            self.closed.remove(batch)
        elif batch in self.ready:
            self.ready.remove(batch)
        else:
            return  # RUNNING: it runs to its end as dead rows
        self._slots.apply(batch.slot, SlotEvent.ABANDON)

    def take_over(self, other: Lane, now_us: int) -> None:
        """Append all that waits in ``other``, whose worker is gone (``per_worker`` only)."""
        other.close("drain", now_us)
        for batch in (*other.closed, *other.ready):
            batch.lane = self
        for ticket in (*other.backlog, *(t for b in (*other.closed, *other.ready) for t in b.tickets)):
            ticket.lane = self
        self.closed.extend(other.closed)
        self.ready.extend(other.ready)
        self.backlog.update(other.backlog)
        other.closed.clear()
        other.ready.clear()
        other.backlog.clear()
