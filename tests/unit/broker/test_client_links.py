from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from descriptors import wait_until_closed

from mxpool import messages
from mxpool.broker.client_links import HELLO_MAX_US, ArenaPolicy, ClientLinks
from mxpool.broker.clients import Client, ClientBook
from mxpool.broker.loop import Loop
from mxpool.clock import now_us
from mxpool.shm.link import Link, LinkClosed, listen

LIMIT = 2
EPOCH = 31


@pytest.fixture(autouse=True)
def nothing_closes_later() -> Iterator[None]:
    """What one test gives away to be closed is closed before the next one counts descriptors."""
    yield
    wait_until_closed()


class Rig:
    """A listening broker end in this process; ``turn`` makes one pass of its loop."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.book = ClientBook(4, 100)
        self.gone: list[Client] = []
        policy = ArenaPolicy(True, (), ())
        self.links = ClientLinks(self.loop, self.book, EPOCH, policy, LIMIT, self.gone.append)
        self.path = folder / "x.link"
        self.listener = listen(self.path)
        self.links.listen(self.listener)
        self.others: list[Link] = []

    def connect(self) -> Link:
        link = Link.connect(self.path)
        self.others.append(link)
        self.turn()
        return link

    def turn(self) -> None:
        self.loop.wait(0)

    def ask(self, link: Link, kind: int, fds: tuple[int, ...] = (), **fields: Any) -> tuple[int, dict[str, Any]]:
        """Send a record, let the broker's end turn, and read the answer."""
        link.send(messages.encode(kind, **fields), fds)
        self.turn()
        packet = link.receive(0)
        assert packet is not None
        return messages.decode(packet.data)

    def hello(self, link: Link, **changes: Any) -> tuple[int, dict[str, Any]]:
        fields = {"role": "client", "version": messages.LINK_VERSION, "pid": 1, **changes}
        return self.ask(link, messages.HELLO, **fields)

    def close(self) -> None:
        for link in self.others:
            link.close()
        for peer in list(self.book.peers.values()):
            self.links.end(peer)
        self.listener.close()
        self.loop.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def ended(link: Link) -> bool:
    try:
        link.receive(0)
    except LinkClosed:
        return True
    return False


def test_a_client_is_greeted_with_a_token_that_ties_it(rig: Rig) -> None:
    link = rig.connect()
    kind, fields = rig.hello(link)
    assert (kind, fields["epoch"], fields["arenas"]) == (messages.WELCOME, EPOCH, True)
    client = rig.book.meet(b"id")
    rig.book.tie(client, fields["token"])
    assert client.peer is not None


@pytest.mark.parametrize(
    "changes", [{"role": "worker"}, {"role": None}, {"version": messages.LINK_VERSION + 1}, {"version": "1"}]
)
def test_other_roles_and_versions_are_refused_with_the_reason_and_dropped(rig: Rig, changes: dict[str, Any]) -> None:
    link = rig.connect()
    kind, fields = rig.hello(link, **changes)
    assert (kind, fields["code"]) == (messages.REFUSED, "rejected")
    assert str(messages.LINK_VERSION) in fields["message"]
    assert ended(link)
    assert not rig.book.peers


def test_one_client_too_many_is_refused_and_the_others_stay(rig: Rig) -> None:
    links = [rig.connect() for _ in range(LIMIT)]
    surplus = rig.connect()
    packet = surplus.receive(0)
    assert packet is not None
    kind, fields = messages.decode(packet.data)
    assert kind == messages.REFUSED
    assert f"{LIMIT} clients are connected" in fields["message"]
    assert ended(surplus)
    links[0].close()
    rig.turn()
    assert rig.hello(rig.connect())[0] == messages.WELCOME
    assert rig.hello(links[1])[0] == messages.WELCOME


def test_the_end_of_a_link_is_the_end_of_its_client_once(rig: Rig) -> None:
    link = rig.connect()
    _, fields = rig.hello(link)
    client = rig.book.meet(b"id")
    rig.book.tie(client, fields["token"])
    peer = client.peer
    assert peer is not None
    link.close()
    rig.turn()
    rig.turn()
    assert (rig.gone, rig.book.peers) == ([client], {})
    assert list(rig.loop._callbacks) == [rig.listener.fileno()]


