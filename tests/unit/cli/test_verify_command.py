from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from verified_model import MODEL, PLAIN, Call, VerifiedModel, right

from mxpool.cli.main import app
from mxpool.cli.surroundings import Arrays, Surroundings
from mxpool.cli.verify import startup_flags
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.errors import BrokerLost, ModelUnavailable, PermissionDenied, RunFailed


class Ticking:
    """A clock that a pause moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def verify(model: VerifiedModel, *args: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    clock = Ticking()
    around = Surroundings(connect=lambda _: model, environ={}, clock=clock, pause=clock.pause)
    line = ["-e", "ipc:///run/fake.sock", "verify", MODEL, "--json", *map(str, args)]
    result = CliRunner().invoke(app, line, obj=around, catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout) if result.stdout else {"stderr": result.stderr}


def results(told: dict[str, Any]) -> dict[str, str]:
    return {row["check"]: row["result"] for row in told["checks"]}


def test_on_the_cpu_everything_is_checked_but_the_graph_which_is_said() -> None:
    code, told = verify(VerifiedModel())
    assert code == 0
    assert (told["model"], told["passed"], told["soak"]) == (MODEL, True, [])
    assert results(told) == {
        "fixed_inputs": "ok",
        "maca_graph": "skipped",
        "queue_shared": "ok",
        "repeat": "ok",
        "graph on/off": "skipped",
        "consecutive inputs": "ok",
        "every slot": "ok",
        "coupling": "ok",
        "clients at once": "ok",
    }


def test_with_a_graph_a_private_worker_is_asked_for_and_given_back() -> None:
    model = VerifiedModel(graph=True)
    code, told = verify(model)
    assert code == 0
    assert {"maca_graph": "ok", "graph on/off": "ok", "graph replays": "ok"}.items() <= results(told).items()
    verbs = [verb for verb, _ in model.verbs if verb != "slots"]
    assert verbs == ["reference", "release"]
    assert model.ran[PLAIN] > 100
    assert set(told["checks"][0]) == {"check", "compared", "result", "detail", "figures"}


@pytest.mark.parametrize(
    "error", [PermissionDenied(uid=7, action="reference"), ModelUnavailable(model=PLAIN, reason="?")]
)
def test_without_a_private_worker_the_comparison_has_failed_and_the_rest_goes_on(error: Exception) -> None:
    code, told = verify(VerifiedModel(graph=True, refusals={"reference": error}))
    assert code == 1
    assert results(told)["graph on/off"] == "failed"
    assert results(told)["clients at once"] == "ok"


def test_a_check_that_fails_is_exit_code_1_and_the_table_says_so() -> None:
    def answer(call: Call) -> Arrays:
        if call.number == 20:
            raise RunFailed(model=MODEL, reason="it broke")
        return right(call)

    code, told = verify(VerifiedModel(answer))
    assert (code, told["passed"]) == (1, False)
    assert [row["detail"] for row in told["checks"] if row["result"] == "failed"] == [
        "run_failed: model 'ranking' failed the batch: it broke"
    ]
    table = CliRunner().invoke(
        app,
        ["-e", "ipc:///run/fake.sock", "verify", MODEL],
        obj=Surroundings(connect=lambda _: VerifiedModel(answer), environ={}),
    )
    assert table.exit_code == 1
    assert "ranking: FAILED" in table.stdout
    assert "run_failed" in table.stdout


def test_a_broker_that_goes_away_is_exit_code_3() -> None:
    def answer(call: Call) -> Arrays:
        if call.number == 20:
            raise BrokerLost(endpoint="ipc:///run/fake.sock", reason="gone")
        return right(call)

    code, told = verify(VerifiedModel(answer))
    assert code == 3
    assert "broker_lost" in told["stderr"]


def test_an_interrupt_shows_what_there_is_gives_the_worker_back_and_is_exit_code_1() -> None:
    def answer(call: Call) -> Arrays:
        if call.model == PLAIN:
            raise KeyboardInterrupt
        return right(call)

    model = VerifiedModel(answer, graph=True)
    code, told = verify(model)
    assert (code, told["passed"]) == (1, False)
    assert [row["check"] for row in told["checks"]] == ["fixed_inputs", "maca_graph", "queue_shared", "repeat"]
    assert model.verbs[-1][0] == "release"


def test_a_soak_adds_its_rows_and_its_samples() -> None:
    code, told = verify(VerifiedModel(), "--soak", "0.2")
    assert code == 0
    assert [name for name in results(told) if name.startswith("soak")] == [
        "soak answers",
        "soak memory",
        "soak run_us p99",
    ]
    assert len(told["soak"]) > 10
    assert set(told["soak"][0]) == {
        "at_s", "answered", "errors", "wrong", "resident_bytes", "device_bytes", "run_us_p99"
    }  # fmt: skip


def test_rows_of_others_are_told() -> None:
    class Shared(VerifiedModel):
        def status(self) -> dict[str, Any]:
            found = super().status()
            found["models"][MODEL]["batch_rows"] += 3 * (self.calls > 50)
            return found

    _, told = verify(Shared())
    assert results(told)["other traffic"] == "note"
    assert told["checks"][-1]["figures"] == {"rows": 3}


def test_rows_of_a_file_are_drawn_and_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    sent: list[Arrays] = []

    def answer(call: Call) -> Arrays:
        sent.append(call.arrays)
        return right(call)

    real = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.savez(tmp_path / "rows.npz", x=real)
    np.savez(tmp_path / "other.npz", z=real)
    assert verify(VerifiedModel(answer), "--npz", tmp_path / "rows.npz")[0] == 0
    assert set(sent[0]["x"].ravel()) <= set(real.ravel())
    code, told = verify(VerifiedModel(), "--npz", tmp_path / "other.npz")
    assert code == 2
    assert "the model's inputs are x" in told["stderr"]


# Start-up flags


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((0, 4), np.float32), "have 0 rows"),
        (np.float32(1), "have 0 rows"),
        (np.zeros((5, 3), np.float32), r"is float32 (3,) a row; the model's input is float32 (4,)"),
        (np.zeros((5, 4), np.int64), "is int64 (4,) a row"),
    ],
)
def test_a_file_of_other_rows_is_refused_and_not_called_the_models_fault(
    tmp_path: Path, array: Any, words: str
) -> None:
    np.savez(tmp_path / "rows.npz", x=array)
    code, told = verify(VerifiedModel(), "--npz", tmp_path / "rows.npz")
    assert code == 2
    assert words in told["stderr"]


def test_a_worker_that_dies_meanwhile_fails_the_whole() -> None:
    code, told = verify(VerifiedModel(deaths=2))
    assert code == 1
    assert results(told)["workers"] == "failed"
    assert told["checks"][-1]["detail"].startswith("workers were started again 2 times")


def test_a_model_that_drains_is_not_judged() -> None:
    code, told = verify(VerifiedModel(state="draining"))
    assert code == 4
    assert "shutting" in str(told)


def flags(report: dict[str, Any], workers: int = 1, queue: str = "", **config: Any) -> dict[str, Outcome]:
    """``queue`` and a report's ``fixed_inputs`` are as asked for, unless they are given."""
    asked = {"graph": "prefer", "queue": "shared", "fixed_input_buffers": True, **config}
    actual = {"fixed_inputs": asked["fixed_input_buffers"], **report}
    told = [{"worker": f"r-{number}", "state": "ready", "report": actual} for number in range(workers)]
    stats = {"config": asked, "queue": queue or asked["queue"], "workers": told}
    return {outcome.check: outcome for outcome in startup_flags.check(stats)}


