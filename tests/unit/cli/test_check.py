from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_client import ROWS, FakeClient, mxpool

from mxpool.errors import ModelInvalid
from mxpool.shm.layout import SlotLayout
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature, TensorSpec
from mxpool.workers.backends.protocol import Loaded

FILE = """
[devices.gpu0]
kind = "cuda"
[devices.gpu1]
kind = "cuda"
index = 1
[models.ranking]
path = "ranking.onnx"
backend = "mine"
workers = { gpu0 = 1, gpu1 = 2, cpu = 1 }
load_timeout_ms = 7000
[models.ocr]
path = "ocr.onnx"
slots = 2
"""
HUGE = Signature((TensorSpec("x", "FP32", (1 << 40,)),), (TensorSpec("y", "FP32", (1,)),), 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mx.toml"
    path.write_text(FILE)
    return path


class Probe:
    """Finds ``signature``, or fails for one model; remembers whom it was asked for."""

    def __init__(self, signature: Signature = ROWS, failing: str = "") -> None:
        self.signature = signature
        self.failing = failing
        self.asked: list[tuple[str, str, int, float]] = []

    def __call__(self, spec: ModelSpec, timeout_s: float) -> Loaded:
        self.asked.append((spec.name, spec.device_kind, spec.device_index, timeout_s))
        if spec.name == self.failing:
            raise ModelInvalid(path=spec.path, reason="no such file")
        return Loaded(self.signature, {"provider": "CPUExecutionProvider"})


Check = Callable[..., Any]


def test_each_model_is_loaded_once_for_each_kind_of_device_within_its_own_time(file: Path) -> None:
    probe = Probe()
    assert mxpool(FakeClient(), "check", file, probe=probe).exit_code == 0
    assert probe.asked == [("ranking", "cuda", 0, 7.0), ("ranking", "cpu", 0, 7.0), ("ocr", "cpu", 0, 60.0)]


def test_no_broker_is_asked(file: Path) -> None:
    client = FakeClient()
    mxpool(client, "check", file, probe=Probe())
    assert client.endpoints == []


def test_the_report_adds_up_one_segment_for_each_model(file: Path) -> None:
    ran = mxpool(FakeClient(), "check", file, "--json", probe=Probe())
    report = json.loads(ran.stdout)
    needed = SlotLayout(ROWS, 10).size_bytes + SlotLayout(ROWS, 2).size_bytes
    assert (report["ok"], report["shm"]["needed_bytes"]) == (True, needed)
    assert report["shm"]["free_bytes"] > 0
    assert [(row["model"], row["device"], row["slots"]) for row in report["models"]] == [
        ("ranking", "gpu0", 10),
        ("ranking", "cpu", 10),
        ("ocr", "cpu", 2),
    ]


def test_the_table_shows_tensors_and_what_the_segment_takes(file: Path) -> None:
    shown = mxpool(FakeClient(), "check", file, probe=Probe()).stdout
    for word in ("x FP32[3]", "y FP32[3]", f"{SlotLayout(ROWS, 10).size_bytes:,}", "free in /dev/shm"):
        assert word in shown


def test_a_model_that_cannot_be_served_exits_with_1_and_the_others_are_still_checked(file: Path) -> None:
    probe = Probe(failing="ranking")
    ran = mxpool(FakeClient(), "check", file, probe=probe)
    assert ran.exit_code == 1
    assert [name for name, *_ in probe.asked] == ["ranking", "ranking", "ocr"]
    assert f"ranking on gpu0: model_invalid: model file {file.parent / 'ranking.onnx'}: no such file" in ran.stderr


def test_too_little_shared_memory_exits_with_1_and_names_the_way_out(file: Path) -> None:
    ran = mxpool(FakeClient(), "check", file, probe=Probe(HUGE))
    assert ran.exit_code == 1
    assert "--shm-size" in ran.stderr


def test_a_bad_file_exits_with_2_and_loads_nothing(file: Path) -> None:
    file.write_text(FILE + "threads = 0\n")
    probe = Probe()
    ran = mxpool(FakeClient(), "check", file, probe=probe)
    assert (ran.exit_code, probe.asked) == (2, [])
    assert f"config_invalid: {file}: models.ocr.threads: 0 is less than 1" in ran.stderr
