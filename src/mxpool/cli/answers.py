"""Where ``infer`` and ``push`` write answers: a .npz of all of them, or a .jsonl with a line for each row."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

import numpy as np

from mxpool.cli.exits import BadSource
from mxpool.cli.printing import json_text
from mxpool.cli.surroundings import Arrays


class AnswerFile(AbstractContextManager["AnswerFile"], Protocol):
    """An open file of answers; complete once it is left without an error."""

    def add(self, labels: Sequence[str], outputs: Arrays) -> None:
        """Add the answer to one request, whose rows came from ``labels``."""


class Nowhere(AnswerFile):
    """Answers are counted, not kept."""

    def add(self, labels: Sequence[str], outputs: Arrays) -> None:
        """Drop them."""

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


class JsonLines(AnswerFile):
    """One line for each row: ``{"source": label, "outputs": {name: nested lists}}``; written as answers come.

    A request whose rows do not match its labels (a whole file) is one line.
    """

    def __init__(self, path: Path, *, batched: bool) -> None:
        self._path = path
        self._batched = batched
        self._file: TextIO | None = None

    def add(self, labels: Sequence[str], outputs: Arrays) -> None:
        """Write the lines of one answer."""
        by_row = self._batched and all(array.ndim and len(array) == len(labels) for array in outputs.values())
        if not by_row:
            self._write(labels[0], outputs)
            return
        for row, label in enumerate(labels):
            self._write(label, {name: array[row] for name, array in outputs.items()})

    def _write(self, label: str, outputs: Arrays) -> None:
        assert self._file is not None  # entered
        self._file.write(json_text({"source": label, "outputs": outputs}) + "\n")

    def __enter__(self) -> JsonLines:
        """Make the file."""
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise BadSource(f"{self._path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        """Close it; after an error it holds what had come."""
        if self._file is not None:
            self._file.close()


class Npz(AnswerFile):
    """Each output of all answers as one array ``[rows, *dims]``; held in memory until the end, written if all came.

    Answers of a model without a batch axis are stacked on a new first axis.
    """

    def __init__(self, path: Path, *, batched: bool) -> None:
        self._path = path
        self._batched = batched
        self._answers: list[Arrays] = []

    def add(self, labels: Sequence[str], outputs: Arrays) -> None:  # noqa: ARG002 - an array has no labels
        """Keep one answer."""
        self._answers.append(outputs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the file, unless there was an error: half of the answers would pass for all."""
        if kind is None and self._answers:
            join = np.concatenate if self._batched else np.stack
            save(self._path, {name: join([one[name] for one in self._answers]) for name in self._answers[0]})


def save(path: Path, arrays: Arrays) -> None:
    """Write ``arrays`` as .npz under their own names.

    Raises:
        BadSource: if the file cannot be written.
    """
    try:
        # savez would take a tensor named "file" for its own argument.
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    except OSError as error:
        raise BadSource(f"{path}: {error.strerror}") from None


def open_answers(path: Path | None, *, batched: bool) -> AnswerFile:
    """The file for ``path`` by its suffix; None keeps nothing.

    Raises:
        BadSource: for another suffix.
    """
    if path is None:
        return Nowhere()
    kinds: dict[str, type[JsonLines] | type[Npz]] = {".jsonl": JsonLines, ".npz": Npz}
    if path.suffix.lower() not in kinds:
        raise BadSource(f"{path}: answers are written as .npz or .jsonl")
    return kinds[path.suffix.lower()](path, batched=batched)
