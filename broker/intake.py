"""What a message asks for, and the answer to one that asks for nothing sensible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq

from mxpool import errors, wire
from mxpool.broker.clients import Client, ClientBook
from mxpool.broker.control import Order
from mxpool.broker.front import Front
from mxpool.broker.served import ServedModel
from mxpool.clock import now_us
from mxpool.errors import MxPoolError

log = logging.getLogger(__name__)

Control = Callable[[Order], None]


class Intake:
    """Takes each message apart, checks it, and gives it to its model or to ``control``."""

    def __init__(self, front: Front, book: ClientBook, models: dict[str, ServedModel], control: Control) -> None:
        self._front = front
        self._book = book
        self._models = models
        self._control = control
        self.greeting: dict[str, Any] = {}
        self.refused = 0

    def take(self, client: Client, header: zmq.Frame, body: zmq.Frame | None, frames: int) -> None:
        """Handle one message. Whatever a client sends, its answer is a typed error at worst."""
        data = header.bytes
        try:
            request = wire.decode_request(data)
            if frames > 2:
                raise errors.MalformedMessage(reason=f"{frames} frames, at most 2")
            if request.kind == wire.INFER:
                self._infer(client, request, body)
                return
            if body is not None:
                raise errors.MalformedMessage(reason="only INFER has a body")
            if request.kind == wire.CANCEL:
                self._cancel(client, request.request_id)
            elif request.kind == wire.HELLO:
                self._hello(client, request)
            else:
                self._answer_control(client, request, header)
        except MxPoolError as error:
            self._refuse(client, data, error)
        except Exception:  # the boundary: no bytes of a client's may end the broker
            log.exception("a message could not be handled")
            self._refuse(client, data, errors.MalformedMessage(reason="it could not be handled"))

    def _refuse(self, client: Client, data: bytes, error: MxPoolError) -> None:
        self.refused += 1
        self._front.send(client, wire.encode_error(wire.readable_id(data), error), None)

    def _infer(self, client: Client, request: wire.Request, body: zmq.Frame | None) -> None:
        model = self._models.get(request.model)
        if model is None:
            raise errors.UnknownModel(model=request.model)
        content: bytes | memoryview
        if request.extensions and "arena" in request.extensions:
            if body is not None:
                raise errors.MalformedMessage(reason="a request has a body or an arena region, not both")
            if client.peer is None:
                raise errors.InvalidRegion(field="token", reason="this client has no link")
            content = client.peer.arena(request.extensions["arena"])
        elif body is None:
            raise errors.MalformedMessage(reason="INFER without a body")
        else:
            content = body.buffer
        model.admit(client, request, content, now_us())

    def _cancel(self, client: Client, request_id: int) -> None:
        ticket = client.tickets.get(request_id)
        if ticket is not None:
            ticket.model.cancel(ticket, errors.Cancelled(), "cancelled")

    def _hello(self, client: Client, request: wire.Request) -> None:
        if "token" in request.extensions:
            self._book.tie(client, request.extensions["token"])
        self._front.send(client, wire.encode_reply(request.request_id, self.greeting), None)

    def _answer_control(self, client: Client, request: wire.Request, header: zmq.Frame) -> None:
        arguments = dict(request.extensions)
        verb = arguments.pop("verb", None)
        if type(verb) is not str:
            raise errors.UnknownVerb(verb=type(verb).__name__)

        def reply(answer: dict[str, Any] | MxPoolError) -> None:
            if isinstance(answer, MxPoolError):
                self._front.send(client, wire.encode_error(request.request_id, answer), None)
            else:
                self._front.send(client, wire.encode_reply(request.request_id, answer), None)

        self._control(Order(verb, request.model, arguments, _uid(header, client), reply, client))


def _uid(header: zmq.Frame, client: Client) -> int | None:
    """The sender's user as the kernel told libzmq (``localhost:UID:GID:PID`` on ipc); None on tcp."""
    if client.peer is not None:
        return client.peer.uid
    try:
        parts = str(header.get("Peer-Address")).split(":")
        return int(parts[1]) if len(parts) == 4 else None
    except (zmq.ZMQError, ValueError):
        return None
