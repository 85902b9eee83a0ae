from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.broker.lifecycle import DEATHS_MAX, SLOW_RETRY_US, WINDOW_US, Lifecycle

S = 1_000_000


def delays(life: Lifecycle, times: list[int]) -> list[int | None]:
    found = []
    for now in times:
        life.died(now, "gone")
        found.append(None if life.restart_at_us is None else life.restart_at_us - now)
        life.started()
    return found


def test_each_death_within_a_minute_makes_the_next_start_later_and_the_fifth_gives_up() -> None:
    life = Lifecycle()
    assert delays(life, [0, S, 3 * S, 6 * S]) == [100_000, S, 2 * S, 4 * S]
    assert (life.given_up, life.restarts) == (False, 4)
    assert delays(life, [12 * S]) == [SLOW_RETRY_US]
    assert (life.given_up, life.restarts, life.reason) == (True, 5, "gone")


def test_a_worker_that_was_given_up_is_retried_slowly_for_ever() -> None:
    life = Lifecycle()
    delays(life, [number * S for number in range(5)])
    later = [(100 + 61 * number) * S for number in range(8)]
    assert delays(life, later) == [SLOW_RETRY_US] * 8
    assert life.given_up


def test_a_worker_that_becomes_ready_is_no_longer_given_up_but_its_recent_deaths_count() -> None:
    life = Lifecycle()
    delays(life, [number * S for number in range(5)])
    life.ready()
    assert (life.given_up, life.reason) == (False, "")
    assert delays(life, [6 * S]) == [SLOW_RETRY_US]
    life.ready()
    assert delays(life, [6 * S + WINDOW_US + 1]) == [100_000]


def test_a_worker_that_cannot_boot_is_given_up_at_once_and_never_started_again() -> None:
    life = Lifecycle()
    life.died(5, "no such file", cannot_boot=True)
    assert (life.given_up, life.restart_at_us, life.reason) == (True, None, "no such file")


def test_give_up_sends_the_next_death_to_the_slow_retries() -> None:
    life = Lifecycle()
    life.give_up()
    assert delays(life, [7]) == [SLOW_RETRY_US]


def test_starting_clears_the_time_to_start() -> None:
    life = Lifecycle()
    life.died(0, "gone")
    assert (life.restart_at_us, life.restarts) == (100_000, 0)
    life.started()
    assert (life.restart_at_us, life.restarts) == (None, 1)


@pytest.mark.parametrize("gap_us", [WINDOW_US + 1, 10 * WINDOW_US])
def test_rare_deaths_are_each_bad_luck(gap_us: int) -> None:
    life = Lifecycle()
    assert delays(life, [number * gap_us for number in range(20)]) == [100_000] * 20
    assert not life.given_up


@given(gaps=st.lists(st.integers(0, 2 * WINDOW_US), max_size=40))
def test_a_worker_is_given_up_exactly_when_five_deaths_fall_into_one_minute(gaps: list[int]) -> None:
    life, deaths, now = Lifecycle(), list[int](), 0
    for gap in gaps:
        now += gap
        deaths.append(now)
        life.died(now, "gone")
        if sum(now - death <= WINDOW_US for death in deaths) >= DEATHS_MAX:
            assert life.given_up
            return
        assert not life.given_up
        assert life.restart_at_us is not None
        assert now < life.restart_at_us <= now + 4 * S
