"""Every row knows who sent it: nothing may mix rows up, lose an answer or give it twice, whatever dies meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import random
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import made_models
from onnx import TensorProto, helper
from pool import Pool, echo, soak, wait_until

TRAFFIC = Path(__file__).parents[1] / "support" / "stamped_traffic.py"
ROWS = soak(2_000_000)
CLIENTS = 12
MANY_CLIENTS, MANY_ROWS = 64, soak(64 * 500 * 4, 64 * 40 * 4)
PROCESSES = 3
KILLS = soak(40, 8)
RESTARTS = soak(4, 1)
SILENCE_MAX_S = 120.0
COUNTS = ("sent", "rows_right", "ok", "mismatched", "answered_twice", "unanswered")
CODES = ("queue_full", "deadline_exceeded", "cancelled", "worker_died", "unavailable")


def doubled(folder: Path) -> str:
    """``y = 2x + 1`` in FP64, which holds every stamp exactly."""
    weights = [helper.make_tensor(name, TensorProto.DOUBLE, [], [value]) for name, value in (("two", 2), ("one", 1))]
    nodes = [helper.make_node("Mul", ["x", "two"], ["t"]), helper.make_node("Add", ["t", "one"], ["y"])]
    ports: list[made_models.Port] = [("x", TensorProto.DOUBLE, ["N", 3])]
    return made_models.save(folder, nodes, ports, [("y", *ports[0][1:])], weights)


def models(folder: Path) -> dict[str, Any]:
    """Both backends, one queue and one for each worker, one batch in flight and two; all short of queue and slots."""
    (folder / "onnx").mkdir()
    onnx = {"path": doubled(folder / "onnx"), "max_batch_size": 32, "max_queue_size": 64, "slots": 4}
    stamps = {"tensors": "x:INT64:3", "scale": 2, "offset": 1}
    return {
        "echo-two": echo(**stamps, in_flight=2, max_batch_size=16, workers=2, max_queue_size=48, slots=5),
        "echo-own": echo(**stamps, max_batch_size=8, workers=2, queue="per_worker", max_queue_size=48, delay_ms=0.5),
        "onnx-delay": {**onnx, "max_queue_delay_us": 2_000, "workers": {"cpu": 2}, "pad": "repeat"},
        "onnx-plain": onnx,
    }


class Traffic:
    """The programs that send, and what they say."""

    def __init__(self, endpoint: str, names: list[str], clients: int, rows: int, seed: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.programs = []
        self.rows = rows // clients * clients
        starts = [clients * number // PROCESSES for number in range(PROCESSES + 1)]
        for first, end in itertools.pairwise(starts):
            arguments = [endpoint, first, end - first, rows // clients, seed, *names]
            program = subprocess.Popen(
                [sys.executable, str(TRAFFIC), *map(str, arguments)], stdout=subprocess.PIPE, text=True
            )
            self._selector.register(program.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            self.programs.append(program)
        self.tallies: list[dict[str, Any]] = []

    def progress(self) -> Iterator[int]:
        """Rows answered right so far, each time that there are more; ends with the last program."""
        rows = 0
        while self._selector.get_map():
            ready = self._selector.select(SILENCE_MAX_S)
            assert ready, f"nothing answered for {SILENCE_MAX_S} s after {rows} rows"
            for key, _ in ready:
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    self._selector.unregister(key.fileobj)
                    continue
                said = json.loads(line)
                self.tallies += said.get("threads", [])
                rows += said.get("rows", 0)
            yield rows

    def end(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait()
            assert program.stdout is not None
            program.stdout.close()
        self._selector.close()


class Chaos:
    """Kills a worker after so many rows, or the broker; which and when is drawn from the seed."""

    def __init__(self, pool: Pool, chance: random.Random, rows: int, kills: int, restarts_wanted: int) -> None:
        self._pool = pool
        self._chance = chance
        restarts = {kills * number // (restarts_wanted + 1) for number in range(1, restarts_wanted + 1)}
        places = sorted(chance.sample(range(rows // 20, rows * 9 // 10), kills))
        self._due = [(rows, number in restarts) for number, rows in enumerate(places)]
        self._victims: list[str] = []
        self.deaths: Counter[str] = Counter()

    def at(self, rows: int) -> None:
        while self._due and rows >= self._due[0][0]:
            if self._due.pop(0)[1]:
                self._restart()
            else:
                self._kill_worker()

    def _kill_worker(self) -> None:
        """The workers in turn, so that none of them dies often enough to be given up."""
        workers = [worker for model in self._pool.stats()["models"].values() for worker in model["workers"]]
        if not self._victims:
            self._victims = self._chance.sample([worker["worker"] for worker in workers], len(workers))
        victim = self._victims.pop()
        for worker in workers:
            if worker["worker"] == victim and worker["pid"] is not None:
                os.kill(worker["pid"], signal.SIGKILL)
                self.deaths["worker"] += 1

    def _restart(self) -> None:
        self._pool.kill()
        self._pool.wait()
        self._pool.start()
        self._pool.wait_ready()
        self.deaths["broker"] += 1


def drawn_seed() -> int:
    """Printed, and taken from MXPOOL_SEED to repeat a run."""
    seed = int(os.environ.get("MXPOOL_SEED") or random.randrange(1 << 32))
    sys.stdout.write(f"MXPOOL_SEED={seed}\n")
    return seed


def run(traffic: Traffic, chaos: Chaos, clients: int) -> Counter[str]:
    """All of it; what became of the requests. Every answer was right, and there was one for each request."""
    try:
        for rows in traffic.progress():
            chaos.at(rows)
    finally:
        traffic.end()
    total: Counter[str] = Counter()
    for tally in traffic.tallies:
        total.update({name: count for name, count in tally.items() if name != "client"})
    sys.stdout.write(f"deaths {dict(chaos.deaths)} requests {dict(total)}\n")
    assert len(traffic.tallies) == clients
    assert (total["mismatched"], total["answered_twice"], total["unanswered"]) == (0, 0, 0)
    assert total["rows_right"] >= traffic.rows
    assert total["sent"] == sum(count for name, count in total.items() if name not in ("sent", "rows_right"))
    return total


def test_no_row_is_mixed_up_lost_or_answered_twice_while_workers_and_the_broker_are_killed(tmp_path: Path) -> None:
    seed = drawn_seed()
    served = models(tmp_path)
    with Pool(served) as pool:
        traffic = Traffic(pool.endpoint, [*served], CLIENTS, ROWS, seed)
        chaos = Chaos(pool, random.Random(seed), ROWS, KILLS, RESTARTS)
        total = run(traffic, chaos, CLIENTS)
        check_broker(pool)
    # The run is worth something only if all of this happened, and nothing else.
    assert chaos.deaths["broker"] == RESTARTS
    assert chaos.deaths["worker"] >= (KILLS - RESTARTS) // 2  # a victim may be dead already
    for code in ("queue_full", "deadline_exceeded", "cancelled", "broker_lost"):
        assert total[code] > 0, code
    assert set(total) <= {*COUNTS, *CODES, "broker_lost"}


def test_many_clients_get_their_own_rows_while_workers_are_killed(tmp_path: Path) -> None:
    seed = drawn_seed()
    served = {"onnx": {**models(tmp_path)["onnx-plain"], "workers": {"cpu": 2}}}
    with Pool(served) as pool:
        traffic = Traffic(pool.endpoint, [*served], MANY_CLIENTS, MANY_ROWS, seed)
        chaos = Chaos(pool, random.Random(seed), MANY_ROWS, soak(6, 2), 0)
        total = run(traffic, chaos, MANY_CLIENTS)
        check_broker(pool)
    assert chaos.deaths["worker"] > 0
    assert set(total) <= {*COUNTS, *CODES}


def check_broker(pool: Pool) -> None:
    """Of the last broker: every request has one outcome, every slot is free, every row is accounted for."""
    for name in pool.tree["models"]:
        wait_until(partial(is_idle, pool, name), f"{name} is idle")
        found = pool.model(name)
        outcomes = ("ok", "rejected", "expired", "cancelled", "failed", "worker_died", "client_gone")
        assert found["received"] == sum(found[outcome] for outcome in outcomes), name
        assert found["stale_completions"] == 0


def is_idle(pool: Pool, name: str) -> bool:
    found = pool.model(name)
    return bool(found["queue_depth"] == 0 and found["free_slots"] == found["slots"])
