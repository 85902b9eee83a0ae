"""Single stories about ModelCore; tests/property drives it at random."""

from __future__ import annotations

from typing import Any

import pytest

from mxpool.broker.core import Limits, ModelCore
from mxpool.broker.tickets import Batch, Ticket
from mxpool.errors import QueueFull, ShuttingDown
from mxpool.shm.slots import SlotState

SIZES = (1, 2, 4)
BIG = 1 << 40


def core(slots: int = 6, workers: int = 1, in_flight: int = 1, **limits: Any) -> ModelCore:
    """A model with 4 rows of 10 bytes in a batch, and ready workers ``w0``, ``w1``, …"""
    defaults: dict[str, Any] = {
        "max_queue_size": 100,
        "max_queue_bytes": BIG,
        "max_queue_delay_us": 0,
        "per_worker": False,
        "run_timeout_us": 1000,
    }
    made = ModelCore("m", Limits(**{**defaults, **limits}))
    made.open_slots(slots, 4, 10)
    for number in range(workers):
        made.worker_ready(f"w{number}", in_flight, SIZES)
    return made


def submit(model: ModelCore, *sizes: int, now: int = 0, deadline: int = 0) -> list[Ticket]:
    tickets = [Ticket("client", number, rows, now, deadline) for number, rows in enumerate(sizes, 1)]
    for ticket in tickets:
        model.submit(ticket, now)
    return tickets


def step(model: ModelCore, now: int = 0) -> list[Batch]:
    """The shell's scheduling step; the batches that workers got."""
    model.retries(now)
    model.refill(now)
    found: list[Batch] = []
    while True:
        model.close_due(now)
        assigned = model.assign(now)
        if not assigned:
            return found
        found += assigned


def finish(model: ModelCore, batch: Batch, now: int = 0) -> None:
    assert model.complete(batch.worker, batch.slot, batch.generation, now) is batch
    for ticket in batch.tickets:
        ticket.live = False
    model.release(batch)


def rows_of(batches: list[Batch]) -> list[list[int]]:
    return [[ticket.rows for ticket in batch.tickets] for batch in batches]


def test_a_lone_request_goes_to_an_idle_worker_at_once_and_is_padded_to_the_next_size() -> None:
    model = core()
    submit(model, 3)
    (batch,) = step(model)
    assert (batch.close, batch.rows, batch.size, batch.worker, batch.queue_depth) == ("idle", 3, 4, "w0", 0)
    assert (model.depth, model.queued_rows, model.idle) == (0, 0, False)
    finish(model, batch)
    assert model.idle


def test_rows_count_not_requests() -> None:
    model = core(workers=4)
    submit(model, 3, 2, 2, 4)
    batches = step(model)
    assert rows_of(batches) == [[3], [2, 2], [4]]
    assert [batch.close for batch in batches] == ["full"] * 3


def test_while_the_only_worker_is_busy_requests_fill_one_batch() -> None:
    model = core()
    submit(model, 1)
    (first,) = step(model)
    submit(model, 1, 1, 1)
    assert step(model) == []
    finish(model, first)
    assert rows_of(step(model)) == [[1, 1, 1]]


def test_with_two_in_flight_a_busy_worker_takes_only_full_batches_unless_a_delay_is_set() -> None:
    model = core(in_flight=2)
    submit(model, 1)
    step(model)
    submit(model, 1)
    assert step(model, 10**6) == []
    assert model.due_us() == 1000, "nothing but the run timeout is due"
    submit(model, 3)
    assert [batch.close for batch in step(model)] == ["full"]

    model = core(in_flight=2, max_queue_delay_us=50)
    submit(model, 4)
    step(model)
    submit(model, 1)
    assert step(model, 49) == []
    assert model.due_us() == 50
    assert [batch.close for batch in step(model, 50)] == ["delay"]


def test_an_idle_worker_waits_the_delay_for_more_rows() -> None:
    model = core(max_queue_delay_us=50)
    submit(model, 1, now=100)
    assert step(model, 149) == []
    submit(model, 1, now=149)
    assert model.due_us() == 150
    assert rows_of(step(model, 150)) == [[1, 1]]


def test_requests_wait_in_order_for_slots_and_are_placed_when_one_is_free() -> None:
    model = core(slots=1)
    first, second, third = submit(model, 4, 3, 1)
    assert (first.batch is not None, second.batch, third.batch) == (True, None, None)
    (batch,) = step(model)
    assert model.refill(0) == []
    finish(model, batch)
    assert model.retries(0) == []
    assert model.refill(0) == [second, third]
    assert rows_of(step(model)) == [[3, 1]]


