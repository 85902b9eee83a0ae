from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool import messages
from mxpool.clock import now_us
from mxpool.errors import MalformedMessage, RunFailed
from mxpool.messages import Done, Run
from mxpool.shm.link import Link, LinkClosed
from mxpool.spec import ModelSpec
from mxpool.workers.backends.protocol import Loaded, Prepared, Ran
from mxpool.workers.loop import Bound, serve

BOUND = Bound(slots=2, sizes=(1, 4))
EPOCH = 77
HOUR_US = 3_600_000_000


class ScriptedBackend:
    """Notes every call; ``outcome`` decides how each batch ends, ``due_us`` when ``finish`` is due."""

    def __init__(self, in_flight: int = 1, outcome: Callable[[int], Ran] | None = None) -> None:
        self.in_flight = in_flight
        self.calls: list[tuple[Any, ...]] = []
        self.due_us: Callable[[], int] = lambda: now_us() + HOUR_US
        self.on_start: Callable[[], None] = lambda: None
        self.on_finish: Callable[[], None] = lambda: None
        self._outcome = outcome or (lambda count: Ran(count, count + 1, messages.GRAPH_HIT))
        self._finished = 0
        self.running = 0
        self.most_running = 0

    def load(self, spec: ModelSpec) -> Loaded:
        raise NotImplementedError

    def bind(self, memory: Any, slots: Any) -> Prepared:
        raise NotImplementedError

    def start(self, slot: int, size: int) -> None:
        self.calls.append(("start", slot, size))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.on_start()

    def finish_due_us(self) -> int:
        return self.due_us()

    def finish(self) -> Ran:
        assert self.running > 0
        self.running -= 1
        self._finished += 1
        self.on_finish()
        self.calls.append(("finish",))
        return self._outcome(self._finished)

    def unload(self) -> None:
        raise NotImplementedError


@contextmanager
def pair() -> Iterator[tuple[Link, Link]]:
    ours, socket = Link.pair()
    theirs = Link(socket)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def send(link: Link, *runs: Run, stop: bool = True) -> None:
    for run in runs:
        link.send(messages.encode_run(run))
    if stop:
        link.send(messages.encode(messages.STOP))


def answers(link: Link) -> list[Done]:
    found = []
    while (packet := link.receive_nowait()) is not None:
        found.append(messages.decode_done(packet.data))
    return found


def a_run(slot: int = 0, rows: int = 3, size: int = 4, *, generation: int = 1, sequence: int = 1) -> Run:
    return Run(EPOCH, slot, generation, rows, size, sequence)


def status_word() -> memoryview:
    return memoryview(bytearray(8)).cast("Q")


def test_an_answer_carries_the_epoch_slot_and_generation_of_its_run_and_the_backends_times() -> None:
    with pair() as (broker, worker):
        send(broker, a_run(slot=1, generation=9))
        serve(worker, ScriptedBackend(outcome=lambda _: Ran(100, 250, messages.GRAPH_HIT)), BOUND, status_word())
        assert answers(broker) == [Done(EPOCH, 1, 9, messages.GRAPH_HIT, 100, 250, None)]


def test_the_sequence_is_in_the_status_word_when_the_batch_starts() -> None:
    word = status_word()
    backend = ScriptedBackend()
    seen: list[int] = []
    backend.on_start = lambda: seen.append(struct.unpack("<Q", word.tobytes())[0])
    with pair() as (broker, worker):
        send(broker, a_run(sequence=5), a_run(sequence=2**63 + 1))
        serve(worker, backend, BOUND, word)
    assert seen == [5, 2**63 + 1]


def test_a_backend_with_one_in_flight_finishes_a_batch_before_the_next_starts() -> None:
    backend = ScriptedBackend(in_flight=1)
    with pair() as (broker, worker):
        send(broker, a_run(0), a_run(1))
        serve(worker, backend, BOUND, status_word())
    assert backend.calls == [("start", 0, 4), ("finish",), ("start", 1, 4), ("finish",)]


def test_a_backend_with_two_in_flight_starts_the_second_while_the_first_runs() -> None:
    backend = ScriptedBackend(in_flight=2)
    with pair() as (broker, worker):
        send(broker, a_run(0), a_run(1), a_run(0))
        serve(worker, backend, BOUND, status_word())
    assert backend.calls[:3] == [("start", 0, 4), ("start", 1, 4), ("finish",)]
    assert backend.most_running == 2


def test_a_batch_that_is_due_is_answered_while_no_other_has_come() -> None:
    backend = ScriptedBackend(in_flight=2)
    with pair() as (broker, worker):
        waits = iter([100, 100, 0])

        def due_us() -> int:
            wait_us = next(waits)
            if not wait_us:
                send(broker)  # the STOP comes only now: the answer cannot be owed to it
            return now_us() + wait_us

        backend.due_us = due_us
        send(broker, a_run(0), stop=False)
        serve(worker, backend, BOUND, status_word())
        assert [done.slot for done in answers(broker)] == [0]
    assert next(waits, None) is None


def test_a_second_batch_is_started_while_the_first_is_not_due() -> None:
    backend = ScriptedBackend(in_flight=2)
    with pair() as (broker, worker):

        def due_us() -> int:  # asked once the first runs: the second comes only now
            send(broker, a_run(1))
            return now_us() + HOUR_US

        backend.due_us = due_us
        send(broker, a_run(0), stop=False)
        serve(worker, backend, BOUND, status_word())
        assert [done.slot for done in answers(broker)] == [0, 1]
    assert backend.calls[:3] == [("start", 0, 4), ("start", 1, 4), ("finish",)]


