"""One accepted request, the batch that it became part of, and the deadlines of all of them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

REBUILD_MIN = 1024  # below this many entries a heap is never rebuilt: it costs less than a page of memory


class Ticket:
    """A request from its arrival until its one answer.

    ``body`` holds the tensors' bytes only while no slot has them (queue without a free slot). ``row`` is the first of
    its rows in ``batch``. ``live`` is false once it was answered, cancelled or expired: its rows in a slot are dead.
    """

    __slots__ = (
        "arrival_us",
        "attempts",
        "batch",
        "body",
        "client",
        "deadline_us",
        "lane",
        "live",
        "model",
        "request_id",
        "row",
        "rows",
    )

    def __init__(
        self, client: Any, request_id: int, rows: int, arrival_us: int, deadline_us: int, model: Any = None
    ) -> None:
        self.client = client
        self.request_id = request_id
        self.rows = rows
        self.arrival_us = arrival_us
        self.deadline_us = deadline_us
        self.model = model
        self.body: Any = None
        self.batch: Batch | None = None
        self.lane: Any = None
        self.row = 0
        self.live = True
        self.attempts = 0


class Batch:
    """Requests that lie in one slot.

    ``rows`` counts the rows of all of them, ``live`` and ``live_rows`` the tickets that still want an answer and their
    rows. ``worker`` is "" until it is dispatched.
    """

    __slots__ = (
        "close",
        "closed_us",
        "generation",
        "lane",
        "live",
        "live_rows",
        "merge_us",
        "oldest_us",
        "queue_depth",
        "rows",
        "sequence",
        "size",
        "slot",
        "tickets",
        "worker",
    )

    def __init__(self, slot: int, lane: Any) -> None:
        self.slot = slot
        self.lane = lane
        self.tickets: list[Ticket] = []
        self.rows = 0
        self.live = 0
        self.live_rows = 0
        self.size = 0
        self.oldest_us = 0
        self.close = ""
        self.closed_us = 0
        self.merge_us = 0
        self.queue_depth = 0
        self.generation = 0
        self.sequence = 0
        self.worker = ""

    def add(self, ticket: Ticket) -> None:
        """Give ``ticket`` the next rows."""
        if not self.tickets:
            self.oldest_us = ticket.arrival_us
        ticket.batch = self
        ticket.row = self.rows
        self.rows += ticket.rows
        self.live += 1
        self.live_rows += ticket.rows
        self.tickets.append(ticket)


class Deadlines:
    """Tickets by deadline. Answered ones are left in the heap and skipped, and it is rebuilt when they are most of it.

    So adding costs one heap push, answering costs nothing, and memory stays within a factor of the live tickets.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Ticket]] = []
        self._added = 0
        self._rebuild_at = REBUILD_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, ticket: Ticket) -> None:
        """Watch ``ticket``, which has a deadline."""
        self._added += 1
        heapq.heappush(self._heap, (ticket.deadline_us, self._added, ticket))
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)
            self._rebuild_at = max(2 * len(self._heap), REBUILD_MIN)

    def next_us(self) -> int | None:
        """When the next live ticket expires; None if none does."""
        heap = self._heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_us: int) -> Iterator[Ticket]:
        """Take the live tickets whose deadline has passed."""
        while (due := self.next_us()) is not None and due <= now_us:
            yield heapq.heappop(self._heap)[2]
