"""The signature of a model without a broker, from a short-lived worker process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import IO

from mxpool import messages
from mxpool.errors import LoadFailed, MxPoolError, from_wire
from mxpool.exits import exit_words
from mxpool.shm.link import Link, LinkClosed
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature
from mxpool.workers.backends.protocol import Loaded

STATUS_BYTES = 4096
STDERR_BYTES = 4096  # of the end of what a dead child wrote
EXIT_WAIT_S = 1.0  # between the end of a dying child's link and the end of the child


def probe(spec: ModelSpec, timeout_s: float) -> Loaded:
    """Load ``spec`` in a child and return what it found; blocks up to ``timeout_s``. Nothing is left running.

    A file at which the runtime aborts or crashes ends the child, and is an error here.

    Raises:
        LoadFailed: what the worker said, or how it died, or that it took longer than ``timeout_s``.
    """
    link, theirs = Link.pair()
    with tempfile.TemporaryFile() as stderr:
        child = _spawn(theirs.fileno(), stderr)
        theirs.close()
        try:
            return _ask(link, spec, timeout_s)
        except LinkClosed:
            raise LoadFailed(model=spec.name, reason=_death(child, stderr)) from None
        finally:
            link.close()
            _end(child)


def _spawn(link_fd: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "mxpool.cli.worker", "--log-level", "error", "--link-fd", str(link_fd)],
        pass_fds=[link_fd],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # modules of the current directory are not for the child
    )


def _ask(link: Link, spec: ModelSpec, timeout_s: float) -> Loaded:
    """Play the broker up to the signature."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LoadFailed(model=spec.name, reason=f"no signature within {timeout_s:g} s")
        packet = link.receive(left_s)
        if packet is None:
            continue
        kind, fields = messages.decode(packet.data)
        if kind == messages.HELLO:
            _send_load(link, spec)
        elif kind == messages.SIGNATURE:
            return Loaded(Signature.from_wire(fields["signature"]), fields["report"])
        else:
            raise _load_failed(spec, from_wire(fields["code"], fields["message"], fields["fields"]))


def _send_load(link: Link, spec: ModelSpec) -> None:
    status = os.memfd_create("mxpool-status")
    try:
        os.ftruncate(status, STATUS_BYTES)
        link.send(
            messages.encode(messages.LOAD, worker=f"{spec.name}-probe", model=spec.name, spec=spec.to_wire()), [status]
        )
    finally:
        os.close(status)


def _load_failed(spec: ModelSpec, error: MxPoolError) -> LoadFailed:
    return error if isinstance(error, LoadFailed) else LoadFailed(model=spec.name, reason=error.message)


def _death(child: subprocess.Popen[bytes], stderr: IO[bytes]) -> str:
    """How the child ended, with the last line that it wrote: a runtime that aborts often says why."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(EXIT_WAIT_S)
    code = _end(child)
    stderr.seek(max(stderr.seek(0, os.SEEK_END) - STDERR_BYTES, 0))
    lines = stderr.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
    return f"the process that loaded it ended with {exit_words(code)}: {last}"


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill the child, which has nothing left to do, and return how it ended."""
    child.kill()
    return child.wait()
