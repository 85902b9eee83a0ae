"""The one clock of all processes: CLOCK_MONOTONIC in whole microseconds."""

import time


def now_us() -> int:
    """Microseconds of CLOCK_MONOTONIC: the same in every process of one boot."""
    return time.monotonic_ns() // 1000
