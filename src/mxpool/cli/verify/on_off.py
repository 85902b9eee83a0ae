"""Check: answers of the served model, graph on, against those of a private worker with the graph off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mxpool.cli.verify.asking import Asked, captured
from mxpool.cli.verify.difference import Difference, Noise, difference, worst
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import Outcome, Result

ROWS = (1, 32, 64, 127, 128)  # the first seed's check list
TURNS = 3


def row_counts(rows_max: int, graph_sizes: Iterable[int]) -> list[int]:
    """Rows to compare at: ROWS as far as they fit, the last two below a smaller maximum, every captured size."""
    wanted = {*ROWS, rows_max - 1, rows_max, *graph_sizes}
    return sorted(rows for rows in wanted if 1 <= rows <= rows_max)


def check(asked: Asked, plain: Asked, material: Material) -> Iterator[Outcome]:
    """One row for each count of rows; the last one tells whether graphs were replayed at all."""
    before = asked.stats().get("graph", {})
    workers = asked.workers()  # none, if one that died is being started again
    for rows in row_counts(material.rows_max, captured(workers)):
        yield _at(asked, plain, material, rows, max(len(workers), 1))
    after = asked.stats().get("graph", {})
    replayed = after.get("hit", 0) - before.get("hit", 0)
    yield Outcome(
        check="graph replays",
        compared="batches counted as hit",
        result=Result.OK if replayed > 0 else Result.FAILED,
        detail=f"{replayed} batches of these comparisons were replays",
        figures={"hit": replayed},
    )


def _at(asked: Asked, plain: Asked, material: Material, rows: int, workers: int) -> Outcome:
    full = rows == material.rows_max
    # Full requests share no batch: many at once reach every worker. Smaller ones would share one, and go singly.
    copies, at_once = (4 * workers, 2 * workers) if full else (TURNS, 1)
    found = Difference()
    for _ in range(TURNS):
        request = material.request(rows)
        expected = plain.infer(request)
        answers = list(asked.push([request] * copies, at_once))
        one = worst(difference(expected, answer) for answer in answers)
        if not one.none:
            plain.noise = Noise(max(plain.noise.relative, plain.measure(request).relative))
        found = worst((found, one))
    return _judged(rows, found, plain.noise)


def _judged(rows: int, found: Difference, noise: Noise) -> Outcome:
    detail = str(found)
    if not found.none:
        within = "within" if noise.equal(found) else "more than"
        detail += f"; {within} what runs of the plain worker differ by ({noise.relative:.3g})"
    return Outcome(
        check="graph on/off",
        compared=f"{rows} rows, {TURNS} inputs",
        result=Result.OK if noise.equal(found) else Result.FAILED,
        detail=detail,
        figures={"rows": rows, **found.figures(), "plain_noise": noise.relative},
    )
