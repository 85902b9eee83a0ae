"""What the client and its broker refuse, and what the client then asks or tries again."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from client_rig import Held, frame, full
from fake_broker import FakeBroker, Received

from mxpool import Client
from mxpool.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidTensor,
    ModelUnavailable,
    QueueFull,
    Rejected,
    RunFailed,
    UnknownModel,
    UnsupportedVersion,
    WorkerDied,
)
from mxpool.tensors import Signature, TensorSpec


def test_arrays_that_do_not_fit_are_refused_before_anything_is_sent(broker: FakeBroker, client: Client) -> None:
    with pytest.raises(InvalidTensor, match="float64"):
        client.infer("sum", {"x": np.zeros((1, 4))})
    assert broker.received == []


def test_arrays_that_fit_a_model_that_was_changed_pass(broker: FakeBroker, client: Client) -> None:
    client.infer("sum", frame(1))
    broker.signatures["sum"] = Signature((TensorSpec("x", "FP32", (5,)),), (TensorSpec("y", "FP32", ()),), 8)
    assert client.infer("sum", {"x": np.ones((1, 5), np.float32)})["y"].tolist() == [5]
    with pytest.raises(InvalidTensor, match=r"expected \(1, 5\)"):
        client.infer("sum", frame(1))


def test_metadata_is_asked_again_after_the_broker_refused_by_it(broker: FakeBroker, client: Client) -> None:
    broker.on_infer = lambda received: broker.refuse(
        received, InvalidTensor(tensor="x", reason="changed", got="a", expected="b")
    )
    for _ in range(2):
        with pytest.raises(InvalidTensor, match="changed"):
            client.infer("sum", frame(1))
    assert broker.controls == [("metadata", "sum")] * 2


def test_a_row_above_the_brokers_limit_is_refused(broker: FakeBroker, client: Client) -> None:
    broker.max_message_bytes = 15
    with pytest.raises(InvalidRequest, match="max_message_bytes is 15"):
        client.infer("sum", frame(1))


def test_an_unknown_model_is_the_brokers_error(client: Client) -> None:
    with pytest.raises(UnknownModel):
        client.infer("nothing", frame(1))


def test_a_loading_model_is_waited_for_within_the_timeout(broker: FakeBroker, client: Client) -> None:
    asked = 0

    def metadata(model: str) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise ModelUnavailable(model=model, reason="loading")
        return broker.signatures[model].to_wire()

    broker.on_metadata = metadata
    assert client.infer("sum", frame(1))["y"].tolist() == [4]
    asked = -1000
    with Client(broker.endpoint) as other, pytest.raises(ModelUnavailable):
        other.infer("sum", frame(1), timeout_s=0.2)


def test_retries_are_made_only_if_asked_for_and_only_for_retryable_errors(broker: FakeBroker, client: Client) -> None:
    def refuse_odd(received: Received) -> None:
        if len(broker.received) % 3:
            broker.refuse(received, full())
        else:
            broker.answer(received)

    broker.on_infer = refuse_odd
    assert client.infer("sum", frame(1), retries=2)["y"].tolist() == [4]
    with pytest.raises(QueueFull):
        client.infer("sum", frame(1))
    broker.on_infer = lambda received: broker.refuse(received, RunFailed(model="sum", reason="why"))
    before = len(broker.received)
    with pytest.raises(RunFailed):
        client.infer("sum", frame(1), retries=5)
    assert len(broker.received) == before + 1


def test_retries_stop_at_the_deadline(broker: FakeBroker, client: Client) -> None:
    broker.on_infer = lambda received: broker.refuse(received, WorkerDied(worker="w", model="sum"))
    started = time.monotonic()
    with pytest.raises(WorkerDied):
        client.infer("sum", frame(1), timeout_s=0.3, retries=10**6)
    assert time.monotonic() - started < 0.5
    assert len(broker.received) >= 2


def test_a_broker_that_takes_no_more_clients_says_so(broker: FakeBroker, client: Client) -> None:
    broker.takes_clients = False
    for _ in range(20):  # the refusal may come before or after our HELLO
        with pytest.raises(Rejected, match="too many clients"):
            client.models()


def test_a_broker_of_another_version_says_so(broker: FakeBroker) -> None:
    broker.greeting_error = UnsupportedVersion(version=1, minimum=2, maximum=3)
    with Client(broker.endpoint) as client, pytest.raises(UnsupportedVersion, match="2 to 3"):
        client.models()


def test_the_clients_timer_ends_the_request_and_cancels_it(broker: FakeBroker, client: Client) -> None:
    held = Held(broker)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"0\.200 s"):
        client.infer("sum", frame(1), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 0.6
    broker.wait_until(lambda: broker.cancelled == [held.requests[0].request.request_id])


def test_a_late_answer_goes_to_nobody_and_the_connection_stays_good(broker: FakeBroker, client: Client) -> None:
    held = Held(broker)
    with pytest.raises(DeadlineExceeded):
        client.infer("sum", frame(1), timeout_s=0.05)
    broker.on_infer = None
    broker.call(lambda: broker.answer(held.requests[0]))
    assert client.infer("sum", frame(7))["y"].tolist() == [28]
    assert broker.greetings == 1


def test_no_time_left_is_a_deadline_that_passed(broker: FakeBroker, client: Client) -> None:
    for timeout_s in (0.0, -1.0):
        with pytest.raises(DeadlineExceeded):
            client.infer("sum", frame(1), timeout_s=timeout_s)
    assert broker.greetings == 0


def test_infinity_is_a_timeout_and_not_a_number_is_none(client: Client) -> None:
    assert client.infer("sum", frame(1), timeout_s=float("inf"))["y"].tolist() == [4]
    with pytest.raises(ValueError, match="not a number"):
        client.infer("sum", frame(1), timeout_s=float("nan"))
