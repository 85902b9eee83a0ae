"""Closing, forking, interrupting, exiting."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_rig import LOST_MAX_S, Held, frame, frames, script
from fake_broker import FakeBroker

from mxpool import Client
from mxpool.errors import ClientUnusable


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
@pytest.mark.parametrize("way", ["infer", "push"])
def test_a_handler_that_raises_gets_through_at_once_and_the_request_is_freed(
    broker: FakeBroker, client: Client, way: str
) -> None:
    Held(broker)
    started = time.monotonic()
    with pytest.raises(Interrupt):
        client.infer("sum", frame(1)) if way == "infer" else list(client.push("sum", frames(3)))
    assert time.monotonic() - started < LOST_MAX_S
    broker.wait_until(lambda: not broker._links)  # the end of its link frees a client's requests
    broker.on_infer = None
    assert client.infer("sum", frame(1))["y"].tolist() == [4]


def test_a_closed_client_refuses_use_and_may_be_closed_again(broker: FakeBroker) -> None:
    client = Client(broker.endpoint)
    client.infer("sum", frame(1))
    client.close()
    client.close()
    for use in (client.models, client.status, lambda: client.infer("sum", frame(1)), lambda: client.push("sum", [])):
        with pytest.raises(ClientUnusable):
            use()


def test_closing_ends_the_calls_that_other_threads_are_in(broker: FakeBroker) -> None:
    held = Held(broker)
    client = Client(broker.endpoint)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(client.infer, "sum", frame(1)) for _ in range(3)]
        held.wait(3)
        client.close()
        for call in calls:
            with pytest.raises(ClientUnusable):
                call.result(LOST_MAX_S)


def test_an_unused_client_opens_nothing(endpoint: str) -> None:
    with Client(endpoint):
        pass


def test_control_passes_verbs_and_arguments_and_status_and_models_use_it(client: Client) -> None:
    assert client.control("slots", "sum", verbose=True) == {"verb": "slots", "arguments": {"verbose": True}}
    assert client.models() == ["sum", "ranking", "large", "silent"]
    assert client.status()["verb"] == "stats"
    assert client.metadata("sum")["max_batch_size"] == 8


def test_a_forked_child_may_not_use_it_and_the_parent_goes_on(broker: FakeBroker) -> None:
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


def test_a_child_that_outlives_its_parent_does_not_hide_its_death(broker: FakeBroker) -> None:
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
def test_an_interpreter_with_unanswered_requests_exits_at_once(broker: FakeBroker, way: str) -> None:
    Held(broker)
    done = script(
        """
        import sys, threading, numpy as np
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
            while not client._pool._busy:
                thread.join(0.01)
        print("returning")
        """,
        broker.endpoint,
        way,
        timeout_s=3,
    )
    assert "returning" in done.stdout
    assert done.returncode == 0


def test_an_interpreter_whose_broker_is_not_there_exits_at_once(endpoint: str) -> None:
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
