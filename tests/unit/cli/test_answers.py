from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mxpool.cli import answers
from mxpool.cli.exits import BadSource


def test_outputs_of_any_name_go_through_an_archive_and_back(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    arrays: dict[str, npt.NDArray[Any]] = {
        "file": np.arange(3),
        "save_infer_model/scale_0.tmp_1": np.ones((2, 2), np.float32),
    }
    answers.save(path, arrays)
    with np.load(path, allow_pickle=False) as loaded:
        assert {name: loaded[name].tolist() for name in loaded.files} == {
            name: array.tolist() for name, array in arrays.items()
        }


def test_an_archive_joins_the_rows_of_all_answers(tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    with answers.open_answers(path, batched=True) as file:
        file.add(["a", "b"], {"y": np.array([[1], [2]])})
        file.add(["c"], {"y": np.array([[3]])})
    assert np.load(path)["y"].tolist() == [[1], [2], [3]]


def test_lines_after_an_error_hold_what_had_come(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = answers.open_answers(path, batched=True)
    with contextlib.suppress(KeyError), file:
        file.add(["a"], {"y": np.array([[1.5]])})
        raise KeyError
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"source": "a", "outputs": {"y": [1.5]}}]


def test_a_line_for_a_whole_file_holds_all_of_its_rows_and_no_number_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with answers.open_answers(path, batched=True) as file:
        file.add(["a.npy"], {"y": np.array([[1.0], [np.nan]])})
    assert path.read_text() == '{"source": "a.npy", "outputs": {"y": [[1.0], [null]]}}\n'


def test_a_model_without_a_batch_axis_may_answer_with_a_scalar(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with answers.open_answers(path, batched=False) as file:
        file.add(["a.npy"], {"y": np.array(1.5)})
    assert path.read_text() == '{"source": "a.npy", "outputs": {"y": 1.5}}\n'


@pytest.mark.parametrize("name", ["out.txt", "out"])
def test_another_suffix_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadSource, match=name):
        answers.open_answers(Path(name), batched=True)


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    for suffix in ("npz", "jsonl"):
        path = tmp_path / "none" / f"out.{suffix}"
        with pytest.raises(BadSource, match=str(path)), answers.open_answers(path, batched=True) as file:
            file.add(["a"], {"y": np.array([[1.5]])})
