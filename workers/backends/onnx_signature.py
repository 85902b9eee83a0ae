"""What an ONNX file says about its inputs and outputs, made into a signature, or refused by name. Pure.

Axis 0 is the batch axis of every input and output, unless ``max_batch_size`` is 0: then arrays are served whole, one
request at a time. Dims that an input leaves open come from the config; those of an output are read off probing runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mxpool.errors import NotServable
from mxpool.tensors import TensorSpec

DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}
EXAMPLE_DIM = 128  # stands in an error's example line for a dim that only the user knows

Dim = int | str | None
Shape = tuple[int, ...]


class Declared(NamedTuple):
    """An input or output as ONNX Runtime describes it.

    ``type`` is its own word, ``tensor(float)``. An open dim is a symbol or None; ``()`` means a scalar, or that the
    file gives no shape at all.
    """

    name: str
    type: str
    shape: tuple[Dim, ...]


class Probe(NamedTuple):
    """Shapes of all outputs in one run at ``rows`` rows; runs differ in ``rows`` or in what the inputs held."""

    rows: int
    shapes: tuple[Shape, ...]


class Reader:
    """Reads one file's declarations for one ``max_batch_size``; a refusal is a NotServable that names the tensor."""

    def __init__(self, path: str, max_batch_size: int) -> None:
        self._path = path
        self._max_batch_size = max_batch_size
        self._batched = max_batch_size > 0

    def check_names(self, inputs: Sequence[Declared], outputs: Sequence[Declared]) -> None:
        """Refuse an output that is an input: the runtime hands the input back and never writes the slot."""
        taken = {declared.name for declared in inputs}
        for output in outputs:
            if output.name in taken:
                raise self._refused(
                    "output", output.name, "it is an input of the graph as well, so nothing computes it"
                )

    def inputs(self, inputs: Sequence[Declared], dims: Mapping[str, Shape]) -> tuple[TensorSpec, ...]:
        """The inputs with every dim fixed; ``dims`` gives those of one row, by input name."""
        known = {declared.name for declared in inputs}
        for name in dims:
            if name not in known:
                raise self._refused("dims entry", name, f"the model's inputs are {', '.join(sorted(known))}")
        symbols = _batch_symbols(inputs)
        return tuple(self._input(declared, dims.get(declared.name), symbols) for declared in inputs)

    def _input(self, declared: Declared, given: Shape | None, symbols: Collection[Dim]) -> TensorSpec:
        datatype = self._datatype("input", declared)
        if not self._batched:
            return TensorSpec(declared.name, datatype, self._fixed(declared, declared.shape, given))
        self._check_batch_axis(declared, given, symbols)
        return TensorSpec(declared.name, datatype, self._fixed(declared, declared.shape[1:], given))

    def _check_batch_axis(self, declared: Declared, given: Shape | None, symbols: Collection[Dim]) -> None:
        if not declared.shape and given is None:
            raise self._refused("input", declared.name, "it has no batch axis; set max_batch_size = 0")
        for axis, dim in enumerate(declared.shape[1:], 1):
            if dim in symbols:
                raise self._refused("input", declared.name, f"its batch axis is {axis}, not 0; set max_batch_size = 0")
        if declared.shape and isinstance(declared.shape[0], int) and declared.shape[0] != self._max_batch_size:
            reason = f"its first dim is fixed at {declared.shape[0]}; set max_batch_size = 0"
            if declared.shape[0] > 1:
                reason += f", or {declared.shape[0]} if that is its batch axis"
            raise self._refused("input", declared.name, reason)

    def _fixed(self, declared: Declared, row: tuple[Dim, ...], given: Shape | None) -> Shape:
        """The dims of one row: the file's, and ``given`` where it leaves them open."""
        if given is None:
            for axis, dim in enumerate(row):
                if not isinstance(dim, int):
                    raise self._refused("input", declared.name, self._open_dim(declared.name, row, axis))
            return self._positive(declared.name, row)
        if declared.shape and len(given) != len(row):
            raise self._refused("input", declared.name, f"dims gives {len(given)} dims, one row has {len(row)}")
        for axis, (dim, fixed) in enumerate(zip(row, given, strict=False)):
            if isinstance(dim, int) and dim != fixed:
                raise self._refused(
                    "input", declared.name, f"dims gives {fixed} for dim {axis} of a row, which is {dim}"
                )
        return given

    def _open_dim(self, name: str, row: tuple[Dim, ...], axis: int) -> str:
        example = ", ".join(str(dim) if isinstance(dim, int) else str(EXAMPLE_DIM) for dim in row)
        symbol = f" ({row[axis]})" if row[axis] else ""
        line = f'dims = {{ "{name}" = [{example}] }}'
        return f"dim {axis} of a row{symbol} is open; fix it in the config, for example {line}"

    def _positive(self, name: str, row: tuple[Dim, ...]) -> Shape:
        fixed = tuple(dim for dim in row if isinstance(dim, int))
        if 0 in fixed:
            raise self._refused("input", name, "it has a dim of 0 and so holds nothing")
        return fixed

    def only_size(self, inputs: Sequence[Declared]) -> int | None:
        """The one batch size that the file allows, if it fixes the batch axis of an input; call after ``inputs``."""
        fixed = any(declared.shape and isinstance(declared.shape[0], int) for declared in inputs)
        return self._max_batch_size if self._batched and fixed else None

    def declared_outputs(self, inputs: Sequence[Declared], outputs: Sequence[Declared]) -> list[TensorSpec | None]:
        """The outputs that the file describes fully; None where only a probing run can tell.

        The first dim is taken for the batch axis without a run only if it carries the symbol of an input's batch axis.
        """
        symbols = _batch_symbols(inputs)

        def spec(declared: Declared) -> TensorSpec | None:
            datatype = self._datatype("output", declared)
            row = declared.shape[1:] if self._batched else declared.shape
            fixed = tuple(dim for dim in row if isinstance(dim, int))
            told = declared.shape and (declared.shape[0] in symbols or not self._batched)
            return TensorSpec(declared.name, datatype, fixed) if told and len(fixed) == len(row) else None

        return [spec(declared) for declared in outputs]

    def probed_outputs(self, outputs: Sequence[Declared], probes: Sequence[Probe]) -> tuple[TensorSpec, ...]:
        """The outputs as the runs showed them: nothing but the batch axis may have moved."""
        return tuple(self._probed(declared, index, probes) for index, declared in enumerate(outputs))

    def _probed(self, declared: Declared, index: int, probes: Sequence[Probe]) -> TensorSpec:
        datatype = self._datatype("output", declared)
        seen: dict[int, Shape] = {}
        for probe in probes:
            shape = probe.shapes[index]
            if seen.setdefault(probe.rows, shape) != shape:
                raise self._refused(
                    "output", declared.name, f"its shape depends on the data: {seen[probe.rows]}, {shape}"
                )
        if not self._batched:
            return TensorSpec(declared.name, datatype, next(iter(seen.values())))
        rows_first = all(shape[:1] == (rows,) for rows, shape in seen.items())
        rows_dims = {shape[1:] for shape in seen.values()}
        if not rows_first or len(rows_dims) > 1:
            raise self._refused("output", declared.name, self._misplaced_axis(seen))
        return TensorSpec(declared.name, datatype, rows_dims.pop())

    def _misplaced_axis(self, seen: Mapping[int, Shape]) -> str:
        shapes = " and ".join(f"{shape} at {rows} rows" for rows, shape in seen.items())
        if not all(len(shape) for shape in seen.values()):
            return "it is a scalar and has no batch axis; set max_batch_size = 0"
        axes = [axis for axis, dims in enumerate(zip(*seen.values(), strict=False)) if dims == tuple(seen)]
        if len(seen) > 1 and len(axes) == 1 and axes[0] > 0:
            return f"its batch axis is {axes[0]}, not 0 ({shapes}); set max_batch_size = 0"
        return f"axis 0 is not the batch axis, or others change with it ({shapes}); set max_batch_size = 0"

    def _datatype(self, what: str, declared: Declared) -> str:
        found = DATATYPES.get(declared.type)
        if found is None:
            raise self._refused(what, declared.name, f"its type is {declared.type}; only tensors of numbers are served")
        return found

    def _refused(self, what: str, name: str, reason: str) -> NotServable:
        return NotServable(path=self._path, what=what, name=name, reason=reason)


def _batch_symbols(inputs: Sequence[Declared]) -> set[str]:
    """What the file calls the batch axis."""
    return {first for declared in inputs for first in declared.shape[:1] if isinstance(first, str)}
