"""From which size on the arena pays: frames a second by push, each size as ZeroMQ messages and through the arena.

python benchmarks/arena_threshold.py [--repeats N]: prints the table of docs/bench/arena.md. What the client does at
each size by itself (``ARENA_MIN_BYTES``) is overruled.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import cases
import numpy as np
from broker import RunningBroker
from onnx import TensorProto, helper, numpy_helper

from mxpool.client import exchange

SIZES_KB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
THRESHOLDS = {"ZeroMQ": sys.maxsize, "arena": 0}
IN_FLIGHT = 32
FRAMES_MAX, FRAMES_BYTES = 15_000, 1 << 30  # of one measurement: about a second
WORKING_SET_BYTES = 64 << 20  # beyond the caches, as a camera's frames are


def write_model(path: Path, floats: int) -> None:
    """``floats`` in a row, the first 16 of them out: next to no work."""
    constants = [
        numpy_helper.from_array(np.array([value], np.int64), name)
        for name, value in (("start", 0), ("end", 16), ("axis", 1))
    ]
    graph = helper.make_graph(
        [helper.make_node("Slice", ["frame", "start", "end", "axis"], ["head"])],
        "frames",
        [helper.make_tensor_value_info("frame", TensorProto.FLOAT, ["N", floats])],
        [helper.make_tensor_value_info("head", TensorProto.FLOAT, ["N", 16])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def rates(size_bytes: int, repeats: int) -> dict[str, float]:
    """Median frames a second of each way; the ways take turns."""
    floats = size_bytes // 4
    kept = min(WORKING_SET_BYTES // size_bytes, 2048)
    items = [{"frame": np.full((1, floats), value, np.float32)} for value in range(kept)]
    count = min(FRAMES_MAX, FRAMES_BYTES // size_bytes)
    samples: dict[str, list[float]] = {way: [] for way in THRESHOLDS}
    with tempfile.TemporaryDirectory(prefix="mxbench-") as folder:
        write_model(Path(folder) / "frames.onnx", floats)
        with RunningBroker(cases.model("frames", Path(folder), max_batch_size=8)) as broker:
            for _ in range(repeats):
                for way, threshold in THRESHOLDS.items():
                    vars(exchange)["ARENA_MIN_BYTES"] = threshold
                    figures = cases.timed_push(broker, "frames", items, count, IN_FLIGHT)
                    samples[way].append(figures["requests_s"])
    return {way: median(values) for way, values in samples.items()}


def main() -> None:
    """Measure every size and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    versions = f"onnxruntime {version('onnxruntime')}, Python {platform.python_version()}"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, {versions}\n")
    print("| frame | ZeroMQ, frames/s | arena, frames/s | arena / ZeroMQ |")
    print("|---|---|---|---|")
    for size_kb in SIZES_KB:
        figures = rates(size_kb * 1024, repeats)
        ratio = figures["arena"] / figures["ZeroMQ"]
        print(f"| {size_kb} KB | {figures['ZeroMQ']:,.0f} | {figures['arena']:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
