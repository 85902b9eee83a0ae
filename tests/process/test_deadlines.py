"""Deadlines, cancels, limits and clients that go: what is answered when, and what is never run."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate, slot_states, wait_queued, wait_running, x
from pool import Pool, echo, soak, wait_until
from wire_client import WireClient

from mxpool import wire
from mxpool.clock import now_us
from mxpool.errors import DeadlineExceeded, QueueFull

ANSWER_S = 20.0
ENDPOINTS = [None, "tcp://127.0.0.1:0"]


def deadline_us(endpoint: str | None, after_us: int) -> int:
    """As the wire has it: absolute where both ends read one clock, else minus the time left."""
    return now_us() + after_us if endpoint is None else -after_us


def failure_of(client: WireClient, timeout_s: float = 10.0) -> tuple[int, wire.Failure]:
    request_id, failure = client.one(timeout_s)
    assert isinstance(failure, wire.Failure), failure
    return request_id, failure


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_deadline_is_kept_while_the_only_worker_is_busy_and_the_busy_one_is_not_harmed(endpoint: str | None) -> None:
    with (
        Gate() as gate,
        Pool({"echo": echo(gate=gate.path)}, endpoint=endpoint) as pool,
        WireClient(pool.endpoint) as bare,  # it has no timer of its own that could end the request
    ):
        running = bare.infer("echo", x(1))
        wait_running(pool)
        begin_s = time.monotonic()
        late = bare.infer("echo", x(2), deadline_us(endpoint, 500_000))
        request_id, failure = failure_of(bare)
        assert 0.5 <= time.monotonic() - begin_s < 0.7
        assert (request_id, failure.code) == (late, "deadline_exceeded")
        gate.let(2)
        request_id, outputs = bare.one()
        assert request_id == running
        assert isinstance(outputs, dict)
        found = pool.model()
        assert (found["expired"], found["ok"], found["batches"], found["dead_rows"]) == (1, 1, 1, 0)


def test_a_request_that_expires_while_it_runs_is_answered_then_and_never_again() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, WireClient(pool.endpoint) as bare:
        expired = bare.infer("echo", x(1), now_us() + 200_000)
        wait_running(pool)
        request_id, failure = failure_of(bare)
        assert (request_id, failure.code) == (expired, "deadline_exceeded")
        assert slot_states(pool) == ["running"]
        gate.let(2)
        following = bare.infer("echo", x(2))
        request_id, outputs = bare.one()  # and nothing for the first
        assert request_id == following
        assert isinstance(outputs, dict)
        assert pool.model()["dead_rows"] == 1


def test_a_deadline_that_has_passed_before_it_came_is_refused_and_never_run() -> None:
    with Pool({"echo": echo()}) as pool, WireClient(pool.endpoint) as bare:
        bare.infer("echo", x(1), now_us() - 1)
        assert failure_of(bare)[1].code == "deadline_exceeded"
        found = pool.model()
        assert (found["received"], found["ok"]) == (1, 0)


def test_the_clients_own_timer_is_final_and_frees_the_request_at_the_broker() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, pool.client() as client:
        held = client.submit("echo", x(1))
        wait_running(pool)
        begin_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.infer("echo", x(2), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - begin_s < 0.4
        wait_queued(pool, 0)
        gate.let(2)
        assert held.result(ANSWER_S)["y"][0, 0] == 1
        assert pool.model()["batches"] == 1


def test_requests_that_nobody_waits_for_any_more_are_not_run() -> None:
    with Gate() as gate:
        model = echo(gate=gate.path, max_batch_size=4, slots=4)  # some lie in slots, most wait as they came
        with Pool({"echo": model}) as pool, pool.client() as client:
            held = client.submit("echo", x(0))
            wait_running(pool)
            abandoned = [client.submit("echo", x(number), timeout_s=0.3) for number in range(1, 51)]
            wait_queued(pool, 50)
            for future in abandoned:
                with pytest.raises(DeadlineExceeded):
                    future.result(1)
            wait_until(lambda: pool.model()["queue_depth"] == 0, "an empty queue", timeout_s=1)
            assert slot_states(pool) == ["running"]
            gate.let(52)
            assert held.result(ANSWER_S)["y"][0, 0] == 0
            assert client.infer("echo", x(99))["y"][0, 0] == 99
            found = pool.model()
            assert (found["batches"], found["batch_rows"], found["dead_rows"]) == (2, 2, 0)
            assert found["expired"] + found["cancelled"] == 50
            assert found["free_slots"] == found["slots"]


def test_a_cancel_frees_a_queued_request_and_a_running_one_ends_as_dead_rows() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, WireClient(pool.endpoint) as bare:
        running = bare.infer("echo", x(1))
        wait_running(pool)
        queued = bare.infer("echo", x(2))
        wait_queued(pool, 1)
        bare.cancel(queued)
        request_id, failure = failure_of(bare)
        assert (request_id, failure.code) == (queued, "cancelled")
        wait_queued(pool, 0)
        bare.cancel(running)
        request_id, failure = failure_of(bare)
        assert (request_id, failure.code) == (running, "cancelled")
        bare.cancel(running)  # it has its answer: nothing comes for a second one
        bare.cancel(12345)
        gate.let(2)
        following = bare.infer("echo", x(3))
        assert bare.one()[0] == following
        found = pool.model()
        assert (found["cancelled"], found["ok"], found["batches"], found["dead_rows"]) == (2, 1, 2, 1)


def test_dead_rows_between_live_ones_run_and_are_not_answered() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, max_batch_size=4)}) as pool:
        with WireClient(pool.endpoint) as bare:
            held = bare.infer("echo", x(0))
            wait_running(pool)
            sent = [bare.infer("echo", x(number)) for number in (1, 2, 3, 4)]
            wait_until(lambda: slot_states(pool) == ["ready", "running"], "a full batch")
            for request_id in (sent[0], sent[2]):
                bare.cancel(request_id)
                assert failure_of(bare)[0] == request_id
            gate.let(2)
            answers: dict[int, Any] = {}
            while len(answers) < 3:
                for request_id, outputs in bare.receive(ANSWER_S):
                    assert request_id not in answers
                    answers[request_id] = outputs["y"][0, 0] if isinstance(outputs, dict) else outputs
            assert answers == {held: 0, sent[1]: 2, sent[3]: 4}
        found = pool.model()
        assert (found["batch_rows"], found["dead_rows"]) == (3, 2)


def test_what_a_full_queue_cannot_take_is_refused_at_once_with_a_hint() -> None:
    with Gate() as gate:
        model = echo(gate=gate.path, max_queue_size=10, max_batch_size=1)
        with Pool({"echo": model}) as pool, WireClient(pool.endpoint) as bare:
            held = bare.infer("echo", x(0))
            wait_running(pool)
            sent = [bare.infer("echo", x(number)) for number in range(100)]
            begin_s = time.monotonic()
            refused: dict[int, wire.Failure] = {}
            while len(refused) < 90:
                for request_id, failure in bare.receive(ANSWER_S):
                    assert isinstance(failure, wire.Failure)
                    refused[request_id] = failure
            assert time.monotonic() - begin_s < 0.05
            assert sorted(refused) == sent[10:]
            for failure in refused.values():
                assert failure.code == "queue_full"
                assert (failure.fields["depth"], failure.fields["limit"]) == (10, 10)
                assert 1 <= failure.fields["retry_after_ms"] <= 1000
            gate.let(11)
            answered: set[int] = set()
            while len(answered) < 11:
                answered |= {request_id for request_id, _ in bare.receive(ANSWER_S)}
            assert answered == {held, *sent[:10]}
            found = pool.model()
            assert (found["rejected"], found["ok"], found["failed"], found["queue_depth"]) == (90, 11, 0, 0)


def test_push_waits_a_full_queue_out_and_the_other_calls_raise() -> None:
    with Gate() as gate:
        model = echo(gate=gate.path, max_queue_size=4, max_batch_size=1)
        with Pool({"echo": model}) as pool, pool.client() as client:
            futures = [client.submit("echo", x(0))]
            wait_running(pool)
            futures += [client.submit("echo", x(number)) for number in range(1, 5)]
            wait_queued(pool, 4)
            with pytest.raises(QueueFull) as caught:
                client.infer("echo", x(5))
            assert caught.value.retryable
            with pytest.raises(QueueFull):
                client.submit("echo", x(6)).result(ANSWER_S)
            gate.let(1000)
            assert client.infer("echo", x(7), retries=10)["y"][0, 0] == 7
            pushed = client.push("echo", (x(number) for number in range(300)), in_flight=64)
            assert [outputs["y"][0, 0] for outputs in pushed] == [*range(300)]
            assert pool.model()["rejected"] > 2
            assert [future.result(ANSWER_S)["y"][0, 0] for future in futures] == [*range(5)]


@pytest.mark.parametrize("arenas", [True, False])
def test_the_brokers_memory_stays_flat_while_it_refuses_large_requests(arenas: bool) -> None:
    """The queue's limit in bytes: payloads beyond it are refused and their memory is not kept."""
    row_bytes = soak(100 << 20, 34 << 20)  # what glibc maps by itself, and gives back at once
    model = {
        **echo(max_batch_size=1, tensors=f"x:UINT8:{row_bytes}", slots=2),
        "max_queue_bytes": 4 * row_bytes,
        "max_queue_size": 10,
    }
    with Gate() as gate:
        model["options"]["gate"] = str(gate.path)
        limits = {"arenas": arenas, "max_message_bytes": 128 << 20}
        with Pool({"echo": model}, broker=limits) as pool, pool.client() as client:
            frame = {"x": np.ones((1, row_bytes), np.uint8)}
            futures = [client.submit("echo", frame)]
            wait_running(pool)
            before = pool.rss_bytes()
            futures += [client.submit("echo", frame) for _ in range(4)]
            wait_queued(pool, 4)
            for _ in range(8):
                with pytest.raises(QueueFull) as caught:
                    client.infer("echo", frame)
                assert caught.value.fields["unit"] == "bytes"
            # One body lies in the second slot, three are kept as they came, and one is being read.
            assert pool.rss_bytes() - before < 5.5 * row_bytes
            gate.let(5)
            assert all((future.result(60)["y"] == 1).all() for future in futures)
            assert pool.model()["rejected"] == 8
            wait_until(lambda: pool.rss_bytes() - before < 1.5 * row_bytes, "memory given back")


