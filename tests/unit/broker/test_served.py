from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from recorded_front import RecordedFront
from served_models import EPOCH, Jobs, open_slots, served

from mxpool import wire
from mxpool.broker.clients import Client, ClientBook
from mxpool.broker.served import ServedModel
from mxpool.errors import Cancelled, InvalidRequest, ModelUnavailable, QueueFull
from mxpool.messages import Done, Run

WORKER = "ranking-cpu-0"
Array = npt.NDArray[Any]


class Rig:
    """A model of one worker that the test plays: it sees jobs, writes outputs and completes them."""

    def __init__(self, **keys: Any) -> None:
        self.front, self.jobs = RecordedFront(), Jobs()
        self.seen = 0
        self.model: ServedModel = served(front=self.front, jobs=self.jobs, **keys)
        self.book = ClientBook(4, 1000)
        self.now = 1_000_000

    def ready(self, in_flight: int = 1) -> None:
        self.model.core.worker_ready(WORKER, in_flight, (1, 2, 4, 8))

    def client(self, name: bytes) -> Client:
        return self.book.by_identity.get(name) or self.book.meet(name)

    def send(self, name: bytes, number: int, rows: int = 1, deadline_us: int = 0) -> None:
        """A request whose every input value is its number."""
        tensors = wire.encode_tensors([("a", "FP32", (rows, 3)), ("b", "INT64", (rows,))])
        request = wire.Request(wire.INFER, number, "ranking", deadline_us, rows, tensors, {})
        body = np.full((rows, 3), number, "<f4").tobytes() + np.full(rows, number, "<i8").tobytes()
        self.model.admit(self.client(name), request, body, self.now)

    def step(self) -> list[Run]:
        """One pass: expire, schedule; the jobs sent since the last one (a completion hands out what is ready)."""
        self.model.tick(self.now)
        self.model.schedule(self.now)
        sent = [job for _, job in self.jobs.sent[self.seen :]]
        self.seen = len(self.jobs.sent)
        return sent

    def inputs(self, job: Run) -> list[Array]:
        assert self.model.layout is not None
        assert self.model.segment is not None
        views = self.model.layout.views(self.model.segment.map, job.slot)
        return [np.array(view[: job.size]) for view in views.inputs.values()]

    def run(self, job: Run, error: tuple[str, str, dict[str, Any]] | None = None, **changes: Any) -> None:
        """Be the worker: y = (a[0], b) for each row of the padded batch."""
        assert self.model.layout is not None
        assert self.model.segment is not None
        first, second = self.inputs(job)
        views = self.model.layout.views(self.model.segment.map, job.slot)
        views.outputs["y"][: job.size, 0], views.outputs["y"][: job.size, 1] = first[:, 0], second
        done = Done(job.epoch, job.slot, job.generation, 0, self.now, self.now + 250, error)
        self.model.completed(WORKER, done._replace(**changes), self.now)

    def codes(self) -> list[tuple[int, str]]:
        found = [answer for _, answer, _ in self.front.answers]
        return [(answer.request_id, answer.code) for answer in found if isinstance(answer, wire.Failure)]

    def results(self) -> list[tuple[bytes, list[int], list[int], list[list[float]]]]:
        found = []
        for name, answer, body in self.front.answers:
            if isinstance(answer, wire.Result):
                assert body is not None
                ((_, datatype, shape),) = wire.decode_tensors(answer.tensors)
                assert (datatype, shape) == ("FP32", (sum(answer.rows), 2))
                found.append((name, answer.ids, answer.rows, np.frombuffer(body, "<f4").reshape(shape).tolist()))
        return found

    def check_counts(self) -> None:
        waiting = sum(len(client.tickets) for client in self.book.by_identity.values())
        assert self.model.counters.received == sum(self.model.counters.outcomes.values()) + waiting


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    open_slots(made.model)
    made.ready()
    yield made
    made.check_counts()
    made.model.close()


def busy(rig: Rig) -> Run:
    """Give the worker a batch of its own, so that what comes next is merged."""
    rig.send(b"first", 100, 8)
    (job,) = rig.step()
    return job


def test_a_request_runs_padded_with_zeros_and_its_rows_come_back(rig: Rig) -> None:
    rig.send(b"a", 5, 3)
    (job,) = rig.step()
    assert (job.epoch, job.rows, job.size, job.generation) == (EPOCH, 3, 4, 1)
    first, second = rig.inputs(job)
    assert second.tolist() == [5, 5, 5, 0]
    assert first[:, 0].tolist() == [5, 5, 5, 0]
    rig.run(job)
    assert rig.results() == [(b"a", [5], [3], [[5, 5]] * 3)]
    assert (rig.client(b"a").tickets, rig.model.core.idle) == ({}, True)


