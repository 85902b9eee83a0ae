"""What a pool with device graphs is measured against: the same copies and replays, with nothing around them.

    bare_graphs MODEL [ROWS]          (needs a GPU, onnxruntime-gpu and cuda-bindings; imports nothing of mxpool)

One session, one stream, two captured graphs with buffers of their own, page-locked host memory, blocking events: a
batch is the copies in, the replay, the copies out and one event. Reads a line ``KIND SECONDS`` from stdin, answers with
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


class Lane:
    """Buffers, a captured graph and an event."""

    def __init__(self, bare: Bare, number: int) -> None:
        self.bare = bare
        self.binding = bare.session.io_binding()
        self.event = call("cudaEventCreateWithFlags", cuda.cudaEventBlockingSync | cuda.cudaEventDisableTiming)
        rng = np.random.default_rng(number)
        self.inputs: list[tuple[int, int, int]] = []
        self.outputs: list[tuple[int, int, int]] = []
        for node in bare.session.get_inputs():
            values = rng.random((bare.rows, *node.shape[1:]), dtype=np.float32)
            host, device = call("cudaHostAlloc", values.nbytes, 0), call("cudaMalloc", values.nbytes)
            ctypes.memmove(host, values.ctypes.data, values.nbytes)
            self.binding.bind_input(node.name, "cuda", 0, np.float32, values.shape, device)
            self.inputs.append((device, host, values.nbytes))
        for node in bare.session.get_outputs():
            shape = (bare.rows, *node.shape[1:])
            count = 4 * int(np.prod(shape))
            host, device = call("cudaHostAlloc", count, 0), call("cudaMalloc", count)
            self.binding.bind_output(node.name, "cuda", 0, np.float32, shape, device)
            self.outputs.append((host, device, count))
        self.replay = run_options(number + 1, queue_only=True)
        self.plain = run_options(-1, queue_only=True)
        bare.session.run_with_iobinding(self.binding, run_options(-1, queue_only=False))
        bare.session.run_with_iobinding(self.binding, run_options(number + 1, queue_only=False))

    def start(self, *, plain: bool = False) -> None:
        """Queue a batch."""
        stream, kind = self.bare.stream, cuda.cudaMemcpyKind
        for device, host, count in self.inputs:
            cuda.cudaMemcpyAsync(device, host, count, kind.cudaMemcpyHostToDevice, stream)
        self.bare.session.run_with_iobinding(self.binding, self.plain if plain else self.replay)
        for host, device, count in self.outputs:
            cuda.cudaMemcpyAsync(host, device, count, kind.cudaMemcpyDeviceToHost, stream)
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
