"""How much memory processes and devices use, as the system or the vendor's own tools tell it."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterable
from typing import Any

import psutil

MX_SMI = ("mx-smi", "--show-memory")
MX_SMI_S = 10.0
_BLOCK = re.compile(r"\bGPU\s*#?\s*(\d+)\b", re.IGNORECASE)
_USED = re.compile(r"\bvis_vram used\b\D*(\d+)\s*(KB|KiB|MB|MiB|GB|GiB)?", re.IGNORECASE)
_ANY_USED = re.compile(r"\bvram\b[^\n]*\bused\b\D*(\d+)\s*(KB|KiB|MB|MiB|GB|GiB)?", re.IGNORECASE)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def device_used_bytes(kind: str, index: int) -> int | None:
    """Memory in use on a device, by whatever process; None where nothing here can tell.

    ``index`` counts as the vendor's tool does. cuda: NVML, if the package nvidia-ml-py is installed. maca: what
    ``mx-smi --show-memory`` prints. Its form is taken from the vendor's documentation and was never seen on a card:
    an output of another form is None, not an error.
    """
    if kind == "cuda":
        return _nvml_used(index)
    return mx_smi_used(_mx_smi(), index) if kind == "maca" else None


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of processes together, shared pages counted in each; one that is gone counts nothing."""
    return sum(_resident(pid) for pid in pids)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, ValueError):
        return 0


def _nvml_used(index: int) -> int | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index)).used)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:  # no driver, no such device, or not ours to see
        return None


def _mx_smi() -> str:
    try:
        done = subprocess.run(MX_SMI, stdin=subprocess.DEVNULL, capture_output=True, timeout=MX_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def mx_smi_used(text: str, index: int) -> int | None:
    """The bytes in use on GPU ``index`` in what ``mx-smi --show-memory`` prints; None if they are not found.

    Read is a line ``vis_vram used : N KB``, or else any with ``vram`` and ``used``, below the heading ``GPU#index``; a
    number without a unit is in KB.
    """
    headings = list(_BLOCK.finditer(text))
    for number, heading in enumerate(headings):
        if int(heading[1]) != index:
            continue
        end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
        block = text[heading.end() : end]
        found = _USED.search(block) or _ANY_USED.search(block)
        if found:
            return int(found[1]) * _UNITS[(found[2] or "k")[0].lower()]
    return None
