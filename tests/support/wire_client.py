"""A client made from docs/wire.md alone: it has no timers, resends nothing, and shows each final answer as it comes.

For what the library hides: a second answer to one id, an answer to a request whose own timer would have ended it, and
requests that the library would never send.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from mxpool import messages, wire
from mxpool.errors import BrokerLost
from mxpool.shm.link import Link, LinkClosed, link_path
from mxpool.tensors import DATATYPES

Outputs = dict[str, npt.NDArray[Any]]
Answer = tuple[int, "Outputs | wire.Failure | wire.Reply"]

GREETING_S = 5.0
DATATYPE_OF = {dtype.str: name for name, dtype in DATATYPES.items()}


class WireClient:
    """One DEALER and, on ipc, one link. ``sent`` counts up the request ids from 2 on; 1 is the greeting's."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.sent = 1
        self._link: Link | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._poller = zmq.Poller()
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _greet(self) -> None:
        path = link_path(self.endpoint)
        extensions = {}
        if path is not None:
            try:
                self._link = Link.connect(path)
                hello = messages.encode(messages.HELLO, role="client", version=messages.LINK_VERSION, pid=os.getpid())
                self._link.send(hello)
                packet = self._link.receive(GREETING_S)
            except (OSError, LinkClosed) as error:
                raise self._lost(error) from None
            assert packet is not None
            extensions = {"token": messages.decode(packet.data)[1]["token"]}
            self._poller.register(self._link.fileno(), zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(self.endpoint)
        self._socket.send(wire.encode_request(wire.HELLO, 1, extensions=extensions))
        greeted = self.receive(GREETING_S)
        assert greeted, "no answer to HELLO"
        assert isinstance(greeted[0][1], wire.Reply), greeted

    def _lost(self, error: Exception) -> BrokerLost:
        return BrokerLost(endpoint=self.endpoint, reason=str(error))

    def infer(self, model: str, arrays: Mapping[str, npt.NDArray[Any]], deadline_us: int = 0) -> int:
        """Send a request as it is given; its id. ``deadline_us``: as docs/wire.md has it."""
        self.sent += 1
        first = next(iter(arrays.values()))
        tensors = wire.encode_tensors([(n, DATATYPE_OF[a.dtype.str], a.shape) for n, a in arrays.items()])
        header = wire.encode_request(wire.INFER, self.sent, model, deadline_us, len(first), tensors)
        self._socket.send_multipart([header, b"".join(array.tobytes() for array in arrays.values())])
        return self.sent

    def cancel(self, request_id: int) -> None:
        """Send a CANCEL."""
        self._socket.send(wire.encode_request(wire.CANCEL, request_id))

    def receive(self, timeout_s: float) -> list[Answer]:
        """What has come, by request id; waits up to ``timeout_s`` for something. [] if nothing has.

        Raises:
            BrokerLost: at the end of the link, after all that had come before it.
        """
        if not self._readable():
            ready = dict(self._poller.poll(int(timeout_s * 1000)))
            if self._socket not in ready:
                if ready:
                    self._read_link()
                return []
        answers: list[Answer] = []
        while self._readable():
            answers += _answers(self._socket.recv_multipart())
        return answers

    def one(self, timeout_s: float = 10.0) -> Answer:
        """The next answer, where only one can come."""
        answers = self.receive(timeout_s)
        assert len(answers) == 1, answers
        return answers[0]

    def _readable(self) -> bool:
        events: Any = self._socket.getsockopt(zmq.EVENTS)
        return bool(events & zmq.POLLIN)

    def _read_link(self) -> None:
        assert self._link is not None
        try:
            self._link.receive_nowait()
        except LinkClosed as error:
            raise self._lost(error) from None

    def close(self) -> None:
        """Close everything."""
        if self._link is not None:
            self._link.close()
        self._socket.close(linger=0)
        self._context.term()


def _answers(frames: list[bytes]) -> list[Answer]:
    answer = wire.decode_answer(frames[0])
    if not isinstance(answer, wire.Result):
        return [(answer.request_id, answer)]
    tensors, body = wire.decode_tensors(answer.tensors), frames[1]
    whole: Outputs = {}
    offset = 0
    for name, datatype, shape in tensors:
        array = np.frombuffer(body, DATATYPES[datatype], int(np.prod(shape)), offset).reshape(shape)
        offset += array.nbytes
        whole[name] = array
    assert offset == len(body)
    ends = np.cumsum(answer.rows).tolist()
    if len(ends) == 1:
        return [(answer.ids[0], whole)]
    spans = zip(answer.ids, [0, *ends], ends, strict=False)
    return [(request_id, {name: array[a:b] for name, array in whole.items()}) for request_id, a, b in spans]
