from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mxpool.client.window import Window


def test_it_shrinks_to_what_was_accepted_and_pauses() -> None:
    window = Window(64)
    window.refused(accepted=10, now_us=1000, pause_us=500)
    assert (window.allowed, window.open_at_us) == (10, 1500)


def test_it_grows_back_by_one_for_every_window_of_answers_up_to_the_limit() -> None:
    window = Window(5)
    window.refused(accepted=3, now_us=0, pause_us=0)
    window.answered(2)
    assert window.allowed == 3
    window.answered(1)
    assert window.allowed == 4
    window.answered(1000)
    assert window.allowed == 5


def test_a_later_refusal_never_shortens_the_pause() -> None:
    window = Window(5)
    window.refused(accepted=3, now_us=0, pause_us=900)
    window.refused(accepted=3, now_us=100, pause_us=100)
    assert window.open_at_us == 900


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(0, 400))))
def test_it_stays_between_one_and_the_limit(limit: int, events: list[tuple[bool, int]]) -> None:
    window = Window(limit)
    for refused, count in events:
        before = window.allowed
        if refused:
            window.refused(count, 0, 0)
            assert window.allowed <= before
        else:
            window.answered(count)
            assert window.allowed >= before
        assert 1 <= window.allowed <= limit
