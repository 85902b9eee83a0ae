"""One connection to a broker: a DEALER socket and, on ipc, the link that tells at once when the broker is gone."""

from __future__ import annotations

import os
import select
import weakref
from typing import Any, NamedTuple

import numpy as np
import zmq

from mxpool import errors, messages, wire
from mxpool.client.results import Layouts, Outputs, split
from mxpool.client.wakeup import Wakeup
from mxpool.errors import BrokerLost, MalformedMessage
from mxpool.shm.link import Link, LinkClosed

LAST_ANSWERS_MS = 100
WAIT_MAX_US = 3_600_000_000  # poll(2) takes an int of milliseconds

_RECEIVE = int(zmq.NOBLOCK)  # plain integers: enum arithmetic costs as much as a send
_SEND = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
MONITORED = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)


class Results(NamedTuple):
    """Answers that came in one message: ``outputs[i]`` for the request ``ids[i]``."""

    ids: list[int]
    outputs: list[Outputs]


class Connection:
    """An open connection, greeted by the broker. Not thread-safe. Made by ``greeting.connect``.

    Any BrokerLost that leaves it means that it is broken for good: close it and open another one. It never reconnects
    by itself, because a new broker knows none of its requests.
    """

    def __init__(self, endpoint: str, socket: zmq.Socket[bytes], link: Link | None, wakeup: Wakeup) -> None:
        self.endpoint = endpoint
        self.epoch = 0
        self.message_bytes_max = 0
        self.arenas = False
        self._socket = socket
        self._link = link
        self._monitor = socket.get_monitor_socket(MONITORED) if link is None else None
        self._layouts = Layouts()
        # Not zmq.Poller: it costs three times as much, in the time that a lone request waits.
        self._poll = select.poll()
        for source in (socket, wakeup, link, self._monitor):
            if source is not None:
                self._poll.register(source.fileno(), select.POLLIN)
        if link is not None:
            _open_links.add(link)

    @property
    def absolute_deadlines(self) -> bool:
        """True where both ends read the same clock."""
        return self._link is not None

    def lost(self, reason: str) -> BrokerLost:
        """The error that says so."""
        return BrokerLost(endpoint=self.endpoint, reason=reason)

    def send(self, header: bytes, body: bytes | None = None) -> None:
        """Queue one message for the I/O thread; never waits, and takes copies.

        Raises:
            BrokerLost: if there is no connection any more; nothing was queued.
        """
        try:
            if body is None:
                self._socket.send(header, _SEND)
            else:
                self._socket.send(header, _SEND_MORE)
                self._socket.send(body, _SEND)
        except zmq.ZMQError as error:
            raise self.lost(f"nothing can be sent: {error}") from None

    def readable(self) -> bool:
        """True if ``receive`` has something."""
        events: Any = self._socket.getsockopt(_EVENTS)
        return bool(events & _READABLE)

    def wait(self, wait_us: int) -> bool:
        """``readable``, after a wait of up to ``wait_us`` (rounded up to 1 ms), which ``wakeup`` may cut short.

        Raises:
            BrokerLost: if the broker is gone and everything it had sent was received. Noticed only by waiting.
        """
        if self.readable():
            return True
        if wait_us <= 0:
            return False
        if self._monitor is not None:
            self.check()  # its descriptor tells only of what comes after a look
        self._poll.poll(-(-min(wait_us, WAIT_MAX_US) // 1000))
        if self.readable():
            return True
        try:
            self.check()
        except BrokerLost:
            # The link's end may overtake answers that were sent before it.
            if self._link is not None and self._socket.poll(LAST_ANSWERS_MS):
                return True
            raise
        return False

    def check(self) -> None:
        """BrokerLost if the broker is gone; does not wait."""
        if self._link is not None:
            if self._link.readable():
                self._read_link(self._link)
        elif self._monitor is not None and self._monitor.poll(0):
            raise self.lost("disconnected")

    def receive(self) -> Results | wire.Failure | wire.Reply:
        """The next answer, where ``readable`` says that there is one. The arrays in it belong to the caller.

        Raises:
            BrokerLost: if the bytes are not an answer, or the connection is gone.
        """
        try:
            frame = self._socket.recv(_RECEIVE, copy=False)
            answer = wire.decode_answer(frame.bytes)
            if not isinstance(answer, wire.Result):
                return answer
            if not frame.more:
                raise MalformedMessage(reason="a RESULT without a body")
            layout = self._layouts.of(answer.tensors)
            # Into memory of our own: aligned, writeable, and only one copy out of libzmq's buffer.
            body = np.empty(layout.size_bytes, np.uint8)
            if self._socket.recv_into(body.data, flags=_RECEIVE) != layout.size_bytes:
                raise MalformedMessage(reason="a body that is not as long as its tensors")
            return Results(answer.ids, split(layout, body, answer.rows))
        except zmq.ZMQError as error:
            raise self.lost(f"nothing can be received: {error}") from None
        except (MalformedMessage, errors.UnsupportedVersion) as error:
            raise self.lost(error.message) from None

    def offer_arena(self, fd: int, size_bytes: int, timeout_s: float) -> bytes:
        """Pass an arena's descriptor, which stays ours, to the broker; returns the broker's token for it.

        Raises:
            MxPoolError: as the broker refused it, or BrokerLost.
        """
        if self._link is None:
            raise errors.InvalidRegion(field="descriptor", reason="there is no link to pass it over")
        try:
            self._link.send(messages.encode(messages.ARENA, size=size_bytes), [fd])
            fields = await_record(self._link, timeout_s, messages.ARENA_OK, messages.ARENA_REFUSED)
        except (LinkClosed, MalformedMessage) as error:
            raise self.lost(str(error)) from None
        return bytes(fields["token"])

    def close(self) -> None:
        """Close everything; what was not sent is dropped. Closing twice is allowed."""
        if self._link is not None:
            self._link.close()
        if self._monitor is not None and not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _read_link(self, link: Link) -> None:
        try:
            packet = link.receive_nowait()
        except LinkClosed:
            raise self.lost("it closed the link") from None
        for fd in packet.fds if packet is not None else ():
            os.close(fd)  # the broker has none to give


def await_record(link: Link, timeout_s: float, *kinds: int) -> dict[str, Any]:
    """Wait for the next record, which has to be of one of ``kinds``; one with an error raises it."""
    packet = link.receive(timeout_s)
    if packet is None:
        raise LinkClosed(f"nothing on the link within {max(timeout_s, 0):.1f} s")
    kind, fields = messages.decode(packet.data)
    if kind not in kinds:
        raise MalformedMessage(reason=f"link record of kind {kind}, expected {kinds}")
    if "code" in fields:
        raise errors.from_wire(fields["code"], fields["message"], fields["fields"])
    return fields


_open_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: a copy of a link that stays open would hide the parent's death from the broker."""
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_close_inherited)
