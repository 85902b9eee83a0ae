"""Backends by name: those built in, and those of installed packages (entry point group ``mxpool.backends``)."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from mxpool.errors import LoadFailed, NotServable
from mxpool.spec import ModelSpec
from mxpool.workers.backends.protocol import Backend

GROUP = "mxpool.backends"
BUILT_IN = {
    "onnxruntime": {
        "cpu": "mxpool.workers.backends.ort_cpu:OrtCpuBackend",
        "cuda": "mxpool.workers.backends.ort_cuda:OrtCudaBackend",
        "maca": "mxpool.workers.backends.ort_maca:OrtMacaBackend",
    },
    "echo": dict.fromkeys(("cpu", "cuda", "maca"), "mxpool.workers.backends.echo:EchoBackend"),
}  # by kind of device


def create(spec: ModelSpec) -> Backend:
    """The backend for ``spec``, not loaded yet; only its own module is imported.

    Raises:
        NotServable: for ``tensorrt``, which this release has not got.
        LoadFailed: if there is no backend of that name, or its module cannot be imported.
    """
    name = spec.backend
    if name == "tensorrt":
        reason = "the tensorrt backend is not in this release"
        raise NotServable(path=spec.path, what="backend", name=name, reason=reason)
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name][spec.device_kind].partition(":")
        factory: Any = getattr(importlib.import_module(module), attribute)
    else:
        factory = _installed(name, spec)
    backend: Backend = factory()
    return backend


def _installed(name: str, spec: ModelSpec) -> Any:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({*BUILT_IN, *found}))
        raise LoadFailed(model=spec.name, reason=f"there is no backend {name!r} (known: {known})")
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        raise LoadFailed(model=spec.name, reason=f"backend {name!r} cannot be imported: {error}") from None
