"""``push``: order, windows, full queues, failing frames."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from client_rig import frame, frames, full, sums
from fake_broker import FakeBroker, Received

from mxpool import Client
from mxpool.errors import DeadlineExceeded, InvalidTensor, RunFailed


@pytest.mark.parametrize("in_flight", [1, 3, 64])
def test_results_come_in_the_order_of_the_frames_whatever_order_answers_have(
    broker: FakeBroker, client: Client, in_flight: int
) -> None:
    kept: list[Received] = []

    def backwards(received: Received) -> None:
        kept.append(received)
        if len(kept) == in_flight or len(broker.received) == 100:
            broker.answer(*reversed(kept))
            kept.clear()

    broker.on_infer = backwards
    assert sums(client.push("sum", frames(100), in_flight=in_flight)) == [4 * value for value in range(100)]


def test_no_more_than_in_flight_frames_are_taken_ahead(client: Client) -> None:
    taken = 0

    def counting() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for value in range(50):
            taken += 1
            yield frame(value)

    for index, _ in enumerate(client.push("sum", counting(), in_flight=5)):
        assert taken <= index + 5 + 1


def test_a_frame_that_the_next_one_overwrites_is_sent_as_it_was(client: Client) -> None:
    buffer = frame(0)

    def overwriting() -> Iterator[dict[str, Any]]:
        for value in range(40):
            buffer["x"][:] = value
            yield buffer

    assert sums(client.push("sum", overwriting())) == [4 * value for value in range(40)]


def test_no_frames_give_no_results(client: Client) -> None:
    assert list(client.push("sum", [])) == []


def test_it_raises_at_the_failing_frame_with_its_index_and_cancels_those_after_it(
    broker: FakeBroker, client: Client
) -> None:
    def fail_one(received: Received) -> None:
        if received.body == frame(5)["x"].tobytes():
            broker.refuse(received, RunFailed(model="sum", reason="why"))
        elif received.body < frame(20)["x"].tobytes():
            broker.answer(received)

    broker.on_infer = fail_one
    with pytest.raises(RunFailed) as caught:
        list(client.push("sum", frames(100), in_flight=8))
    assert caught.value.fields["index"] == 5
    assert broker.greetings == 1
    client.models()


def test_a_frame_that_does_not_fit_raises_at_its_place_after_the_results_before_it(client: Client) -> None:
    results: list[float] = []
    pushed = client.push("sum", [frame(1), frame(2), {"x": np.zeros(3)}, frame(4)])
    with pytest.raises(InvalidTensor) as caught:
        results.extend(float(result["y"][0]) for result in pushed)
    assert results == [4, 8]
    assert caught.value.fields["index"] == 2


def test_an_error_of_the_callers_iterator_comes_through_unchanged(client: Client) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield frame(1)
        raise KeyError("camera")

    with pytest.raises(KeyError, match="camera"):
        list(client.push("sum", broken()))
    assert client.infer("sum", frame(2))["y"].tolist() == [8]


def test_ending_early_cancels_what_is_in_flight_and_keeps_the_connection(broker: FakeBroker, client: Client) -> None:
    held: list[Received] = []

    def answer_the_first_of_four(received: Received) -> None:
        held.append(received)
        if len(held) == 4:
            broker.answer(held[0])

    broker.on_infer = answer_the_first_of_four
    results = client.push("sum", frames(10), in_flight=4)
    next(results)
    results.close()  # type: ignore[attr-defined]
    broker.wait_until(lambda: len(broker.cancelled) >= 3)
    assert broker.cancelled == [received.request.request_id for received in held[1:]]
    broker.on_infer = None
    assert client.infer("sum", frame(2))["y"].tolist() == [8]
    assert broker.greetings == 1


def test_a_full_queue_is_waited_out_by_the_brokers_hint_and_order_is_kept(broker: FakeBroker, client: Client) -> None:
    queue: list[Received] = []
    refused = 0

    def drain() -> None:
        broker.answer(*queue)
        queue.clear()

    def queue_of_four(received: Received) -> None:
        nonlocal refused
        if len(queue) == 4:
            refused += 1
            broker.refuse(received, full(retry_after_ms=1))
            return
        queue.append(received)
        if len(queue) == 1:
            broker.call(drain)  # once it has read all that has come

    broker.on_infer = queue_of_four
    assert sums(client.push("sum", frames(200), in_flight=32, timeout_s=5)) == [4 * v for v in range(200)]
    assert refused > 0


def test_a_queue_that_stays_full_ends_at_the_frames_timeout(broker: FakeBroker, client: Client) -> None:
    broker.on_infer = lambda received: broker.refuse(received, full(retry_after_ms=20))
    with pytest.raises(DeadlineExceeded) as caught:
        list(client.push("sum", frames(20), in_flight=8, timeout_s=0.3))
    assert caught.value.fields["index"] == 0
    assert len(broker.received) < 60  # the hint was kept to, and the window shrank


def test_a_slow_source_of_frames_does_not_hold_results_back(broker: FakeBroker, client: Client) -> None:
    seen = threading.Event()

    def camera() -> Iterator[dict[str, Any]]:
        yield frame(0)
        broker.wait_until(lambda: len(broker.received) == 1)
        for value in range(1, 40):
            assert value < 30 or seen.is_set(), "thirty frames were taken, and no result came"
            seen.wait(0.001)  # the time between two frames of a source
            yield frame(value)

    for _ in client.push("sum", camera(), in_flight=64):
        seen.set()


def test_fewer_than_one_in_flight_is_refused_at_once(client: Client) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        client.push("sum", [], in_flight=0)
