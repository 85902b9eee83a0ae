"""A link: one AF_UNIX SEQPACKET connection that carries records and descriptors, and tells when the peer is gone."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mxpool.endpoint import LINK_SUFFIX

RECORD_BYTES_MAX = 65_536  # the largest is LOAD or SIGNATURE: names and dims of up to 512 tensors
DESCRIPTORS_MAX = 253  # SCM_MAX_FD, what one record can carry: unix(7)


_RIGHTS_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)  # more would be closed by the kernel, in our time
_RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class _Buffers(threading.local):
    """Where a thread receives, whatever the link: a broker with 1,000 idle clients is not to hold 64 MiB for them."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECORD_BYTES_MAX))


_buffers = _Buffers()


class LinkClosed(Exception):
    """The peer is gone, or does not read; nothing more can be sent or received."""


class Packet(NamedTuple):
    """One record and the descriptors that came with it; the receiver owns them and must close each."""

    data: bytes
    fds: list[int]


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    found = array("i")
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return list(found)


class Link:
    """One end of a connection. ``send`` never blocks: a full link means that the peer is stuck.

    ``receive`` waits at most ``timeout_s``. Not thread-safe.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Link, socket.socket]:
        """A connected pair: our link, and the socket that a child process inherits by descriptor."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def connect(cls, path: str | Path) -> Link:
        """Connect to a listening link socket; OSError if nothing listens there, or if its backlog is full."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)  # connect would wait for ever for a stopped broker with a full backlog
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def fileno(self) -> int:
        """The descriptor, for a poller."""
        return self._socket.fileno()

    def peer_uid(self) -> int:
        """The user of the connected process as the kernel saw it at connect (SO_PEERCRED)."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[4:8], "little")

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one record, with descriptors that stay ours.

        Raises:
            LinkClosed: if the peer is gone or its buffer is full; the record was not sent.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            raise LinkClosed(str(error)) from None

    def receive_nowait(self) -> Packet | None:
        """The next record, or None if none has come.

        Raises:
            LinkClosed: at the end of what the peer had sent before it went.
        """
        try:
            data, rights, flags = self._receive_message()
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkClosed(str(error)) from None
        if not data:
            for fd in _descriptors(rights):  # an empty record is no record, even if a peer sends descriptors with it
                os.close(fd)
            raise LinkClosed("end of file")
        packet = Packet(data, _descriptors(rights) if rights else [])
        if flags & socket.MSG_TRUNC:
            for fd in packet.fds:
                os.close(fd)
            raise LinkClosed(f"a record of more than {RECORD_BYTES_MAX} bytes")
        return packet

    def _receive_message(self) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
        # Not socket.recv_fds: it drops its flags (bpo-46390) and would block.
        buffer = _buffers.view
        try:
            size, rights, flags, _ = self._socket.recvmsg_into([buffer], _RIGHTS_BYTES, _RECEIVE)
        except ConnectionResetError:
            # Told once, and before what the peer had sent, if it died with records of ours unread: unix(7).
            size, rights, flags, _ = self._socket.recvmsg_into([buffer], _RIGHTS_BYTES, _RECEIVE)
        return bytes(buffer[:size]), rights, flags

    def receive(self, timeout_s: float) -> Packet | None:
        """Wait up to ``timeout_s`` (rounded up to 1 ms) for a record; None if none came."""
        return self.receive_nowait() if self._poll.poll(max(timeout_s, 0) * 1000) else None

    def readable(self) -> bool:
        """True if ``receive_nowait`` has a record, or the news that the peer is gone."""
        return bool(self._poll.poll(0))

    def detach(self) -> int:
        """End the connection, for the peer too; the descriptor, or -1, is the caller's to close from now on."""
        with contextlib.suppress(OSError):  # the peer has gone, or the link is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        return self._socket.detach()

    def close(self) -> None:
        """Close our end; the peer sees the end of file. Closing twice is allowed."""
        self._socket.close()


def listen(path: str | Path) -> socket.socket:
    """A non-blocking listening socket for links at ``path``, which must be free."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def link_path(endpoint: str) -> Path | None:
    """Where the link socket of an ``ipc://`` endpoint lies; None for other transports."""
    return Path(endpoint[6:] + LINK_SUFFIX) if endpoint.startswith("ipc://") else None
