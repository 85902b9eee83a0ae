"""Rows whose answers are known, so that each answer can be told to be that of its own request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked
from mxpool.cli.verify.difference import Difference, Noise, difference
from mxpool.cli.verify.material import Material, part

BLOCKS = 4
DISTINCT_ROWS = 200  # rows that are looked at


class Stretch(NamedTuple):
    """A request: rows ``start`` to ``stop`` of one block."""

    block: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"block {self.block}, rows {self.start} to {self.stop - 1}"


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Inputs, their answers from when each full block of them ran alone, and how far an answer may be off.

    Of a model that couples rows, only whole blocks have an answer of their own: ``whole``.
    """

    inputs: list[Arrays]
    answers: list[Arrays]
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
        """How far ``answer`` is from what ``stretch`` has."""
        whole = self.answers[stretch.block]
        return difference(self._cut(whole, stretch), answer, whole)

    def _cut(self, block: Arrays, stretch: Stretch) -> Arrays:
        return block if self.whole else part(block, stretch.start, stretch.stop)

    def right(self, found: Difference) -> bool:
        """True if an answer may be that far off: not at all where it had its batch for itself, else by rounding."""
        return self.noise.equal(found) if self.whole else self.noise.rounded(found)

    @property
    def distinct(self) -> bool:
        """True if most answers cannot be taken for that of the row, or of the block, after them."""
        if self.whole:
            pairs = list(pairwise(self.answers))
        else:
            rows = [part(block, row, row + 1) for block in self.answers for row in range(self.block)]
            pairs = list(pairwise(rows[:DISTINCT_ROWS]))
        apart = sum(not self.right(difference(one, other)) for one, other in pairs)
        return 2 * apart > len(pairs) or not pairs


def learn(asked: Asked, material: Material, blocks: int = BLOCKS) -> KnownRows:
    """Run ``blocks`` full requests, each alone."""
    full = material.rows_max
    kept = min(blocks, material.count(blocks, full))
    requests = [material.request(full) for _ in range(kept)]
    answers = [asked.infer(request) for request in requests]
    whole = asked.coupled or not material.signature.batched
    return KnownRows(requests, answers, full, whole, asked.noise)
