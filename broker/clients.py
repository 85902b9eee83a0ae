"""Who is connected: routing ids, links, arenas. I/O on links and descriptors."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any

from mxpool import messages
from mxpool.broker import foreign_descriptors
from mxpool.broker.outbox import Outbox
from mxpool.broker.tickets import Ticket
from mxpool.clock import now_us
from mxpool.errors import InvalidRegion, MxPoolError, PermissionDenied
from mxpool.shm.link import Link, LinkClosed

ARENAS_MAX = 2  # of one client; a client that needs another size drops an old one first
ARENA_BYTES_MAX = 1 << 30


def _shown(value: Any) -> str:
    """A client's value in an error: never the text of something nested or long."""
    return str(value) if type(value) is int else type(value).__name__


class Arena:
    """A client's shrink-sealed memory, mapped read-only.

    A page that the client never wrote is made, as zeros, when it is read: memory of the broker's cgroup, which the
    limits on size and count bound.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._map)

    def region(self, offset: Any, size: Any) -> memoryview:
        """The bytes ``[offset, offset + size)``.

        Raises:
            InvalidRegion: naming the field, for anything that is not inside the arena (integers of any size).
        """
        if type(offset) is not int or not 0 <= offset < self.size_bytes:
            raise InvalidRegion(field="offset", reason=f"{_shown(offset)} is not from 0 to {self.size_bytes - 1}")
        if type(size) is not int or not 1 <= size <= self.size_bytes - offset:
            raise InvalidRegion(field="size", reason=f"{_shown(size)} is not from 1 to {self.size_bytes - offset}")
        return self._bytes[offset : offset + size]


class Client:
    """One routing id of the ROUTER. ``tickets`` are its requests without an answer, by request id."""

    __slots__ = ("gone", "identity", "outbox", "peer", "tickets")

    def __init__(self, identity: bytes, outbox: Outbox) -> None:
        self.identity = identity
        self.outbox = outbox
        self.tickets: dict[int, Ticket] = {}
        self.peer: Peer | None = None
        self.gone = False


class Peer:
    """The link of one client process. Its ``token`` proves, over ZMQ, that a routing id is the same client's."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.uid = link.peer_uid()
        self.token = secrets.token_bytes(16)
        self.client: Client | None = None
        self.greeted = False
        self.accepted_us = now_us()
        self.arenas: dict[bytes, Arena] = {}

    def arena(self, reference: Any) -> memoryview:
        """The bytes that an ``arena`` extension names. Raises InvalidRegion."""
        if type(reference) is not list or len(reference) != 3:
            raise InvalidRegion(field="reference", reason="it is not [token, offset, size]")
        token, offset, size = reference
        arena = self.arenas.get(token) if type(token) is bytes else None
        if arena is None:
            raise InvalidRegion(field="token", reason="this client has no such arena")
        return arena.region(offset, size)

    def accept_arena(self, fields: dict[str, Any], fds: list[int], allowed: Callable[[int], bool]) -> bytes:
        """Map an arena that the client offers; its token.

        Raises:
            InvalidRegion, PermissionDenied: nothing is mapped. The descriptors are closed either way.
        """
        try:
            if len(fds) != 1:
                raise InvalidRegion(field="descriptor", reason=f"{len(fds)} descriptors came, 1 is needed")
            size_bytes = self._check_arena(fds[0], fields.get("size"), allowed)
            token = secrets.token_bytes(16)
            self.arenas[token] = Arena(fds[0], size_bytes)
            return token
        except (OSError, ValueError) as error:  # a descriptor without read access, or too many mappings
            raise InvalidRegion(field="descriptor", reason=f"it cannot be mapped: {error}") from None
        finally:
            foreign_descriptors.close_later(fds)

    def _check_arena(self, fd: int, size: Any, allowed: Callable[[int], bool]) -> int:
        if len(self.arenas) >= ARENAS_MAX:
            raise InvalidRegion(field="count", reason=f"a client may have {ARENAS_MAX} arenas")
        if type(size) is not int or not 1 <= size <= ARENA_BYTES_MAX:
            raise InvalidRegion(field="size", reason=f"{_shown(size)} is not from 1 to {ARENA_BYTES_MAX}")
        if not allowed(self.uid):
            raise PermissionDenied(uid=self.uid, action="use an arena (arena_users, arena_groups)")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            raise InvalidRegion(field="descriptor", reason="it is not a memfd sealed against shrinking")
        status = os.fstat(fd)  # after the seals: before them, the size could still change
        if status.st_uid != self.uid:
            raise PermissionDenied(uid=self.uid, action="use an arena that another user owns")
        if status.st_size != size:
            raise InvalidRegion(field="size", reason=f"{size} was said, the memfd has {status.st_size}")
        return size

    def greet(self, epoch: int, arenas: bool) -> None:
        """Answer the client's HELLO with WELCOME. Raises LinkClosed."""
        self.greeted = True
        self.link.send(
            messages.encode(
                messages.WELCOME, epoch=epoch, token=self.token, version=messages.LINK_VERSION, arenas=arenas
            )
        )

    def refuse(self, error: MxPoolError) -> None:
        """Say why the last record was refused. Raises LinkClosed."""
        self.link.send(messages.encode(messages.ARENA_REFUSED, **messages.error_fields(error)))

    def close(self) -> None:
        """Close the link: the client sees that it is dropped. Arenas are unmapped with their last reader."""
        self.arenas.clear()
        foreign_descriptors.close_later(
            [self.link.detach()]
        )  # descriptors that the client had sent may lie unread in it


class ClientBook:
    """All clients by routing id, and their links by token.

    ``ghosts`` are routing ids whose link has ended: what libzmq still holds of theirs is not to be run.
    """

    def __init__(self, outbox_messages: int, outbox_bytes: int) -> None:
        self._outbox = (outbox_messages, outbox_bytes)
        self.by_identity: dict[bytes, Client] = {}
        self.peers: dict[bytes, Peer] = {}
        self.ghosts: set[bytes] = set()

    def meet(self, identity: bytes) -> Client:
        """The client of a routing id, made on its first message."""
        client = self.by_identity[identity] = Client(identity, Outbox(*self._outbox))
        return client

    def tie(self, client: Client, token: Any) -> None:
        """``client`` is the process at the other end of the link that got ``token``.

        Raises:
            PermissionDenied: for a token that no waiting link has.
        """
        peer = self.peers.get(token) if type(token) is bytes else None
        if peer is None or peer.client is not None or client.peer is not None:
            raise PermissionDenied(uid="?", action="say HELLO with a token that is not its own")
        peer.client, client.peer = client, peer

    def forget(self, client: Client) -> None:
        """``client`` is gone or dropped. Its tickets and its link are the caller's to end."""
        client.gone = True
        if self.by_identity.get(client.identity) is client:
            del self.by_identity[client.identity]
            if client.peer is not None:
                self.ghosts.add(client.identity)

    def receive(self, peer: Peer) -> tuple[int, dict[str, Any], list[int]] | None:
        """The next record of a client's link with its descriptors, or None; LinkClosed at its end or for nonsense."""
        packet = peer.link.receive_nowait()
        if packet is None:
            return None
        try:
            kind, fields = messages.decode(packet.data)
        except MxPoolError as error:
            foreign_descriptors.close_later(packet.fds)
            raise LinkClosed(str(error)) from None
        return kind, fields, packet.fds
