"""Device graphs: the pool against bare replays in one run, beside what it must reach (docs/design.md, numbers).

    graphs [--model FILE] [--repeats N] [--seconds S] [--quick] [--json FILE]

Needs a CUDA device. The model is ``ranking`` of scripts/make_models unless FILE names another one with float inputs.
Every repeat measures the bare loops and then the pool; a ratio is of one repeat, and the median of them counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import TracebackType

import psutil
from broker import RunningBroker
from rich.console import Console
from tables import Target, show_figures, show_targets

import mxpool
from mxpool.cli.sweep.clients import Clients, Load
from mxpool.histogram import between, percentile

ROOT = Path(__file__).resolve().parent.parent
BARE = str(Path(__file__).with_name("bare_graphs.py"))
ROWS = 128
LOADED = 0.8  # of what the same clients reach when they keep the pool saturated
POISSON = ((64, 4), (32, 4), (16, 8))  # rows of a request, clients
SETTLE_S = 0.7  # from the start of a load to the first look
Samples = dict[str, list[float]]


class BareLoop:
    """The reference process; a context manager."""

    def __init__(self, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, BARE, model, str(ROWS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> BareLoop:
        self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def measure(self, kind: str, seconds: float) -> dict[str, float]:
        """See ``bare_graphs``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {seconds}\n")
        self._process.stdin.flush()
        return self._answer()


def config(model: str, graph: str) -> str:
    """The tables of a broker with one worker on one device."""
    return (
        '[devices.gpu0]\nkind = "cuda"\n'
        f'[models.ranking]\npath = "{model}"\nmax_batch_size = {ROWS}\ngraph = "{graph}"\nmax_queue_size = 1024\n'
        "workers = { gpu0 = 1 }\n"
    )


@contextlib.contextmanager
def load(broker: RunningBroker, rows: int, clients: int, run: Callable[[Clients], Load]) -> Iterator[None]:
    """Client processes that send requests of ``rows`` rows as ``run`` says, while the context lasts."""
    setup = {"endpoint": broker.endpoint, "model": "ranking", "rows": rows, "npz": None, "timeout_s": 30}
    with tempfile.TemporaryFile() as log, Clients(clients, os.environ) as started:
        started.start(setup, log)
        found: list[Load] = []
        thread = threading.Thread(target=lambda: found.append(run(started)))
        thread.start()
        yield
        thread.join()
    for told in found:
        if told.errors or told.late * 20 > told.sent:
            print(f"errors {dict(told.errors)}, {told.late} of {told.sent} sent late", file=sys.stderr)


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """CPU seconds so far, of whole processes and of the broker's loop alone (its other thread is ZeroMQ's)."""
    used = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
    loop = next(thread for thread in psutil.Process(pids["broker"]).threads() if thread.id == pids["broker"])
    return {**used, "loop": loop.user_time + loop.system_time}


def window(broker: RunningBroker, seconds: float) -> dict[str, float]:
    """What the broker counted, and its processes used, within ``seconds`` from now."""
    with mxpool.Client(broker.endpoint) as client:
        before = client.status()
        worker = before["models"]["ranking"]["workers"][0]["pid"]
        pids = {"broker": int(before["broker"]["pid"]), "worker": int(worker)}
        cpu, begin = cpu_s(pids), time.perf_counter()
        time.sleep(seconds)
        after, took, used = client.status(), time.perf_counter() - begin, cpu_s(pids)
    one, two = before["models"]["ranking"], after["models"]["ranking"]
    spans = {key: between(one[key]["buckets"], two[key]["buckets"]) for key in ("run_us", "oldest_queue_us")}
    batches = two["batches"] - one["batches"]
    return {
        "samples_s": (two["batch_rows"] - one["batch_rows"]) / took,
        "rows_a_batch": (two["batch_rows"] - one["batch_rows"]) / max(batches, 1),
        "run_us_p50": float(percentile(spans["run_us"], 50) or 0),
        "run_us_p99": float(percentile(spans["run_us"], 99) or 0),
        "queue_us_p99": float(percentile(spans["oldest_queue_us"], 99) or 0),
        "worker_cores": (used["worker"] - cpu["worker"]) / took,
        "broker_cores": (used["broker"] - cpu["broker"]) / took,
        "loop_cores": (used["loop"] - cpu["loop"]) / took,
        "hits": float(two["graph"]["hit"] - one["graph"]["hit"]),
        "batches": float(batches),
    }


