"""Pools whose workers run on CUDA, with the stand-in for the device: all but the device's own calls is real."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
import standins
from graph_storm import MODEL, RowTable, Storm, table
from pool import Pool, soak, wait_until

from mxpool import Client
from mxpool.errors import RunFailed

MAKE_MODELS = Path(__file__).parents[2] / "scripts" / "make_models"
DEVICES = {"gpu0": {"kind": "cuda"}}
SIZE = 32


def cuda_pool(tables: Mapping[str, Mapping[str, Any]], fault: str = "", **pool: Any) -> Pool:
    environ = {**standins.environ("cuda", fault), **pool.pop("environ", {})}
    return Pool(tables, devices=DEVICES, environ=environ, **pool)


def affine(folder: Path, **keys: Any) -> dict[str, dict[str, Any]]:
    """A table for ``y = 2x + 1`` on the device."""
    return {"affine": {"path": made_models.affine(folder), "max_batch_size": 8, "workers": {"gpu0": 1}, **keys}}


def ask(pool: Pool, rows: int = 3) -> None:
    given = np.random.default_rng(rows).random((rows, 4), np.float32)
    with pool.client() as client:
        assert (client.infer("affine", {"x": given})["y"] == 2 * given + 1).all()


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([MAKE_MODELS, str(folder), "ranking"], check=True, capture_output=True)
    return str(folder / "ranking.onnx")


@pytest.fixture(scope="module")
def rows(ranking: str) -> Iterator[RowTable]:
    with cuda_pool({MODEL: table(ranking, SIZE, graph="off")}) as plain:
        yield RowTable(plain, SIZE, 8 * SIZE)


def test_replays_are_counted_and_the_status_tells_all_of_the_graph(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path)) as pool:
        ask(pool)
        stats = pool.model("affine")
        assert stats["graph"] == {"hit": 1, "miss": 0, "off": 0}
        (worker,) = stats["workers"]
        report = worker["report"]
        told = {name: report[name] for name in ("graph", "graph_setting", "graph_sizes", "sizes", "host", "lanes")}
        assert told == {
            "graph": "on",
            "graph_setting": "prefer",
            "graph_sizes": [1, 8],
            "sizes": [1, 8],
            "host": "pinned",
            "lanes": 2,
        }
        assert stats["last_batch"]["graph"] == "hit"
        assert "fixed_inputs=1 maca_graph=1 queue_shared=1" in pool.log()


@pytest.mark.parametrize(
    ("variable", "flags", "word"),
    [
        ("MX_MACA_GRAPH", "fixed_inputs=1 maca_graph=0 queue_shared=1", "off"),
        ("MX_SHARED_QUEUE", "fixed_inputs=1 maca_graph=1 queue_shared=0", "hit"),
        ("MX_FIXED_INPUT_BUFFERS", "fixed_inputs=0 maca_graph=0 queue_shared=1", "off"),
    ],
)
def test_each_switch_rolls_back_its_part_and_nothing_else(tmp_path: Path, variable: str, flags: str, word: str) -> None:
    with cuda_pool(affine(tmp_path), environ={variable: "0"}) as pool:
        ask(pool)
        assert flags in pool.log()
        assert pool.model("affine")["graph"][word] == 1


def test_a_failed_capture_is_counted_as_a_miss_and_its_reason_shown(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path), fault="capture_at:8") as pool:
        ask(pool)
        stats = pool.model("affine")
        assert stats["graph"] == {"hit": 0, "miss": 1, "off": 0}
        report = stats["workers"][0]["report"]
        assert (report["graph"], report["sizes"]) == ("off", [1, 2, 4, 8])
        assert (report["graph_failure"]["size"], report["graph_failure"]["node"]) == (8, "Reshape_1")


def test_a_required_graph_that_cannot_be_had_makes_the_model_unavailable_with_the_reason(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path, graph="require"), fault="silent", ready=()) as pool:
        stats = wait_until(lambda: (m := pool.model("affine"))["state"] == "unavailable" and m, "the refusal")
        assert "the capture left no graph behind" in stats["reason"]
        assert stats["workers"][0]["restarts"] == 0, "the same file and config would fail again"


def test_a_provider_that_is_not_there_is_an_error_and_never_the_cpu(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path), fault="no_provider", ready=()) as pool:
        stats = wait_until(lambda: (m := pool.model("affine"))["state"] == "unavailable" and m, "the refusal")
        assert "CUDAExecutionProvider was asked for" in stats["reason"]
        assert "mxpool[cuda]" in stats["reason"]


def test_a_batch_that_fails_is_counted_under_no_word_of_the_graph(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path, graph_batch_sizes=[8], max_batch_size=8), fault="run:60") as pool:
        with pool.client() as client:
            outcomes = [answered(client, turn) for turn in range(60)]
        stats = pool.model("affine")
        assert outcomes.count(False) == 1
        assert (stats["batches"], stats["failed"]) == (60, 1)
        assert stats["graph"] == {"hit": 59, "miss": 0, "off": 0}


def answered(client: Client, turn: int) -> bool:
    """True for the right answer, False if the runtime failed the batch."""
    given = np.full((1, 4), turn, np.float32)
    try:
        assert (client.infer("affine", {"x": given})["y"] == 2 * given + 1).all()
    except RunFailed:
        return False
    return True


def test_a_worker_whose_device_is_lost_ends_with_a_code_of_its_own_and_another_serves(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path), fault="lost:200") as pool:
        with pool.client() as client:
            for turn in range(300):
                given = np.full((1, 4), turn, np.float32)
                assert (client.infer("affine", {"x": given}, retries=3)["y"] == 2 * given + 1).all()
        (worker,) = pool.model("affine")["workers"]
        assert worker["restarts"] >= 1
        assert "exit code 71 (the device is lost)" in pool.log()


@pytest.mark.parametrize("after", [3, 40])
def test_a_device_that_is_lost_while_graphs_are_captured_is_told_as_such(tmp_path: Path, after: int) -> None:
    with cuda_pool(affine(tmp_path), fault=f"lost:{after}", ready=()) as pool:
        died = wait_until(lambda: pool.model("affine")["workers"][0]["reason"], "the first death")
        assert died.startswith("exit code 71 (the device is lost)")


def test_a_capture_that_takes_the_device_down_is_tried_twice_and_then_served_plain(tmp_path: Path) -> None:
    with cuda_pool(affine(tmp_path), fault="deadly") as pool:
        ask(pool)
        stats = pool.model("affine")
        assert stats["graph"] == {"hit": 0, "miss": 1, "off": 0}
        (worker,) = stats["workers"]
        assert worker["restarts"] == 2
        assert worker["report"]["graph_setting"] == "prefer"
        assert "took the device down 2 times: exit code 71" in worker["report"]["graph_failure"]["reason"]


def test_replays_of_random_batches_equal_plain_runs_while_workers_are_killed(ranking: str, rows: RowTable) -> None:
    with cuda_pool({MODEL: table(ranking, SIZE, graph="require", load_timeout_ms=60_000)}) as pool:
        storm = Storm(pool, rows, rows_max=SIZE)
        storm.run(soak(10_000, 400), kills=3)
        assert storm.wrong == []
        stats = pool.model(MODEL)
        assert stats["graph"]["hit"] == stats["batches"]
        assert stats["workers"][0]["restarts"] >= 3
        assert storm.counts["answered"] > 0