def test_neighbours_of_one_client_come_back_in_one_message_and_clients_are_never_mixed(rig: Rig) -> None:
    first = busy(rig)
    for name, number, rows in ((b"a", 1, 1), (b"a", 2, 2), (b"b", 3, 1), (b"a", 4, 1), (b"b", 5, 1)):
        rig.send(name, number, rows)
    rig.run(first)
    rig.front.answers.clear()
    (job,) = rig.step()
    rig.run(job)
    assert rig.results() == [
        (b"a", [1, 2], [1, 2], [[1, 1], [2, 2], [2, 2]]),
        (b"b", [3], [1], [[3, 3]]),
        (b"a", [4], [1], [[4, 4]]),
        (b"b", [5], [1], [[5, 5]]),
    ]


def test_a_dead_row_between_two_requests_parts_their_answers(rig: Rig) -> None:
    first = busy(rig)
    for number in (1, 2, 3):
        rig.send(b"a", number)
    rig.model.cancel(rig.client(b"a").tickets[2], Cancelled(), "cancelled")
    rig.run(first)
    rig.front.answers.clear()
    (job,) = rig.step()
    rig.run(job)
    assert [(ids, rows) for _, ids, _, rows in rig.results()] == [([1], [[1, 1]]), ([3], [[3, 3]])]
    assert rig.model.counters.dead_rows == 1


def test_the_last_row_is_repeated_where_the_config_says_so() -> None:
    rig = Rig(pad="repeat")
    open_slots(rig.model)
    rig.ready()
    rig.send(b"a", 7, 3)
    (job,) = rig.step()
    assert rig.inputs(job)[1].tolist() == [7, 7, 7, 7]
    rig.model.close()


def test_an_error_of_the_batch_is_every_live_requests_answer(rig: Rig) -> None:
    first = busy(rig)
    for number in (1, 2, 3):
        rig.send(b"a", number)
    rig.run(first)
    (job,) = rig.step()
    rig.model.cancel(rig.client(b"a").tickets[2], None, "client_gone")
    rig.run(job, error=("run_failed", "the batch failed", {"reason": "odd"}))
    assert rig.codes() == [(1, "run_failed"), (3, "run_failed")]
    assert (rig.model.counters.outcomes["failed"], rig.client(b"a").tickets, rig.model.core.idle) == (2, {}, True)


@pytest.mark.parametrize("change", [{"epoch": EPOCH + 1}, {"generation": 0}, {"generation": 2}, {"slot": 3}])
def test_a_completion_of_another_time_is_counted_and_dropped(rig: Rig, change: dict[str, Any]) -> None:
    rig.send(b"a", 1)
    (job,) = rig.step()
    rig.run(job, **change)
    assert (rig.front.answers, rig.model.counters.stale_completions) == ([], 1)
    rig.run(job)
    assert len(rig.results()) == 1


def test_a_deadline_is_answered_while_the_batch_runs_and_its_rows_are_never_answered(rig: Rig) -> None:
    rig.send(b"a", 1, deadline_us=rig.now + 500)
    rig.send(b"a", 2, deadline_us=-500)
    rig.send(b"a", 3)
    (job,) = rig.step()
    rig.now += 500
    rig.step()
    assert rig.codes() == [(1, "deadline_exceeded"), (2, "deadline_exceeded")]
    rig.run(job)
    assert [ids for _, ids, _, _ in rig.results()] == [[3]]
    assert rig.model.counters.outcomes["expired"] == 2


def test_a_hung_worker_is_killed_once(rig: Rig) -> None:
    rig.send(b"a", 1)
    rig.step()
    rig.now += rig.model.config.run_timeout_ms * 1000
    rig.step()
    rig.step()
    assert [worker for worker, _ in rig.jobs.killed] == [WORKER]
    assert "run_timeout_ms=30000" in rig.jobs.killed[0][1]


def test_requests_of_a_dead_worker_are_retried_alone_with_the_same_bytes_and_fail_the_second_time(rig: Rig) -> None:
    first = busy(rig)
    rig.send(b"a", 1, 2)
    rig.send(b"a", 2, 1)
    rig.run(first)
    (job,) = rig.step()
    rig.model.lost(WORKER, job.sequence, rig.now)
    assert rig.codes() == []
    rig.ready()
    (retry,) = rig.step()
    assert (retry.rows, rig.inputs(retry)[1].tolist()) == (2, [1, 1])
    rig.model.lost(WORKER, retry.sequence, rig.now)
    assert rig.codes() == [(1, "worker_died")]
    rig.ready()
    (other,) = rig.step()
    rig.run(other)
    assert rig.results()[-1] == (b"a", [2], [1], [[2, 2]])
    assert (rig.model.counters.outcomes["worker_died"], rig.model.counters.close["retry"]) == (1, 1)
    assert rig.model.core.slots.free_count == 4


