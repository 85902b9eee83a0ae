"""Histograms against sorted lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mxpool.histogram import Histogram, between, bucket, percentile, upper_bound

VALUES = st.integers(0, 2**40)


@given(VALUES)
def test_a_bucket_holds_its_values_within_a_thirty_second(value: int) -> None:
    upper = upper_bound(bucket(value))
    assert value <= upper <= value + value // 32
    assert bucket(upper) == bucket(value)
    assert bucket(upper + 1) == bucket(value) + 1


@given(st.lists(VALUES), st.lists(VALUES, min_size=1), st.sampled_from([0.0, 50.0, 99.0, 100.0]))
def test_percentiles_of_a_span_are_those_of_what_was_counted_in_it(
    earlier: list[int], later: list[int], percent: float
) -> None:
    histogram = Histogram()
    for value in earlier:
        histogram.add(value)
    before = histogram.to_wire()
    for value in later:
        histogram.add(value)
    span = between(before, histogram.to_wire())
    assert sum(count for _, count in span) == len(later)
    ordered = sorted(later)
    true = ordered[max(-(-len(ordered) * int(percent) // 100) - 1, 0)]
    found = percentile(span, percent)
    assert found is not None
    assert found == upper_bound(bucket(true))


def test_nothing_has_no_percentile() -> None:
    assert percentile(Histogram().to_wire(), 99) is None
