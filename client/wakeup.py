"""A descriptor that other threads make readable, to end a wait."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """An eventfd. It stays open as long as somebody holds this object, so that ``set`` never writes to a stranger's."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """The descriptor, for a poller."""
        return self._fd

    def set(self) -> None:
        """Make it readable. From any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable until the next ``set``."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
