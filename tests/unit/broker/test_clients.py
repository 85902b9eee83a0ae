from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from descriptors import open_fds, wait_until_closed
from hypothesis import given
from hypothesis import strategies as st

from mxpool import messages
from mxpool.broker.clients import ARENAS_MAX, Arena, ClientBook, Peer
from mxpool.errors import InvalidRegion, MxPoolError, PermissionDenied
from mxpool.shm.link import Link, LinkClosed

MIB = 1 << 20
REFUSED = [
    (MIB, 1, "offset"),
    (2**64 - 8, 16, "offset"),
    (-1, 4, "offset"),
    (0, 2**63, "size"),
    (MIB - 2, 4, "size"),
    (0, 0, "size"),
    (0, MIB + 1, "size"),
    (0, -1, "size"),
    (True, 4, "offset"),
    (0, True, "size"),
    (0.0, 4, "offset"),
    ("0", 4, "offset"),
    (None, 4, "offset"),
    ([0] * 1000, 4, "offset"),
    (0, b"4", "size"),
]


@pytest.fixture(autouse=True)
def nothing_closes_later() -> Iterator[None]:
    """What one test gives away to be closed is closed before the next one counts descriptors."""
    yield
    wait_until_closed()


def memfd(size: int = MIB, *, sealed: bool = True) -> int:
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def everybody(_uid: int) -> bool:
    return True


@pytest.fixture
def link() -> Iterator[tuple[Peer, Link]]:
    ours, theirs = Link.pair()
    peer, other = Peer(ours), Link(theirs)
    yield peer, other
    peer.close()
    other.close()


@pytest.fixture
def peer(link: tuple[Peer, Link]) -> Peer:
    return link[0]


# Arenas


@pytest.mark.parametrize(("offset", "size", "field"), REFUSED)
def test_a_region_that_is_not_inside_is_refused_by_field_and_the_next_good_one_works(
    peer: Peer, offset: Any, size: Any, field: str
) -> None:
    fd = memfd()
    os.pwrite(fd, b"tail", MIB - 4)
    token = peer.accept_arena({"size": MIB}, [fd], everybody)
    with pytest.raises(InvalidRegion) as caught:
        peer.arena([token, offset, size])
    assert caught.value.fields["field"] == field
    assert len(caught.value.message) < 200
    assert bytes(peer.arena([token, MIB - 4, 4])) == b"tail"
    assert len(peer.arena([token, 0, MIB])) == MIB


@given(offset=st.integers(-(2**65), 2**65), size=st.integers(-(2**65), 2**65))
def test_any_two_integers_give_bytes_of_the_arena_or_an_error(offset: int, size: int) -> None:
    fd = memfd(4096)
    arena = Arena(fd, 4096)
    os.close(fd)
    inside = offset >= 0 and size >= 1 and offset + size <= 4096
    try:
        assert len(arena.region(offset, size)) == size
    except InvalidRegion:
        assert not inside
    else:
        assert inside


@pytest.mark.parametrize("reference", [None, 7, [], ["t", 0], ["t", 0, 1, 2], "abc", {"t": 1}, (b"", 0, 1)])
def test_a_reference_of_another_form_is_refused(peer: Peer, reference: Any) -> None:
    with pytest.raises(InvalidRegion, match="reference"):
        peer.arena(reference)


@pytest.mark.parametrize("token", [b"0" * 16, b"", 1, None, "x", [1], {}])
def test_a_token_that_the_client_does_not_have_is_refused(peer: Peer, token: Any) -> None:
    peer.accept_arena({"size": MIB}, [memfd()], everybody)
    with pytest.raises(InvalidRegion, match="token"):
        peer.arena([token, 0, 1])


def test_a_region_cannot_be_written_and_cannot_be_shrunk_away(peer: Peer) -> None:
    fd = memfd()
    keep = os.dup(fd)
    token = peer.accept_arena({"size": MIB}, [fd], everybody)
    region = peer.arena([token, 0, 8])
    assert region.readonly
    with pytest.raises(PermissionError):
        os.ftruncate(keep, 0)
    os.pwrite(keep, b"inferred", 0)
    assert bytes(region) == b"inferred"
    os.close(keep)


