"""Runtimes that stand in for those of a device, for this process and for the workers of a pool.

``tests/standins/cuda`` and ``tests/standins/maca`` hold packages that shadow the real ones when they come first on the
path. A fault is injected by name: see the stand-in's own description.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

STANDINS = Path(__file__).parents[1] / "standins"
FAULT_VARIABLE = "MXPOOL_STANDIN_FAULT"
SHADOWED = ("onnxruntime", "cuda", "cuda.bindings", "cuda.bindings.runtime")


def environ(kind: str, fault: str = "") -> dict[str, str]:
    """Variables for a broker whose workers are to find the stand-in for devices of ``kind``."""
    return {"PYTHONPATH": str(STANDINS / kind), FAULT_VARIABLE: fault}


def enter(monkeypatch: pytest.MonkeyPatch, kind: str, fault: str = "") -> Any:
    """Let this process import the stand-in, fresh, until the test ends; the stand-in's onnxruntime."""
    for name in SHADOWED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(STANDINS / kind))
    monkeypatch.setenv(FAULT_VARIABLE, fault)
    runtime = importlib.import_module("onnxruntime")
    for name in SHADOWED:  # so that the end of the test takes them away again
        if name in sys.modules:
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return runtime
