"""Requests at times fixed beforehand, whether or not those before are answered: the load of independent callers.

A closed loop sends less as soon as the broker is slow, and so hides just what is to be measured. Here a latency runs
from the moment at which the schedule wanted the request sent, also if the client was late: nothing is left out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from mxpool.cli.surroundings import Arrays
from mxpool.errors import BrokerLost, ClientUnusable, MxPoolError
from mxpool.histogram import Histogram

LATE_S = 0.005  # a process that sleeps is woken within 1 ms or so, on a busy machine within some more


class Submits(Protocol):
    """The part of ``mxpool.Client`` that is called here."""

    def submit(self, model: str, arrays: Mapping[str, Any], timeout_s: float = 30.0) -> Future[dict[str, Any]]:
        """Send one request; the future is done with its answer."""
        ...


def schedule(rate: float, seconds: float, seed: int) -> list[float]:
    """Times from 0 to ``seconds`` of a Poisson process of ``rate`` a second: gaps are exponential and independent."""
    generator = np.random.default_rng(seed)
    times: list[float] = []
    last_s = 0.0
    while last_s < seconds:
        gaps = generator.exponential(1 / rate, max(int(rate * seconds), 16))
        block = last_s + np.cumsum(gaps)
        times += block[block < seconds].tolist()
        last_s = float(block[-1])
    return times


class OpenTally:
    """What a run counted. Latencies in microseconds from the scheduled time; ``late`` sends were LATE_S behind it."""

    def __init__(self) -> None:
        self.sent = 0
        self.late = 0
        self.answered = 0
        self.elapsed_s = 0.0
        self.latency_us = Histogram()
        self.failures: Counter[str] = Counter()
        self._open = 0
        self._changed = threading.Condition()

    def sending(self, behind_s: float) -> None:
        """Count a request that is handed over ``behind_s`` after its time."""
        with self._changed:
            self.sent += 1
            self.late += behind_s > LATE_S
            self._open += 1

    def ended(self, latency_s: float, error: BaseException | None) -> None:
        """Count its end."""
        with self._changed:
            self._open -= 1
            if error is None:
                self.answered += 1
                self.latency_us.add(max(int(latency_s * 1e6), 0))
            else:
                self.failures[error.code if isinstance(error, MxPoolError) else type(error).__name__] += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until every request has ended, ``seconds`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, seconds)


def open_loop(
    client: Submits,
    model: str,
    blocks: Sequence[Arrays],
    times_s: Sequence[float],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> OpenTally:
    """Send a request at each of ``times_s`` from now on, and wait for all answers.

    Raises:
        BrokerLost, ClientUnusable: there is nothing left to measure.
    """
    tally, start_s = OpenTally(), clock()
    for index, offset_s in enumerate(times_s):
        due_s = start_s + offset_s
        while (left_s := due_s - clock()) > 0:
            pause(left_s)
        tally.sending(clock() - due_s)
        try:
            future = client.submit(model, blocks[index % len(blocks)], timeout_s)
        except (BrokerLost, ClientUnusable):
            raise
        except MxPoolError as error:
            tally.ended(clock() - due_s, error)
            continue
        future.add_done_callback(partial(_note, tally, due_s, clock))
    tally.wait(timeout_s + 1)
    tally.elapsed_s = clock() - start_s
    return tally


def _note(tally: OpenTally, due_s: float, clock: Callable[[], float], future: Future[Any]) -> None:
    tally.ended(clock() - due_s, future.exception())
