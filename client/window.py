"""How many requests ``push`` may have with the broker: the caller's limit, less while the queue is full. Pure."""

from __future__ import annotations


class Window:
    """Shrinks to what was accepted when the queue is full, and grows back by one for every window's worth of answers.

    Without it a caller whose ``in_flight`` is above the broker's queue limit would have the same requests refused over
    and over.
    """

    def __init__(self, limit: int) -> None:
        self.allowed = limit
        self.open_at_us = 0  # nothing is sent before
        self._limit = limit
        self._answered = 0

    def refused(self, accepted: int, now_us: int, pause_us: int) -> None:
        """The queue was full while ``accepted`` requests were in it or running; send again after ``pause_us``."""
        self.allowed = max(min(self.allowed, accepted), 1)
        self.open_at_us = max(self.open_at_us, now_us + pause_us)
        self._answered = 0

    def answered(self, count: int) -> None:
        """``count`` requests were answered."""
        if self.allowed < self._limit:
            self._answered += count
            while self._answered >= self.allowed < self._limit:
                self._answered -= self.allowed
                self.allowed += 1