def test_a_small_request_does_not_overtake_a_big_one_that_waits_for_a_slot() -> None:
    model = core(slots=1, workers=0)
    submit(model, 3)
    big, small = submit(model, 2, 1)
    assert (big.batch, small.batch) == (None, None)


# Limits


def test_the_queue_is_full_by_requests_and_says_depth_limit_and_when_to_retry() -> None:
    model = core(workers=0, max_queue_size=2)
    submit(model, 1, 1)
    with pytest.raises(QueueFull) as caught:
        submit(model, 1)
    assert caught.value.fields == {"model": "m", "depth": 2, "limit": 2, "unit": "requests", "retry_after_ms": 1}
    assert (model.depth, model.queued_rows) == (2, 2)


def test_the_queue_is_full_by_bytes_but_one_request_always_fits() -> None:
    model = core(workers=0, max_queue_bytes=25)
    submit(model, 4)
    with pytest.raises(QueueFull) as caught:
        submit(model, 1)
    assert caught.value.fields["unit"] == "bytes"
    assert (caught.value.fields["depth"], caught.value.fields["limit"]) == (50, 25)
    assert (model.depth, model.queued_rows) == (1, 4)


@pytest.mark.parametrize(("run_us", "retry_after_ms"), [(10.0, 1), (3000.0, 6), (10**9, 1000)])
def test_the_hint_grows_with_what_waits_but_never_beyond_a_second(run_us: float, retry_after_ms: int) -> None:
    model = core(workers=0, max_queue_size=1)
    model.mean_run_us = run_us
    submit(model, 4)
    with pytest.raises(QueueFull) as caught:
        submit(model, 4)
    assert caught.value.fields["retry_after_ms"] == retry_after_ms


def test_dispatched_requests_no_longer_count() -> None:
    model = core(max_queue_size=1)
    for _ in range(2):
        submit(model, 4)
        step(model)
    with pytest.raises(QueueFull):
        submit(model, 1)


def test_draining_refuses_what_comes_and_runs_what_waits() -> None:
    model = core(max_queue_delay_us=10**6)
    submit(model, 1)
    model.draining = True
    with pytest.raises(ShuttingDown):
        submit(model, 1)
    assert model.depth == 1
    (batch,) = step(model)
    assert batch.close == "drain"
    finish(model, batch)
    assert model.idle


# Requests that end early


def test_a_slot_without_a_live_row_goes_free_unrun() -> None:
    model = core(workers=0)
    first, second = submit(model, 1, 1)
    assert model.drop(first)
    assert model.slots.free_count == 5
    assert model.drop(second)
    assert not model.drop(second)
    assert (model.slots.free_count, model.depth, model.queued_rows) == (6, 0, 0)
    model.worker_ready("w0", 1, SIZES)
    assert step(model) == []


def test_dead_rows_run_with_the_living_and_keep_their_place() -> None:
    model = core(workers=0)
    first, second = submit(model, 1, 2)
    model.drop(first)
    model.worker_ready("w0", 1, SIZES)
    (batch,) = step(model)
    assert (batch.rows, batch.live_rows, batch.live, second.row) == (3, 2, 1, 1)


def test_deadlines_pass_for_the_waiting_and_the_running_alike() -> None:
    model = core(slots=2)
    (running,) = submit(model, 4, deadline=10)
    step(model)
    (placed, queued) = submit(model, 4, 4, deadline=20)
    (late,) = submit(model, 4, deadline=30)
    assert model.due_us() == 10
    assert list(model.expired(9)) == []
    assert list(model.expired(20)) == [running, placed, queued]
    assert model.due_us() == 30
    assert (model.depth, late.live, model.slots.free_count) == (1, True, 1)


# Deaths


def test_of_two_batches_of_a_dead_worker_only_the_begun_one_is_retried_each_request_alone() -> None:
    model = core(in_flight=2)
    submit(model, 2, 2, 4)
    begun, waiting = step(model)
    lost = model.worker_lost("w0", begun.sequence, 0)
    assert [ticket.rows for ticket, slot in lost.again if slot == begun.slot] == [2, 2]
    assert (lost.returned, lost.failed) == ([waiting], [])
    assert model.slots.state(begun.slot) is SlotState.QUARANTINED
    assert model.slots.state(waiting.slot) is SlotState.READY
    assert (model.depth, model.queued_rows) == (3, 8)
    model.reaped(lost.incarnation)
    assert model.slots.state(begun.slot) is SlotState.FREE
    model.worker_ready("w0", 2, SIZES)
    batches = step(model)
    assert (batches[0], rows_of(batches)) == (waiting, [[4]])
    finish(model, waiting)
    for _ in range(2):
        (retry,) = step(model)
        assert (retry.close, retry.rows, retry.size) == ("retry", 2, 2)
        finish(model, retry)
    assert model.idle
    assert model.slots.free_count == 6


