"""The ROUTER socket: whole messages in, answers out. Never blocks, never drops silently."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from mxpool.broker.clients import Client, ClientBook

log = logging.getLogger(__name__)

SNDHWM = 1000  # per client; beyond it answers wait in the client's outbox
RCVHWM = 1000
HANDSHAKE_MS = 2_000  # a peer that connects and does not speak ZMTP is cut off
BACKLOG = 4096

NOWAIT = int(zmq.NOBLOCK)  # plain integers: enum arithmetic costs as much as a send
NOWAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE = int(zmq.POLLIN)

Handle = Callable[[Client, zmq.Frame, "zmq.Frame | None", int], None]


class Front:
    """Owns the socket. ``handle(client, header, body, frames)`` gets each message whole, however many frames it had."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], book: ClientBook, max_message_bytes: int) -> None:
        self._book = book
        self._waiting: dict[Client, None] = {}
        self.lost: list[Client] = []
        self.received = self.sent = self.undeliverable = 0
        self._quiet = False  # nothing to receive, and nothing done since that could hide a message from the descriptor
        socket = self.socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.SNDHWM, SNDHWM)
        socket.set(zmq.RCVHWM, RCVHWM)
        socket.set(zmq.MAXMSGSIZE, max_message_bytes)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.BACKLOG, BACKLOG)

    def fileno(self) -> int:
        """The descriptor that becomes readable on any change; ``pending`` must be asked before waiting on it."""
        return int(self.socket.fileno())

    def pending(self) -> bool:
        """True if a message can be received now (and the descriptor may not say so any more)."""
        if not self._quiet:
            self._quiet = not self._readable()
        return not self._quiet

    def stirred(self) -> None:
        """The descriptor has become readable."""
        self._quiet = False

    def _readable(self) -> bool:
        return bool(int(self.socket.get(zmq.EVENTS)) & READABLE)

    def receive(self, handle: Handle, budget: int) -> bool:
        """Hand over up to ``budget`` messages; False once none is left.

        A message has two frames behind the routing id, or one. Of one with more, all frames are read and thrown away
        but the first, and ``handle`` gets their count.
        """
        recv, book = self.socket.recv, self._book
        self._quiet = False
        clients = book.by_identity
        for count in range(budget):
            if count == 1 and not self.pending():  # cheaper than the exception; a lone message is the common case
                return False
            try:
                identity = recv(NOWAIT)
            except zmq.Again:
                return False
            header = recv(NOWAIT, copy=False)
            body = None
            frames = 1
            if header.more:
                body = recv(NOWAIT, copy=False)
                frames = 2
                if body.more:
                    frames += self._drain()
            self.received += 1
            client = clients.get(identity)
            if client is None:
                if identity in book.ghosts:
                    continue
                client = book.meet(identity)
            handle(client, header, body, frames)
        return True

    def _drain(self) -> int:
        count = 0
        while True:
            frame = self.socket.recv(NOWAIT, copy=False)
            count += 1
            if not frame.more:
                return count

    def send(self, client: Client, header: bytes, body: bytes | None) -> None:
        """Send one answer, or let it wait in the client's outbox. A client whose outbox is full is lost."""
        if client.gone:
            self.undeliverable += 1
            return
        if client.outbox or not self._try(client, header, body):
            if self._is_gone(client):
                self.undeliverable += 1
            elif client.outbox.push(header, body):
                self._waiting[client] = None
            else:
                self.undeliverable += 1
                log.warning("client dropped, it does not read its answers waiting=%d", len(client.outbox))
                self._lose(client)

    def _try(self, client: Client, header: bytes, body: bytes | None) -> bool:
        send = self.socket.send
        self._quiet = False
        try:
            send(client.identity, NOWAIT_MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(client)
            return False
        if body is None:
            send(header, NOWAIT)
        else:
            send(header, NOWAIT_MORE)
            send(body, NOWAIT)
        self.sent += 1
        return True

    @staticmethod
    def _is_gone(client: Client) -> bool:
        return client.gone

    def _lose(self, client: Client) -> None:
        if not client.gone:
            client.gone = True
            self.undeliverable += len(client.outbox)
            self._waiting.pop(client, None)
            self.lost.append(client)

    @property
    def waiting(self) -> bool:
        """True if an outbox holds something: ROUTER cannot tell when a client has room, so ``flush`` must try."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Send what waits in outboxes, as far as the clients take it."""
        for client in list(self._waiting):
            outbox = client.outbox
            while outbox and not client.gone and self._try(client, *outbox.peek()):
                outbox.pop()
            if not outbox or client.gone:
                self._waiting.pop(client, None)

    def forget(self, client: Client) -> None:
        """Nothing more is sent to ``client``."""
        self.undeliverable += len(client.outbox) if not client.gone else 0
        client.gone = True
        self._waiting.pop(client, None)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; its context then waits up to ``linger_ms`` for clients to take what was sent."""
        self.socket.close(linger_ms)
