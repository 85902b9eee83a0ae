from __future__ import annotations

import pytest

from mxpool.broker.roster import Roster
from mxpool.broker.tickets import Batch


def batch(close: str = "full", slot: int = 0) -> Batch:
    made = Batch(slot, "lane")
    made.close = close
    return made


def taken(roster: Roster, made: Batch, now_us: int = 0) -> str:
    seat = roster.pick(made)
    assert seat is not None
    roster.take(seat, made, now_us)
    return seat.worker


def test_the_worker_that_waited_longest_takes_the_next_batch() -> None:
    roster = Roster()
    for worker in ("a", "b"):
        roster.add(worker, 1, (1,))
    first = batch(slot=1)
    assert taken(roster, first) == "a"
    assert taken(roster, batch(slot=2)) == "b"
    assert roster.pick(batch()) is None
    roster.finish("a", 1, first.generation, 5)
    assert taken(roster, batch(slot=3)) == "a"


def test_an_idle_worker_comes_before_a_busy_one_with_room() -> None:
    roster = Roster()
    roster.add("a", 2, (1,))
    taken(roster, batch(slot=1))
    roster.add("b", 2, (1,))
    assert [taken(roster, batch(slot=slot)) for slot in (2, 3, 4)] == ["b", "a", "b"]
    assert roster.pick(batch()) is None


@pytest.mark.parametrize(("close", "second"), [("full", True), ("delay", True), ("idle", False), ("retry", False)])
def test_a_busy_worker_gets_a_second_batch_only_if_more_could_not_join_it(close: str, second: bool) -> None:
    roster = Roster()
    roster.add("a", 2, (1,))
    taken(roster, batch())
    assert (roster.pick(batch(close)) is not None) is second


def test_a_retry_gets_no_company_on_its_worker() -> None:
    roster = Roster()
    roster.add("a", 2, (1,))
    taken(roster, batch("retry"))
    assert roster.pick(batch("full")) is None
    assert not roster.any_room()


def test_time_runs_from_dispatch_for_the_first_and_from_its_turn_for_the_second() -> None:
    roster = Roster()
    roster.add("a", 2, (1,))
    taken(roster, batch(slot=1), 100)
    taken(roster, batch(slot=2), 300)
    assert roster.overdue_us(1000) == 1100
    roster.finish("a", 1, 0, 900)
    assert (roster.overdue_us(1000), roster.overdue(1899, 1000)) == (1900, [])
    assert roster.overdue(1900, 1000) == ["a"]


def test_a_worker_that_comes_back_is_another_incarnation() -> None:
    roster = Roster()
    roster.add("a", 1, (1,))
    first = roster.remove("a")
    roster.add("a", 1, (2,))
    assert first is not None
    assert roster.seat("a").incarnation != first.incarnation
    assert roster.seat("a").sizes == (2,)


def test_what_is_not_there_has_nothing() -> None:
    roster = Roster()
    assert (roster.remove("x"), roster.in_flight("x"), roster.finish("x", 0, 0, 0), "x" in roster) == (
        None,
        0,
        None,
        False,
    )
    with pytest.raises(KeyError):
        roster.seat("x")
