"""Requests without a final answer on one connection: what is open, what is done, what is late. Pure.

A *ticket* is one request of the caller. It goes out as one *piece*, or as several where it is larger than a batch; each
piece has an id of its own on the wire. A ticket is finished exactly once, by the first of: all its pieces answered, one
piece failed, its deadline, a cancel. What comes for it afterwards is late, and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from mxpool.client.results import Outputs, concatenated
from mxpool.errors import Cancelled, DeadlineExceeded, MxPoolError, QueueFull

STALE_MAX = 1024  # deadlines of finished tickets that may lie about before they are swept out


class Piece:
    """Rows of a ticket that travel as one request; kept whole until answered, so that it can be sent again.

    ``body`` holds its tensors, or is None where they lie in the connection's arena: ``region`` is (offset, bytes).
    """

    __slots__ = ("answer", "body", "region", "request_id", "rows", "tensors", "ticket")

    def __init__(self, rows: int, tensors: bytes, body: bytes | None, region: tuple[int, int] | None = None) -> None:
        self.rows = rows
        self.tensors = tensors
        self.body = body
        self.region = region
        self.request_id = 0
        self.answer: Outputs | None = None
        self.ticket: Ticket


class Ticket:
    """One request of the caller, from ``Pending.open`` until it is ``done``.

    ``patient``: a full queue is no failure; its pieces go to ``Pending.refused`` to be sent again to ``model``.
    ``owner`` is for the caller; tickets with an owner are listed in ``Pending.finished``.
    """

    __slots__ = ("deadline_us", "done", "error", "model", "outputs", "owner", "patient", "pieces", "timeout_us")

    def __init__(
        self, pieces: Sequence[Piece], deadline_us: int, timeout_us: int, model: str, patient: bool, owner: Any
    ) -> None:
        self.pieces = pieces
        self.model = model
        self.deadline_us = deadline_us
        self.timeout_us = timeout_us
        self.patient = patient
        self.owner = owner
        self.done = False
        self.outputs: Any = None
        self.error: MxPoolError | None = None

    def take(self) -> Any:
        """The outputs of a ticket that is done, or raises its error. Once: the outputs are the caller's from now on."""
        if self.error is not None:
            raise self.error
        outputs, self.outputs = self.outputs, None
        return outputs


