"""Check: whether a row's answer depends on the rows beside it. Where it does, that is told, and no failure."""

from __future__ import annotations

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked, sizes_of
from mxpool.cli.verify.difference import Difference, difference, worst
from mxpool.cli.verify.material import Material, enlarged, joined, part
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.errors import RunFailed

FACTOR = 100.0
ROWS = 7


def check(asked: Asked, material: Material) -> Outcome:
    """The same first rows with other neighbours, with padding instead of some, and alone; sets ``asked.coupled``."""
    full = material.rows_max
    compared = "the same rows with other neighbours, with padding, and alone"
    if full == 1:
        return Outcome(check="coupling", compared=compared, result=Result.SKIPPED, detail="a batch is one row")
    rows = min(ROWS, full // 2)
    mine, others = material.request(rows), material.request(full - rows)
    base = part(asked.infer(joined(mine, others)), 0, rows)
    variants = {
        "other neighbours": joined(mine, material.request(full - rows)),
        f"neighbours {FACTOR:g} times larger": joined(mine, enlarged(others, FACTOR)),
    }
    padded = _rows_that_pad(asked, full)
    if padded is not None and padded > rows:
        variants[f"{full - padded} rows of padding"] = joined(mine, part(others, 0, padded - rows))
    found = {name: _first_rows(asked, variant, base, rows) for name, variant in variants.items()}
    same_size = worst(one for one in found.values() if one is not None)
    alone = difference(base, asked.infer(mine))
    coupled, by_size = not asked.noise.close(same_size), not asked.noise.close(alone)
    asked.coupled = coupled
    return _judged(compared, found, alone, coupled=coupled, by_size=by_size)


def _rows_that_pad(asked: Asked, full: int) -> int | None:
    """The fewest rows that are padded to a full batch; None where that takes a full one."""
    smaller = [size for size in sizes_of(asked.workers()) if size < full]
    fewest = smaller[-1] + 1 if smaller else 1
    return fewest if fewest < full else None


def _first_rows(asked: Asked, request: Arrays, base: Arrays, rows: int) -> Difference | None:
    """None where the model fails the batch: its inputs must not be that large."""
    try:
        return difference(base, part(asked.infer(request), 0, rows))
    except RunFailed:
        return None


def _judged(
    compared: str, found: dict[str, Difference | None], alone: Difference, *, coupled: bool, by_size: bool
) -> Outcome:
    same_size = worst(one for one in found.values() if one is not None)
    if coupled:
        where = next(name for name, one in found.items() if one == same_size)
        detail = f"ROWS ARE COUPLED: answers depend on neighbours or padding by up to {same_size.largest:.3g} ({where})"
    elif same_size.none:
        detail = "rows are independent: bit-equal at the same padded size"
    else:
        detail = f"rows are independent but for rounding at the same padded size: {same_size}"
    if not alone.none and not coupled:
        why = "BY MORE THAN ROUNDING" if by_size else "by rounding"
        detail += f"; alone, at another batch size, off by {alone.largest:.3g}, {why}"
    failed = [name for name, one in found.items() if one is None]
    detail += f"; the model fails with {', '.join(failed)}" if failed else ""
    figures = {name: None if one is None else one.largest for name, one in found.items()}
    return Outcome(
        check="coupling",
        compared=compared,
        result=Result.NOTE if coupled or by_size else Result.OK,
        detail=detail,
        figures={"coupled": coupled, "largest": same_size.largest, **figures, "alone": alone.largest},
    )
