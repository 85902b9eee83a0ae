"""The I/O thread behind ``Client.submit``: it owns one exchange, and futures are its only way out."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from mxpool.client.exchange import CLOSED, Exchange
from mxpool.client.pending import Piece, Ticket
from mxpool.client.results import Outputs
from mxpool.clock import now_us
from mxpool.errors import ClientUnusable, MxPoolError

IDLE_US = 3_600_000_000
JOIN_MAX_S = 5.0

_log = logging.getLogger(__name__)


class Job:
    """One submitted request: what is to be sent, and its future. ``ticket`` is there once it was sent."""

    __slots__ = ("deadline_us", "future", "model", "pieces", "ticket", "timeout_us")

    def __init__(self, model: str, pieces: list[Piece], deadline_us: int, timeout_us: int) -> None:
        self.model = model
        self.pieces = pieces
        self.deadline_us = deadline_us
        self.timeout_us = timeout_us
        self.future: Future[Outputs] = Future()
        self.ticket: Ticket | None = None

    def settle(self, outputs: Outputs | None, error: MxPoolError | None) -> None:
        """Complete the future, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        elif outputs is not None:
            self.future.set_result(outputs)


class Submitter:
    """Runs from the first ``put`` to ``close``. ``connect`` opens an exchange whose waits the given descriptor ends.

    The thread is a daemon: a program that returns from main without waiting for its futures is not held up.
    """

    def __init__(self, connect: Callable[[int, float], Exchange]) -> None:
        self._connect = connect
        self._inbox: deque[Job] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = False
        self._stopping = False
        self._exchange: Exchange | None = None
        self._thread = threading.Thread(target=self._run, name="mxpool-submit", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have ``job`` sent. From any thread; does not wait."""
        job.future.add_done_callback(lambda future: self._enqueue(job) if future.cancelled() else None)
        self._enqueue(job)

    def close(self) -> None:
        """Stop; open futures fail with ClientUnusable. Waits for the thread, unless called by it."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_MAX_S)

    def _enqueue(self, job: Job) -> None:
        """A job comes once to be sent, and a second time if its future was cancelled."""
        self._inbox.append(job)
        if not self._signalled:
            self._signalled = True
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._signalled = False  # before the inbox is read: what comes later signals again
        if self._stopping:  # looked at after the signal was taken, or the signal of ``close`` would be lost here
            return
        while self._inbox:
            self._handle(self._inbox.popleft())
        if self._exchange is None:
            poll = select.poll()
            poll.register(self._wake_fd, select.POLLIN)
            poll.poll()
            return
        self._exchange.turn(now_us() + IDLE_US)
        self._settle(self._exchange)

    def _handle(self, job: Job) -> None:
        if job.ticket is not None:
            if self._exchange is not None:
                self._exchange.cancel(job.ticket)
            return
        if job.future.cancelled():
            job.settle(None, None)
            return
        try:
            exchange = self._exchange or self._open((job.deadline_us - now_us()) / 1e6)
        except MxPoolError as error:
            job.settle(None, error)
            return
        job.ticket = exchange.post(job.model, job.pieces, job.deadline_us, job.timeout_us, owner=job)

    def _open(self, timeout_s: float) -> Exchange:
        self._exchange = self._connect(self._wake_fd, timeout_s)
        return self._exchange

    def _settle(self, exchange: Exchange) -> None:
        finished, exchange.pending.finished = exchange.pending.finished, []
        for ticket in finished:
            ticket.owner.settle(ticket.outputs, ticket.error)
        if exchange.broken:
            exchange.close()
            self._exchange = None

    def _end(self) -> None:
        self._stopping = True
        if self._exchange is not None:
            self._exchange.close()
            self._settle(self._exchange)
        while self._inbox:
            job = self._inbox.popleft()
            if job.ticket is None:
                job.settle(None, ClientUnusable(CLOSED))
        os.close(self._wake_fd)
