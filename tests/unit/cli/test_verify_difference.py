from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mxpool.cli.verify.difference import Difference, Noise, difference, worst

Array = npt.NDArray[Any]


def one(value: object, dtype: str = "float32") -> dict[str, Array]:
    return {"y": np.array(value, dtype)}


@given(arrays.arrays(np.float32, (3, 2)), arrays.arrays(np.float32, (3, 2)))
def test_there_is_no_difference_only_between_equal_values(a: Array, b: Array) -> None:
    assert difference({"y": a}, {"y": a.copy()}).none
    assert difference({"y": a}, {"y": b}).none == np.array_equal(a, b, equal_nan=True)


@given(st.integers(0, 2), st.integers(0, 3), st.floats(0.0078125, 8, width=32))
def test_the_worst_element_is_found_where_it_is(row: int, element: int, amount: float) -> None:
    expected = np.full((3, 4), 2, np.float32)
    got = expected.copy()
    got[row, element] += np.float32(amount)
    found = difference({"y": expected}, {"y": got})
    assert (found.tensor, found.row, found.element) == ("y", row, element)
    assert found.largest == pytest.approx(amount, rel=1e-3)
    assert found.relative == pytest.approx(found.largest / 2)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (one([1, 2]), one([1, 2], "float64")),
        (one([1, 2]), one([[1, 2]])),
        (one([1, 2]), {"z": np.array([1, 2], np.float32)}),
        (one([1, 2], "int64"), one([1, 3], "int64")),
        (one([1, math.nan]), one([1, 2])),
        (one([1, math.inf]), one([1, -math.inf])),
    ],
)
def test_what_is_of_another_kind_is_infinitely_different(expected: dict[str, Array], got: dict[str, Array]) -> None:
    assert difference(expected, got).largest == math.inf
    assert not Noise(1.0).close(difference(expected, got))


def test_signs_of_zero_and_payloads_of_nan_are_no_difference() -> None:
    assert difference(one([0.0, math.nan]), one([-0.0, -math.nan])).none


def test_the_worst_is_judged_by_what_rounding_may_do() -> None:
    half = difference(one([[1, 1]], "float16"), one([[1, 1.002]], "float16"))
    single = difference(one([[1, 1]]), one([[1, 1.0005]]))
    assert half.relative > single.relative
    assert worst([half, single]) == single
    assert Noise().close(half)
    assert not Noise().close(single)
    assert worst([]) == Difference()
