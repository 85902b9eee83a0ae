"""Faults that an attack on the whole has found once."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import numpy as np
import pytest
from gates import ends_of, x
from pool import Pool, echo, wait_until
from raw_peer import RawPeer, infer_header

from mxpool import wire
from mxpool.errors import MxPoolError

FLOATS = 250_000  # 1 MB a row


def test_answers_that_libzmq_holds_are_sent_before_the_broker_ends() -> None:
    requests, body = 30, np.ones((1, FLOATS), np.float32).tobytes()
    big = echo(max_batch_size=1, options={"tensors": f"x:FP32:{FLOATS}"})
    with Pool({"echo": big}) as pool, RawPeer(pool.endpoint) as slow:
        for number in range(1, requests + 1):
            slow.send(infer_header(number, np.ones((1, FLOATS), np.float32)), body)
        wait_until(lambda: pool.model()["ok"] == requests, "all requests answered, and none of the answers read")
        pool.kill(signal.SIGTERM)
        answers = [slow.answer() for _ in range(requests)]
        assert all(isinstance(answer, wire.Result) for answer in answers)
        assert pool.wait(5) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that is what the callback does
def test_a_callback_that_ends_its_thread_leaves_every_other_future_settled() -> None:
    def leave(_: Any) -> None:
        raise SystemExit

    with Pool({"echo": echo()}) as pool, pool.client() as client:
        futures = [client.submit("echo", x(number)) for number in range(30)]
        futures[10].add_done_callback(leave)
        for future in futures:
            with contextlib.suppress(MxPoolError):
                future.result(10)
        assert all(future.done() for future in futures)
        assert client.submit("echo", x(5)).result(10)["y"][0, 0] == 5


def test_a_stopped_worker_goes_with_a_killed_broker() -> None:
    with Pool({"echo": echo()}) as pool:
        pids = pool.worker_pids()
        with ends_of(pids) as gone:
            for process in pool.processes():
                if process.pid in pids:
                    process.suspend()
            pool.kill()
            assert pool.wait() == -signal.SIGKILL
            assert gone(3.0)
        pool.start()
        pool.wait_ready()


@pytest.mark.parametrize("in_flight", [0, -1, float("nan"), 1.5, True])
def test_a_push_of_no_sensible_width_is_refused(in_flight: Any) -> None:
    with Pool({"echo": echo()}) as pool, pool.client() as client, pytest.raises(ValueError, match="in_flight"):
        client.push("echo", iter([x(1)]), in_flight=in_flight)
