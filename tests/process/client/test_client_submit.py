"""``submit``: futures of the client's I/O thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from client_rig import LOST_MAX_S, Held, frame
from fake_broker import FakeBroker

from mxpool import Client
from mxpool.errors import BrokerLost, ClientUnusable, DeadlineExceeded, InvalidTensor


def test_futures_complete_with_their_own_answers(client: Client) -> None:
    futures = [client.submit("sum", frame(value)) for value in range(200)]
    assert [float(future.result(5)["y"][0]) for future in futures] == [4 * value for value in range(200)]


def test_arrays_may_change_right_after_submit(client: Client) -> None:
    arrays = frame(3)
    future = client.submit("sum", arrays)
    arrays["x"][:] = 100
    assert future.result(5)["y"].tolist() == [12]


def test_arrays_that_do_not_fit_raise_at_once(client: Client) -> None:
    with pytest.raises(InvalidTensor):
        client.submit("sum", {"x": np.zeros((1, 4))})


def test_a_cancelled_future_frees_its_request_at_the_broker(broker: FakeBroker, client: Client) -> None:
    held = Held(broker)
    future = client.submit("sum", frame(1))
    held.wait(1)
    assert future.cancel()
    broker.wait_until(lambda: broker.cancelled == [held.requests[0].request.request_id])
    broker.call(lambda: broker.answer(held.requests[0]))
    broker.on_infer = None
    assert client.submit("sum", frame(2)).result(5)["y"].tolist() == [8]
    with pytest.raises(CancelledError):
        future.result()


def test_a_future_ends_at_its_own_timeout(broker: FakeBroker, client: Client) -> None:
    Held(broker)
    slow, quick = client.submit("sum", frame(1), timeout_s=30), client.submit("sum", frame(1), timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        quick.result(5)
    assert not slow.done()


def test_a_lost_broker_fails_every_future_and_the_next_one_reconnects(endpoint: str) -> None:
    with Client(endpoint) as client:
        with FakeBroker(endpoint) as broker:
            held = Held(broker)
            futures = [client.submit("sum", frame(1)) for _ in range(5)]
            held.wait(5)
        for future in futures:
            with pytest.raises(BrokerLost):
                future.result(LOST_MAX_S)
        with FakeBroker(endpoint):
            assert client.submit("sum", frame(1)).result(5)["y"].tolist() == [4]


def test_closing_fails_what_is_open(broker: FakeBroker) -> None:
    Held(broker)
    client = Client(broker.endpoint)
    future = client.submit("sum", frame(1))
    client.close()
    with pytest.raises(ClientUnusable):
        future.result(0)
    with pytest.raises(ClientUnusable):
        client.submit("sum", frame(1))


def test_a_callback_may_close_the_client(broker: FakeBroker) -> None:
    client = Client(broker.endpoint)
    closed = threading.Event()

    def close(_: object) -> None:
        client.close()
        closed.set()

    client.submit("sum", frame(1)).add_done_callback(close)
    assert closed.wait(5)
