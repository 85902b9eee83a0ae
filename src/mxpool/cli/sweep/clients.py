"""The client processes of a sweep, from the side of the sweep: started, told what to send, and added up."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from mxpool.cli.sweep import tether
from mxpool.cli.sweep.broker_process import CannotServe
from mxpool.histogram import merged

END_MAX_S = 3.0
START_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of all clients counted; rates are the sum of theirs, ``seconds`` the longest."""

    sent: int = 0
    late: int = 0
    requests: int = 0
    requests_per_s: float = 0.0
    rows_per_s: float = 0.0
    seconds: float = 0.0
    latency_us: Sequence[Sequence[int]] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    cut_short: bool = False


def added(told: Iterable[Mapping[str, Any]]) -> Load:
    """The lines of all clients as one load."""
    lines = list(told)
    errors: Counter[str] = Counter()
    for line in lines:
        errors.update(line["errors"])
    return Load(
        sent=sum(line["sent"] for line in lines),
        late=sum(line["late"] for line in lines),
        requests=sum(line["requests"] for line in lines),
        requests_per_s=sum(line["requests"] / max(line["seconds"], 1e-9) for line in lines),
        rows_per_s=sum(line["rows"] / max(line["seconds"], 1e-9) for line in lines),
        seconds=max((line["seconds"] for line in lines), default=0.0),
        latency_us=merged(line["latency_us"] for line in lines),
        errors=dict(errors),
        cut_short=any(line["cut_short"] for line in lines),
    )


class Clients:
    """``count`` processes from ``start`` to the end of the context."""

    def __init__(self, count: int, environ: Mapping[str, str]) -> None:
        self._count = count
        self._environ = environ
        self._processes: list[subprocess.Popen[bytes]] = []
        self._unread: dict[int, bytes] = {}

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                self._pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(END_MAX_S if process.returncode is None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._pipe(process.stdout).close()

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def start(self, setup: Mapping[str, Any], log: IO[bytes]) -> int:
        """Start them, each with inputs of its own, and wait until each has had an answer; rows of one request.

        Raises:
            CannotServe: one could not, or ended.
        """
        for index in range(self._count):
            process = tether.start("client", [], log=log, environ=self._environ, piped=True)
            self._processes.append(process)
            self._write(process, {**setup, "seed": index})
        within_s = START_MAX_S + setup["timeout_s"]
        return max(int(line["rows"]) for line in self._answers(within_s))

    def closed(self, in_flight: int, seconds: float, timeout_s: float) -> Load:
        """Keep ``in_flight`` requests under way, shared among the clients.

        Raises:
            CannotServe: a client could not go on, as when the broker is lost.
        """
        share, more = divmod(max(in_flight, self._count), self._count)
        loads = [{"in_flight": share + (index < more), "seconds": seconds} for index in range(self._count)]
        return self._run(loads, seconds + timeout_s)

    def open(self, rate: float, seconds: float, timeout_s: float, seed: int = 0) -> Load:
        """Offer ``rate`` requests a second: each client its share, which together are a Poisson process again.

        Raises:
            CannotServe: as ``closed``.
        """
        share = rate / self._count
        seeds = range(seed, seed + self._count)
        return self._run([{"rate": share, "seconds": seconds, "seed": each} for each in seeds], seconds + timeout_s)

    def _run(self, loads: Sequence[Mapping[str, Any]], within_s: float) -> Load:
        for process, load in zip(self._processes, loads, strict=True):
            self._write(process, load)
        return added(self._answers(within_s + END_MAX_S))

    def _answers(self, within_s: float) -> list[dict[str, Any]]:
        """One line of each."""
        end_s = time.monotonic() + within_s
        lines = [self._line(process, end_s) for process in self._processes]
        for line in lines:
            if "error" in line:
                raise CannotServe(f"a client of the sweep: {line['error']}")
        return lines

    def _line(self, process: subprocess.Popen[bytes], end_s: float) -> dict[str, Any]:
        pipe = self._pipe(process.stdout).fileno()
        data = self._unread.pop(process.pid, b"")
        while b"\n" not in data:
            readable, _, _ = select.select([pipe], [], [], max(end_s - time.monotonic(), 0))
            more = os.read(pipe, 65_536) if readable else b""
            if not more:
                how = "ended" if readable else "did not answer in time"
                raise CannotServe(f"a client of the sweep {how}")
            data += more
        line, _, self._unread[process.pid] = data.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _write(self, process: subprocess.Popen[bytes], line: Mapping[str, Any]) -> None:
        try:
            self._pipe(process.stdin).write(json.dumps(line).encode() + b"\n")
        except OSError:
            raise CannotServe("a client of the sweep ended") from None

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe
