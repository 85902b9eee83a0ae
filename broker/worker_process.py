"""One worker process: how it is started, spoken to, and found to be dead. I/O only; ``supervisor`` decides."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections import deque
from typing import Any

from mxpool import messages
from mxpool.broker.lifecycle import Lifecycle
from mxpool.broker.served import ServedModel
from mxpool.exits import exit_words
from mxpool.shm.link import Link
from mxpool.shm.segment import Segment
from mxpool.spec import ModelSpec

STATUS_BYTES = 4096
STDERR_LINES = 20
_ORDINARY = re.compile(r"\blevel=(info|debug)\b")  # in lines of cli.logs
STDERR_READS = 16  # of a dead worker's: a grandchild that holds the pipe and writes for ever must not hold us


class WorkerProcess:
    """A worker's name for good, and the process of its present incarnation, if there is one.

    States: ``dead`` → ``starting`` → ``loading`` → ``loaded`` → ``binding`` → ``ready``; ``stopping`` from any.
    """

    def __init__(self, name: str, device: str, spec: ModelSpec, served: ServedModel) -> None:
        self.name = name
        self.device = device
        self.spec = spec
        self.served = served
        self.life = Lifecycle()
        self.state = "dead"
        self.failure = ""
        self.cannot_boot = False
        self.started_us = 0
        self.kill_at_us: int | None = None
        self.batches = 0
        self.lost_in_bind = 0
        self.report: dict[str, Any] = {}
        self.stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._partial = b""

    def spawn(self, now_us: int) -> None:
        """Start the process: exec, a session of its own, no descriptor inherited but the link's and the pipes."""
        with contextlib.ExitStack() as undo:
            self.status = Segment.create(STATUS_BYTES)
            undo.callback(self.status.close)
            self.link, theirs = Link.pair()
            undo.callback(self.link.close)
            with theirs:
                self.process = self._popen(theirs.fileno())
            self.pidfd = _pidfd(self.process)
            undo.pop_all()  # all went well: nothing is closed
        assert self.process.stderr is not None
        self.stderr_fd = self.process.stderr.fileno()
        os.set_blocking(self.stderr_fd, False)
        self.state, self.started_us = "starting", now_us
        self.failure, self.cannot_boot, self.kill_at_us = "", False, None
        self.stderr.clear()
        self.report = {}

    @staticmethod
    def _popen(link_fd: int) -> subprocess.Popen[bytes]:
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        return subprocess.Popen(
            [sys.executable, "-m", "mxpool.cli.worker", "--link-fd", str(link_fd), "--log-level", level],
            pass_fds=[link_fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # a numpy.py in the working directory is not numpy
        )

    @property
    def pid(self) -> int | None:
        """The process id of the present incarnation."""
        return None if self.state == "dead" else self.process.pid

    def load(self) -> None:
        """Tell it what to serve."""
        self.state = "loading"
        self.link.send(
            messages.encode(messages.LOAD, worker=self.name, model=self.served.name, spec=self.spec.to_wire()),
            [self.status.fd],
        )

    def bind(self) -> None:
        """Hand over the model's slots."""
        served = self.served
        assert served.segment is not None
        assert served.layout is not None
        self.state = "binding"
        self.link.send(
            messages.encode(messages.BIND, slots=served.layout.slots),
            [served.segment.fd],
        )

    def started_sequence(self) -> int:
        """The sequence of the last batch it began; read after its death only."""
        return int.from_bytes(self.status.map[:8], "little")

    def kill(self) -> None:
        """SIGKILL; harmless if it is gone already."""
        if self.state != "dead":
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def read_stderr(self) -> bool:
        """Pass on what it wrote to stderr, and keep the last lines; False at the end of file, or of what is there."""
        try:
            data = os.read(self.stderr_fd, 65_536)
        except BlockingIOError:
            return False
        if not data:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-4096:]
        for line in lines:
            self.stderr.append(line.decode(errors="replace")[:500])
        with contextlib.suppress(OSError):
            os.write(2, data)
        return True

    def bury(self) -> int:
        """Reap the dead process and close all that belonged to it; its exit code, negative for a signal."""
        code = self.process.wait()
        for _ in range(STDERR_READS):
            if not self.read_stderr():
                break
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.link.close()
        self.status.close()
        os.close(self.pidfd)
        self.state = "dead"
        return code


def _pidfd(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def describe_exit(code: int, stderr: deque[str]) -> str:
    """An exit code in words, with the last line that the process wrote, unless it tells of an ordinary step."""
    how = f"killed by {exit_words(code)}" if code < 0 else exit_words(code)
    told = next((line for line in reversed(stderr) if not _ORDINARY.search(line)), "")
    return f"{how}: {told}" if told else how
