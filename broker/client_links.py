"""Links of clients: accepted, greeted, given arenas, and noticed when they end."""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import pwd
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from mxpool import errors, messages
from mxpool.broker import foreign_descriptors
from mxpool.broker.clients import Client, ClientBook, Peer
from mxpool.broker.loop import Loop
from mxpool.errors import MxPoolError
from mxpool.shm.link import Link, LinkClosed

log = logging.getLogger(__name__)

HELLO_MAX_US = 10_000_000  # a link that was opened and says nothing holds a client's place


class ArenaPolicy:
    """Which users may pass frames in memory of their own: by name, by group, and the broker's own user.

    With ``arenas`` false, nobody may.
    """

    def __init__(self, arenas: bool, users: tuple[int, ...], groups: tuple[int, ...]) -> None:
        self._arenas = arenas
        self._users = {os.getuid(), *users}
        self._groups = {os.getgid(), *groups}
        self._known: dict[int, bool] = {}

    def __call__(self, uid: int) -> bool:
        """True if ``uid`` may."""
        if uid not in self._known:
            self._known[uid] = uid in self._users or bool(self._groups & self._groups_of(uid))
        return self._arenas and self._known[uid]

    @staticmethod
    def _groups_of(uid: int) -> set[int]:
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            return set()
        return {user.pw_gid, *(group.gr_gid for group in grp.getgrall() if user.pw_name in group.gr_mem)}


class ClientLinks:
    """Accepts links up to ``limit`` of them; ``gone`` is called with a client whose link has ended."""

    def __init__(
        self,
        loop: Loop,
        book: ClientBook,
        epoch: int,
        policy: ArenaPolicy,
        limit: int,
        gone: Callable[[Client], None],
    ) -> None:
        self._loop = loop
        self._book = book
        self._epoch = epoch
        self._policy = policy
        self._limit = limit
        self._gone = gone
        self._resting: list[socket.socket] = []

    def listen(self, listener: socket.socket) -> None:
        """Accept what comes to ``listener``."""
        self._loop.add(listener.fileno(), partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            log.warning("no links accepted until the next beat reason=%s", error)
            self._loop.remove(listener.fileno())  # it stays readable: without descriptors we would spin
            self._resting.append(listener)
            return
        link = Link(connection)
        if len(self._book.peers) >= self._limit:
            refusal = errors.Rejected(reason=f"{self._limit} clients are connected, the most that this broker takes")
            self._refuse(link, refusal)
            return
        peer = Peer(link)
        self._book.peers[peer.token] = peer
        self._loop.add(link.fileno(), partial(self._receive, peer))

    def beat(self, now_us: int) -> None:
        """Accept again where descriptors had run out, and end links that have said nothing."""
        while self._resting:
            self.listen(self._resting.pop())
        for peer in list(self._book.peers.values()):
            if not peer.greeted and now_us - peer.accepted_us > HELLO_MAX_US:
                self.end(peer)

    @staticmethod
    def _refuse(link: Link, error: MxPoolError) -> None:
        with contextlib.suppress(LinkClosed):
            link.send(messages.encode(messages.REFUSED, **messages.error_fields(error)))
        link.close()

    def _receive(self, peer: Peer) -> None:
        try:
            found = self._book.receive(peer)
            if found is not None:
                self._record(peer, *found)
        except LinkClosed:
            self.end(peer)
        except Exception:  # the boundary: nothing that a client sends may end the broker
            log.exception("record of a client refused uid=%d", peer.uid)
            self.end(peer)

    def _record(self, peer: Peer, kind: int, fields: dict[str, Any], fds: list[int]) -> None:
        if kind == messages.ARENA and peer.greeted:
            try:
                token = peer.accept_arena(fields, fds, self._policy)
            except MxPoolError as error:
                log.info("arena refused uid=%d reason=%s", peer.uid, error)
                peer.refuse(error)
                return
            peer.link.send(messages.encode(messages.ARENA_OK, token=token, size=fields["size"]))
            return
        foreign_descriptors.close_later(fds)
        if kind == messages.HELLO and not peer.greeted:
            self._greet(peer, fields)
        elif kind == messages.ARENA_DROP and type(fields.get("token")) is bytes:
            peer.arenas.pop(fields["token"], None)
        else:
            raise LinkClosed(f"record kind {kind}")

    def _greet(self, peer: Peer, fields: dict[str, Any]) -> None:
        if fields.get("role") != "client" or fields.get("version") != messages.LINK_VERSION:
            refusal = errors.Rejected(reason=f"only clients with link version {messages.LINK_VERSION} are served here")
            peer.link.send(messages.encode(messages.REFUSED, **messages.error_fields(refusal)))
            raise LinkClosed("refused")
        peer.greet(self._epoch, self._policy(peer.uid))

    def end(self, peer: Peer) -> None:
        """The link is over: so is its client."""
        self._loop.remove(peer.link.fileno())
        self._book.peers.pop(peer.token, None)
        client, peer.client = peer.client, None  # they would keep each other until the next collection, which is rare
        if client is not None:
            self._gone(client)
        peer.close()
