from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mxpool.shm.slots import TRANSITIONS, IllegalTransition, SlotEvent, SlotState, SlotTable

MOVES = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 4), st.sampled_from(SlotEvent))), max_size=80)


@given(count=st.integers(1, 5), moves=MOVES)
def test_any_moves_leave_the_states_and_free_list_of_a_plain_dict(count: int, moves: list[Any]) -> None:
    table = SlotTable(count)
    states = dict.fromkeys(range(count), SlotState.FREE)
    dispatches = dict.fromkeys(range(count), 0)
    for move in moves:
        free = {slot for slot, state in states.items() if state is SlotState.FREE}
        if move is None:
            claimed = table.claim()
            assert (claimed in free) if free else (claimed is None)
            if claimed is not None:
                states[claimed] = SlotState.FILLING
        else:
            slot, event = move[0] % count, move[1]
            with contextlib.suppress(IllegalTransition):
                table.apply(slot, event)
            dispatches[slot] += event is SlotEvent.DISPATCH and states[slot] is SlotState.READY
            states[slot] = TRANSITIONS.get((states[slot], event), states[slot])
        assert [table.state(slot) for slot in range(count)] == list(states.values())
        assert [table.generation(slot) for slot in range(count)] == list(dispatches.values())
        assert table.free_count == sum(state is SlotState.FREE for state in states.values())
