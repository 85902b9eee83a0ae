"""A broker that is killed, hangs or is not there: what its clients and workers make of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gates import Gate, ends_of, wait_running, x
from pool import MX_BROKER, Pool, echo, shared_memory_names, wait_until

from mxpool import Client
from mxpool.errors import BrokerLost, ClientUnusable, DeadlineExceeded

LOST_WITHIN_S = 1.0
GONE_WITHIN_S = 1.0  # workers, from the end of the broker


class Caller(threading.Thread):
    """A thread in one call; afterwards its error and when it came."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: Exception | None = None
        self.ended_s = 0.0
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            self.error = error
        self.ended_s = time.monotonic()


def kill_broker(pool: Pool) -> float:
    """SIGKILL, with the workers seen to be gone in time; when it was sent."""
    pids = [pid for model in pool.tree["models"] for pid in pool.worker_pids(model)]
    with ends_of(pids) as gone:
        begin_s = time.monotonic()
        pool.kill()
        assert pool.wait() == -signal.SIGKILL
        assert gone(GONE_WITHIN_S - (time.monotonic() - begin_s))
    assert pool.processes() == []
    return begin_s


def test_every_kind_of_call_learns_of_the_brokers_death_within_a_second_and_works_again_by_itself() -> None:
    names = shared_memory_names()
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, workers=2)}) as pool, pool.client() as client:
        frames = [x(number) for number in range(100)]
        callers = [
            Caller(lambda: client.infer("echo", x(1))),
            Caller(lambda: client.infer("echo", x(2), retries=0)),
            Caller(lambda: [*client.push("echo", frames)]),
            Caller(lambda: client.submit("echo", x(3)).result()),
        ]
        wait_until(lambda: pool.model()["received"] == 67, "all requests with the broker")  # push has 64 in flight
        begin_s = kill_broker(pool)
        for caller in callers:
            caller.join(5)
            assert isinstance(caller.error, BrokerLost)
            assert caller.error.retryable
            assert caller.ended_s - begin_s < LOST_WITHIN_S
        wait_until(lambda: shared_memory_names() <= names, "no name of ours in /dev/shm")
        assert (pool.folder / "broker.sock").exists()  # a crash leaves its sockets, which hinder nobody

        pool.start()
        pool.wait_ready()
        gate.let(200)
        assert client.infer("echo", x(4))["y"][0, 0] == 4
        assert client.submit("echo", x(5)).result(10)["y"][0, 0] == 5
        assert [outputs["y"][0, 0] for outputs in client.push("echo", frames)] == [*range(100)]
        assert pool.model()["received"] == 102  # nothing was sent again by itself


def test_a_call_that_may_be_repeated_waits_for_the_next_broker() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        client.infer("echo", x(1))
        kill_broker(pool)
        caller = Caller(lambda: client.infer("echo", x(2), retries=1000))
        pool.start()
        pool.wait_ready()
        caller.join(20)
        assert caller.error is None
        assert pool.model()["ok"] == 1


def test_workers_that_hang_or_load_are_gone_as_soon_as_those_that_idle() -> None:
    models = {"echo": echo(hang_on=13), "slow": echo(load_delay_ms=60_000)}
    with Pool(models, ready=["echo"]) as pool, pool.client() as client:
        caller = Caller(lambda: client.infer("echo", x(13)))
        wait_running(pool)
        kill_broker(pool)
        caller.join(5)
        assert isinstance(caller.error, BrokerLost)
        pool.start()
        pool.wait_ready()


def test_a_model_of_another_shape_under_the_same_name_is_noticed_after_the_restart() -> None:
    with Pool({"echo": echo(tensors="x:FP32:4")}) as pool, pool.client() as client:
        client.infer("echo", x(1))
        kill_broker(pool)
        pool.tree["models"]["echo"]["options"]["tensors"] = "x:FP32:6"
        pool.start()
        pool.wait_ready()
        wide = {"x": np.ones((2, 6), np.float32)}
        assert client.infer("echo", wide)["y"].shape == (2, 6)
        assert client.submit("echo", wide).result(10)["y"].shape == (2, 6)


def test_a_second_broker_on_a_live_path_is_refused_and_takes_nothing_away() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        command = [*MX_BROKER, str(pool.config_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert second.returncode == 1
        assert "another broker serves there" in second.stderr
        assert client.infer("echo", x(1))["y"][0, 0] == 1


@pytest.mark.parametrize("connected", [True, False])
def test_a_stopped_broker_costs_its_clients_their_timeout_and_not_more(connected: bool) -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        if connected:
            client.infer("echo", x(1))
        os.kill(pool.pid, signal.SIGSTOP)
        try:
            begin_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):  # the time was too short to call the broker lost
                client.infer("echo", x(2), timeout_s=0.3)
            assert 0.3 <= time.monotonic() - begin_s < 0.8
        finally:
            pool.kill(signal.SIGCONT)
        assert client.infer("echo", x(3))["y"][0, 0] == 3


def test_without_a_broker_a_call_fails_at_once_and_the_next_one_looks_again() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        assert client.infer("echo", x(1))["y"][0, 0] == 1
        pool.end()
        begin_s = time.monotonic()
        with pytest.raises(BrokerLost):
            client.infer("echo", x(1))
        assert time.monotonic() - begin_s < LOST_WITHIN_S
        with pytest.raises(BrokerLost):
            client.submit("echo", x(1)).result(LOST_WITHIN_S)
        pool.start()
        pool.wait_ready()
        assert client.infer("echo", x(1))["y"][0, 0] == 1


def test_closing_a_client_ends_the_calls_of_its_threads() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool:
        client = Client(pool.endpoint)
        caller = Caller(lambda: client.infer("echo", x(1)))
        wait_running(pool)
        client.close()
        caller.join(5)
        assert isinstance(caller.error, ClientUnusable)
        wait_until(lambda: pool.model()["client_gone"] == 1, "its request is dropped")
        gate.let(1)
