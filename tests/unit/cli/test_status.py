from __future__ import annotations

import json
from typing import Any

import pytest
from fake_client import FakeClient, mxpool

from mxpool.errors import BrokerLost, PermissionDenied

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


def test_status_shows_of_device_workers_what_they_replay_and_why_not() -> None:
    on = {"graph": "on", "graph_setting": "prefer", "graph_sizes": [1, 128], "capture_ms": 41.5, "lanes": 2}
    failure = {"size": 128, "node": "Concat_80", "reason": "at most 32 inputs"}
    off = {"graph": "off", "graph_setting": "prefer", "graph_sizes": [], "graph_failure": failure, "host": "staged"}
    workers = [
        {"worker": "r-gpu0-0", "report": {**on, "host": "pinned", "graph_failure": {}}},
        {"worker": "r-gpu0-1", "report": off},
        {"worker": "r-cpu-0", "report": {"graph": "off"}},
    ]
    model = {"workers": workers, "graph": {"hit": 7_001, "miss": 3, "off": 0}}
    ran = mxpool(FakeClient(status={"broker": {}, "models": {"r": model}}), "status")
    shown = ran.stdout[ran.stdout.index("device graphs") :]
    for word in ("r-gpu0-0", "1, 128", "41.5", "pinned", "7,001", "staged", "at 128 rows, node Concat_80, at most 32"):
        assert word in shown
    assert "r-cpu-0" not in shown
    assert "device graphs" not in mxpool(FakeClient(status=STATUS), "status").stdout


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
