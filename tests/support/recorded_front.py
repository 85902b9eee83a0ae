"""A front without a socket: what would have been sent is kept."""

from __future__ import annotations

from mxpool import wire
from mxpool.broker.clients import Client, ClientBook
from mxpool.broker.front import Front

Sent = tuple[bytes, "wire.Result | wire.Failure | wire.Reply", "bytes | None"]


class RecordedFront(Front):
    """``sent`` holds (routing id, decoded header, body) of each answer, in order."""

    def __init__(self) -> None:
        self.answers: list[Sent] = []

    def send(self, client: Client, header: bytes, body: bytes | None) -> None:
        self.answers.append((client.identity, wire.decode_answer(header), body))

    def last(self) -> wire.Result | wire.Failure | wire.Reply:
        """The newest answer's header."""
        return self.answers[-1][1]


def client(identity: bytes = b"client", book: ClientBook | None = None) -> Client:
    """A client that has just sent its first message."""
    return (book or ClientBook(4, 1000)).meet(identity)
