"""Pieces that a full queue refused go out again: after the broker's pause, and no more of them than it took before."""

from __future__ import annotations

import random
from typing import Any

from mxpool.client.backoff import pause_us
from mxpool.client.exchange import Exchange
from mxpool.client.pending import Ticket
from mxpool.client.window import Window
from mxpool.clock import now_us

UNLIMITED = 1 << 62


class Resending:
    """What one caller of an exchange has learned of the broker's queues. ``limit``: the most pieces to be with it."""

    def __init__(self, exchange: Exchange, limit: int = UNLIMITED) -> None:
        self.window = Window(limit)
        self._exchange = exchange
        self._refusals = exchange.pending.refusals
        self._attempt = 0

    def turn(self, until_us: int) -> None:
        """``Exchange.turn``; its refusals and answers change the window."""
        pending = self._exchange.pending
        before = len(pending)
        self._exchange.turn(until_us)
        if pending.refusals != self._refusals and pending.refusal is not None:
            self._refusals = pending.refusals
            pause = pause_us(pending.refusal, self._attempt, random.random())
            self.window.refused(len(pending), now_us(), pause)
            self._attempt += 1
        elif len(pending) < before:
            self.window.answered(before - len(pending))
            self._attempt = 0

    def resend_and_turn(self, until_us: int) -> None:
        """Send again what may go; then ``turn``, but not beyond the end of the pause while something waits for it."""
        pending, window = self._exchange.pending, self.window
        if pending.refused:
            if now_us() >= window.open_at_us:
                # One in any case: what others have with the broker on this connection must not hold it back for ever.
                self._exchange.resend(max(window.allowed, len(pending) + 1))
            else:
                until_us = min(until_us, window.open_at_us)
        self.turn(until_us)


def completed(exchange: Exchange, ticket: Ticket) -> Any:
    """``Exchange.complete``, where a full queue is waited out if the ticket is patient.

    Pieces of the ticket that are still refused when it ends are forgotten, and their regions are free again.
    """
    if not ticket.patient:
        return exchange.complete(ticket)
    resending = Resending(exchange)
    while not ticket.done:
        resending.resend_and_turn(ticket.deadline_us)
    exchange.forget_refused()
    return ticket.take()
