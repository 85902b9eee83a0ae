"""One model's queue, slots, batches and workers: every decision of the broker, without any I/O. The time is passed in.

The shell (``served``) calls in this order, and copies bytes where it is told to::

    submit ─▶ retries, refill ─▶ [close_due ─▶ assign]* ─▶ … complete ─▶ release
                                  worker_lost ─▶ reaped ─▶ retries …

A ticket is answered exactly once: by ``complete`` (its batch ran), by ``drop`` (expired, cancelled, client gone), or
because ``worker_lost`` returned it. ``live`` turns false at that moment and everything later passes over it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from mxpool.broker.batching import Lane
from mxpool.broker.recovery import Lost, Recovery
from mxpool.broker.roster import Roster, Seat
from mxpool.broker.tickets import Batch, Deadlines, Ticket
from mxpool.errors import QueueFull, ShuttingDown
from mxpool.shm.slots import SlotEvent, SlotTable

SHARED = ""  # the name of the lane that all workers take from, or that waits for a first worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one model's queue may hold, and how it waits."""

    max_queue_size: int
    max_queue_bytes: int
    max_queue_delay_us: int
    per_worker: bool
    run_timeout_us: int


class ModelCore:
    """All state of one model.

    Invariants: ``depth`` is the number of live tickets not dispatched, ``depth <= max_queue_size`` except for retries;
    a slot is held by at most one batch; a batch runs on at most one worker.
    """

    def __init__(self, model: str, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self.roster = Roster()
        self.deadlines = Deadlines()
        self.draining = False
        self.depth = 0
        self.queued_rows = 0
        self.mean_run_us = 1000.0
        self.open_slots(0, 1, 0)

    def open_slots(self, slots: int, max_rows: int, row_bytes: int) -> None:
        """Start with an empty pool of ``slots`` slots; called again when the signature is known."""
        self.slots = SlotTable(slots)
        self.recovery = Recovery(self.slots)
        self.row_bytes = row_bytes
        self._max_rows = max_rows
        self._lanes: dict[str, Lane] = {}
        self._turn = 0
        self._add_lane(SHARED)

    def _add_lane(self, name: str) -> None:
        self._lanes[name] = Lane(self.slots, self._max_rows, self.limits.max_queue_delay_us)
        self._share_slots()

    def _share_slots(self) -> None:
        """With a lane for each worker, none may hold more than its part of the slots, and at least two."""
        workers = max(len(self._lanes) - 1, 1)
        for lane in self._lanes.values():
            lane.held_max = max(len(self.slots) // workers, 2) if self.limits.per_worker else len(self.slots)

    @property
    def idle(self) -> bool:
        """True if no accepted request is without an answer."""
        return self.depth == 0 and not any(seat.running for seat in self.roster.seats())

    @property
    def waiting(self) -> bool:
        """True if anything waits for a slot, a close or a worker."""
        return self.depth > 0 or bool(self.recovery.retries)

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
        batches = 1 + sum(len(lane.ready) for lane in self._lanes.values())
        wait_ms = math.ceil(batches * self.mean_run_us / 1000 / max(len(self.roster), 1))
        return QueueFull(
            model=self.model, depth=depth, limit=limit, unit=unit, retry_after_ms=min(max(wait_ms, 1), 1000)
        )

    def _lane(self) -> Lane:
        """The lane for the next arrival: with ``per_worker``, each worker's in turn."""
        if len(self._lanes) == 1:
            return self._lanes[SHARED]
        names = [name for name in self._lanes if name != SHARED]
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
        return [ticket for lane in self._lanes.values() if lane.backlog for ticket in lane.refill(now_us)]

    def close_due(self, now_us: int) -> None:
        """Close the open batches that are due."""
        for name, lane in self._lanes.items():
            if self.draining:
                lane.close("drain", now_us)
            elif lane.open is not None:
                among = name or None
                idle = self.roster.any_idle(among)
                lane.close_due(now_us, idle, not idle and self.roster.any_room(among))

    def assign(self, now_us: int) -> list[Batch]:
        """Give ready batches to workers, oldest first: each is to be padded to ``size`` rows and sent to ``worker``."""
        assigned: list[Batch] = []
        for name, lane in self._lanes.items():
            while lane.ready:
                batch = lane.ready[0]
                seat = self.roster.pick(batch, name or None)
                if seat is None:
                    break
                lane.ready.popleft()
                self._dispatch(batch, seat, now_us)
                assigned.append(batch)
        return assigned

    def _dispatch(self, batch: Batch, seat: Seat, now_us: int) -> None:
        self.slots.apply(batch.slot, SlotEvent.DISPATCH)
        batch.generation = self.slots.generation(batch.slot)
        batch.size = seat.sizes[bisect_left(seat.sizes, batch.rows)]
        self._leave_queue(batch.live_rows, batch.live)
        batch.queue_depth = self.depth
        self.roster.take(seat, batch, now_us)

    def complete(self, worker: str, slot: int, generation: int, now_us: int) -> Batch | None:
        """``worker`` has run ``slot``: its batch, whose live tickets must be answered; None for a stale record."""
        batch = self.roster.finish(worker, slot, generation, now_us)
        if batch is not None:
            self.slots.apply(slot, SlotEvent.FINISH)
        return batch

    def release(self, batch: Batch) -> None:
        """The answers of ``batch`` are sent (or their bytes copied): its slot is free again."""
        batch.lane.give_back(batch, SlotEvent.RELEASE)
        for ticket in batch.tickets:
            ticket.live = False
            ticket.batch = None
        batch.tickets.clear()

    # Workers

    def worker_ready(self, worker: str, in_flight: int, sizes: tuple[int, ...]) -> None:
        """``worker`` can run batches of ``sizes`` rows (ascending, the last one holds any batch)."""
        self.roster.add(worker, in_flight, sizes)
        if self.limits.per_worker:
            self._add_lane(worker)
            self._rehome(self._lanes[SHARED])

    def worker_lost(self, worker: str, started: int, now_us: int) -> Lost:
        """``worker`` is dead and ``started`` was the last sequence it began; its completions were drained before."""
        seat = self.roster.remove(worker)
        if seat is None:
            return Lost(0)
        lost = self.recovery.sort_out(seat, started)
        for batch in lost.returned:
            self._leave_queue(-batch.live_rows, -batch.live)
        for ticket, _ in lost.again:
            self._leave_queue(-ticket.rows, -1)
        if self.limits.per_worker:
            ended = self._lanes.pop(worker)
            self._share_slots()
            ended.close("drain", now_us)
            self._rehome(ended)
        return lost

    def _rehome(self, lane: Lane) -> None:
        """Deal out what waits in a lane that has no worker."""
        for ticket in self.recovery.retries:
            if ticket.lane is lane:
                ticket.lane = self._lane()
        while lane.ready:
            self._lane().adopt(lane.ready.popleft())
        while lane.backlog:
            ticket, _ = lane.backlog.popitem(last=False)
            ticket.lane = self._lane()
            ticket.lane.backlog[ticket] = None

    def reaped(self, incarnation: int) -> None:
        """No process of that incarnation can write to its slots any more."""
        self.recovery.reaped(incarnation)

    def retries(self, now_us: int) -> list[Ticket]:
        """Give free slots to requests that run again; the tickets whose bodies must be copied now."""
        return self.recovery.retry(now_us)

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
        found = list(self.recovery.retries)
        for lane in self._lanes.values():
            found.extend(lane.backlog)
            for batch in (lane.open, *lane.ready):
                found.extend(batch.tickets if batch is not None else ())
        return [ticket for ticket in found if ticket.live]

    def holders(self) -> dict[int, Batch]:
        """Which batch holds which slot, for status."""
        found = [lane.open for lane in self._lanes.values()]
        for lane in self._lanes.values():
            found.extend(lane.ready)
        for seat in self.roster.seats():
            found.extend(seat.running)
        return {batch.slot: batch for batch in found if batch is not None}
