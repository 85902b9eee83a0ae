"""Large requests through memory that client and broker share."""

from __future__ import annotations

import numpy as np
import pytest
from client_rig import Held, frame, full
from fake_broker import FakeBroker, Received

from mxpool import Client
from mxpool.errors import Cancelled, DeadlineExceeded

LARGE = np.arange(2 * 40_000, dtype=np.float32).reshape(2, 40_000) % 7


def test_a_large_request_goes_by_the_arena_and_a_small_one_does_not(broker: FakeBroker, client: Client) -> None:
    assert np.array_equal(client.infer("large", {"x": LARGE})["y"], LARGE.sum(axis=1))
    client.infer("sum", frame(1))
    large, small = (received.request.extensions for received in broker.received)
    assert (large["arena"][1:], small) == ([0, LARGE.nbytes], {})
    assert len(broker.arena_maps) == 1


def test_a_stream_of_large_frames_reuses_its_regions(broker: FakeBroker, client: Client) -> None:
    results = client.push("large", ({"x": LARGE + value} for value in range(300)), in_flight=8)
    for value, result in enumerate(results):
        assert np.array_equal(result["y"], (LARGE + value).sum(axis=1))
    offsets = {received.request.extensions["arena"][1] for received in broker.received}
    assert len(offsets) <= 9
    assert len(broker.arena_maps) == 1


def test_a_region_is_kept_after_a_timeout_until_the_brokers_last_word(broker: FakeBroker, client: Client) -> None:
    held = Held(broker)
    offsets = []
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            client.infer("large", {"x": LARGE}, timeout_s=0.1)
    broker.wait_until(lambda: len(broker.cancelled) == 2)
    broker.call(lambda: broker.refuse(held.requests[0], Cancelled()))
    broker.on_infer = None
    client.models()  # reads what the broker said before
    client.infer("large", {"x": LARGE})
    offsets = [received.request.extensions["arena"][1] for received in broker.received]
    assert offsets[0] == offsets[2] == 0
    assert offsets[1] == LARGE.nbytes


def test_a_frame_that_a_full_queue_refused_is_sent_again_from_where_it_lies(broker: FakeBroker, client: Client) -> None:
    def refuse_first(received: Received) -> None:
        if len(broker.received) == 1:
            broker.refuse(received, full())
        else:
            broker.answer(received)

    broker.on_infer = refuse_first
    (result,) = client.push("large", [{"x": LARGE}])
    assert np.array_equal(result["y"], LARGE.sum(axis=1))
    first, second = (received.request.extensions["arena"] for received in broker.received)
    assert first == second


@pytest.mark.parametrize("says_so", [True, False])
def test_without_an_arena_large_requests_go_as_messages(
    broker: FakeBroker, client: Client, says_so: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker.arenas = False
    broker.offers_arenas = not says_so
    for _ in range(3):
        assert np.array_equal(client.infer("large", {"x": LARGE})["y"], LARGE.sum(axis=1))
    assert [received.request.extensions for received in broker.received] == [{}] * 3
    assert len(caplog.records) == (0 if says_so else 1)


def test_a_full_arena_is_no_error(broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxpool.client.exchange.ARENA_BYTES", LARGE.nbytes)
    results = list(client.push("large", [{"x": LARGE}] * 6))
    assert all(np.array_equal(result["y"], LARGE.sum(axis=1)) for result in results)
    by_message = [received for received in broker.received if not received.request.extensions]
    assert 0 < len(by_message) < 6


def test_a_new_connection_has_a_new_arena(endpoint: str) -> None:
    with Client(endpoint) as client:
        for _ in range(2):
            with FakeBroker(endpoint) as broker:
                assert np.array_equal(client.infer("large", {"x": LARGE})["y"], LARGE.sum(axis=1))
                assert len(broker.arena_maps) == 1
