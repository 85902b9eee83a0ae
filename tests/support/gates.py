"""Batches that run when a test says so, and the state in which a pool then stands."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from pool import Pool, wait_until

Rows = npt.NDArray[Any]

KILL_S = 5.0


class Gate:
    """A FIFO for the echo backend's option ``gate``: each batch that it runs takes one byte, or waits for it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mxpool-gate-")
        self.path = Path(self._folder.name) / "gate"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)
        self._folder.cleanup()

    def let(self, batches: int = 1) -> None:
        """Let that many batches end, now or later."""
        os.write(self._fd, b"." * batches)


def rows(*firsts: float, dtype: str = "float32", width: int = 4) -> Rows:
    """One row for each of ``firsts``, which is its first element; the others count up from it in hundredths."""
    column = np.array(firsts).reshape(-1, 1)
    found: Rows = (column + np.arange(width) * (0.01 if dtype.startswith("float") else 1)).astype(dtype)
    return found


def x(*firsts: float) -> dict[str, Rows]:
    """The arrays of a request for an echo model."""
    return {"x": rows(*firsts)}


def slot_states(pool: Pool, model: str = "echo") -> list[str]:
    """States of all slots that are not free, sorted."""
    return sorted(slot["state"] for slot in pool.control("slots", model)["slots"] if slot["state"] != "free")


def wait_running(pool: Pool, batches: int = 1, model: str = "echo") -> None:
    """Wait until that many batches are with workers."""
    wait_until(lambda: slot_states(pool, model).count("running") == batches, f"{batches} batches running")


def wait_queued(pool: Pool, requests: int, model: str = "echo") -> None:
    """Wait until that many requests are accepted and not with a worker."""
    wait_until(lambda: pool.model(model)["queue_depth"] == requests, f"a queue of {requests}")


def wait_ready(pool: Pool, model: str = "echo") -> None:
    """Wait until every worker of a model is ready."""
    wait_until(lambda: all(worker["state"] == "ready" for worker in pool.model(model)["workers"]), f"{model} ready")


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end: a process that is dying may still take a byte out of a gate."""
    with ends_of([pid]) as gone:
        os.kill(pid, signal.SIGKILL)
        assert gone(KILL_S), f"{pid} is still there"


@contextlib.contextmanager
def ends_of(pids: Sequence[int]) -> Iterator[Callable[[float], bool]]:
    """Watches processes, which may be nobody's children; yields a wait, up to so many seconds, for the last one."""
    fds = [os.pidfd_open(pid) for pid in pids]

    def gone(timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        return all(select.select([fd], [], [], max(end_s - time.monotonic(), 0))[0] for fd in fds)

    try:
        yield gone
    finally:
        for fd in fds:
            os.close(fd)


def zombies(pool: Pool) -> list[psutil.Process]:
    """Children of the broker that are dead and not reaped."""
    children = psutil.Process(pool.pid).children(recursive=True)
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
