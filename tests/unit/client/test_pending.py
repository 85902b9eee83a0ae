from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mxpool.client.pending import STALE_MAX, Pending, Piece, Ticket
from mxpool.errors import BrokerLost, Cancelled, DeadlineExceeded, MxPoolError, QueueFull, RunFailed

FAILED = RunFailed(model="m", reason="why")
FULL = QueueFull(model="m", depth=1, limit=1, unit="requests", retry_after_ms=1)


def send(pending: Pending, pieces: int = 1, deadline_us: int = 100, **options: Any) -> Ticket:
    parts = [Piece(1, b"", b"") for _ in range(pieces)]
    ticket = pending.open(parts, deadline_us, deadline_us, **options)
    for part in parts:
        pending.issue(part)
    return ticket


def ids(ticket: Ticket) -> list[int]:
    return [piece.request_id for piece in ticket.pieces]


def outputs(value: float) -> dict[str, Any]:
    return {"y": np.full((1, 1), value, np.float32)}


def test_a_request_is_done_with_its_answer_and_hands_it_over_once() -> None:
    pending = Pending()
    ticket = send(pending)
    answer = outputs(1)
    pending.answer(ids(ticket)[0], answer)
    assert ticket.done
    assert ticket.take() is answer
    assert ticket.take() is None
    assert len(pending) == 0


def test_pieces_are_joined_in_order_whatever_order_they_are_answered_in() -> None:
    pending = Pending()
    ticket = send(pending, 3)
    for position in (2, 0, 1):
        assert not ticket.done
        pending.answer(ids(ticket)[position], outputs(position))
    assert ticket.take()["y"].ravel().tolist() == [0, 1, 2]


def test_one_failed_piece_fails_the_request_and_names_the_others_for_cancelling() -> None:
    pending = Pending()
    ticket = send(pending, 3)
    first, second, third = ids(ticket)
    pending.answer(first, outputs(0))
    piece, cancelled = pending.fail(second, FAILED)
    assert piece is not None
    assert cancelled == [third]
    with pytest.raises(RunFailed):
        ticket.take()


def test_the_first_outcome_stays_whatever_comes_later() -> None:
    pending = Pending()
    ticket = send(pending)
    (request_id,) = ids(ticket)
    assert pending.cancel(ticket) == [request_id]
    assert pending.answer(request_id, outputs(1)) is not None
    assert pending.fail(request_id, FAILED) == (None, [])
    assert pending.cancel(ticket) == []
    with pytest.raises(Cancelled):
        ticket.take()


def test_a_piece_comes_back_exactly_once_when_the_broker_is_done_with_it_however_late() -> None:
    pending = Pending()
    ticket = send(pending, 2)
    pieces = list(ticket.pieces)
    assert pending.expire(100) == [1, 2]
    assert pending.fail(1, Cancelled()) == (pieces[0], [])
    assert pending.answer(2, outputs(1)) is pieces[1]
    assert pending.answer(2, outputs(1)) is None


def test_deadlines_fall_due_in_order_of_time_not_of_sending() -> None:
    pending = Pending()
    tickets = {deadline: send(pending, deadline_us=deadline) for deadline in (50, 20, 80, 20, 60, 10)}
    assert pending.next_deadline_us() == 10
    assert pending.expire(9) == []
    assert sorted(pending.expire(20)) == [2, 4, 6]
    assert pending.next_deadline_us() == 50
    pending.answer(1, outputs(1))
    assert pending.next_deadline_us() == 60
    with pytest.raises(DeadlineExceeded, match=r"0\.000 s"):
        tickets[10].take()
    assert sorted(pending.expire(1000)) == [3, 5]
    assert pending.next_deadline_us() is None


def test_a_full_queue_is_no_failure_for_a_patient_request() -> None:
    pending = Pending()
    ticket = send(pending, patient=True)
    assert pending.fail(1, FULL) == (None, [])
    assert not ticket.done
    (piece,) = pending.refused
    assert len(pending) == 0
    assert (pending.refusals, pending.refusal) == (1, FULL)
    assert pending.issue(piece) == 2
    pending.answer(2, outputs(5))
    assert ticket.take()["y"] == 5


def test_a_patient_request_still_fails_by_anything_else_and_by_its_deadline() -> None:
    pending = Pending()
    failed, refused = send(pending, patient=True), send(pending, patient=True)
    pending.fail(1, FAILED)
    pending.fail(2, FULL)
    assert failed.done
    assert pending.expire(100) == []
    with pytest.raises(DeadlineExceeded):
        refused.take()


def test_all_that_are_open_are_cancelled_at_once() -> None:
    pending = Pending()
    tickets = [send(pending, 2), send(pending, deadline_us=3), send(pending)]
    pending.answer(4, outputs(1))
    assert sorted(pending.cancel_all()) == [1, 2, 3]
    assert [type(ticket.error) for ticket in tickets] == [Cancelled, Cancelled, type(None)]


