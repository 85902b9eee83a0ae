"""A program that sends id-stamped rows from several threads and compares every answer; see test_id_stamped_rows.

    stamped_traffic.py ENDPOINT CLIENT THREADS ROWS SEED MODEL...

Row r of request s of thread c is (c, s, r), and the models answer 2x + 1. A thread stops when ROWS of its rows were
answered right; whatever else became of a request is counted by its code. Even threads are clients made from
docs/wire.md alone, which see every answer that comes; odd ones use the library. Lines on stdout::

    {"rows": 512}                      so many rows more were answered right
    {"threads": [{"sent": …}, …]}      at the end: the tallies of all threads
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt
from wire_client import WireClient

from mxpool import Client, wire
from mxpool.clock import now_us
from mxpool.errors import BrokerLost, MxPoolError

Stamps = npt.NDArray[Any]

ROWS_MAX = 7
WINDOW = 48  # requests of one thread without an answer; all threads together pass the queue's limit
PROGRESS_ROWS = 512
ANSWER_MAX_S = 60.0  # a request without an answer for so long has none
DEADLINE_US = (1, 30_000)  # of those that are meant to expire
CANCELS, EXPIRES = 0.06, 0.06  # shares of the requests
WIDTH = 3
DTYPES = {"echo": np.int64, "onnx": np.float64}


class Tally:
    """What became of one thread's requests."""

    def __init__(self, client: int, rows_wanted: int) -> None:
        self.client = client
        self.rows_wanted = rows_wanted
        self.rows_right = 0
        self.counts: Counter[str] = Counter(sent=0, mismatched=0, answered_twice=0, unanswered=0, ok=0)
        self._told = 0

    @property
    def wanted(self) -> bool:
        return self.rows_right < self.rows_wanted

    def right(self, sent: Stamps, outputs: dict[str, Stamps]) -> None:
        """Compare an answer, exactly."""
        (answer,) = outputs.values()
        if answer.shape != sent.shape or answer.dtype != sent.dtype or not (answer == 2 * sent + 1).all():
            self.counts["mismatched"] += 1
            return
        self.counts["ok"] += 1
        self.rows_right += len(sent)
        if self.rows_right - self._told >= PROGRESS_ROWS or not self.wanted:
            say({"rows": self.rows_right - self._told})
            self._told = self.rows_right

    def report(self) -> dict[str, Any]:
        return {"client": self.client, "rows_right": self.rows_right, **self.counts}


_says = threading.Lock()


def say(line: dict[str, Any]) -> None:
    with _says:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class Source:
    """Requests of one thread, never the same stamps twice."""

    def __init__(self, client: int, chance: random.Random, models: list[str]) -> None:
        self._client = client
        self._chance = chance
        self._models = models
        self._sequence = 0

    def __call__(self) -> tuple[str, Stamps]:
        model = self._chance.choice(self._models)
        rows = self._chance.randint(1, ROWS_MAX)
        self._sequence += 1
        stamps = np.empty((rows, WIDTH), DTYPES[model.split("-")[0]])
        stamps[:, 0], stamps[:, 1], stamps[:, 2] = self._client, self._sequence, np.arange(rows)
        return model, stamps


class BareThread:
    """Over the wire: every id is answered once, or was lost with its broker."""

    def __init__(self, endpoint: str, tally: Tally, source: Source, chance: random.Random) -> None:
        self._endpoint = endpoint
        self._tally = tally
        self._source = source
        self._chance = chance
        self._open: dict[int, Stamps] = {}
        self._answered: set[int] = set()

    def run(self) -> None:
        while self._tally.wanted:
            try:
                with connected(self._endpoint) as client:
                    self._serve(client)
            except BrokerLost:
                self._tally.counts["broker_lost"] += len(self._open)
            self._open.clear()
            self._answered.clear()

    def _serve(self, client: WireClient) -> None:
        heard_s = time.monotonic()
        while self._tally.wanted or self._open:
            while self._tally.wanted and len(self._open) < WINDOW:
                self._send(client)
            answers = client.receive(1.0)
            if answers:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > ANSWER_MAX_S:
                self._tally.counts["unanswered"] += len(self._open)
                return
            for request_id, answer in answers:
                self._judge(request_id, answer)
        for request_id, answer in client.receive(0.2):  # what comes now comes for the second time
            self._judge(request_id, answer)

    def _send(self, client: WireClient) -> None:
        model, stamps = self._source()
        draw = self._chance.random()
        deadline_us = now_us() + self._chance.randint(*DEADLINE_US) if draw < EXPIRES else 0
        request_id = client.infer(model, {"x": stamps}, deadline_us)
        self._open[request_id] = stamps
        self._tally.counts["sent"] += 1
        if draw > 1 - CANCELS:
            client.cancel(self._chance.choice([*self._open]))

    def _judge(self, request_id: int, answer: Any) -> None:
        stamps = self._open.pop(request_id, None)
        if stamps is None:
            self._tally.counts["answered_twice" if request_id in self._answered else "mismatched"] += 1
            return
        self._answered.add(request_id)
        if isinstance(answer, wire.Failure):
            self._tally.counts[answer.code] += 1
        else:
            self._tally.right(stamps, answer)


