"""A scripted exchange: each turn takes the next outcomes of what is with the broker, and no time passes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from mxpool.client import resending as module
from mxpool.client.exchange import Exchange
from mxpool.client.pending import Pending, Piece, Ticket
from mxpool.client.resending import Resending
from mxpool.errors import QueueFull

FULL = QueueFull(model="m", depth=1, limit=1, unit="requests", retry_after_ms=100)
FAR_US = 10**12


class ScriptedExchange:
    def __init__(self) -> None:
        self.pending = Pending()
        self.script: list[Callable[[], None]] = []
        self.until: list[int] = []
        self.limits: list[int] = []

    def post(self, pieces: int, *, patient: bool = True) -> Ticket:
        parts = [Piece(1, b"", b"") for _ in range(pieces)]
        ticket = self.pending.open(parts, FAR_US, FAR_US, patient=patient)
        for part in parts:
            self.pending.issue(part)
        return ticket

    def refuse(self, ids: list[int]) -> None:
        for request_id in ids:
            self.pending.fail(request_id, FULL)

    def answer(self, ids: list[int]) -> None:
        for request_id in ids:
            self.pending.answer(request_id, {})

    def turn(self, until_us: int) -> None:
        self.until.append(until_us)
        if self.script:
            self.script.pop(0)()

    def resend(self, limit: int) -> None:
        self.limits.append(limit)
        while self.pending.refused and len(self.pending) < limit:
            self.pending.issue(self.pending.refused.popleft())


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now_us", clock)
    return clock


def test_nothing_goes_out_before_the_pause_is_over_and_the_wait_ends_with_it(clock: Clock) -> None:
    exchange = ScriptedExchange()
    resending = Resending(cast(Exchange, exchange))
    ids = [piece.request_id for piece in exchange.post(5).pieces]
    exchange.script = [lambda: exchange.refuse(ids[2:])]
    resending.resend_and_turn(FAR_US)
    open_us = resending.window.open_at_us
    assert 100_000 <= open_us - clock.now <= 150_000
    resending.resend_and_turn(FAR_US)
    assert (exchange.until[-1], exchange.limits) == (open_us, [])
    clock.now = open_us
    exchange.answer(ids[:2])
    resending.resend_and_turn(FAR_US)
    assert (exchange.until[-1], exchange.limits, len(exchange.pending)) == (FAR_US, [2], 2)


def test_requests_that_others_have_with_the_broker_do_not_hold_a_refused_piece_back(clock: Clock) -> None:
    exchange = ScriptedExchange()
    resending = Resending(cast(Exchange, exchange))
    ids = [piece.request_id for piece in exchange.post(2).pieces]
    exchange.script = [lambda: exchange.refuse(ids[1:])]
    resending.resend_and_turn(FAR_US)
    exchange.post(1, patient=False)
    exchange.post(1, patient=False)
    clock.now += 1_000_000
    resending.resend_and_turn(FAR_US)
    assert not exchange.pending.refused


@pytest.mark.usefixtures("clock")
def test_answers_open_the_window_again() -> None:
    exchange = ScriptedExchange()
    resending = Resending(cast(Exchange, exchange), 10)
    ids = [piece.request_id for piece in exchange.post(4).pieces]
    exchange.script = [lambda: exchange.refuse(ids[2:]), lambda: exchange.answer(ids[:2])]
    resending.turn(FAR_US)
    assert resending.window.allowed == 2
    resending.turn(FAR_US)
    assert resending.window.allowed == 3