def test_a_second_death_answers_and_a_third_run_never_comes() -> None:
    model = core()
    (ticket,) = submit(model, 1)
    for attempt in range(2):
        (batch,) = step(model)
        lost = model.worker_lost("w0", batch.sequence, 0)
        model.reaped(lost.incarnation)
        assert lost.failed == ([ticket] if attempt else [])
        model.worker_ready("w0", 1, SIZES)
    assert not ticket.live
    assert step(model) == []
    assert model.idle
    assert model.slots.free_count == 6


def test_deaths_that_leave_every_slot_in_quarantine_end_with_all_requests_answered() -> None:
    model = core(slots=2, in_flight=2)
    submit(model, 4, 4)
    batches = step(model)
    lost = model.worker_lost("w0", batches[-1].sequence, 0)
    assert model.slots.free_count == 0
    assert step(model) == []
    model.reaped(lost.incarnation)
    model.worker_ready("w0", 2, SIZES)
    for _ in range(2):
        (batch,) = step(model)
        finish(model, batch)
    assert model.idle


def test_a_request_that_ends_between_death_and_retry_is_not_run_again() -> None:
    model = core()
    (ticket,) = submit(model, 1)
    (batch,) = step(model)
    lost = model.worker_lost("w0", batch.sequence, 0)
    assert model.drop(ticket)
    model.reaped(lost.incarnation)
    model.worker_ready("w0", 1, SIZES)
    assert step(model) == []
    assert (model.depth, model.queued_rows, model.queued()) == (0, 0, [])


def test_a_batch_of_dead_rows_that_a_dead_worker_had_not_begun_does_not_run() -> None:
    model = core()
    (ticket,) = submit(model, 4)
    step(model)
    model.drop(ticket)
    lost = model.worker_lost("w0", 0, 0)
    assert lost.returned == []
    assert model.slots.free_count == 6


def test_a_late_completion_of_a_batch_that_was_given_to_another_worker_is_stale() -> None:
    model = core(workers=2)
    submit(model, 4)
    (batch,) = step(model)
    worker, generation = batch.worker, batch.generation
    model.worker_lost(worker, 0, 0)
    (again,) = step(model)
    assert again is batch
    assert model.complete(worker, batch.slot, generation, 0) is None
    assert model.complete(batch.worker, batch.slot, generation, 0) is None
    finish(model, batch)


def test_an_overdue_worker_is_told_once_and_nothing_stays_due_while_it_is_being_killed() -> None:
    model = core(in_flight=2)
    submit(model, 4)
    step(model)
    assert model.due_us() == 1000
    assert model.roster.overdue(1000, 1000) == ["w0"]
    assert model.roster.overdue(2000, 1000) == []
    assert model.due_us() is None
    submit(model, 4)
    assert step(model, 2000) == []


# A queue for each worker


def test_per_worker_deals_in_turn_and_each_worker_takes_its_own() -> None:
    model = core(workers=2, per_worker=True)
    submit(model, 4, 4, 4, 4)
    assert sorted(batch.worker for batch in step(model)) == ["w0", "w1"]
    assert model.depth == 2


def test_per_worker_requests_of_a_dead_worker_go_to_the_living_retries_too() -> None:
    model = core(workers=2, per_worker=True, slots=8)
    submit(model, 4, 4, 4, 4, 1, 1)
    first = {batch.worker: batch for batch in step(model)}
    lost = model.worker_lost("w0", first["w0"].sequence, 0)
    model.reaped(lost.incarnation)
    finish(model, first["w1"])
    ran = []
    while not model.idle:
        (batch,) = step(model)
        assert batch.worker == "w1"
        ran += [ticket.rows for ticket in batch.tickets]
        finish(model, batch)
    assert sorted(ran) == [1, 1, 4, 4, 4]


def test_per_worker_requests_that_came_before_any_worker_run_on_the_first_that_is_ready() -> None:
    model = core(workers=0, per_worker=True)
    submit(model, 4, 4, 1)
    model.worker_ready("w7", 1, SIZES)
    for _ in range(3):
        (batch,) = step(model)
        finish(model, batch)
    assert model.idle
