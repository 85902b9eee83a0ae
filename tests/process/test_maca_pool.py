"""Pools whose workers run on MACA, with the stand-in for the vendor's runtime: all but the runtime is real."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import pytest
import standins
from pool import Pool, soak

from mxpool.errors import ModelUnavailable, RunFailed

Array = npt.NDArray[Any]
MAKE_MODELS = Path(__file__).parents[2] / "scripts" / "make_models"
DEVICES = {"gpu0": {"kind": "maca"}}
BATCH = 128
RANDOM = np.random.default_rng(11)
ON = {"graph": "on", "graph_setting": "prefer", "graph_sizes": [BATCH], "sizes": [BATCH], "host": "copied", "lanes": 1}


def maca_pool(tables: Mapping[str, Mapping[str, Any]], fault: str = "", **pool: Any) -> Pool:
    environ = {**standins.environ("maca", fault), **pool.pop("environ", {})}
    return Pool(tables, devices=DEVICES, environ=environ, **pool)


def affine(folder: Path, **keys: Any) -> dict[str, dict[str, Any]]:
    """A table for ``y = 2x + 1`` on the device."""
    return {"affine": {"path": made_models.affine(folder), "workers": {"gpu0": 1}, **keys}}


def ask(pool: Pool, *counts: int) -> int:
    """Requests of that many rows, one after another, each with other values and its answer right; how many."""
    with pool.client() as client:
        for count in counts:
            given = RANDOM.random((count, 4), np.float32)
            np.testing.assert_array_equal(client.infer("affine", {"x": given})["y"], 2 * given + 1)
    return len(counts)


def report(pool: Pool) -> dict[str, Any]:
    """What the first worker told when it was ready."""
    found: dict[str, Any] = pool.model("affine")["workers"][0]["report"]
    return found


def refusal(tables: Mapping[str, Mapping[str, Any]], fault: str) -> str:
    """Why the one model of such a pool is not served."""
    with maca_pool(tables, fault, ready=()) as pool:
        with pool.client() as client, pytest.raises(ModelUnavailable) as caught:
            client.infer("affine", {"x": np.zeros((1, 4), np.float32)}, timeout_s=30)
        return str(caught.value)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([MAKE_MODELS, str(folder), "ranking"], check=True, capture_output=True)
    return str(folder / "ranking.onnx")


def ranking_rows(count: int) -> dict[str, Array]:
    dims = {"numerical": 48, "categorical": 39, "keyword_vec": 768}
    return {name: RANDOM.random((count, dim), np.float32) for name, dim in dims.items()}


def answers(ranking: str, requests: list[dict[str, Array]], **keys: Any) -> tuple[list[bytes], dict[str, int]]:
    """What a pool of one worker says to each request in turn, and how it counts its batches."""
    with maca_pool({"ranking": {"path": ranking, "workers": {"gpu0": 1}, **keys}}) as pool, pool.client() as client:
        found = [client.infer("ranking", request) for request in requests]
        return [b"".join(each[name].tobytes() for name in sorted(each)) for each in found], pool.model("ranking")[
            "graph"
        ]


def test_replays_are_counted_and_status_and_log_tell_of_the_graph(tmp_path: Path) -> None:
    with maca_pool(affine(tmp_path)) as pool:
        batches = ask(pool, 1, 128, 7, 128)
        stats = pool.model("affine")
        assert stats["graph"] == {"hit": batches, "miss": 0, "off": 0}
        told = report(pool)
        assert {name: told[name] for name in ON} == ON
        assert (told["graph_failure"], told["provider"]) == ({}, "MACAExecutionProvider")
        assert stats["last_batch"]["graph"] == "hit"
        assert "fixed_inputs=1 maca_graph=1 queue_shared=1" in pool.log()


def test_many_inputs_through_the_graph_have_the_answers_of_a_run_without_it_and_all_differ(ranking: str) -> None:
    count = 100
    requests = [ranking_rows(int(RANDOM.integers(1, BATCH + 1))) for _ in range(count)]
    plain, counted_plain = answers(ranking, requests, graph="off")
    graphed, counted = answers(ranking, requests, graph="require")
    assert graphed == plain
    assert len(set(graphed)) == count
    assert counted == {"hit": count, "miss": 0, "off": 0}
    assert counted_plain == {"hit": 0, "miss": 0, "off": count}


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("MX_MACA_GRAPH", "fixed_inputs=1 maca_graph=0 queue_shared=1"),
        ("MX_FIXED_INPUT_BUFFERS", "fixed_inputs=0 maca_graph=0 queue_shared=1"),
    ],
)
def test_a_switch_in_the_environment_rolls_the_graph_back(variable: str, words: str, tmp_path: Path) -> None:
    options = {"direct_slots": True}
    with maca_pool(affine(tmp_path, graph="require", options=options), environ={variable: "0"}) as pool:
        batches = ask(pool, 1, 128, 7)
        assert pool.model("affine")["graph"] == {"hit": 0, "miss": 0, "off": batches}
        assert words in pool.log()


def test_several_workers_have_a_block_each_and_mix_nothing_up(tmp_path: Path) -> None:
    count = soak(2000, 300)
    with maca_pool(affine(tmp_path, workers={"gpu0": 2}, max_batch_size=16)) as pool, pool.client() as client:
        frames = RANDOM.random((count, 4), np.float32)
        found = [answer["y"] for answer in client.push("affine", [{"x": frame[None]} for frame in frames])]
        np.testing.assert_array_equal(np.concatenate(found), 2 * frames + 1)
        stats = pool.model("affine")
        assert stats["graph"]["miss"] == stats["graph"]["off"] == 0


def test_direct_slots_have_other_data_in_every_slot_and_right_answers(tmp_path: Path) -> None:
    with maca_pool(affine(tmp_path, graph="require", options={"direct_slots": True}), "follows") as pool:
        batches = ask(pool, *range(1, 30))
        assert report(pool)["host"] == "direct"
        assert pool.model("affine")["graph"]["hit"] == batches


FAULTS = {
    "capture": ("branch", "operation not permitted when stream is capturing"),
    "blind": ("", "from a run without it"),
    "hollow": ("", "wrote nothing to output 'y'"),
    "options": ("", "this build has no graphs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_graph_that_fails_is_a_miss_if_preferred_and_no_model_if_required(fault: str, tmp_path: Path) -> None:
    node, reason = FAULTS[fault]
    with maca_pool(affine(tmp_path), fault) as pool:
        batches = ask(pool, 1, 128, 7)
        assert pool.model("affine")["graph"] == {"hit": 0, "miss": batches, "off": 0}
        told = report(pool)
        assert (told["graph"], told["graph_sizes"]) == ("off", [])
        assert (told["graph_failure"]["size"], told["graph_failure"]["node"]) == (BATCH, node)
        assert reason in told["graph_failure"]["reason"]
        assert "maca_graph=0" in pool.log()
    assert reason in refusal(affine(tmp_path, graph="require"), fault)


@pytest.mark.parametrize("fault", ["absent", "fallback"])
def test_the_cpu_never_stands_in_for_the_device(fault: str, tmp_path: Path) -> None:
    words = refusal(affine(tmp_path), fault)
    assert "MACAExecutionProvider" in words
    assert "CPUExecutionProvider" in words


def test_a_run_that_succeeds_and_writes_nothing_fails_its_request_and_is_counted(tmp_path: Path) -> None:
    with maca_pool(affine(tmp_path), "unwritten") as pool:
        ask(pool, 3)
        with pool.client() as client, pytest.raises(RunFailed, match="wrote nothing to output 'y'"):
            client.infer("affine", {"x": np.full((2, 4), 13, np.float32)})
        ask(pool, 3)
        stats = pool.model("affine")
        assert [worker["state"] for worker in stats["workers"]] == ["ready"]
        assert stats["failed"] == 1


def test_a_worker_whose_card_is_gone_ends_and_another_serves(tmp_path: Path) -> None:
    with maca_pool(affine(tmp_path), "lost:60") as pool, pool.client() as client:
        for turn in range(80):
            given = np.full((1, 4), turn, np.float32)
            assert (client.infer("affine", {"x": given}, retries=3)["y"] == 2 * given + 1).all()
        assert pool.model("affine")["workers"][0]["restarts"] >= 1
        assert "exit code 71 (the device is lost)" in pool.log()
