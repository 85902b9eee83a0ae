"""Check: different data in every slot at once."""

from __future__ import annotations

from itertools import cycle, islice

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked
from mxpool.cli.verify.difference import difference
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import Outcome, Result

WAVES_MAX = 20


def check(asked: Asked, material: Material) -> Outcome:
    """Full requests, which share no slot, more at once than there are slots; each against its answer when alone."""
    at_once = 2 * len(_generations(asked))
    count = max(material.count(at_once, material.rows_max), at_once // 2)  # different data in every slot
    requests = [material.request(material.rows_max) for _ in range(count)]
    alone = [asked.infer(request) for request in requests]
    before, waves = _generations(asked), 0
    wrong: list[str] = []
    idle = list(before)
    while idle and not wrong and waves < WAVES_MAX:
        waves += 1
        wrong = _wave(asked, requests, alone, at_once)
        after = _generations(asked)
        idle = [slot for slot, generation in before.items() if after.get(slot, generation) == generation]
    result, detail = Result.OK, f"all {len(before)} slots were used, every answer is that of the request alone"
    if wrong:
        result = Result.FAILED
        detail = f"{len(wrong)} of {at_once} answers are not those of the request alone: {wrong[0]}"
    elif idle:
        result, detail = Result.NOTE, f"answers are right, but slots {', '.join(map(str, idle))} were never used"
    return Outcome(
        check="every slot",
        compared=f"{at_once} full requests at once, {count} different ones, against each alone",
        result=result,
        detail=detail,
        figures={"slots": len(before), "unused": idle, "wrong": len(wrong), "requests": at_once * waves},
    )


def _generations(asked: Asked) -> dict[int, int]:
    return {slot["slot"]: slot["generation"] for slot in asked.slots()}


def _wave(asked: Asked, requests: list[Arrays], alone: list[Arrays], at_once: int) -> list[str]:
    answers = asked.push(islice(cycle(requests), at_once), at_once)
    found = [difference(expected, answer) for expected, answer in zip(cycle(alone), answers, strict=False)]
    return [f"request {index}: {one}" for index, one in enumerate(found) if not asked.noise.equal(one)]
