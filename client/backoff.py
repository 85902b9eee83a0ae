"""How long to wait before a refused request is sent again. Pure."""

from __future__ import annotations

from mxpool.errors import MxPoolError

FIRST_US = 20_000
LONGEST_US = 1_000_000


def pause_us(error: MxPoolError, attempt: int, jitter: float) -> int:
    """Microseconds to wait after the ``attempt``-th failure (0 is the first).

    The broker's ``retry_after_ms`` where it gave one, else doubling from FIRST_US; ``jitter`` (0 to 1) adds up to half,
    so that clients refused together do not come back together. At most LONGEST_US.
    """
    hint_ms = error.fields.get("retry_after_ms")
    if isinstance(hint_ms, int | float) and hint_ms >= 0:
        base_us = min(hint_ms * 1000, LONGEST_US)
    else:
        base_us = min(FIRST_US << min(attempt, 16), LONGEST_US)
    return min(round(base_us * (1 + jitter / 2)), LONGEST_US)
