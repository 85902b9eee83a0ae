from __future__ import annotations

import runpy
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / "read_onnxruntime_names.py"))


def test_names_of_an_installed_runtime_come_with_their_signatures(script: dict[str, Any]) -> None:
    found = script["names"](onnxruntime)
    session = found["classes"]["InferenceSession"]
    assert session["run"] == "(output_names, input_feed, run_options=None)"
    assert found["classes"]["SessionOptions"]["add_session_config_entry"].count("arg") == 2
    assert found["classes"]["SessionOptions"]["intra_op_num_threads"] == "property"
    assert found["classes"]["GraphOptimizationLevel"]["ORT_ENABLE_ALL"] == "value"
    assert found["functions"]["get_available_providers"] == "()"
    assert found["version"] == onnxruntime.__version__
    assert not [name for name in session if name.startswith("_") and name != "__init__"]


def test_a_wheel_is_read_by_the_interpreter_that_the_environment_names(tmp_path: Path) -> None:
    wheel = tmp_path / "onnxruntime-0.0.0-py3-none-any.whl"
    source = "__version__ = '0.0.0'\nclass Session:\n    def run(self, one, two=2): ...\ndef get(a): ...\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onnxruntime/__init__.py", source)
    command = [str(SCRIPTS / "read_onnxruntime_names"), str(wheel)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert '"run": "(one, two=2)"' in printed
    assert '"get": "(a)"' in printed
    assert '"version": "0.0.0"' in printed
