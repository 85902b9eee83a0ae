"""Answers compared element by element. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.cli.surroundings import Arrays

Array = npt.NDArray[Any]
CLOSE = 1e-4  # of an output's largest value: kernels add in another order where a batch has another size
CLOSE_HALF = 4e-3  # the same for float16, four units in the last place


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst element of two answers: ``none`` if all are equal, bit for bit (any NaN equals any other)."""

    largest: float = 0.0
    relative: float = 0.0
    tensor: str = ""
    row: int = 0
    element: int = 0
    close: float = CLOSE

    @property
    def none(self) -> bool:
        """True if there is no difference."""
        return not self.tensor

    def __str__(self) -> str:
        if self.none:
            return "bit-equal"
        return (
            f"largest difference {self.largest:.3g} ({self.relative:.3g} of the largest value) in {self.tensor!r}, "
            f"row {self.row}, element {self.element}"
        )

    def figures(self) -> dict[str, Any]:
        """As ``--json`` has it."""
        return {
            "bit_equal": self.none,
            "largest_difference": self.largest,
            "relative_difference": self.relative,
            "tensor": self.tensor or None,
            "row": None if self.none else self.row,
            "element": None if self.none else self.element,
        }


def difference(expected: Arrays, got: Arrays, whole: Arrays | None = None) -> Difference:
    """The worst difference of ``got``, relative to the largest magnitude of its tensor in ``expected``.

    Where ``expected`` is some rows of an answer, ``whole`` is that answer, for its magnitude: one row's can be tiny.

    Another name, datatype or shape is an infinite difference, as is any other integer than expected.
    """
    if expected.keys() != got.keys():
        return Difference(np.inf, np.inf, ", ".join(sorted(expected.keys() ^ got.keys())))
    whole = expected if whole is None else whole
    return worst(_tensor(name, array, got[name], whole[name]) for name, array in expected.items())


def _tensor(name: str, expected: Array, got: Array, whole: Array) -> Difference:
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return Difference(np.inf, np.inf, name)
    if expected.tobytes() == got.tobytes():
        return Difference()
    if expected.dtype.kind != "f":
        flat = (expected != got).reshape(-1)
        return _at(name, expected, int(np.argmax(flat)), np.inf, np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(expected.astype(np.float64) - got.astype(np.float64))
    distance[np.isnan(expected) & np.isnan(got)] = 0.0
    distance[expected == got] = 0.0  # infinities of one sign, zeros of two
    distance[np.isnan(distance)] = np.inf
    largest = float(distance.max())
    if largest == 0:
        return Difference()
    return _at(name, expected, int(np.argmax(distance)), largest, largest / scale(whole))


def _at(name: str, expected: Array, index: int, largest: float, relative: float) -> Difference:
    per_row = max(int(np.prod(expected.shape[1:])), 1) if expected.ndim else 1
    close = CLOSE_HALF if expected.dtype == np.float16 else CLOSE
    return Difference(largest, relative, name, index // per_row, index % per_row, close)


def scale(array: Array) -> float:
    """The largest finite magnitude in ``array``; 1 where there is none but 0."""
    finite = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(finite.max()) or 1.0 if finite.size else 1.0


def worst(differences: Iterable[Difference]) -> Difference:
    """The largest of them: by the relative difference, in units of what rounding may do."""
    return max(differences, key=lambda one: one.relative / one.close, default=Difference())


@dataclass(frozen=True, slots=True)
class Noise:
    """How far two runs of one request are from each other: what no comparison can hold against an answer."""

    relative: float = 0.0

    def equal(self, found: Difference) -> bool:
        """True if ``found`` is none, or at most twice the noise."""
        return found.none or found.relative <= 2 * self.relative

    def close(self, found: Difference) -> bool:
        """True if ``found`` may be due to another place in a batch of the same size."""
        return self.equal(found) or found.relative <= found.close


def rows_of_answer(answer: Mapping[str, Array], start: int, stop: int) -> Arrays:
    """Rows ``start`` to ``stop`` of every output."""
    return {name: array[start:stop] for name, array in answer.items()}
