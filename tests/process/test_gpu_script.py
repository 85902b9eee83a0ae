"""The whole device run, small and on the CPU, so that nothing of it is run on a device for the first time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_device_run_goes_through_on_the_cpu_with_the_stand_in(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "gpu"), "--dry-run", str(tmp_path)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    steps = dict(line.split("|")[:2] for line in (tmp_path / "summary").read_text().splitlines())
    missed = ran.stdout.count("MISSED")  # of the bounds, which a stand-in for a device does not hold
    assert steps.pop("graphs") == (f"ok, {missed} missed" if missed else "ok")
    switches = ("MX_MACA_GRAPH=0", "MX_SHARED_QUEUE=0", "MX_FIXED_INPUT_BUFFERS=0")
    names = ("tests", "verify", *(f"verify-{switch}" for switch in switches), "sweep")
    assert steps == dict.fromkeys(names, "ok")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "recommended: workers = 1" in ran.stdout
    assert "one batch alone, run_us p50 of bare replay + copies" in ran.stdout
