"""Batches of random row counts from several clients through a pool with device graphs, held against plain runs.

Every row is one of a table whose answers a pool without the graph has given at the same batch size; rows are picked at
random, so that an answer which belongs to another row, batch or moment is seen, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from pool import Pool, wait_until

from mxpool import Client
from mxpool.errors import MxPoolError, WorkerDied
from mxpool.tensors import Signature

Arrays = dict[str, npt.NDArray[Any]]
MODEL = "ranking"


def table(path: str, size: int, **keys: Any) -> dict[str, Any]:
    """The model's table, at the one batch size ``size`` with or without the graph."""
    sizes = [size]
    return {
        "path": path,
        "max_batch_size": size,
        "batch_sizes": sizes,
        "graph_batch_sizes": sizes,
        "workers": {"gpu0": 1},
        "max_queue_size": 4096,
        **keys,
    }


class RowTable:
    """Rows, and what a plain run of ``size`` rows answers to each of them."""

    def __init__(self, plain: Pool, size: int, count: int, seed: int = 3) -> None:
        with plain.client() as client:
            self.signature = Signature.from_wire(client.metadata(MODEL))
            rng = np.random.default_rng(seed)
            self.rows: Arrays = {
                spec.name: rng.random(self.signature.shape(spec, count), np.float32) for spec in self.signature.inputs
            }
            parts = [client.infer(MODEL, self.pick(np.arange(at, at + size))) for at in range(0, count, size)]
        self.answers: Arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.count = count

    def pick(self, which: npt.NDArray[Any]) -> Arrays:
        """Those rows."""
        return {name: rows[which] for name, rows in self.rows.items()}


class Storm:
    """The clients, and what they saw."""

    def __init__(self, pool: Pool, rows: RowTable, *, clients: int = 8, rows_max: int = 48) -> None:
        self._pool = pool
        self._table = rows
        self._rows_max = rows_max
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def run(self, batches: int, kills: int = 0, timeout_s: float = 300.0) -> None:
        """Until the model has run ``batches`` batches, its worker killed ``kills`` times while it had some.

        Five deaths within a minute make a model unavailable: ``kills`` stays below.
        """
        chance = random.Random(batches)
        for thread in self._threads:
            thread.start()
        try:
            for kill in range(1, kills + 1):
                self._wait(batches * kill // (kills + 1), timeout_s)
                os.kill(self._busy_worker(), signal.SIGKILL)
                threading.Event().wait(chance.random() * 0.01)
            self._wait(batches, timeout_s)
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60)

    def _wait(self, batches: int, timeout_s: float) -> None:
        what = f"{batches} batches"
        wait_until(lambda: self.wrong or self._pool.model(MODEL)["batches"] >= batches, what, timeout_s)

    def _busy_worker(self) -> int:
        def busy() -> int | None:
            (worker,) = self._pool.model(MODEL)["workers"]
            return int(worker["pid"]) if worker["state"] == "ready" and worker["in_flight"] else None

        return int(wait_until(busy, "a worker that has a batch", 60))

    def _client(self, number: int) -> None:
        rng = np.random.default_rng(number)
        with Client(self._pool.endpoint) as client:
            while not self._stop.is_set() and not self.wrong:
                which = [rng.integers(0, self._table.count, rng.integers(1, self._rows_max + 1)) for _ in range(8)]
                futures = [client.submit(MODEL, self._table.pick(picked)) for picked in which]
                for picked, future in zip(which, futures, strict=True):
                    try:
                        self._compare(picked, future.result(60))
                    except WorkerDied:
                        self.counts["died"] += 1  # twice killed with this request on board: the client may ask again
                    except MxPoolError as error:
                        self.wrong.append(str(error))

    def _compare(self, picked: npt.NDArray[Any], answer: Arrays) -> None:
        self.counts["answered"] += 1
        for name, values in answer.items():
            expected = self._table.answers[name][picked]
            if values.tobytes() != expected.tobytes():
                difference = float(np.abs(values - expected).max())
                self.wrong.append(f"{name} of {len(picked)} rows differs by up to {difference:g}")
