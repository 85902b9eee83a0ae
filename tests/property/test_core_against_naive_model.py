"""ModelCore driven at random, beside a model that keeps plain lists and checks everything after every step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mxpool.broker.batching import Lane
from mxpool.broker.core import Limits, ModelCore
from mxpool.broker.roster import Seat
from mxpool.broker.tickets import Batch, Ticket
from mxpool.errors import QueueFull, ShuttingDown
from mxpool.shm.slots import SlotState
from mxpool.spec import default_sizes

RUN_TIMEOUT_US = 1000
ROW_BYTES = 10
WORKERS = ["a", "b", "c"]


class Naive:
    """What must be true, in plain lists: who waits in which order, who runs, what lies in each row of each slot."""

    def __init__(self, slots: int, max_rows: int) -> None:
        self.tickets: list[Ticket] = []
        self.ends: Counter[int] = Counter()
        self.runs: Counter[int] = Counter()
        self.streams: dict[Any, list[Ticket]] = {}
        self.stream_of: dict[int, Any] = {}
        self.retrying: list[Ticket] = []
        self.flying: dict[str, list[Batch]] = {}
        self.in_flight: dict[str, int] = {}
        self.closed: set[str] = set()
        self.unreaped: dict[str, list[tuple[int, list[Ticket]]]] = {}
        self.memory: list[list[int]] = [[0] * max_rows for _ in range(slots)]
        self.dispatched: set[tuple[int, int]] = set()
        self.sequence = 0

    def waiting(self) -> list[Ticket]:
        return [ticket for stream in self.streams.values() for ticket in stream] + self.retrying

    def leave(self, ticket: Ticket) -> None:
        if ticket in self.retrying:
            self.retrying.remove(ticket)
        stream = self.streams[self.stream_of[ticket.request_id]]
        if ticket in stream:
            stream.remove(ticket)

    def end(self, ticket: Ticket) -> None:
        self.leave(ticket)
        self.ends[ticket.request_id] += 1

    def read(self, slot: int, row: int, rows: int) -> list[int]:
        return self.memory[slot][row : row + rows]


class CoreMachine(RuleBasedStateMachine):
    """Rules are what clients, workers and time may do; ``step`` is the shell's scheduling step."""

    @initialize(
        per_worker=st.booleans(),
        slots=st.integers(1, 6),
        max_rows=st.integers(1, 8),
        delay_us=st.sampled_from([0, 0, 50, 300]),
        max_queue_size=st.integers(1, 20),
        max_queue_rows=st.integers(1, 60),
        ready=st.dictionaries(st.sampled_from(WORKERS), st.integers(1, 2)),
    )
    def open(
        self,
        per_worker: bool,
        slots: int,
        max_rows: int,
        delay_us: int,
        max_queue_size: int,
        max_queue_rows: int,
        ready: dict[str, int],
    ) -> None:
        self.now = 1_000_000
        self.churn = 0
        self.max_rows = max_rows
        self.delay_us = delay_us
        self.sizes = default_sizes(max_rows)
        self.limits = Limits(
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_rows * ROW_BYTES,
            max_queue_delay_us=delay_us,
            per_worker=per_worker,
            run_timeout_us=RUN_TIMEOUT_US,
        )
        self.core = ModelCore("m", self.limits, WORKERS)
        self.core.open_slots(slots, max_rows, ROW_BYTES, self.sizes)
        self.naive = Naive(slots, max_rows)
        for worker, in_flight in ready.items():
            self.ready(worker, in_flight)

    # Clients

    @rule(
        sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6), lifetime_us=st.sampled_from([0, 0, 0, -5, 20, 400])
    )
    def submit(self, sizes: list[int], lifetime_us: int) -> None:
        for rows in sizes:
            deadline = self.now + lifetime_us if lifetime_us else 0
            number = len(self.naive.tickets) + 1
            self.submit_one(Ticket("client", number, min(rows, self.max_rows), self.now, deadline))

    def submit_one(self, ticket: Ticket) -> None:
        core = self.core
        before = (core.depth, core.queued_rows, core.slots.free_count, len(core.queued()))
        full = core.depth >= self.limits.max_queue_size or (
            core.depth > 0 and (core.queued_rows + ticket.rows) * ROW_BYTES > self.limits.max_queue_bytes
        )
        try:
            placed = core.submit(ticket, self.now)
        except ShuttingDown:
            assert core.draining
        except QueueFull as error:
            assert full
            assert error.fields["depth"] and 1 <= error.fields["retry_after_ms"] <= 1000
        else:
            assert not core.draining and not full
            stream = (id(ticket.lane), self.churn if self.limits.per_worker else 0)
            self.naive.tickets.append(ticket)
            self.naive.stream_of[ticket.request_id] = stream
            self.naive.streams.setdefault(stream, []).append(ticket)
            ticket.body = ticket.request_id
            if placed:
                self.place(ticket)
            return
        assert before == (core.depth, core.queued_rows, core.slots.free_count, len(core.queued()))

    def place(self, ticket: Ticket) -> None:
        batch = ticket.batch
        assert ticket.live and batch is not None and batch.rows <= self.max_rows
        assert ticket.body == ticket.request_id
        ticket.body = None
        end = ticket.row + ticket.rows
        assert end <= batch.rows
        self.naive.memory[batch.slot][ticket.row : end] = [ticket.request_id] * ticket.rows

    @precondition(lambda self: self.naive.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.naive.tickets[-12:]))
        live = not self.naive.ends[ticket.request_id]
        assert self.core.drop(ticket) is live
        if live:
            self.naive.end(ticket)

    # Workers

    @precondition(lambda self: len(self.naive.in_flight) + len(self.naive.unreaped) < len(WORKERS))
    @rule(data=st.data(), in_flight=st.integers(1, 2))
    def worker_ready(self, data: st.DataObject, in_flight: int) -> None:
        absent = [name for name in WORKERS if name not in self.naive.in_flight and name not in self.naive.unreaped]
        self.ready(data.draw(st.sampled_from(absent)), in_flight)

    def ready(self, worker: str, in_flight: int) -> None:
        self.core.roster.add(worker, in_flight)
        self.naive.in_flight[worker] = in_flight
        self.naive.flying[worker] = []
        self.churn += 1

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
                rows = naive.read(batch.slot, ticket.row, ticket.rows)
                assert rows == [ticket.request_id] * ticket.rows
                ticket.live = False
                naive.end(ticket)
        core.release(batch)
        assert core.complete(worker, batch.slot, batch.generation, self.now) is None

    @precondition(lambda self: self.naive.in_flight)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.naive.in_flight)))
        self.lose(worker, data.draw(st.integers(0, len(self.naive.flying[worker]))))

    def lose(self, worker: str, begun: int) -> None:
        naive = self.naive
        running = naive.flying.pop(worker)
        del naive.in_flight[worker]
        naive.closed.discard(worker)
        naive.unreaped[worker] = []
        self.churn += 1
        failed: list[Ticket] = []
        for batch in running[:begun]:
            live = [ticket for ticket in batch.tickets if ticket.live]
            naive.runs.update(ticket.request_id for ticket in batch.tickets)
            failed += [ticket for ticket in live if naive.runs[ticket.request_id] == 2]
            again = [ticket for ticket in live if naive.runs[ticket.request_id] == 1]
            naive.unreaped[worker].append((batch.slot, again))
            naive.retrying += again
        for batch in reversed(running[begun:]):
            for ticket in reversed([ticket for ticket in batch.tickets if ticket.live]):
                if batch.close == "retry":
                    naive.retrying.append(ticket)
                else:
                    naive.streams[naive.stream_of[ticket.request_id]].insert(0, ticket)
        started = running[begun - 1].sequence if begun else 0
        answered = self.core.worker_lost(worker, started)
        assert sorted(t.request_id for t in answered) == sorted(t.request_id for t in failed)
        for ticket in answered:
            assert not ticket.live
            naive.end(ticket)

    @precondition(lambda self: self.naive.in_flight)
    @rule(data=st.data())
    def worker_is_killed(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.naive.in_flight)))
        self.core.roster.close(worker)
        self.naive.closed.add(worker)

    @precondition(lambda self: self.naive.unreaped)
    @rule(data=st.data())
    def worker_is_reaped(self, data: st.DataObject) -> None:
        self.reap(data.draw(st.sampled_from(sorted(self.naive.unreaped))))

    def reap(self, worker: str) -> None:
        expected = [
            (ticket, slot) for slot, tickets in self.naive.unreaped.pop(worker) for ticket in tickets if ticket.live
        ]
        found = self.core.reaped(worker)
        assert {(t.request_id, slot) for t, slot in found} == {(t.request_id, slot) for t, slot in expected}
        for ticket, slot in found:
            rows = self.naive.read(slot, ticket.row, ticket.rows)
            assert rows == [ticket.request_id] * ticket.rows
            ticket.body = ticket.request_id

    # Time

    @rule(us=st.sampled_from([1, 10, 60, 400, RUN_TIMEOUT_US]))
    def time_passes(self, us: int) -> None:
        self.now += us

    @rule()
    def drain_starts_late(self) -> None:
        if len(self.naive.tickets) > 30:
            self.core.draining = True

    @rule()
    def step(self) -> None:
        core, naive, now = self.core, self.naive, self.now
        for ticket in core.expired(now):
            assert ticket.deadline_us <= now
            naive.end(ticket)
        for worker in core.roster.overdue(now, RUN_TIMEOUT_US):
            assert naive.flying[worker] and worker not in naive.closed
            naive.closed.add(worker)
        for ticket in core.retries(now):
            assert ticket.batch is not None and ticket.batch.tickets == [ticket] and ticket.row == 0
            self.place(ticket)
        for ticket in core.refill(now):
            self.place(ticket)
        while self.dispatch():
            pass
        self.check_nothing_is_left_to_do()

    def dispatch(self) -> bool:
        core = self.core
        for batch in core.close_due(self.now):
            assert batch.size == min(size for size in self.sizes if size >= batch.rows)
            core.publish(batch, self.now)
        before = core.depth
        idle = {name for name, batches in self.naive.flying.items() if not batches} - self.naive.closed
        assigned = core.assign(self.now)
        for batch in assigned:
            before -= batch.live
            assert batch.queue_depth == before
            self.check_assigned(batch, idle)
        return bool(assigned)

    def check_assigned(self, batch: Batch, idle: set[str]) -> None:
        naive, worker = self.naive, batch.worker
        assert worker in naive.in_flight and worker not in naive.closed
        if worker not in idle:
            assert batch.close in ("full", "delay", "drain")
            assert self.limits.per_worker or not idle
            assert naive.flying[worker][-1].close != "retry", "a retry runs alone on its worker"
        naive.flying[worker].append(batch)
        assert len(naive.flying[worker]) <= naive.in_flight[worker]
        idle.discard(worker)
        assert (batch.slot, batch.generation) not in naive.dispatched
        naive.dispatched.add((batch.slot, batch.generation))
        assert batch.sequence > naive.sequence
        naive.sequence = batch.sequence
        live = [ticket for ticket in batch.tickets if ticket.live]
        assert live and batch.live == len(live) and batch.live_rows == sum(ticket.rows for ticket in live)
        if batch.close == "retry":
            assert batch.tickets == live and len(live) == 1
            naive.retrying.remove(live[0])
            return
        for ticket in live:
            assert not naive.runs[ticket.request_id]
            stream = naive.streams[naive.stream_of[ticket.request_id]]
            assert stream.pop(0) is ticket, "an older request of the lane still waits"

    def check_nothing_is_left_to_do(self) -> None:
        core, now = self.core, self.now
        due_us = core.due_us()
        assert due_us is None or due_us > now, "the shell would spin"
        lanes: dict[str, Lane] = core._lanes
        for name, lane in lanes.items():
            seats: list[Seat] = [seat for seat in core.roster.seats() if not name or seat.worker == name]
            assert not lane.closed
            if any(seat.idle for seat in seats):
                assert not lane.ready
                assert lane.open is None or lane.open.oldest_us + self.delay_us > now
            if self.limits.per_worker and len(core.roster) and not seats:
                assert lane.empty, "requests wait for a worker that is not there"
            assert not lane.backlog or core.slots.free_count == 0
            assert not core.draining or lane.open is None
        assert not core._retries or core.slots.free_count == 0

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
        holders: list[tuple[int, SlotState]] = []
        for lane in core._lanes.values():
            assert not (set(lane.closed) & set(lane.ready))
            holders += [(batch.slot, SlotState.FILLING) for batch in (lane.open, *lane.closed) if batch is not None]
            holders += [(batch.slot, SlotState.READY) for batch in lane.ready]
            for batch in (lane.open, *lane.closed, *lane.ready):
                assert batch is None or (batch.live > 0 and batch.rows <= self.max_rows and batch.lane is lane)
        running = [batch for batches in naive.flying.values() for batch in batches]
        holders += [(batch.slot, SlotState.RUNNING) for batch in running]
        holders += [(slot, SlotState.QUARANTINED) for lost in naive.unreaped.values() for slot, _ in lost]
        states = dict(holders)
        assert len(states) == len(holders)
        assert [core.slots.state(slot) for slot in range(len(core.slots))] == [
            states.get(slot, SlotState.FREE) for slot in range(len(core.slots))
        ]
        assert core.slots.free_count == len(core.slots) - len(holders)
        assert set(core.holders()) == {slot for slot, state in holders if state is not SlotState.QUARANTINED}

    @invariant()
    def places_in_a_slot_never_overlap(self) -> None:
        for batch in self.core.holders().values():
            edges = [(ticket.row, ticket.row + ticket.rows) for ticket in batch.tickets]
            assert all(first[1] == second[0] for first, second in zip(edges, edges[1:], strict=False))
            assert edges[0][0] == 0 and edges[-1][1] == batch.rows
            assert bisect_left(self.sizes, batch.rows) < len(self.sizes)

    def teardown(self) -> None:
        """Whatever happened: with a worker that works, everything is answered and every slot is free again."""
        if not hasattr(self, "core"):
            return
        naive = self.naive
        for worker in list(naive.unreaped):
            self.reap(worker)
        for _ in range(2 * len(naive.tickets) + 10):
            if self.core.idle:
                break
            if not naive.in_flight:
                self.ready("a", 1)
            self.step()
            for worker, batches in list(naive.flying.items()):
                for batch in list(batches):
                    self.complete(worker, batch)
            for worker in list(naive.closed):
                self.lose(worker, 0)
                self.reap(worker)
            self.now += self.delay_us + 1
        assert self.core.idle, "requests wait that nothing will answer"
        assert self.core.depth == self.core.queued_rows == 0
        assert all(naive.ends[ticket.request_id] == 1 for ticket in naive.tickets)
        assert self.core.slots.free_count == len(self.core.slots)


CoreMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
test_core_does_what_the_naive_model_does = CoreMachine.TestCase
