from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from recorded_front import RecordedFront, client
from served_models import SIGNATURE, Jobs, open_slots, served

from mxpool.broker.clients import Client
from mxpool.broker.control import Answer, Control, Order
from mxpool.broker.served import ServedModel
from mxpool.broker.tickets import Ticket
from mxpool.broker.worker_process import WorkerProcess
from mxpool.errors import ModelUnavailable, MxPoolError, PermissionDenied, UnknownModel, UnknownVerb
from mxpool.spec import ModelSpec

STRANGER = 54_321


class Broker:
    def __init__(self) -> None:
        self.drained: list[str] = []
        self.referred: list[tuple[str, Client | None]] = []
        self.released = 0

    def drain(self, model: str) -> None:
        self.drained.append(model)

    def refer(self, model: str, client: Client | None) -> str:
        self.referred.append((model, client))
        return f"{model}@plain"

    def release(self, answer: Answer, client: Client | None) -> None:
        del client
        self.released += 1
        answer({"released": True})


class Rig:
    """Two models: ``ranking`` is ready on one worker of two, ``vision`` is loading."""

    def __init__(self, ranking: ServedModel, vision: ServedModel) -> None:
        self.ranking, self.vision = ranking, vision
        self.broker = Broker()
        spec = ModelSpec(name="ranking", path="/models/ranking.onnx", backend="onnxruntime")
        names = ("ranking-cpu-0", "ranking-cpu-1")
        self.workers = {name: WorkerProcess(name, "cpu", spec, ranking) for name in names}
        models = {"vision": vision, "ranking": ranking}
        self.control = Control(models, self.workers, self.broker, lambda: {"epoch": 7}, (STRANGER + 1,))

    def ask(self, verb: str, model: str = "", uid: int | None = STRANGER, **arguments: Any) -> dict[str, Any]:
        answers: list[dict[str, Any] | MxPoolError] = []
        self.control.take(Order(verb, model, arguments, uid, answers.append))
        (answer,) = answers
        assert isinstance(answer, dict)
        return dict(msgpack.unpackb(msgpack.packb(answer)))


@pytest.fixture
def rig() -> Iterator[Rig]:
    front, jobs = RecordedFront(), Jobs()
    ranking, vision = served(front=front, jobs=jobs), served("vision", front=front, jobs=jobs)
    open_slots(ranking)
    ranking.core.worker_ready("ranking-cpu-0", 1, (1, 8))
    yield Rig(ranking, vision)
    ranking.close()


def test_live_and_list_need_no_model(rig: Rig) -> None:
    assert rig.ask("live") == {"live": True}
    assert rig.ask("list") == {"models": ["ranking", "vision"]}
    assert rig.ask("live", unknown_argument=1) == {"live": True}


def test_ready_is_told_for_each_model_and_for_all(rig: Rig) -> None:
    assert rig.ask("ready") == {"ready": False, "models": {"ranking": "ready", "vision": "loading"}}
    assert rig.ask("ready", "ranking") == {"ready": True, "models": {"ranking": "ready"}}
    rig.ranking.core.worker_lost("ranking-cpu-0", 0, 0)
    assert rig.ask("ready", "ranking") == {"ready": False, "models": {"ranking": "restarting"}}
    rig.ranking.unavailable = "it cannot boot"
    assert rig.ask("ready", "ranking")["models"] == {"ranking": "unavailable"}
    rig.ranking.core.draining = True
    assert rig.ask("ready", "ranking")["models"] == {"ranking": "draining"}


def test_metadata_of_a_loading_model_is_refused_as_retryable_and_of_a_ready_one_is_its_signature(rig: Rig) -> None:
    with pytest.raises(ModelUnavailable, match="loading") as caught:
        rig.ask("metadata", "vision")
    assert caught.value.retryable
    found = rig.ask("metadata", "ranking")
    assert (found["name"], found["path"], found["state"]) == ("ranking", "/models/ranking.onnx", "ready")
    assert {key: found[key] for key in SIGNATURE.to_wire()} == SIGNATURE.to_wire()


@pytest.mark.parametrize("verb", ["ready", "metadata", "stats", "slots", "drain"])
def test_an_unknown_model_is_named(rig: Rig, verb: str) -> None:
    with pytest.raises(UnknownModel, match="'other'"):
        rig.ask(verb, "other", uid=os.getuid())
    assert rig.broker.drained == []


