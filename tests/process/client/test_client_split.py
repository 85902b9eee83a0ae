"""Requests larger than a batch, and a queue that they fill by themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from client_rig import full
from fake_broker import FakeBroker, Received

from mxpool import Client
from mxpool.errors import DeadlineExceeded, QueueFull, RunFailed

PIECES = 100
X = np.arange(PIECES * 8 * 4, dtype=np.float32).reshape(PIECES * 8, 4)
LARGE = np.ones((3 * 8, 40_000), np.float32)


def run(client: Client, way: str, x: npt.NDArray[np.float32], timeout_s: float = 10.0) -> npt.NDArray[np.float32]:
    if way == "infer":
        y: npt.NDArray[np.float32] = client.infer("sum", {"x": x}, timeout_s)["y"]
    else:
        y = client.submit("sum", {"x": x}, timeout_s).result(20)["y"]
    return y


class QueueOf:
    """A queue that refuses what is above its limit, and is drained once all was read that had come."""

    def __init__(self, broker: FakeBroker, limit: int) -> None:
        self.broker = broker
        self.limit = limit
        self.waiting: list[Received] = []
        self.refused = 0
        broker.on_infer = self.take

    def take(self, received: Received) -> None:
        if len(self.waiting) == self.limit:
            self.refused += 1
            self.broker.refuse(received, full(retry_after_ms=1))
            return
        self.waiting.append(received)
        if len(self.waiting) == 1:
            self.broker.call(self.drain)

    def drain(self) -> None:
        self.broker.answer(*self.waiting)
        self.waiting.clear()


@pytest.mark.parametrize("way", ["infer", "submit"])
def test_a_request_of_more_pieces_than_the_queue_holds_is_answered_whole(
    broker: FakeBroker, client: Client, way: str
) -> None:
    queue = QueueOf(broker, 4)
    assert np.array_equal(run(client, way, X), X.sum(axis=1))
    assert queue.refused > 0


@pytest.mark.parametrize("way", ["infer", "submit"])
def test_a_request_of_one_piece_is_refused_by_a_full_queue(broker: FakeBroker, client: Client, way: str) -> None:
    broker.on_infer = lambda received: broker.refuse(received, full())
    with pytest.raises(QueueFull):
        run(client, way, X[:8])
    assert len(broker.received) == 1


@pytest.mark.parametrize("way", ["infer", "submit"])
def test_a_queue_that_stays_full_ends_a_split_request_at_its_timeout(
    broker: FakeBroker, client: Client, way: str
) -> None:
    broker.on_infer = lambda received: broker.refuse(received, full(retry_after_ms=20))
    with pytest.raises(DeadlineExceeded):
        run(client, way, X[:160], timeout_s=0.3)
    assert len(broker.received) <= 20 + 0.3 / 0.020  # one a pause, once it knows that nothing is taken
    broker.on_infer = None
    assert np.array_equal(run(client, way, X[:8]), X[:8].sum(axis=1))


def test_pieces_refused_of_a_request_that_failed_leave_the_arena_and_are_not_sent_again(
    broker: FakeBroker, client: Client
) -> None:
    def the_last_fails(received: Received) -> None:
        last = len(broker.received) == 3
        broker.refuse(received, RunFailed(model="large", reason="why") if last else full(retry_after_ms=1000))

    broker.on_infer = the_last_fails
    with pytest.raises(RunFailed):
        client.infer("large", {"x": LARGE})
    broker.on_infer = None
    client.infer("large", {"x": LARGE})
    offsets = [received.request.extensions["arena"][1] for received in broker.received]
    assert offsets[3:] == offsets[:3] == [0, LARGE.nbytes // 3, 2 * LARGE.nbytes // 3]
