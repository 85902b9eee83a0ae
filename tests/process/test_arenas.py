"""Memory that a client shares with its broker: what a reference may name, and what becomes of it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gates import Gate, wait_queued, wait_running
from pool import Pool, echo, wait_until
from raw_peer import RawPeer, infer_header, memfd, record, row

from mxpool import messages, wire
from mxpool.shm.link import Link, LinkClosed, link_path

MIB = 1 << 20
ROW_BYTES = 16
LARGE = "x:FP32:32768"  # a row of 128 KB: the client library uses its arena
SHRINK_UNSEALED = fcntl.F_SEAL_GROW


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    models = {"echo": echo(), "large": echo(4, tensors=LARGE), "pair": echo(4, tensors="a:FP32:20000,b:UINT8:5x3001")}
    with Pool(models) as pool:
        yield pool


@pytest.fixture
def peer(pool: Pool) -> Iterator[RawPeer]:
    with RawPeer(pool.endpoint) as peer:
        yield peer


def offered(peer: RawPeer, size: int = MIB) -> tuple[bytes, int]:
    """An arena that the broker took: its token, and our descriptor of it."""
    fd = memfd(size)
    answer = peer.offer([fd], size)
    assert "token" in answer, answer
    return answer["token"], fd


def refused(peer: RawPeer, fds: list[int], size: Any) -> tuple[str, str]:
    """The code of a refusal and the field that it names."""
    answer = peer.offer(fds, size)
    assert "code" in answer, answer
    return answer["code"], answer["fields"].get("field", "")


def works(peer: RawPeer, token: bytes, fd: int, *, request_id: int = 1000, offset: int = 0) -> None:
    """A good request out of the arena is answered with its own bytes."""
    array = row(request_id)
    os.pwrite(fd, array.tobytes(), offset)
    peer.send(infer_header(request_id, array, arena=[token, offset, array.nbytes]))
    frames = peer.frames()
    assert frames is not None
    answer = wire.decode_answer(frames[0])
    assert isinstance(answer, wire.Result), answer
    assert answer.ids == [request_id]
    assert (np.frombuffer(frames[1], np.float32) == array).all()


# D1

OUTSIDE: list[tuple[str, Any, Any]] = [
    ("offset", MIB, 1),
    ("offset", MIB, ROW_BYTES),
    ("offset", 2**64 - 8, 16),
    ("offset", -1, 4),
    ("offset", -(2**63), ROW_BYTES),
    ("size", 0, 2**63),
    ("size", 0, 2**64 - 1),
    ("size", ROW_BYTES, 2**64 - ROW_BYTES),
    ("size", MIB - 2, 4),
    ("size", MIB - 15, ROW_BYTES),
    ("size", 0, 0),
    ("size", 0, -1),
    ("size", 0, -ROW_BYTES),
    ("size", 0, MIB + 1),
    ("offset", None, ROW_BYTES),
    ("offset", 0.0, ROW_BYTES),
    ("offset", True, ROW_BYTES),
    ("offset", "0", ROW_BYTES),
    ("offset", [0], ROW_BYTES),
    ("size", 0, None),
    ("size", 0, 16.0),
    ("size", 0, {}),
    ("size", 0, b"16"),
]


@pytest.mark.parametrize(("field", "offset", "size"), OUTSIDE)
def test_a_region_outside_of_its_arena_is_refused_by_field(peer: RawPeer, field: str, offset: Any, size: Any) -> None:
    token, fd = offered(peer)
    peer.send(infer_header(7, row(0), arena=[token, offset, size]))
    failure = peer.refusal()
    assert (failure.request_id, failure.code, failure.fields["field"]) == (7, "invalid_region", field)
    works(peer, token, fd, offset=MIB - ROW_BYTES)
    os.close(fd)


@pytest.mark.parametrize("size", [1, ROW_BYTES - 1, ROW_BYTES + 1, 2 * ROW_BYTES, MIB])
def test_a_region_that_is_not_the_size_of_its_tensors_is_refused(peer: RawPeer, size: int) -> None:
    token, fd = offered(peer)
    peer.send(infer_header(7, row(0), arena=[token, 0, size]))
    failure = peer.refusal()
    assert (failure.code, failure.fields["tensor"], failure.fields["got"]) == (
        "invalid_tensor",
        "body",
        f"{size} bytes",
    )
    works(peer, token, fd)
    os.close(fd)


REFERENCES: dict[str, Callable[[bytes], Any]] = {
    "none": lambda _: None,
    "a map": lambda token: {"token": token, "offset": 0, "size": ROW_BYTES},
    "empty": lambda _: [],
    "two values": lambda token: [token, 0],
    "four values": lambda token: [token, 0, ROW_BYTES, 0],
    "no token": lambda _: [b"", 0, ROW_BYTES],
    "a token cut short": lambda token: [token[:-1], 0, ROW_BYTES],
    "a token of nobody": lambda _: [bytes(16), 0, ROW_BYTES],
    "a token as text": lambda token: [token.hex(), 0, ROW_BYTES],
    "a token that cannot be a key": lambda _: [[], 0, ROW_BYTES],
    "a nested reference": lambda token: [[[token]], [[0]], [[ROW_BYTES]]],
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_of_another_form_is_refused(peer: RawPeer, name: str) -> None:
    token, fd = offered(peer)
    peer.send(infer_header(7, row(0), arena=REFERENCES[name](token)))
    failure = peer.refusal()
    assert (failure.code, failure.fields["field"]) == (
        "invalid_region",
        "token" if "token" in name else "reference" if name != "a nested reference" else "token",
    )
    works(peer, token, fd)
    os.close(fd)


def test_a_request_with_a_region_and_a_body_is_refused(peer: RawPeer) -> None:
    token, fd = offered(peer)
    peer.send(infer_header(7, row(0), arena=[token, 0, ROW_BYTES]), row(0).tobytes())
    assert peer.refusal().code == "malformed"
    works(peer, token, fd)
    os.close(fd)


def test_an_arena_is_its_own_clients_only(pool: Pool, peer: RawPeer) -> None:
    token, fd = offered(peer)
    with RawPeer(pool.endpoint) as other, RawPeer(pool.endpoint, linked=False) as without:
        for stranger in (other, without):
            stranger.send(infer_header(7, row(0), arena=[token, 0, ROW_BYTES]))
            failure = stranger.refusal()
            assert (failure.code, failure.fields["field"]) == ("invalid_region", "token")
    works(peer, token, fd)
    os.close(fd)


# What is no arena


def unsealed() -> int:
    return memfd(MIB, seals=SHRINK_UNSEALED)


def write_only() -> int:
    sealed = memfd(MIB)
    fd = os.open(f"/proc/self/fd/{sealed}", os.O_WRONLY)
    os.close(sealed)
    return fd


def plain_file() -> int:
    fd, path = tempfile.mkstemp()
    Path(path).unlink()
    os.ftruncate(fd, MIB)
    return fd


def shared_memory_file() -> int:
    fd, path = tempfile.mkstemp(dir="/dev/shm")
    Path(path).unlink()
    os.ftruncate(fd, MIB)
    return fd


NO_ARENA: dict[str, Callable[[], int]] = {
    "an unsealed memfd": unsealed,
    "a write-only memfd": write_only,
    "a plain file": plain_file,
    "a file in /dev/shm": shared_memory_file,
    "a folder": lambda: os.open("/", os.O_RDONLY),
    "/dev/zero": lambda: os.open("/dev/zero", os.O_RDWR),
    "an eventfd": lambda: os.eventfd(0),
    "a path only": lambda: os.open("/etc/passwd", os.O_PATH),
}


@pytest.mark.parametrize("name", NO_ARENA)
def test_a_descriptor_that_is_no_sealed_memory_is_refused_and_not_kept(pool: Pool, peer: RawPeer, name: str) -> None:
    fds = psutil.Process(pool.pid).num_fds()
    fd = NO_ARENA[name]()
    code, field = refused(peer, [fd], MIB)
    os.close(fd)
    assert (code, field) in {("invalid_region", "descriptor"), ("permission_denied", "")}
    assert psutil.Process(pool.pid).num_fds() == fds
    token, fd = offered(peer)
    works(peer, token, fd)
    os.close(fd)


@pytest.mark.parametrize("size", [0, -1, MIB - 1, MIB + 1, 2**32 + 1, 2**63, None, "1048576", 1048576.0, [MIB]])
def test_a_size_that_the_memory_does_not_have_is_refused(peer: RawPeer, size: Any) -> None:
    fd = memfd(MIB)
    assert refused(peer, [fd], size) == ("invalid_region", "size")
    os.close(fd)
    token, fd = offered(peer)
    works(peer, token, fd)
    os.close(fd)


def test_an_offer_without_a_descriptor_or_with_several_is_refused_and_none_is_kept(pool: Pool, peer: RawPeer) -> None:
    fds = psutil.Process(pool.pid).num_fds()
    several = [memfd(MIB) for _ in range(8)]
    for count in (0, 2, 4, 8):
        assert refused(peer, several[:count], MIB) == ("invalid_region", "descriptor")
    for fd in several:
        os.close(fd)
    assert psutil.Process(pool.pid).num_fds() == fds


def test_a_client_has_two_arenas_and_a_third_in_the_place_of_one_that_it_gives_back(peer: RawPeer) -> None:
    first, first_fd = offered(peer)
    second, second_fd = offered(peer, 2 * MIB)
    third_fd = memfd(MIB)
    assert refused(peer, [third_fd], MIB) == ("invalid_region", "count")
    peer.drop(first)
    third = peer.offer([third_fd], MIB)["token"]
    works(peer, second, second_fd, request_id=1)
    works(peer, third, third_fd, request_id=2)
    peer.send(infer_header(3, row(0), arena=[first, 0, ROW_BYTES]))
    assert peer.refusal().fields["field"] == "token"
    for fd in (first_fd, second_fd, third_fd):
        os.close(fd)


@pytest.mark.root
def test_memory_of_another_user_is_refused(peer: RawPeer) -> None:
    if os.getuid() != 0:
        pytest.skip("root: cannot give memory to another user")
    fd = memfd(MIB)
    os.fchown(fd, 65534, 65534)
    assert refused(peer, [fd], MIB) == ("permission_denied", "")
    os.close(fd)


@pytest.mark.parametrize("kind", [messages.ARENA, messages.ARENA_DROP])
def test_a_link_that_offers_before_it_says_hello_is_ended(pool: Pool, kind: int) -> None:
    path = link_path(pool.endpoint)
    assert path is not None
    link = Link.connect(path)
    fd = memfd(MIB)
    link.send(messages.encode(kind, size=MIB, token=[]), [fd])
    os.close(fd)
    with pytest.raises(LinkClosed):
        record(link)
    link.close()


# D4


def test_arenas_that_the_config_turns_off_are_refused_and_the_library_sends_bodies_instead() -> None:
    with Pool({"large": echo(4, tensors=LARGE)}, broker={"arenas": False}) as pool, pool.client() as client:
        with RawPeer(pool.endpoint) as peer:
            assert peer.welcome["arenas"] is False
            fd = memfd(MIB)
            assert refused(peer, [fd], MIB)[0] == "permission_denied"
            os.close(fd)
            array = np.ones((1, 32768), np.float32)
            peer.send(infer_header(7, array, model="large", arena=[bytes(16), 0, array.nbytes]))
            assert peer.refusal().code == "invalid_region"
        array = np.arange(3 * 32768, dtype=np.float32).reshape(3, -1)
        assert (client.infer("large", {"x": array})["y"] == array).all()
        assert mapped(pool) == 0


def mapped(pool: Pool) -> int:
    """How many client arenas the broker has mapped."""
    return Path(f"/proc/{pool.pid}/maps").read_text().count("memfd:mxpool-")


@pytest.mark.parametrize("end", ["drop", "link", "client"])
def test_an_arena_that_goes_while_requests_of_it_wait_ends_them_cleanly_and_is_unmapped(end: str) -> None:
    with Gate() as gate, Pool({"echo": echo(1, gate=gate.path)}) as pool, RawPeer(pool.endpoint) as peer:
        token, fd = offered(peer)
        for number in range(20):
            os.pwrite(fd, row(number).tobytes(), number * ROW_BYTES)
            peer.send(infer_header(number + 1, row(number), arena=[token, number * ROW_BYTES, ROW_BYTES]))
        os.close(fd)
        wait_running(pool)
        wait_queued(pool, 19)
        assert mapped(pool) == 1
        if end == "drop":
            peer.drop(token)
        elif end == "link":
            assert peer.link is not None
            peer.link.close()
        else:
            peer.close()
        if end != "drop":
            wait_queued(pool, 0)
        gate.let(20)
        wait_until(lambda: not mapped(pool), "no arena is mapped")
        if end == "drop":
            seen: dict[int, float] = {}
            while len(seen) < 20:
                frames = peer.frames()
                assert frames is not None
                answer = wire.decode_answer(frames[0])
                assert isinstance(answer, wire.Result)
                seen.update(zip(answer.ids, np.frombuffer(frames[1], np.float32)[::4], strict=True))
            assert seen == {number + 1: float(number) for number in range(20)}
            peer.send(infer_header(99, row(0), arena=[token, 0, ROW_BYTES]))
            assert peer.refusal().code == "invalid_region"
        with pool.client() as client:
            gate.let(1)
            assert client.infer("echo", {"x": row(3)})["y"][0, 0] == 3


# Both ways give the same


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_answers_are_the_same_by_arena_and_by_body(pool: Pool, rows: int) -> None:
    random = np.random.default_rng(rows)
    arrays = {
        "a": random.standard_normal((rows, 20_000), np.float32),
        "b": random.integers(0, 256, (rows, 5, 3001), np.uint8),
    }
    with pool.client() as client, Pool({"pair": pool.tree["models"]["pair"]}, broker={"arenas": False}) as without:
        by_arena = client.infer("pair", arrays)
        assert mapped(pool) == 1
        with without.client() as other:
            by_body = other.infer("pair", arrays)
        assert mapped(without) == 0
        for name in ("a", "b"):
            assert (by_arena[f"y_{name}"] == arrays[name]).all()
            assert by_arena[f"y_{name}"].tobytes() == by_body[f"y_{name}"].tobytes()


def test_an_arena_that_is_full_makes_room_or_the_rest_goes_as_bodies(pool: Pool) -> None:
    count = 600  # of 128 KB each: more than the arena has
    frames = ({"x": np.full((1, 32768), number, np.float32)} for number in range(count))
    with pool.client() as client:
        for number, outputs in enumerate(client.push("large", frames, in_flight=count)):
            assert (outputs["y"] == number).all()
