"""Opening a connection: the link's WELCOME, the DEALER, and the HELLO that ties the two together."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import zmq

from mxpool import errors, messages, wire
from mxpool.client.connection import MONITORED, Connection, await_record
from mxpool.client.wakeup import Wakeup
from mxpool.errors import BrokerLost, DeadlineExceeded, MalformedMessage, MxPoolError
from mxpool.shm.link import Link, LinkClosed, link_path

CONNECT_MAX_S = 1.0  # a broker on this host welcomes within milliseconds
NEVER_MS = 2**30 - 1  # libzmq adds up to as much again at random, in 32 bits
TCP_HEARTBEAT_MS = 10_000
HELLO_ID = 1  # the first request of every connection


def connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, wakeup: Wakeup, timeout_s: float) -> Connection:
    """Open a connection and be greeted, within ``timeout_s`` and CONNECT_MAX_S. ``wakeup`` cuts later waits short.

    Raises:
        BrokerLost: if no broker answers there within CONNECT_MAX_S.
        DeadlineExceeded: if ``timeout_s`` ended before that: it says nothing of the broker.
        MxPoolError: if the broker refuses us, typed as it says. Nothing stays open in any case.
    """
    begin_s = time.monotonic()
    try:
        return _connect(context, endpoint, wakeup, begin_s + min(timeout_s, CONNECT_MAX_S))
    except BrokerLost:
        if timeout_s < CONNECT_MAX_S and time.monotonic() >= begin_s + timeout_s:
            raise DeadlineExceeded(timeout_s=max(timeout_s, 0)) from None
        raise


def _connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, wakeup: Wakeup, end_s: float) -> Connection:
    path = link_path(endpoint)
    link = None
    try:
        welcome: dict[str, Any] = {}
        if path is not None:
            link = Link.connect(path)
            welcome = _welcome(link, end_s - time.monotonic())
        connection = Connection(endpoint, _dealer(context, endpoint), link, wakeup)
    except (OSError, zmq.ZMQError, LinkClosed, MxPoolError) as error:
        if link is not None:
            link.close()
        if isinstance(error, MxPoolError) and not isinstance(error, MalformedMessage):
            raise
        raise BrokerLost(endpoint=endpoint, reason=getattr(error, "strerror", None) or str(error)) from None
    try:
        _introduce(connection, welcome.get("token", b""), end_s)
        connection.arenas = welcome.get("arenas", False)
    except BaseException:
        connection.close()
        raise
    return connection


def _dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0  # a program that ends does not wait for a broker that is gone
    socket.sndhwm = 0  # bounded by what is in flight; a full pipe would otherwise look like a lost broker
    socket.rcvhwm = 0  # the broker's outbox is the limit
    # Never again, by a time in days: the proper value, -1, and "immediate" end the pipe with the connection, and so
    # lose answers that were received and not yet taken (libzmq 4.3.5, session_base.cpp, reconnect).
    socket.reconnect_ivl = NEVER_MS
    monitor = None
    if endpoint.startswith("tcp://"):
        socket.heartbeat_ivl = TCP_HEARTBEAT_MS
        socket.ipv6 = "[" in endpoint
        monitor = socket.get_monitor_socket(MONITORED)  # from before the connect: a refusal is told once
    try:
        socket.connect(endpoint)
    except BaseException:
        if monitor is not None:
            monitor.close(linger=0)
        socket.close()
        raise
    return socket


def _welcome(link: Link, timeout_s: float) -> dict[str, Any]:
    with contextlib.suppress(LinkClosed):  # a broker that takes no more clients has said so already
        link.send(messages.encode(messages.HELLO, role="client", version=messages.LINK_VERSION, pid=os.getpid()))
    return await_record(link, timeout_s, messages.WELCOME, messages.REFUSED)


def _introduce(connection: Connection, token: bytes, end_s: float) -> None:
    """Say HELLO and read the REPLY: the link and the DEALER are one client from now on."""
    extensions = {"token": token} if token else {}
    connection.send(wire.encode_request(wire.HELLO, HELLO_ID, extensions=extensions))
    while not connection.wait(_left_us(end_s)):
        if time.monotonic() >= end_s:
            raise connection.lost("no answer to HELLO in time")
    answer = connection.receive()
    if isinstance(answer, wire.Failure):
        raise errors.from_wire(answer.code, answer.message, answer.fields)
    if not isinstance(answer, wire.Reply):
        raise connection.lost("the first answer was not to HELLO")
    connection.epoch = answer.payload["epoch"]
    connection.message_bytes_max = answer.payload["max_message_bytes"]


def _left_us(end_s: float) -> int:
    return round((end_s - time.monotonic()) * 1e6)
