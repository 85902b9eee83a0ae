"""Where ``push`` takes its frames from: .npy and .npz files, images, and folders of them.

A frame is one row of every input, without the batch axis; ``requests`` joins rows to requests.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mxpool.cli.exits import BadSource
from mxpool.cli.images import IMAGE_SUFFIXES, ImageReader
from mxpool.cli.surroundings import Arrays

ARRAY_SUFFIXES = (".npy", ".npz")
_ZIP = b"PK\x03\x04"


class Frame(NamedTuple):
    """One row and where it came from: ``faces.npy[17]``, ``faces/0017.png``."""

    label: str
    arrays: Arrays


class Request(NamedTuple):
    """What is sent as one request, and the labels of its rows."""

    labels: list[str]
    arrays: Arrays


def files(paths: Iterable[Path]) -> list[Path]:
    """``paths`` with every folder replaced by the arrays and images in and below it, by name.

    Raises:
        BadSource: for a path that is not there, a folder with nothing to push, or another kind of file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if _readable(file))
            if not inside:
                raise BadSource(f"{path}: the folder holds no arrays and no images")
            found += inside
        elif not path.exists():
            raise BadSource(f"{path}: no such file")
        elif not _readable(path):
            kinds = ", ".join((*ARRAY_SUFFIXES, *IMAGE_SUFFIXES))
            raise BadSource(f"{path}: neither an array nor an image (known: {kinds})")
        else:
            found.append(path)
    return found


def _readable(path: Path) -> bool:
    return path.suffix.lower() in ARRAY_SUFFIXES + IMAGE_SUFFIXES and path.is_file()


def load_arrays(path: Path, input_name: str) -> Arrays:
    """The arrays of one file: those of a .npz by name, that of a .npy as ``input_name``. Nothing is unpickled.

    Raises:
        BadSource: if it cannot be read, is not numpy's, or holds objects.
    """
    try:
        with path.open("rb") as file:  # np.load would leave a broken archive open
            if file.read(len(_ZIP)) != _ZIP:
                return {input_name: np.lib.format.open_memmap(path, mode="r")}
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise BadSource(f"{path}: not a file of plain numpy arrays: {error}") from None


def frames(paths: Sequence[Path], input_name: str, images: ImageReader) -> Iterator[Frame]:
    """Every frame of ``paths`` in order; the first axis of a file's arrays counts its frames.

    Raises:
        BadSource: at the file that cannot be used, after the frames before it.
    """
    for path in paths:
        if path.suffix.lower() not in ARRAY_SUFFIXES:
            yield Frame(str(path), {input_name: images.read(path)})
            continue
        arrays = load_arrays(path, input_name)
        lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
        if len(lengths) != 1 or lengths == {0}:
            raise BadSource(f"{path}: its arrays have no first axis of one length that counts frames (see --whole)")
        for index in range(lengths.pop()):
            yield Frame(f"{path}[{index}]", {name: array[index, ...] for name, array in arrays.items()})


def requests(rows: Iterable[Frame], rows_per_request: int) -> Iterator[Request]:
    """Frames joined to requests of ``rows_per_request`` rows; fewer at the end, and where names or shapes change."""
    group: list[Frame] = []
    for frame in rows:
        if group and _kinds(frame) != _kinds(group[0]):
            yield _join(group)
            group = []
        group.append(frame)
        if len(group) == rows_per_request:
            yield _join(group)
            group = []
    if group:
        yield _join(group)


def whole(paths: Iterable[Path], input_name: str) -> Iterator[Request]:
    """Each file as one request, as it is: the arrays carry the batch axis already.

    Raises:
        BadSource: for an image, and as ``load_arrays``.
    """
    for path in paths:
        if path.suffix.lower() not in ARRAY_SUFFIXES:
            raise BadSource(f"{path}: --whole takes .npy and .npz files")
        yield Request([str(path)], load_arrays(path, input_name))


def singly(rows: Iterable[Frame]) -> Iterator[Request]:
    """Each frame as one request, for a model without a batch axis."""
    return (Request([frame.label], frame.arrays) for frame in rows)


def _kinds(frame: Frame) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    return [(name, array.shape, array.dtype) for name, array in frame.arrays.items()]


def _join(group: list[Frame]) -> Request:
    def stacked(name: str) -> npt.NDArray[Any]:
        return np.stack([frame.arrays[name] for frame in group])

    return Request([frame.label for frame in group], {name: stacked(name) for name in group[0].arrays})
