"""The two sockets of a client in a test's hands: any frames, records and descriptors, and every answer as it came."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from pool import wait_until

from mxpool import messages, wire
from mxpool.shm.link import Link, LinkClosed, link_path

Answer = wire.Result | wire.Failure | wire.Reply

ANSWER_S = 10.0
HELLO_ID, SYNC_ID = 2**64 - 1, 2**64 - 2
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RawPeer:
    """A DEALER and, unless ``linked`` is false, a link that the broker has welcomed; on ipc only.

    ``identity`` is a routing id of the peer's own; ``rcvhwm`` how many answers libzmq takes in unread, 0 for all.
    """

    def __init__(self, endpoint: str, *, linked: bool = True, identity: bytes = b"", rcvhwm: int = 0) -> None:
        self.endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm, self.socket.rcvhwm = 0, rcvhwm
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)
        self.link: Link | None = None
        self.welcome: dict[str, Any] = {}
        try:
            if linked:
                self.link, self.welcome = welcomed(endpoint)
                self.send(wire.encode_request(wire.HELLO, HELLO_ID, extensions={"token": self.welcome["token"]}))
                assert isinstance(self.answer(), wire.Reply)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ZMQ

    def send(self, *frames: bytes) -> None:
        """Send one message of these frames."""
        self.socket.send_multipart(frames)

    def frames(self, timeout_s: float = ANSWER_S) -> list[bytes] | None:
        """The next message, or None if none came in time."""
        return self.socket.recv_multipart() if self.socket.poll(int(timeout_s * 1000)) else None

    def answer(self, timeout_s: float = ANSWER_S) -> Answer:
        """The header of the next message."""
        frames = self.frames(timeout_s)
        assert frames is not None, f"no answer within {timeout_s} s"
        return wire.decode_answer(frames[0])

    def refusal(self, timeout_s: float = ANSWER_S) -> wire.Failure:
        """The next answer, an error."""
        answer = self.answer(timeout_s)
        assert isinstance(answer, wire.Failure), answer
        return answer

    def answers_until_sync(self) -> list[Answer]:
        """Every answer to what was sent so far: those before the answer to one more, harmless message."""
        self.send(wire.encode_request(wire.CONTROL, SYNC_ID, extensions={"verb": "live"}))
        found: list[Answer] = []
        while True:
            answer = self.answer()
            if isinstance(answer, wire.Reply) and answer.request_id == SYNC_ID:
                return found
            found.append(answer)

    # The link

    def offer(self, fds: Sequence[int], size: Any) -> dict[str, Any]:
        """Offer an arena; the fields of ARENA_OK (``token``) or ARENA_REFUSED (``code``)."""
        assert self.link is not None
        self.link.send(messages.encode(messages.ARENA, size=size), fds)
        return record(self.link)[1]

    def drop(self, token: bytes) -> None:
        """Take an arena back."""
        assert self.link is not None
        self.link.send(messages.encode(messages.ARENA_DROP, token=token))

    def leave(self) -> None:
        """Wait until the kernel has all that was sent, then close everything."""
        self.socket.close(linger=int(ANSWER_S * 1000))
        self._context.term()
        self.close()

    def close(self) -> None:
        """Close everything. Closing twice is allowed."""
        if self.link is not None:
            self.link.close()
        self.socket.close(linger=0)
        self._context.term()


def welcomed(endpoint: str) -> tuple[Link, dict[str, Any]]:
    """A link that has said HELLO, and the fields of WELCOME, or of REFUSED."""
    path = link_path(endpoint)
    assert path is not None
    link = Link.connect(path)
    link.send(messages.encode(messages.HELLO, role="client", version=messages.LINK_VERSION, pid=os.getpid()))
    return link, record(link)[1]


def record(link: Link) -> tuple[int, dict[str, Any]]:
    """The next record; LinkClosed at the link's end."""
    packet = link.receive(ANSWER_S)
    assert packet is not None, "no record on the link"
    return messages.decode(packet.data)


def wait_closed(link: Link) -> None:
    """Wait for the link's end, past what was sent before it."""

    def ended() -> bool:
        try:
            link.receive(ANSWER_S)
        except LinkClosed:
            return True
        return False

    wait_until(ended, "the end of the link")


def memfd(size: int, *, seals: int = SEALED) -> int:
    """A memfd of ``size`` bytes; the caller closes it."""
    fd = os.memfd_create("mxpool-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def infer_header(
    request_id: int, array: npt.NDArray[Any], *, model: str = "echo", datatype: str = "FP32", **extensions: Any
) -> bytes:
    """An INFER header for ``x``."""
    tensors = wire.encode_tensors([("x", datatype, array.shape)])
    return wire.encode_request(wire.INFER, request_id, model, 0, len(array), tensors, extensions)


def row(first: float, width: int = 4) -> npt.NDArray[np.float32]:
    """One row that starts with ``first`` and counts up."""
    return np.arange(first, first + width, dtype=np.float32)[None]
