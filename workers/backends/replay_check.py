"""Whether a replayed device graph answers as a plain run does, and whether anything wrote its outputs at all. Pure.

A replay can go wrong in silence: it reads an address that nobody fills any more, or holds nothing. So its answers to
two different inputs are held against those of a plain session, and outputs are poisoned before they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.tensors import Signature, TensorSpec

Arrays = Mapping[str, npt.NDArray[Any]]

POISON_NAN = {2: 0x7EA5, 4: 0x7FC0A5A5, 8: 0x7FF8A5A5A5A5A5A5}  # quiet NaNs whose payload no arithmetic makes by itself
WIDE_SEED = 4
SEEDS_MAX = 6  # further inputs that are tried until one has another answer than the first
POISON_BYTE = 0xA5  # of every other datatype; as a BOOL it is neither 0 nor 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one comparison: ``ok`` means that the replayed answers may be served.

    ``exact``: bit for bit. ``largest`` is the largest difference of a replayed value to the plain one, infinite where
    values cannot be compared; ``tolerance`` the largest one between the two plain runs; ``where`` the output that
    differs most, with the place in it, or empty.
    """

    ok: bool
    exact: bool
    largest: float
    tolerance: float
    where: str


def inputs(signature: Signature, rows: int, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Arrays of ``rows`` rows that nearly every model takes; other seeds give other values.

    Floats are uniform in [0, 1), from seed 4 on normal with a deviation of 1, 10 and then 100: a classifier may give
    everything small the same label. Integers are 0 or 1, which any table of two rows has.
    """
    random = np.random.default_rng(seed)
    spread = 10.0 ** min(seed - WIDE_SEED, 2)

    def filled(spec: TensorSpec) -> npt.NDArray[Any]:
        shape = signature.shape(spec, rows)
        values: npt.NDArray[Any]
        if spec.dtype.kind != "f":
            values = random.integers(0, 2, shape)
        else:
            values = random.random(shape) if seed < WIDE_SEED else random.normal(0, spread, shape)
        return np.asarray(values).astype(spec.dtype)

    return {spec.name: filled(spec) for spec in signature.inputs}


def two_inputs(
    signature: Signature, rows: int, answer: Callable[[dict[str, npt.NDArray[Any]]], Arrays]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]] | None:
    """Two inputs to which a plain run, ``answer``, answers differently; None if none are found.

    Without them nothing would show that a replay reads its input. Whatever ``answer`` raises passes.
    """
    first = inputs(signature, rows, 0)
    told = answer(first)
    for seed in range(1, SEEDS_MAX + 1):
        other = inputs(signature, rows, seed)
        if different(told, answer(other)):
            return first, other
    return None


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as unsigned integers: NaNs compare and bools hold any byte."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _poison_of(dtype: np.dtype[Any]) -> int:
    if dtype.kind == "f":
        return POISON_NAN[dtype.itemsize]
    return int.from_bytes(bytes([POISON_BYTE]) * dtype.itemsize, "little")


def poison(array: npt.NDArray[Any]) -> None:
    """Fill ``array`` with what no model computes: a NaN of ours, or a byte that repeats."""
    _bits(array)[...] = _poison_of(array.dtype)


def is_poison(array: npt.NDArray[Any]) -> bool:
    """True if all of ``array`` is poison and it holds anything: nothing has written to it.

    A model of INT8 or UINT8 outputs can compute that byte, so for one or two such values a true answer proves little;
    for FP values and BOOL it is no answer of a model, and for wider integers it takes every value of the tensor.
    """
    bits, expected = _bits(array), _poison_of(array.dtype)
    return array.size > 0 and bool(bits.flat[0] == expected and (bits == expected).all())


def same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Equal in dtype, shape and every bit, so NaNs too."""
    return one.dtype == other.dtype and one.shape == other.shape and bool((_bits(one) == _bits(other)).all())


def different(one: Arrays, other: Arrays) -> bool:
    """True if any array differs in any bit."""
    return one.keys() != other.keys() or not all(same(one[name], other[name]) for name in one)


def judge(plain: Arrays, plain_again: Arrays, replayed: Arrays) -> Verdict:
    """Hold ``replayed`` against two plain runs on the same inputs.

    Bits that are equal are enough. Otherwise no value may be further from the first plain run than the two plain runs
    are from each other anywhere in the same output; where those agree bit for bit, nothing else will do.
    """
    largest, tolerance, where, within = 0.0, 0.0, "", True
    if plain.keys() != replayed.keys():
        return Verdict(ok=False, exact=False, largest=np.inf, tolerance=0.0, where="the outputs' names")
    for name, expected in plain.items():
        allowed, _ = _difference(expected, plain_again[name])
        found, place = _difference(expected, replayed[name])
        within = within and (found == 0 or (found <= allowed and np.isfinite(allowed)))
        tolerance = max(tolerance, allowed)
        if found > largest:
            largest, where = found, f"{name}{list(place)}"
    return Verdict(ok=within, exact=not different(plain, replayed), largest=largest, tolerance=tolerance, where=where)


def _difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> tuple[float, tuple[int, ...]]:
    """The largest difference and where it is; infinite where a value is no number on one side only."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return np.inf, ()
    if same(one, other):
        return 0.0, ()
    unequal = _bits(one) != _bits(other)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    # Where bits differ there is some difference, be it that of 0.0 and -0.0, of two NaNs, or of two large integers.
    apart = np.where(unequal, np.where(np.isnan(apart), np.inf, np.maximum(apart, np.finfo(np.float64).tiny)), 0.0)
    place = np.unravel_index(int(np.argmax(apart)), apart.shape)
    return float(apart[place]), tuple(int(index) for index in place)
