"""The workers of one model as the scheduler sees them, and which of them takes the next batch. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mxpool.broker.tickets import Batch


@dataclass(slots=True)
class Seat:
    """One worker that can run batches. ``running`` is in dispatch order; ``busy_since_us`` is its oldest's start."""

    worker: str
    in_flight: int
    sizes: tuple[int, ...]
    incarnation: int
    running: deque[Batch] = field(default_factory=deque)
    busy_since_us: int = 0
    closed: bool = False

    @property
    def idle(self) -> bool:
        """It has nothing to do and may be given work."""
        return not self.running and not self.closed

    @property
    def room(self) -> bool:
        """It could hold one more batch. One that retries a request gets no company: it may be about to die of it."""
        running = self.running
        return len(running) < self.in_flight and not self.closed and not (running and running[-1].close == "retry")


class Roster:
    """Workers that are bound and ready. Picking is reserving: ``take`` puts the batch on the worker's seat."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._sequence = 0
        self._incarnation = 0

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, worker: str) -> bool:
        return worker in self._seats

    def seat(self, worker: str) -> Seat:
        """The seat of ``worker``; KeyError if it is not ready."""
        return self._seats[worker]

    def in_flight(self, worker: str) -> int:
        """Batches that ``worker`` has now; 0 for one that is not ready."""
        return len(self._seats[worker].running) if worker in self._seats else 0

    def seats(self) -> list[Seat]:
        """All seats; the one that has waited longest for work is first."""
        return list(self._seats.values())

    def add(self, worker: str, in_flight: int, sizes: tuple[int, ...]) -> None:
        """``worker`` is ready, to run batches padded to one of ``sizes``."""
        self._incarnation += 1
        self._seats[worker] = Seat(worker, in_flight, sizes, self._incarnation)

    def remove(self, worker: str) -> Seat | None:
        """``worker`` is gone; its seat, with what it was running, or None if it had none."""
        return self._seats.pop(worker, None)

    def pick(self, batch: Batch, among: str | None = None) -> Seat | None:
        """The seat that should take ``batch`` now, or None.

        An idle worker first. A busy one with room only where the batch closed as full or delay (a batch that closed
        for an idle worker would wait behind another although more could still join it). ``among`` limits the choice
        to one worker.
        """
        second: Seat | None = None
        for seat in self._seats.values():
            if among is not None and seat.worker != among:
                continue
            if seat.idle:
                return seat
            if second is None and seat.room:
                second = seat
        return second if batch.close in ("full", "delay", "drain") else None

    def take(self, seat: Seat, batch: Batch, now_us: int) -> None:
        """Put ``batch`` on ``seat``; its worker moves to the end of the order."""
        self._sequence += 1
        batch.sequence = self._sequence
        batch.worker = seat.worker
        if not seat.running:
            seat.busy_since_us = now_us
        seat.running.append(batch)
        self._seats[seat.worker] = self._seats.pop(seat.worker)

    def finish(self, worker: str, slot: int, generation: int, now_us: int) -> Batch | None:
        """Take the batch that ``worker`` has completed off its seat; None if it was not running that one."""
        seat = self._seats.get(worker)
        if seat is None:
            return None
        for batch in seat.running:
            if batch.slot == slot and batch.generation == generation:
                seat.running.remove(batch)
                seat.busy_since_us = now_us
                return batch
        return None

    def close(self, worker: str) -> None:
        """``worker`` is being ended: it gets no more work, and what it runs no more time."""
        if worker in self._seats:
            self._seats[worker].closed = True

    def any_idle(self, among: str | None = None) -> bool:
        """True if a worker has nothing to do."""
        for seat in self._seats.values():  # a plain loop: this runs in every pass of the broker
            if not seat.running and not seat.closed and (among is None or seat.worker == among):
                return True
        return False

    def any_room(self, among: str | None = None) -> bool:
        """True if a worker could take one more batch."""
        return any(seat.room and (among is None or seat.worker == among) for seat in self._seats.values())

    def overdue(self, now_us: int, run_timeout_us: int) -> list[str]:
        """Workers whose oldest batch has run longer than ``run_timeout_us``, each told once; they get no more work."""
        found = [s for s in self._timed() if now_us - s.busy_since_us >= run_timeout_us]
        for seat in found:
            seat.closed = True
        return [seat.worker for seat in found]

    def overdue_us(self, run_timeout_us: int) -> int | None:
        """When the next worker becomes overdue; None if none can."""
        return min((s.busy_since_us + run_timeout_us for s in self._timed()), default=None)

    def _timed(self) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.running and not seat.closed]
