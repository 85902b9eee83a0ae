from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worker_rig import make_spec

from mxpool.errors import LoadFailed, NotServable
from mxpool.workers.backends import registry
from mxpool.workers.backends.echo import EchoBackend
from mxpool.workers.backends.ort_cpu import OrtCpuBackend


def test_a_backend_is_chosen_by_its_name_alone() -> None:
    assert isinstance(registry.create(make_spec("m.plan", "onnxruntime")), OrtCpuBackend)
    assert isinstance(registry.create(make_spec("m.onnx", "echo")), EchoBackend)


def test_an_engine_is_refused_with_the_name_of_the_missing_backend() -> None:
    with pytest.raises(NotServable, match="tensorrt backend is not in this release"):
        registry.create(make_spec("m.plan", "tensorrt"))


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LoadFailed, match=r"no backend 'torch' \(known: echo, onnxruntime"):
        registry.create(make_spec(backend="torch"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path that brings two backends, one of them broken."""
    metadata = tmp_path / "others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    points = "[mxpool.backends]\nother = others_backend:Other\nbroken = no_such_module:Backend\n"
    (metadata / "entry_points.txt").write_text(points)
    (tmp_path / "others_backend.py").write_text("class Other:\n    in_flight = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "others_backend", raising=False)
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_an_installed_package_brings_a_backend_by_entry_point() -> None:
    assert registry.create(make_spec(backend="other")).in_flight == 2


@pytest.mark.usefixtures("installed")
def test_an_installed_backend_that_cannot_be_imported_is_a_load_error() -> None:
    with pytest.raises(LoadFailed, match="'broken' cannot be imported: No module named 'no_such_module'"):
        registry.create(make_spec(backend="broken"))
