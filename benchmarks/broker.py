"""A real broker for one benchmark, and what its processes cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil

import mxpool
from mxpool.errors import MxPoolError

START_TIMEOUT_S = 20.0


class RunningBroker:
    """``mx-broker`` with a config of TOML text, in a directory of its own; a context manager that ends it."""

    def __init__(self, models: str, **broker: str) -> None:
        self._models = models
        self._broker = broker

    def __enter__(self) -> RunningBroker:
        self._directory = tempfile.TemporaryDirectory(prefix="mxbench-")
        folder = Path(self._directory.name)
        self.endpoint = f"ipc://{folder}/b.sock"
        keys = "".join(f"{key} = {value}\n" for key, value in self._broker.items())
        (folder / "config.toml").write_text(f'[broker]\nendpoint = "{self.endpoint}"\n{keys}\n{self._models}')
        begin = time.monotonic()
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "mxpool.cli.broker", str(folder / "config.toml"), "--log-level", "warning"]
            self.process = subprocess.Popen(command, stderr=log)
        while not self._ready():
            if time.monotonic() - begin > START_TIMEOUT_S or self.process.poll() is not None:
                raise SystemExit((folder / "log").read_text() or "the broker did not become ready")
            time.sleep(0.02)
        self.ready_s = time.monotonic() - begin
        return self

    def _ready(self) -> bool:
        try:
            with mxpool.Client(self.endpoint) as client:
                return bool(client.control("ready", "")["ready"])
        except MxPoolError:
            return False

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the broker and of its workers together."""
        broker = psutil.Process(self.process.pid)
        return {
            "broker": sum(broker.cpu_times()[:2]),
            "worker": sum(sum(child.cpu_times()[:2]) for child in broker.children()),
        }

    def rss_bytes(self) -> int:
        """Resident memory of the broker alone."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        self._directory.cleanup()


def own_cpu_s() -> float:
    """CPU seconds so far of this process, all threads."""
    times = os.times()
    return times.user + times.system
