from __future__ import annotations

from collections import deque
from typing import Any, cast

import numpy as np
import pytest

from mxpool import wire
from mxpool.client.connection import Connection, Results
from mxpool.client.exchange import ANSWERS_A_TURN, Exchange
from mxpool.client.pending import Piece, Ticket
from mxpool.clock import now_us
from mxpool.errors import DeadlineExceeded

LONG_AGO_US = 1
MANY = 3 * ANSWERS_A_TURN


class ScriptedConnection:
    """Takes everything; what it has to say lies in ``answers``, one message each."""

    arenas = False
    absolute_deadlines = True

    def __init__(self) -> None:
        self.sent: list[wire.Request] = []
        self.answers: deque[Results | wire.Failure] = deque()
        self.waits: list[int] = []

    def send(self, header: bytes, _: bytes | None = None) -> None:
        self.sent.append(wire.decode_request(header))

    def readable(self) -> bool:
        return bool(self.answers)

    def wait(self, wait_us: int) -> bool:
        self.waits.append(wait_us)
        return self.readable()

    def receive(self) -> Results | wire.Failure:
        return self.answers.popleft()


@pytest.fixture
def connection() -> ScriptedConnection:
    return ScriptedConnection()


@pytest.fixture
def exchange(connection: ScriptedConnection) -> Exchange:
    return Exchange(cast(Connection, connection))


def post(exchange: Exchange, deadline_us: int, pieces: int = 1, model: str = "m") -> Ticket:
    return exchange.post(model, [Piece(1, b"", b"") for _ in range(pieces)], deadline_us, 1)


def answer(request_id: int) -> Results:
    outputs: dict[str, Any] = {"y": np.zeros(1, np.float32)}
    return Results([request_id], [outputs])


def test_an_answer_that_has_come_is_not_lost_to_a_deadline_however_late_it_is_read(
    connection: ScriptedConnection, exchange: Exchange
) -> None:
    tickets = [post(exchange, LONG_AGO_US) for _ in range(MANY)]
    connection.answers.extend(answer(ticket.pieces[0].request_id) for ticket in tickets)
    turns = 0
    while not tickets[-1].done:
        exchange.turn()
        turns += 1
    assert turns == MANY // ANSWERS_A_TURN
    assert [ticket.error for ticket in tickets] == [None] * MANY


def test_what_has_no_answer_expires_as_soon_as_nothing_more_can_be_read(
    connection: ScriptedConnection, exchange: Exchange
) -> None:
    tickets = [post(exchange, LONG_AGO_US) for _ in range(MANY)]
    unanswered = tickets[5]
    missing = unanswered.pieces[0].request_id
    connection.answers.extend(answer(ticket.pieces[0].request_id) for ticket in tickets if ticket is not unanswered)
    while not tickets[-1].done:
        exchange.turn()
    assert isinstance(unanswered.error, DeadlineExceeded)
    assert [sent.request_id for sent in connection.sent if sent.kind == wire.CANCEL] == [missing]


def test_a_request_of_several_pieces_is_patient_and_one_of_a_single_piece_is_not(exchange: Exchange) -> None:
    later_us = now_us() + 10**9
    assert [post(exchange, later_us, pieces).patient for pieces in (1, 2)] == [False, True]