def test_a_region_outlives_the_client_that_a_batch_still_reads(peer: Peer) -> None:
    fd = memfd()
    os.pwrite(fd, b"still here", 0)
    region = peer.arena([peer.accept_arena({"size": MIB}, [fd], everybody), 0, 10])
    peer.close()
    assert bytes(region) == b"still here"


def write_only() -> int:
    fd = memfd()
    again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.close(fd)
    return again


def other_kind(path: Path) -> int:
    path.write_bytes(bytes(MIB))
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize(
    ("fields", "make", "text"),
    [
        ({"size": MIB}, lambda: [], "0 descriptors came"),
        ({"size": MIB}, lambda: [memfd(), memfd()], "2 descriptors came"),
        ({"size": MIB}, lambda: [memfd(sealed=False)], "sealed"),
        ({"size": MIB}, lambda: [os.memfd_create("x", 0)], "sealed"),
        ({"size": MIB}, lambda: [os.open("/dev/null", os.O_RDONLY)], "sealed"),
        ({"size": MIB - 1}, lambda: [memfd()], f"{MIB - 1} was said, the memfd has {MIB}"),
        ({"size": MIB + 1}, lambda: [memfd()], "the memfd has"),
        ({"size": 0}, lambda: [memfd(0)], "size"),
        ({"size": -1}, lambda: [memfd()], "size"),
        ({"size": 2**64}, lambda: [memfd()], "size"),
        ({"size": True}, lambda: [memfd(1)], "size"),
        ({"size": "1"}, lambda: [memfd()], "size"),
        ({}, lambda: [memfd()], "size"),
        ({"size": MIB}, lambda: [write_only()], "cannot be mapped"),
    ],
)
def test_what_is_not_a_sealed_memfd_of_that_size_is_refused_and_closed(
    peer: Peer, fields: dict[str, Any], make: Any, text: str
) -> None:
    fds = make()
    others = open_fds() - {str(fd) for fd in fds}
    with pytest.raises(InvalidRegion, match=text) as caught:
        peer.accept_arena(fields, fds, everybody)
    wait_until_closed()
    assert open_fds() == others
    assert not peer.arenas
    peer.refuse(caught.value)  # it can be packed: nothing in its fields is an exception or a client's object


