from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mxpool.cli.exits import BadSource
from mxpool.cli.images import ImageReader, Layout
from mxpool.tensors import TensorSpec


def saved(path: Path, pixels: object) -> Path:
    Image.fromarray(np.array(pixels, np.uint8)).save(path)
    return path


RED_TO_BLUE = [[[255, 0, 0], [0, 0, 255]]]  # one row, two pixels


def test_channels_come_first_or_last_as_the_layout_says(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", RED_TO_BLUE)
    first = ImageReader(TensorSpec("x", "UINT8", (3, 1, 2))).read(path)
    last = ImageReader(TensorSpec("x", "UINT8", (1, 2, 3)), Layout.nhwc).read(path)
    assert first.tolist() == [[[255, 0]], [[0, 0]], [[0, 255]]]
    assert last.tolist() == RED_TO_BLUE
    assert first.flags.c_contiguous
    assert last.dtype == np.uint8


def test_the_number_of_channels_is_the_models(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", RED_TO_BLUE)
    assert ImageReader(TensorSpec("x", "FP32", (1, 1, 2))).read(path).tolist() == [[[76.0, 29.0]]]
    assert ImageReader(TensorSpec("x", "UINT8", (4, 1, 2))).read(path)[3].tolist() == [[255, 255]]


def test_a_size_replaces_that_of_the_dims(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", RED_TO_BLUE)
    assert ImageReader(TensorSpec("x", "FP32", (3, 1, 2)), size=(6, 4)).read(path).shape == (3, 4, 6)


def test_pixels_are_scaled_then_normalised_by_channel(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", [[[100, 50, 0]]])
    reader = ImageReader(TensorSpec("x", "FP32", (3, 1, 1)), scale=0.1, mean=(1.0, 2.0, 3.0), std=(2.0, 1.0, 4.0))
    assert reader.read(path).ravel() == pytest.approx([4.5, 3.0, -0.75])


def test_integers_are_rounded_and_held_within_their_type_instead_of_wrapping(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", [[[255, 100, 0]]])
    reader = ImageReader(TensorSpec("x", "INT8", (3, 1, 1)), scale=2.0, mean=(300.0,))
    assert reader.read(path).ravel().tolist() == [127, -100, -128]


def test_an_image_is_turned_upright_as_its_tag_says(tmp_path: Path) -> None:
    image = Image.fromarray(np.array(RED_TO_BLUE, np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to view
    image.save(tmp_path / "a.png", exif=exif)
    assert ImageReader(TensorSpec("x", "UINT8", (3, 2, 1))).read(tmp_path / "a.png").shape == (3, 2, 1)
    assert ImageReader(TensorSpec("x", "UINT8", (3, 2, 1))).read(tmp_path / "a.png")[0].ravel().tolist() == [255, 0]


@pytest.mark.parametrize("content", [b"", b"text", b"\x89PNG\r\n\x1a\n cut"])
def test_a_file_that_is_no_image_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(BadSource, match=r"a\.png: "):
        ImageReader(TensorSpec("x", "FP32", (3, 1, 1))).read(path)


def test_a_truncated_image_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", np.random.default_rng(0).integers(0, 255, (64, 64, 3)))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BadSource, match=r"a\.png: "):
        ImageReader(TensorSpec("x", "FP32", (3, 64, 64))).read(path)


@pytest.mark.parametrize(
    ("dims", "mean", "words"),
    [
        ((3, 4), (0.0,), "an image needs three"),
        ((5, 4, 4), (0.0,), "has 5 channels in layout nchw"),
        ((3, 4, 4), (0.0, 1.0), "--mean has 2 values, the image 3 channels"),
    ],
)
def test_an_input_that_takes_no_such_image_is_refused(
    tmp_path: Path, dims: tuple[int, ...], mean: tuple[float, ...], words: str
) -> None:
    with pytest.raises(BadSource, match=words):
        ImageReader(TensorSpec("x", "FP32", dims), mean=mean).read(saved(tmp_path / "a.png", RED_TO_BLUE))
