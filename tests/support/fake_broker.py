"""A scripted broker over real sockets: link, HELLO, metadata, and answers as a test says.

In a thread: ``with FakeBroker(endpoint) as broker``. As a process: ``python fake_broker.py ENDPOINT``, which prints
"ready". The model ``sum`` takes ``x`` [rows, 4] FP32 and answers ``y`` [rows] = row sums; ``large`` is the same with
40,000 columns; ``ranking`` takes three tensors and answers ``score`` [rows, 1]; ``silent`` never answers, but prints
its name for every request.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from mxpool import messages, wire
from mxpool.errors import MxPoolError, Rejected, UnknownModel
from mxpool.shm.link import Link, LinkClosed, link_path, listen
from mxpool.tensors import Signature, TensorSpec

SIGNATURES = {
    "sum": Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", ()),), 8),
    "ranking": Signature(
        (
            TensorSpec("numerical", "FP32", (48,)),
            TensorSpec("categorical", "FP32", (39,)),
            TensorSpec("keyword_vec", "FP32", (768,)),
        ),
        (TensorSpec("score", "FP32", (1,)),),
        128,
    ),
    "large": Signature((TensorSpec("x", "FP32", (40_000,)),), (TensorSpec("y", "FP32", ()),), 8),
    "silent": Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", ()),), 8),
}


class Received(NamedTuple):
    """One request as it came; ``inputs`` are read out of the body or the arena."""

    identity: bytes
    request: wire.Request
    body: bytes


class FakeBroker:
    """Answers at once, unless ``on_infer`` is set: then that is called for every INFER, in the broker's thread."""

    def __init__(self, endpoint: str, *, arenas: bool = True) -> None:
        self.endpoint = endpoint
        self.arenas = self.offers_arenas = arenas
        self.epoch = secrets.randbits(32)
        self.max_message_bytes = 64 * 1024 * 1024
        self.signatures = dict(SIGNATURES)
        self.on_infer: Callable[[Received], None] | None = None
        self.on_metadata: Callable[[str], dict[str, Any]] | None = None
        self.received: list[Received] = []
        self.cancelled: list[int] = []
        self.controls: list[tuple[str, str]] = []
        self.greetings = 0
        self.arena_maps: dict[bytes, mmap.mmap] = {}
        self.mute = False
        self.takes_clients = True
        self.greeting_error: MxPoolError | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._listener: socket.socket | None = None
        self._links: dict[int, Link] = {}
        self._wake, self._waker = socket.socketpair()
        self._calls: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._changed = threading.Condition()
        self._stopping = False
        self.fault: BaseException | None = None

    def __enter__(self) -> FakeBroker:
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.bind(self.endpoint)
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.endpoint = bound.decode().rstrip("\0")
        if (path := link_path(self.endpoint)) is not None:
            path.unlink(missing_ok=True)
            self._listener = listen(path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self.fault is not None:
            raise self.fault

    def stop(self) -> None:
        """Go away, as a broker that dies: links end, sockets close."""
        if self._thread.is_alive():
            self._stopping = True
            self._waker.send(b"x")
            self._thread.join()

    def call(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the broker's thread: its socket is not for others."""
        self._calls.append(action)
        self._waker.send(b"x")

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait for something that the broker's thread brings about."""
        with self._changed:
            assert self._changed.wait_for(holds, timeout_s), "the broker never saw it"

    # What scripts answer with; for the broker's thread only.

    def outputs(self, received: Received) -> dict[str, np.ndarray[Any, Any]]:
        """What the model answers to ``received``."""
        signature, rows = self.signatures[received.request.model], received.request.rows
        spec = signature.inputs[0]
        first = np.frombuffer(received.body, np.float32, rows * spec.row_bytes // 4).reshape(rows, -1)
        name = signature.outputs[0].name
        return {name: first.sum(axis=1).reshape(signature.shape(signature.outputs[0], rows))}

    def answer(self, *batch: Received) -> None:
        """One RESULT for requests of one client and one model."""
        outputs = [self.outputs(received) for received in batch]
        ids = [received.request.request_id for received in batch]
        rows = [received.request.rows for received in batch]
        joined = {name: np.concatenate([each[name] for each in outputs]) for name in outputs[0]}
        tensors = wire.encode_tensors([(name, "FP32", array.shape) for name, array in joined.items()])
        body = b"".join(array.astype(np.float32).tobytes() for array in joined.values())
        self._socket.send_multipart([batch[0].identity, wire.encode_result(ids, rows, tensors), body])

    def refuse(self, received: Received, error: MxPoolError) -> None:
        """One ERROR."""
        self.send(received.identity, wire.encode_error(received.request.request_id, error))

    def send(self, identity: bytes, *frames: bytes) -> None:
        """Any frames."""
        self._socket.send_multipart([identity, *frames])

    def drop_links(self) -> None:
        """Close every client's link."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - kept for the test, which raises it
            self.fault = error
        finally:
            self.drop_links()
            self._socket.close()
            self._context.term()
            for each in (self._listener, self._wake, self._waker):
                if each is not None:
                    each.close()
            for arena in self.arena_maps.values():
                arena.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for fd in (self._wake.fileno(), *self._links, *([self._listener.fileno()] if self._listener else [])):
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll())
        if self._wake.fileno() in ready:
            self._wake.recv(4096)
            while self._calls:
                self._calls.pop(0)()
        if self._listener is not None and self._listener.fileno() in ready:
            link = Link(self._listener.accept()[0])
            if self.takes_clients:
                self._links[link.fileno()] = link
            else:
                link.send(
                    messages.encode(messages.REFUSED, **messages.error_fields(Rejected(reason="too many clients")))
                )
                link.close()
        for fd in [fd for fd in self._links if fd in ready]:
            self._read_link(fd)
        if self._socket in ready:
            self._read_socket()
        with self._changed:
            self._changed.notify_all()

    def _read_link(self, fd: int) -> None:
        link = self._links[fd]
        try:
            packet = link.receive_nowait()
        except LinkClosed:
            self._links.pop(fd).close()
            return
        if packet is None or self.mute:
            return
        kind, fields = messages.decode(packet.data)
        if kind == messages.HELLO:
            link.send(
                messages.encode(
                    messages.WELCOME, epoch=self.epoch, token=b"t" * 16, version=1, arenas=self.offers_arenas
                )
            )
        elif kind == messages.ARENA and self.arenas:
            token = secrets.token_bytes(16)
            self.arena_maps[token] = mmap.mmap(packet.fds[0], fields["size"], prot=mmap.PROT_READ)
            os.close(packet.fds[0])
            link.send(messages.encode(messages.ARENA_OK, token=token, size=fields["size"]))
        elif kind == messages.ARENA:
            os.close(packet.fds[0])
            error = {"code": "permission_denied", "message": "not you", "fields": {"uid": 1}}
            link.send(messages.encode(messages.ARENA_REFUSED, **error))

    def _read_socket(self) -> None:
        batches: dict[tuple[bytes, str], list[Received]] = {}
        while self._socket.poll(0):
            identity, header, *rest = self._socket.recv_multipart()
            request = wire.decode_request(header)
            if request.kind == wire.CANCEL:
                self.cancelled.append(request.request_id)
            elif request.kind == wire.INFER:
                received = Received(identity, request, rest[0] if rest else self._arena_body(request))
                self.received.append(received)
                if request.model == "silent":
                    print("silent", flush=True)  # noqa: T201
                elif self.on_infer is not None:
                    self.on_infer(received)
                else:
                    batches.setdefault((identity, request.model), []).append(received)
            else:
                self._reply(identity, request)
        for batch in batches.values():
            for at in range(0, len(batch), 128):
                self.answer(*batch[at : at + 128])

    def _arena_body(self, request: wire.Request) -> bytes:
        token, offset, size = request.extensions["arena"]
        return self.arena_maps[token][offset : offset + size]

    def _reply(self, identity: bytes, request: wire.Request) -> None:
        verb = request.extensions.get("verb", "")
        if request.kind == wire.HELLO:
            self.greetings += 1
            if self.greeting_error is not None:
                self.send(identity, wire.encode_error(request.request_id, self.greeting_error))
                return
            payload: dict[str, Any] = {
                "version": 1, "epoch": self.epoch, "max_message_bytes": self.max_message_bytes
            }  # fmt: skip
        else:
            self.controls.append((verb, request.model))
            try:
                payload = self._control(verb, request)
            except MxPoolError as error:
                self.send(identity, wire.encode_error(request.request_id, error))
                return
        self.send(identity, wire.encode_reply(request.request_id, payload))

    def _control(self, verb: str, request: wire.Request) -> dict[str, Any]:
        if verb == "metadata":
            if self.on_metadata is not None:
                return self.on_metadata(request.model)
            if request.model not in self.signatures:
                raise UnknownModel(model=request.model)
            return {"name": request.model, **self.signatures[request.model].to_wire()}
        if verb == "list":
            return {"models": list(self.signatures)}
        return {"verb": verb, "arguments": {k: v for k, v in request.extensions.items() if k != "verb"}}


def main() -> None:
    """Serve until killed."""
    endpoint = sys.argv[1]
    if endpoint.startswith("ipc://"):
        Path(endpoint[6:]).unlink(missing_ok=True)
    with FakeBroker(endpoint) as broker:
        broker.received = _Nothing()
        print("ready", flush=True)  # noqa: T201
        threading.Event().wait()


class _Nothing(list[Received]):
    """A process that runs for long keeps no record of what it saw."""

    def append(self, _: Received, /) -> None:
        return


if __name__ == "__main__":
    main()
