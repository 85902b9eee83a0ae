"""The cases: each measures one thing once and returns plain figures. ``run`` repeats and interleaves them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from broker import RunningBroker, own_cpu_s

import mxpool
from mxpool import wire

REFERENCES = str(Path(__file__).with_name("references.py"))
SHAPES = {"numerical": 48, "categorical": 39, "keyword_vec": 768}
FRAME_FLOATS = 150_000  # 600 KB

Figures = dict[str, float]


def model(name: str, folder: Path, **keys: Any) -> str:
    """A TOML table for one of the made models."""
    lines = "".join(f"{key} = {value!r}\n" for key, value in keys.items())
    return f'[models.{name}]\npath = "{folder}/{name}.onnx"\n{lines}'


def frames(rows: int, count: int = 64) -> list[dict[str, Any]]:
    """Different frames of ranking's inputs."""
    rng = np.random.default_rng(0)
    return [{name: rng.random((rows, width), dtype=np.float32) for name, width in SHAPES.items()} for _ in range(count)]


def cycle(items: list[Any], count: int) -> Iterator[Any]:
    """``count`` items, over and over again."""
    return islice((items[i % len(items)] for i in range(count)), count)


def timed_push(broker: RunningBroker, name: str, items: list[Any], count: int, in_flight: int) -> Figures:
    """One ``Client.push`` of ``count`` requests: rates, p50 of the time in flight, CPU per request by process."""
    sent: deque[float] = deque()

    def noted() -> Iterator[Any]:
        for item in cycle(items, count):
            sent.append(time.perf_counter())
            yield item

    latencies = []
    with mxpool.Client(broker.endpoint) as client:
        for _ in client.push(name, cycle(items, min(count, 2 * in_flight + 50)), in_flight=in_flight):
            pass
        before, own, begin = broker.cpu_s(), own_cpu_s(), time.perf_counter()
        for _ in client.push(name, noted(), in_flight=in_flight):
            latencies.append(time.perf_counter() - sent.popleft())
        elapsed, own_after, after = time.perf_counter() - begin, own_cpu_s(), broker.cpu_s()
    rows = len(next(iter(items[0].values())))
    return {
        "requests_s": count / elapsed,
        "rows_s": count * rows / elapsed,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "client_us": (own_after - own) / count * 1e6,
        "broker_us": (after["broker"] - before["broker"]) / count * 1e6,
        "worker_us": (after["worker"] - before["worker"]) / count * 1e6,
    }


@contextmanager
def reference(what: str) -> Iterator[str]:
    """A reference process that serves an endpoint."""
    with tempfile.TemporaryDirectory(prefix="mxbench-") as folder:
        endpoint = f"ipc://{folder}/r.sock"
        process = subprocess.Popen(
            [sys.executable, REFERENCES, what, endpoint], stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield endpoint
        finally:
            children = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGKILL)
            for child in children:
                child.kill()
            process.wait()
            process.stdout.close()


def figure(*arguments: str) -> float:
    """The one number that a reference prints."""
    return float(subprocess.run([sys.executable, REFERENCES, *arguments], check=True, capture_output=True).stdout)


def echo_rate(count: int = 100_000, in_flight: int = 256) -> float:
    """Requests a second of the raw ROUTER echo, with the same header and body as a request of one row."""
    tensors = wire.encode_tensors([(name, "FP32", (1, width)) for name, width in SHAPES.items()])
    header = wire.encode_request(wire.INFER, 123_456, "overhead", 123_456_789_012, 1, tensors)
    body = bytes(4 * sum(SHAPES.values()))
    more = int(zmq.SNDMORE)
    with reference("echo") as endpoint, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.connect(endpoint)
        send, recv = dealer.send, dealer.recv
        sent = received = 0
        begin = time.perf_counter()
        while received < count:
            while sent < count and sent - received < in_flight:
                send(header, more)
                send(body)
                sent += 1
            recv()
            recv()
            received += 1
        return count / (time.perf_counter() - begin)


def hop_floor_ms(count: int = 3000) -> float:
    """p50 of a request's path without its work, one at a time."""
    tensors = wire.encode_tensors([(name, "FP32", (1, width)) for name, width in SHAPES.items()])
    header = wire.encode_request(wire.INFER, 123_456, "overhead", 123_456_789_012, 1, tensors)
    body = bytes(4 * sum(SHAPES.values()))
    times = []
    with reference("hop") as endpoint, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        for _ in range(count):
            begin = time.perf_counter()
            dealer.send_multipart([header, body])
            dealer.recv_multipart()
            times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e3


def single(broker: RunningBroker, name: str, count: int = 3000) -> Figures:
    """p50 and p99 of ``Client.infer``, one at a time."""
    items, times = frames(1), []
    with mxpool.Client(broker.endpoint) as client:
        for item in cycle(items, count):
            begin = time.perf_counter()
            client.infer(name, item)
            times.append(time.perf_counter() - begin)
    return {"p50_ms": float(np.median(times)) * 1e3, "p99_ms": float(np.percentile(times, 99)) * 1e3}


def big_frames() -> list[dict[str, Any]]:
    """600 KB frames over a working set of 64 MB."""
    rng = np.random.default_rng(0)
    return [{"frame": rng.random((1, FRAME_FLOATS), dtype=np.float32)} for _ in range((64 << 20) // (4 * FRAME_FLOATS))]


def many_clients(broker: RunningBroker, name: str, clients: int, seconds: float) -> Figures:
    """Closed loop of ``clients`` clients with one request each: raw sockets in one thread, whose cost is not ours."""
    tensors = wire.encode_tensors([(tensor, "FP32", (1, width)) for tensor, width in SHAPES.items()])
    body = bytes(4 * sum(SHAPES.values()))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, clients + 10)
    poller, answered, before = zmq.Poller(), 0, broker.cpu_s()
    sockets = []
    for _ in range(clients):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(broker.endpoint)
        sockets.append(socket)
        poller.register(socket, zmq.POLLIN)

    def ask(socket: zmq.Socket[bytes], number: int) -> None:
        socket.send_multipart([wire.encode_request(wire.INFER, number, name, 0, 1, tensors), body])

    for socket in sockets:
        ask(socket, 1)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for socket, _ in poller.poll(1000):
            socket.recv_multipart()
            answered += 1
            ask(socket, answered + 1)
    elapsed, after = time.perf_counter() - begin, broker.cpu_s()
    context.destroy(linger=0)
    return {
        "requests_s": answered / elapsed,
        "broker_us": (after["broker"] - before["broker"]) / answered * 1e6,
        "worker_us": (after["worker"] - before["worker"]) / answered * 1e6,
    }


def idle(broker: RunningBroker, clients: int, seconds: float) -> Figures:
    """CPU of broker and workers in percent of a core while ``clients`` clients are connected and silent."""
    rss = broker.rss_bytes()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 3 * clients + 10)
    held = [mxpool.Client(broker.endpoint) for _ in range(clients)]
    for client in held:
        client.control("live", "")
    threading.Event().wait(1.0)
    before = sum(broker.cpu_s().values())
    threading.Event().wait(seconds)
    used = sum(broker.cpu_s().values()) - before
    grown = broker.rss_bytes() - rss
    for client in held:
        client.close()
    context.destroy(linger=0)
    return {"cpu_percent": used / seconds * 100, "rss_grown_mb": grown / 2**20}