@pytest.mark.parametrize("verb", ["", "LIVE", "load", "__init__", "x" * 1000])
def test_an_unknown_verb_is_named_in_short(rig: Rig, verb: str) -> None:
    with pytest.raises(UnknownVerb) as caught:
        rig.ask(verb)
    assert len(caught.value.message) < 100


def test_stats_hold_the_broker_every_model_and_each_worker(rig: Rig) -> None:
    found = rig.ask("stats")
    assert (found["broker"]["epoch"], found["broker"]["pid"]) == (7, os.getpid())
    assert set(found["models"]) == {"ranking", "vision"}
    ranking = found["models"]["ranking"]
    assert (ranking["state"], ranking["queue_depth"], ranking["slots"], ranking["free_slots"]) == ("ready", 0, 4, 4)
    assert [worker["worker"] for worker in ranking["workers"]] == list(rig.workers)
    assert [worker["pid"] for worker in ranking["workers"]] == [None, None]
    assert set(rig.ask("stats", "vision")["models"]) == {"vision"}


def test_slots_tell_who_holds_what(rig: Rig) -> None:
    rig.ranking.core.submit(Ticket("client", 1, 3, 0, 0), 0)
    rows = rig.ask("slots", "ranking")["slots"]
    assert [row["slot"] for row in rows] == [0, 1, 2, 3]
    (filling,) = [row for row in rows if row["state"] != "free"]
    assert (filling["state"], filling["requests"], filling["rows"], filling["worker"]) == ("filling", 1, 3, "")
    assert filling["held_us"] > 0
    rig.ranking.core.close_due(0)
    (batch,) = rig.ranking.core.assign(0)
    running = rig.ask("slots", "ranking")["slots"][batch.slot]
    assert (running["state"], running["worker"], running["generation"]) == ("running", "ranking-cpu-0", 1)
    assert rig.ask("slots", "vision") == {"slots": []}


@pytest.mark.parametrize("uid", [None, STRANGER, -1])
def test_who_is_no_administrator_cannot_drain(rig: Rig, uid: int | None) -> None:
    with pytest.raises(PermissionDenied, match="may not drain"):
        rig.ask("drain", uid=uid)
    assert rig.broker.drained == []


@pytest.mark.parametrize("uid", [0, os.getuid(), STRANGER + 1])
def test_an_administrator_drains_one_model_or_all(rig: Rig, uid: int) -> None:
    assert rig.ask("drain", "vision", uid=uid) == {"draining": True}
    assert rig.broker.drained == ["vision"]
    rig.ask("drain", uid=uid)
    assert sorted(rig.broker.drained[1:]) == ["ranking", "vision"]


@pytest.mark.parametrize("uid", [None, STRANGER, -1])
@pytest.mark.parametrize("verb", ["reference", "release"])
def test_who_is_no_administrator_has_no_private_worker(rig: Rig, verb: str, uid: int | None) -> None:
    with pytest.raises(PermissionDenied, match=f"may not {verb}"):
        rig.ask(verb, "ranking", uid=uid)
    assert (rig.broker.referred, rig.broker.released) == ([], 0)


def test_a_private_worker_is_asked_for_with_the_client_that_holds_it_and_released(rig: Rig) -> None:
    answers: list[Any] = []
    holder = client()
    rig.control.take(Order("reference", "ranking", {}, 0, answers.append, holder))
    assert answers == [{"model": "ranking@plain"}]
    assert rig.broker.referred == [("ranking", holder)]
    assert rig.ask("release", uid=0) == {"released": True}
    assert rig.broker.released == 1


def test_a_private_model_is_in_stats_and_in_no_list() -> None:
    front, jobs = RecordedFront(), Jobs()
    model = served(front=front, jobs=jobs)
    private = ServedModel("ranking@plain", model.config, 1, front.send, jobs)
    models = {"ranking": model, private.name: private}
    control = Control(models, {}, Broker(), dict, ())
    found: list[Any] = []
    for verb in ("list", "ready", "stats"):
        control.take(Order(verb, "", {}, None, found.append))
    assert (found[0]["models"], set(found[1]["models"]), set(found[2]["models"])) == (
        ["ranking"],
        {"ranking"},
        {"ranking", "ranking@plain"},
    )
    control.take(Order("ready", "ranking@plain", {}, None, found.append))
    assert found[3]["models"] == {"ranking@plain": "loading"}
