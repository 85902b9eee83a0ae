from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fake_client import PAIR, FakeClient, mxpool

from mxpool.errors import DeadlineExceeded


@pytest.fixture
def x(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6, dtype=np.float32).reshape(2, 3))
    return path


def test_a_request_from_a_file_is_answered_with_shapes_and_values(x: Path, tmp_path: Path) -> None:
    client = FakeClient()
    ran = mxpool(client, "infer", "ranking", "--input", f"x={x}", "-o", tmp_path / "out.npz")
    assert ran.exit_code == 0
    assert client.sent[0]["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert "[2, 3]" in ran.stdout
    assert "0, 2, 4, 6, 8, 10" in ran.stdout
    assert np.load(tmp_path / "out.npz")["y"].tolist() == [[0, 2, 4], [6, 8, 10]]


def test_json_holds_all_values(x: Path) -> None:
    answer = json.loads(mxpool(FakeClient(), "infer", "ranking", "--input", f"x={x}", "--json").stdout)
    assert answer["outputs"]["y"] == {"dtype": "float32", "shape": [2, 3], "values": [[0, 2, 4], [6, 8, 10]]}


def test_inputs_come_from_an_archive_and_single_files_together(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros((1, 2), np.float32))
    np.save(tmp_path / "b.npy", np.ones((1, 1), np.int64))
    client = FakeClient(PAIR)
    mxpool(client, "infer", "ranking", "--npz", tmp_path / "a.npz", "--input", f"b={tmp_path / 'b.npy'}")
    assert {name: array.tolist() for name, array in client.sent[0].items()} == {"a": [[0.0, 0.0]], "b": [[1]]}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "give --input NAME=FILE.npy or --npz"),
        (("--input", "x"), "not NAME=FILE.npy"),
        (("--input", "x={x}", "--input", "x={x}"), "'x' is given twice"),
        (("--input", "x=/nowhere.npy"), "/nowhere.npy: not a file of plain numpy arrays"),
        (("--input", "x={z}"), "use --npz for an archive"),
    ],
)
def test_inputs_that_cannot_be_used_exit_with_2_and_nothing_is_sent(
    x: Path, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    np.savez(tmp_path / "z.npz", a=np.zeros(1), b=np.zeros(1))
    client = FakeClient()
    ran = mxpool(client, "infer", "ranking", *(flag.format(x=x, z=tmp_path / "z.npz") for flag in flags))
    assert (ran.exit_code, client.sent) == (2, [])
    assert words in ran.stderr


def test_a_request_without_an_answer_exits_with_1(x: Path) -> None:
    client = FakeClient(failures={0: DeadlineExceeded(timeout_s=1.0)})
    ran = mxpool(client, "infer", "ranking", "--input", f"x={x}", "--timeout", 1)
    assert (ran.exit_code, ran.stderr) == (1, "deadline_exceeded: no answer within 1.000 s\n")
