"""Checks: the same request again, and different requests one after another; a stale answer is found."""

from __future__ import annotations

from itertools import cycle, islice

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked
from mxpool.cli.verify.difference import Noise, difference, rows_of_answer
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import Outcome, Result

INPUTS, MIXED = 100, 12
FEW = 7
REPEAT_MAX = 1e-3  # of an output's largest value: more is no rounding


def check_repeat(asked: Asked, material: Material) -> Outcome:
    """The same request some times over; sets ``asked.noise`` for the checks that follow."""
    noise = measured = asked.measure(material.request(material.rows_max))
    if noise.relative == 0:
        result, detail = Result.OK, "bit-equal"
    elif noise.relative <= REPEAT_MAX:
        result, detail = Result.NOTE, f"answers differ by {noise.relative:.3g} of the largest value from run to run"
    else:
        result = Result.FAILED
        detail = f"answers differ by {noise.relative:.3g} of the largest value: random operators, or wrong answers"
    if noise.relative > REPEAT_MAX:
        noise = Noise()  # what is wrong is no measure for the rest
    asked.noise = noise
    return Outcome(
        check="repeat",
        compared=f"one request of {material.rows_max} rows, 3 times",
        result=result,
        detail=detail,
        figures={"noise": measured.relative},
    )


def row_counts(material: Material) -> list[int]:
    """Rows of 100 requests, fewer of large ones: 1, all, 7, all some times over, so that sizes change, then 1 and 7."""
    full = material.rows_max
    few = min(FEW, full)
    mixed = material.count(MIXED, full) // 4 * [1, full, few, full]
    return [*mixed, *islice(cycle((1, few)), max(material.count(INPUTS, few) - len(mixed), 0))]


def check(asked: Asked, plain: Asked | None, material: Material) -> Outcome:
    """Different inputs in a row, then the same ones backwards; and those of a plain worker, where there is one."""
    counts = row_counts(material)
    count = len(counts)
    requests = [material.request(rows) for rows in counts]
    first = [asked.infer(request) for request in requests]
    again = [asked.infer(request) for request in reversed(requests)][::-1]
    stale = _unequal(first, again, asked.noise)
    other = [] if plain is None else _unequal([plain.infer(r) for r in requests], first, _wider(asked, plain))
    distinct = len({_digest(answer, material.signature.batched) for answer in first})
    return _judged(count, distinct, stale, other, plain is not None)


def _wider(asked: Asked, plain: Asked) -> Noise:
    return max(asked.noise, plain.noise, key=lambda noise: noise.relative)


def _unequal(expected: list[Arrays], got: list[Arrays], noise: Noise) -> list[str]:
    found = [(index, difference(a, b)) for index, (a, b) in enumerate(zip(expected, got, strict=True))]
    return [f"input {index}: {one}" for index, one in found if not noise.equal(one)]


def _digest(answer: Arrays, batched: bool) -> bytes:
    """All of an answer without rows, or the first row of one: its length must not make it another."""
    first = rows_of_answer(answer, 0, 1) if batched else answer
    return b"".join(array.tobytes() for array in first.values())


def _judged(count: int, distinct: int, stale: list[str], other: list[str], compared: bool) -> Outcome:
    result, detail = Result.OK, f"{distinct} of {count} answers are distinct, and each came again"
    if stale:
        result, detail = Result.FAILED, f"{len(stale)} of {count} answers were others the second time: {stale[0]}"
    elif other:
        result, detail = Result.FAILED, f"{len(other)} of {count} answers are not the plain worker's: {other[0]}"
    elif distinct == 1:
        result = Result.OK if compared else Result.NOTE
        detail = "every answer is the same: this model is insensitive to these inputs" + (
            ", the plain worker says the same" if compared else ", or answers are stale; try real rows with --npz"
        )
    with_plain = " and the plain worker's" if compared else ""
    return Outcome(
        check="consecutive inputs",
        compared=f"{count} different inputs, against a second pass backwards{with_plain}",
        result=result,
        detail=detail,
        figures={"inputs": count, "distinct": distinct, "wrong": len(stale) + len(other)},
    )