ON = {"graph": "on", "graph_setting": "prefer"}
OFF = {
    "graph": "off",
    "graph_setting": "prefer",
    "graph_failure": {"size": 8, "node": "Concat_3", "reason": "cudaErrorStreamCaptureUnsupported"},
}


@pytest.mark.parametrize(
    ("report", "config", "result", "told"),
    [
        (ON, {}, Result.OK, "maca_graph=1"),
        (ON, {"graph": "require"}, Result.OK, "maca_graph=1"),
        (ON, {"graph": "off"}, Result.FAILED, "maca_graph=1"),
        ({**OFF, "graph_failure": {}}, {"graph": "off"}, Result.OK, "maca_graph=0"),
        (OFF, {}, Result.NOTE, "r-0 at 8 rows, node Concat_3: cudaErrorStreamCaptureUnsupported"),
        (OFF, {"graph": "require"}, Result.FAILED, "Concat_3"),
        (OFF, {"fixed_input_buffers": False}, Result.OK, "maca_graph=0"),
        ({"graph": "off"}, {}, Result.SKIPPED, "(CPU)"),
        ({"graph": "off"}, {"graph": "require"}, Result.FAILED, "required"),
    ],
)
def test_the_graph_is_what_was_asked_for_or_the_reason_is_shown(
    report: dict[str, Any], config: dict[str, Any], result: Result, told: str
) -> None:
    outcome = flags(report, **config)["maca_graph"]
    assert outcome.result is result
    assert told in outcome.detail


def test_a_graph_that_some_workers_lack_is_told_in_figures() -> None:
    reports = [ON, OFF]
    workers = [{"worker": f"r-{n}", "state": "ready", "report": report} for n, report in enumerate(reports)]
    found = {one.check: one for one in startup_flags.check({"config": {"graph": "prefer"}, "workers": workers})}
    assert found["maca_graph"].detail.startswith("maca_graph is on in 1 of 2 workers: r-1 at 8 rows")


def test_a_graph_over_inputs_that_are_not_fixed_fails() -> None:
    assert flags(ON, fixed_input_buffers=False)["fixed_inputs"].result is Result.FAILED
    assert flags({"graph": "off"}, fixed_input_buffers=False)["fixed_inputs"].detail == "fixed_inputs=0"
    assert flags({"graph": "on", "host": "copied"})["fixed_inputs"].detail == "fixed_inputs=1"


def test_a_switch_that_does_nothing_is_found() -> None:
    both = {"config": {"queue": "per_worker"}, "queue": "shared"}
    found = flags({}, queue="per_worker")["queue_shared"]
    assert (found.result, found.detail) == (Result.FAILED, "queue_shared=0")
    workers = [{"worker": "r-0", "state": "ready", "report": {"fixed_inputs": True}}]
    ignored = {one.check: one for one in startup_flags.check({**both, "workers": workers})}["queue_shared"]
    assert (ignored.result, ignored.compared, ignored.detail) == (Result.FAILED, "asked 0", "queue_shared=1")
    kept = flags({"fixed_inputs": True}, fixed_input_buffers=False)["fixed_inputs"]
    assert (kept.result, kept.detail) == (Result.FAILED, "not so in r-0")


def test_a_model_without_a_ready_worker_fails_with_its_reason() -> None:
    stats = {"state": "unavailable", "reason": "no such file", "workers": [{"worker": "r-0", "state": "dead"}]}
    (outcome,) = startup_flags.check(stats)
    assert (outcome.result, outcome.detail) == (Result.FAILED, "no such file")
