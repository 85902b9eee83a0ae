from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from recorded_front import RecordedFront
from served_models import Jobs, open_slots, served

from mxpool import errors, wire
from mxpool.broker.clients import Client, ClientBook, Peer
from mxpool.broker.control import Order
from mxpool.broker.intake import Intake
from mxpool.broker.served import ServedModel
from mxpool.shm.link import Link

ROW = np.array([1, 2, 3], "<f4").tobytes() + np.array([7], "<i8").tobytes()
TENSORS = wire.encode_tensors([("a", "FP32", (1, 3)), ("b", "INT64", (1,))])


class Rig:
    """An intake with one model, one client, and an administrator's ear for control orders."""

    def __init__(self, model: ServedModel, front: RecordedFront) -> None:
        self.model, self.front = model, front
        self.book = ClientBook(4, 1000)
        self.orders: list[Order] = []
        self.intake = Intake(front, self.book, {model.name: model}, self.orders.append)
        self.intake.greeting = {"version": 1, "epoch": 5}
        self.client = self.book.meet(b"me")

    def take(self, header: bytes, body: bytes | None = None, frames: int | None = None) -> None:
        count = frames or (1 if body is None else 2)
        self.intake.take(self.client, zmq.Frame(header), None if body is None else zmq.Frame(body), count)

    def infer(self, number: int = 1, model: str = "ranking", body: bytes | None = ROW, **extensions: Any) -> None:
        self.take(wire.encode_request(wire.INFER, number, model, 0, 1, TENSORS, extensions), body)

    def failure(self) -> tuple[int, str]:
        failure = self.front.last()
        assert isinstance(failure, wire.Failure)
        return failure.request_id, failure.code


@pytest.fixture
def rig() -> Iterator[Rig]:
    front = RecordedFront()
    model = served(front=front, jobs=Jobs())
    open_slots(model)
    yield Rig(model, front)
    model.close()


def linked(rig: Rig) -> tuple[Peer, Link]:
    ours, theirs = Link.pair()
    peer = Peer(ours)
    rig.book.peers[peer.token] = peer
    return peer, Link(theirs)


def test_a_good_request_waits_for_its_run_and_is_not_answered_yet(rig: Rig) -> None:
    rig.infer(12)
    assert rig.front.answers == []
    assert (list(rig.client.tickets), rig.model.core.depth, rig.intake.refused) == ([12], 1, 0)


@pytest.mark.parametrize(
    ("header", "body", "frames", "request_id", "code"),
    [
        (b"", None, 1, 0, "malformed"),
        (b"\xc1", None, 1, 0, "malformed"),
        (msgpack.packb([2, 1, 77]), None, 1, 77, "unsupported_version"),
        (wire.encode_request(wire.INFER, 8, "ranking", 0, 1, TENSORS), ROW, 3, 8, "malformed"),
        (wire.encode_request(wire.INFER, 8, "ranking", 0, 1, TENSORS), None, 1, 8, "malformed"),
        (wire.encode_request(wire.INFER, 8, "ranking", 0, 1, TENSORS), ROW + b"x", 2, 8, "invalid_tensor"),
        (wire.encode_request(wire.INFER, 8, "ranking", 0, 2, TENSORS), ROW, 2, 8, "invalid_request"),
        (wire.encode_request(wire.INFER, 8, "other", 0, 1, TENSORS), ROW, 2, 8, "unknown_model"),
        (wire.encode_request(wire.INFER, 8, "", 0, 1, TENSORS), ROW, 2, 8, "unknown_model"),
        (wire.encode_request(wire.CANCEL, 8), ROW, 2, 8, "malformed"),
        (wire.encode_request(wire.HELLO, 8), b"", 2, 8, "malformed"),
        (wire.encode_request(wire.HELLO, 8, extensions={"token": b"x" * 16}), None, 1, 8, "permission_denied"),
        (wire.encode_request(wire.CONTROL, 8), None, 1, 8, "unknown_verb"),
        (wire.encode_request(wire.CONTROL, 8, extensions={"verb": 5}), None, 1, 8, "unknown_verb"),
        (wire.encode_request(wire.CONTROL, 8, extensions={"verb": ["x" * 999]}), None, 1, 8, "unknown_verb"),
    ],
    ids=str,
)
def test_bad_messages_get_one_typed_error_and_the_next_good_one_works(
    rig: Rig, header: bytes, body: bytes | None, frames: int, request_id: int, code: str
) -> None:
    rig.take(header, body, frames)
    assert len(rig.front.answers) == 1
    assert rig.failure() == (request_id, code)
    assert (rig.client.tickets, rig.model.core.depth, rig.intake.refused) == ({}, 0, 1)
    rig.infer(9)
    assert list(rig.client.tickets) == [9]


