from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_models"


def make(folder: Path, *names: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [SCRIPT, folder, *names], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    assert make(made).returncode == 0
    return made


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_every_model_has_the_same_bytes_every_time(folder: Path, tmp_path: Path) -> None:
    assert make(tmp_path / "again", hash_seed="1").returncode == 0
    assert digests(tmp_path / "again") == digests(folder)


def test_only_the_models_that_are_asked_for_are_written(tmp_path: Path) -> None:
    assert make(tmp_path, "overhead", "coupled").returncode == 0
    assert sorted(digests(tmp_path)) == ["coupled.onnx", "overhead.onnx"]


def test_an_unknown_name_is_a_usage_error_with_the_known_ones(tmp_path: Path) -> None:
    ended = make(tmp_path, "rankin")
    assert ended.returncode == 2
    assert "no model named rankin (known: ranking, ranking_wide, overhead" in ended.stderr
    assert digests(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "parameters_m"),
    [
        ("ranking", [("numerical", 48), ("categorical", 39), ("keyword_vec", 768)], [1, 1, 1], 2.7),
        ("ranking_wide", [("numerical", 48), ("categorical", 39), ("keyword_vec", 768)], [1, 1, 1], 2.7),
        ("overhead", [("numerical", 48), ("categorical", 39), ("keyword_vec", 768)], [1, 1, 1], 0),
        ("tiny_cnn", [("image", 3, 224, 224)], [10], 0.09),
        ("mid_cnn", [("image", 3, 224, 224)], [1000], 4.4),
        ("resnet18", [("image", 3, 224, 224)], [1000], 11.7),
        ("frames", [("frame", 150_000)], [64], 0),
        ("coupled", [("x", 16)], [8], 0),
    ],
)
def test_every_model_is_valid_runs_and_has_the_shape_it_is_known_for(
    folder: Path, name: str, inputs: list[tuple[str, int]], outputs: list[int], parameters_m: float
) -> None:
    model = onnx.load(str(folder / f"{name}.onnx"))
    assert (model.ir_version, model.opset_import[0].version) == (8, 17)
    parameters = sum(int(np.prod(weight.dims)) for weight in model.graph.initializer)
    assert parameters / 1e6 == pytest.approx(parameters_m, abs=0.05)
    opened = session(folder / f"{name}.onnx")
    assert [(node.name, *node.shape[1:]) for node in opened.get_inputs()] == inputs
    feeds = {tensor: np.random.default_rng(0).random((2, *dims), dtype=np.float32) for tensor, *dims in inputs}
    results = opened.run(None, feeds)
    assert [result.shape for result in results] == [(2, width) for width in outputs]
    assert all(np.isfinite(result).all() and (result[0] != result[1]).any() for result in results)


def concat_widths(path: Path) -> list[int]:
    return [len(node.input) for node in onnx.load(str(path)).graph.node if node.op_type == "Concat"]


def test_ranking_keeps_its_concats_small_enough_to_capture_and_its_twin_does_not(folder: Path) -> None:
    assert max(concat_widths(folder / "ranking.onnx")) <= 32
    assert max(concat_widths(folder / "ranking_wide.onnx")) == 41
    assert 180 <= len(onnx.load(str(folder / "ranking.onnx")).graph.node) <= 200


def test_ranking_takes_any_category_as_the_nearest_one(folder: Path) -> None:
    opened = session(folder / "ranking.onnx")
    feeds = {node.name: np.zeros((2, *node.shape[1:]), np.float32) for node in opened.get_inputs()}
    feeds["categorical"][...] = [[-5], [1e9]]
    assert opened.run(None, feeds)[0].shape == (2, 1)


def test_a_row_of_coupled_depends_on_its_neighbour(folder: Path) -> None:
    opened = session(folder / "coupled.onnx")
    row = np.linspace(-1, 1, 16, dtype=np.float32)[None]
    alone = opened.run(None, {"x": row})[0][0]
    beside = opened.run(None, {"x": np.concatenate([row, row * 100])})[0][0]
    assert np.abs(alone - beside).max() > 1


def test_frames_gives_the_first_values_of_each_frame(folder: Path) -> None:
    frame = np.arange(2 * 150_000, dtype=np.float32).reshape(2, -1)
    assert (session(folder / "frames.onnx").run(None, {"frame": frame})[0] == frame[:, :64]).all()
