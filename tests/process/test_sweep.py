"""``mxpool bench --sweep`` as it is run: real brokers, one after another, and nothing left of them."""

from __future__ import annotations

import csv
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool import TOKEN_VARIABLE, echo, shared_memory_names, to_toml, wait_until

from mxpool.cli.sweep.cpu_samples import CpuSamples, cpu_s

COMMAND = [sys.executable, "-m", "mxpool.cli.main", "bench"]


class Swept:
    """Runs the command; knows its processes and folders by a token in their environment."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "mx.toml"
        self.token = secrets.token_hex(8)
        self.environ = {**os.environ, TOKEN_VARIABLE: self.token}
        self._folders = set(Path("/tmp").glob("mxpool-sweep-*"))

    def start(self, models: dict[str, Any], *arguments: object) -> subprocess.Popen[str]:
        self.config.write_text(to_toml({"models": models}))
        line = [*COMMAND, *map(str, arguments), "--config", str(self.config)]
        return subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environ, start_new_session=True
        )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(TOKEN_VARIABLE) == self.token:
                    found.append(process)
        return found

    def folders(self) -> set[Path]:
        return set(Path("/tmp").glob("mxpool-sweep-*")) - self._folders

    def check_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), f"the end of {self.processes()}")
        assert not self.folders()


@pytest.fixture
def swept(tmp_path: Path) -> Iterator[Swept]:
    names = shared_memory_names()
    running = Swept(tmp_path)
    try:
        yield running
        assert shared_memory_names() <= names
    finally:
        for process in running.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_sweep_measures_both_phases_of_each_combination_and_leaves_nothing(swept: Swept, tmp_path: Path) -> None:
    models = {"echo": echo(delay_ms=2), "other": echo()}
    arguments = ["echo", "--sweep", "workers=2,1", "graph=off", "--seconds", 0.6, "--in-flight", 8, "--json"]
    files = ["--csv", tmp_path / "s.csv", "--plot", tmp_path / "s.png"]
    out, err = swept.start(models, *arguments, *files).communicate(timeout=60)
    told = json.loads(out)
    assert [(row["workers"], row["graph_on"], row["error"]) for row in told["combinations"]] == [
        (2, False, None), (1, False, None)]  # fmt: skip
    two, one = told["combinations"]
    assert two["saturated"]["rows_per_s"] > 1.4 * one["saturated"]["rows_per_s"]
    assert told["rate"] == pytest.approx(0.8 * one["saturated"]["requests_per_s"], rel=0.01)
    for row in told["combinations"]:
        assert row["offered"]["offered_per_s"] == pytest.approx(told["rate"], rel=0.3)
        assert 2000 <= row["offered"]["run_us"]["p50"] < 4000
        assert row["offered"]["graph"]["off"] == row["offered"]["batches"] > 0
        assert row["saturated"]["cpu_percent"]["p99"] >= row["saturated"]["cpu_percent"]["mean"] > 0
        assert row["memory"]["resident_bytes"] > 1 << 20
    assert len(list(csv.DictReader((tmp_path / "s.csv").read_text().splitlines()))) == 4
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert "workers=2 graph=off: saturated" in err
    swept.check_nothing_left()


def test_a_combination_that_cannot_be_loaded_is_a_row_with_the_reason(swept: Swept) -> None:
    models = {"echo": echo(load_exit=3)}
    process = swept.start(models, "echo", "--sweep", "workers=1", "--seconds", 0.1, "--json")
    out, _ = process.communicate(timeout=60)
    told = json.loads(out)
    assert process.returncode == 1
    assert "exit code 3" in told["combinations"][0]["error"]
    assert told["recommended"]["workers"] is None
    swept.check_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_broker_workers_and_clients_with_the_sweep(swept: Swept, number: signal.Signals) -> None:
    process = swept.start({"echo": echo(workers=2)}, "echo", "--sweep", "workers=2", "--seconds", 60)
    # The sweep, its broker, two workers and a client.
    wait_until(lambda: process.poll() is not None or len(swept.processes()) == 5, "a sweep in its first phase", 30)
    assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    if number == signal.SIGKILL:
        wait_until(lambda: not swept.processes(), "the end of all")
        for folder in swept.folders():  # nobody is left who could remove it
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        return
    assert (process.returncode, "interrupted" in err) == (1, True)
    swept.check_nothing_left()


def test_the_cpu_of_another_process_is_seen_in_samples() -> None:
    code = "import time\nprint(flush=True)\nwhile time.process_time() < 60: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        begun_s = cpu_s(busy.pid)
        assert begun_s is not None
        with CpuSamples({"busy": busy.pid}, {"gone": 2**22 + 1}) as samples:
            wait_until(lambda: (cpu_s(busy.pid) or 0) > begun_s + 0.4, "0.4 s of CPU")
        busy.kill()
    assert len(samples.percents()) >= 4
    assert 10 < max(samples.percents()) < 130
    assert samples.cores()["busy"] > 0.1
    assert samples.cores()["gone"] == 0
    assert cpu_s(busy.pid) is None