CLIENT = """
    import sys
    import numpy as np
    from mxpool import Client

    client = Client(sys.argv[1])
    futures = [client.submit("echo", {"x": np.full((1, 4), n, np.float32)}) for n in range(20)]
    print("sent", flush=True)
    sys.stdin.read()
"""


def test_a_killed_client_takes_its_queued_work_with_it(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(textwrap.dedent(CLIENT))
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, max_batch_size=2)}) as pool, pool.client() as client:
        held = client.submit("echo", x(0))
        wait_running(pool)
        command = [sys.executable, str(program), pool.endpoint]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            wait_queued(pool, 20)
            connected = pool.stats()["broker"]["linked_clients"]
            other.send_signal(signal.SIGKILL)
            other.wait(5)
        wait_queued(pool, 0)
        assert slot_states(pool) == ["running"]
        found = pool.stats()["broker"]
        assert found["linked_clients"] < connected
        gate.let(2)
        assert held.result(ANSWER_S)["y"][0, 0] == 0
        assert client.infer("echo", x(1))["y"][0, 0] == 1
        found = pool.model()
        assert (found["client_gone"], found["batches"], found["ok"]) == (20, 2, 2)
        assert found["free_slots"] == found["slots"]


def test_the_answer_to_a_client_that_went_while_its_batch_ran_is_dropped() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, pool.client() as client:
        with WireClient(pool.endpoint) as bare:
            bare.infer("echo", x(1))
            wait_running(pool)
        wait_until(lambda: pool.model()["client_gone"] == 1, "the end of the link")
        gate.let(2)
        assert client.infer("echo", x(2))["y"][0, 0] == 2
        assert pool.model()["dead_rows"] == 1
