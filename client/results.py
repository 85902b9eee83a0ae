"""The body of a RESULT becomes each request's own arrays. Pure.

Every answer's arrays are writeable and disjoint from those of other requests. A small body is shared: the arrays are
views of it. From ``COPY_BYTES`` on, requests that came in one body get copies, so that keeping one answer never keeps
a whole batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mxpool.errors import MalformedMessage
from mxpool.tensors import DATATYPES
from mxpool.wire import decode_tensors

Outputs = dict[str, npt.NDArray[Any]]

COPY_BYTES = 65_536  # below it a view costs less than the allocation of a copy
LAYOUTS_KEPT = 1024


class Layout(NamedTuple):
    """Where each tensor lies in a body of ``size_bytes`` bytes: name, dtype, shape, offset."""

    size_bytes: int
    tensors: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]


class Layouts:
    """Layouts by the bytes that describe them: a description is parsed once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Layout] = {}

    def of(self, description: bytes) -> Layout:
        """The layout that a header's ``tensors`` describes.

        Raises:
            MalformedMessage: for bytes that describe no tensors of ours.
        """
        layout = self._known.get(description)
        if layout is None:
            layout = _parsed(description)
            if len(self._known) >= LAYOUTS_KEPT:
                self._known.clear()
            self._known[description] = layout
        return layout


def _parsed(description: bytes) -> Layout:
    tensors, offset = [], 0
    for name, datatype, shape in decode_tensors(description):
        dtype = DATATYPES.get(datatype)
        if dtype is None:
            raise MalformedMessage(reason=f"unknown datatype {datatype!r} in an answer")
        tensors.append((name, dtype, shape, offset))
        offset += math.prod(shape) * dtype.itemsize
    return Layout(offset, tuple(tensors))


def split(layout: Layout, body: npt.NDArray[np.uint8], rows: list[int]) -> list[Outputs]:
    """The outputs of each request, in the order of ``rows``: ``rows[i]`` rows of every tensor belong to request i.

    Raises:
        MalformedMessage: if body, rows and layout do not fit together.
    """
    if len(body) != layout.size_bytes:
        raise MalformedMessage(reason=f"a body of {len(body)} bytes for tensors of {layout.size_bytes}")
    whole = [(name, _view(body, dtype, shape, offset)) for name, dtype, shape, offset in layout.tensors]
    if len(rows) == 1:
        return [dict(whole)]
    ends = list(_running(rows))
    if any(array.ndim == 0 or array.shape[0] != ends[-1] for _, array in whole):
        raise MalformedMessage(reason=f"rows {rows} are not those of the tensors")
    starts = [0, *ends[:-1]]
    if layout.size_bytes >= COPY_BYTES:
        return [{name: array[a:b].copy() for name, array in whole} for a, b in zip(starts, ends, strict=True)]
    return [{name: array[a:b] for name, array in whole} for a, b in zip(starts, ends, strict=True)]


def _view(body: npt.NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> npt.NDArray[Any]:
    view: npt.NDArray[Any] = np.ndarray(shape, dtype, body.data, offset)
    return view if view.flags.aligned else view.copy()  # tensors are joined without gaps, whatever their item sizes


def _running(rows: list[int]) -> list[int]:
    ends, total = [], 0
    for count in rows:
        if type(count) is not int or count < 1:
            raise MalformedMessage(reason="a request's rows are not a positive integer")
        total += count
        ends.append(total)
    return ends


def concatenated(parts: list[Outputs]) -> Outputs:
    """One answer out of the answers to consecutive pieces of a request; a copy."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
