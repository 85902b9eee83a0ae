"""When a worker that died is started again, and when to stop trying. Pure: the time is passed in."""

from __future__ import annotations

from collections import deque

BACKOFF_US = (100_000, 1_000_000, 2_000_000, 4_000_000)  # the first is short: one death is bad luck
DEATHS_MAX = 5
WINDOW_US = 60_000_000
SLOW_RETRY_US = 60_000_000


class Lifecycle:
    """Restarts of one worker, over all its incarnations.

    A death less than 60 s after another makes the next start later; the fifth makes the worker ``given_up``:
    its model refuses requests if no other worker is left, and one slow retry a minute goes on. A worker that cannot
    boot (bad model, missing provider) is given up at once and never started again as it is.
    """

    def __init__(self) -> None:
        self._deaths: deque[int] = deque()
        self.restarts = 0
        self.given_up = False
        self.reason = ""
        self.restart_at_us: int | None = None

    def give_up(self) -> None:
        """The next death is not bad luck: go to the slow retries at once."""
        self.given_up = True

    def died(self, now_us: int, reason: str, cannot_boot: bool = False) -> None:
        """Decide when to start again: ``restart_at_us``, or None for never."""
        while self._deaths and now_us - self._deaths[0] > WINDOW_US:
            self._deaths.popleft()
        self._deaths.append(now_us)
        self.reason = reason
        if cannot_boot:
            self.given_up, self.restart_at_us = True, None
        elif self.given_up or len(self._deaths) >= DEATHS_MAX:
            self.given_up, self.restart_at_us = True, now_us + SLOW_RETRY_US
        else:
            self.restart_at_us = now_us + BACKOFF_US[len(self._deaths) - 1]

    def started(self) -> None:
        """A new incarnation was started."""
        self.restart_at_us = None
        self.restarts += 1

    def ready(self) -> None:
        """It is bound and serves: it is no longer given up (its recent deaths still count)."""
        self.given_up = False
        self.reason = ""
