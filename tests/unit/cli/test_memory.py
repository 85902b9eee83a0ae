from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mxpool.cli import memory

SHOWN = """mx-smi  version: 2.1.6

=================== MetaX System Management Interface Log ===================
Attached GPUs                                     : 2
GPU#0  MXC550  0000:08:00.0
    Memory
        vis_vram total                            : 67108864 KB
        vis_vram used                             : 868264 KB
GPU#1  MXC550  0000:09:00.0
    Memory
        vram total                                : 64 GB
        vram used                                 : 2 GB
"""


def test_resident_memory_is_that_of_all_processes_and_a_dead_one_has_none() -> None:
    own = memory.resident_bytes([os.getpid()])
    assert own > 1 << 20
    assert memory.resident_bytes([]) == memory.resident_bytes([2**22 + 1, -1]) == 0
    assert memory.resident_bytes([os.getpid(), 2**22 + 1]) >= own // 2


def test_used_memory_is_read_from_the_block_of_its_device() -> None:
    assert memory.mx_smi_used(SHOWN, 0) == 868_264 << 10
    assert memory.mx_smi_used(SHOWN, 1) == 2 << 30


@pytest.mark.parametrize("text", ["", "No device found", "GPU#0\n vis_vram total : 1 KB\n", "used 17 KB"])
def test_another_form_is_none_and_no_error(text: str) -> None:
    assert memory.mx_smi_used(text, 0) is None
    assert memory.mx_smi_used(SHOWN, 2) is None


def test_a_program_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory.device_used_bytes("maca", 0) is None
    assert memory.device_used_bytes("cpu", 0) is None


def test_the_program_that_is_there_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shown").write_text(SHOWN)
    program = tmp_path / "mx-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = --show-memory ] && exec /bin/cat {tmp_path}/shown\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory.device_used_bytes("maca", 1) == 2 << 30


class NoDriver(Exception):
    pass


def nvml(*, fails: bool) -> ModuleType:
    module = ModuleType("pynvml")

    def init() -> None:
        if fails:
            raise NoDriver

    entries = {
        "NVMLError": NoDriver,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=1000 + handle),
    }
    module.__dict__.update(entries)
    return module


def test_nvml_tells_of_its_device_and_its_errors_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fails=False))
    assert memory.device_used_bytes("cuda", 3) == 1003
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fails=True))
    assert memory.device_used_bytes("cuda", 3) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory.device_used_bytes("cuda", 3) is None
