"""The roster beside a plain list of seats, the one that took work last at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mxpool.broker.batching import CLOSE_REASONS
from mxpool.broker.roster import Roster
from mxpool.broker.tickets import Batch

TIMEOUT_US = 500
NAMES = ("a", "b", "c")


@dataclass
class NaiveSeat:
    worker: str
    in_flight: int
    running: list[Batch] = field(default_factory=list)
    since_us: int = 0
    closed: bool = False

    @property
    def full(self) -> bool:
        busy = len(self.running) >= self.in_flight
        return busy or self.closed or bool(self.running and self.running[-1].close == "retry")


class RosterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.seats: list[NaiveSeat] = []
        self.now = 0
        self.slot = 0
        self.sequence = 0

    def expected(self, close: str, among: str | None) -> str | None:
        seats = [seat for seat in self.seats if among in (None, seat.worker)]
        for seat in seats:
            if not seat.running and not seat.closed:
                return seat.worker
        if close in ("idle", "retry"):
            return None
        return next((seat.worker for seat in seats if seat.running and not seat.full), None)

    @rule(worker=st.sampled_from(NAMES), in_flight=st.integers(1, 2))
    def add(self, worker: str, in_flight: int) -> None:
        if worker not in self.roster:
            self.roster.add(worker, in_flight, (1, 2))
            self.seats.append(NaiveSeat(worker, in_flight))

    @rule(close=st.sampled_from(CLOSE_REASONS), among=st.sampled_from([None, None, *NAMES]))
    def pick_and_take(self, close: str, among: str | None) -> None:
        self.slot += 1
        batch = Batch(self.slot, "lane")
        batch.close = close
        picked = self.roster.pick(batch, among)
        assert (picked.worker if picked else None) == self.expected(close, among)
        if picked is None:
            return
        self.roster.take(picked, batch, self.now)
        assert (batch.worker, batch.sequence > self.sequence) == (picked.worker, True)
        self.sequence = batch.sequence
        seat = next(seat for seat in self.seats if seat.worker == picked.worker)
        seat.since_us = seat.since_us if seat.running else self.now
        seat.running.append(batch)
        self.seats.remove(seat)
        self.seats.append(seat)

    @precondition(lambda self: any(seat.running for seat in self.seats))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from([seat for seat in self.seats if seat.running]))
        batch = data.draw(st.sampled_from(seat.running))
        others = [name for name in ("z", *NAMES) if name != seat.worker]
        for stale in (batch.generation - 1, batch.generation + 1):
            assert self.roster.finish(seat.worker, batch.slot, stale, self.now) is None
        assert all(self.roster.finish(name, batch.slot, batch.generation, self.now) is None for name in others)
        assert self.roster.finish(seat.worker, batch.slot, batch.generation, self.now) is batch
        assert self.roster.finish(seat.worker, batch.slot, batch.generation, self.now) is None
        seat.running.remove(batch)
        seat.since_us = self.now

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        self.roster.close(seat.worker)
        self.roster.close("z")
        seat.closed = True

    @rule(worker=st.sampled_from(NAMES))
    def remove(self, worker: str) -> None:
        found = self.roster.remove(worker)
        expected = next((seat for seat in self.seats if seat.worker == worker), None)
        assert (list(found.running) if found else None) == (expected.running if expected else None)
        self.seats = [seat for seat in self.seats if seat.worker != worker]

    @rule(us=st.integers(0, 400))
    def time_passes(self, us: int) -> None:
        self.now += us
        running = [seat for seat in self.seats if seat.running and not seat.closed]
        due_us = min((seat.since_us + TIMEOUT_US for seat in running), default=None)
        assert self.roster.overdue_us(TIMEOUT_US) == due_us
        late = {seat.worker for seat in running if self.now - seat.since_us >= TIMEOUT_US}
        assert set(self.roster.overdue(self.now, TIMEOUT_US)) == late
        assert self.roster.overdue(self.now, TIMEOUT_US) == []
        for seat in self.seats:
            seat.closed = seat.closed or seat.worker in late

    @invariant()
    def seats_are_those_of_the_list(self) -> None:
        roster = self.roster
        assert [seat.worker for seat in roster.seats()] == [seat.worker for seat in self.seats]
        assert len(roster) == len(self.seats)
        for among in (None, *NAMES):
            seats = [seat for seat in self.seats if among in (None, seat.worker)]
            assert roster.any_idle(among) is any(not seat.running and not seat.closed for seat in seats)
            assert roster.any_room(among) is any(not seat.full for seat in seats)
        for name in NAMES:
            assert roster.in_flight(name) == sum(len(seat.running) for seat in self.seats if seat.worker == name)


RosterMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_roster_seats_workers_as_a_plain_list_does = RosterMachine.TestCase
