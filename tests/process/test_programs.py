"""The installed programs against each other: a real broker, real workers, and a model from a wheel."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import wheels

MODEL = wheels.gradient_boosting()
PROGRAMS = Path(sys.executable).parent


class Service:
    """A running ``mx-broker``; ``ask`` runs ``mxpool`` against it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/broker.sock"
        command = [str(PROGRAMS / "mx-broker"), "--model", f"gbr={MODEL}", "-e", self.endpoint]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, stderr=self.log)

    def ask(self, *args: object) -> subprocess.CompletedProcess[str]:
        command = [str(PROGRAMS / "mxpool"), "-e", self.endpoint, *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("s"))
    try:
        assert running.ask("status", "--wait-ready", 30).returncode == 0
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.log.close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, np.random.default_rng(0).random((300, 4), np.float32))
    return path


def test_a_pushed_file_is_answered_as_the_bare_session_answers_it(service: Service, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    ran = service.ask("push", "gbr", rows, "--rows-per-request", 7, "-o", out, "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["rows"] == 300
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    (expected,) = session.run(["variable"], {"input": np.load(rows)})
    assert np.array_equal(np.load(out)["variable"], expected)


def test_bench_names_every_process_and_its_cpu(service: Service) -> None:
    figures = json.loads(service.ask("bench", "gbr", "--seconds", 0.3, "--json").stdout)
    assert set(figures["cores"]) == {"client", "broker", "gbr-cpu-0"}
    assert figures["requests"] > 0
    assert figures["errors"] == {}


def test_models_slots_and_status_tell_of_the_same_model(service: Service) -> None:
    about = json.loads(service.ask("models", "--json").stdout)["gbr"]
    assert (about["inputs"], about["state"]) == ([["input", "FP32", [4]]], "ready")
    assert len(json.loads(service.ask("slots", "gbr", "--json").stdout)["slots"]) == 6
    assert json.loads(service.ask("status", "--json").stdout)["models"]["gbr"]["workers"][0]["worker"] == "gbr-cpu-0"


def test_after_drain_requests_are_refused_with_exit_code_4(service: Service, rows: Path) -> None:
    assert service.ask("drain", "gbr").returncode == 0
    ran = service.ask("infer", "gbr", "--input", f"input={rows}")
    assert (ran.returncode, ran.stderr.split(":")[0]) == (4, "shutting_down")


def test_sigterm_ends_the_broker_with_0_and_then_nobody_answers(service: Service) -> None:
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(10) == 0
    ran = service.ask("status")
    assert (ran.returncode, ran.stderr.split(":")[0]) == (3, "broker_lost")
    service.log.seek(0)
    assert 'level=info logger=mxpool.broker.service message="stopped"' in service.log.read()


def test_a_bad_config_ends_both_programs_with_2_and_the_same_line(tmp_path: Path) -> None:
    (tmp_path / "mx.toml").write_text('[models.gbr]\npath = "gbr.onnx"\nmax_batch_size = 300000\n')
    for command in (["mx-broker"], ["mxpool", "check"]):
        line = [str(PROGRAMS / command[0]), *command[1:], str(tmp_path / "mx.toml")]
        ran = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        assert (ran.returncode, ran.stdout) == (2, "")
        key = "models.gbr.max_batch_size: 300000 is more than 65536; allowed: 0 to 65_536"
        assert ran.stderr == f"config_invalid: {tmp_path / 'mx.toml'}: {key}\n"


def test_check_loads_a_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mx.toml").write_text(f'[models.gbr]\npath = "{MODEL}"\n[models.none]\npath = "none.onnx"\n')
    line = [str(PROGRAMS / "mxpool"), "check", str(tmp_path / "mx.toml"), "--json"]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 1
    found, missing = json.loads(ran.stdout)["models"]
    assert found["inputs"] == ["input FP32[4]"]
    assert missing["error"]["code"] == "model_invalid"