class Bench:
    """Figures by name, one sample a repeat."""

    def __init__(self, seconds: float, quick: bool) -> None:
        self.seconds = seconds
        self.settle_s = 0.2 if quick else SETTLE_S
        self.poisson_loads = POISSON[-1:] if quick else POISSON
        self.samples: Samples = {}

    def note(self, label: str, figures: dict[str, float]) -> None:
        """One more sample of each figure."""
        for name, value in figures.items():
            self.samples.setdefault(f"{label} {name}", []).append(value)

    def pool(self, label: str, broker: RunningBroker, rows: int, in_flight: int, clients: int = 1) -> None:
        """A closed loop, and a window in the middle of it."""
        seconds = self.seconds + 2 * self.settle_s
        self._watched(label, broker, rows, clients, lambda started: started.closed(in_flight, seconds, 30))

    def poisson(self, label: str, broker: RunningBroker, rows: int, samples_s: float, clients: int) -> None:
        """Requests at random times, ``samples_s`` rows a second on average."""
        rate, seconds = samples_s / rows, self.seconds + 2 * self.settle_s
        self._watched(label, broker, rows, clients, lambda started: started.open(rate, seconds, 30))

    def _watched(
        self, label: str, broker: RunningBroker, rows: int, clients: int, run: Callable[[Clients], Load]
    ) -> None:
        with load(broker, rows, clients, run):
            time.sleep(self.settle_s)
            self.note(label, window(broker, self.seconds))

    def repeat(self, bare: BareLoop, brokers: dict[str, RunningBroker]) -> None:
        """Everything once."""
        for kind in ("alone", "plain", "pair"):
            self.note(f"bare {kind}", bare.measure(kind, self.seconds))
        self.pool("pool alone, graph on", brokers["on"], ROWS, 1)
        self.pool("pool alone, graph off", brokers["off"], ROWS, 1)
        self.pool("pool, 64 rows over ipc", brokers["ipc"], 64, 12, clients=2)
        self.pool("pool, 16 rows by arenas", brokers["on"], 16, 48, clients=2)
        self.pool("pool, graph off, 16 rows", brokers["off"], 16, 48, clients=2)
        for rows, clients in self.poisson_loads:
            self.pool(f"{clients} clients, {rows} rows", brokers["on"], rows, 1024 // rows, clients)
            saturated = self.samples[f"{clients} clients, {rows} rows samples_s"][-1]
            self.poisson(f"Poisson, {rows} rows", brokers["on"], rows, LOADED * saturated, clients)


def ratio(samples: Samples, above: str, below: str) -> float:
    """Median of the ratios of each repeat."""
    return float(median(one / two for one, two in zip(samples[above], samples[below], strict=True)))


def poisson_lines(samples: Samples, rows: int, clients: int) -> list[Target]:
    """How a load at random times went, for requests of ``rows`` rows."""
    label, full = f"Poisson, {rows} rows", f"{clients} clients, {rows} rows"
    waits = ratio(samples, f"{label} queue_us_p99", f"{label} run_us_p50")
    return [
        (f"{full}, saturated, samples/s", median(samples[f"{full} samples_s"]), "", None),
        (f"{label}: load, of that", ratio(samples, f"{label} samples_s", f"{full} samples_s"), "", None),
        (f"{label}: oldest_queue_us p99 of run_us p50", waits, "<=", 3.0),
    ]


def targets(samples: Samples) -> list[Target]:
    """What was promised: the words, the figure, the comparison, the bound (None: only told)."""

    def mid(name: str) -> float:
        return median(samples[name])

    on, off, bare = "pool alone, graph on run_us_p50", "pool alone, graph off run_us_p50", "bare alone p50_us"
    ipc, arenas, pair = "pool, 64 rows over ipc", "pool, 16 rows by arenas", "bare pair samples_s"
    return [
        ("one batch alone, run_us p50 of bare replay + copies", ratio(samples, on, bare), "<=", 1.15),
        ("… graph on, us", mid(on), "", None),
        ("… graph off, us", mid(off), "", None),
        ("… off / on", ratio(samples, off, on), "", None),
        ("64 rows over ipc, of the bare loop", ratio(samples, f"{ipc} samples_s", pair), ">=", 0.9),
        ("… worker, cores", mid(f"{ipc} worker_cores"), "<=", 0.4),
        ("… broker, cores", mid(f"{ipc} broker_cores"), "", None),
        ("16 rows by arenas, of the bare loop", ratio(samples, f"{arenas} samples_s", pair), ">=", 0.9),
        ("… worker, cores", mid(f"{arenas} worker_cores"), "<=", 0.4),
        ("… broker, cores", mid(f"{arenas} broker_cores"), "", None),
        ("… graph off, samples/s", mid("pool, graph off, 16 rows samples_s"), "", None),
        *(
            line
            for rows, clients in POISSON
            if f"Poisson, {rows} rows samples_s" in samples
            for line in poisson_lines(samples, rows, clients)
        ),
    ]


def main() -> None:
    """Run, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window")
    parser.add_argument("--quick", action="store_true", help="fewer loads, less time between them: it runs, no more")
    parser.add_argument("--json", metavar="FILE", help="write the samples there too")
    asked = parser.parse_args()
    bench = Bench(asked.seconds, asked.quick)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mxbench-"))
        model = asked.model or made(folder)
        brokers = {
            "on": stack.enter_context(RunningBroker(config(model, "require"))),
            "off": stack.enter_context(RunningBroker(config(model, "off"))),
            "ipc": stack.enter_context(RunningBroker(config(model, "require"), arenas="false")),
        }
        bare = stack.enter_context(BareLoop(model))
        for number in range(asked.repeats):
            begin = time.monotonic()
            bench.repeat(bare, brokers)
            print(f"repeat {number + 1}/{asked.repeats} {time.monotonic() - begin:.0f} s", file=sys.stderr)
    console = Console(width=120)
    console.print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores")
    show_figures(bench.samples, console)
    show_targets(targets(bench.samples), console)
    if asked.json:
        Path(asked.json).write_text(json.dumps(bench.samples))


def made(folder: str) -> str:
    """The ranking model."""
    subprocess.run([str(ROOT / "scripts/make_models"), folder, "ranking"], check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/ranking.onnx"


if __name__ == "__main__":
    main()
