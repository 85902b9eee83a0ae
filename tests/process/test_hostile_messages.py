"""What strangers may send to the broker's sockets, and that nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import psutil
import pytest
import zmq
from gates import x
from hostile import BODY, Message, infer, packed
from pool import Pool, echo, soak, wait_until
from raw_peer import RawPeer, memfd, record, wait_closed, welcomed
from worker_rig import WorkerRig, make_spec

from mxpool import Client, messages, wire
from mxpool.shm.link import Link, LinkClosed, link_path

COUNT = soak(10_000)
CHUNK = 100
GROWTH_BYTES_MAX = 10 << 20
WAIT_MAX_S = 2.0  # of a good request beside the flood, on a machine with two cores


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool({"echo": echo()}, broker={"max_message_bytes": 1 << 20}) as pool:
        yield pool


@pytest.fixture
def peer(pool: Pool) -> Iterator[RawPeer]:
    with RawPeer(pool.endpoint) as peer:
        yield peer


def good(peer: RawPeer, request_id: int = 2**40) -> None:
    """The peer itself is served as before."""
    peer.send(*infer(request_id))
    frames = peer.frames()
    assert frames is not None
    tensors = wire.encode_tensors([("y", "FP32", (1, 4))])
    assert wire.decode_answer(frames[0]) == wire.Result([request_id], [1], tensors)
    assert frames[1] == BODY


class Neighbour:
    """Another client that asks all the while; its answers are right, and none takes long."""

    def __init__(self, endpoint: str) -> None:
        self.longest_s = 0.0
        self.asked = 0
        self.fault: BaseException | None = None
        self._client = Client(endpoint)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()
        if self.fault is not None:
            raise self.fault
        assert self.asked > 0
        assert self.longest_s < WAIT_MAX_S

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                began_s = time.monotonic()
                assert self._client.infer("echo", x(self.asked))["y"][0, 0] == self.asked
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                self.asked += 1
        except BaseException as error:  # noqa: BLE001 - raised by __exit__
            self.fault = error


# N1


@pytest.mark.parametrize("name", hostile.UNREADABLE)
@pytest.mark.parametrize("more", [0, 1, 2, 1000])
def test_a_header_that_cannot_be_read_has_one_malformed_answer(peer: RawPeer, name: str, more: int) -> None:
    header = hostile.UNREADABLE[name]
    peer.send(header, *[b"x"] * more)
    [failure] = peer.answers_until_sync()
    assert isinstance(failure, wire.Failure)
    assert (failure.code, failure.request_id) == ("malformed", wire.readable_id(header))
    assert len(failure.message) < 200
    good(peer)


@pytest.mark.parametrize("more", [2, 3, 1000])
def test_a_good_request_with_more_frames_than_two_is_refused_by_its_id_and_not_run(
    pool: Pool, peer: RawPeer, more: int
) -> None:
    before = pool.model()["received"]
    peer.send(*infer(7), *[b""] * (more - 1))
    [failure] = peer.answers_until_sync()
    assert isinstance(failure, wire.Failure)
    assert (failure.code, failure.request_id) == ("malformed", 7)
    assert pool.model()["received"] == before
    good(peer)


@pytest.mark.parametrize("value", range(len(hostile.ODD)))
@pytest.mark.parametrize("field", ["version", "kind", "id", "model", "deadline", "rows", "tensors", "extensions"])
def test_every_field_at_its_bounds_has_at_most_one_answer(peer: RawPeer, field: str, value: int) -> None:
    peer.send(*infer(7, **{field: hostile.ODD[value]}))
    answers = peer.answers_until_sync()
    assert len(answers) <= 1
    for answer in answers:
        assert not isinstance(answer, wire.Failure) or answer.request_id in (0, 7, hostile.ODD[value])
    if not answers:  # it was a good one after all: its answer comes when it has run
        answer = peer.answer()
        if isinstance(answer, wire.Failure):  # or when its time is over, which may be on arrival
            assert (field, answer.code) == ("deadline", "deadline_exceeded")
            assert answer.fields["timeout_s"] >= 0
    good(peer)


def test_a_flood_of_hostile_messages_is_answered_one_by_one_and_nobody_else_notices(pool: Pool) -> None:
    stream = hostile.stream(seed=20_241, count=COUNT + 2 * CHUNK)
    with RawPeer(pool.endpoint) as peer, Neighbour(pool.endpoint):
        for chunk in (list(itertools.islice(stream, CHUNK)) for _ in range(2)):
            check_answers(peer, chunk)  # what it takes once is not growth
        rss, fds = pool.rss_bytes(), psutil.Process(pool.pid).num_fds()
        while chunk := list(itertools.islice(stream, CHUNK)):
            check_answers(peer, chunk)
        assert pool.rss_bytes() - rss < GROWTH_BYTES_MAX
        assert psutil.Process(pool.pid).num_fds() <= fds
    with RawPeer(pool.endpoint) as another:
        good(another)
    assert "Traceback" not in pool.log()
    assert pool.model()["queue_depth"] == 0


def check_answers(peer: RawPeer, chunk: list[Message]) -> None:
    """Each message has at most one answer, and each that must be refused exactly one."""
    for message in chunk:
        peer.send(*message.frames)
    answered = peer.answers_until_sync()
    errors = Counter(answer.request_id for answer in answered if isinstance(answer, wire.Failure))
    for message in chunk:
        if message.once and message.request_id > 1:
            assert errors[message.request_id] == 1, message
    assert errors[0] >= sum(message.once and message.request_id == 0 for message in chunk)
    assert len(answered) <= 2 * CHUNK  # a good one among them may have its answer with the next chunk


def test_a_flood_of_hostile_records_on_links_ends_each_link_and_no_other(pool: Pool) -> None:
    path = link_path(pool.endpoint)
    assert path is not None
    fds = psutil.Process(pool.pid).num_fds()
    with Neighbour(pool.endpoint):
        for number, data in enumerate(hostile.records(seed=7, count=COUNT)):
            link = welcomed(pool.endpoint)[0] if number % 2 else Link.connect(path)
            with contextlib.suppress(LinkClosed):
                link.send(data, [0, 1] if number % 3 == 0 else [])
                if number % 2:
                    link.send(b"\xff")  # damage may leave a record whole: this one ends every link
                    wait_closed(link)
            link.close()
    wait_until(lambda: pool.stats()["broker"]["linked_clients"] == 1, "no link but our own")
    assert psutil.Process(pool.pid).num_fds() <= fds
    assert "Traceback" not in pool.log()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        bytes(65_537),
        messages.encode(messages.WELCOME, epoch=1),
        messages.encode(messages.HELLO, role="client", version=messages.LINK_VERSION, pid=1),
        messages.encode(messages.ARENA_DROP, token=[]),
        messages.encode(messages.ARENA_DROP, token={}),
    ],
)
def test_a_record_that_has_no_place_after_hello_ends_the_link_and_its_client(pool: Pool, data: bytes) -> None:
    with RawPeer(pool.endpoint) as peer:
        assert peer.link is not None
        peer.link.send(data)
        with pytest.raises(LinkClosed):
            record(peer.link)
    wait_until(lambda: pool.stats()["broker"]["linked_clients"] == 1, "the end of the client")


def test_bytes_that_are_no_zmtp_end_their_connection_and_no_other(pool: Pool) -> None:
    random_ = random.Random(3)
    connected = pool.stats()["broker"]["connected_clients"]
    with Neighbour(pool.endpoint):
        for number in range(soak(1000)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger, contextlib.suppress(OSError):
                stranger.settimeout(5)
                stranger.connect(pool.endpoint[6:])
                greeting = b"\xff" + bytes(8) + b"\x7f\x03" if number % 2 else b""
                stranger.sendall(greeting + random_.randbytes(random_.choice([1, 64, 4096])))
    wait_until(lambda: pool.stats()["broker"]["connected_clients"] == connected, "nobody but those of before", 5)


def test_a_message_beyond_max_message_bytes_ends_its_senders_connection_and_no_other(pool: Pool) -> None:
    with RawPeer(pool.endpoint) as peer, Neighbour(pool.endpoint):
        rss = pool.rss_bytes()
        monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.send(*infer(7, body=[bytes(8 << 20)]))
        cut_off = monitor.poll(5000)
        peer.socket.disable_monitor()
        monitor.close()
        assert cut_off
        assert pool.rss_bytes() - rss < GROWTH_BYTES_MAX


# N3


class Touches:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkfifo, (self._path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_socket_of_the_broker_unpickles(pool: Pool, tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "made"
    payload = pickle.dumps(Touches(path), protocol)
    with RawPeer(pool.endpoint) as peer:
        for frames in (
            [payload],
            [payload, payload],
            infer(7, body=[payload]),
            infer(7, tensors=payload),
            infer(7, body=[], kind=wire.CONTROL, extensions={"verb": payload}),
            infer(7, body=[], kind=wire.CONTROL, extensions={"verb": "stats", "pickle": payload}),
            infer(7, body=[], kind=wire.HELLO, extensions={"token": payload}),
            infer(7, body=[], extensions={"arena": [payload, payload, payload]}),
        ):
            peer.send(*frames)
        assert len(peer.answers_until_sync()) == 8
        good(peer)
        fd = memfd(4096)
        os.pwrite(fd, payload, 0)
        assert "token" in peer.offer([fd], 4096)
        os.close(fd)
        assert peer.link is not None
        peer.link.send(payload)
        wait_closed(peer.link)
    with closing(Link.connect(Path(f"{pool.endpoint[6:]}.link"))) as link:
        link.send(payload)
        wait_closed(link)
    assert not path.exists()
    pickle.loads(payload)  # and it would have
    assert path.exists()


def test_a_worker_does_not_unpickle_what_its_link_says(tmp_path: Path) -> None:
    payload = pickle.dumps(Touches(tmp_path / "made"))
    for before in ("hello", "ready"):
        with WorkerRig(make_spec(backend="echo")) as rig:
            if before == "ready":
                rig.ready()
            rig.link.send(payload)
            rig.link.send(bytes((messages.LOAD,)) + packed({"worker": payload, "model": payload, "spec": payload}))
            assert rig.exit_code(10) != 0
    assert not (tmp_path / "made").exists()


# N5


@pytest.mark.parametrize("version", [0, 2, 255, 2**31])
@pytest.mark.parametrize("kind", [wire.INFER, wire.CONTROL, wire.HELLO])
def test_another_version_is_refused_with_the_versions_that_are_supported(
    peer: RawPeer, version: int, kind: int
) -> None:
    peer.send(*infer(7, version=version, kind=kind, body=[]))
    failure = peer.refusal()
    assert (failure.request_id, failure.code) == (7, "unsupported_version")
    assert failure.fields == {"version": version, "minimum": wire.VERSION, "maximum": wire.VERSION}
    good(peer)


def test_another_version_is_refused_as_such_however_its_header_goes_on(peer: RawPeer) -> None:
    for header in ([2], [2, 1, 7], [2, {"id": 7}, 7, []], [2, *range(20)]):
        peer.send(packed(header), b"body")
        assert peer.refusal().code == "unsupported_version"
    good(peer)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_version_on_the_link_is_refused_by_name(pool: Pool, version: Any) -> None:
    with closing(Link.connect(Path(f"{pool.endpoint[6:]}.link"))) as link:
        link.send(messages.encode(messages.HELLO, role="client", version=version, pid=1))
        kind, fields = record(link)
        assert (kind, fields["code"]) == (messages.REFUSED, "rejected")
        assert str(messages.LINK_VERSION) in fields["message"]
        wait_closed(link)


def test_unknown_extensions_are_ignored_and_missing_ones_have_their_defaults(peer: RawPeer) -> None:
    later = {"trace": "00-ab", "priority": 7, "nested": {"deep": [1, {"x": None}]}, "": b""}
    peer.send(*infer(3, extensions=later))
    answer = peer.answer()
    assert isinstance(answer, wire.Result)
    assert answer.ids == [3]
    for number, verb in enumerate(("live", "ready", "list", "stats"), 10):
        peer.send(*infer(number, body=[], kind=wire.CONTROL, model="", extensions={"verb": verb, **later}))
        reply = peer.answer()
        assert isinstance(reply, wire.Reply)
        assert reply.request_id == number
    peer.send(*infer(20, body=[], kind=wire.CONTROL, extensions={}))
    assert peer.refusal().code == "unknown_verb"
    good(peer)


def test_an_id_that_is_in_use_is_refused_and_the_first_request_still_has_its_answer(pool: Pool, peer: RawPeer) -> None:
    with Pool({"echo": echo(delay_ms=300)}) as slow, RawPeer(slow.endpoint) as own:
        own.send(*infer(7))
        own.send(*infer(7))
        assert own.refusal().code == "invalid_request"
        assert isinstance(own.answer(), wire.Result)
    array = np.frombuffer(BODY, np.float32).reshape(1, 4)
    with pool.client() as client:
        assert (client.infer("echo", {"x": array})["y"] == array).all()
    good(peer)
