"""ModelCore driven at random, beside a model that keeps plain lists and checks everything after every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mxpool.broker.core import Limits, ModelCore
from mxpool.broker.tickets import Batch, Ticket
from mxpool.errors import QueueFull, ShuttingDown
from mxpool.shm.slots import SlotState
from mxpool.spec import default_sizes

RUN_TIMEOUT_US = 1000
ROW_BYTES = 10
WORKERS = ["a", "b", "c"]


class Naive:
    """What must be true, in plain lists: who waits in which order, who runs, what lies in each row of each slot.

    A *stream* holds requests that must be dispatched in its order: those that came to one lane, and moved together.
    """

    def __init__(self, slots: int, max_rows: int) -> None:
        self.tickets: list[Ticket] = []
        self.ends: Counter[int] = Counter()
        self.runs: Counter[int] = Counter()
        self.streams: dict[Any, list[Ticket]] = {}
        self.stream_of: dict[int, Any] = {}
        self.retrying: list[Ticket] = []
        self.flying: dict[str, list[Batch]] = {}
        self.in_flight: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.closed: set[str] = set()
        self.unreaped: dict[int, list[int]] = {}  # incarnation: its slots
        self.memory: list[list[int]] = [[0] * max_rows for _ in range(slots)]
        self.dispatched: set[tuple[int, int]] = set()
        self.sequence = 0

    def waiting(self) -> list[Ticket]:
        return [ticket for stream in self.streams.values() for ticket in stream] + self.retrying

    def join(self, ticket: Ticket, stream: Any, first: bool = False) -> None:
        waiting = self.streams.setdefault(stream, [])
        waiting.insert(0 if first else len(waiting), ticket)
        self.stream_of[ticket.request_id] = stream

    def end(self, ticket: Ticket) -> None:
        for waiting in (self.retrying, self.streams[self.stream_of[ticket.request_id]]):
            if ticket in waiting:
                waiting.remove(ticket)
        self.ends[ticket.request_id] += 1

    def part_what_moved(self, moves: int) -> None:
        """Requests that were dealt to another lane keep their order only among those that went the same way."""
        for stream, waiting in list(self.streams.items()):
            for ticket in [ticket for ticket in waiting if id(ticket.lane) != stream[0]]:
                waiting.remove(ticket)
                self.join(ticket, (id(ticket.lane), moves, stream))

    def check_lies_in(self, slot: int, ticket: Ticket) -> None:
        assert self.memory[slot][ticket.row : ticket.row + ticket.rows] == [ticket.request_id] * ticket.rows


class CoreMachine(RuleBasedStateMachine):
    """Rules are what clients, workers and time may do; ``step`` is the shell's scheduling step."""

    @initialize(
        per_worker=st.booleans(),
        slots=st.integers(1, 6),
        max_rows=st.integers(1, 8),
        delay_us=st.sampled_from([0, 0, 50, 300]),
        max_queue_size=st.sampled_from([1, 5, 20]),
        max_queue_rows=st.sampled_from([3, 20, 60]),
        ready=st.dictionaries(st.sampled_from(WORKERS), st.tuples(st.integers(1, 2), st.booleans())),
    )
    def open(
        self,
        per_worker: bool,
        slots: int,
        max_rows: int,
        delay_us: int,
        max_queue_size: int,
        max_queue_rows: int,
        ready: dict[str, tuple[int, bool]],
    ) -> None:
        self.now = 1_000_000
        self.moves = 0
        self.max_rows = max_rows
        self.limits = Limits(
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_rows * ROW_BYTES,
            max_queue_delay_us=delay_us,
            per_worker=per_worker,
            run_timeout_us=RUN_TIMEOUT_US,
        )
        self.core = ModelCore("m", self.limits)
        self.core.open_slots(slots, max_rows, ROW_BYTES)
        self.naive = Naive(slots, max_rows)
        for worker, (in_flight, one_size) in ready.items():
            self.ready(worker, in_flight, one_size)

    # Clients

    @rule(
        sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6), lifetime_us=st.sampled_from([0, 0, 0, -5, 20, 400])
    )
    def submit(self, sizes: list[int], lifetime_us: int) -> None:
        for rows in sizes:
            deadline = self.now + lifetime_us if lifetime_us else 0
            number = len(self.naive.tickets) + 1
            self.submit_one(Ticket("client", number, min(rows, self.max_rows), self.now, deadline))

    def counts(self) -> tuple[int, ...]:
        core = self.core
        return (core.depth, core.queued_rows, core.slots.free_count, len(core.queued()), len(core.deadlines))

    def submit_one(self, ticket: Ticket) -> None:
        core, before = self.core, self.counts()
        full = core.depth >= self.limits.max_queue_size or (
            core.depth > 0 and (core.queued_rows + ticket.rows) * ROW_BYTES > self.limits.max_queue_bytes
        )
        try:
            placed = core.submit(ticket, self.now)
        except ShuttingDown:
            assert core.draining
        except QueueFull as error:
            refusal = error.fields
            assert full
            assert refusal["depth"] > 0
            assert 1 <= refusal["retry_after_ms"] <= 1000
        else:
            assert not core.draining
            assert not full
            self.naive.tickets.append(ticket)
            self.naive.join(ticket, (id(ticket.lane), self.moves if self.limits.per_worker else 0))
            ticket.body = ticket.request_id
            if placed:
                self.place(ticket)
            return
        assert self.counts() == before

    def place(self, ticket: Ticket) -> None:
        batch, end = ticket.batch, ticket.row + ticket.rows
        assert batch is not None
        assert ticket.live
        assert end <= batch.rows <= self.max_rows
        assert ticket.body == ticket.request_id
        ticket.body = None
        self.naive.memory[batch.slot][ticket.row : end] = [ticket.request_id] * ticket.rows

    @precondition(lambda self: self.naive.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_one(data.draw(st.sampled_from(self.naive.tickets[-12:])))

    @precondition(lambda self: self.core.holders())
    @rule(data=st.data())
    def cancel_a_whole_batch(self, data: st.DataObject) -> None:
        holders = self.core.holders()
        for ticket in list(holders[data.draw(st.sampled_from(sorted(holders)))].tickets):
            self.cancel_one(ticket)

    @precondition(lambda self: self.naive.retrying)
    @rule(data=st.data())
    def cancel_a_retry(self, data: st.DataObject) -> None:
        self.cancel_one(data.draw(st.sampled_from(self.naive.retrying)))

    def cancel_one(self, ticket: Ticket) -> None:
        live = not self.naive.ends[ticket.request_id]
        assert self.core.drop(ticket) is live
        if live:
            self.naive.end(ticket)

    # Workers

    @precondition(lambda self: len(self.naive.in_flight) < len(WORKERS))
    @rule(data=st.data(), in_flight=st.integers(1, 2), one_size=st.booleans())
    def worker_ready(self, data: st.DataObject, in_flight: int, one_size: bool) -> None:
        absent = [name for name in WORKERS if name not in self.naive.in_flight]
        self.ready(data.draw(st.sampled_from(absent)), in_flight, one_size)

    def ready(self, worker: str, in_flight: int, one_size: bool) -> None:
        sizes = (self.max_rows,) if one_size else default_sizes(self.max_rows)
        self.core.worker_ready(worker, in_flight, sizes)
        self.naive.in_flight[worker], self.naive.sizes[worker] = in_flight, sizes
        self.naive.flying[worker] = []
        self.moves += 1
        self.naive.part_what_moved(self.moves)

    @precondition(lambda self: any(self.naive.flying.values()))
    @rule(data=st.data())
    def worker_completes(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, batches in self.naive.flying.items() if batches]))
        self.complete(worker, data.draw(st.sampled_from(self.naive.flying[worker])))

    def complete(self, worker: str, batch: Batch) -> None:
        core, naive = self.core, self.naive
        assert core.complete(worker, batch.slot, batch.generation + 1, self.now) is None
        assert core.complete(worker, batch.slot, batch.generation, self.now) is batch
        assert core.slots.state(batch.slot) is SlotState.DONE
        naive.flying[worker].remove(batch)
        for ticket in batch.tickets:
            naive.runs[ticket.request_id] += 1
            if ticket.live:
                naive.check_lies_in(batch.slot, ticket)
                ticket.live = False
                naive.end(ticket)
        core.release(batch)
        assert core.complete(worker, batch.slot, batch.generation, self.now) is None

    @precondition(lambda self: self.naive.in_flight)
    @rule(data=st.data())
    def worker_is_killed(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.naive.in_flight)))
        self.core.roster.close(worker)
        self.naive.closed.add(worker)

    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(WORKERS))
        if worker in self.naive.in_flight:
            self.lose(worker, data.draw(st.integers(0, len(self.naive.flying[worker]))))
        else:  # before it was ready
            lost = self.core.worker_lost(worker, 0, self.now)
            assert (lost.returned, lost.failed, lost.again) == ([], [], [])
            self.core.reaped(lost.incarnation)

    @precondition(lambda self: any(self.naive.flying.values()))
    @rule(data=st.data())
    def worker_dies_of_its_batch_and_comes_back(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, batches in self.naive.flying.items() if batches]))
        in_flight = self.naive.in_flight[worker]
        self.lose(worker, 1)
        self.reap(max(self.naive.unreaped))
        self.ready(worker, in_flight, one_size=False)
        self.step()

    def lose(self, worker: str, begun: int) -> None:
        naive = self.naive
        running = naive.flying.pop(worker)
        del naive.in_flight[worker]
        naive.closed.discard(worker)
        failed: list[int] = []
        again: list[int] = []
        for batch in running[:begun]:
            naive.runs.update(ticket.request_id for ticket in batch.tickets)
            for ticket in batch.tickets:
                if ticket.live:
                    (failed if naive.runs[ticket.request_id] == 2 else again).append(ticket.request_id)
        for batch in reversed(running[begun:]):
            for ticket in reversed([ticket for ticket in batch.tickets if ticket.live]):
                if batch.close == "retry":
                    naive.retrying.append(ticket)
                else:
                    naive.join(ticket, naive.stream_of[ticket.request_id], first=True)
        lost = self.core.worker_lost(worker, running[begun - 1].sequence if begun else 0, self.now)
        assert sorted(ticket.request_id for ticket in lost.failed) == sorted(failed)
        assert sorted(ticket.request_id for ticket, _ in lost.again) == sorted(again)
        assert {batch.slot for batch in lost.returned} == {batch.slot for batch in running[begun:] if batch.live}
        for ticket in lost.failed:
            assert not ticket.live
            naive.end(ticket)
        for ticket, slot in lost.again:
            naive.check_lies_in(slot, ticket)
            ticket.body = ticket.request_id
            naive.retrying.append(ticket)
        naive.unreaped[lost.incarnation] = [batch.slot for batch in running[:begun]]
        self.moves += 1
        naive.part_what_moved(self.moves)

    @precondition(lambda self: self.naive.unreaped)
    @rule(data=st.data())
    def worker_is_reaped(self, data: st.DataObject) -> None:
        self.reap(data.draw(st.sampled_from(sorted(self.naive.unreaped))))

    def reap(self, incarnation: int) -> None:
        self.core.reaped(incarnation)
        del self.naive.unreaped[incarnation]

    # Time

    @rule(us=st.sampled_from([1, 10, 60, 400, RUN_TIMEOUT_US]))
    def time_passes(self, us: int) -> None:
        self.now += us

    @precondition(lambda self: len(self.naive.tickets) > 30)
    @rule()
    def drain(self) -> None:
        self.core.draining = True

    @rule()
    def step(self) -> None:
        core, naive, now = self.core, self.naive, self.now
        for ticket in core.expired(now):
            assert ticket.deadline_us <= now
            naive.end(ticket)
        for worker in core.roster.overdue(now, RUN_TIMEOUT_US):
            assert naive.flying[worker]
            assert worker not in naive.closed
            naive.closed.add(worker)
        if not core.waiting:
            assert not naive.waiting()
            return
        for ticket in core.retries(now):
            assert ticket.batch is not None
            assert ticket.batch.tickets == [ticket]
            self.place(ticket)
        for ticket in core.refill(now):
            self.place(ticket)
        while self.dispatch():
            pass
        self.check_nothing_is_left_to_do()

    def dispatch(self) -> bool:
        core = self.core
        core.close_due(self.now)
        depth = core.depth
        idle = {name for name, batches in self.naive.flying.items() if not batches} - self.naive.closed
        assigned = core.assign(self.now)
        for batch in assigned:
            depth -= batch.live
            assert batch.queue_depth == depth
            self.check_assigned(batch, idle)
        return bool(assigned)

    def check_assigned(self, batch: Batch, idle: set[str]) -> None:
        naive, worker = self.naive, batch.worker
        assert worker not in naive.closed
        if worker not in idle:
            assert batch.close in ("full", "delay", "drain")
            assert self.limits.per_worker or not idle
            assert naive.flying[worker][-1].close != "retry", "a retry runs alone on its worker"
        if batch.close in ("idle", "delay"):
            assert batch.closed_us >= batch.oldest_us + self.limits.max_queue_delay_us
            assert batch.close == "idle" or self.limits.max_queue_delay_us > 0
        idle.discard(worker)
        naive.flying[worker].append(batch)
        assert len(naive.flying[worker]) <= naive.in_flight[worker]
        assert batch.size == min(size for size in naive.sizes[worker] if size >= batch.rows)
        assert (batch.slot, batch.generation) not in naive.dispatched
        naive.dispatched.add((batch.slot, batch.generation))
        assert batch.sequence > naive.sequence
        naive.sequence = batch.sequence
        live = [ticket for ticket in batch.tickets if ticket.live]
        assert (batch.live, batch.live_rows) == (len(live), sum(ticket.rows for ticket in live))
        if batch.close == "retry":
            assert batch.tickets == live
            assert len(live) == 1
            naive.retrying.remove(live[0])
            return
        for ticket in live:
            assert not naive.runs[ticket.request_id]
            waiting = naive.streams[naive.stream_of[ticket.request_id]]
            assert waiting.pop(0) is ticket, "an older request of the lane still waits"

    def check_nothing_is_left_to_do(self) -> None:
        core, now = self.core, self.now
        due_us = core.due_us()
        assert due_us is None or due_us > now, "the shell would spin"
        for name, lane in core._lanes.items():
            seats = [seat for seat in core.roster.seats() if not name or seat.worker == name]
            if any(seat.idle for seat in seats):
                assert not lane.ready
                assert lane.open is None or lane.open.oldest_us + self.limits.max_queue_delay_us > now
            assert not core.draining or lane.open is None
            assert not lane.backlog or core.slots.free_count == 0 or lane.held >= lane.held_max
        retries = [ticket for ticket in core.recovery.retries if ticket.live]
        assert not retries or core.slots.free_count == 0 or retries[0].lane.held >= retries[0].lane.held_max

    # What holds at any moment

    @invariant()
    def counts_are_those_of_the_naive_model(self) -> None:
        core, naive = self.core, self.naive
        waiting = naive.waiting()
        assert core.depth == len(waiting)
        assert core.queued_rows == sum(ticket.rows for ticket in waiting)
        assert Counter(t.request_id for t in core.queued()) == Counter(t.request_id for t in waiting)
        assert core.idle is (not waiting and not any(naive.flying.values()))
        for ticket in naive.tickets:
            assert naive.runs[ticket.request_id] <= 2
            assert naive.ends[ticket.request_id] == (0 if ticket.live else 1)

    @invariant()
    def every_slot_has_one_holder_at_most_and_its_state_says_which(self) -> None:
        core, naive = self.core, self.naive
        running = [batch for batches in naive.flying.values() for batch in batches]
        holders = [(batch.slot, SlotState.RUNNING) for batch in running]
        holders += [(slot, SlotState.QUARANTINED) for slots in naive.unreaped.values() for slot in slots]
        for lane in core._lanes.values():
            opened = [lane.open] if lane.open is not None else []
            holders += [(batch.slot, SlotState.FILLING) for batch in opened]
            holders += [(batch.slot, SlotState.READY) for batch in lane.ready]
            for batch in (*opened, *lane.ready):
                assert batch.live > 0
                assert batch.lane is lane
            part = len(core.slots) // max(len(naive.in_flight), 1)
            assert lane.held_max == (max(part, 2) if self.limits.per_worker else len(core.slots))
            assert lane.held == len(opened) + len(lane.ready) + sum(batch.lane is lane for batch in running)
        states = dict(holders)
        assert len(states) == len(holders)
        assert [core.slots.state(slot) for slot in range(len(core.slots))] == [
            states.get(slot, SlotState.FREE) for slot in range(len(core.slots))
        ]
        assert core.slots.free_count == len(core.slots) - len(holders)
        assert set(core.holders()) == {slot for slot, state in holders if state is not SlotState.QUARANTINED}

    @invariant()
    def places_in_a_slot_follow_each_other_without_overlap(self) -> None:
        for batch in self.core.holders().values():
            ends = [0]
            for ticket in batch.tickets:
                assert ticket.row == ends[-1]
                ends.append(ticket.row + ticket.rows)
            assert 0 < ends[-1] == batch.rows <= self.max_rows

    def teardown(self) -> None:
        """Whatever happened: with a worker that works, everything is answered and every slot is free again."""
        if not hasattr(self, "core"):
            return
        naive = self.naive
        for incarnation in list(naive.unreaped):
            self.reap(incarnation)
        for _ in range(2 * len(naive.tickets) + 10):
            if self.core.idle:
                break
            if not naive.in_flight:
                self.ready("a", 1, one_size=False)
            self.step()
            for worker, batches in list(naive.flying.items()):
                for batch in list(batches):
                    self.complete(worker, batch)
            for worker in list(naive.closed):
                self.lose(worker, 0)
            self.now += self.limits.max_queue_delay_us + 1
        assert self.core.idle, "requests wait that nothing will answer"
        assert self.core.depth == self.core.queued_rows == 0
        assert all(naive.ends[ticket.request_id] == 1 for ticket in naive.tickets)
        assert self.core.slots.free_count == len(self.core.slots) - sum(map(len, naive.unreaped.values()))


CoreMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
test_core_does_what_the_naive_model_does = CoreMachine.TestCase
