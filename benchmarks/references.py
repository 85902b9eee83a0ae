"""What mxpool is measured against: the least that each job needs, without the job. Each runs as a process of its own.

``echo``       a ROUTER that sends every message back: what ZeroMQ from Python can do
``hop``        the path of a request without its work: ROUTER in a poller → SEQPACKET → a second process, and back
``copy``       two processes that copy frames into shared memory and out of it again, told by SEQPACKET
``session``    ONNX Runtime alone, one thread, one batch after another (``--rows``), or woken from idle
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import socket
import time

import numpy as np
import zmq


def echo(endpoint: str) -> None:
    """Send back what comes, frame by frame, until killed."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.sndhwm = router.rcvhwm = 0
    router.bind(endpoint)
    recv, send, more = router.recv, router.send, int(zmq.SNDMORE)
    print("ready", flush=True)
    while True:
        identity, header, body = recv(), recv(), recv()
        send(identity, more)
        send(header, more)
        send(body)


def hop(endpoint: str) -> None:
    """A broker that does nothing: each message goes to a second process as a record of 37 bytes, and back as one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        while record := theirs.recv(64):
            theirs.send(record)
        os._exit(0)
    theirs.close()
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(ours, zmq.POLLIN)
    print("ready", flush=True)
    waiting: list[tuple[bytes, bytes]] = []
    while True:
        for found, _ in poller.poll():
            if found is router:
                identity, header, _body = router.recv_multipart()
                waiting.append((identity, header))
                ours.send(b"x" * 37)
            else:
                ours.recv(64)
                identity, header = waiting.pop(0)
                router.send_multipart([identity, header, b"y" * 12])


def copy(frame_bytes: int, frames: int, slots: int = 8, working_set_bytes: int = 64 << 20) -> None:
    """Print frames a second of a pipeline that copies in on one side and out on the other, ``slots`` in flight.

    Sources cover ``working_set_bytes``, so that they come from memory, not from a cache, as a client's frames do; the
    far side answers each with 1 byte.
    """
    shared = mmap.mmap(-1, frame_bytes * slots)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        view, target = memoryview(shared), memoryview(bytearray(frame_bytes * slots))
        while record := theirs.recv(1):
            start = record[0] * frame_bytes
            target[start : start + frame_bytes] = view[start : start + frame_bytes]
            theirs.send(record)
        os._exit(0)
    theirs.close()
    sources = [memoryview(np.random.default_rng(i).bytes(frame_bytes)) for i in range(working_set_bytes // frame_bytes)]
    view, free, done, sent = memoryview(shared), list(range(slots)), 0, 0
    begin = time.perf_counter()
    while done < frames:
        while free and sent < frames:
            slot = free.pop()
            view[slot * frame_bytes : (slot + 1) * frame_bytes] = sources[sent % len(sources)]
            ours.send(bytes((slot,)))
            sent += 1
        free.append(ours.recv(1)[0])
        done += 1
    print(frames / (time.perf_counter() - begin), flush=True)


def session(path: str, rows: int, seconds: float, woken: bool) -> None:
    """Print rows a second of a bare session loop, or (``woken``) the p50 in ms of single runs 2 ms apart."""
    import onnxruntime  # noqa: PLC0415 - only this reference needs it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    runtime = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    binding = runtime.io_binding()
    for tensor in runtime.get_inputs():
        values = rng.random((rows, *tensor.shape[1:]), dtype=np.float32)
        binding.bind_ortvalue_input(tensor.name, onnxruntime.OrtValue.ortvalue_from_numpy(values))
    for tensor in runtime.get_outputs():
        binding.bind_output(tensor.name, "cpu")
    for _ in range(5):
        runtime.run_with_iobinding(binding)
    end, count, times = time.perf_counter() + seconds, 0, []
    begin = time.perf_counter()
    while time.perf_counter() < end:
        if woken:
            select.select([], [], [], 0.002)
        start = time.perf_counter()
        runtime.run_with_iobinding(binding)
        times.append(time.perf_counter() - start)
        count += 1
    print(float(np.median(times)) * 1e3 if woken else count * rows / (time.perf_counter() - begin), flush=True)


def main() -> None:
    """Run one reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("echo", "hop", "copy", "session", "woken"))
    parser.add_argument("target")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--frames", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=3)
    asked = parser.parse_args()
    if asked.what in ("echo", "hop"):
        (echo if asked.what == "echo" else hop)(asked.target)
    elif asked.what == "copy":
        copy(int(asked.target), asked.frames)
    else:
        session(asked.target, asked.rows, asked.seconds, asked.what == "woken")


if __name__ == "__main__":
    main()
