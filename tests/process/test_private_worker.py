"""The private worker beside a model: it serves whoever knows its name, and it never outlives its reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import made_models
import numpy as np
import psutil
import pytest
import standins
from gates import Gate, wait_running, x
from pool import Pool, echo, wait_until

from mxpool import Client
from mxpool.errors import BrokerLost, MxPoolError, PermissionDenied, Rejected, ShuttingDown, UnknownModel

PLAIN = "echo@plain"


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool({"echo": echo(workers=2)}) as pool:
        yield pool


def refer(client: Client, pool: Pool, model: str = "echo") -> int:
    """Ask for a private worker and wait until it is ready; its process id."""
    name = f"{model}@plain"
    assert client.control("reference", model) == {"model": name}
    wait_until(lambda: pool.model(name)["state"] == "ready", "a private worker")
    return pool.worker_pids(name)[0]


def gone(pool: Pool, pid: int, name: str = PLAIN) -> None:
    wait_until(lambda: name not in pool.stats()["models"], "the end of the private worker's model")
    assert not psutil.pid_exists(pid)


def test_it_is_served_like_any_model_and_told_of_only_in_stats(pool: Pool) -> None:
    with pool.client() as client:
        segment = pool.model()["segment_bytes"]
        refer(client, pool)
        assert (client.infer(PLAIN, x(3))["y"] == x(3)["x"]).all()
        assert client.models() == ["echo"]
        assert client.control("ready") == {"ready": True, "models": {"echo": "ready"}}
        stats = pool.model(PLAIN)
        assert (stats["slots"], stats["config"]["graph"]) == (2, "off")
        assert 0 < stats["segment_bytes"] < segment
        assert [worker["worker"] for worker in stats["workers"]] == ["echo@plain-cpu-0"]
        assert stats["workers"][0]["report"]["sizes"] == pool.model()["workers"][0]["report"]["sizes"]
        with pytest.raises(UnknownModel):
            client.control("reference", PLAIN)


def test_release_gives_back_its_process_and_its_slots_and_another_can_be_had_at_once(pool: Pool) -> None:
    with pool.client() as client:
        client.models()  # opens its connection
        files = len(os.listdir(f"/proc/{pool.pid}/fd"))  # noqa: PTH208
        for _ in range(3):
            pid = refer(client, pool)
            assert client.control("release") == {"released": True}
            gone(pool, pid)
        assert client.control("release") == {"released": False}
        assert len(os.listdir(f"/proc/{pool.pid}/fd")) == files  # noqa: PTH208
        with pytest.raises(UnknownModel):
            client.infer(PLAIN, x(1))


def test_nobody_else_ends_it(pool: Pool) -> None:
    with pool.client() as client, pool.client() as other:
        refer(client, pool)
        with pytest.raises(Rejected, match="is there for another client"):
            other.control("release")
        with pytest.raises(UnknownModel):
            other.control("drain", PLAIN)
        assert (client.infer(PLAIN, x(1))["y"] == x(1)["x"]).all()
        assert client.control("release") == {"released": True}


def test_it_ends_with_the_client_that_asked_for_it(pool: Pool) -> None:
    with pool.client() as other:
        with pool.client() as client:
            pid = refer(client, pool)
            other.infer(PLAIN, x(1))
        gone(pool, pid)
        assert (other.infer("echo", x(1))["y"] == x(1)["x"]).all()


def test_it_ends_although_it_still_loads() -> None:
    with Pool({"echo": echo(load_delay_ms=300)}) as pool, pool.client() as client:
        client.control("reference", "echo")
        (pid,) = wait_until(lambda: pool.worker_pids(PLAIN), "a private worker that loads")
        assert client.control("release") == {"released": True}
        gone(pool, pid)


def test_one_at_a_time(pool: Pool) -> None:
    with pool.client() as client, pool.client() as other:
        refer(client, pool)
        with pytest.raises(Rejected, match="echo@plain is there; one private worker is allowed at a time") as caught:
            other.control("reference", "echo")
        assert caught.value.retryable
        assert other.infer(PLAIN, x(1))["y"].shape == (1, 4)


def test_a_killed_one_is_started_again_like_any_worker(pool: Pool) -> None:
    with pool.client() as client:
        pid = refer(client, pool)
        os.kill(pid, signal.SIGKILL)
        assert (client.infer(PLAIN, x(5))["y"] == x(5)["x"]).all()
        assert pool.model(PLAIN)["workers"][0]["restarts"] == 1
        assert [worker["restarts"] for worker in pool.model()["workers"]] == [0, 0]


def test_what_it_runs_is_answered_at_its_end_and_what_waits_is_refused() -> None:
    with Gate() as gate:
        table = echo(max_batch_size=1, gate=gate.path)
        with Pool({"echo": table}) as pool, pool.client() as client, pool.client() as other:
            refer(client, pool)
            running, waiting = other.submit(PLAIN, x(1)), other.submit(PLAIN, x(2))
            wait_running(pool, model=PLAIN)
            wait_until(lambda: pool.model(PLAIN)["received"] == 2, "both requests")
            client.close()
            with pytest.raises(ShuttingDown):
                waiting.result(10)
            gate.let()
            assert (running.result(10)["y"] == x(1)["x"]).all()
            wait_until(lambda: PLAIN not in pool.stats()["models"], "the end of the private worker")


def test_the_broker_ends_with_a_private_worker_as_without(pool: Pool) -> None:
    with pool.client() as client:
        refer(client, pool)
        pool.end()
        with pytest.raises(BrokerLost):
            client.infer(PLAIN, x(1), timeout_s=5)
    pool.start()  # so that the fixture finds one to end
    pool.wait_ready()


def test_the_broker_ends_while_a_private_worker_loads() -> None:
    with Pool({"echo": echo(load_delay_ms=300)}) as pool, pool.client() as client:
        client.control("reference", "echo")
        wait_until(lambda: pool.worker_pids(PLAIN), "a private worker that loads")


def test_a_broker_that_is_killed_leaves_no_private_worker() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        refer(client, pool)
        pool.kill()
        assert pool.wait() == -signal.SIGKILL
        pool.check_nothing_left()
        pool.start()
        pool.wait_ready()


def test_nobody_but_an_administrator_gets_one() -> None:
    with Pool({"echo": echo()}, endpoint="tcp://127.0.0.1:0") as pool, pool.client() as client:
        for verb in ("reference", "release"):
            with pytest.raises(PermissionDenied, match=verb):
                client.control(verb, "echo")
        assert [*pool.stats()["models"]] == ["echo"]


def test_a_model_without_a_ready_worker_has_nothing_to_be_compared() -> None:
    with Pool({"echo": echo(load_delay_ms=2000)}, ready=()) as pool, pool.client() as client:
        with pytest.raises(MxPoolError, match="loading") as caught:
            client.control("reference", "echo")
        assert caught.value.code == "unavailable"
        with pytest.raises(UnknownModel):
            client.control("reference", "other")


def test_a_draining_model_gets_none(pool: Pool) -> None:
    with pool.client() as client:
        client.control("drain", "echo")
        with pytest.raises(ShuttingDown):
            client.control("reference", "echo")


def test_it_runs_the_captured_sizes_plainly_on_the_device_of_the_model(tmp_path: Path) -> None:
    table = {"path": made_models.affine(tmp_path), "max_batch_size": 8, "workers": {"gpu0": 1}}
    environ = standins.environ("cuda")
    with Pool({"m": table}, devices={"gpu0": {"kind": "cuda"}}, environ=environ) as pool, pool.client() as client:
        refer(client, pool, "m")
        given = np.ones((3, 4), np.float32)
        assert (client.infer("m@plain", {"x": given})["y"] == 3).all()
        stats = pool.model("m@plain")
        report = stats["workers"][0]["report"]
        assert (report["sizes"], report["graph"], report["graph_setting"]) == ([1, 8], "off", "off")
        assert (stats["workers"][0]["device"], stats["last_batch"]["padded_batch"]) == ("gpu0", 8)
        assert stats["graph"] == {"hit": 0, "miss": 0, "off": 1}


def test_one_that_cannot_be_loaded_says_why_and_is_released_like_any_other(tmp_path: Path) -> None:
    path = Path(made_models.affine(tmp_path))
    with Pool({"m": {"path": str(path), "max_batch_size": 8}}) as pool, pool.client() as client:
        path.unlink()
        client.control("reference", "m")
        stats = wait_until(lambda: (m := pool.model("m@plain"))["state"] == "unavailable" and m, "the refusal")
        assert str(path) in stats["reason"]
        assert pool.model("m")["state"] == "ready"
        assert client.control("release") == {"released": True}
        assert [*pool.stats()["models"]] == ["m"]


def test_a_model_with_the_longest_name_has_a_private_worker_too() -> None:
    name = "n" * 64
    with Pool({name: echo()}) as pool, pool.client() as client:
        private = client.control("reference", name)["model"]
        assert client.infer(private, x(1))["y"].shape == (1, 4)
