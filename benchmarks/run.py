"""Runs the cases, interleaved and repeated, and prints them beside what they must reach (docs/design.md, numbers)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import cases
from broker import RunningBroker
from rich.console import Console
from tables import Target, show_figures, show_targets

ROOT = Path(__file__).resolve().parent.parent


class Bench:
    """Figures by name, each measured once in every repeat."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder = folder
        self.scale = 0.2 if quick else 1.0
        self.samples: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        """One more sample of ``name``."""
        self.samples.setdefault(name, []).append(value)

    def push(self, broker: RunningBroker, label: str, name: str, rows: int, in_flight: int, count: int) -> None:
        """A timed push, all its figures noted under ``label``."""
        items = cases.big_frames() if name == "frames" else cases.frames(rows)
        figures = cases.timed_push(broker, name, items, max(int(count * self.scale), 200), in_flight)
        for figure, value in figures.items():
            self.note(f"{label} {figure}", value)

    def overhead(self) -> None:
        """The pool's own cost: a model that does nothing."""
        models = cases.model("overhead", self.folder, max_queue_size=1024)
        self.note("echo requests_s", cases.echo_rate(int(100_000 * self.scale)))
        self.note("hop floor_ms", cases.hop_floor_ms(int(3000 * self.scale)))
        with RunningBroker(models) as broker:
            self.note("start ready_s", broker.ready_s)
            for in_flight, count in ((256, 100_000), (64, 60_000), (1, 4000), (1000, 100_000)):
                self.push(broker, f"overhead {in_flight} in flight", "overhead", 1, in_flight, count)
            for rows, count in ((5, 40_000), (16, 20_000), (64, 6000)):
                self.push(broker, f"overhead {rows} rows a request", "overhead", rows, 64, count)
            for figure, value in cases.single(broker, "overhead", int(3000 * self.scale)).items():
                self.note(f"overhead infer {figure}", value)

    def clients(self) -> None:
        """From 1 to 1,000 clients, each with one request in flight."""
        with RunningBroker(cases.model("overhead", self.folder, max_queue_size=1024)) as broker:
            for clients in (1, 10, 100, 1000):
                for figure, value in cases.many_clients(broker, "overhead", clients, 5 * self.scale).items():
                    self.note(f"{clients} clients {figure}", value)

    def ranking(self) -> None:
        """A ranking model, against its bare session."""
        path = f"{self.folder}/ranking.onnx"
        seconds = str(max(5 * self.scale, 1))
        self.note("ranking bare rows_s", cases.figure("session", path, "--seconds", seconds))
        with RunningBroker(cases.model("ranking", self.folder, max_queue_size=512)) as broker:
            self.push(broker, "ranking 384 in flight", "ranking", 1, 384, 60_000)
            self.note("ranking bare again rows_s", cases.figure("session", path, "--seconds", seconds))
            self.note("ranking woken_ms", cases.figure("woken", path, "--rows", "1", "--seconds", seconds))
            self.note("ranking hop floor_ms", cases.hop_floor_ms(int(3000 * self.scale)))
            for figure, value in cases.single(broker, "ranking", int(2000 * self.scale)).items():
                self.note(f"ranking infer {figure}", value)

    def large(self) -> None:
        """600 KB frames, by arena and by ipc, against a pipeline that only copies."""
        count = int(8000 * self.scale)
        self.note("copy pipeline frames_s", cases.figure("copy", str(4 * cases.FRAME_FLOATS), "--frames", str(count)))
        keys = {"max_batch_size": 8}
        with RunningBroker(cases.model("frames", self.folder, **keys)) as broker:
            self.push(broker, "600 KB arena", "frames", 1, 8, count)
        with RunningBroker(cases.model("frames", self.folder, **keys), arenas="false") as broker:
            self.push(broker, "600 KB ipc", "frames", 1, 8, count // 2)

    def idle(self) -> None:
        """What a silent pool costs."""
        with RunningBroker(cases.model("overhead", self.folder)) as broker:
            for clients in (0, 1000):
                for figure, value in cases.idle(broker, clients, 30 * self.scale).items():
                    self.note(f"idle {clients} clients {figure}", value)


def ratio(samples: dict[str, list[float]], above: str, *below: str) -> float | None:
    """Median of the ratios of each repeat; the figures ``below`` are summed."""
    if above not in samples or any(name not in samples for name in below):
        return None
    sums = [sum(parts) for parts in zip(*(samples[name] for name in below), strict=True)]
    return float(median(a / b for a, b in zip(samples[above], sums, strict=True)))


def targets(samples: dict[str, list[float]]) -> list[Target]:
    """What was promised: the words, the figure, the comparison, the bound."""

    def mid(*names: str) -> float | None:
        return median(map(sum, zip(*(samples[n] for n in names), strict=True))) if names[0] in samples else None

    busy, arena = "overhead 256 in flight", "600 KB arena requests_s"
    bare = "ranking bare rows_s", "ranking bare again rows_s"
    of_bare = ratio(samples, "ranking 384 in flight rows_s", *bare)
    woken = "ranking woken_ms", "ranking hop floor_ms"
    return [
        ("overhead, 256 in flight, requests/s", mid(f"{busy} requests_s"), ">=", 50_000),
        ("… of the raw echo", ratio(samples, f"{busy} requests_s", "echo requests_s"), ">=", 0.45),
        ("… broker + worker us a request", mid(f"{busy} broker_us", f"{busy} worker_us"), "<=", 20),
        ("overhead, 64 in flight, p50 ms", mid("overhead 64 in flight p50_ms"), "<=", 2),
        ("overhead, 1 in flight, p50 of the floor", ratio(samples, "overhead infer p50_ms", "hop floor_ms"), "<=", 2),
        ("ranking, 384 in flight, of the bare session", None if of_bare is None else 2 * of_bare, ">=", 0.95),
        ("ranking, 1 in flight, p50 of bare + floor", ratio(samples, "ranking infer p50_ms", *woken), "<=", 1.3),
        ("600 KB by arena, of the copy pipeline", ratio(samples, arena, "copy pipeline frames_s"), ">=", 0.8),
        ("600 KB by arena, of ipc", ratio(samples, arena, "600 KB ipc requests_s"), ">=", 1.5),
        ("idle, % of a core", mid("idle 0 clients cpu_percent"), "<=", 0.5),
        ("idle with 1,000 clients, % of a core", mid("idle 1000 clients cpu_percent"), "<=", 0.5),
        ("… RSS grown, MB", mid("idle 1000 clients rss_grown_mb"), "<=", 50),
        ("start to ready, s", mid("start ready_s"), "<=", 2.5),
    ]


def main() -> None:
    """Run the chosen cases."""
    every = ["overhead", "clients", "ranking", "large", "idle"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", choices=[[], *every], help=f"default: {' '.join(every)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a fifth of every count and time")
    parser.add_argument("--json", metavar="FILE", help="write the samples there too")
    asked = parser.parse_args()
    chosen = asked.case or every
    with tempfile.TemporaryDirectory(prefix="mxbench-") as folder:
        made = [str(ROOT / "scripts/make_models"), folder, "overhead", "ranking", "frames"]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        bench = Bench(Path(folder), asked.quick)
        for repeat in range(asked.repeats):
            for name in chosen:
                case: Callable[[], None] = getattr(bench, name)
                begin = time.monotonic()
                case()
                took_s = time.monotonic() - begin
                print(f"repeat {repeat + 1}/{asked.repeats} {name} {took_s:.0f} s", file=sys.stderr)
    console = Console(width=120)
    console.print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    show_figures(bench.samples, console)
    show_targets(targets(bench.samples), console)
    if asked.json:
        Path(asked.json).write_text(json.dumps(bench.samples))


if __name__ == "__main__":
    main()
