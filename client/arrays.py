"""A caller's arrays become one body in the model's order, or are refused by name. Pure.

Nothing is cast by guess: a float64 array for an FP32 input is refused. Byte order and strides are converted, because
the values stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.errors import InvalidRequest, InvalidTensor
from mxpool.tensors import Signature, TensorSpec
from mxpool.wire import encode_tensors

Array = npt.NDArray[Any]
_Wanted = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

ROW_COUNTS_KEPT = 4096  # descriptions kept by row count: 128 is common; beyond it they are made again


class RequestForm:
    """What requests for one model look like: checks arrays, describes them, and knows where to split them.

    ``rows_max`` is the largest piece that goes out as one request: the model's batch, and what the broker takes as
    one frame (``bytes_max``).
    """

    def __init__(self, model: str, signature: Signature, bytes_max: int) -> None:
        self.model = model
        self.signature = signature
        self.row_bytes = sum(spec.row_bytes for spec in signature.inputs)
        self.rows_max = min(signature.max_rows, max(bytes_max // max(self.row_bytes, 1), 1))
        self._bytes_max = bytes_max
        self._names = frozenset(spec.name for spec in signature.inputs)
        self._wanted: dict[int, _Wanted] = {}
        self._described: dict[int, bytes] = {}

    def check(self, arrays: Mapping[str, Any]) -> tuple[int, list[Array]]:
        """Rows, and one array for each input in the model's order: right dtype and shape, any strides.

        Arrays that are right already come back as they are; nothing is copied.

        Raises:
            InvalidTensor: naming the tensor, what it is and what the model takes.
            InvalidRequest: if one row is larger than a frame may be.
        """
        try:
            rows = len(arrays[self.signature.inputs[0].name]) if self.signature.batched else 1
            wanted = self._wanted[rows]
            if len(arrays) == len(wanted):
                checked = []
                for name, dtype, shape in wanted:
                    array = arrays[name]
                    if array.dtype is not dtype or array.shape != shape:
                        break
                    checked.append(array)
                else:
                    return rows, checked
        except (KeyError, TypeError, AttributeError, IndexError):
            pass  # the slow way names the fault, or converts
        return self._check_slowly(arrays)

    def describe(self, rows: int) -> bytes:
        """The header's ``tensors`` for ``rows`` rows."""
        found = self._described.get(rows)
        if found is None:
            shapes = [(spec.name, spec.datatype, self.signature.shape(spec, rows)) for spec in self.signature.inputs]
            found = encode_tensors(shapes)
            if len(self._described) >= ROW_COUNTS_KEPT:
                self._described.clear()
            self._described[rows] = found
        return found

    def split(self, rows: int, arrays: list[Array]) -> list[tuple[int, list[Array]]]:
        """Views of at most ``rows_max`` rows each, in order; the whole where it fits."""
        if rows <= self.rows_max:
            return [(rows, arrays)]
        starts = range(0, rows, self.rows_max)
        return [(min(self.rows_max, rows - at), [array[at : at + self.rows_max] for array in arrays]) for at in starts]

    def _check_slowly(self, arrays: Mapping[str, Any]) -> tuple[int, list[Array]]:
        if not hasattr(arrays, "keys"):
            expected, got = f"a dict with {', '.join(sorted(self._names))}", type(arrays).__name__
            raise InvalidTensor(tensor="*", reason="not a dict of input name to array", got=got, expected=expected)
        if arrays.keys() != self._names:
            raise self._names_differ(arrays)
        checked = [_converted(spec, arrays[spec.name]) for spec in self.signature.inputs]
        rows = self._rows(checked)
        for spec, array in zip(self.signature.inputs, checked, strict=True):
            if array.shape != self.signature.shape(spec, rows):
                raise self._wrong_shape(spec, array, rows)
        if self.row_bytes > self._bytes_max:
            raise InvalidRequest(
                reason=f"one row of {self.model!r} has {self.row_bytes} bytes, the broker's max_message_bytes is "
                f"{self._bytes_max}"
            )
        if len(self._wanted) < ROW_COUNTS_KEPT:
            shapes = ((spec.name, spec.dtype, self.signature.shape(spec, rows)) for spec in self.signature.inputs)
            self._wanted[rows] = tuple(shapes)
        return rows, checked

    def _rows(self, arrays: list[Array]) -> int:
        if not self.signature.batched:
            return 1
        for spec, array in zip(self.signature.inputs, arrays, strict=True):
            if array.ndim == 0 or array.shape[0] == 0:
                raise self._wrong_shape(spec, array, None, "a request needs at least one row")
        return int(arrays[0].shape[0])

    def _names_differ(self, arrays: Mapping[str, Any]) -> InvalidTensor:
        missing = [spec.name for spec in self.signature.inputs if spec.name not in arrays]
        tensor = missing[0] if missing else next(str(name) for name in arrays if name not in self._names)
        reason = "is missing" if missing else "is not an input of the model"
        expected = ", ".join(spec.name for spec in self.signature.inputs)
        return InvalidTensor(tensor=tensor, reason=reason, got=", ".join(map(str, arrays)), expected=expected)

    def _wrong_shape(
        self, spec: TensorSpec, array: Array, rows: int | None, reason: str = "wrong shape"
    ) -> InvalidTensor:
        dims = ["rows" if rows is None else str(rows)] if self.signature.batched else []
        expected = f"({', '.join([*dims, *map(str, spec.dims)])})"
        return InvalidTensor(tensor=spec.name, reason=reason, got=str(array.shape), expected=expected)


def _converted(spec: TensorSpec, value: Any) -> Array:
    """``value`` as an array of the tensor's dtype in little-endian order; never cast."""
    if not isinstance(value, np.ndarray):
        return _from_values(spec, value)
    if value.dtype == spec.dtype:
        return np.asarray(value)  # drops subclasses such as matrices and masked arrays
    if value.dtype.newbyteorder("=") == spec.dtype:
        return np.asarray(value).astype(spec.dtype)
    raise InvalidTensor(
        tensor=spec.name, reason="wrong dtype", got=str(value.dtype), expected=f"{spec.dtype} ({spec.datatype})"
    )


def _from_values(spec: TensorSpec, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidTensor(
            tensor=spec.name, reason=str(error), got=type(value).__name__, expected="an array"
        ) from None
    if array.dtype == spec.dtype:
        return array
    hint = f"pass numpy.asarray(…, dtype={spec.dtype.name!r}); nothing is cast by guess"
    raise InvalidTensor(
        tensor=spec.name, reason=hint, got=f"{type(value).__name__} of {array.dtype}", expected=str(spec.dtype)
    )


def joined(arrays: list[Array]) -> bytes:
    """The arrays' bytes in order, C-contiguous: a copy that shares nothing with them."""
    buffers: list[Any] = [*arrays]
    try:
        return b"".join(buffers)
    except TypeError:  # what join says of an array that is not C-contiguous
        return b"".join([array.tobytes() for array in arrays])
