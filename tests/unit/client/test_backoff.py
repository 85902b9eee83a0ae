from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mxpool.client.backoff import FIRST_US, LONGEST_US, pause_us
from mxpool.errors import BrokerLost, MxPoolError, QueueFull

LOST = BrokerLost(endpoint="e", reason="r")


def full(retry_after_ms: object) -> QueueFull:
    return QueueFull("full", retry_after_ms=retry_after_ms)


def test_the_brokers_hint_wins_over_doubling() -> None:
    assert pause_us(full(7), 5, 0) == 7000
    assert pause_us(full(7.5), 0, 1) == 11_250


def test_without_a_usable_hint_pauses_double() -> None:
    assert [pause_us(LOST, attempt, 0) for attempt in range(3)] == [FIRST_US, 2 * FIRST_US, 4 * FIRST_US]
    assert pause_us(full("soon"), 0, 0) == pause_us(full(-1), 0, 0) == FIRST_US


@given(st.sampled_from([LOST, full(0), full(3), full(10**12)]), st.integers(0, 10**6), st.floats(0, 1))
def test_a_pause_is_never_longer_than_the_longest(error: MxPoolError, attempt: int, jitter: float) -> None:
    assert 0 <= pause_us(error, attempt, jitter) <= LONGEST_US
