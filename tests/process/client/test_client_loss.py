"""A broker that is not there, goes away, or talks nonsense."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from client_rig import LOST_MAX_S, frame, frames, free_port, running
from fake_broker import FakeBroker, Received

from mxpool import Client, wire
from mxpool.client import greeting
from mxpool.errors import BrokerLost, DeadlineExceeded


def test_no_broker_is_broker_lost_within_a_second(endpoint: str) -> None:
    started = time.monotonic()
    with Client(endpoint) as client, pytest.raises(BrokerLost, match="No such file"):
        client.infer("sum", frame(1))
    assert time.monotonic() - started < LOST_MAX_S


def test_no_broker_on_tcp_is_broker_lost_within_a_second() -> None:
    started = time.monotonic()
    with Client("tcp://127.0.0.1:9") as client, pytest.raises(BrokerLost):
        client.infer("sum", frame(1))
    assert time.monotonic() - started < LOST_MAX_S + 0.5


def test_a_broker_that_does_not_welcome_is_broker_lost(broker: FakeBroker, client: Client) -> None:
    broker.mute = True
    started = time.monotonic()
    with pytest.raises(BrokerLost, match=r"nothing on the link within"):
        client.infer("sum", frame(1))
    assert time.monotonic() - started < LOST_MAX_S + 0.5


def test_a_timeout_that_ends_before_a_broker_could_be_lost_is_a_deadline(broker: FakeBroker, client: Client) -> None:
    broker.mute = True
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.infer("sum", frame(1), timeout_s=0.2)
    assert time.monotonic() - started < LOST_MAX_S


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_killed_broker_is_noticed_within_a_second_and_its_successor_found(tmp_path: Path, kind: str) -> None:
    endpoint = f"ipc://{tmp_path}/k.sock" if kind == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    with running(endpoint) as first, Client(endpoint) as client:
        client.infer("sum", frame(1))
        results = client.push("silent", frames(10))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.infer, "silent", frame(1))
            assert first.stdout is not None
            assert first.stdout.readline() == "silent\n"
            first.kill()
            started = time.monotonic()
            with pytest.raises(BrokerLost):
                waiting.result()
            assert time.monotonic() - started < LOST_MAX_S
        with pytest.raises(BrokerLost):
            next(results)
        with running(endpoint):
            assert client.infer("sum", frame(2))["y"].tolist() == [8]


def test_a_broker_that_closed_the_link_while_idle_costs_the_next_call_nothing(
    broker: FakeBroker, client: Client
) -> None:
    client.infer("sum", frame(1))
    broker.call(broker.drop_links)
    broker.wait_until(lambda: not broker._links)
    assert client.infer("sum", frame(2))["y"].tolist() == [8]
    assert broker.greetings == 2


def test_answers_that_came_before_the_link_ended_are_delivered(broker: FakeBroker, client: Client) -> None:
    def answer_and_go(received: Received) -> None:
        broker.answer(received)
        broker.drop_links()

    broker.on_infer = answer_and_go
    client.models()
    assert client.infer("sum", frame(2))["y"].tolist() == [8]


def test_push_hands_over_the_results_before_the_loss_and_raises_at_its_place(
    broker: FakeBroker, client: Client
) -> None:
    def three_and_go(received: Received) -> None:
        if len(broker.received) <= 3:
            broker.answer(received)
        else:
            broker.drop_links()

    broker.on_infer = three_and_go
    results: list[float] = []
    with pytest.raises(BrokerLost) as caught:
        results.extend(float(result["y"][0]) for result in client.push("sum", frames(20), in_flight=4))
    assert results == [0, 4, 8]
    assert caught.value.fields["index"] == 3


def test_bytes_that_are_no_answer_end_the_connection_but_not_the_client(broker: FakeBroker, client: Client) -> None:
    tensors = wire.encode_tensors([("y", "FP32", (1,))])
    for junk in ([b"junk"], [wire.encode_result([1], [1], tensors)], [wire.encode_result([1], [1], tensors), b"x"]):
        broker.on_infer = lambda received, junk=junk: broker.send(received.identity, *junk)
        with pytest.raises(BrokerLost):
            client.infer("sum", frame(1))
    broker.on_infer = None
    assert client.infer("sum", frame(1))["y"].tolist() == [4]


def test_another_broker_means_other_metadata(endpoint: str) -> None:
    with Client(endpoint) as client:
        with FakeBroker(endpoint):
            client.infer("sum", frame(1))
        with FakeBroker(endpoint) as second:
            client.infer("sum", frame(1))
            assert second.controls == [("metadata", "sum")]


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_answer_that_came_with_the_end_of_the_connection_can_still_be_read(tmp_path: Path, kind: str) -> None:
    """All that a broker said before its end lies in the client's socket when the client looks there next."""
    endpoint = f"ipc://{tmp_path}/e.sock" if kind == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    theirs, ours = zmq.Context(), zmq.Context()
    try:
        router = theirs.socket(zmq.ROUTER)
        router.bind(endpoint)
        dealer = greeting._dealer(ours, endpoint)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.send(b"request")
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, b"answer"])
        router.close(5_000)
        theirs.term()
        assert monitor.poll(5_000), "the end of the connection"
        assert dealer.poll(1_000), "the answer"
        assert dealer.recv(zmq.NOBLOCK) == b"answer"
    finally:
        theirs.destroy(linger=0)
        ours.destroy(linger=0)
