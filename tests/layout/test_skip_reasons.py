from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """A run of one test file of its own, under this repository's conftest."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(f"import pytest\n\n{test}\n\ndef test_that_runs(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    return subprocess.run([*command, "test_it.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("reason", ["gpu: none here", "root: cannot mount", "interpreter: no 3.13"])
def test_a_skip_for_what_the_machine_lacks_passes(tmp_path: Path, reason: str) -> None:
    assert run(tmp_path, f"def test_a(): pytest.skip({reason!r})").returncode == 0


@pytest.mark.parametrize(
    "test",
    [
        "def test_a(): pytest.skip('flaky')",
        "@pytest.mark.skip(reason='later')\ndef test_a(): pass",
        "@pytest.mark.skip\ndef test_a(): pass",
        "@pytest.mark.skipif(True, reason='gpus are slow')\ndef test_a(): pass",
        "pytest.skip('all of it', allow_module_level=True)",
        "pytest.importorskip('no_such_module')",
    ],
)
def test_a_skip_for_another_reason_fails_the_run_and_is_named(tmp_path: Path, test: str) -> None:
    ran = run(tmp_path, test)
    assert ran.returncode == 1
    assert "skipped for no allowed reason (gpu, root, interpreter): test_it.py" in ran.stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    assert run(tmp_path, "@pytest.mark.xfail(reason='known')\ndef test_a(): assert False").returncode == 0
