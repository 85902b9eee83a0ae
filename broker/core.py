"""One model's queue, slots, batches and workers: every decision of the broker, without any I/O. The time is passed in.

The shell (``served``) calls in this order, and copies bytes where it is told to::

    submit ─▶ refill ─▶ [close_due ─▶ publish ─▶ assign]* ─▶ … complete ─▶ release
                                  worker_lost ─▶ reaped ─▶ retries ─▶ refill …

A ticket is answered exactly once: by ``complete`` (its batch ran), by ``drop`` (expired, cancelled, client gone), or
because ``worker_lost`` returned it. ``live`` turns false at that moment and everything later passes over it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from mxpool.broker.batching import Lane
from mxpool.broker.roster import Roster
from mxpool.broker.tickets import Batch, Deadlines, Ticket
from mxpool.errors import QueueFull, ShuttingDown
from mxpool.shm.slots import SlotEvent, SlotTable

ATTEMPTS_MAX = 2  # a request executes at most twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one model's queue may hold, and how it waits."""

    max_queue_size: int
    max_queue_bytes: int
    max_queue_delay_us: int
    per_worker: bool
    run_timeout_us: int


class ModelCore:
    """All state of one model. ``workers`` are the names that may ever sit in the roster.

    Invariants: ``depth`` is the number of live tickets not dispatched, ``depth <= max_queue_size`` except for retries;
    a slot is held by at most one batch; a batch runs on at most one worker.
    """

    def __init__(self, model: str, limits: Limits, workers: list[str]) -> None:
        self.model = model
        self.limits = limits
        self.roster = Roster()
        self.deadlines = Deadlines()
        self.draining = False
        self.depth = 0
        self.queued_rows = 0
        self.mean_run_us = 1000.0
        self._workers = workers
        self._retries: deque[Ticket] = deque()  # each with its body: it must not need its old slot to get a new one
        self._quarantined: dict[int, tuple[str, list[Ticket]]] = {}  # slot: its lost worker, requests to retry
        self.open_slots(0, 1, 0, (1,))

    def open_slots(self, slots: int, max_rows: int, row_bytes: int, sizes: tuple[int, ...]) -> None:
        """Start with an empty pool of ``slots`` slots; called once, when the signature is known."""
        self.slots = SlotTable(slots)
        self.row_bytes = row_bytes
        self._sizes = sizes
        names = self._workers if self.limits.per_worker else [""]
        self._lanes = {name: Lane(self.slots, max_rows, self.limits.max_queue_delay_us) for name in names}
        self._turn = 0

    @property
    def idle(self) -> bool:
        """True if no accepted request is without an answer."""
        return self.depth == 0 and not any(seat.running for seat in self.roster.seats())

    @property
    def waiting(self) -> bool:
        """True if anything waits for a slot, a close or a worker."""
        return self.depth > 0 or bool(self._retries)

    # Requests

    def submit(self, ticket: Ticket, now_us: int) -> bool:
        """Accept ``ticket``: True if its rows have a place (copy them now), False if it waits (keep its body).

        Raises:
            ShuttingDown: while draining.
            QueueFull: over either limit; nothing is changed.
        """
        if self.draining:
            raise ShuttingDown(what=f"model {self.model!r}")
        if self.depth >= self.limits.max_queue_size:
            raise self._queue_full(self.depth, self.limits.max_queue_size, "requests")
        queued_bytes = (self.queued_rows + ticket.rows) * self.row_bytes
        if queued_bytes > self.limits.max_queue_bytes and self.depth:
            raise self._queue_full(queued_bytes, self.limits.max_queue_bytes, "bytes")
        self.depth += 1
        self.queued_rows += ticket.rows
        if ticket.deadline_us:
            self.deadlines.add(ticket)
        return self._lane().add(ticket, now_us)

    def _queue_full(self, depth: int, limit: int, unit: str) -> QueueFull:
        batches = 1 + sum(len(lane.ready) + len(lane.closed) for lane in self._lanes.values())
        wait_ms = math.ceil(batches * self.mean_run_us / 1000 / max(len(self.roster), 1))
        return QueueFull(
            model=self.model, depth=depth, limit=limit, unit=unit, retry_after_ms=min(max(wait_ms, 1), 1000)
        )

    def _lane(self) -> Lane:
        if not self.limits.per_worker:
            return self._lanes[""]
        names = [name for name in self._lanes if name in self.roster] or list(self._lanes)
        self._turn += 1
        return self._lanes[names[self._turn % len(names)]]

    def drop(self, ticket: Ticket) -> bool:
        """End ``ticket`` without a run; False if it had its answer already. Rows in a slot stay there, dead."""
        if not ticket.live:
            return False
        if self._queued(ticket):
            self._leave_queue(ticket.rows)
        ticket.live = False
        ticket.body = None
        ticket.lane.forget(ticket)
        return True

    def expired(self, now_us: int) -> Iterator[Ticket]:
        """Drop and yield the tickets whose deadline has passed, in a queue or running."""
        for ticket in self.deadlines.pop_due(now_us):
            self.drop(ticket)
            yield ticket

    @staticmethod
    def _queued(ticket: Ticket) -> bool:
        return ticket.batch is None or not ticket.batch.worker

    def _leave_queue(self, rows: int, tickets: int = 1) -> None:
        self.depth -= tickets
        self.queued_rows -= rows

    # Batches

    def refill(self, now_us: int) -> list[Ticket]:
        """Give free slots to what waits for one; the tickets whose bodies must be copied now."""
        if self.limits.per_worker and len(self.roster):
            for name, lane in self._lanes.items():
                if name not in self.roster and not lane.empty:
                    self._lane().take_over(lane, now_us)
        return [ticket for lane in self._lanes.values() if lane.backlog for ticket in lane.refill(now_us)]

    def close_due(self, now_us: int) -> list[Batch]:
        """Close what is due. All closed batches, to be padded to ``batch.size`` rows and then published."""
        closed: list[Batch] = []
        for name, lane in self._lanes.items():
            if self.draining:
                lane.close("drain", now_us)
            elif lane.open is not None:
                among = name or None
                lane.close_due(now_us, self.roster.any_idle(among), self.roster.any_room(among))
            closed.extend(lane.closed)
        for batch in closed:
            batch.size = self._sizes[bisect_left(self._sizes, batch.rows)]
        return closed

    def publish(self, batch: Batch, now_us: int) -> None:
        """``batch`` is padded: it may run."""
        batch.lane.closed.remove(batch)
        batch.lane.ready.append(batch)
        self.slots.apply(batch.slot, SlotEvent.PUBLISH)
        batch.merge_us = now_us - batch.closed_us

    def assign(self, now_us: int) -> list[Batch]:
        """Give ready batches to workers, oldest first; each has ``worker``, ``generation`` and ``sequence`` set."""
        assigned: list[Batch] = []
        for name, lane in self._lanes.items():
            while lane.ready:
                batch = lane.ready[0]
                seat = self.roster.pick(batch, name or None)
                if seat is None:
                    break
                lane.ready.popleft()
                self.slots.apply(batch.slot, SlotEvent.DISPATCH)
                batch.generation = self.slots.generation(batch.slot)
                self._leave_queue(batch.live_rows, batch.live)
                batch.queue_depth = self.depth
                self.roster.take(seat, batch, now_us)
                assigned.append(batch)
        return assigned

    def complete(self, worker: str, slot: int, generation: int, now_us: int) -> Batch | None:
        """``worker`` has run ``slot``: its batch, whose live tickets must be answered; None for a stale record."""
        batch = self.roster.finish(worker, slot, generation, now_us)
        if batch is not None:
            self.slots.apply(slot, SlotEvent.FINISH)
        return batch

    def release(self, batch: Batch) -> None:
        """The answers of ``batch`` are sent (or their bytes copied): its slot is free again."""
        self.slots.apply(batch.slot, SlotEvent.RELEASE)
        for ticket in batch.tickets:
            ticket.live = False
            ticket.batch = None
        batch.tickets.clear()

    # Workers

    def worker_lost(self, worker: str, started: int) -> list[Ticket]:
        """``worker`` is dead and ``started`` was the last sequence it began; its completions were drained before.

        Batches it had not begun become ready again. The requests of those it was running are retried, each alone
        (``reaped``, ``retries``); the ones returned had their second death and must be answered.
        """
        seat = self.roster.remove(worker)
        failed: list[Ticket] = []
        for batch in reversed(seat.running) if seat else ():
            if batch.sequence > started:
                self._return(batch)
            else:
                failed.extend(self._quarantine(batch))
        return failed

    def _return(self, batch: Batch) -> None:
        self.slots.apply(batch.slot, SlotEvent.RETURN)
        if not batch.live:
            self.slots.apply(batch.slot, SlotEvent.ABANDON)
            return
        batch.worker = ""
        batch.lane.ready.appendleft(batch)
        self._leave_queue(-batch.live_rows, -batch.live)

    def _quarantine(self, batch: Batch) -> list[Ticket]:
        self.slots.apply(batch.slot, SlotEvent.WORKER_LOST)
        failed: list[Ticket] = []
        again: list[Ticket] = []
        self._quarantined[batch.slot] = (batch.worker, again)
        for ticket in batch.tickets:
            if not ticket.live:
                continue
            ticket.attempts += 1
            ticket.batch = None
            if ticket.attempts >= ATTEMPTS_MAX:
                ticket.live = False
                failed.append(ticket)
                continue
            again.append(ticket)
            self._leave_queue(-ticket.rows, -1)
        return failed

    def reaped(self, worker: str) -> list[tuple[Ticket, int]]:
        """No process of ``worker``'s incarnation can write to its slots any more, and they are free.

        The requests to retry, each with its old slot: take their bodies out (at ``ticket.row``) before any other call.
        """
        saved: list[tuple[Ticket, int]] = []
        for slot, (lost, tickets) in list(self._quarantined.items()):
            if lost == worker:
                del self._quarantined[slot]
                self.slots.apply(slot, SlotEvent.REAPED)
                saved.extend((ticket, slot) for ticket in tickets if ticket.live)
        self._retries.extend(ticket for ticket, _ in saved)
        return saved

    def retries(self, now_us: int) -> list[Ticket]:
        """Give free slots to requests that run again, each alone; the tickets whose bodies must be copied now."""
        placed: list[Ticket] = []
        while self._retries:
            ticket = self._retries[0]
            if ticket.live:
                slot = self.slots.claim()
                if slot is None:
                    break
                batch = Batch(slot, ticket.lane)
                batch.add(ticket)
                batch.close, batch.closed_us = "retry", now_us
                ticket.lane.closed.append(batch)
                placed.append(ticket)
            self._retries.popleft()
        return placed

    # Time

    def due_us(self) -> int | None:
        """When the shell must call again although nothing has arrived; None for never."""
        times = [self.deadlines.next_us(), self.roster.overdue_us(self.limits.run_timeout_us)]
        for name, lane in self._lanes.items():
            if lane.open is not None:
                among = name or None
                times.append(lane.due_us(self.roster.any_idle(among), self.roster.any_room(among)))
        return min((time for time in times if time is not None), default=None)

    def queued(self) -> list[Ticket]:
        """Live tickets that no worker has."""
        found = [*self._retries, *(ticket for _, tickets in self._quarantined.values() for ticket in tickets)]
        for lane in self._lanes.values():
            found.extend(lane.backlog)
            for batch in (lane.open, *lane.closed, *lane.ready):
                found.extend(batch.tickets if batch is not None else ())
        return [ticket for ticket in found if ticket.live]

    def holders(self) -> dict[int, Batch]:
        """Which batch holds which slot, for status."""
        found = [lane.open for lane in self._lanes.values()]
        for lane in self._lanes.values():
            found.extend((*lane.closed, *lane.ready))
        for seat in self.roster.seats():
            found.extend(seat.running)
        return {batch.slot: batch for batch in found if batch is not None}
