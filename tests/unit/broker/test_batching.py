from __future__ import annotations

from mxpool.broker.batching import Lane
from mxpool.broker.tickets import Ticket
from mxpool.shm.slots import SlotState, SlotTable


def ticket(rows: int, arrival_us: int = 0) -> Ticket:
    return Ticket("client", 1, rows, arrival_us, 0)


def test_a_slot_that_comes_free_is_not_taken_by_a_newcomer_while_others_wait_for_it() -> None:
    slots = SlotTable(1)
    lane = Lane(slots, 4, 0)
    first, waiting, newcomer = ticket(4), ticket(1), ticket(1)
    assert lane.add(first, 0)
    assert not lane.add(waiting, 0)
    lane.forget(first)
    assert slots.free_count == 1
    assert not lane.add(newcomer, 0)
    assert lane.refill(0) == [waiting, newcomer]


def test_the_open_batch_stays_open_while_another_is_ready() -> None:
    lane = Lane(SlotTable(3), 4, 0)
    lane.add(ticket(4), 0)
    lane.add(ticket(1), 0)
    lane.close_due(10, idle=True, room=True)
    assert (len(lane.ready), lane.open is not None, lane.due_us(True, True)) == (1, True, None)


def test_a_batch_that_is_exactly_full_is_closed_at_once() -> None:
    slots = SlotTable(2)
    lane = Lane(slots, 4, 10**6)
    lane.add(ticket(1, arrival_us=5), 5)
    lane.add(ticket(3), 7)
    (batch,) = lane.ready
    assert (lane.open, batch.close, batch.closed_us, batch.oldest_us) == (None, "full", 7, 5)
    assert slots.state(batch.slot) is SlotState.READY


def test_a_lane_claims_no_more_slots_than_its_part() -> None:
    slots = SlotTable(4)
    lane = Lane(slots, 1, 0)
    lane.held_max = 2
    placed = [lane.add(ticket(1), 0) for _ in range(3)]
    assert (placed, lane.held, slots.free_count) == ([True, True, False], 2, 2)
    lane.held_max = 3
    assert len(lane.refill(0)) == 1


def test_adopting_moves_the_batch_its_requests_and_the_count_of_its_slot() -> None:
    slots = SlotTable(2)
    ended, living = Lane(slots, 2, 0), Lane(slots, 2, 0)
    moved = ticket(2)
    ended.add(moved, 0)
    living.adopt(ended.ready.popleft())
    assert (ended.held, living.held, moved.lane) == (0, 1, living)
    living.forget(moved)
    assert (living.held, slots.free_count, list(living.ready)) == (0, 2, [])
