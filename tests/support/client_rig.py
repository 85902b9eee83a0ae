"""What the tests of the client share: frames, a broker that keeps requests, and programs run on their own."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import fake_broker
import numpy as np
from fake_broker import FakeBroker, Received

from mxpool.errors import QueueFull

LOST_MAX_S = 1.0


def frame(value: float, rows: int = 1) -> dict[str, Any]:
    return {"x": np.full((rows, 4), value, np.float32)}


def frames(count: int) -> Iterator[dict[str, Any]]:
    return (frame(value) for value in range(count))


def sums(results: Iterator[dict[str, Any]]) -> list[float]:
    return [float(result["y"][0]) for result in results]


def full(retry_after_ms: int = 1) -> QueueFull:
    return QueueFull(model="sum", depth=1, limit=1, unit="requests", retry_after_ms=retry_after_ms)


class Held:
    """Keeps every INFER until the test says what becomes of it."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.requests: list[Received] = []
        broker.on_infer = self.requests.append

    def wait(self, count: int) -> None:
        self.broker.wait_until(lambda: len(self.requests) >= count)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class running:  # noqa: N801 - reads as a verb where it is used
    """The fake broker as a process of its own."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, fake_broker.__file__, endpoint]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def script(text: str, *arguments: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
