from __future__ import annotations

import itertools

import pytest

from mxpool.shm.slots import TRANSITIONS, IllegalTransition, SlotEvent, SlotState, SlotTable

PATHS: dict[SlotState, list[SlotEvent]] = {
    SlotState.FREE: [],
    SlotState.FILLING: [SlotEvent.CLAIM],
    SlotState.READY: [SlotEvent.CLAIM, SlotEvent.PUBLISH],
    SlotState.RUNNING: [SlotEvent.CLAIM, SlotEvent.PUBLISH, SlotEvent.DISPATCH],
    SlotState.DONE: [SlotEvent.CLAIM, SlotEvent.PUBLISH, SlotEvent.DISPATCH, SlotEvent.FINISH],
    SlotState.QUARANTINED: [SlotEvent.CLAIM, SlotEvent.PUBLISH, SlotEvent.DISPATCH, SlotEvent.WORKER_LOST],
}


def table_with_a_slot_in(state: SlotState) -> SlotTable:
    table = SlotTable(3)
    for event in PATHS[state]:
        table.apply(1, event)
    assert table.state(1) is state
    return table


def everything(table: SlotTable) -> tuple[object, ...]:
    slots = range(len(table))
    return ([table.state(slot) for slot in slots], [table.generation(slot) for slot in slots], table.free_count)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, SlotEvent)))
def test_every_pair_follows_the_table_or_changes_nothing(state: SlotState, event: SlotEvent) -> None:
    table = table_with_a_slot_in(state)
    before = everything(table)
    following = TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(IllegalTransition, match=f"slot 1: {event.value} in state {state.value}"):
            table.apply(1, event)
        assert everything(table) == before
        claimed = [table.claim() for _ in range(4)]
        assert (1 in claimed) is (state is SlotState.FREE)
        return
    assert table.apply(1, event) is following
    assert table.state(1) is following
    assert [table.state(slot) for slot in (0, 2)] == [SlotState.FREE] * 2
    assert table.free_count == 2 + (following is SlotState.FREE)
    assert table.generation(1) == PATHS[state].count(SlotEvent.DISPATCH) + (event is SlotEvent.DISPATCH)


def test_every_state_leads_back_to_free() -> None:
    back = {SlotState.FREE}
    for _ in SlotState:
        back |= {state for (state, _), following in TRANSITIONS.items() if following in back}
    assert back == set(SlotState)


def test_claiming_reserves_each_slot_once_and_then_says_none() -> None:
    table = SlotTable(3)
    assert sorted(slot for slot in (table.claim() for _ in range(3)) if slot is not None) == [0, 1, 2]
    assert table.claim() is None
    assert table.free_count == 0


def test_slot_freed_last_is_claimed_first() -> None:
    table = SlotTable(4)
    for _ in range(4):
        table.claim()
    for slot in (2, 0, 3):
        table.apply(slot, SlotEvent.ABANDON)
    assert [table.claim() for _ in range(4)] == [3, 0, 2, None]


def test_a_batch_that_is_dispatched_again_has_another_generation() -> None:
    table = table_with_a_slot_in(SlotState.RUNNING)
    first = table.generation(1)
    table.apply(1, SlotEvent.RETURN)
    table.apply(1, SlotEvent.DISPATCH)
    assert table.generation(1) == first + 1


def test_generation_fits_the_u32_of_the_link_record_for_ever() -> None:
    table = SlotTable(1)
    table._generations[0] = 0xFFFFFFFF
    for event in PATHS[SlotState.RUNNING]:
        table.apply(0, event)
    assert table.generation(0) == 0
