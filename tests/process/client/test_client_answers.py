"""Answers reach the call that asked, over real sockets against a broker that does what each test says."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from client_rig import Held, frame, frames, sums
from fake_broker import FakeBroker, Received

from mxpool import Client, wire
from mxpool.errors import RunFailed


def test_outputs_come_by_name_and_belong_to_the_caller(client: Client) -> None:
    outputs = client.infer("sum", frame(2, rows=3))
    assert outputs["y"].tolist() == [8, 8, 8]
    outputs["y"][:] = 1


def test_outputs_stay_valid_after_close(broker: FakeBroker) -> None:
    with Client(broker.endpoint) as client:
        kept = client.infer("large", {"x": np.ones((8, 40_000), np.float32)})
    assert kept["y"].tolist() == [40_000] * 8


def test_a_request_larger_than_a_batch_is_split_and_joined_in_order(broker: FakeBroker, client: Client) -> None:
    held = Held(broker)
    x = np.arange(80, dtype=np.float32).reshape(20, 4)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(client.infer, "sum", {"x": x})
        held.wait(3)
        assert [received.request.rows for received in held.requests] == [8, 8, 4]
        for received in reversed(held.requests):
            broker.call(functools.partial(broker.answer, received))
        assert np.array_equal(result.result()["y"], x.sum(axis=1))


def test_one_failed_piece_fails_the_request_and_cancels_the_others(broker: FakeBroker, client: Client) -> None:
    held = Held(broker)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(client.infer, "sum", frame(1, rows=20))
        held.wait(3)
        broker.call(lambda: broker.refuse(held.requests[1], RunFailed(model="sum", reason="why")))
        with pytest.raises(RunFailed, match="why"):
            result.result()
    ids = [received.request.request_id for received in held.requests]
    broker.wait_until(lambda: broker.cancelled == [ids[0], ids[2]])


def test_bodies_are_split_to_the_brokers_largest_message(broker: FakeBroker, client: Client) -> None:
    broker.max_message_bytes = 40
    assert client.infer("sum", frame(1, rows=5))["y"].tolist() == [4] * 5
    assert [received.request.rows for received in broker.received] == [2, 2, 1]


def test_duplicate_and_unknown_answers_are_ignored(broker: FakeBroker, client: Client) -> None:
    def twice(received: Received) -> None:
        broker.answer(received)
        broker.answer(received)
        broker.send(received.identity, wire.encode_error(999_999, RunFailed(model="sum", reason="stray")))

    broker.on_infer = twice
    assert sums(client.push("sum", frames(300), in_flight=7)) == [4 * value for value in range(300)]
    assert [float(client.infer("sum", frame(v))["y"][0]) for v in range(20)] == [4 * v for v in range(20)]


def test_threads_that_share_a_client_each_get_their_own_answers(client: Client) -> None:
    def work(number: int) -> bool:
        return all(
            client.infer("sum", frame(number * 1000 + turn))["y"][0] == 4 * (number * 1000 + turn)
            for turn in range(100)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_connection_is_used_again_and_metadata_asked_once(broker: FakeBroker, client: Client) -> None:
    for value in range(5):
        client.infer("sum", frame(value))
    assert broker.greetings == 1
    assert broker.controls == [("metadata", "sum")]


def test_a_tcp_endpoint_serves_the_same_with_the_time_left_as_deadline() -> None:
    with FakeBroker("tcp://127.0.0.1:*") as broker, Client(broker.endpoint) as client:
        assert client.infer("sum", frame(3), timeout_s=20)["y"].tolist() == [12]
        assert sums(client.push("sum", frames(50))) == [4 * value for value in range(50)]
        assert -20_000_000 <= broker.received[0].request.deadline_us < -19_000_000


def test_on_ipc_the_deadline_is_absolute(broker: FakeBroker, client: Client) -> None:
    before = time.monotonic_ns() // 1000
    client.infer("sum", frame(3), timeout_s=20)
    after = time.monotonic_ns() // 1000
    assert before + 20_000_000 <= broker.received[0].request.deadline_us <= after + 20_000_000
