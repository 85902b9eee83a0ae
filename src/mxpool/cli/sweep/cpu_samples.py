"""CPU use of processes in samples of 100 ms, seen from outside."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

SAMPLE_S = 0.1
_SCHEDULED = 2  # CPUCLOCK_SCHED: clock_getcpuclockid(3) makes the number of a process's clock of it


def cpu_s(pid: int) -> float | None:
    """CPU seconds of all threads of ``pid`` so far, in nanoseconds' steps; None if there is no such process.

    /proc and psutil count in steps of 10 ms, a tenth of a sample.
    """
    with suppress(OSError, OverflowError):
        return time.clock_gettime_ns(~pid << 3 | _SCHEDULED) / 1e9
    return None


class CpuSamples:
    """Samples from entering to leaving the context. ``watched`` and ``beside`` are process ids by name."""

    def __init__(self, watched: Mapping[str, int], beside: Mapping[str, int]) -> None:
        self._watched = set(watched)
        self._pids = {**watched, **beside}
        self._times: list[float] = []
        self._used: list[dict[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="mxpool-cpu-samples", daemon=True)

    def __enter__(self) -> CpuSamples:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def percents(self) -> list[float]:
        """CPU of the watched together, of one core, for each whole sample; for a shorter run, for all of it."""
        looks = list(zip(self._times, self._used, strict=True))
        spans = [(after - before, used, later) for (before, used), (after, later) in itertools.pairwise(looks)]
        whole = [span for span in spans if span[0] >= SAMPLE_S / 2]
        return [100 * _difference(used, later, self._watched) / span_s for span_s, used, later in whole or spans]

    def cores(self) -> dict[str, float]:
        """Cores that each process used on average, while it was there."""
        elapsed_s = max(self._times[-1] - self._times[0], 1e-9)
        return {name: _difference(self._used[0], self._used[-1], [name]) / elapsed_s for name in self._pids}

    def _sample(self) -> None:
        due_s = self._times[0]
        while not self._over.is_set():
            due_s += SAMPLE_S
            if not self._over.wait(max(due_s - time.monotonic(), 0)):
                self._look()

    def _look(self) -> None:
        last = self._used[-1] if self._used else {}
        found = {name: cpu_s(pid) for name, pid in self._pids.items()}
        self._times.append(time.monotonic())
        self._used.append({name: last.get(name, 0.0) if used is None else used for name, used in found.items()})


def _difference(before: Mapping[str, float], after: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(after[name] - before[name] for name in names)


def rank(values: Sequence[float], percent: float) -> float | None:
    """The smallest of ``values`` that ``percent`` of them do not exceed; None without any."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] if ordered else None
