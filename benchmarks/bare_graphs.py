"""What a pool with device graphs is measured against: the same copies and replays, with nothing around them.

    bare_graphs MODEL [ROWS]          (needs a GPU, onnxruntime-gpu and cuda-bindings; imports nothing of mxpool)

One session, one stream, two captured graphs with buffers of their own, page-locked host memory, blocking events: a
batch is one copy in, the replay, one copy out and one event. Reads a line ``KIND SECONDS`` from stdin, answers with
a line of JSON, until the end of stdin. Kinds: ``alone`` (one batch after another: p50 in us), ``pair`` (the second is
queued while the first runs: samples a second and cores), ``plain`` (no graph, alone).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
from cuda.bindings import runtime as cuda  # type: ignore[import-not-found]

LANES = 2
PAGE_BYTES = 4096


def call(name: str, *arguments: Any) -> Any:
    """A call of the CUDA runtime that must succeed; its first result."""
    status, *results = getattr(cuda, name)(*arguments)
    assert status == 0, f"{name}: {status}"
    return results[0] if results else None


def run_options(graph_id: int, *, queue_only: bool) -> Any:
    """Options of one run."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    if queue_only:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class Bare:
    """The session, and its lanes."""

    def __init__(self, path: str, rows: int) -> None:
        self.rows = rows
        call("cudaSetDeviceFlags", cuda.cudaDeviceScheduleBlockingSync)
        call("cudaSetDevice", 0)
        call("cudaFree", 0)
        self.stream = call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        given = {"device_id": "0", "user_compute_stream": str(int(self.stream)), "enable_cuda_graph": "1"}
        providers = [("CUDAExecutionProvider", given)]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers, enable_fallback=0)
        self.lanes = [Lane(self, number) for number in range(LANES)]

    def alone_us(self, seconds: float, *, plain: bool) -> list[float]:
        """Microseconds of one batch after another."""
        lane, times = self.lanes[0], []
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            lane.start(plain=plain)
            lane.wait()
            times.append((time.perf_counter() - begin) * 1e6)
        return times

    def pair_rate(self, seconds: float) -> tuple[float, float]:
        """Samples a second and cores with two batches in flight."""
        begin, cpu, count = time.perf_counter(), time.process_time(), 0
        self.lanes[0].start()
        while (now := time.perf_counter()) < begin + seconds:
            self.lanes[(count + 1) % LANES].start()
            self.lanes[count % LANES].wait()
            count += 1
        self.lanes[count % LANES].wait()
        return (count + 1) * self.rows / (now - begin), (time.process_time() - cpu) / (now - begin)


class Block:
    """Tensors side by side, each on pages of its own, in page-locked and in device memory: one copy takes them all."""

    def __init__(self, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
        self.offsets: list[int] = []
        self.size = 0
        for _, shape in tensors:
            self.offsets.append(self.size)
            self.size += -(-4 * int(np.prod(shape)) // PAGE_BYTES) * PAGE_BYTES
        self.host, self.device = call("cudaHostAlloc", self.size, 0), call("cudaMalloc", self.size)


class Lane:
    """Buffers, a captured graph and an event."""

    def __init__(self, bare: Bare, number: int) -> None:
        self.bare = bare
        self.binding = bare.session.io_binding()
        self.event = call("cudaEventCreateWithFlags", cuda.cudaEventBlockingSync | cuda.cudaEventDisableTiming)
        rng = np.random.default_rng(number)
        inputs = [(node.name, (bare.rows, *node.shape[1:])) for node in bare.session.get_inputs()]
        outputs = [(node.name, (bare.rows, *node.shape[1:])) for node in bare.session.get_outputs()]
        self.given, self.made = Block(inputs), Block(outputs)
        values = rng.random(self.given.size // 4, dtype=np.float32)
        ctypes.memmove(self.given.host, values.ctypes.data, values.nbytes)
        for (name, shape), offset in zip(inputs, self.given.offsets, strict=True):
            self.binding.bind_input(name, "cuda", 0, np.float32, shape, self.given.device + offset)
        for (name, shape), offset in zip(outputs, self.made.offsets, strict=True):
            self.binding.bind_output(name, "cuda", 0, np.float32, shape, self.made.device + offset)
        self.replay = run_options(number + 1, queue_only=True)
        self.plain = run_options(-1, queue_only=True)
        bare.session.run_with_iobinding(self.binding, run_options(-1, queue_only=False))
        bare.session.run_with_iobinding(self.binding, run_options(number + 1, queue_only=False))

    def start(self, *, plain: bool = False) -> None:
        """Queue a batch."""
        stream, kind = self.bare.stream, cuda.cudaMemcpyKind
        given, made = self.given, self.made
        cuda.cudaMemcpyAsync(given.device, given.host, given.size, kind.cudaMemcpyHostToDevice, stream)
        self.bare.session.run_with_iobinding(self.binding, self.plain if plain else self.replay)
        cuda.cudaMemcpyAsync(made.host, made.device, made.size, kind.cudaMemcpyDeviceToHost, stream)
        cuda.cudaEventRecord(self.event, stream)

    def wait(self) -> None:
        """Wait for it."""
        call("cudaEventSynchronize", self.event)


def answers(bare: Bare, lines: Iterator[str]) -> Iterator[dict[str, float]]:
    """One answer a line."""
    for line in lines:
        kind, seconds = line.split()
        if kind == "pair":
            rate, cores = bare.pair_rate(float(seconds))
            yield {"samples_s": rate, "cores": cores}
        else:
            yield {"p50_us": float(np.median(bare.alone_us(float(seconds), plain=kind == "plain")))}


def main() -> None:
    """Answer until stdin ends."""
    bare = Bare(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 128)
    print(json.dumps({"ready": True}), flush=True)
    for answer in answers(bare, iter(sys.stdin.readline, "")):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