def test_all_are_lost_at_once_and_each_raises_an_error_of_its_own() -> None:
    pending = Pending()
    tickets = [send(pending, 2), send(pending, deadline_us=3), send(pending, patient=True)]
    pending.fail(4, FULL)
    pending.abandon_all(BrokerLost(endpoint="e", reason="r"))
    errors = [ticket.error for ticket in tickets]
    assert [type(error) for error in errors] == [BrokerLost] * 3
    assert len({id(error) for error in errors}) == 3
    assert (len(pending), len(pending.refused)) == (0, 0)


def test_tickets_with_an_owner_are_listed_once_they_are_done() -> None:
    pending = Pending()
    send(pending)
    owned = send(pending, owner="me")
    assert pending.finished == []
    pending.answer(1, outputs(1))
    pending.answer(2, outputs(1))
    assert pending.finished == [owned]


def test_one_slow_request_does_not_keep_those_that_finished_behind_it() -> None:
    pending = Pending()
    send(pending, deadline_us=50)
    for round_ in range(20 * STALE_MAX):
        ticket = send(pending, deadline_us=100 + round_)
        pending.answer(ids(ticket)[0], outputs(1))
        early = send(pending, deadline_us=60)
        pending.answer(ids(early)[0], outputs(1))
    assert len(pending._due) + len(pending._due_early) <= STALE_MAX + 3
    assert pending.next_deadline_us() == 50


class AgainstDictionaries(RuleBasedStateMachine):
    """The naive model: what each ticket's outcome must be, decided by the first event that settles it."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = Pending()
        self.now = 0
        self.tickets: list[tuple[Ticket, list[int], int]] = []
        self.missing: dict[int, set[int]] = {}
        self.outcome: dict[int, type[MxPoolError] | str] = {}
        self.with_broker: set[int] = set()

    @rule(pieces=st.integers(1, 3), timeout=st.integers(1, 30))
    def send(self, pieces: int, timeout: int) -> None:
        ticket = send(self.pending, pieces, self.now + timeout)
        number = len(self.tickets)
        self.tickets.append((ticket, ids(ticket), self.now + timeout))
        self.missing[number] = set(ids(ticket))
        self.with_broker |= set(ids(ticket))

    def _settle(self, number: int, outcome: type[MxPoolError] | str) -> None:
        self.outcome[number] = outcome

    def _open(self, number: int) -> bool:
        return number not in self.outcome

    @precondition(lambda self: self.with_broker)
    @rule(pick=st.randoms(), good=st.booleans())
    def broker_answers(self, pick, good: bool) -> None:  # type: ignore[no-untyped-def]
        request_id = pick.choice(sorted(self.with_broker))
        self.with_broker.discard(request_id)
        number = next(n for n, (_, known, _) in enumerate(self.tickets) if request_id in known)
        was_open = self._open(number)
        if good:
            piece = self.pending.answer(request_id, outputs(request_id))
        else:
            piece, cancelled = self.pending.fail(request_id, FAILED)
            assert set(cancelled) == (self.missing[number] - {request_id} if was_open else set())
        assert piece is not None
        assert piece.request_id == request_id
        if not was_open:
            return
        self.missing[number].discard(request_id)
        if not good:
            self._settle(number, RunFailed)
        elif not self.missing[number]:
            self._settle(number, "answered")

    @rule(request_id=st.integers(10_000, 10_010))
    def broker_answers_what_was_never_asked(self, request_id: int) -> None:
        assert self.pending.answer(request_id, outputs(0)) is None

    @precondition(lambda self: self.tickets)
    @rule(pick=st.randoms())
    def caller_cancels(self, pick) -> None:  # type: ignore[no-untyped-def]
        number = pick.randrange(len(self.tickets))
        cancelled = self.pending.cancel(self.tickets[number][0])
        assert set(cancelled) == (self.missing[number] if self._open(number) else set())
        if self._open(number):
            self._settle(number, Cancelled)

    @rule(step=st.integers(1, 20))
    def time_passes(self, step: int) -> None:
        self.now += step
        due = {n for n, (_, _, deadline) in enumerate(self.tickets) if self._open(n) and deadline <= self.now}
        expected = {request_id for n in due for request_id in self.missing[n]}
        assert set(self.pending.expire(self.now)) == expected
        for number in due:
            self._settle(number, DeadlineExceeded)

    @invariant()
    def every_ticket_has_the_first_outcome_and_no_other(self) -> None:
        for number, (ticket, _, _) in enumerate(self.tickets):
            assert ticket.done == (not self._open(number))
            if ticket.done:
                assert self.outcome[number] == ("answered" if ticket.error is None else type(ticket.error))
        still = [deadline for n, (_, _, deadline) in enumerate(self.tickets) if self._open(n)]
        assert self.pending.next_deadline_us() == min(still, default=None)


TestAgainstDictionaries = AgainstDictionaries.TestCase
