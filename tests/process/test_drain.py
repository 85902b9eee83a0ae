"""The end of a broker or a model on request: what was accepted is answered, what comes later is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from gates import Gate, slot_states, wait_queued, wait_running, x
from pool import Pool, echo, soak, wait_until
from wire_client import WireClient

from mxpool import wire
from mxpool.errors import MxPoolError, ShuttingDown, UnknownModel

ANSWER_S = 30.0
MXPOOL = str(Path(sys.executable).with_name("mxpool"))
REQUESTS = 20
BATCH_MS = soak(1000)


def outcome(future: Future[Any]) -> Any:
    try:
        return future.result(ANSWER_S)["y"][0, 0]
    except MxPoolError as error:
        return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_lets_every_accepted_request_be_answered_and_refuses_new_ones(number: int, to_all: bool) -> None:
    """``to_all``: the workers get it too, as from a terminal or an init system that signals the whole group."""
    model = echo(delay_ms=BATCH_MS, max_batch_size=1, workers=2)
    with Pool({"echo": model}) as pool, pool.client() as client, WireClient(pool.endpoint) as late:
        futures = [client.submit("echo", x(value)) for value in range(REQUESTS)]
        wait_until(lambda: pool.model()["received"] == REQUESTS, "all requests with the broker")
        for process in pool.processes() if to_all else []:
            process.send_signal(number)
        if not to_all:
            pool.kill(number)
        wait_until(lambda: pool.stats()["broker"]["state"] == "draining", "a draining broker")
        late.infer("echo", x(99))
        _, failure = late.one()
        assert isinstance(failure, wire.Failure)
        assert failure.code == "shutting_down"
        assert [outcome(future) for future in futures] == [*range(REQUESTS)]
        assert pool.wait(5) == 0
        pool.check_nothing_left()


def test_an_idle_broker_ends_within_a_second() -> None:
    with Pool({"echo": echo(workers=4)}) as pool, pool.client() as client:
        client.infer("echo", x(1))
        begin_s = time.monotonic()
        pool.kill(signal.SIGTERM)
        assert pool.wait() == 0
        assert time.monotonic() - begin_s < 1.0


def test_a_broker_whose_workers_still_load_ends_within_a_second() -> None:
    with Pool({"slow": echo(load_delay_ms=60_000), "echo": echo()}, ready=["echo"]) as pool:
        begin_s = time.monotonic()
        pool.kill(signal.SIGTERM)
        assert pool.wait() == 0
        assert time.monotonic() - begin_s < 1.0


def test_a_second_signal_gives_up_what_waits_and_still_answers_what_runs() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, max_batch_size=1)}) as pool, pool.client() as client:
        running = client.submit("echo", x(0))
        wait_running(pool)
        waiting = [client.submit("echo", x(value)) for value in range(1, 10)]
        wait_queued(pool, 9)
        pool.kill(signal.SIGTERM)
        wait_until(lambda: pool.stats()["broker"]["state"] == "draining", "a draining broker")
        assert not any(future.done() for future in waiting)
        pool.kill(signal.SIGTERM)
        assert [outcome(future) for future in waiting] == ["shutting_down"] * 9
        assert not running.done()
        gate.let(1)
        assert outcome(running) == 0
        assert pool.wait(5) == 0


def test_what_hangs_while_draining_is_answered_all_the_same() -> None:
    model = echo(hang_on=13, run_timeout_ms=300)
    with Pool({"echo": model}) as pool, pool.client() as client:
        stuck = client.submit("echo", x(13))
        wait_running(pool)
        pool.kill(signal.SIGTERM)
        assert outcome(stuck) in ("worker_died", "shutting_down")
        assert pool.wait(10) == 0


def test_a_model_is_drained_by_the_command_and_the_others_go_on() -> None:
    with Gate() as gate:
        models = {"old": echo(gate=gate.path, max_batch_size=1), "new": echo()}
        with Pool(models) as pool, pool.client() as client:
            futures = [client.submit("old", x(0))]
            wait_running(pool, model="old")
            futures += [client.submit("old", x(value)) for value in (1, 2)]
            wait_queued(pool, 2, "old")
            command = [MXPOOL, "-e", pool.endpoint, "drain", "old", "--json"]
            drained = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            assert json.loads(drained.stdout) == {"draining": True}
            assert pool.control("ready")["models"] == {"old": "draining", "new": "ready"}
            with pytest.raises(ShuttingDown, match="'old'"):
                client.infer("old", x(3))
            assert client.infer("new", x(4))["y"][0, 0] == 4
            gate.let(3)
            assert [outcome(future) for future in futures] == [0, 1, 2]
            wait_until(lambda: slot_states(pool, "old") == [], "nothing left in a slot")
            with pytest.raises(UnknownModel):
                pool.control("drain", "no-such-model")


def test_the_whole_broker_is_drained_by_the_command() -> None:
    with Pool({"a": echo(), "b": echo()}) as pool, pool.client() as client:
        command = [MXPOOL, "-e", pool.endpoint, "drain"]
        drained = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        assert "draining" in drained.stdout
        assert pool.stats()["broker"]["state"] == "draining"
        for name in ("a", "b"):
            with pytest.raises(ShuttingDown):
                client.infer(name, x(1))


def test_a_client_whose_user_is_not_known_may_not_drain() -> None:
    with Pool({"echo": echo()}, endpoint="tcp://127.0.0.1:0") as pool, pool.client() as client:
        with pytest.raises(MxPoolError, match="may not drain") as caught:  # on tcp nobody is known
            client.control("drain")
        assert caught.value.code == "permission_denied"
        assert client.infer("echo", x(1))["y"][0, 0] == 1
