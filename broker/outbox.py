"""Answers that a client was too slow to take, within a bound. Pure."""

from __future__ import annotations

from collections import deque

Message = tuple[bytes, bytes | None]  # header, body


class Outbox:
    """First in, first out; ``push`` refuses what would pass either limit."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._waiting: deque[Message] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, header: bytes, body: bytes | None) -> bool:
        """Append a message; False, with nothing changed, if there is no room for it."""
        size = len(header) + len(body or b"")
        if len(self._waiting) >= self._messages_max or self._bytes + size > self._bytes_max:
            return False
        self._waiting.append((header, body))
        self._bytes += size
        return True

    def peek(self) -> Message:
        """The oldest message; IndexError if there is none."""
        return self._waiting[0]

    def pop(self) -> None:
        """Take the oldest message away: it was sent."""
        header, body = self._waiting.popleft()
        self._bytes -= len(header) + len(body or b"")
