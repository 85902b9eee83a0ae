from __future__ import annotations

import json
from typing import Any

import pytest
from fake_client import FakeClient, mxpool

from mxpool.errors import BrokerLost, ModelUnavailable, PermissionDenied

STATUS: dict[str, Any] = {
    "broker": {"pid": 4711, "uptime_s": 2.5, "connected_clients": 1},
    "models": {
        "ranking": {
            "state": "unavailable",
            "reason": "5 deaths within 60 s",
            "received": 1234,
            "workers": [{"worker": "ranking-cpu-0", "device": "cpu", "pid": 4712, "state": "ready", "restarts": 5}],
        }
    },
}


def test_status_shows_models_with_their_reason_and_workers_with_their_pid() -> None:
    ran = mxpool(FakeClient(status=STATUS), "status")
    assert ran.exit_code == 0
    for word in ("4711", "unavailable", "5 deaths within 60 s", "1,234", "ranking-cpu-0", "4712"):
        assert word in ran.stdout


def test_status_as_json_is_what_the_broker_said() -> None:
    assert json.loads(mxpool(FakeClient(status=STATUS), "status", "--json").stdout) == STATUS


class Clock:
    """Time that passes only while somebody pauses."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def time(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


class Starting(FakeClient):
    """A broker that is not there, then loads, then is ready: one step for each question."""

    def __init__(self, *steps: Any) -> None:
        super().__init__(status=STATUS)
        self.steps = list(steps)

    def control(self, verb: str, model: str = "", **_: Any) -> dict[str, Any]:
        assert (verb, model) == ("ready", "")
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return {"ready": step == "ready", "models": {"ranking": step}}


LOST = BrokerLost(endpoint="ipc:///x", reason="no such file")


def test_waiting_goes_on_while_there_is_no_broker_and_while_a_model_loads() -> None:
    clock = Clock()
    client = Starting(LOST, "loading", "loading", "ready")
    ran = mxpool(client, "status", "--wait-ready", 5, clock=clock.time, pause=clock.pause)
    assert ran.exit_code == 0
    assert clock.now_s == pytest.approx(100.3)
    assert client.closed == 5  # four questions, and the status


@pytest.mark.parametrize(("step", "words"), [("loading", "ranking is loading"), (LOST, "no such file")])
def test_waiting_ends_after_the_time_given_and_says_what_is_not_ready(step: Any, words: str) -> None:
    clock = Clock()
    ran = mxpool(Starting(step), "status", "--wait-ready", 2, clock=clock.time, pause=clock.pause)
    assert ran.exit_code == 1
    assert clock.now_s == pytest.approx(102.0, abs=0.2)
    assert "not ready after 2 s: " in ran.stderr
    assert words in ran.stderr


def test_waiting_ends_at_once_at_an_error_that_no_time_mends() -> None:
    clock = Clock()
    refused = PermissionDenied(uid=1, action="ask")
    ran = mxpool(Starting(refused), "status", "--wait-ready", 2, clock=clock.time, pause=clock.pause)
    assert (ran.exit_code, clock.now_s) == (4, 100.0)


def test_models_are_listed_with_their_tensors() -> None:
    client = FakeClient()
    assert "x FP32[3]" in mxpool(client, "models").stdout
    about = json.loads(mxpool(client, "models", "--json").stdout)["ranking"]
    assert (about["max_batch_size"], about["inputs"]) == (8, [["x", "FP32", [3]]])


def test_a_model_that_still_loads_is_listed_with_the_reason() -> None:
    class Loading(FakeClient):
        def metadata(self, model: str) -> dict[str, Any]:
            raise ModelUnavailable(model=model, reason="still loading")

    ran = mxpool(Loading(), "models")
    assert (ran.exit_code, "still loading" in ran.stdout) == (0, True)


def test_slots_are_shown_for_the_model_asked_for() -> None:
    slot = {"slot": 3, "state": "running", "generation": 9, "requests": 2, "rows": 77, "worker": "r-0", "held_us": 5}
    client = FakeClient(replies={"slots": {"slots": [slot]}})
    ran = mxpool(client, "slots", "ranking")
    assert client.verbs == [("slots", "ranking")]
    assert all(word in ran.stdout for word in ("running", "77", "r-0"))
    assert json.loads(mxpool(client, "slots", "ranking", "--json").stdout) == {"slots": [slot]}


@pytest.mark.parametrize(
    ("args", "asked", "said"), [((), "", "the broker is draining"), (("m",), "m", "m is draining")]
)
def test_drain_asks_for_a_model_or_for_all(args: tuple[str, ...], asked: str, said: str) -> None:
    client = FakeClient(replies={"drain": {"draining": True}})
    ran = mxpool(client, "drain", *args)
    assert (ran.exit_code, ran.stdout, client.verbs) == (0, f"{said}\n", [("drain", asked)])


def test_a_refused_question_exits_with_4_and_closes_the_client() -> None:
    client = FakeClient()
    ran = mxpool(client, "slots", "other")
    assert (ran.exit_code, client.closed) == (4, 1)
    assert ran.stderr == "unknown_model: no model named 'other' is served here\n"
