"""The connections of one client: lent to one caller at a time, kept for the next one, closed when the last is back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from mxpool.client.exchange import CLOSED, Exchange
from mxpool.client.wakeup import Wakeup
from mxpool.clock import now_us
from mxpool.errors import ClientUnusable, MxPoolError


class Pool:
    """Exchanges that lie idle, and who is out with one. Thread-safe; no lock is held during I/O.

    ``open_exchange`` makes a new one, whose waits the given wakeup cuts short. ``on_empty`` is called once, after
    ``close``, when nobody is in any more.
    """

    def __init__(self, open_exchange: Callable[[Wakeup, float], Exchange], on_empty: Callable[[], None]) -> None:
        self._open = open_exchange
        self._on_empty = on_empty
        self._lock = threading.Lock()
        self._callers = 0
        self._idle: list[Exchange] = []
        self._busy: set[Exchange] = set()
        self._closing = threading.Event()
        self._wakeup = Wakeup()  # readable once the pool is closed

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self._closing.is_set()

    def pause(self, pause_us: int) -> None:
        """Sleep, but not beyond ``close``."""
        self._closing.wait(pause_us / 1e6)

    @contextlib.contextmanager
    def lent(self, deadline_us: int) -> Iterator[Exchange]:
        """An exchange that nobody else uses, to be opened by ``deadline_us``: the one used last, or a new one.

        Raises:
            ClientUnusable: if the pool is closed.
            BrokerLost: if there is no broker.
        """
        exchange = self.take(deadline_us)
        try:
            yield exchange
        except MxPoolError:
            raise
        except BaseException:
            exchange.broken = True  # stopped at an unknown point, perhaps between two frames of a message
            raise
        finally:
            self.leave(exchange)

    def take(self, deadline_us: int) -> Exchange:
        """``lent``, to be given back by ``leave``."""
        self.enter()
        try:
            exchange = self._last_used() or self._open(self._wakeup, (deadline_us - now_us()) / 1e6)
        except BaseException:
            self.leave(None)
            raise
        with self._lock:
            exchange.closing = self._closing.is_set()
            self._busy.add(exchange)
        return exchange

    def enter(self) -> None:
        """Be in without an exchange of the pool's; ``leave(None)`` ends it. Raises ClientUnusable once closed."""
        with self._lock:
            if self._closing.is_set():
                raise ClientUnusable(CLOSED)
            self._callers += 1

    def leave(self, exchange: Exchange | None) -> None:
        """Give an exchange back; a broken one is closed."""
        with self._lock:
            self._callers -= 1
            if exchange is not None:
                self._busy.discard(exchange)
                if not exchange.broken and not self._closing.is_set():
                    self._idle.append(exchange)
                    return
            empty = self._closing.is_set() and not self._callers
        if exchange is not None:
            exchange.close()
        if empty:
            self._on_empty()

    def close(self) -> bool:
        """Close what lies idle and end the waits of those who are out; False if it was closed before."""
        with self._lock:
            if self._closing.is_set():
                return False
            self._closing.set()
            idle, self._idle = self._idle, []
            for exchange in self._busy:
                exchange.closing = True
            empty = not self._callers
        self._wakeup.set()
        for exchange in idle:
            exchange.close()
        if empty:
            self._on_empty()
        return True

    def _last_used(self) -> Exchange | None:
        """An idle exchange whose broker is still there; None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                exchange = self._idle.pop()
            exchange.check()
            if not exchange.broken:
                return exchange
            exchange.close()
