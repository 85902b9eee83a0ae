from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mxpool.broker.clients import Client, ClientBook
from mxpool.broker.front import SNDHWM, Front

Message = tuple[Client, bytes, "bytes | None", int]
WAIT_MS = 5000


class Rig:
    """A front on a socket of its own, and raw clients made on demand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.book = ClientBook(outbox_messages=50, outbox_bytes=1 << 20)
        self.front = Front(context, self.book, 1 << 20)
        self.front.socket.bind(address)
        self._context, self._address = context, address
        self.clients: list[zmq.Socket[bytes]] = []
        self.messages: list[Message] = []

    def connect(self, rcvhwm: int = 1000) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = rcvhwm
        socket.connect(self._address)
        self.clients.append(socket)
        return socket

    def handle(self, client: Client, header: zmq.Frame, body: zmq.Frame | None, frames: int) -> None:
        self.messages.append((client, header.bytes, None if body is None else body.bytes, frames))

    def receive(self, count: int) -> list[Message]:
        """Wait until ``count`` messages have been handed over since the last call."""
        while len(self.messages) < count:
            assert self.front.socket.poll(WAIT_MS), f"{len(self.messages)} of {count} messages came"
            self.front.receive(self.handle, 100)
        taken, self.messages = self.messages, []
        return taken

    def meet(self, socket: zmq.Socket[bytes]) -> Client:
        socket.send(b"hello")
        return self.receive(1)[0][0]

    def close(self) -> None:
        for socket in self.clients:
            socket.close()
        self.front.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Rig(context, f"ipc://{tmp_path}/front.sock")
    yield made
    made.close()
    context.term()


def next_message(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(WAIT_MS), "no answer came"
    return socket.recv_multipart()


def test_messages_arrive_whole_with_the_count_of_their_frames_and_leave_nothing_behind(rig: Rig) -> None:
    socket = rig.connect()
    sent = [[b"one"], [b"two", b"body"], [b"three", b"x", b"y"], [b""], [b"", b""], [b"many", *[b"z"] * 1000], [b"end"]]
    for frames in sent:
        socket.send_multipart(frames)
    got = rig.receive(len(sent))
    assert [(header, count) for _, header, _, count in got] == [(frames[0], len(frames)) for frames in sent]
    assert [body for _, _, body, count in got if count == 2] == [b"body", b""]
    assert [body for _, _, body, count in got if count == 1] == [None] * 3
    assert len({id(client) for client, *_ in got}) == 1
    assert rig.front.received == len(sent)


def test_a_budget_stops_between_messages_and_says_that_more_may_wait(rig: Rig) -> None:
    socket = rig.connect()
    rig.meet(socket)
    for number in range(5):
        socket.send_multipart([b"%d" % number, b"body"])
    assert rig.receive(1)[0][1] == b"0"
    rig.messages.clear()
    while rig.front.socket.poll(0):
        before = len(rig.messages)
        more = rig.front.receive(rig.handle, 2)
        assert len(rig.messages) - before == 2 or not more
    assert not rig.front.pending()
    assert not rig.front.receive(rig.handle, 2)


def test_two_clients_are_told_apart_and_each_gets_its_own_answers(rig: Rig) -> None:
    first, second = rig.connect(), rig.connect()
    clients = [rig.meet(first), rig.meet(second)]
    assert clients[0] is not clients[1]
    rig.front.send(clients[1], b"for two", b"body")
    rig.front.send(clients[0], b"for one", None)
    assert next_message(first) == [b"for one"]
    assert next_message(second) == [b"for two", b"body"]
    assert (rig.front.sent, rig.front.undeliverable, rig.front.waiting) == (2, 0, False)


def test_a_client_that_has_gone_is_lost_once_and_its_answers_are_counted(rig: Rig) -> None:
    socket = rig.connect()
    client = rig.meet(socket)
    socket.close()
    tried = 0
    while not client.gone:  # until libzmq has seen it
        rig.front.send(client, b"answer", None)
        tried += 1
    rig.front.send(client, b"answer", None)
    assert rig.front.lost == [client]
    assert rig.front.sent + rig.front.undeliverable == tried + 1
    assert rig.front.undeliverable >= 2
    assert not rig.front.waiting


def test_answers_to_a_slow_client_wait_in_order_and_go_out_when_it_reads(rig: Rig) -> None:
    socket = rig.connect(rcvhwm=1)
    client = rig.meet(socket)
    body = bytes(4096)
    count = 0
    while len(client.outbox) < 20:
        rig.front.send(client, b"%d" % count, body)
        count += 1
    assert count > SNDHWM
    assert rig.front.waiting
    got: list[bytes] = []
    for _ in range(10 * count):  # as the broker does: try again every few milliseconds
        rig.front.flush()
        if socket.poll(5):
            got.append(socket.recv_multipart()[0])
        if len(got) == count:
            break
    assert got == [b"%d" % number for number in range(count)]
    assert (rig.front.waiting, rig.front.sent, rig.front.undeliverable, rig.front.lost) == (False, count, 0, [])


def test_an_answer_does_not_overtake_those_that_wait_though_there_is_room_for_it(rig: Rig) -> None:
    socket = rig.connect(rcvhwm=1)
    client = rig.meet(socket)
    count = 0
    while len(client.outbox) < 3:
        rig.front.send(client, b"%d" % count, bytes(4096))
        count += 1
    got = [next_message(socket)[0] for _ in range(count - 3)]
    rig.front.pending()  # libzmq learns here that the client has read
    rig.front.send(client, b"%d" % count, None)
    rig.front.flush()
    got += [next_message(socket)[0] for _ in range(4)]
    assert got == [b"%d" % number for number in range(count + 1)]


def test_a_client_that_never_reads_is_dropped_when_its_outbox_is_full_and_every_answer_is_counted(rig: Rig) -> None:
    client = rig.meet(rig.connect(rcvhwm=1))
    other = rig.meet(rig.clients[0])
    assert other is client
    count = 0
    while not client.gone:
        rig.front.send(client, b"%d" % count, bytes(4096))
        count += 1
    assert rig.front.lost == [client]
    assert rig.front.sent + rig.front.undeliverable == count
    assert rig.front.undeliverable == 51
    rig.front.flush()
    assert (rig.front.waiting, rig.front.sent + rig.front.undeliverable) == (False, count)


def test_answers_that_wait_for_a_client_that_leaves_are_counted_as_undeliverable(rig: Rig) -> None:
    client = rig.meet(rig.connect(rcvhwm=1))
    count = 0
    while len(client.outbox) < 7:
        rig.front.send(client, b"%d" % count, bytes(4096))
        count += 1
    rig.front.forget(client)
    rig.front.forget(client)
    assert (rig.front.undeliverable, rig.front.sent, rig.front.waiting) == (7, count - 7, False)
    rig.front.send(client, b"late", None)
    assert (rig.front.undeliverable, client.gone) == (8, True)


def test_messages_of_a_client_whose_link_has_ended_are_not_run(rig: Rig) -> None:
    socket = rig.connect()
    client = rig.meet(socket)
    rig.book.forget(client)
    rig.book.ghosts.add(client.identity)
    socket.send(b"from the grave")
    other = rig.connect()
    other.send(b"alive")
    while rig.front.received < 3:
        assert rig.front.socket.poll(WAIT_MS)
        rig.front.receive(rig.handle, 10)
    assert [header for _, header, _, _ in rig.messages] == [b"alive"]
    assert len(rig.book.by_identity) == 1


def test_a_message_above_the_limit_ends_that_connection_only(rig: Rig) -> None:
    healthy, hostile = rig.connect(), rig.connect()
    rig.meet(healthy)
    monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rig.meet(hostile)
    hostile.send_multipart([b"big", bytes(2 << 20)])
    assert monitor.poll(WAIT_MS), "the connection was not cut"
    healthy.send(b"still here")
    assert rig.receive(1)[0][1] == b"still here"
    hostile.disable_monitor()
    monitor.close()
