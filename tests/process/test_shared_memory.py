"""Slots, arenas and answers when a process ends, memory runs short, or mounts differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from gates import Gate, wait_queued, x
from pool import Pool, echo, shared_memory_names, soak, wait_until

from mxpool.errors import ModelUnavailable, RunFailed

LARGE = 32_768  # floats in a row: 128 KB, twice what makes a client use its arena
OWN_SHM = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
MIB = 1 << 20

INFERS = """
import sys
import numpy as np
from mxpool import Client
client = Client(sys.argv[1])
small = client.infer("echo", {"x": np.full((2, 4), 7, np.float32)})
large = client.infer("large", {"x": np.full((2, 32768), 9, np.float32)})
assert (small["y"] == 7).all() and (large["y"] == 9).all()
print("answered", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool({"echo": echo(workers=2), "large": echo(4, tensors=f"x:FP32:{LARGE}")}) as pool:
        yield pool


@pytest.fixture
def namespaces() -> None:
    """Skips where mounts of our own are not allowed."""
    ran = subprocess.run([*OWN_SHM, "true"], capture_output=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"root: no mount namespace of our own: {ran.stderr.decode(errors='replace').strip()}")


def answers(pool: Pool, count: int = 100) -> None:
    """The pool goes on answering."""
    with pool.client() as client:
        for number in range(count):
            assert client.infer("echo", x(number))["y"][0, 0] == number


# C1


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_a_client_that_ends_takes_no_memory_of_the_pool_with_it(pool: Pool, end: str) -> None:
    for _ in range(soak(10)):
        command = [sys.executable, "-c", INFERS, pool.endpoint]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "answered\n"
        if end == "SIGKILL":
            process.kill()
        _, stderr = process.communicate(None if end == "SIGKILL" else "\n", timeout=10)
        assert process.returncode == (-signal.SIGKILL if end == "SIGKILL" else 0)
        assert stderr == ""
    answers(pool)
    assert [worker["restarts"] for worker in pool.model()["workers"]] == [0, 0]


def test_no_name_is_left_in_shared_memory_while_the_pool_serves(pool: Pool) -> None:
    before = shared_memory_names()
    os.kill(pool.worker_pids()[0], signal.SIGKILL)  # its successor has segments of its own
    wait_until(lambda: pool.model()["workers"][0]["restarts"] == 1, "a worker that was started again")
    answers(pool, 1)
    wait_until(lambda: not shared_memory_names() - before, "no name of ours")
    maps = Path(f"/proc/{pool.pid}/maps").read_text()
    assert "/dev/shm/mxpool-" in maps
    assert all("(deleted)" in line for line in maps.splitlines() if "/dev/shm/" in line)


def test_a_broker_and_workers_that_are_killed_leave_no_memory() -> None:
    with Pool({"echo": echo(workers=2)}) as pool:
        for pid in pool.worker_pids():
            os.kill(pid, signal.SIGKILL)
        pool.let_go()
        pool.kill(signal.SIGKILL)
        pool.wait()
        pool.check_nothing_left()
        pool.start()
        pool.wait_ready()


# C3


@pytest.mark.root
@pytest.mark.usefixtures("namespaces")
def test_a_model_whose_slots_do_not_fit_is_refused_in_figures_and_the_others_serve() -> None:
    big = echo(25, slots=2, tensors=f"x:FP32:{MIB // 4}")  # 2 x (25 MiB in + 25 MiB out)
    with Pool({"echo": echo(), "big": big}, prefix=OWN_SHM, ready=["echo"]) as pool, pool.client() as client:
        found = wait_until(lambda: pool.model("big")["reason"], "the reason")
        for word in ("/dev/shm", "--shm-size", str(100 * MIB)):
            assert word in found
        assert pool.model("big")["state"] == "unavailable"
        with pytest.raises(ModelUnavailable, match="shared memory"):
            client.infer("big", {"x": np.zeros((1, MIB // 4), np.float32)})
        for number in range(100):
            assert client.infer("echo", x(number))["y"][0, 0] == number
        assert "SIGBUS" not in pool.log()
        assert [worker["restarts"] for worker in pool.model("echo")["workers"]] == [0]


@pytest.mark.root
@pytest.mark.usefixtures("namespaces")
def test_memory_that_another_program_fills_up_later_harms_no_slot_that_is_there() -> None:
    model = echo(8, slots=2, tensors=f"x:FP32:{MIB // 4}")  # 32 of the 64 MiB
    with Pool({"echo": model}, prefix=OWN_SHM) as pool, pool.client() as client:
        inside = ["nsenter", "-t", str(pool.pid), "-m"]
        filled = subprocess.run(
            [*inside, "sh", "-c", "head -c 100000000 /dev/zero > /dev/shm/other; df --output=avail /dev/shm"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert filled.stdout.split()[-1] == "0"
        array = np.arange(8 * MIB // 4, dtype=np.float32).reshape(8, -1)
        for _ in range(8):
            assert (client.infer("echo", {"x": array})["y"] == array).all()
        [worker] = pool.worker_pids()
        os.kill(worker, signal.SIGKILL)  # its successor gets the page that this one gives back
        assert (client.infer("echo", {"x": array}, timeout_s=20)["y"] == array).all()
        assert pool.model()["workers"][0]["restarts"] == 1


# C5


def test_answers_outlive_their_client() -> None:
    text = """
import sys
import numpy as np
from mxpool import Client
with Client(sys.argv[1]) as client:
    kept = [client.infer("large", {"x": np.full((3, 32768), i, np.float32)})["y"] for i in range(3)]
    future = client.submit("echo", {"x": np.full((1, 4), 5, np.float32)})
    kept.append(future.result()["y"])
    pushed = list(client.push("large", [{"x": np.full((1, 32768), 8, np.float32)}] * 10))
del client, future
print([float(array.sum()) for array in kept], float(sum(item["y"].sum() for item in pushed)))
"""
    with Pool({"echo": echo(), "large": echo(4, tensors=f"x:FP32:{LARGE}")}) as pool:
        command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c", text, pool.endpoint]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.strip() == f"{[0.0, 3.0 * LARGE, 6.0 * LARGE, 20.0]} {80.0 * LARGE}"


def test_an_error_of_the_model_is_what_a_caller_sees_and_not_one_of_taking_down() -> None:
    model = echo(4, tensors=f"x:FP32:{LARGE}", fail_on=13)
    with Pool({"echo": model}) as pool:
        array = np.full((2, LARGE), 13, np.float32)
        with pytest.raises(RunFailed, match="a row starts with 13") as caught, pool.client() as client:
            client.infer("echo", {"x": array})
        assert caught.value.__context__ is None
        with pool.client() as client:
            assert (client.infer("echo", {"x": array + 1})["y"] == 14).all()


# C7


@pytest.mark.root
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("mount", ["-t tmpfs -o size=64m tmpfs", "-t tmpfs -o ro,size=4k tmpfs"])
def test_a_client_with_a_dev_shm_of_its_own_shares_memory_all_the_same(pool: Pool, mount: str) -> None:
    shell = f'mount {mount} /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, "-c", INFERS, pool.endpoint]
    ran = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=30, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "answered\n", "")


# A slot of a dead client, and memory over time


def test_the_memory_of_a_client_that_dies_with_requests_waiting_is_unmapped() -> None:
    text = """
import sys
import numpy as np
from mxpool import Client
client = Client(sys.argv[1])
for outputs in client.push("echo", ({"x": np.full((1, 32768), i, np.float32)} for i in range(30)), in_flight=30):
    pass
"""
    with Gate() as gate, Pool({"echo": echo(1, tensors=f"x:FP32:{LARGE}", gate=gate.path)}) as pool:
        with subprocess.Popen([sys.executable, "-c", text, pool.endpoint]) as process:
            wait_queued(pool, 29)
            assert arenas_mapped(pool) == 1
            process.kill()
        wait_queued(pool, 0)
        wait_until(lambda: not arenas_mapped(pool), "no arena is mapped")
        gate.let(2)
        with pool.client() as client:
            array = np.full((1, LARGE), 3, np.float32)
            assert (client.infer("echo", {"x": array})["y"] == 3).all()


def arenas_mapped(pool: Pool) -> int:
    """How many arenas the broker has mapped."""
    return Path(f"/proc/{pool.pid}/maps").read_text().count("memfd:mxpool-arena")


def test_clients_that_come_and_go_leave_the_brokers_memory_and_descriptors_as_they_were(pool: Pool) -> None:
    array = np.ones((2, LARGE), np.float32)

    def round_trip() -> None:
        with pool.client() as client:
            client.infer("large", {"x": array})
            client.submit("echo", x(1)).result(5)

    for _ in range(10):
        round_trip()
    broker = psutil.Process(pool.pid)
    wait_until(lambda: pool.stats()["broker"]["linked_clients"] == 1, "nobody but us")
    rss, fds = pool.rss_bytes(), broker.num_fds()
    for _ in range(soak(1000)):
        round_trip()
    wait_until(lambda: pool.stats()["broker"]["linked_clients"] == 1, "nobody but us")
    wait_until(lambda: broker.num_fds() <= fds, "no more descriptors than before")
    assert pool.rss_bytes() - rss < 4 * MIB