class Pending:
    """Open tickets by the ids of their pieces.

    Invariants: ids ascend and are never used twice; a ticket is in the table exactly while it is not done; its outcome
    never changes. Times are CLOCK_MONOTONIC in microseconds, passed in.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.finished: list[Ticket] = []
        self.refused: deque[Piece] = deque()
        self.refusals = 0  # how many pieces ever went to ``refused``
        self.refusal: QueueFull | None = None  # the latest
        self._next_id = first_id
        self._pieces: dict[int, Piece] = {}
        self._leaving: dict[int, Piece] = {}
        # Nearly every caller uses one timeout, so deadlines ascend and a queue will do; the others go to the heap.
        self._due: deque[Ticket] = deque()
        self._due_early: list[tuple[int, int, Ticket]] = []
        self._serial = 0  # the heap compares it where two deadlines are equal

    def __len__(self) -> int:
        """Pieces that are with the broker and whose tickets are open."""
        return len(self._pieces)

    def issue(self, piece: Piece) -> int:
        """Give ``piece`` the next id: it is about to be sent, for the first time or again."""
        request_id = piece.request_id = self._next_id
        self._next_id = request_id + 1
        self._pieces[request_id] = piece
        return request_id

    def open(
        self,
        pieces: Sequence[Piece],
        deadline_us: int,
        timeout_us: int,
        *,
        model: str = "",
        patient: bool = False,
        owner: Any = None,
    ) -> Ticket:
        """A new ticket for ``pieces``, each of which is to be issued next. ``timeout_us`` is for the error's text."""
        ticket = Ticket(pieces, deadline_us, timeout_us, model, patient, owner)
        for piece in pieces:
            piece.ticket = ticket
        due = self._due
        if not due or due[-1].deadline_us <= deadline_us:
            due.append(ticket)
        else:
            self._serial += 1
            heappush(self._due_early, (deadline_us, self._serial, ticket))
        if len(due) + len(self._due_early) > 2 * len(self._pieces) + STALE_MAX:
            self._sweep()
        return ticket

    def next_deadline_us(self) -> int | None:
        """When ``expire`` has something to do; None if nothing is open."""
        due, early = self._due, self._due_early
        while due and due[0].done:
            due.popleft()
        while early and early[0][2].done:
            heappop(early)
        if early and (not due or early[0][0] < due[0].deadline_us):
            return early[0][0]
        return due[0].deadline_us if due else None

    def answer(self, request_id: int, outputs: Any) -> Piece | None:
        """A result for ``request_id``; the piece that the broker is done with now, or None for an unknown id."""
        piece = self._pieces.pop(request_id, None)
        if piece is None:
            return self._leaving.pop(request_id, None)
        ticket = piece.ticket
        if len(ticket.pieces) == 1:
            self._finish(ticket, outputs, None)
            return piece
        piece.answer = outputs
        # Pieces are mostly answered in order: from the end, the first look says that one is missing.
        if all(part.answer is not None for part in reversed(ticket.pieces)):
            self._finish(ticket, concatenated([part.answer for part in ticket.pieces if part.answer is not None]), None)
        return piece

    def fail(self, request_id: int, error: MxPoolError) -> tuple[Piece | None, list[int]]:
        """An error for ``request_id``: the piece that the broker is done with, and ids to cancel at the broker.

        A full queue and a patient ticket: nothing fails, and the piece waits in ``refused``.
        """
        piece = self._pieces.pop(request_id, None)
        if piece is None:
            return self._leaving.pop(request_id, None), []
        if piece.ticket.patient and isinstance(error, QueueFull):
            self.refused.append(piece)
            self.refusals += 1
            self.refusal = error
            return None, []
        return piece, self.abandon(piece.ticket, error)

    def abandon(self, ticket: Ticket, error: MxPoolError) -> list[int]:
        """Finish ``ticket`` with ``error``; returns the ids that the broker still works on. Done tickets: []."""
        if ticket.done:
            return []
        pieces = [piece for piece in ticket.pieces if self._pieces.get(piece.request_id) is piece]
        self._finish(ticket, None, error)
        for piece in pieces:
            self._leaving[piece.request_id] = self._pieces.pop(piece.request_id)
        return [piece.request_id for piece in pieces]

    def cancel(self, ticket: Ticket) -> list[int]:
        """``abandon`` with the error Cancelled."""
        return self.abandon(ticket, Cancelled())

    def cancel_all(self) -> list[int]:
        """``cancel`` every open ticket."""
        return [request_id for ticket in self._open() for request_id in self.cancel(ticket)]

    def expire(self, now_us: int) -> list[int]:
        """Finish every ticket whose deadline is ``now_us`` or earlier; returns the ids to cancel at the broker."""
        ids: list[int] = []
        while (due_us := self.next_deadline_us()) is not None and due_us <= now_us:
            from_queue = bool(self._due) and self._due[0].deadline_us == due_us
            ticket = self._due[0] if from_queue else self._due_early[0][2]
            ids += self.abandon(ticket, DeadlineExceeded(timeout_s=ticket.timeout_us / 1e6))
        return ids

    def abandon_all(self, error: MxPoolError) -> None:
        """Finish every open ticket with an error like ``error``: no answer will come any more."""
        for ticket in self._open():
            self.abandon(ticket, type(error)(error.message, **error.fields))  # each caller raises an error of its own
        self._leaving.clear()
        self.refused.clear()

    def _open(self) -> list[Ticket]:
        tickets = [*self._due, *(entry[2] for entry in self._due_early)]
        return [ticket for ticket in tickets if not ticket.done]

    def _finish(self, ticket: Ticket, outputs: Any, error: MxPoolError | None) -> None:
        ticket.done = True
        ticket.outputs = outputs
        ticket.error = error
        ticket.pieces = ()  # a done ticket may wait in _due for long; its bodies need not
        if ticket.owner is not None:
            self.finished.append(ticket)

    def _sweep(self) -> None:
        self._due = deque(ticket for ticket in self._due if not ticket.done)
        self._due_early = [entry for entry in self._due_early if not entry[2].done]
        heapify(self._due_early)
