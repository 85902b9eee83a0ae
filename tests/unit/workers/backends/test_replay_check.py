from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mxpool.tensors import DATATYPES, Signature, TensorSpec
from mxpool.workers.backends.replay_check import different, inputs, is_poison, judge, poison, same, two_inputs

Array = npt.NDArray[Any]
DTYPES = st.sampled_from(sorted(DATATYPES.values(), key=str))
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    found: Array = draw(hnp.arrays(draw(DTYPES), draw(SHAPES)))
    return found


FLOATS = hnp.arrays(np.float32, 6, elements=st.floats(-100, 100, width=32))


def one(array: Array) -> dict[str, Array]:
    return {"y": array}


@given(arrays())
def test_an_array_is_poison_once_it_is_poisoned_and_not_after_one_value_is_written(array: Array) -> None:
    poison(array)
    assert is_poison(array)
    array.flat[-1] = 1
    assert not is_poison(array)


@given(arrays())
def test_poison_is_found_in_a_view_that_is_not_contiguous(array: Array) -> None:
    wide = np.stack([array, array], axis=-1)
    poison(wide[..., 0])
    assert is_poison(wide[..., 0])
    assert same(wide[..., 1], array)


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_what_models_answer_when_they_fail_by_themselves_is_no_poison(datatype: str) -> None:
    dtype = DATATYPES[datatype]
    for value in (0, 1, *((math.nan, math.inf, -math.inf) if dtype.kind == "f" else ())):
        assert not is_poison(np.full((2, 3), value, dtype))
    assert not is_poison(np.zeros((0, 3), dtype))


def test_poisoned_floats_are_nan_and_a_poisoned_bool_is_no_bool() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        array = np.ones(3, dtype)
        poison(array)
        assert np.isnan(array).all()
    flags = np.ones(3, np.bool_)
    poison(flags)
    assert set(flags.view(np.uint8)) == {0xA5}


@given(arrays())
def test_answers_that_are_equal_bit_for_bit_are_right_whatever_they_hold(array: Array) -> None:
    verdict = judge(one(array), one(array.copy()), one(array.copy()))
    assert (verdict.ok, verdict.exact, verdict.largest, verdict.where) == (True, True, 0.0, "")


@given(arrays())
def test_poison_is_never_a_right_answer(array: Array) -> None:
    broken = array.copy()
    poison(broken)
    if not same(broken, array):
        assert not judge(one(array), one(array.copy()), one(broken)).ok


@given(FLOATS, FLOATS, FLOATS)
def test_without_equal_bits_the_two_plain_runs_say_how_far_apart_answers_may_be(a: Array, b: Array, c: Array) -> None:
    allowed = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
    found = np.abs(a.astype(np.float64) - c.astype(np.float64)).max()
    verdict = judge(one(a), one(b), one(c))
    assert verdict.exact == (a.tobytes() == c.tobytes())
    assert verdict.ok == (verdict.exact or (a.tobytes() != b.tobytes() and max(found, 1e-300) <= max(allowed, 1e-300)))
    assert verdict.largest == pytest.approx(found)
    assert verdict.tolerance == pytest.approx(allowed)


def test_one_output_that_wavers_excuses_no_other_one() -> None:
    plain = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    again = {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    replayed = {"a": np.full(2, 0.5, np.float32), "b": np.array([0, 0.25], np.float32)}
    verdict = judge(plain, again, replayed)
    assert not verdict.ok
    assert judge(plain, again, {**replayed, "b": plain["b"]}).ok
    assert verdict.where == "a[0]"


def test_the_place_of_the_largest_difference_is_named() -> None:
    plain, replayed = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    replayed[1, 2] = 4
    verdict = judge(one(plain), one(plain), one(replayed))
    assert (verdict.ok, verdict.largest, verdict.where) == (False, 4.0, "y[1, 2]")


@pytest.mark.parametrize("other", [math.nan, -0.0])
def test_a_nan_or_a_sign_on_one_side_only_is_a_difference(other: float) -> None:
    plain = np.zeros(2, np.float32)
    replayed = np.array([0, other], np.float32)
    assert not judge(one(plain), one(plain), one(replayed)).ok
    assert different(one(plain), one(replayed))


def test_two_plain_runs_of_which_one_is_nan_allow_nothing() -> None:
    plain, again = np.zeros(2, np.float32), np.array([0, math.nan], np.float32)
    assert not judge(one(plain), one(again), one(np.ones(2, np.float32))).ok


@pytest.mark.parametrize(
    "replayed", [{}, {"z": np.zeros(2)}, {"y": np.zeros(3)}, {"y": np.zeros(2, np.float32)}], ids=str
)
def test_other_names_shapes_and_dtypes_are_wrong(replayed: dict[str, Array]) -> None:
    plain = {"y": np.zeros(2)}
    verdict = judge(plain, plain, replayed)
    assert not verdict.ok
    assert verdict.largest == math.inf


SPECS = tuple(TensorSpec(f"x_{name}", name, (3,)) for name in sorted(DATATYPES))


@given(st.integers(0, 1000), st.sampled_from([(0, 1), (8, 1), (8, 8)]))
def test_inputs_fit_the_signature_and_are_the_same_for_the_same_seed(seed: int, batch: tuple[int, int]) -> None:
    signature = Signature(SPECS, (), batch[0])
    found = inputs(signature, batch[1], seed)
    assert list(found) == [spec.name for spec in SPECS]
    for spec in SPECS:
        array = found[spec.name]
        assert (array.dtype, array.shape) == (spec.dtype, signature.shape(spec, batch[1]))
        assert np.isfinite(array).all()
        if seed < 4 or array.dtype.kind != "f":
            assert (array >= 0).all()
            assert (array <= 1).all()
    assert not different(found, inputs(signature, batch[1], seed))


def test_other_seeds_give_other_inputs() -> None:
    signature = Signature(SPECS, (), 8)
    found = [inputs(signature, 8, seed) for seed in range(6)]
    assert all(different(found[i], found[j]) for i in range(6) for j in range(i))


def test_two_inputs_are_looked_for_until_their_answers_differ() -> None:
    """A threshold that only wide inputs pass; then one that none passes; one input that is answered by its number."""
    signature = Signature((TensorSpec("x", "FP32", (3,)),), (), 8)
    asked: list[float] = []

    def above(threshold: float, array: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        asked.append(float(array["x"].max()))
        return {"y": np.maximum(array["x"] - threshold, 0)}

    found = two_inputs(signature, 8, partial(above, 2))
    assert found is not None
    assert different(above(2, found[0]), above(2, found[1]))
    assert max(asked) > 2
    assert two_inputs(signature, 8, partial(above, 1e9)) is None
    first = two_inputs(signature, 8, lambda array: array)
    assert first is not None
    assert (first[1]["x"] == inputs(signature, 8, 1)["x"]).all()
