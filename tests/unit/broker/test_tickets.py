from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mxpool.broker.tickets import REBUILD_MIN, Batch, Deadlines, Ticket


def ticket(rows: int = 1, deadline_us: int = 0, arrival_us: int = 0) -> Ticket:
    return Ticket("client", 1, rows, arrival_us, deadline_us)


@given(sizes=st.lists(st.integers(1, 9), min_size=1))
def test_a_batch_gives_each_request_the_rows_after_the_last(sizes: list[int]) -> None:
    batch = Batch(3, "lane")
    tickets = [ticket(rows, arrival_us=100 + number) for number, rows in enumerate(sizes)]
    for added in tickets:
        batch.add(added)
    assert [found.row for found in tickets] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert (batch.rows, batch.live_rows, batch.live) == (sum(sizes), sum(sizes), len(sizes))
    assert batch.oldest_us == 100
    assert all(found.batch is batch for found in tickets)


@given(
    deadlines=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=40),
    times=st.lists(st.integers(0, 60), max_size=6).map(sorted),
)
def test_live_tickets_expire_in_order_of_their_deadlines_once(
    deadlines: list[tuple[int, bool]], times: list[int]
) -> None:
    watched = Deadlines()
    tickets = []
    for deadline_us, live in deadlines:
        added = ticket(deadline_us=deadline_us)
        watched.add(added)
        added.live = live
        tickets.append(added)
    left = [added for added in tickets if added.live]
    for now in times:
        expected = sorted((added for added in left if added.deadline_us <= now), key=lambda added: added.deadline_us)
        assert watched.next_us() == min((added.deadline_us for added in left), default=None)
        assert list(watched.pop_due(now)) == expected
        left = [added for added in left if added.deadline_us > now]


def test_tickets_answered_while_others_expire_are_passed_over() -> None:
    watched = Deadlines()
    first, second, third = (ticket(deadline_us=number) for number in (1, 2, 3))
    for added in (first, second, third):
        watched.add(added)
    expired = watched.pop_due(10)
    assert next(expired) is first
    second.live = False
    assert list(expired) == [third]


def test_answered_tickets_do_not_stay_in_memory() -> None:
    watched = Deadlines()
    waiting = [ticket(deadline_us=10**9 + number) for number in range(10)]
    for added in waiting:
        watched.add(added)
    for number in range(20 * REBUILD_MIN):
        answered = ticket(deadline_us=number + 1)
        watched.add(answered)
        answered.live = False
        assert len(watched) <= REBUILD_MIN
    assert list(watched.pop_due(2 * 10**9)) == waiting


def test_many_live_tickets_are_not_sorted_again_at_every_arrival() -> None:
    watched = Deadlines()
    for number in range(4 * REBUILD_MIN):
        watched.add(ticket(deadline_us=number + 1))
    assert watched._rebuild_at > len(watched)
    assert len(watched) == 4 * REBUILD_MIN
