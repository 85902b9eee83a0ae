"""What lies here needs a real device: it is skipped where there is none."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def missing_cuda() -> str:
    """Why there is no CUDA device here, or ""."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        importlib.import_module("onnxruntime")
    except ImportError as error:
        return str(error)
    status, count = runtime.cudaGetDeviceCount()
    return "" if status == 0 and count else f"cudaGetDeviceCount says {status}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_cuda()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"gpu: {reason}"))
