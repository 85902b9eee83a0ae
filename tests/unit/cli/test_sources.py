from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.cli import sources
from mxpool.cli.exits import BadSource
from mxpool.cli.images import ImageReader
from mxpool.tensors import TensorSpec

READER = ImageReader(TensorSpec("x", "FP32", (1, 2, 2)))


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_file_of_objects_is_refused_by_name_and_nothing_in_it_runs(tmp_path: Path, suffix: str) -> None:
    touched, path = tmp_path / "touched", tmp_path / f"trap.{suffix}"
    array = np.array([Trap(touched)], dtype=object)
    np.save(path, array) if suffix == "npy" else np.savez(path, x=array)
    with pytest.raises(BadSource, match=f"trap.{suffix}: not a file of plain numpy arrays"):
        sources.load_arrays(path, "x")
    assert not touched.exists()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04 cut", b"text", b"\x80\x04N."])
def test_a_file_that_is_not_numpys_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.npy"
    path.write_bytes(content)
    with pytest.raises(BadSource, match=r"odd\.npy: not a file of plain numpy arrays"):
        sources.load_arrays(path, "x")


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_file_that_was_cut_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    for name in ("a.npy", "a.npz"):
        path = tmp_path / name
        array = np.arange(100, dtype=np.float32)
        np.save(path, array) if name == "a.npy" else np.savez(path, x=array)
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(BadSource, match=name):
            sources.load_arrays(path, "x")


def test_a_folder_gives_its_arrays_and_images_in_and_below_it_by_name_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("c.png", "a.npy", "b/d.JPG", "notes.txt", "e.npz"):
        (tmp_path / name).touch()
    assert [str(file.relative_to(tmp_path)) for file in sources.files([tmp_path])] == [
        "a.npy",
        "b/d.JPG",
        "c.png",
        "e.npz",
    ]


@pytest.mark.parametrize(
    ("name", "words"), [("none.npy", "no such file"), ("a.txt", "neither an array nor an image"), ("empty", "holds no")]
)
def test_a_path_with_nothing_to_push_is_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadSource, match=words) as caught:
        sources.files([tmp_path / name])
    assert str(tmp_path / name) in str(caught.value)


def test_arrays_without_a_common_first_axis_have_no_frames(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros((2, 1)), b=np.zeros((3, 1)))
    np.save(tmp_path / "b.npy", np.float32(1))
    for name in ("a.npz", "b.npy"):
        with pytest.raises(BadSource, match=f"{name}: its arrays have no first axis"):
            list(sources.frames([tmp_path / name], "x", READER))


def frame(number: int, width: int) -> sources.Frame:
    return sources.Frame(str(number), {"x": np.full(width, number, np.float32)})


@given(widths=st.lists(st.integers(1, 2), max_size=12), limit=st.integers(1, 5))
def test_requests_hold_every_frame_once_in_order_at_most_the_limit_and_never_two_shapes(
    widths: list[int], limit: int
) -> None:
    given_frames = [frame(number, width) for number, width in enumerate(widths)]
    made = list(sources.requests(given_frames, limit))
    assert [label for request in made for label in request.labels] == [str(number) for number in range(len(widths))]
    assert all(1 <= len(request.labels) == len(request.arrays["x"]) <= limit for request in made)
    rows = [row.tolist() for request in made for row in request.arrays["x"]]
    assert rows == [one.arrays["x"].tolist() for one in given_frames]


def test_a_full_request_does_not_wait_for_the_frame_after_it() -> None:
    def one_then_failure() -> Any:
        yield frame(0, 1)
        raise BadSource("second")

    made = sources.requests(one_then_failure(), 1)
    assert next(made).labels == ["0"]


def test_whole_takes_no_images(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="--whole takes"):
        list(sources.whole([tmp_path / "a.png"], "x"))