@pytest.mark.parametrize(
    "record",
    [
        b"\xff",
        b"\x01\xc1",
        messages.encode(messages.RUN),
        messages.encode(messages.ARENA, size=1),
        messages.encode(messages.ARENA_DROP, token=b"x"),
        messages.encode(99),
    ],
    ids=["garbage", "bad map", "run", "arena before hello", "drop before hello", "unknown kind"],
)
def test_what_makes_no_sense_ends_that_link_only(rig: Rig, record: bytes) -> None:
    good, bad = rig.connect(), rig.connect()
    fd = os.memfd_create("x")
    bad.send(record, [fd])
    os.close(fd)
    rig.turn()
    if record[0] == messages.ARENA_DROP:
        assert not ended(bad), "dropping what is not there is no harm"
    else:
        assert ended(bad)
    assert rig.hello(good)[0] == messages.WELCOME


def test_hello_twice_ends_the_link(rig: Rig) -> None:
    link = rig.connect()
    rig.hello(link)
    link.send(messages.encode(messages.HELLO, role="client", version=messages.LINK_VERSION))
    rig.turn()
    assert ended(link)


def test_a_link_that_says_nothing_is_ended_after_a_while_and_a_greeted_one_is_not(rig: Rig) -> None:
    silent, greeted = rig.connect(), rig.connect()
    rig.hello(greeted)
    rig.links.beat(now_us())
    assert not ended(silent)
    rig.links.beat(now_us() + HELLO_MAX_US + 1)
    assert ended(silent)
    assert not ended(greeted)


def arena(size: int, seal: int = fcntl.F_SEAL_SHRINK, flags: int = os.O_RDWR) -> int:
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    again = os.open(f"/proc/self/fd/{fd}", flags)
    os.close(fd)
    return again


def test_an_arena_is_taken_used_and_dropped(rig: Rig) -> None:
    link = rig.connect()
    token = rig.hello(link)[1]["token"]
    fd = arena(4096)
    kind, fields = rig.ask(link, messages.ARENA, (fd,), size=4096)
    assert (kind, fields["size"]) == (messages.ARENA_OK, 4096)
    peer = rig.book.peers[token]
    os.pwrite(fd, b"frame", 10)
    assert bytes(peer.arena([fields["token"], 10, 5])) == b"frame"
    link.send(messages.encode(messages.ARENA_DROP, token=fields["token"]))
    rig.turn()
    assert not peer.arenas
    os.close(fd)


@pytest.mark.parametrize(
    ("seal", "flags", "size"),
    [(0, os.O_RDWR, 4096), (fcntl.F_SEAL_SHRINK, os.O_WRONLY, 4096), (fcntl.F_SEAL_SHRINK, os.O_RDWR, 4097)],
    ids=["not sealed", "not readable", "another size"],
)
def test_a_refused_arena_is_answered_and_the_client_goes_on(rig: Rig, seal: int, flags: int, size: int) -> None:
    link = rig.connect()
    rig.hello(link)
    fd = arena(4096, seal, flags)
    kind, fields = rig.ask(link, messages.ARENA, (fd,), size=size)
    os.close(fd)
    assert (kind, fields["code"]) == (messages.ARENA_REFUSED, "invalid_region")
    fd = arena(4096)
    assert rig.ask(link, messages.ARENA, (fd,), size=4096)[0] == messages.ARENA_OK
    os.close(fd)


def test_arenas_are_for_the_brokers_user_those_named_and_members_of_groups_named() -> None:
    nobody = pwd.getpwnam("nobody")
    other = next(user for user in pwd.getpwall() if user.pw_uid not in (0, os.getuid(), nobody.pw_uid))
    policy = ArenaPolicy(True, (nobody.pw_uid,), ())
    assert policy(os.getuid())
    assert policy(nobody.pw_uid)
    if other.pw_gid != os.getgid():
        assert not policy(other.pw_uid)
    assert ArenaPolicy(True, (), (other.pw_gid,))(other.pw_uid)
    assert not policy(4_000_000_000), "a uid without an account is in no group"


def test_where_arenas_are_off_not_even_the_brokers_user_may() -> None:
    assert not ArenaPolicy(False, (os.getuid(),), ())(os.getuid())
