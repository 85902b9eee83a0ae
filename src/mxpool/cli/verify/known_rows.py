"""Rows whose answers are known, so that each answer can be told to be that of its own request.

Another batch size is another computation, of which each row's answer is known too: with TF32, the default on CUDA, they
differ by more than rounding. A request that shares its batch may run at any of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked, sizes_of
from mxpool.cli.verify.difference import Difference, Noise, difference, worst
from mxpool.cli.verify.material import Material, joined, part

BLOCKS = 4
DISTINCT_ROWS = 200  # rows that are looked at
LEARN_S = 10.0  # after that long no further block is learned
SIZES_MAX = (
    1e-2  # of the largest value: what a batch size computes may be off by; TF32 keeps 10 bits, and errors add up
)


class Stretch(NamedTuple):
    """A request: rows ``start`` to ``stop`` of one block."""

    block: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"block {self.block}, rows {self.start} to {self.stop - 1}"


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Blocks of inputs, the answers of each at every batch size, the full one first, and how far an answer may be off.

    Of a model that couples rows, only whole blocks have an answer of their own: ``whole``.
    """

    inputs: list[Arrays]
    answers: list[list[Arrays]]
    block: int
    whole: bool
    noise: Noise

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return self.block * len(self.inputs)

    def stretch(self, material: Material) -> Stretch:
        """A random request."""
        block = material.integer(0, len(self.inputs) - 1)
        if self.whole:
            return Stretch(block, 0, self.block)
        count = min(material.integer(1, self.block), material.integer(1, self.block))  # more often few than many
        start = material.integer(0, self.block - count)
        return Stretch(block, start, start + count)

    def request(self, stretch: Stretch) -> Arrays:
        """What to send for ``stretch``."""
        return self._cut(self.inputs[stretch.block], stretch)

    def difference(self, stretch: Stretch, answer: Arrays) -> Difference:
        """How far ``answer`` is from what ``stretch`` has, at the batch size where it is nearest."""
        known = self.answers[stretch.block]
        found = (difference(self._cut(whole, stretch), answer, whole) for whole in known)
        return min(found, key=lambda one: one.relative / one.close)

    def _cut(self, block: Arrays, stretch: Stretch) -> Arrays:
        return block if self.whole else part(block, stretch.start, stretch.stop)

    def right(self, found: Difference) -> bool:
        """True if an answer may be that far off: not at all where it had its batch for itself, else by rounding."""
        return self.noise.equal(found) if self.whole else self.noise.close(found)

    @property
    def distinct(self) -> bool:
        """True if most answers cannot be taken for that of the row, or of the block, after them."""
        if self.whole:
            pairs = list(pairwise(full for full, *_ in self.answers))
        else:
            rows = [part(full, row, row + 1) for full, *_ in self.answers for row in range(self.block)]
            pairs = list(pairwise(rows[:DISTINCT_ROWS]))
        apart = sum(not self.right(difference(one, other)) for one, other in pairs)
        return 2 * apart > len(pairs) or not pairs


def learn(asked: Asked, material: Material, blocks: int = BLOCKS) -> KnownRows:
    """Run up to ``blocks`` blocks, each alone, whole and in parts of every batch size."""
    full = material.rows_max
    whole = asked.coupled or not material.signature.batched
    sizes = [] if whole else [size for size in sizes_of(asked.workers()) if size < full]
    end_s = time.monotonic() + LEARN_S
    requests: list[Arrays] = []
    answers: list[list[Arrays]] = []
    for _ in range(min(blocks, material.count(blocks, full))):
        if not answers or time.monotonic() < end_s:
            requests.append(material.request(full))
            answers.append(list(_answers(asked, requests[-1], full, sizes)))
    return KnownRows(requests, answers, full, whole, asked.noise)


def _answers(asked: Asked, request: Arrays, full: int, sizes: list[int]) -> Iterator[Arrays]:
    """Of the whole, then of its parts of each of ``sizes`` rows; without a size that is off by more than SIZES_MAX."""
    told = asked.infer(request)
    yield told
    for size in sizes:
        parts = [asked.infer(part(request, at, min(at + size, full))) for at in range(0, full, size)]
        found = joined(*parts)
        if worst([difference(told, found)]).relative <= SIZES_MAX:
            yield found