@given(data=st.data())
def test_no_bytes_of_a_client_escape_as_another_error(data: st.DataObject) -> None:
    front = RecordedFront()
    model = served(front=front, jobs=Jobs())
    rig = Rig(model, front)
    kind = data.draw(st.integers(1, 4))
    choices: list[dict[str, Any]] = [{}, {"verb": "stats"}, {"token": b"1"}, {"arena": [b"t", 0, 4]}]
    extensions = data.draw(st.sampled_from(choices))
    good = bytearray(wire.encode_request(kind, 8, "ranking", 0, 1, TENSORS, extensions))
    for _ in range(data.draw(st.integers(0, 2))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    rig.take(bytes(good), data.draw(st.sampled_from([None, b"", ROW])))
    assert len(front.answers) <= 1


def test_an_error_that_we_did_not_foresee_is_answered_and_logged_not_raised(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_order: Order) -> None:
        raise ZeroDivisionError

    rig.intake = Intake(rig.front, rig.book, {}, broken)
    rig.take(wire.encode_request(wire.CONTROL, 3, extensions={"verb": "list"}))
    assert rig.failure() == (3, "malformed")
    assert "ZeroDivisionError" in caplog.text


def test_the_same_id_twice_is_refused_while_the_first_waits(rig: Rig) -> None:
    rig.infer(4)
    rig.infer(4)
    assert rig.failure() == (4, "invalid_request")
    assert rig.model.core.depth == 1


def test_a_cancel_is_answered_by_its_request_and_one_for_an_unknown_id_by_nothing(rig: Rig) -> None:
    rig.infer(4)
    rig.take(wire.encode_request(wire.CANCEL, 5))
    assert rig.front.answers == []
    rig.take(wire.encode_request(wire.CANCEL, 4))
    assert rig.failure() == (4, "cancelled")
    rig.take(wire.encode_request(wire.CANCEL, 4))
    assert (len(rig.front.answers), rig.client.tickets, rig.model.core.depth) == (1, {}, 0)


def test_one_client_cannot_cancel_anothers_request(rig: Rig) -> None:
    rig.infer(4)
    other = rig.book.meet(b"other")
    rig.intake.take(other, zmq.Frame(wire.encode_request(wire.CANCEL, 4)), None, 1)
    assert (rig.front.answers, list(rig.client.tickets)) == ([], [4])


def test_hello_is_greeted_and_a_token_ties_the_client_to_its_link(rig: Rig) -> None:
    peer, theirs = linked(rig)
    rig.take(wire.encode_request(wire.HELLO, 1))
    assert (rig.front.last(), rig.client.peer) == (wire.Reply(1, {"version": 1, "epoch": 5}), None)
    rig.take(wire.encode_request(wire.HELLO, 2, extensions={"token": peer.token}))
    assert (rig.front.last(), rig.client.peer) == (wire.Reply(2, {"version": 1, "epoch": 5}), peer)
    peer.close()
    theirs.close()


def test_arena_references_need_a_link_an_arena_and_no_body(rig: Rig) -> None:
    rig.infer(1, body=None, arena=[b"t", 0, len(ROW)])
    assert rig.failure() == (1, "invalid_region")
    peer, theirs = linked(rig)
    rig.book.tie(rig.client, peer.token)
    rig.infer(2, body=None, arena=[b"t", 0, len(ROW)])
    assert rig.failure() == (2, "invalid_region")
    rig.infer(3, body=ROW, arena=[b"t", 0, len(ROW)])
    assert rig.failure() == (3, "malformed")
    peer.close()
    theirs.close()


def test_control_orders_carry_verb_model_arguments_and_user_and_are_answered_once(rig: Rig) -> None:
    peer, theirs = linked(rig)
    rig.book.tie(rig.client, peer.token)
    rig.take(wire.encode_request(wire.CONTROL, 6, "ranking", extensions={"verb": "scale", "workers": 2}))
    (order,) = rig.orders
    assert order[:4] == ("scale", "ranking", {"workers": 2}, peer.uid)
    assert rig.front.answers == []
    order.answer({"done": True})
    assert rig.front.last() == wire.Reply(6, {"done": True})
    order.answer(errors.PermissionDenied(uid=1, action="x"))
    assert rig.failure() == (6, "permission_denied")
    peer.close()
    theirs.close()


def test_without_a_link_or_an_ipc_peer_the_user_is_unknown(rig: Rig) -> None:
    rig.take(wire.encode_request(wire.CONTROL, 6, extensions={"verb": "list"}))
    assert rig.orders[0].uid is None


def test_clients_are_counted_apart(rig: Rig) -> None:
    other: Client = rig.book.meet(b"other")
    rig.infer(1)
    rig.intake.take(other, zmq.Frame(wire.encode_request(wire.INFER, 1, "ranking", 0, 1, TENSORS)), zmq.Frame(ROW), 2)
    assert (rig.model.core.depth, list(rig.client.tickets), list(other.tickets)) == (2, [1], [1])
