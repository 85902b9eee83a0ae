"""``Client.push``: many requests in flight, results in order, everything in the caller's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mxpool.client.exchange import Exchange
from mxpool.client.pending import Piece, Ticket
from mxpool.client.resending import Resending
from mxpool.client.results import Outputs
from mxpool.clock import now_us
from mxpool.errors import InvalidRequest, MxPoolError

LOOK_EVERY_US = 200  # a look costs about two microseconds: one percent, and answers are not left lying


class Push:
    """One run of ``push`` over one exchange; what is open when ``results`` ends is the caller's to cancel."""

    def __init__(
        self,
        exchange: Exchange,
        model: str,
        frames: Iterable[Mapping[str, Any]],
        make_pieces: Callable[[Mapping[str, Any]], list[Piece]],
        in_flight: int,
        timeout_us: int,
    ) -> None:
        self._exchange = exchange
        self._model = model
        self._frames = iter(frames)
        self._make_pieces = make_pieces
        self._in_flight = in_flight
        self._timeout_us = timeout_us
        self._resending = Resending(exchange, in_flight)
        self._window = self._resending.window
        self._order: deque[Ticket] = deque()
        self._more = True

    def results(self) -> Iterator[Outputs]:
        """Outputs in the order of the frames; raises at the first frame that failed, with its index in ``fields``."""
        order, index = self._order, 0
        while True:
            self._fill()
            if not order:
                return
            if not order[0].done:
                self._wait()
            while order and order[0].done:
                try:
                    outputs = order.popleft().take()
                except MxPoolError as error:
                    error.fields["index"] = index
                    raise
                index += 1
                yield outputs

    def _fill(self) -> None:
        """Send while there is room, but not for longer than a look at the answers may wait."""
        order, pending, allowed = self._order, self._exchange.pending, self._window.allowed
        started_us = now = now_us()
        if now < self._window.open_at_us:
            return
        if pending.refused:
            self._exchange.resend(allowed)
        while self._more and len(order) < self._in_flight and len(pending) < allowed:
            try:
                frame = next(self._frames)
            except StopIteration:
                self._more = False
                return
            now = now_us()
            self._post(frame, now)
            if now - started_us >= LOOK_EVERY_US:
                return

    def _post(self, frame: Mapping[str, Any], now: int) -> None:
        try:
            pieces = self._make_pieces(frame)
        except InvalidRequest as error:
            # Results of the frames before it come first: it takes its place in the order as a ticket that failed.
            failed = Ticket((), now, 0, self._model, False, None)
            failed.done, failed.error = True, error
            self._order.append(failed)
            self._more = False
            return
        ticket = self._exchange.post(self._model, pieces, now + self._timeout_us, self._timeout_us, patient=True)
        self._order.append(ticket)

    def _wait(self) -> None:
        """Take in answers; wait for them only while nothing can be sent."""
        pending, window = self._exchange.pending, self._window
        has_more = bool(pending.refused) or (self._more and len(self._order) < self._in_flight)
        if has_more and len(pending) < window.allowed:
            self._resending.turn(window.open_at_us if window.open_at_us > now_us() else 0)
        else:
            self._resending.turn(self._order[0].deadline_us)
