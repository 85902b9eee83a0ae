"""Counts of whole numbers in buckets that grow with the number, so that any span between two looks has percentiles.

Numbers below 64 have a bucket each; above, each power of two is cut into 32, so that a bucket's upper bound is at most
1/32 above what was counted in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_EXACT = 64
_PARTS = 32


def bucket(value: int) -> int:
    """The number of the bucket that ``value`` (0 or more) belongs to."""
    if value < _EXACT:
        return value
    shift = value.bit_length() - 6
    return shift * _PARTS + (value >> shift)


def upper_bound(number: int) -> int:
    """The largest value that belongs to bucket ``number``."""
    if number < _EXACT:
        return number
    shift = number // _PARTS - 1
    return ((number - shift * _PARTS + 1) << shift) - 1


class Histogram:
    """Counts since it was made."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count ``value``, 0 or more."""
        number = bucket(value)
        self._counts[number] = self._counts.get(number, 0) + 1

    def to_wire(self) -> list[list[int]]:
        """``[upper bound, count]`` of every bucket that holds something, ascending."""
        return [[upper_bound(number), count] for number, count in sorted(self._counts.items())]


def between(before: Iterable[Sequence[int]], after: Iterable[Sequence[int]]) -> list[list[int]]:
    """What was counted between two ``to_wire`` of one histogram."""
    known = {pair[0]: pair[1] for pair in before}
    return [[upper, count - known.get(upper, 0)] for upper, count in after if count > known.get(upper, 0)]


def percentile(buckets: Sequence[Sequence[int]], percent: float) -> int | None:
    """The upper bound of the bucket that ``percent`` of 100 of the counts lie in or below; None without any."""
    total = sum(count for _, count in buckets)
    passed = 0
    for upper, count in buckets:
        passed += count
        if passed * 100 >= total * percent:
            return upper
    return None


def merged(parts: Iterable[Iterable[Sequence[int]]]) -> list[list[int]]:
    """The counts of several ``to_wire`` as those of one histogram."""
    counts: dict[int, int] = {}
    for upper, count in (pair for part in parts for pair in part):
        counts[upper] = counts.get(upper, 0) + count
    return [[upper, count] for upper, count in sorted(counts.items())]
