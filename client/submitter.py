"""The I/O thread behind ``Client.submit``: it owns one exchange, and futures are its only way out."""

from __future__ import annotations

import contextlib
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from mxpool.client.exchange import CLOSED, Exchange
from mxpool.client.pending import Piece, Ticket
from mxpool.client.resending import Resending
from mxpool.client.results import Outputs
from mxpool.client.wakeup import Wakeup
from mxpool.clock import now_us
from mxpool.errors import ClientUnusable, MxPoolError

IDLE_US = 3_600_000_000
JOIN_MAX_S = 5.0


class Job:
    """One submitted request: what is to be sent, and its future. ``ticket`` is there once it was sent."""

    __slots__ = ("deadline_us", "future", "model", "pieces", "settled", "ticket", "timeout_us")

    def __init__(self, model: str, pieces: list[Piece], deadline_us: int, timeout_us: int) -> None:
        self.model = model
        self.pieces = pieces
        self.deadline_us = deadline_us
        self.timeout_us = timeout_us
        self.future: Future[Outputs] = Future()
        self.ticket: Ticket | None = None
        self.settled = False

    def settle(self, outputs: Outputs | None, error: MxPoolError | None) -> None:
        """Complete the future, unless it was cancelled; only the first call counts."""
        if self.settled:
            return
        self.settled = True
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        elif outputs is not None:
            self.future.set_result(outputs)


class Submitter:
    """Runs from ``start`` to ``close``. ``connect`` opens an exchange whose waits the given wakeup cuts short.

    ``on_end`` is called by the thread once it holds nothing any more. The thread is a daemon: a program that returns
    from main without waiting for its futures is not held up.
    """

    def __init__(self, connect: Callable[[Wakeup, float], Exchange], on_end: Callable[[], None]) -> None:
        self._connect = connect
        self._on_end = on_end
        self._inbox: deque[Job] = deque()
        self._wakeup = Wakeup()
        self._signalled = False
        self._stopping = False
        self._ended = False
        self._exchange: Exchange | None = None
        self._resending: Resending | None = None  # there while the exchange is
        self._thread = threading.Thread(target=self._run, name="mxpool-submit", daemon=True)

    @property
    def ended(self) -> bool:
        """True once the thread is over: after ``close``, or because a callback of a future raised SystemExit."""
        return self._ended

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
        self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_MAX_S)

    def _enqueue(self, job: Job) -> None:
        """A job comes once to be sent, and a second time if its future was cancelled."""
        self._inbox.append(job)
        if not self._signalled:
            self._signalled = True
            self._wakeup.set()
        if self._ended:  # looked at after the job was put: either we see it, or the thread saw the job
            self._refuse_all()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        self._wakeup.clear()
        self._signalled = False  # before the inbox is read: what comes later signals again
        if self._stopping:  # looked at after the signal was taken, or the signal of ``close`` would be lost here
            return
        while self._inbox:
            self._handle(self._inbox.popleft())
        if self._exchange is None or self._resending is None:
            poll = select.poll()
            poll.register(self._wakeup, select.POLLIN)
            poll.poll()
            return
        self._resending.resend_and_turn(now_us() + IDLE_US)
        self._settle(self._exchange)

    def _handle(self, job: Job) -> None:
        if job.ticket is not None:
            if self._exchange is not None:
                self._exchange.cancel(job.ticket)
            return
        if job.settled or job.future.cancelled():
            job.settle(None, None)
            return
        try:
            exchange = self._exchange or self._open((job.deadline_us - now_us()) / 1e6)
        except MxPoolError as error:
            job.settle(None, error)
            return
        except BaseException:  # the thread will end, and nobody else knows of this job
            job.settle(None, ClientUnusable("the client's I/O thread failed"))
            raise
        job.ticket = exchange.post(job.model, job.pieces, job.deadline_us, job.timeout_us, owner=job)

    def _open(self, timeout_s: float) -> Exchange:
        self._exchange = self._connect(self._wakeup, timeout_s)
        self._resending = Resending(self._exchange)
        return self._exchange

    def _settle(self, exchange: Exchange) -> None:
        finished = exchange.pending.finished
        while finished:  # one by one: a callback that raises SystemExit ends this thread, not the others' answers
            ticket = finished.pop(0)
            ticket.owner.settle(ticket.outputs, ticket.error)
        if exchange.broken:
            exchange.close()
            self._exchange = self._resending = None

    def _end(self) -> None:
        try:
            if self._exchange is not None:
                self._exchange.close()
                self._settle(self._exchange)
        finally:
            if self._exchange is not None:  # another callback raised: the rest are settled all the same
                self._end()
            else:
                self._ended = True
                self._refuse_all()
                self._on_end()

    def _refuse_all(self) -> None:
        with contextlib.suppress(IndexError):  # several threads may be at it
            while True:
                job = self._inbox.popleft()
                if job.ticket is None:
                    job.settle(None, ClientUnusable(CLOSED))
