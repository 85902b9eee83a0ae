"""The inputs that checks send: random ones, or the rows of a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from mxpool.cli.exits import BadSource
from mxpool.cli.surroundings import Arrays, rows_of
from mxpool.tensors import Signature, TensorSpec

BYTES_MAX = 64 << 20  # of inputs that one check keeps


class Material:
    """Makes requests for one model. Floats are in 0 to 1, integers 0 or 1, unless ``real`` has rows to draw from."""

    def __init__(self, signature: Signature, real: Arrays | None = None, seed: int = 0) -> None:
        self.signature = signature
        self._real = real
        self._random = np.random.default_rng(seed)
        if real is not None and {spec.name for spec in signature.inputs} != real.keys():
            wanted = ", ".join(spec.name for spec in signature.inputs)
            raise BadSource(f"the file has the arrays {', '.join(sorted(real))}; the model's inputs are {wanted}")
        if real is not None:
            _check_file(signature, real)

    @property
    def rows_max(self) -> int:
        """Rows of a full batch."""
        return self.signature.max_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all inputs."""
        sizes = [spec.dtype.itemsize * int(np.prod(spec.dims or (1,))) for spec in self.signature.inputs]
        return max(sum(sizes), 1)

    def count(self, wanted: int, rows: int) -> int:
        """How many requests of ``rows`` rows to keep: ``wanted``, or what BYTES_MAX has room for, at least 4."""
        return max(min(wanted, BYTES_MAX // (self.row_bytes * rows)), 4)

    def request(self, rows: int) -> Arrays:
        """New inputs of ``rows`` rows; of a file, rows drawn at random."""
        if self._real is None:
            return {spec.name: self._tensor(spec, rows) for spec in self.signature.inputs}
        if not self.signature.batched:
            return self._real
        picks = self._random.integers(0, rows_of(self._real, batched=True), rows)
        return {name: array[picks] for name, array in self._real.items()}

    def _tensor(self, spec: TensorSpec, rows: int) -> Any:
        shape = self.signature.shape(spec, rows)
        if spec.dtype.kind == "f":
            return self._random.random(shape, np.float32).astype(spec.dtype)
        return self._random.integers(0, 2, shape).astype(spec.dtype)

    def integer(self, low: int, high: int) -> int:
        """A random number from ``low`` to ``high``."""
        return int(self._random.integers(low, high + 1))


def _check_file(signature: Signature, real: Arrays) -> None:
    """Refuse arrays that are not rows of the model's inputs: the checks would call it the model's fault."""
    rows = {len(array) if array.ndim and signature.batched else 0 for array in real.values()}
    if signature.batched and (len(rows) > 1 or rows == {0}):
        raise BadSource(
            f"the file's arrays have {', '.join(map(str, sorted(rows)))} rows: all need the same, 1 or more"
        )
    for spec in signature.inputs:
        array = real[spec.name]
        dims = array.shape[1:] if signature.batched else array.shape
        if array.dtype != spec.dtype or tuple(dims) != tuple(spec.dims):
            wanted, found = f"{spec.dtype} {tuple(spec.dims)}", f"{array.dtype} {tuple(dims)}"
            raise BadSource(f"the file's array {spec.name!r} is {found} a row; the model's input is {wanted}")


def part(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Rows ``start`` to ``stop`` of every array."""
    return {name: array[start:stop] for name, array in arrays.items()}


def joined(*parts: Arrays) -> Arrays:
    """The rows of all ``parts``, one after another."""
    return {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}


def enlarged(arrays: Arrays, factor: float) -> Arrays:
    """Floats times ``factor``; integers as they are, since they may be indices."""
    return {
        name: (array * array.dtype.type(factor)).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
