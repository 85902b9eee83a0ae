"""What the samples of a soak say: growth of memory, trend of a percentile. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

MIB = 1 << 20
GROWTH_BYTES, GROWTH_PART = 32 * MIB, 0.05  # allocators settle; a leak of 1 KiB a request passes this in minutes
RISE_PART, RISE_US = 0.25, 200.0  # a busy machine varies by less between minutes; below 0.2 ms it is the scheduler's
SAMPLES_MIN = 8  # fewer have no trend
CONCORDANT = 0.6  # of ten samples without a trend, one series in a hundred is that much in order (Mann and Kendall)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look: since the last one ``answered`` requests and ``errors``, and run_us p99 of the batches in it."""

    at_s: float
    answered: int
    errors: int
    wrong: int
    resident_bytes: int
    device_bytes: int | None
    run_us_p99: int | None

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` has it."""
        return asdict(self)


def growth(values: Sequence[int]) -> tuple[int, bool]:
    """Bytes from the first to the last, and whether that is more than 32 MiB and more than 5 %."""
    if len(values) < 2:
        return 0, False
    grown = values[-1] - values[0]
    return grown, grown > GROWTH_BYTES and grown > GROWTH_PART * values[0]


def rise(points: Sequence[tuple[float, float]]) -> tuple[float, bool]:
    """How much a value rises from the first point to the last, as a part of its median, and whether it is rising.

    The slope is the median of those between all pairs (Theil and Sen), which single outliers do not move. Rising is
    more than 25 % and more than 200 us over the whole time, in at least eight points, where pairs that rise outnumber
    those that fall by 60 % of all.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    if not slopes:
        return 0.0, False
    order = sum((slope > 0) - (slope < 0) for slope in slopes) / len(slopes)
    change = statistics.median(slopes) * (points[-1][0] - points[0][0])
    part = change / max(statistics.median(value for _, value in points), 1.0)
    steady = len(points) >= SAMPLES_MIN and order >= CONCORDANT
    return part, steady and part > RISE_PART and change > RISE_US
