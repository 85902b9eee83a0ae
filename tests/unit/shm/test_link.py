from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from descriptors import open_fds

from mxpool.shm.link import DESCRIPTORS_MAX, RECORD_BYTES_MAX, Link, LinkClosed, Packet, link_path, listen

Pair = tuple[Link, Link]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = Link.pair()
    other = Link(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_records_keep_their_bounds_and_their_order(pair: Pair) -> None:
    ours, theirs = pair
    records = [b"a", b"bb" * 500, b"\0", b"c" * RECORD_BYTES_MAX]
    for record in records:
        ours.send(record)
    assert [theirs.receive(0) for _ in records] == [Packet(record, []) for record in records]
    assert theirs.receive_nowait() is None


def test_receive_says_none_when_nothing_comes(pair: Pair) -> None:
    assert pair[0].receive(0.001) is None


def test_a_descriptor_arrives_as_another_one_of_the_same_file_and_is_not_inherited(pair: Pair) -> None:
    ours, theirs = pair
    memory = os.memfd_create("x")
    os.write(memory, b"through the link")
    ours.send(b"take", [memory, memory])
    packet = theirs.receive(1)
    assert packet is not None
    assert packet.data == b"take"
    assert len(packet.fds) == 2
    for fd in packet.fds:
        assert fd != memory
        assert os.pread(fd, 100, 0) == b"through the link"
        assert not os.get_inheritable(fd)
        os.close(fd)
    os.close(memory)


def test_what_was_sent_before_the_end_is_read_before_it(pair: Pair) -> None:
    ours, theirs = pair
    ours.send(b"last words")
    ours.close()
    ours.close()
    assert theirs.receive(1) == Packet(b"last words", [])
    for _ in range(2):
        with pytest.raises(LinkClosed, match="end of file"):
            theirs.receive_nowait()
    with pytest.raises(LinkClosed):
        theirs.send(b"to nobody")


def test_a_full_link_is_refused_without_blocking_and_loses_nothing_that_it_took(pair: Pair) -> None:
    ours, theirs = pair
    sent = 0
    try:
        while True:
            ours.send(b"%d" % sent + bytes(4096))
            sent += 1
    except LinkClosed:
        assert sent > 0
    for number in range(sent):
        packet = theirs.receive_nowait()
        assert packet is not None
        assert packet.data.startswith(b"%d\0" % number)
    assert theirs.receive_nowait() is None


def test_descriptors_on_an_empty_record_are_closed() -> None:
    theirs, raw = Link.pair()
    before = open_fds()
    memory = os.memfd_create("x")
    raw.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory] * 3))])
    os.close(memory)
    with pytest.raises(LinkClosed):
        theirs.receive_nowait()
    assert open_fds() == before
    raw.close()
    theirs.close()


def test_as_many_descriptors_as_a_record_can_carry_arrive(pair: Pair) -> None:
    ours, theirs = pair
    memory = os.memfd_create("x")
    ours.send(b"many", [memory] * DESCRIPTORS_MAX)
    os.close(memory)
    packet = theirs.receive(1)
    assert packet is not None
    for fd in packet.fds:
        os.close(fd)
    assert len(packet.fds) == DESCRIPTORS_MAX


def test_connecting_reaches_the_listener_and_the_kernel_names_the_user(tmp_path: Path) -> None:
    path = tmp_path / "x.link"
    listener = listen(path)
    with pytest.raises(BlockingIOError):
        listener.accept()
    client = Link.connect(path)
    accepted = Link(listener.accept()[0])
    client.send(b"hello")
    assert accepted.receive(1) == Packet(b"hello", [])
    assert accepted.peer_uid() == client.peer_uid() == os.getuid()
    assert accepted.fileno() >= 0
    for end in (client, accepted, listener):
        end.close()


def test_nothing_that_listens_is_an_oserror_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(FileNotFoundError):
        Link.connect(tmp_path / "nobody.link")
    (tmp_path / "taken").write_text("x")
    with pytest.raises(OSError, match="in use"):
        listen(tmp_path / "taken")
    assert open_fds() == before


def test_link_path_is_beside_an_ipc_endpoint_and_nowhere_for_tcp() -> None:
    assert link_path("ipc:///run/mx/broker.sock") == Path("/run/mx/broker.sock.link")
    assert link_path("tcp://127.0.0.1:5555") is None
