"""The client over real sockets against a broker that does what each test says (tests/support/fake_broker.py)."""

from __future__ import annotations

import functools
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_broker
import numpy as np
import pytest
from fake_broker import FakeBroker, Received

from mxpool import Client, wire
from mxpool.errors import (
    BrokerLost,
    Cancelled,
    ClientUnusable,
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

LOST_MAX_S = 1.0


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/b.sock"


@pytest.fixture
def broker(endpoint: str) -> Iterator[FakeBroker]:
    with FakeBroker(endpoint) as broker:
        yield broker


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[Client]:
    with Client(broker.endpoint) as client:
        yield client


def frame(value: float, rows: int = 1) -> dict[str, Any]:
    return {"x": np.full((rows, 4), value, np.float32)}


def frames(count: int) -> Iterator[dict[str, Any]]:
    return (frame(value) for value in range(count))


def sums(results: Iterator[dict[str, Any]]) -> list[float]:
    return [float(result["y"][0]) for result in results]


def full(retry_after_ms: int = 1) -> QueueFull:
    return QueueFull(model="sum", depth=1, limit=1, unit="requests", retry_after_ms=retry_after_ms)


class Held:
    """Keeps every INFER until the test says what becomes of it."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.requests: list[Received] = []
        broker.on_infer = self.requests.append

    def wait(self, count: int) -> None:
        self.broker.wait_until(lambda: len(self.requests) >= count)


class TestAnswers:
    def test_outputs_come_by_name_and_belong_to_the_caller(self, client: Client) -> None:
        outputs = client.infer("sum", frame(2, rows=3))
        assert outputs["y"].tolist() == [8, 8, 8]
        outputs["y"][:] = 1

    def test_outputs_stay_valid_after_close(self, broker: FakeBroker) -> None:
        with Client(broker.endpoint) as client:
            kept = client.infer("large", {"x": np.ones((8, 40_000), np.float32)})
        assert kept["y"].tolist() == [40_000] * 8

    def test_a_request_larger_than_a_batch_is_split_and_joined_in_order(
        self, broker: FakeBroker, client: Client
    ) -> None:
        held = Held(broker)
        x = np.arange(80, dtype=np.float32).reshape(20, 4)
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(client.infer, "sum", {"x": x})
            held.wait(3)
            assert [received.request.rows for received in held.requests] == [8, 8, 4]
            for received in reversed(held.requests):
                broker.call(functools.partial(broker.answer, received))
            assert np.array_equal(result.result()["y"], x.sum(axis=1))

    def test_one_failed_piece_fails_the_request_and_cancels_the_others(
        self, broker: FakeBroker, client: Client
    ) -> None:
        held = Held(broker)
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(client.infer, "sum", frame(1, rows=20))
            held.wait(3)
            broker.call(lambda: broker.refuse(held.requests[1], RunFailed(model="sum", reason="why")))
            with pytest.raises(RunFailed, match="why"):
                result.result()
        ids = [received.request.request_id for received in held.requests]
        broker.wait_until(lambda: broker.cancelled == [ids[0], ids[2]])

    def test_bodies_are_split_to_the_brokers_largest_message(self, broker: FakeBroker, client: Client) -> None:
        broker.max_message_bytes = 40
        assert client.infer("sum", frame(1, rows=5))["y"].tolist() == [4] * 5
        assert [received.request.rows for received in broker.received] == [2, 2, 1]

    def test_duplicate_and_unknown_answers_are_ignored(self, broker: FakeBroker, client: Client) -> None:
        def twice(received: Received) -> None:
            broker.answer(received)
            broker.answer(received)
            broker.send(received.identity, wire.encode_error(999_999, RunFailed(model="sum", reason="stray")))

        broker.on_infer = twice
        assert sums(client.push("sum", frames(300), in_flight=7)) == [4 * value for value in range(300)]
        assert [float(client.infer("sum", frame(v))["y"][0]) for v in range(20)] == [4 * v for v in range(20)]

    def test_threads_that_share_a_client_each_get_their_own_answers(self, client: Client) -> None:
        def work(number: int) -> bool:
            return all(
                client.infer("sum", frame(number * 1000 + turn))["y"][0] == 4 * (number * 1000 + turn)
                for turn in range(100)
            )

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))

    def test_a_connection_is_used_again_and_metadata_asked_once(self, broker: FakeBroker, client: Client) -> None:
        for value in range(5):
            client.infer("sum", frame(value))
        assert broker.greetings == 1
        assert broker.controls == [("metadata", "sum")]

    def test_a_tcp_endpoint_serves_the_same_with_the_time_left_as_deadline(self) -> None:
        with FakeBroker("tcp://127.0.0.1:*") as broker, Client(broker.endpoint) as client:
            assert client.infer("sum", frame(3), timeout_s=20)["y"].tolist() == [12]
            assert sums(client.push("sum", frames(50))) == [4 * value for value in range(50)]
            assert -20_000_000 <= broker.received[0].request.deadline_us < -19_000_000

    def test_on_ipc_the_deadline_is_absolute(self, broker: FakeBroker, client: Client) -> None:
        before = time.monotonic_ns() // 1000
        client.infer("sum", frame(3), timeout_s=20)
        after = time.monotonic_ns() // 1000
        assert before + 20_000_000 <= broker.received[0].request.deadline_us <= after + 20_000_000


class TestRefusals:
    def test_arrays_that_do_not_fit_are_refused_before_anything_is_sent(
        self, broker: FakeBroker, client: Client
    ) -> None:
        with pytest.raises(InvalidTensor, match="float64"):
            client.infer("sum", {"x": np.zeros((1, 4))})
        assert broker.received == []

    def test_arrays_that_fit_a_model_that_was_changed_pass(self, broker: FakeBroker, client: Client) -> None:
        client.infer("sum", frame(1))
        broker.signatures["sum"] = Signature((TensorSpec("x", "FP32", (5,)),), (TensorSpec("y", "FP32", ()),), 8)
        assert client.infer("sum", {"x": np.ones((1, 5), np.float32)})["y"].tolist() == [5]
        with pytest.raises(InvalidTensor, match=r"expected \(1, 5\)"):
            client.infer("sum", frame(1))

    def test_metadata_is_asked_again_after_the_broker_refused_by_it(self, broker: FakeBroker, client: Client) -> None:
        broker.on_infer = lambda received: broker.refuse(
            received, InvalidTensor(tensor="x", reason="changed", got="a", expected="b")
        )
        for _ in range(2):
            with pytest.raises(InvalidTensor, match="changed"):
                client.infer("sum", frame(1))
        assert broker.controls == [("metadata", "sum")] * 2

    def test_a_row_above_the_brokers_limit_is_refused(self, broker: FakeBroker, client: Client) -> None:
        broker.max_message_bytes = 15
        with pytest.raises(InvalidRequest, match="max_message_bytes is 15"):
            client.infer("sum", frame(1))

    def test_an_unknown_model_is_the_brokers_error(self, client: Client) -> None:
        with pytest.raises(UnknownModel):
            client.infer("nothing", frame(1))

    def test_a_loading_model_is_waited_for_within_the_timeout(self, broker: FakeBroker, client: Client) -> None:
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

    def test_retries_are_made_only_if_asked_for_and_only_for_retryable_errors(
        self, broker: FakeBroker, client: Client
    ) -> None:
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

    def test_retries_stop_at_the_deadline(self, broker: FakeBroker, client: Client) -> None:
        broker.on_infer = lambda received: broker.refuse(received, WorkerDied(worker="w", model="sum"))
        started = time.monotonic()
        with pytest.raises(WorkerDied):
            client.infer("sum", frame(1), timeout_s=0.3, retries=10**6)
        assert time.monotonic() - started < 0.5
        assert len(broker.received) >= 2

    def test_a_broker_that_takes_no_more_clients_says_so(self, broker: FakeBroker, client: Client) -> None:
        broker.takes_clients = False
        for _ in range(20):  # the refusal may come before or after our HELLO
            with pytest.raises(Rejected, match="too many clients"):
                client.models()

    def test_a_broker_of_another_version_says_so(self, broker: FakeBroker) -> None:
        broker.greeting_error = UnsupportedVersion(version=1, minimum=2, maximum=3)
        with Client(broker.endpoint) as client, pytest.raises(UnsupportedVersion, match="2 to 3"):
            client.models()


class TestTimeouts:
    def test_the_clients_timer_ends_the_request_and_cancels_it(self, broker: FakeBroker, client: Client) -> None:
        held = Held(broker)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"0\.200 s"):
            client.infer("sum", frame(1), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - started < 0.6
        broker.wait_until(lambda: broker.cancelled == [held.requests[0].request.request_id])

    def test_a_late_answer_goes_to_nobody_and_the_connection_stays_good(
        self, broker: FakeBroker, client: Client
    ) -> None:
        held = Held(broker)
        with pytest.raises(DeadlineExceeded):
            client.infer("sum", frame(1), timeout_s=0.05)
        broker.on_infer = None
        broker.call(lambda: broker.answer(held.requests[0]))
        assert client.infer("sum", frame(7))["y"].tolist() == [28]
        assert broker.greetings == 1

    def test_no_time_left_is_a_deadline_that_passed(self, broker: FakeBroker, client: Client) -> None:
        for timeout_s in (0.0, -1.0):
            with pytest.raises(DeadlineExceeded):
                client.infer("sum", frame(1), timeout_s=timeout_s)
        assert broker.greetings == 0

    def test_infinity_is_a_timeout_and_not_a_number_is_none(self, client: Client) -> None:
        assert client.infer("sum", frame(1), timeout_s=float("inf"))["y"].tolist() == [4]
        with pytest.raises(ValueError, match="not a number"):
            client.infer("sum", frame(1), timeout_s=float("nan"))


class TestPush:
    @pytest.mark.parametrize("in_flight", [1, 3, 64])
    def test_results_come_in_the_order_of_the_frames_whatever_order_answers_have(
        self, broker: FakeBroker, client: Client, in_flight: int
    ) -> None:
        kept: list[Received] = []

        def backwards(received: Received) -> None:
            kept.append(received)
            if len(kept) == in_flight or len(broker.received) == 100:
                broker.answer(*reversed(kept))
                kept.clear()

        broker.on_infer = backwards
        assert sums(client.push("sum", frames(100), in_flight=in_flight)) == [4 * value for value in range(100)]

    def test_no_more_than_in_flight_frames_are_taken_ahead(self, client: Client) -> None:
        taken = 0

        def counting() -> Iterator[dict[str, Any]]:
            nonlocal taken
            for value in range(50):
                taken += 1
                yield frame(value)

        for index, _ in enumerate(client.push("sum", counting(), in_flight=5)):
            assert taken <= index + 5 + 1

    def test_a_frame_that_the_next_one_overwrites_is_sent_as_it_was(self, client: Client) -> None:
        buffer = frame(0)

        def overwriting() -> Iterator[dict[str, Any]]:
            for value in range(40):
                buffer["x"][:] = value
                yield buffer

        assert sums(client.push("sum", overwriting())) == [4 * value for value in range(40)]

    def test_no_frames_give_no_results(self, client: Client) -> None:
        assert list(client.push("sum", [])) == []

    def test_it_raises_at_the_failing_frame_with_its_index_and_cancels_those_after_it(
        self, broker: FakeBroker, client: Client
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

    def test_a_frame_that_does_not_fit_raises_at_its_place_after_the_results_before_it(self, client: Client) -> None:
        results: list[float] = []
        pushed = client.push("sum", [frame(1), frame(2), {"x": np.zeros(3)}, frame(4)])
        with pytest.raises(InvalidTensor) as caught:
            results.extend(float(result["y"][0]) for result in pushed)
        assert results == [4, 8]
        assert caught.value.fields["index"] == 2

    def test_an_error_of_the_callers_iterator_comes_through_unchanged(self, client: Client) -> None:
        def broken() -> Iterator[dict[str, Any]]:
            yield frame(1)
            raise KeyError("camera")

        with pytest.raises(KeyError, match="camera"):
            list(client.push("sum", broken()))
        assert client.infer("sum", frame(2))["y"].tolist() == [8]

    def test_ending_early_cancels_what_is_in_flight_and_keeps_the_connection(
        self, broker: FakeBroker, client: Client
    ) -> None:
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

    def test_a_full_queue_is_waited_out_by_the_brokers_hint_and_order_is_kept(
        self, broker: FakeBroker, client: Client
    ) -> None:
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

    def test_a_queue_that_stays_full_ends_at_the_frames_timeout(self, broker: FakeBroker, client: Client) -> None:
        broker.on_infer = lambda received: broker.refuse(received, full(retry_after_ms=20))
        with pytest.raises(DeadlineExceeded) as caught:
            list(client.push("sum", frames(20), in_flight=8, timeout_s=0.3))
        assert caught.value.fields["index"] == 0
        assert len(broker.received) < 60  # the hint was kept to, and the window shrank

    def test_a_slow_source_of_frames_does_not_hold_results_back(self, broker: FakeBroker, client: Client) -> None:
        seen = threading.Event()

        def camera() -> Iterator[dict[str, Any]]:
            yield frame(0)
            broker.wait_until(lambda: len(broker.received) == 1)
            for value in range(1, 40):
                assert value < 30 or seen.is_set(), "thirty frames were taken, and no result came"
                time.sleep(0.001)  # the time between two frames of a source
                yield frame(value)

        for _ in client.push("sum", camera(), in_flight=64):
            seen.set()

    def test_fewer_than_one_in_flight_is_refused_at_once(self, client: Client) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            client.push("sum", [], in_flight=0)


class TestSubmit:
    def test_futures_complete_with_their_own_answers(self, client: Client) -> None:
        futures = [client.submit("sum", frame(value)) for value in range(200)]
        assert [float(future.result(5)["y"][0]) for future in futures] == [4 * value for value in range(200)]

    def test_arrays_may_change_right_after_submit(self, client: Client) -> None:
        arrays = frame(3)
        future = client.submit("sum", arrays)
        arrays["x"][:] = 100
        assert future.result(5)["y"].tolist() == [12]

    def test_arrays_that_do_not_fit_raise_at_once(self, client: Client) -> None:
        with pytest.raises(InvalidTensor):
            client.submit("sum", {"x": np.zeros((1, 4))})

    def test_a_cancelled_future_frees_its_request_at_the_broker(self, broker: FakeBroker, client: Client) -> None:
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

    def test_a_future_ends_at_its_own_timeout(self, broker: FakeBroker, client: Client) -> None:
        Held(broker)
        slow, quick = client.submit("sum", frame(1), timeout_s=30), client.submit("sum", frame(1), timeout_s=0.1)
        with pytest.raises(DeadlineExceeded):
            quick.result(5)
        assert not slow.done()

    def test_a_lost_broker_fails_every_future_and_the_next_one_reconnects(self, endpoint: str) -> None:
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

    def test_closing_fails_what_is_open(self, broker: FakeBroker) -> None:
        Held(broker)
        client = Client(broker.endpoint)
        future = client.submit("sum", frame(1))
        client.close()
        with pytest.raises(ClientUnusable):
            future.result(0)
        with pytest.raises(ClientUnusable):
            client.submit("sum", frame(1))

    def test_a_callback_may_close_the_client(self, broker: FakeBroker) -> None:
        client = Client(broker.endpoint)
        closed = threading.Event()

        def close(_: object) -> None:
            client.close()
            closed.set()

        client.submit("sum", frame(1)).add_done_callback(close)
        assert closed.wait(5)


class TestLoss:
    def test_no_broker_is_broker_lost_within_a_second(self, endpoint: str) -> None:
        started = time.monotonic()
        with Client(endpoint) as client, pytest.raises(BrokerLost, match="No such file"):
            client.infer("sum", frame(1))
        assert time.monotonic() - started < LOST_MAX_S

    def test_no_broker_on_tcp_is_broker_lost_within_a_second(self) -> None:
        started = time.monotonic()
        with Client("tcp://127.0.0.1:9") as client, pytest.raises(BrokerLost):
            client.infer("sum", frame(1))
        assert time.monotonic() - started < LOST_MAX_S + 0.5

    def test_a_broker_that_does_not_welcome_is_broker_lost(self, broker: FakeBroker, client: Client) -> None:
        broker.mute = True
        started = time.monotonic()
        with pytest.raises(BrokerLost, match=r"nothing on the link within"):
            client.infer("sum", frame(1))
        assert time.monotonic() - started < LOST_MAX_S + 0.5

    def test_a_timeout_that_ends_before_a_broker_could_be_lost_is_a_deadline(
        self, broker: FakeBroker, client: Client
    ) -> None:
        broker.mute = True
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.infer("sum", frame(1), timeout_s=0.2)
        assert time.monotonic() - started < LOST_MAX_S

    @pytest.mark.parametrize("kind", ["ipc", "tcp"])
    def test_a_killed_broker_is_noticed_within_a_second_and_its_successor_found(
        self, tmp_path: Path, kind: str
    ) -> None:
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
        self, broker: FakeBroker, client: Client
    ) -> None:
        client.infer("sum", frame(1))
        broker.call(broker.drop_links)
        broker.wait_until(lambda: not broker._links)
        assert client.infer("sum", frame(2))["y"].tolist() == [8]
        assert broker.greetings == 2

    def test_answers_that_came_before_the_link_ended_are_delivered(self, broker: FakeBroker, client: Client) -> None:
        def answer_and_go(received: Received) -> None:
            broker.answer(received)
            broker.drop_links()

        broker.on_infer = answer_and_go
        client.models()
        assert client.infer("sum", frame(2))["y"].tolist() == [8]

    def test_push_hands_over_the_results_before_the_loss_and_raises_at_its_place(
        self, broker: FakeBroker, client: Client
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

    def test_bytes_that_are_no_answer_end_the_connection_but_not_the_client(
        self, broker: FakeBroker, client: Client
    ) -> None:
        tensors = wire.encode_tensors([("y", "FP32", (1,))])
        for junk in ([b"junk"], [wire.encode_result([1], [1], tensors)], [wire.encode_result([1], [1], tensors), b"x"]):
            broker.on_infer = lambda received, junk=junk: broker.send(received.identity, *junk)
            with pytest.raises(BrokerLost):
                client.infer("sum", frame(1))
        broker.on_infer = None
        assert client.infer("sum", frame(1))["y"].tolist() == [4]

    def test_another_broker_means_other_metadata(self, endpoint: str) -> None:
        with Client(endpoint) as client:
            with FakeBroker(endpoint):
                client.infer("sum", frame(1))
            with FakeBroker(endpoint) as second:
                client.infer("sum", frame(1))
                assert second.controls == [("metadata", "sum")]


class Interrupt(Exception):
    """What a signal handler of the program raises."""


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Raises Interrupt in the main thread after a tenth of a second."""

    def handler(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupted")
class TestInterrupts:
    @pytest.mark.parametrize("way", ["infer", "push"])
    def test_a_handler_that_raises_gets_through_at_once_and_the_request_is_freed(
        self, broker: FakeBroker, client: Client, way: str
    ) -> None:
        Held(broker)
        started = time.monotonic()
        with pytest.raises(Interrupt):
            client.infer("sum", frame(1)) if way == "infer" else list(client.push("sum", frames(3)))
        assert time.monotonic() - started < LOST_MAX_S
        broker.wait_until(lambda: not broker._links)  # the end of its link frees a client's requests
        broker.on_infer = None
        assert client.infer("sum", frame(1))["y"].tolist() == [4]


class TestLifetime:
    def test_a_closed_client_refuses_use_and_may_be_closed_again(self, broker: FakeBroker) -> None:
        client = Client(broker.endpoint)
        client.infer("sum", frame(1))
        client.close()
        client.close()
        for use in (
            client.models,
            client.status,
            lambda: client.infer("sum", frame(1)),
            lambda: client.push("sum", []),
        ):
            with pytest.raises(ClientUnusable):
                use()

    def test_closing_ends_the_calls_that_other_threads_are_in(self, broker: FakeBroker) -> None:
        held = Held(broker)
        client = Client(broker.endpoint)
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(client.infer, "sum", frame(1)) for _ in range(3)]
            held.wait(3)
            client.close()
            for call in calls:
                with pytest.raises(ClientUnusable):
                    call.result(LOST_MAX_S)

    def test_an_unused_client_opens_nothing(self, endpoint: str) -> None:
        with Client(endpoint):
            pass

    def test_control_passes_verbs_and_arguments_and_status_and_models_use_it(self, client: Client) -> None:
        assert client.control("slots", "sum", verbose=True) == {"verb": "slots", "arguments": {"verbose": True}}
        assert client.models() == ["sum", "ranking", "large", "silent"]
        assert client.status()["verb"] == "stats"
        assert client.metadata("sum")["max_batch_size"] == 8

    def test_a_forked_child_may_not_use_it_and_the_parent_goes_on(self, broker: FakeBroker) -> None:
        done = script(
            """
            import os, sys, numpy as np
            from mxpool import Client
            from mxpool.errors import ClientUnusable
            arrays = {"x": np.ones((1, 4), np.float32)}
            with Client(sys.argv[1]) as client:
                client.infer("sum", arrays)
                client.submit("sum", arrays).result(5)
                pushed = client.push("sum", [arrays] * 20)
                next(pushed)
                child = os.fork()
                if child == 0:
                    refused = 0
                    calls = [lambda: client.infer("sum", arrays), client.models, lambda: client.submit("sum", arrays)]
                    for call in calls:
                        try:
                            call()
                        except ClientUnusable:
                            refused += 1
                    del pushed
                    client.close()
                    sys.exit(refused)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
                assert len(list(pushed)) == 19
                for _ in range(100):
                    client.infer("sum", arrays)
                print("parent went on")
            """,
            broker.endpoint,
        )
        assert done.stdout == "parent went on\n", done.stderr
        assert done.returncode == 0

    def test_a_child_that_outlives_its_parent_does_not_hide_its_death(self, broker: FakeBroker) -> None:
        text = textwrap.dedent(
            """
            import os, sys
            from mxpool import Client
            client = Client(sys.argv[1])
            client.models()
            if os.fork() == 0:
                os.close(1)
                sys.stdin.read()  # until the test lets go of the other end
                os._exit(0)
            os._exit(0)
            """
        )
        with subprocess.Popen([sys.executable, "-c", text, broker.endpoint], stdin=subprocess.PIPE) as parent:
            assert parent.wait() == 0
            broker.wait_until(lambda: broker.greetings == 1 and not broker._links)

    @pytest.mark.parametrize("way", ["submit", "push", "infer in a thread"])
    def test_an_interpreter_with_unanswered_requests_exits_at_once(self, broker: FakeBroker, way: str) -> None:
        Held(broker)
        done = script(
            """
            import sys, threading, time, numpy as np
            from mxpool import Client
            arrays = {"x": np.ones((1, 4), np.float32)}
            client = Client(sys.argv[1])
            if sys.argv[2] == "submit":
                futures = [client.submit("sum", arrays) for _ in range(100)]
            elif sys.argv[2] == "push":
                pushed = client.push("sum", [arrays] * 5, timeout_s=0.2)
                try:
                    next(pushed)
                except Exception as error:
                    print(error)
            else:
                thread = threading.Thread(target=client.infer, args=("sum", arrays), daemon=True)
                thread.start()
                while not client._busy:
                    time.sleep(0.01)
            print("returning")
            """,
            broker.endpoint,
            way,
            timeout_s=3,
        )
        assert "returning" in done.stdout
        assert done.returncode == 0

    def test_an_interpreter_whose_broker_is_not_there_exits_at_once(self, endpoint: str) -> None:
        done = script(
            """
            import sys, numpy as np
            from mxpool import Client
            from mxpool.errors import BrokerLost
            client, lost = Client(sys.argv[1]), 0
            for _ in range(100):
                try:
                    client.infer("sum", {"x": np.ones((1, 4), np.float32)})
                except BrokerLost:
                    lost += 1
            print(lost)
            """,
            endpoint,
            timeout_s=3,
        )
        assert done.stdout == "100\n", done.stderr
        assert done.returncode == 0


class TestArena:
    LARGE = np.arange(2 * 40_000, dtype=np.float32).reshape(2, 40_000) % 7

    def test_a_large_request_goes_by_the_arena_and_a_small_one_does_not(
        self, broker: FakeBroker, client: Client
    ) -> None:
        assert np.array_equal(client.infer("large", {"x": self.LARGE})["y"], self.LARGE.sum(axis=1))
        client.infer("sum", frame(1))
        large, small = (received.request.extensions for received in broker.received)
        assert (large["arena"][1:], small) == ([0, self.LARGE.nbytes], {})
        assert len(broker.arena_maps) == 1

    def test_a_stream_of_large_frames_reuses_its_regions(self, broker: FakeBroker, client: Client) -> None:
        results = client.push("large", ({"x": self.LARGE + value} for value in range(300)), in_flight=8)
        for value, result in enumerate(results):
            assert np.array_equal(result["y"], (self.LARGE + value).sum(axis=1))
        offsets = {received.request.extensions["arena"][1] for received in broker.received}
        assert len(offsets) <= 9
        assert len(broker.arena_maps) == 1

    def test_a_region_is_kept_after_a_timeout_until_the_brokers_last_word(
        self, broker: FakeBroker, client: Client
    ) -> None:
        held = Held(broker)
        offsets = []
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                client.infer("large", {"x": self.LARGE}, timeout_s=0.1)
        broker.wait_until(lambda: len(broker.cancelled) == 2)
        broker.call(lambda: broker.refuse(held.requests[0], Cancelled()))
        broker.on_infer = None
        client.models()  # reads what the broker said before
        client.infer("large", {"x": self.LARGE})
        offsets = [received.request.extensions["arena"][1] for received in broker.received]
        assert offsets[0] == offsets[2] == 0
        assert offsets[1] == self.LARGE.nbytes

    def test_a_frame_that_a_full_queue_refused_is_sent_again_from_where_it_lies(
        self, broker: FakeBroker, client: Client
    ) -> None:
        def refuse_first(received: Received) -> None:
            if len(broker.received) == 1:
                broker.refuse(received, full())
            else:
                broker.answer(received)

        broker.on_infer = refuse_first
        (result,) = client.push("large", [{"x": self.LARGE}])
        assert np.array_equal(result["y"], self.LARGE.sum(axis=1))
        first, second = (received.request.extensions["arena"] for received in broker.received)
        assert first == second

    @pytest.mark.parametrize("says_so", [True, False])
    def test_without_an_arena_large_requests_go_as_messages(
        self, broker: FakeBroker, client: Client, says_so: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        broker.arenas = False
        broker.offers_arenas = not says_so
        for _ in range(3):
            assert np.array_equal(client.infer("large", {"x": self.LARGE})["y"], self.LARGE.sum(axis=1))
        assert [received.request.extensions for received in broker.received] == [{}] * 3
        assert len(caplog.records) == (0 if says_so else 1)

    def test_a_full_arena_is_no_error(
        self, broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mxpool.client.exchange.ARENA_BYTES", self.LARGE.nbytes)
        results = list(client.push("large", [{"x": self.LARGE}] * 6))
        assert all(np.array_equal(result["y"], self.LARGE.sum(axis=1)) for result in results)
        by_message = [received for received in broker.received if not received.request.extensions]
        assert 0 < len(by_message) < 6

    def test_a_new_connection_has_a_new_arena(self, endpoint: str) -> None:
        with Client(endpoint) as client:
            for _ in range(2):
                with FakeBroker(endpoint) as broker:
                    assert np.array_equal(client.infer("large", {"x": self.LARGE})["y"], self.LARGE.sum(axis=1))
                    assert len(broker.arena_maps) == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class running:  # noqa: N801 - reads as a verb where it is used
    """The fake broker as a process of its own."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, fake_broker.__file__, endpoint]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def script(text: str, *arguments: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
