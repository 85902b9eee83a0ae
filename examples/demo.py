"""Serves two real models from PyPI wheels, pushes frames from several clients, and shows the answers and rates.

``scripts/demo`` runs it in a virtual environment of its own. Every answer is compared with a plain session's.
"""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

import mxpool

CLIENTS = 3
CLOSE = 1e-5  # a batch of another size adds in another order
CONFIG = """
[broker]
endpoint = "{endpoint}"

[models.orientation]                # is a line of text upside down? (rapidocr, Apache-2.0)
path = "{orientation}"
dims = {{ x = [3, 48, 192] }}
max_batch_size = 16

[models.table]                      # a gradient-boosted regressor on four columns (surfaces-onnx-files, MIT)
path = "{table}"
max_batch_size = 128
"""


def in_wheel(distribution: str, name: str) -> Path:
    """The file called ``name`` of an installed distribution, found without importing it."""
    for file in importlib.metadata.distribution(distribution).files or ():
        if file.name == name:
            return Path(str(file.locate()))
    raise SystemExit(f"{distribution} has no file {name}")


def text_lines(count: int) -> list[dict[str, Any]]:
    """Pictures of text-like lines, half of them turned by 180 degrees: float32 [1, 3, 48, 192] in -1..1."""
    rng = np.random.default_rng(0)
    frames = []
    for number in range(count):
        picture = np.ones((48, 192), np.float32)
        for left in range(8, 180, 12):
            height = int(rng.integers(8, 28))
            picture[36 - height : 36, left : left + 3] = -1  # stems of different height on one baseline
            picture[34:36, left : left + 8] = -1
        if number % 2:
            picture = picture[::-1, ::-1]
        frames.append({"x": np.ascontiguousarray(np.broadcast_to(picture, (1, 3, 48, 192)))})
    return frames


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of four columns: float32 [1, 4]."""
    values = np.random.default_rng(1).random((count, 1, 4), dtype=np.float32)
    return [{"input": row} for row in values]


def push(endpoint: str, model: str, frames: list[dict[str, Any]], done: list[tuple[float, list[Any]]]) -> None:
    """One client: its own connection, its own thread."""
    with mxpool.Client(endpoint) as client:
        begin = time.perf_counter()
        answers = list(client.push(model, frames, in_flight=64))
        done.append((time.perf_counter() - begin, answers))


def compare(path: Path, frames: list[dict[str, Any]], answers: list[dict[str, Any]]) -> float:
    """The largest difference of ``answers`` to those of a session of our own, each frame alone."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    expected = (dict(zip(names, session.run(names, frame), strict=True)) for frame in frames)
    pairs = zip(expected, answers, strict=True)
    return max(float(np.abs(mine[name] - answer[name]).max()) for mine, answer in pairs for name in names)


def run(endpoint: str, paths: dict[str, Path], console: Console) -> bool:
    """Push to one model after the other from several clients at once, then show what came back; True if it is right."""
    shown = Table("model", "clients", "requests", "requests/s", "answers", "largest difference to a session alone")
    right = True
    for model, frames in (("orientation", text_lines(200)), ("table", rows(20_000))):
        done: list[tuple[float, list[Any]]] = []
        clients = [threading.Thread(target=push, args=(endpoint, model, frames, done)) for _ in range(CLIENTS)]
        begin = time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        elapsed = time.perf_counter() - begin
        count = CLIENTS * len(frames)
        answered = sum(len(answers) for _, answers in done)
        worst = max(compare(paths[model], frames, answers) for _, answers in done[:1])
        right = right and answered == count and worst <= CLOSE and all(same(done[0][1], answers) for _, answers in done)
        shown.add_row(model, str(CLIENTS), f"{count:,}", f"{count / elapsed:,.0f}", f"{answered:,}", f"{worst:.1e}")
    console.print(shown)
    console.print(f"every answer is that of its own request: {'yes' if right else 'NO'}")
    return right


def same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """True if two clients that sent the same frames got the same answers, but for rounding."""
    pairs = zip(some, others, strict=True)
    return all(np.allclose(one[name], other[name], atol=CLOSE) for one, other in pairs for name in one)


def report(endpoint: str, console: Console) -> None:
    """How the requests were merged."""
    with mxpool.Client(endpoint) as client:
        models = client.status()["models"]
    merged = Table("model", "answered", "batches", "rows a batch", "run p50 us", "last batch", title="how they ran")
    for name, found in models.items():
        batches = max(found["batches"], 1)
        last = found["last_batch"]
        words = f"{last['batch_samples']} rows padded to {last['padded_batch']}, closed: {last['close']}"
        size = f"{found['batch_rows'] / batches:.1f}"
        merged.add_row(name, f"{found['ok']:,}", f"{batches:,}", size, str(found["run_us"]["p50"]), words)
    console.print(merged)


def main() -> int:
    """Start a broker, run, and end it."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="mxdemo-") as folder:
        endpoint = f"ipc://{folder}/broker.sock"
        orientation = in_wheel("rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx")
        table = in_wheel("surfaces-onnx-files", "gradient_boosting_regressor.onnx")
        config = Path(folder, "demo.toml")
        config.write_text(CONFIG.format(endpoint=endpoint, orientation=orientation, table=table))
        console.print(f"mx-broker {config.name}: models orientation and table, one worker each, on the CPU")
        begin = time.monotonic()
        mx_broker = Path(sys.executable).with_name("mx-broker")
        broker = subprocess.Popen([str(mx_broker), str(config), "--log-level", "warning"])
        try:
            command = [str(mx_broker.with_name("mxpool")), "-e", endpoint, "status", "--wait-ready", "30"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            console.print(f"ready after {time.monotonic() - begin:.1f} s")
            right = run(endpoint, {"orientation": orientation, "table": table}, console)
            report(endpoint, console)
        finally:
            broker.send_signal(signal.SIGTERM)
            code = broker.wait(30)
    left = [path.name for path in Path("/dev/shm").glob("*mxpool*")]
    console.print(f"broker stopped with exit code {code}; left in /dev/shm: {left or 'nothing'}")
    return code or bool(left) or not right


if __name__ == "__main__":
    sys.exit(main())
