from __future__ import annotations

import threading

import pytest

from mxpool.client.exchange import Exchange
from mxpool.client.submitter import Job, Submitter
from mxpool.client.wakeup import Wakeup
from mxpool.errors import BrokerLost, ClientUnusable

LOST = BrokerLost(endpoint="e", reason="not there")


def no_broker(_: Wakeup, __: float) -> Exchange:
    raise LOST


def job() -> Job:
    return Job("m", [], 0, 0)


def test_close_is_not_overlooked_by_a_turn_that_takes_its_signal() -> None:
    submitter = Submitter(no_broker, lambda: None)
    submitter._stopping = True  # what close does, before the thread looks at it
    submitter._wakeup.set()
    turn = threading.Thread(target=submitter._turn, daemon=True)
    turn.start()
    turn.join(5)
    assert not turn.is_alive()


def test_no_connection_fails_the_future_and_not_the_thread() -> None:
    ended = threading.Event()
    submitter = Submitter(no_broker, ended.set)
    submitter.start()
    for _ in range(3):
        tried = job()
        submitter.put(tried)
        assert tried.future.exception(5) is LOST
    submitter.close()
    assert ended.is_set()


def test_a_job_that_comes_after_the_end_is_refused_and_not_forgotten() -> None:
    submitter = Submitter(no_broker, lambda: None)
    submitter.start()
    submitter.close()
    late = job()
    submitter.put(late)
    with pytest.raises(ClientUnusable):
        late.future.result(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_a_fault_of_ours_leaves_no_future_open() -> None:
    threads: list[str] = []

    def faulty(_: Wakeup, __: float) -> Exchange:
        threads.append(threading.current_thread().name)
        raise RuntimeError

    submitter = Submitter(faulty, lambda: None)
    submitter.start()
    for _ in range(2):
        lost = job()
        submitter.put(lost)
        with pytest.raises(ClientUnusable):
            lost.future.result(5)
    assert threads == ["mxpool-submit"]
    submitter.close()


def test_a_job_cancelled_before_it_is_sent_is_not_sent() -> None:
    opened: list[float] = []

    def count(_: Wakeup, timeout_s: float) -> Exchange:
        opened.append(timeout_s)
        raise LOST

    submitter = Submitter(count, lambda: None)
    cancelled = job()
    submitter.put(cancelled)
    assert cancelled.future.cancel()
    submitter.start()
    following = job()
    submitter.put(following)
    assert following.future.exception(5) is LOST
    submitter.close()
    assert len(opened) == 1