def test_a_batch_that_the_dead_worker_had_not_begun_runs_as_it_is(rig: Rig) -> None:
    rig.send(b"a", 1)
    (job,) = rig.step()
    rig.model.lost(WORKER, 0, rig.now)
    rig.ready()
    (again,) = rig.step()
    assert (again.slot, again.generation, again.sequence) == (job.slot, job.generation + 1, job.sequence + 1)
    rig.run(again)
    assert len(rig.results()) == 1


def test_a_ready_batch_is_handed_out_before_the_finished_one_is_answered() -> None:
    rig = Rig()
    open_slots(rig.model, slots=4)
    rig.ready()
    first = busy(rig)
    rig.send(b"a", 1, 8)  # a full batch: it is ready
    sent = len(rig.jobs.sent)
    rig.run(first)
    assert len(rig.jobs.sent) == sent + 1
    rig.run(rig.step()[0])
    rig.model.close()


def test_what_has_no_slot_waits_as_it_came_and_is_placed_later() -> None:
    rig = Rig()
    open_slots(rig.model, slots=2)
    rig.ready()
    first = busy(rig)
    for number in (1, 2, 3):
        rig.send(b"a", number, 8)
    tickets = dict(rig.client(b"a").tickets)
    rig.run(first)
    for number in (1, 2, 3):
        (job,) = rig.step()
        assert rig.inputs(job)[1].tolist() == [number] * 8
        assert tickets[number].body is None
        rig.run(job)
    assert [ids for _, ids, _, _ in rig.results()] == [[100], [1], [2], [3]]
    rig.check_counts()
    rig.model.close()


def test_refusals_are_counted_and_leave_nothing(rig: Rig) -> None:
    rig.send(b"a", 1)
    with pytest.raises(InvalidRequest, match="request id 1 is in use"):
        rig.send(b"a", 1)
    rig.model.core.draining = True
    with pytest.raises(Exception, match="shutting down"):
        rig.send(b"a", 2)
    assert rig.model.counters.outcomes["rejected"] == 2
    assert list(rig.client(b"a").tickets) == [1]


def test_a_full_queue_refuses_and_the_id_may_be_used_again() -> None:
    rig = Rig(max_queue_size=1)
    open_slots(rig.model)
    rig.send(b"a", 1)
    with pytest.raises(QueueFull):
        rig.send(b"a", 2)
    rig.model.cancel(rig.client(b"a").tickets[1], Cancelled(), "cancelled")
    rig.send(b"a", 2)
    rig.check_counts()
    rig.model.close()


def test_a_model_without_slots_or_workers_says_why_and_answers_what_waited(rig: Rig) -> None:
    loading = Rig()
    with pytest.raises(ModelUnavailable, match="loading"):
        loading.send(b"a", 1)
    rig.send(b"a", 1)
    rig.send(b"a", 2)
    rig.model.refuse_all("it cannot boot")
    assert rig.codes() == [(1, "unavailable"), (2, "unavailable")]
    with pytest.raises(ModelUnavailable, match="it cannot boot"):
        rig.send(b"a", 3)
    assert rig.model.core.slots.free_count == 4


def test_the_record_of_a_batch_has_the_times_of_the_worker(rig: Rig) -> None:
    rig.send(b"a", 1, 3)
    rig.now += 40
    rig.send(b"a", 2, 2)
    (job,) = rig.step()
    rig.now += 60
    rig.run(job)
    record = rig.model.counters.last_batch
    assert record is not None
    assert (record.worker, record.slot_count, record.batch_samples, record.padded_batch) == (WORKER, 2, 5, 8)
    assert (record.oldest_queue_us, record.avg_queue_us, record.run_us) == (100, 80, 250)
    assert (record.graph, record.close, record.queue_depth) == ("off", "idle", 0)
    assert rig.model.counters.padding_rows == 3


def test_states_follow_the_life_of_the_model() -> None:
    rig = Rig()
    states = [rig.model.state]
    open_slots(rig.model)
    rig.ready()
    states.append(rig.model.state)
    rig.model.lost(WORKER, 0, 0)
    states.append(rig.model.state)
    rig.model.close()
    assert states == ["loading", "ready", "restarting"]
