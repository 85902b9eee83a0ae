"""Workers that are killed, crash, hang, stop or cannot start: who is harmed, and what is said of it."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from gates import Gate, kill, slot_states, wait_queued, wait_ready, wait_running, x, zombies
from pool import Pool, echo, wait_until
from wire_client import WireClient

from mxpool import wire
from mxpool.errors import ModelUnavailable, MxPoolError, WorkerDied

ANSWER_S = 30.0
POISON = 666
HANG = 13


def outcome(future: Future[Any]) -> Any:
    """The first element of the answer, or the code of the error."""
    try:
        return future.result(ANSWER_S)["y"][0, 0]
    except MxPoolError as error:
        return error.code


def restarts(pool: Pool, model: str = "echo") -> int:
    return sum(worker["restarts"] for worker in pool.model(model)["workers"])


def kill_one(pool: Pool, model: str = "echo") -> int:
    pid = pool.worker_pids(model)[0]
    kill(pid)
    return pid


def test_a_worker_killed_in_a_batch_costs_no_request_its_answer() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, pool.client() as client:
        held = client.submit("echo", x(100))
        wait_running(pool)
        batch = [client.submit("echo", x(number)) for number in range(8)]
        wait_until(lambda: slot_states(pool) == ["ready", "running"], "a full batch behind the first")
        gate.let(1)
        held.result(ANSWER_S)
        wait_running(pool)
        kill_one(pool)
        gate.let(8)
        assert [outcome(future) for future in batch] == [*range(8)]
        found = pool.model()
        assert (found["ok"], found["worker_died"], found["received"]) == (9, 0, 9)
        assert found["close"]["retry"] == 8  # each alone
        assert restarts(pool) == 1
        assert found["free_slots"] == found["slots"]
        assert zombies(pool) == []


def test_a_second_death_is_the_answer_and_the_next_request_is_served() -> None:
    with Pool({"echo": echo(crash_on=POISON)}) as pool, pool.client() as client:
        with pytest.raises(WorkerDied) as caught:
            client.infer("echo", x(POISON))
        assert caught.value.retryable
        assert "echo-cpu-0" in caught.value.message
        assert client.infer("echo", x(1))["y"][0, 0] == 1
        assert restarts(pool) == 2
        assert pool.model()["worker_died"] == 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_poisonous_request_harms_only_itself(in_flight: int) -> None:
    with Gate() as gate:
        model = echo(crash_on=POISON, gate=gate.path, in_flight=in_flight, max_batch_size=4)
        with Pool({"echo": model}) as pool, pool.client() as client:
            held = client.submit("echo", x(100))
            wait_running(pool)
            values = [0, 1, POISON, 3, 4, 5, 6, 7]  # two full batches: with in_flight 2 both are with the worker
            futures = [client.submit("echo", x(value)) for value in values]
            wait_until(lambda: len(slot_states(pool)) == 3, "three batches")
            gate.let(64)
            assert outcome(held) == 100
            expected = ["worker_died" if value == POISON else value for value in values]
            assert [outcome(future) for future in futures] == expected
            found = pool.model()
            assert (found["ok"], found["worker_died"]) == (8, 1)
            wait_ready(pool)
            assert restarts(pool) == 2  # once in company, once alone
            assert found["free_slots"] == found["slots"]


def test_a_request_that_is_tried_again_has_no_batch_started_behind_it() -> None:
    """The worker may be about to die of it, and would take the other batch along."""
    with Gate() as gate, Pool({"echo": echo(crash_on=POISON, gate=gate.path, in_flight=2)}) as pool:
        with pool.client() as client:
            poison = client.submit("echo", x(POISON))
            wait_running(pool)
            gate.let(1)
            wait_until(lambda: restarts(pool) == 1 and slot_states(pool) == ["running"], "the second attempt")
            full = client.submit("echo", {"x": np.ones((8, 4), np.float32)})
            wait_until(lambda: slot_states(pool) == ["ready", "running"], "a full batch that waits")
            gate.let(2)
            assert outcome(poison) == "worker_died"
            assert outcome(full) == 1
        assert pool.model()["close"]["retry"] == 0  # the full batch ran as it was; the other one never ended


def test_batches_that_wait_behind_the_one_that_is_lost_run_as_they_are() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, max_batch_size=2)}) as pool, pool.client() as client:
        futures = [client.submit("echo", x(0))]
        wait_running(pool)
        futures += [client.submit("echo", x(number)) for number in range(1, 6)]
        wait_until(lambda: len(slot_states(pool)) == 4, "four batches")
        kill_one(pool)
        gate.let(4)
        assert [outcome(future) for future in futures] == [*range(6)]
        found = pool.model()
        assert (found["close"]["retry"], found["batches"]) == (1, 4)


def test_a_batch_that_the_dead_worker_had_not_begun_is_not_taken_apart() -> None:
    with Pool({"echo": echo(max_batch_size=2, max_queue_delay_us=1_000_000)}) as pool, pool.client() as client:
        os.kill(pool.worker_pids()[0], signal.SIGSTOP)
        futures = [client.submit("echo", x(number)) for number in range(2)]
        wait_running(pool)
        kill_one(pool)
        assert [outcome(future) for future in futures] == [0, 1]
        found = pool.model()
        assert (found["batches"], found["close"]["full"], found["close"]["retry"]) == (1, 1, 0)
        assert restarts(pool) == 1


def test_a_worker_killed_while_idle_is_replaced_and_nobody_notices() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        for number in range(2):
            pid = kill_one(pool)
            assert client.infer("echo", x(number))["y"][0, 0] == number
            assert pool.worker_pids() != [pid]
        assert restarts(pool) == 2
        assert pool.model()["failed"] == pool.model()["worker_died"] == 0
        assert zombies(pool) == []


def test_a_batch_that_hangs_is_ended_by_run_timeout_and_its_neighbours_are_answered() -> None:
    with Gate() as gate:
        model = echo(hang_on=HANG, run_timeout_ms=400, gate=gate.path)
        with Pool({"echo": model}) as pool, pool.client() as client:
            held = client.submit("echo", x(100))
            wait_running(pool)
            futures = [client.submit("echo", x(value)) for value in (1, HANG, 3)]
            wait_queued(pool, 3)
            begin_s = time.monotonic()
            gate.let(32)
            assert outcome(held) == 100
            assert [outcome(future) for future in futures] == [1, "worker_died", 3]
            assert time.monotonic() - begin_s < 8
            assert "run_timeout_ms=400" in pool.log()
            wait_ready(pool)
            assert restarts(pool) == 2
            assert zombies(pool) == []


@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_that_was_stopped_is_ended_and_its_batch_runs_elsewhere(busy: bool) -> None:
    with Gate() as gate, Pool({"echo": echo(run_timeout_ms=500, gate=gate.path)}) as pool, pool.client() as client:
        if busy:
            future = client.submit("echo", x(1))
            wait_running(pool)
            os.kill(pool.worker_pids()[0], signal.SIGSTOP)
        else:
            os.kill(pool.worker_pids()[0], signal.SIGSTOP)
            future = client.submit("echo", x(1))
        gate.let(2)
        assert outcome(future) == 1
        assert restarts(pool) == 1
        assert zombies(pool) == []


def test_the_other_worker_takes_over_at_once() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, workers=2)}) as pool, pool.client() as client:
        future = client.submit("echo", x(1))
        wait_running(pool)
        busy = next(worker for worker in pool.model()["workers"] if worker["in_flight"])
        begin_s = time.monotonic()
        kill(busy["pid"])
        gate.let(1)
        assert outcome(future) == 1
        assert time.monotonic() - begin_s < 1.0
        assert pool.model()["last_batch"]["worker"] != busy["worker"]


def test_a_model_that_can_never_start_again_is_not_ready_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = made_models.affine(tmp_path / "model")
    models = {"bad": {"path": path, "max_batch_size": 4, "workers": {"cpu": 2}}, "echo": echo()}
    with Pool(models) as pool, pool.client() as client:
        Path(path).unlink()
        begin_s = time.monotonic()
        for pid in pool.worker_pids("bad"):
            kill(pid)
        wait_until(lambda: not pool.control("ready", "bad")["ready"], "not ready", timeout_s=2)
        wait_until(lambda: pool.model("bad")["state"] == "unavailable", "unavailable")
        assert time.monotonic() - begin_s < 4
        assert pool.control("ready")["models"] == {"bad": "unavailable", "echo": "ready"}
        assert pool.control("ready", "echo")["ready"]
        assert pool.control("live") == {"live": True}
        with pytest.raises(ModelUnavailable, match=f"{path}: No such file") as caught:
            client.infer("bad", {"x": np.zeros((1, 4), np.float32)})
        assert caught.value.retryable
        assert client.infer("echo", x(1))["y"][0, 0] == 1
        assert [worker["state"] for worker in pool.model("bad")["workers"]] == ["dead", "dead"]
        assert zombies(pool) == []


def test_requests_that_wait_for_a_model_are_answered_when_it_is_given_up(tmp_path: Path) -> None:
    path = made_models.affine(tmp_path)
    with Pool({"bad": {"path": path, "max_batch_size": 4}}) as pool, pool.client() as client:
        Path(path).unlink()
        kill_one(pool, "bad")
        wait_until(lambda: pool.model("bad")["state"] == "restarting", "a dead worker")
        future = client.submit("bad", {"x": np.zeros((1, 4), np.float32)})
        assert outcome(future) == "unavailable"


def test_a_crash_loop_backs_off_and_is_given_up_with_the_last_words_while_others_serve() -> None:
    """Also: exit code 78 without a word is believed, and a load that aborts is a death like any other."""
    models = {"loop": echo(load_exit=1), "abort": echo(abort_on_load=True), "boot": echo(load_exit=78), "echo": echo()}
    words = {"PYTHONFAULTHANDLER": "1"}  # so that one that aborts says something
    with Pool(models, ready=["echo"], environ=words) as pool, pool.client() as client:
        wait_until(lambda: pool.model("boot")["state"] == "unavailable", "the one that cannot boot")
        boot = pool.model("boot")["workers"][0]
        assert boot["restarts"] == 0
        assert pool.model("boot")["reason"].startswith("exit code 78")
        seen: dict[int, float] = {}

        def given_up() -> bool:
            found = pool.stats()["models"]
            seen.setdefault(found["loop"]["workers"][0]["restarts"], time.monotonic())
            assert client.infer("echo", x(1))["y"][0, 0] == 1
            return bool(found["loop"]["state"] == found["abort"]["state"] == "unavailable")

        wait_until(given_up, "both given up", timeout_s=40)
        assert max(seen) == 4  # five deaths
        assert seen[3] - seen[2] >= 2
        assert seen[4] - seen[3] >= 4
        assert pool.model("loop")["reason"] == "exit code 1"  # its last line told of an ordinary step
        last = pool.model("abort")["workers"][0]["stderr"][-1]
        assert pool.model("abort")["reason"] == f"killed by SIGABRT: {last}"
        for name in ("loop", "abort", "boot"):
            with pytest.raises(ModelUnavailable):
                client.infer(name, x(1))
        assert pool.model("boot")["workers"][0]["restarts"] == 0
        assert pool.model("echo")["workers"][0]["restarts"] == 0
        assert zombies(pool) == []


def test_a_load_that_takes_too_long_is_ended_by_load_timeout() -> None:
    models = {"slow": echo(load_delay_ms=60_000, load_timeout_ms=300), "echo": echo()}
    with Pool(models, ready=["echo"]) as pool, pool.client() as client:
        wait_until(lambda: restarts(pool, "slow") >= 1, "a second attempt")
        assert "load_timeout_ms=300" in pool.log()
        with WireClient(pool.endpoint) as bare:  # the library waits for what is loading
            bare.infer("slow", x(1))
            _, failure = bare.one()
        assert isinstance(failure, wire.Failure)
        assert (failure.code, failure.fields["reason"]) == ("unavailable", "loading")
        assert client.infer("echo", x(1))["y"][0, 0] == 1


def test_loading_is_not_running_and_a_call_that_comes_meanwhile_waits_for_it() -> None:
    model = echo(load_delay_ms=1500, run_timeout_ms=300)
    with Pool({"slow": model}, ready=()) as pool, pool.client() as client:
        assert client.infer("slow", x(1))["y"][0, 0] == 1
        assert restarts(pool, "slow") == 0


def test_a_grandchild_that_keeps_the_pipes_open_holds_nobody_up() -> None:
    """SIGKILL of a worker whose descriptors live on elsewhere: its death is seen by its pidfd."""
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, pool.client() as client:
        future = client.submit("echo", x(1))
        wait_running(pool)
        pid = pool.worker_pids()[0]
        held = [os.open(f"/proc/{pid}/fd/2", os.O_WRONLY)]  # the write end of its stderr stays open here
        try:
            kill(pid)
            gate.let(1)
            assert outcome(future) == 1
        finally:
            for fd in held:
                os.close(fd)