def test_an_arena_that_shrinks_while_it_is_looked_at_is_refused(peer: Peer) -> None:
    fd = memfd(sealed=False)

    def shrink(_: int) -> bool:
        """Runs in the middle of the check: the worst moment that a client can pick."""
        os.ftruncate(fd, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return True

    with pytest.raises(InvalidRegion, match="the memfd has 0"):
        peer.accept_arena({"size": MIB}, [fd], shrink)


def test_a_file_is_not_an_arena_even_if_it_has_the_size(peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRegion, match="sealed"):
        peer.accept_arena({"size": MIB}, [other_kind(tmp_path / "file")], everybody)


def test_a_user_who_may_not_is_refused_and_named(peer: Peer) -> None:
    before = open_fds()
    with pytest.raises(PermissionDenied, match=f"uid {os.getuid()} may not use an arena"):
        peer.accept_arena({"size": MIB}, [memfd()], lambda uid: uid != os.getuid())
    wait_until_closed()
    assert open_fds() == before


def test_a_client_has_a_bounded_number_of_arenas_and_may_drop_one(peer: Peer) -> None:
    tokens = [peer.accept_arena({"size": MIB}, [memfd()], everybody) for _ in range(ARENAS_MAX)]
    assert len(set(tokens)) == ARENAS_MAX
    with pytest.raises(InvalidRegion, match="count"):
        peer.accept_arena({"size": MIB}, [memfd()], everybody)
    del peer.arenas[tokens[0]]
    assert peer.accept_arena({"size": MIB}, [memfd()], everybody) not in tokens


def test_arenas_are_unmapped_and_their_descriptors_closed_with_the_client(peer: Peer) -> None:
    before = Path("/proc/self/maps").read_text().count("memfd:arena")
    fds = open_fds()
    peer.accept_arena({"size": MIB}, [memfd()], everybody)
    assert Path("/proc/self/maps").read_text().count("memfd:arena") == before + 1
    peer.close()
    wait_until_closed()
    assert Path("/proc/self/maps").read_text().count("memfd:arena") == before
    assert len(open_fds()) == len(fds) - 1  # the link itself


# Who is who


def test_a_token_ties_one_routing_id_to_its_link(link: tuple[Peer, Link]) -> None:
    peer = link[0]
    book = ClientBook(4, 100)
    book.peers[peer.token] = peer
    client, thief = book.meet(b"one"), book.meet(b"two")
    for token in (b"0" * 16, None, 5, [1], "x"):
        with pytest.raises(PermissionDenied):
            book.tie(client, token)
    book.tie(client, peer.token)
    assert (client.peer, peer.client) == (peer, client)
    with pytest.raises(PermissionDenied):
        book.tie(thief, peer.token)
    assert (thief.peer, peer.client) == (None, client)


def test_a_client_cannot_be_tied_twice() -> None:
    book = ClientBook(4, 100)
    client = book.meet(b"one")
    links = [Link.pair() for _ in range(2)]
    peers = [Peer(ours) for ours, _ in links]
    book.peers.update({peer.token: peer for peer in peers})
    book.tie(client, peers[0].token)
    with pytest.raises(PermissionDenied):
        book.tie(client, peers[1].token)
    assert peers[1].client is None
    for peer, (_, theirs) in zip(peers, links, strict=True):
        peer.close()
        theirs.close()


def test_forgetting_a_client_late_leaves_a_newcomer_with_the_same_routing_id_alone() -> None:
    book = ClientBook(4, 100)
    first = book.meet(b"same")
    book.forget(first)
    assert (first.gone, len(book.by_identity)) == (True, 0)
    second = book.meet(b"same")
    book.forget(first)
    assert (book.by_identity, second.gone) == ({b"same": second}, False)


def test_tokens_cannot_be_guessed_from_one_another() -> None:
    tokens = set()
    for _ in range(3):
        ours, theirs = Link.pair()
        peer = Peer(ours)
        tokens.add(peer.token)
        assert (len(peer.token), peer.uid) == (16, os.getuid())
        peer.close()
        theirs.close()
    assert len(tokens) == 3


# Records


def test_welcome_tells_the_epoch_and_whether_arenas_are_allowed(link: tuple[Peer, Link]) -> None:
    peer, other = link
    peer.greet(77, arenas=False)
    packet = other.receive(1)
    assert packet is not None
    assert messages.decode(packet.data) == (
        messages.WELCOME,
        {"epoch": 77, "token": peer.token, "version": messages.LINK_VERSION, "arenas": False},
    )


def test_records_come_with_their_descriptors_and_nonsense_ends_the_link(link: tuple[Peer, Link]) -> None:
    peer, other = link
    book = ClientBook(4, 100)
    fd = memfd()
    assert book.receive(peer) is None
    other.send(messages.encode(messages.ARENA, size=MIB), [fd])
    found = book.receive(peer)
    assert found is not None
    kind, fields, fds = found
    assert (kind, fields, len(fds)) == (messages.ARENA, {"size": MIB}, 1)
    os.close(fds[0])
    before = open_fds()
    other.send(b"\xff\xc1", [fd, fd])
    with pytest.raises(LinkClosed):
        book.receive(peer)
    assert open_fds() == before
    os.close(fd)
    other.close()
    with pytest.raises(LinkClosed):
        book.receive(peer)


def test_an_error_of_any_kind_can_be_sent_as_a_refusal(link: tuple[Peer, Link]) -> None:
    peer, other = link
    errors: list[MxPoolError] = [InvalidRegion(field="size", reason="no"), PermissionDenied(uid=3, action="x")]
    for error in errors:
        peer.refuse(error)
        packet = other.receive(1)
        assert packet is not None
        assert messages.decode(packet.data) == (messages.ARENA_REFUSED, messages.error_fields(error))


def test_mapping_is_read_only() -> None:
    fd = memfd(4096)
    arena = Arena(fd, 4096)
    os.close(fd)
    assert isinstance(arena.region(0, 1).obj, mmap.mmap)
    with pytest.raises(TypeError):
        arena.region(0, 1)[0] = 1
