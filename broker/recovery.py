"""Where a dead worker's batches go. Pure.

A batch that it had not begun becomes ready again, as it is. Of one that it was running, each request is retried alone,
in a slot of its own, so that a poisonous one harms only itself; its slot rests until nobody can write to it any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mxpool.broker.roster import Seat
from mxpool.broker.tickets import Batch, Ticket
from mxpool.shm.slots import SlotEvent, SlotTable

ATTEMPTS_MAX = 2  # a request executes at most twice


@dataclass(slots=True)
class Lost:
    """What was on the seat of a dead worker, of which ``incarnation`` tells it from its successors.

    ``returned`` batches are ready again. ``failed`` requests had their second death and must be answered. The bodies
    of the ``again`` requests must be taken out of their old slots before any other call to the core.
    """

    incarnation: int
    returned: list[Batch] = field(default_factory=list)
    failed: list[Ticket] = field(default_factory=list)
    again: list[tuple[Ticket, int]] = field(default_factory=list)


class Recovery:
    """Requests that wait for their retry, and slots that wait for their worker to be gone."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._quarantined: dict[int, int] = {}  # slot: incarnation
        self.retries: deque[Ticket] = deque()  # each with its body: it must not need its old slot to get a new one

    def sort_out(self, seat: Seat, started: int) -> Lost:
        """Decide about each batch of a dead worker; ``started`` was the last sequence that it began."""
        lost = Lost(seat.incarnation)
        for batch in reversed(seat.running):
            if batch.sequence > started:
                self._return(batch, lost)
            else:
                self._quarantine(batch, lost)
        return lost

    def _return(self, batch: Batch, lost: Lost) -> None:
        self._slots.apply(batch.slot, SlotEvent.RETURN)
        batch.worker = ""
        if batch.live:
            batch.lane.ready.appendleft(batch)
            lost.returned.append(batch)
        else:
            batch.lane.give_back(batch, SlotEvent.ABANDON)

    def _quarantine(self, batch: Batch, lost: Lost) -> None:
        batch.lane.give_back(batch, SlotEvent.WORKER_LOST)
        self._quarantined[batch.slot] = lost.incarnation
        for ticket in batch.tickets:
            if not ticket.live:
                continue
            ticket.attempts += 1
            ticket.batch = None
            if ticket.attempts >= ATTEMPTS_MAX:
                ticket.live = False
                lost.failed.append(ticket)
            else:
                self.retries.append(ticket)
                lost.again.append((ticket, batch.slot))

    def reaped(self, incarnation: int) -> None:
        """No process of that incarnation can write to its slots any more: they are free."""
        for slot in [slot for slot, owner in self._quarantined.items() if owner == incarnation]:
            del self._quarantined[slot]
            self._slots.apply(slot, SlotEvent.REAPED)

    def retry(self, now_us: int) -> list[Ticket]:
        """Give free slots to requests that run again, each alone; the tickets whose bodies must be copied now."""
        placed: list[Ticket] = []
        while self.retries:
            ticket = self.retries[0]
            if ticket.live:
                batch = ticket.lane.claim()
                if batch is None:
                    break
                batch.add(ticket)
                ticket.lane.publish(batch, "retry", now_us)
                placed.append(ticket)
            self.retries.popleft()
        return placed
