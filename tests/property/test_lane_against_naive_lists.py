"""One lane beside the plainest batcher: lists of row counts."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mxpool.broker.batching import Lane
from mxpool.broker.tickets import Batch, Ticket
from mxpool.shm.slots import SlotEvent, SlotTable


class LaneMachine(RuleBasedStateMachine):
    """The naive lane: an open list, lists that wait for a worker, requests that wait for a slot, lists that run."""

    @initialize(slots=st.integers(1, 4), max_rows=st.integers(1, 8), delay_us=st.sampled_from([0, 100]))
    def start(self, slots: int, max_rows: int, delay_us: int) -> None:
        self.slots = SlotTable(slots)
        self.lane = Lane(self.slots, max_rows, delay_us)
        self.max_rows, self.delay_us, self.now, self.number = max_rows, delay_us, 0, 0
        self.open: list[Ticket] = []
        self.open_rows = self.open_since = 0  # of all that was placed: rows of a forgotten request stay where they are
        self.ready: list[tuple[str, list[Ticket]]] = []
        self.backlog: list[Ticket] = []
        self.running: list[Batch] = []

    def free(self) -> int:
        return len(self.slots) - bool(self.open) - len(self.ready) - len(self.running)

    def close(self, reason: str) -> None:
        if self.open:
            self.ready.append((reason, self.open))
            self.open = []

    def put(self, ticket: Ticket) -> bool:
        if self.open and self.open_rows + ticket.rows > self.max_rows:
            self.close("full")
        if not self.open and not self.free():
            return False
        if not self.open:
            self.open_rows, self.open_since = 0, ticket.arrival_us
        self.open.append(ticket)
        self.open_rows += ticket.rows
        if self.open_rows == self.max_rows:
            self.close("full")
        return True

    @rule(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5))
    def add(self, sizes: list[int]) -> None:
        for rows in sizes:
            self.number += 1
            ticket = Ticket("client", self.number, min(rows, self.max_rows), self.now, 0)
            placed = not self.backlog and self.put(ticket)
            assert self.lane.add(ticket, self.now) is placed
            if not placed:
                self.backlog.append(ticket)

    @rule()
    def refill(self) -> None:
        expected = []
        while self.backlog and self.put(self.backlog[0]):
            expected.append(self.backlog.pop(0))
        assert self.lane.refill(self.now) == expected

    @rule(us=st.integers(1, 120))
    def time_passes(self, us: int) -> None:
        self.now += us

    @rule(idle=st.booleans(), room=st.booleans())
    def close_due(self, idle: bool, room: bool) -> None:
        waited = bool(self.open) and self.now - self.open_since >= self.delay_us
        wanted = idle or (room and self.delay_us > 0)
        if not self.ready and waited and wanted:
            self.close("idle" if idle else "delay")
        due_us = self.lane.due_us(idle, room)
        self.lane.close_due(self.now, idle, room)
        assert (due_us is not None and due_us <= self.now) is (self.lane.open is None and due_us is not None)
        assert self.lane.due_us(idle, room) is None or not self.ready

    @precondition(lambda self: self.ready)
    @rule()
    def a_worker_takes_one(self) -> None:
        batch = self.lane.ready.popleft()
        batch.worker = "w"
        self.slots.apply(batch.slot, SlotEvent.DISPATCH)
        reason, tickets = self.ready.pop(0)
        assert batch.close == reason
        assert [ticket for ticket in batch.tickets if ticket.live] == tickets
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule()
    def a_worker_finishes_one(self) -> None:
        batch = self.running.pop(0)
        self.slots.apply(batch.slot, SlotEvent.FINISH)
        self.lane.give_back(batch, SlotEvent.RELEASE)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        queues = [self.open, self.backlog, *(tickets for _, tickets in self.ready)]
        waiting = [ticket for queue in queues for ticket in queue]
        flying = [ticket for batch in self.running for ticket in batch.tickets if ticket.live]
        if not waiting + flying:
            return
        ticket = data.draw(st.sampled_from(waiting + flying))
        ticket.live = False
        self.lane.forget(ticket)
        for queue in queues:
            if ticket in queue:
                queue.remove(ticket)
        self.ready = [(reason, tickets) for reason, tickets in self.ready if tickets]

    @invariant()
    def lane_holds_what_the_lists_hold(self) -> None:
        if not hasattr(self, "lane"):
            return
        lane = self.lane
        opened = [ticket for ticket in lane.open.tickets if ticket.live] if lane.open is not None else []
        assert opened == self.open
        assert [[t for t in batch.tickets if t.live] for batch in lane.ready] == [tickets for _, tickets in self.ready]
        assert list(lane.backlog) == self.backlog
        assert (lane.held, self.slots.free_count) == (len(self.slots) - self.free(), self.free())


LaneMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_lane_batches_as_plain_lists_do = LaneMachine.TestCase
