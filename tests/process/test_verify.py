"""``mxpool verify`` against real pools, on the CPU and on the stand-in for CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import standins
import wheels
from pool import Pool, echo, wait_until

MXPOOL = str(Path(sys.executable).with_name("mxpool"))
MAKE_MODELS = Path(__file__).parents[2] / "scripts" / "make_models"
LONGEST_S = 120
DEVICES = {"gpu0": {"kind": "cuda"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    subprocess.run([MAKE_MODELS, str(made), "ranking", "coupled"], check=True, capture_output=True)
    return made


def verify(pool: Pool, model: str, *args: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    line = [MXPOOL, "-e", pool.endpoint, "verify", model, "--json", *args]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def results(told: Mapping[str, Any]) -> dict[str, str]:
    return {row["check"]: row["result"] for row in told["checks"]}


def failed(told: Mapping[str, Any]) -> list[str]:
    return [f"{row['check']}: {row['detail']}" for row in told["checks"] if row["result"] == "failed"]


def on_device(folder: Path, **keys: Any) -> dict[str, dict[str, Any]]:
    table = {"path": str(folder / "ranking.onnx"), "max_batch_size": 32, "workers": {"gpu0": 1}}
    return {"ranking": {**table, **keys}}


def test_a_real_model_on_two_workers_passes_and_its_graph_is_skipped() -> None:
    table = {"path": wheels.gradient_boosting(), "max_batch_size": 32, "workers": {"cpu": 2}}
    with Pool({"boosting": table}) as pool:
        code, told = verify(pool, "boosting")
    assert (code, failed(told)) == (0, [])
    assert results(told)["graph on/off"] == "skipped"
    assert results(told)["consecutive inputs"] == "ok"
    assert "2 workers" in next(row["detail"] for row in told["checks"] if row["check"] == "clients at once")


def test_every_size_of_a_graph_equals_the_plain_worker_which_is_gone_afterwards(folder: Path) -> None:
    with Pool(on_device(folder), devices=DEVICES, environ=standins.environ("cuda")) as pool:
        code, told = verify(pool, "ranking")
        assert (code, failed(told)) == (0, [])
        compared = [row["figures"]["rows"] for row in told["checks"] if row["check"] == "graph on/off"]
        assert compared == [1, 8, 31, 32]
        assert results(told)["graph replays"] == "ok"
        assert results(told)["maca_graph"] == "ok"
        assert [*pool.stats()["models"]] == ["ranking"]


def test_a_graph_of_the_one_size_that_maca_captures_passes_on_two_workers(folder: Path) -> None:
    tables = on_device(folder, workers={"gpu0": 2})
    with Pool(tables, devices={"gpu0": {"kind": "maca"}}, environ=standins.environ("maca")) as pool:
        code, told = verify(pool, "ranking")
    assert (code, failed(told)) == (0, [])
    assert [row["figures"]["rows"] for row in told["checks"] if row["check"] == "graph on/off"] == [1, 31, 32]


@pytest.mark.parametrize(
    ("variable", "detail"),
    [
        ("MX_MACA_GRAPH", "maca_graph=0"),
        ("MX_SHARED_QUEUE", "queue_shared=0"),
        ("MX_FIXED_INPUT_BUFFERS", "fixed_inputs=0"),
    ],
)
def test_each_switch_rolls_back_and_verify_passes(folder: Path, variable: str, detail: str) -> None:
    environ = {**standins.environ("cuda"), variable: "0"}
    with Pool(on_device(folder, workers={"gpu0": 2}), devices=DEVICES, environ=environ) as pool:
        code, told = verify(pool, "ranking")
    assert (code, failed(told)) == (0, [])
    assert detail in [row["detail"] for row in told["checks"]]
    assert results(told)["graph on/off"] == ("ok" if variable == "MX_SHARED_QUEUE" else "skipped")


def test_a_graph_that_could_not_be_captured_is_a_note_with_its_reason(folder: Path) -> None:
    with Pool(on_device(folder), devices=DEVICES, environ=standins.environ("cuda", "capture_at:8")) as pool:
        code, told = verify(pool, "ranking")
    assert (code, failed(told)) == (0, [])
    graph = next(row for row in told["checks"] if row["check"] == "maca_graph")
    assert graph["result"] == "note"
    assert "at 8 rows" in graph["detail"]


def test_coupled_rows_are_told_and_do_not_fail_it(folder: Path) -> None:
    table = {"path": str(folder / "coupled.onnx"), "max_batch_size": 32, "workers": {"cpu": 2}}
    with Pool({"coupled": table}) as pool:
        code, told = verify(pool, "coupled")
    assert (code, failed(told)) == (0, [])
    row = next(row for row in told["checks"] if row["check"] == "coupling")
    assert row["result"] == "note"
    assert row["figures"]["coupled"] is True


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_model_that_takes_one_row_at_a_time_passes(max_batch_size: int) -> None:
    with Pool({"echo": echo(max_batch_size=max_batch_size)}) as pool:
        code, told = verify(pool, "echo")
    assert (code, failed(told)) == (0, [])
    assert results(told)["coupling"] == "skipped"


def test_a_soak_watches_the_processes_of_the_pool() -> None:
    with Pool({"echo": echo(workers=2)}) as pool:
        code, told = verify(pool, "echo", "--soak", "0.04")
    assert (code, failed(told)) == (0, [])
    assert len(told["soak"]) >= 3
    last = told["soak"][-2]
    assert last["resident_bytes"] > 20 << 20
    assert last["answered"] > 0
    assert last["run_us_p99"] is not None
    assert last["device_bytes"] is None


def test_workers_that_die_in_a_soak_fail_it() -> None:
    with Pool({"echo": echo()}) as pool:
        line = [MXPOOL, "-e", pool.endpoint, "verify", "echo", "--json", "--soak", "0.06"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            while "clients at once" not in running.stderr.readline():
                pass
            before = pool.model()["ok"]
            wait_until(lambda: pool.model()["ok"] > before + 100, "the load of the soak")
            (worker,) = pool.model()["workers"]
            subprocess.run(["kill", "-9", str(worker["pid"])], check=True)
            out, _ = running.communicate(timeout=LONGEST_S)
    told = json.loads(out)
    assert running.returncode == 1
    row = next(row for row in told["checks"] if row["check"] == "soak answers")
    assert (row["result"], row["figures"]["restarts"], row["figures"]["wrong"]) == ("failed", 1, 0)


def test_a_verify_that_is_killed_leaves_no_private_worker(folder: Path) -> None:
    with Pool(on_device(folder), devices=DEVICES, environ=standins.environ("cuda")) as pool:
        line = [MXPOOL, "-e", pool.endpoint, "verify", "ranking"]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            wait_until(lambda: pool.worker_pids("ranking@plain") if _private(pool) else [], "the private worker")
            running.kill()
        wait_until(lambda: not _private(pool), "the end of the private worker")
        assert "its client is gone" in pool.log()


def _private(pool: Pool) -> bool:
    return "ranking@plain" in pool.stats()["models"]


def test_an_unknown_model_is_exit_code_4() -> None:
    with Pool({"echo": echo()}) as pool:
        line = [MXPOOL, "-e", pool.endpoint, "verify", "other"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("unknown_model")
