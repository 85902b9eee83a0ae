"""The signature of an open ONNX Runtime session: what the file declares, and what runs show where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mxpool.errors import ModelInvalid
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature, TensorSpec
from mxpool.workers.backends.onnx_signature import Declared, Probe, Reader
from mxpool.workers.backends.ort_session import one_line

Fill = Callable[["tuple[int, ...]", TensorSpec], npt.NDArray[Any]]


class FoundSignature(NamedTuple):
    """``only_size`` is the one batch size that the file allows, if it fixes its batch axis; ``probed``: by runs."""

    signature: Signature
    only_size: int | None
    probed: bool


def read_signature(session: Any, spec: ModelSpec, run_options: Any) -> FoundSignature:
    """What ``session`` takes and gives for ``spec``.

    Raises:
        NotServable, ModelInvalid: with the tensor by name.
    """
    inputs = [Declared(node.name, node.type, tuple(node.shape)) for node in session.get_inputs()]
    outputs = [Declared(node.name, node.type, tuple(node.shape)) for node in session.get_outputs()]
    reader = Reader(spec.path, spec.max_batch_size)
    reader.check_names(inputs, outputs)
    input_specs = reader.inputs(inputs, spec.dims)
    only_size = reader.only_size(inputs)
    declared = reader.declared_outputs(inputs, outputs)
    known = tuple(output for output in declared if output is not None)
    if len(known) == len(declared):
        return FoundSignature(Signature(input_specs, known, spec.max_batch_size), only_size, probed=False)
    sizes = spec.sizes if only_size is None else (only_size,)
    probes = _probe(session, spec, Signature(input_specs, (), spec.max_batch_size), sizes, run_options)
    probed = Signature(input_specs, reader.probed_outputs(outputs, probes), spec.max_batch_size)
    return FoundSignature(probed, only_size, probed=True)


def _probe(
    session: Any, spec: ModelSpec, signature: Signature, sizes: tuple[int, ...], run_options: Any
) -> list[Probe]:
    """Shapes at the two smallest sizes, each with three kinds of values; a kind that the model refuses is left out.

    Small batches tell as much as a full one, in a fraction of its time; warm-up then holds every size to it.
    """
    probes: list[Probe] = []
    refusal = ""
    for rows in sizes[:2]:
        for fill in (filled_zeros, filled_ones, filled_alternating):
            feeds = {tensor.name: fill(signature.shape(tensor, rows), tensor) for tensor in signature.inputs}
            try:
                outputs = session.run(None, feeds, run_options)
            except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
                refusal = one_line(error)
                continue
            probes.append(Probe(rows, tuple(np.shape(output) for output in outputs)))
    if not probes:
        raise ModelInvalid(path=spec.path, reason=f"it fails on zeros and on ones: {refusal}")
    return probes


def filled_zeros(shape: tuple[int, ...], spec: TensorSpec) -> npt.NDArray[Any]:
    """Zeros of ``spec``'s datatype."""
    return np.zeros(shape, spec.dtype)


def filled_ones(shape: tuple[int, ...], spec: TensorSpec) -> npt.NDArray[Any]:
    """Ones: an index that any table of two rows has."""
    return np.ones(shape, spec.dtype)


def filled_alternating(shape: tuple[int, ...], spec: TensorSpec) -> npt.NDArray[Any]:
    """Zeros and ones in turn."""
    return (np.arange(int(np.prod(shape))) % 2).astype(spec.dtype).reshape(shape)