def connected(endpoint: str) -> WireClient:
    """A connection, once there is a broker again."""
    pause = threading.Event()
    while True:
        try:
            return WireClient(endpoint)
        except BrokerLost:
            pause.wait(0.02)


class LibraryThread:
    """By ``mxpool.Client``: futures, calls and pushes in turn; it finds the next broker by itself."""

    def __init__(self, endpoint: str, tally: Tally, source: Source, chance: random.Random) -> None:
        self._endpoint = endpoint
        self._tally = tally
        self._source = source
        self._chance = chance
        self._open: dict[Future[Any], Stamps] = {}

    def run(self) -> None:
        with Client(self._endpoint) as client:
            while self._tally.wanted:
                draw = self._chance.random()
                if draw < 0.05:
                    self._settle(0)
                    self._push(client)
                elif draw < 0.1:
                    self._infer(client)
                else:
                    self._submit(client)
            self._settle(0)

    def _settle(self, most: int) -> None:
        """Wait until at most so many futures are open, and judge the others."""
        while len(self._open) > most:
            done, _ = wait(self._open, ANSWER_MAX_S, FIRST_COMPLETED)
            if not done:
                self._tally.counts["unanswered"] += len(self._open)
                self._open.clear()
            for future in done:
                self._judge(future, self._open.pop(future))

    def _judge(self, future: Future[Any], stamps: Stamps) -> None:
        try:
            self._tally.right(stamps, future.result())
        except CancelledError:
            self._tally.counts["cancelled"] += 1
        except MxPoolError as error:
            self._failed(error)

    def _failed(self, error: MxPoolError) -> None:
        self._tally.counts[error.code] += 1
        if isinstance(error, BrokerLost):
            threading.Event().wait(0.02)  # until there is one again

    def _submit(self, client: Client) -> None:
        model, stamps = self._source()
        draw = self._chance.random()
        timeout_s = self._chance.randint(*DEADLINE_US) / 1e6 if draw < EXPIRES else ANSWER_MAX_S
        self._tally.counts["sent"] += 1
        try:
            self._open[client.submit(model, {"x": stamps}, timeout_s)] = stamps
        except MxPoolError as error:
            self._failed(error)
            return
        if draw > 1 - CANCELS:
            self._chance.choice([*self._open]).cancel()
        self._settle(WINDOW)

    def _infer(self, client: Client) -> None:
        model, stamps = self._source()
        self._tally.counts["sent"] += 1
        try:
            self._tally.right(stamps, client.infer(model, {"x": stamps}, retries=3))
        except MxPoolError as error:
            self._failed(error)

    def _push(self, client: Client) -> None:
        """All frames of one run go to one model."""
        requests = [self._source() for _ in range(64)]
        model = requests[0][0]
        sent = [stamps for name, stamps in requests if name == model]
        answered = 0
        try:
            for stamps, outputs in zip(sent, client.push(model, ({"x": s} for s in sent), in_flight=32), strict=True):
                answered += 1
                self._tally.counts["sent"] += 1
                self._tally.right(stamps, outputs)
        except MxPoolError as error:
            self._tally.counts["sent"] += 1
            if error.fields.get("index", answered) != answered:
                self._tally.counts["mismatched"] += 1
            self._failed(error)


def main() -> None:
    endpoint, first, threads, rows, seed, *models = sys.argv[1:]
    tallies, running = [], []
    for number in range(int(threads)):
        client = int(first) + number
        tally = Tally(client, int(rows))
        chance = random.Random(f"{seed}/{client}")
        kind = LibraryThread if number % 2 else BareThread
        thread = threading.Thread(target=kind(endpoint, tally, Source(client, chance, models), chance).run)
        tallies.append(tally)
        running.append(thread)
        thread.start()
    for thread in running:
        thread.join()
    say({"threads": [tally.report() for tally in tallies]})


if __name__ == "__main__":
    main()
