"""Closing what came from strangers: the last close of a descriptor can take as long as they like (SO_LINGER, NFS).

So it never happens in the event loop, but in a thread that does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence

_waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
_started = threading.Lock()


def close_later(fds: Sequence[int]) -> None:
    """Close ``fds``, which are given away, soon."""
    if not fds:
        return
    if _started.acquire(blocking=False):  # once a process
        threading.Thread(target=_close_all, name="closing", daemon=True).start()
    for fd in fds:
        if fd >= 0:
            _waiting.put(fd)


def _close_all() -> None:
    while True:
        with contextlib.suppress(OSError):
            os.close(_waiting.get())
