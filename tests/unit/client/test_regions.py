from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mxpool.client.regions import ALIGNMENT, Regions

SIZE = 64 * ALIGNMENT


class AgainstOneByteFlags(RuleBasedStateMachine):
    """The naive model: one flag for every cache line; the first gap that is long enough is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.regions = Regions(SIZE)
        self.used = [False] * (SIZE // ALIGNMENT)
        self.taken: dict[int, int] = {}

    @rule(size=st.integers(1, SIZE // 3))
    def take(self, size: int) -> None:
        lines = -(-size // ALIGNMENT)
        gaps = (at for at in range(len(self.used) - lines + 1) if not any(self.used[at : at + lines]))
        expected = next(gaps, None)
        offset = self.regions.take(size)
        if expected is None:
            assert offset is None
            return
        assert offset == expected * ALIGNMENT
        self.used[expected : expected + lines] = [True] * lines
        self.taken[offset] = lines * ALIGNMENT

    @precondition(lambda self: self.taken)
    @rule(pick=st.randoms())
    def give(self, pick) -> None:  # type: ignore[no-untyped-def]
        offset = pick.choice(sorted(self.taken))
        self.regions.give(offset)
        lines, at = self.taken.pop(offset) // ALIGNMENT, offset // ALIGNMENT
        self.used[at : at + lines] = [False] * lines

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.regions.taken == self.taken


TestAgainstOneByteFlags = AgainstOneByteFlags.TestCase


@given(st.lists(st.integers(1, 5 * ALIGNMENT), max_size=30), st.randoms())
def test_once_all_is_given_back_the_whole_can_be_taken_again(sizes: list[int], pick) -> None:  # type: ignore[no-untyped-def]
    regions = Regions(SIZE)
    offsets = [offset for size in sizes if (offset := regions.take(size)) is not None]
    pick.shuffle(offsets)
    for offset in offsets:
        regions.give(offset)
    assert regions.take(SIZE) == 0


def test_giving_what_was_not_taken_raises_and_changes_nothing() -> None:
    regions = Regions(SIZE)
    first = regions.take(100)
    for wrong in (1, ALIGNMENT, SIZE):
        with pytest.raises(KeyError):
            regions.give(wrong)
    assert regions.taken == {first: 2 * ALIGNMENT}


def test_what_is_larger_than_the_whole_is_not_taken() -> None:
    assert Regions(SIZE).take(SIZE + 1) is None
    assert Regions(ALIGNMENT - 1).take(1) is None
