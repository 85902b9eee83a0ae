"""The event loop: descriptors call back, timers set the timeout."""

from __future__ import annotations

import select
from collections.abc import Callable

SHORT_WAIT_S = 0.01  # epoll rounds up to whole milliseconds; max_queue_delay_us is finer
WAIT_MAX_S = 60.0  # nothing waits on this; it bounds the harm of a lost wake-up


class Loop:
    """An epoll and its callbacks. One pass is: wait, call back for each readable descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def add(self, fd: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever ``fd`` is readable or at its end."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Stop watching ``fd``, which must still be open."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for any descriptor, then call back."""
        if 0 < timeout_s < SHORT_WAIT_S:
            select.select([self._epoll], [], [], timeout_s)
            timeout_s = 0
        for fd, _ in self._epoll.poll(min(max(timeout_s, 0), WAIT_MAX_S)):
            callback = self._callbacks.get(fd)
            if callback is not None:  # an earlier callback of this pass may have removed it
                callback()

    def close(self) -> None:
        """Close the epoll; the descriptors are their owners'."""
        self._epoll.close()
