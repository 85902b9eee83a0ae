"""Clients that are slow, stopped, too many, forked or alike: what the broker and the others see of them."""

from __future__ import annotations

import asyncio
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from gates import Gate, wait_queued, x
from pool import Pool, echo, soak, wait_until
from raw_peer import RawPeer, infer_header, row, wait_closed

from mxpool import Client, wire
from mxpool.errors import BrokerLost, ClientUnusable, Rejected

REQUESTS = 2_000
WIDE = 1_024  # floats in a row: answers of 4 KB, so that sockets fill
NOTHING_LISTENS = "tcp://127.0.0.1:9"


@contextmanager
def program(text: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program of its own; ended, if it has not."""
    command = [sys.executable, "-W", "error", "-c", text, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str], timeout_s: float = 10.0) -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], timeout_s)[0], "it prints nothing"
    return process.stdout.readline().strip()


def outcomes(pool: Pool) -> dict[str, int]:
    found = pool.model()
    return {name: found[name] for name in ("ok", "rejected", "expired", "cancelled", "failed", "client_gone")}


def flood(peer: RawPeer) -> None:
    """REQUESTS requests of one row, of which each answer is a message of its own."""
    for number in range(1, REQUESTS + 1):
        array = row(number, WIDE)
        peer.send(infer_header(number, array), array.tobytes())


def wide(**keys: int) -> dict[str, object]:
    return echo(1, tensors=f"x:FP32:{WIDE}", max_queue_size=REQUESTS, **keys)


# A1


def test_a_client_that_reads_late_gets_one_answer_to_every_request() -> None:
    model = echo(8, tensors=f"x:FP32:{WIDE}")  # a queue of 256: the rest is refused
    with Pool({"echo": model}) as pool, RawPeer(pool.endpoint, rcvhwm=10) as peer:
        flood(peer)
        wait_until(lambda: sum(outcomes(pool).values()) == REQUESTS, "an outcome for every request")
        seen: Counter[int] = Counter()
        while sum(seen.values()) < REQUESTS:
            frames = peer.frames()
            assert frames is not None, f"{REQUESTS - sum(seen.values())} requests without an answer"
            answer = wire.decode_answer(frames[0])
            if isinstance(answer, wire.Failure):
                assert answer.code == "queue_full"
                seen[answer.request_id] += 1
            else:
                assert isinstance(answer, wire.Result)
                seen.update(answer.ids)
                assert (np.frombuffer(frames[1], np.float32)[::WIDE] == answer.ids).all()
        assert peer.answers_until_sync() == []
        assert set(seen.values()) == {1}
        assert pool.stats()["broker"]["undeliverable"] == 0


def test_a_client_that_never_reads_is_dropped_at_its_outbox_and_every_answer_is_counted() -> None:
    with (
        Pool({"echo": wide()}, broker={"outbox_messages": 50}) as pool,
        RawPeer(pool.endpoint, rcvhwm=10) as peer,
        pool.client() as other,
    ):
        flood(peer)
        assert other.infer("echo", {"x": row(7, WIDE)})["y"][0, 0] == 7
        wait_until(lambda: sum(outcomes(pool).values()) == REQUESTS + 1, "an outcome for every request")
        assert peer.link is not None
        wait_closed(peer.link)
        assert "client dropped, it does not read its answers" in pool.log()
        found, undeliverable = outcomes(pool), pool.stats()["broker"]["undeliverable"]
        assert undeliverable >= 50
        assert found["client_gone"] > 0
        assert found["ok"] + found["client_gone"] == REQUESTS + 1
        for _ in range(found["ok"] - 1 - undeliverable):  # what lay in the sockets before it was dropped
            assert peer.frames() is not None
        assert peer.frames(0.1) is None


# A3


def test_clients_of_one_process_never_get_each_others_answers() -> None:
    with Pool({"echo": echo(workers=2)}) as pool:

        def own_answers(first: int) -> None:
            with Client(pool.endpoint) as client:
                values = [first + number for number in range(100)]
                results = client.push("echo", ({"x": row(value)} for value in values), in_flight=20)
                assert [outputs["y"][0, 0] for outputs in results] == values

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(own_answers, range(1000, 9000, 2000)))


def test_a_second_client_with_a_routing_id_that_is_taken_hears_nothing_and_takes_nothing() -> None:
    with Pool({"echo": echo()}) as pool, RawPeer(pool.endpoint, linked=False, identity=b"same") as first:
        first.send(infer_header(1, row(1)), row(1).tobytes())
        assert isinstance(first.answer(), wire.Result)  # so it is the first
        with RawPeer(pool.endpoint, linked=False, identity=b"same") as second:
            second.send(infer_header(900, row(900)), row(900).tobytes())
            for number in range(2, 102):
                first.send(infer_header(number, row(number)), row(number).tobytes())
            seen: set[int] = set()
            while seen < set(range(2, 102)):
                answer = first.answer()
                assert isinstance(answer, wire.Result)
                seen |= set(answer.ids)
            assert seen == set(range(2, 102))
            assert second.frames(0.2) is None


def test_a_token_ties_one_routing_id_only() -> None:
    with Pool({"echo": echo()}) as pool, RawPeer(pool.endpoint) as first, RawPeer(pool.endpoint, linked=False) as other:
        other.send(wire.encode_request(wire.HELLO, 5, extensions={"token": first.welcome["token"]}))
        assert other.refusal().code == "permission_denied"
        first.send(infer_header(1, row(1)), row(1).tobytes())
        assert isinstance(first.answer(), wire.Result)


# A5

LEAVES = """
import sys
import numpy as np
from mxpool import Client
from mxpool.errors import BrokerLost

client = Client(sys.argv[1])
lost = 0
if sys.argv[2] == "nobody":
    for _ in range(100):
        try:
            client.submit("echo", {"x": np.ones((1, 4), np.float32)})
        except BrokerLost:
            lost += 1
    assert lost == 100
    print("sent", flush=True)
else:
    client.infer("echo", {"x": np.ones((1, 4), np.float32)})
    print("ready", flush=True)
    sys.stdin.readline()
    futures = [client.submit("echo", {"x": np.ones((1, 4), np.float32)}) for _ in range(100)]
    print("sent", flush=True)
"""


def leaves(endpoint: str) -> None:
    with program(LEAVES, endpoint, "nobody") as process:
        assert said(process) == "sent"
        began = time.monotonic()
        assert process.wait(3) == 0
        assert time.monotonic() - began < 1
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("endpoint", [NOTHING_LISTENS, "ipc:///tmp/mxpool-nothing-listens"])
def test_a_program_that_called_where_nothing_listens_ends_when_main_does(endpoint: str) -> None:
    leaves(endpoint)


def test_a_program_with_open_requests_to_a_stopped_broker_ends_when_main_does() -> None:
    with Pool({"echo": echo()}) as pool:
        command = [sys.executable, "-c", LEAVES, pool.endpoint, "stopped"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert said(process) == "ready"
            pool.kill(signal.SIGSTOP)
            try:
                process.communicate("\n", timeout=3)
                assert process.returncode == 0
            finally:
                pool.kill(signal.SIGCONT)
                process.kill()


def test_sigterm_with_answers_that_nobody_reads_ends_the_broker_in_time_and_with_0() -> None:
    with Pool({"echo": wide()}) as pool, RawPeer(pool.endpoint, rcvhwm=1) as peer:
        flood(peer)
        wait_until(lambda: pool.model()["ok"] == REQUESTS, "all of them ran")
        began = time.monotonic()
        pool.end(0)
        assert time.monotonic() - began < 3


# A7


def test_at_the_limit_of_descriptors_clients_are_refused_by_name_and_later_served_again() -> None:
    asked = soak(500, 100)
    prefix = ["prlimit", "--nofile=256:256"]
    with Pool({"echo": echo()}, prefix=prefix) as pool, ExitStack() as stack:
        limit = int(re.findall(r"clients limited clients=(\d+) by=RLIMIT_NOFILE nofile=256", pool.log())[0])
        served: list[Client] = []
        refused: list[Rejected] = []
        for number in range(asked):
            client = stack.enter_context(pool.client())
            try:
                assert client.infer("echo", x(number))["y"][0, 0] == number
                served.append(client)
            except Rejected as error:
                refused.append(error)
        assert len(served) == limit - 1  # the pool's own client has a place
        assert len(refused) == asked - len(served)
        assert f"{limit} clients are connected" in refused[0].message
        for client in served:  # nobody was thrown out to make room
            assert client.infer("echo", x(1), timeout_s=2)["y"][0, 0] == 1
        for client in served[: len(served) * 4 // 5]:
            client.close()
        wait_until(lambda: pool.stats()["broker"]["linked_clients"] < limit // 2, "places that are free again")
        newcomer = stack.enter_context(pool.client())
        assert newcomer.infer("echo", x(5))["y"][0, 0] == 5
        assert cpu_of(pool.pid, 0.5) < 0.1


@contextmanager
def strangers(endpoint: str, count: int) -> Iterator[None]:
    """So many ZMQ connections of programs that know of no link, for as long as the block lasts."""
    with zmq.Context() as context, ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(context.socket(zmq.DEALER))
            stranger.linger = 0
            stranger.reconnect_ivl = -1
            stranger.connect(endpoint)
        yield


SHUT, OPEN = "no more connections accepted", "connections accepted again"


def test_connections_without_links_are_shut_out_before_descriptors_run_out_and_let_in_again() -> None:
    prefix = ["prlimit", "--nofile=256:256"]  # libzmq ends the process that cannot accept on ipc for want of one
    with Pool({"echo": echo()}, prefix=prefix) as pool, pool.client() as client:
        client.infer("echo", x(1))
        with strangers(pool.endpoint, 500):
            wait_until(lambda: SHUT in pool.log(), "a full house")
            assert client.infer("echo", x(2), timeout_s=5)["y"][0, 0] == 2
            assert pool.stats()["broker"]["connected_clients"] < 200
            with pool.client() as newcomer, pytest.raises(BrokerLost):
                newcomer.infer("echo", x(3))
            assert cpu_of(pool.pid, 0.3) < 0.1
        wait_until(lambda: OPEN in pool.log(), "room again")
        with pool.client() as newcomer:
            assert newcomer.infer("echo", x(4))["y"][0, 0] == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_broker_that_ends_with_its_door_shut_is_no_hindrance_to_the_next(number: int) -> None:
    with Pool({"echo": echo()}, prefix=["prlimit", "--nofile=256:256"]) as pool:
        with strangers(pool.endpoint, 100):
            wait_until(lambda: SHUT in pool.log(), "a full house")
            assert (pool.folder / "broker.sock.shut").is_socket()
            pool.let_go()
            pool.kill(number)
            pool.wait()
            pool.check_nothing_left()
        pool.start()
        pool.wait_ready()
        assert not (pool.folder / "broker.sock.shut").exists()


def cpu_of(pid: int, window_s: float) -> float:
    """The part of a core that a process uses while nothing is asked of it."""
    process = psutil.Process(pid)
    process.cpu_percent()
    return process.cpu_percent(window_s) / 100


def test_clients_at_max_clients_are_refused_before_any_of_their_requests_is_read() -> None:
    with Pool({"echo": echo()}, broker={"max_clients": 2}) as pool, pool.client() as client:
        client.infer("echo", x(1))
        with pool.client() as third, pytest.raises(Rejected, match="2 clients are connected"):
            third.infer("echo", x(2))
        assert pool.model()["received"] == 1


# A9


def in_child(action: object) -> int:
    """Run ``action`` in a forked child; 0 if it returned true."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if action() else 1)  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 - nothing may leave the child
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # what is tested here: a fork beside our threads
def test_a_forked_child_is_told_that_the_client_is_its_parents_and_the_parent_goes_on() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        client.infer("echo", x(1))
        open_future = client.submit("echo", x(2))

        def refuses() -> bool:
            for call in (
                lambda: client.infer("echo", x(3)),
                lambda: client.submit("echo", x(3)),
                lambda: next(iter(client.push("echo", [x(3)]))),
                client.status,
            ):
                try:
                    call()
                except ClientUnusable:
                    continue
                return False
            client.close()
            with Client(pool.endpoint) as own:
                return bool(own.infer("echo", x(4))["y"][0, 0] == 4)

        assert in_child(refuses) == 0
        assert open_future.result(5)["y"][0, 0] == 2
        for number in range(100):
            assert client.infer("echo", x(number))["y"][0, 0] == number


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_lives_on_does_not_keep_its_dead_parents_link_open() -> None:
    text = """
import os, sys
import numpy as np
from mxpool import Client
client = Client(sys.argv[1])
client.submit("echo", {"x": np.ones((1, 4), np.float32)})
client.infer("held", {"x": np.ones((1, 4), np.float32)})
pid = os.fork()
if pid == 0:
    os.read(0, 1)
    os._exit(0)
print(pid, flush=True)
sys.stdin.readline()
"""
    with (
        Gate() as gate,
        Pool({"echo": echo(gate=gate.path), "held": echo()}) as pool,
        subprocess.Popen(
            [sys.executable, "-c", text, pool.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        child = int(said(process))
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: pool.stats()["broker"]["linked_clients"] == 1, "the end of the dead client's links", 2)
        os.kill(child, signal.SIGKILL)
        gate.let(1)


def test_a_worker_inherits_no_descriptor_of_its_broker() -> None:
    with Pool({"echo": echo(workers=2)}) as pool:
        pool.stats()

        def sockets(pid: int) -> set[str]:
            found = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115 - not a path
            return {name for name in found if name.startswith(("socket:", "anon_inode:"))}

        brokers = sockets(pool.pid)
        for pid in pool.worker_pids():
            assert sockets(pid)
            assert not {name for name in sockets(pid) if name.startswith("socket:")} & brokers
            assert "anon_inode:[eventpoll]" not in sockets(pid)


# A11


def test_requests_that_a_coroutine_cancels_leave_every_other_its_own_answer() -> None:
    count = soak(1000, 300)
    random_ = random.Random(11)

    async def ask(client: Client) -> int:
        futures = [client.submit("echo", x(number)) for number in range(count)]
        waiting = [asyncio.wrap_future(future) for future in futures]
        dropped = set(range(0, count, 3))
        for number in random_.sample(sorted(dropped), len(dropped)):
            await asyncio.wait(waiting[number : number + 1], timeout=random_.random() / 1000)
            waiting[number].cancel()
        for number, future in enumerate(waiting):
            if number not in dropped:
                assert (await future)["y"][0, 0] == number
        return sum(future.cancelled() for future in waiting)

    with Pool({"echo": echo(delay_ms=1, max_queue_size=count)}) as pool, pool.client() as client:
        cancelled = asyncio.run(ask(client))
        assert 0 < cancelled < count
        wait_until(lambda: pool.model()["received"] == sum(outcomes(pool).values()), "an outcome for every request")
        assert pool.model()["queue_depth"] == 0
        assert client.infer("echo", x(-1))["y"][0, 0] == -1


# A13

WAITS = """
import sys
import numpy as np
from mxpool import Client
client = Client(sys.argv[1])
futures = [client.submit("echo", {"x": np.full((1, 4), i, np.float32)}, timeout_s=600) for i in range(21)]
print("sent", flush=True)
sys.stdin.readline()
"""


def test_the_queued_work_of_a_tcp_client_that_stops_answering_is_freed_within_three_heartbeats() -> None:
    with (
        Gate() as gate,
        Pool(
            {"echo": echo(max_batch_size=1, gate=gate.path)},
            endpoint=["tcp://127.0.0.1:0"],
            broker={"heartbeat_s": 1.0},
        ) as pool,
        subprocess.Popen(
            [sys.executable, "-c", WAITS, pool.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert said(process) == "sent"
            wait_queued(pool, 20)
            connected = pool.stats()["broker"]["connected_clients"]
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            wait_queued(pool, 0)
            assert time.monotonic() - began < 3.9  # three, and what a busy machine takes
            assert pool.stats()["broker"]["connected_clients"] < connected
            assert pool.model()["client_gone"] >= 20
        finally:
            process.kill()
            gate.let(1)


def test_a_stopped_ipc_client_keeps_its_requests_and_a_killed_one_loses_them_at_once() -> None:
    with (
        Gate() as gate,
        Pool({"echo": echo(max_batch_size=1, gate=gate.path)}) as pool,
        subprocess.Popen(
            [sys.executable, "-c", WAITS, pool.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert said(process) == "sent"
        wait_queued(pool, 20)
        process.send_signal(signal.SIGSTOP)
        gate.let(1)
        wait_queued(pool, 19)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: pool.model()["queue_depth"] == 0, "the queue of a dead client", 1)
        gate.let(1)


def test_what_a_dead_client_had_sent_and_nobody_had_read_is_not_run() -> None:
    with Pool({"echo": echo()}) as pool, RawPeer(pool.endpoint) as peer:
        broker = psutil.Process(pool.pid)
        wait_until(lambda: broker.status() == psutil.STATUS_SLEEPING, "a broker that waits")
        pool.kill(signal.SIGSTOP)
        for number in range(1, 201):
            peer.send(infer_header(number, row(number)), row(number).tobytes())
        peer.leave()  # as the kernel would at its death; what it has sent is still on its way
        pool.kill(signal.SIGCONT)
        wait_until(lambda: pool.stats()["broker"]["messages_received"] > 200, "the requests were read")
        assert pool.model()["received"] == 0
        with pool.client() as client:
            assert client.infer("echo", x(2))["y"][0, 0] == 2


def test_a_connection_that_never_speaks_is_cut_off_and_holds_no_place() -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        client.infer("echo", x(1))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(pool.endpoint[6:])
            silent.settimeout(5)
            while silent.recv(4096):  # libzmq's greeting, then the end: HANDSHAKE_IVL
                pass
        assert client.infer("echo", x(2))["y"][0, 0] == 2


def test_where_nothing_listens_a_call_is_broker_lost_within_its_connect_time() -> None:
    began = time.monotonic()
    with Client(NOTHING_LISTENS) as client, pytest.raises(BrokerLost):
        client.infer("echo", x(1))
    assert time.monotonic() - began < 2
