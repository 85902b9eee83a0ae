"""Which bytes of an arena are in use: first fit, in units of a cache line. Pure."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64  # a cache line: neighbours in two processes never share one


class Regions:
    """Free and taken regions of ``size_bytes`` bytes.

    Invariants: taken regions never overlap; free ones are sorted, apart from each other and merged with their
    neighbours; the two together are the whole. First fit keeps a steady load at the low end, where pages are warm.
    """

    def __init__(self, size_bytes: int) -> None:
        whole = size_bytes // ALIGNMENT * ALIGNMENT
        self._starts = [0] if whole else []  # ascending; _ends[i] belongs to _starts[i]
        self._ends = [whole] if whole else []
        self._taken: dict[int, int] = {}

    @property
    def taken(self) -> dict[int, int]:
        """Offset to bytes (rounded up) of every region in use; a copy."""
        return dict(self._taken)

    def take(self, size_bytes: int) -> int | None:
        """Reserve ``size_bytes`` (1 or more) and return their offset; None, with nothing changed, if none fits."""
        size = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        for index, start in enumerate(self._starts):
            if self._ends[index] - start >= size:
                self._starts[index] = start + size
                if self._starts[index] == self._ends[index]:
                    del self._starts[index], self._ends[index]
                self._taken[start] = size
                return start
        return None

    def give(self, offset: int) -> None:
        """Free the region that ``take`` returned.

        Raises:
            KeyError: if no region at ``offset`` is taken; nothing is changed.
        """
        start, end = offset, offset + self._taken.pop(offset)
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