def test_stop_finishes_what_is_started_and_leaves_later_runs_alone() -> None:
    backend = ScriptedBackend(in_flight=2)
    with pair() as (broker, worker):
        send(broker, a_run(0))
        send(broker, a_run(1), stop=False)
        serve(worker, backend, BOUND, status_word())
        assert [done.slot for done in answers(broker)] == [0]
    assert backend.calls == [("start", 0, 4), ("finish",)]


def test_the_end_of_the_link_finishes_what_is_started_so_that_the_backend_can_unload() -> None:
    backend = ScriptedBackend(in_flight=2)
    with pair() as (broker, worker):
        send(broker, a_run(0), stop=False)
        broker.close()
        serve(worker, backend, BOUND, status_word())
    assert backend.calls == [("start", 0, 4), ("finish",)]
    assert backend.running == 0


def test_a_batch_that_the_runtime_fails_is_answered_with_the_error_and_the_next_one_runs() -> None:
    def outcome(count: int) -> Ran:
        if count == 1:
            raise RunFailed(model="m", reason="token 99 is out of range")
        return Ran(1, 2)

    with pair() as (broker, worker):
        send(broker, a_run(0), a_run(1))
        serve(worker, ScriptedBackend(outcome=outcome), BOUND, status_word())
        failed, good = answers(broker)
    assert failed.error is not None
    assert failed.error[0] == "run_failed"
    assert "token 99" in failed.error[1]
    assert failed.error[2] == {"model": "m", "reason": "token 99 is out of range"}
    assert 0 < failed.t_start_us <= failed.t_end_us
    assert good.error is None


def test_any_other_error_of_the_backend_ends_the_loop() -> None:
    def outcome(_: int) -> Ran:
        raise OSError("device lost")

    with pair() as (broker, worker):
        send(broker, a_run(0))
        with pytest.raises(OSError, match="device lost"):
            serve(worker, ScriptedBackend(outcome=outcome), BOUND, status_word())


def test_a_record_that_is_not_run_or_stop_ends_the_loop() -> None:
    with pair() as (broker, worker):
        broker.send(messages.encode(messages.HELLO))
        with pytest.raises(MalformedMessage):
            serve(worker, ScriptedBackend(), BOUND, status_word())


@pytest.mark.parametrize(
    "run", [a_run(rows=0), a_run(rows=5), a_run(slot=2), a_run(size=3), a_run(rows=0, size=0)], ids=str
)
def test_a_run_outside_of_what_is_bound_is_refused_and_never_started(run: Run) -> None:
    word = status_word()
    backend = ScriptedBackend()
    with pair() as (broker, worker):
        send(broker, run)
        serve(worker, backend, BOUND, word)
        (done,) = answers(broker)
    assert done.error is not None
    assert done.error[0] == "run_failed"
    assert backend.calls == []
    assert word[0] == 0


def test_a_broker_that_does_not_read_ends_the_loop_like_one_that_is_gone() -> None:
    class FullLink(Link):
        def send(self, data: bytes, fds: Any = ()) -> None:
            del data, fds
            raise LinkClosed("full")

    ours, socket = Link.pair()
    worker = FullLink(socket)
    backend = ScriptedBackend(in_flight=2)
    send(ours, a_run(0), a_run(1), a_run(0), stop=False)
    serve(worker, backend, BOUND, status_word())
    ours.close()
    worker.close()
    assert backend.running == 0


RUNS = st.lists(
    st.builds(
        Run,
        st.just(EPOCH),
        st.integers(0, 2),
        st.integers(0, 9),
        st.integers(0, 5),
        st.sampled_from([1, 3, 4]),
        st.integers(0, 2**64 - 1),
    ),
    max_size=20,
)


@given(RUNS, st.sampled_from([1, 2]), st.randoms(use_true_random=False), st.sets(st.integers(1, 20)))
def test_every_run_gets_one_answer_in_order_and_only_whole_batches_reach_the_backend(
    runs: list[Run], in_flight: int, chance: Any, failing: set[int]
) -> None:
    def outcome(count: int) -> Ran:
        if count in failing:
            raise RunFailed(model="m", reason="failed")
        return Ran(count, count)

    backend = ScriptedBackend(in_flight, outcome)
    # Now, or never: a time in between would let the machine's pace decide what comes next.
    backend.due_us = lambda: now_us() + (HOUR_US if chance.random() < 0.5 else 0)
    good = [run for run in runs if 1 <= run.rows <= run.size and run.slot < BOUND.slots and run.size in BOUND.sizes]
    with pair() as (broker, worker):
        send(broker, *runs)
        serve(worker, backend, BOUND, status_word())
        done = answers(broker)
    assert sorted((d.slot, d.generation) for d in done) == sorted((r.slot, r.generation) for r in runs)
    assert [call[1:] for call in backend.calls if call[0] == "start"] == [(run.slot, run.size) for run in good]
    assert backend.running == 0
    assert backend.most_running <= in_flight
    ran = [d for d in done if d.error is None]
    assert [d.t_start_us for d in ran] == [count for count in range(1, len(good) + 1) if count not in failing]
