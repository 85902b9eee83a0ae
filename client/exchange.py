"""Requests and answers over one connection: the pending table, the arena and the socket, put together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from mxpool import errors, wire
from mxpool.client.arena import ARENA_BYTES, ARENA_MIN_BYTES, Arena
from mxpool.client.arrays import Array, RequestForm, joined
from mxpool.client.connection import Connection, Results
from mxpool.client.greeting import HELLO_ID
from mxpool.client.pending import Pending, Piece, Ticket
from mxpool.clock import now_us
from mxpool.errors import BrokerLost, ClientUnusable, MxPoolError

ANSWERS_A_TURN = 64  # then the caller may send again: the broker is not to run dry while we read
ARENA_WAIT_S = 1.0
CLOSED = "the client is closed"

_log = logging.getLogger(__name__)


class Exchange:
    """Open requests of one thread on one connection. Not thread-safe.

    A lost broker is never raised here: it finishes every open ticket with BrokerLost, and ``broken`` stays true.
    Another thread may set ``closing`` and then the Wakeup that the connection was opened with: the next turn ends all.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pending = Pending(first_id=HELLO_ID + 1)
        self.broken = False
        self.closing = False
        self._arena: Arena | None = None
        self._arena_wanted = connection.arenas

    def pieces(self, form: RequestForm, arrays: Mapping[str, Any], *, in_arena: bool = True) -> list[Piece]:
        """Check ``arrays`` and copy them; they may be changed once this returns.

        Large ones go into the arena unless told otherwise: the pieces can then be posted by another exchange.

        Raises:
            InvalidRequest: as ``RequestForm.check`` does; nothing is kept.
        """
        rows, checked = form.check(arrays)
        if rows * form.row_bytes < ARENA_MIN_BYTES and rows <= form.rows_max:
            return [Piece(rows, form.describe(rows), joined(checked))]
        return [self._piece(form, count, part, in_arena) for count, part in form.split(rows, checked)]

    def post(
        self,
        model: str,
        pieces: list[Piece],
        deadline_us: int,
        timeout_us: int,
        *,
        patient: bool = False,
        owner: Any = None,
    ) -> Ticket:
        """Send a request; the ticket may be done at once, with BrokerLost.

        Several pieces make the ticket patient in any case: they may fill the queue by themselves.
        """
        patient = patient or len(pieces) > 1
        ticket = self.pending.open(pieces, deadline_us, timeout_us, model=model, patient=patient, owner=owner)
        try:
            if self.broken:
                raise self.connection.lost("the connection is broken")
            for piece in pieces:
                self._send(model, piece, deadline_us)
        except BrokerLost as error:
            self._lose(error)
        return ticket

    def resend(self, limit: int) -> None:
        """Send pieces again that a full queue refused, while fewer than ``limit`` are with the broker."""
        refused = self.pending.refused
        try:
            while refused and len(self.pending) < limit:
                piece = refused.popleft()
                if piece.ticket.done:
                    self._release(piece)
                else:
                    self._send(piece.ticket.model, piece, piece.ticket.deadline_us)
        except BrokerLost as error:
            self._lose(error)

    def ask(self, verb: str, model: str, timeout_us: int, arguments: Mapping[str, Any]) -> Ticket:
        """Send a control request; the ticket's outputs will be the reply's payload."""
        deadline_us = now_us() + timeout_us
        piece = Piece(0, b"", None)
        ticket = self.pending.open([piece], deadline_us, timeout_us)
        request_id = self.pending.issue(piece)
        extensions = {"verb": verb, **arguments}
        header = wire.encode_request(wire.CONTROL, request_id, model, self._on_wire(deadline_us), extensions=extensions)
        try:
            self.connection.send(header)
        except BrokerLost as error:
            self._lose(error)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Finish ``ticket`` as cancelled and have the broker forget it; done tickets stay as they are."""
        self._send_cancels(self.pending.cancel(ticket))

    def cancel_all(self) -> None:
        """Finish every open request as cancelled, and have the broker forget them."""
        self._send_cancels(self.pending.cancel_all())
        self.forget_refused()

    def forget_refused(self) -> None:
        """Send none of the refused pieces again. The broker has none of them; their tickets are done."""
        while self.pending.refused:
            self._release(self.pending.refused.popleft())

    def turn(self, until_us: int = 0) -> None:
        """Take in what has come, or wait for it up to ``until_us`` or the next deadline; then expire what is due.

        Nothing expires while there is more to take in: its answer may be among it.
        """
        if self.broken or self.closing:
            self._lose(ClientUnusable(CLOSED) if self.closing else self.connection.lost("the connection is broken"))
            return
        due_us = self.pending.next_deadline_us()
        if due_us is not None and due_us < until_us:
            until_us = due_us
        try:
            if self.connection.wait(until_us - now_us() if until_us else 0):
                self._take_in(self.connection.receive())
                for _ in range(ANSWERS_A_TURN - 1):
                    if not len(self.pending) or not self.connection.readable():
                        break
                    self._take_in(self.connection.receive())
        except BrokerLost as error:
            self._lose(error)
        if due_us is not None and due_us <= (now := now_us()) and not self.broken and not self.connection.readable():
            self._send_cancels(self.pending.expire(now))

    def complete(self, ticket: Ticket) -> Any:
        """Take turns until ``ticket`` is done; its outputs, or raises its error. Patient ones: ``resending``."""
        while not ticket.done:
            self.turn(ticket.deadline_us)
        return ticket.take()

    def rest(self, until_us: int) -> None:
        """Take turns until ``until_us``, or until the connection ends."""
        while not self.broken and now_us() < until_us:
            self.turn(until_us)

    def check(self) -> None:
        """Become ``broken`` if the broker is gone; does not wait."""
        try:
            self.connection.check()
        except BrokerLost as error:
            self._lose(error)

    def close(self) -> None:
        """Close the connection and the arena; open tickets are finished with ClientUnusable."""
        self._lose(ClientUnusable(CLOSED))
        self.connection.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _piece(self, form: RequestForm, rows: int, arrays: list[Array], in_arena: bool) -> Piece:
        size_bytes = rows * form.row_bytes
        if in_arena and self._arena_wanted and size_bytes >= ARENA_MIN_BYTES:
            arena = self._arena or self._new_arena()
            offset = arena.place(arrays, size_bytes) if arena is not None else None
            if offset is not None:
                return Piece(rows, form.describe(rows), None, (offset, size_bytes))
        return Piece(rows, form.describe(rows), joined(arrays))

    def _new_arena(self) -> Arena | None:
        """Made at the first large request. Refused: everything goes by ZMQ, which is slower but the same."""
        self._arena_wanted = False
        try:
            arena, fd = Arena.create(ARENA_BYTES)
        except OSError as error:
            _log.warning("no arena, large requests go by ZMQ reason=%s", error)
            return None
        try:
            arena.token = self.connection.offer_arena(fd, ARENA_BYTES, ARENA_WAIT_S)
        except MxPoolError as error:
            arena.close()
            _log.warning("no arena, large requests go by ZMQ reason=%s", error)
            return None
        finally:
            os.close(fd)
        self._arena_wanted = True
        self._arena = arena
        return arena

    def _send(self, model: str, piece: Piece, deadline_us: int) -> None:
        extensions = None
        if piece.region is not None and self._arena is not None:
            extensions = {"arena": [self._arena.token, *piece.region]}
        request_id = self.pending.issue(piece)
        deadline_us = self._on_wire(deadline_us)
        header = wire.encode_request(wire.INFER, request_id, model, deadline_us, piece.rows, piece.tensors, extensions)
        self.connection.send(header, piece.body)

    def _send_cancels(self, ids: list[int]) -> None:
        if self.broken:
            return
        try:
            for request_id in ids:
                self.connection.send(wire.encode_request(wire.CANCEL, request_id))
        except BrokerLost as error:
            self._lose(error)

    def _on_wire(self, deadline_us: int) -> int:
        """Absolute where both ends read one clock, else minus the time left."""
        return deadline_us if self.connection.absolute_deadlines else min(now_us() - deadline_us, -1)

    def _take_in(self, answer: Results | wire.Failure | wire.Reply) -> None:
        if isinstance(answer, Results):
            for request_id, outputs in zip(answer.ids, answer.outputs, strict=True):
                piece = self.pending.answer(request_id, outputs)
                if piece is not None and piece.region is not None:
                    self._release(piece)
        elif isinstance(answer, wire.Reply):
            self.pending.answer(answer.request_id, answer.payload)
        else:
            if answer.request_id == 0:
                _log.warning("the broker could not read a request reason=%s", answer.message)
            error = errors.from_wire(answer.code, answer.message, answer.fields)
            piece, ids = self.pending.fail(answer.request_id, error)
            if piece is not None and piece.region is not None:
                self._release(piece)
            self._send_cancels(ids)

    def _release(self, piece: Piece) -> None:
        """The broker has no use for the piece's region any more."""
        if piece.region is not None and self._arena is not None:
            self._arena.give(piece.region[0])
            piece.region = None

    def _lose(self, error: MxPoolError) -> None:
        self.broken = True
        self.pending.abandon_all(error)
