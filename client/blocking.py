"""``Client``: what a program uses. Its threads share it; each call does its own I/O on a connection of its own."""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import zmq

from mxpool import endpoint as endpoints
from mxpool.client.backoff import pause_us
from mxpool.client.connection import connect
from mxpool.client.exchange import CLOSED, Exchange
from mxpool.client.forms import Forms
from mxpool.client.pending import Piece
from mxpool.client.push import Push
from mxpool.client.results import Outputs
from mxpool.client.submitter import Job, Submitter
from mxpool.client.wakeup import Wakeup
from mxpool.clock import now_us
from mxpool.errors import (
    BatchTooLarge,
    ClientUnusable,
    DeadlineExceeded,
    InvalidRequest,
    InvalidTensor,
    MxPoolError,
    UnknownModel,
)

TIMEOUT_MAX_S = 1e9  # thirty years; infinity fits the wire that way

_STALE = (InvalidTensor, UnknownModel, BatchTooLarge)  # what the broker says if the model is not the one we knew


class Client:
    """A broker's client. May be shared between threads; not usable in a forked child.

    Arrays carry the batch axis in front, unless the model has ``max_batch_size`` 0. Requests larger than a batch are
    split and joined again. Arrays given in are copied before a call waits; arrays handed out are writeable, belong to
    the caller and stay valid after ``close``.

    A connection is opened when a call needs one: a broker that is gone or not there is BrokerLost, and the next call
    tries again. Nothing is sent twice unless asked for (``retries``), but for requests that a full queue refused in
    ``push``.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        """Find the broker's endpoint (``mxpool.endpoint``); nothing is opened yet. Raises ConfigInvalid."""
        self.endpoint = endpoints.resolve(endpoint, os.environ)
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = Wakeup()  # readable once the client is closed
        self._lock = threading.Lock()  # of the four below; never held during I/O
        self._callers = 0
        self._idle: list[Exchange] = []
        self._busy: set[Exchange] = set()
        self._closed = threading.Event()
        self._submitter: Submitter | None = None
        self._epoch = 0
        self._forms = Forms()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, model: str, arrays: Mapping[str, Any], timeout_s: float = 30.0, retries: int = 0) -> dict[str, Any]:
        """Run one request and wait for its outputs, by name.

        ``retries`` more attempts are made within ``timeout_s`` after errors that are ``retryable``, with the broker's
        pauses between them; after BrokerLost or WorkerDied the request may then run twice.

        Raises:
            InvalidTensor: the arrays are not what the model takes; nothing was sent.
            MxPoolError: any other error of ``mxpool.errors``, by its ``code``.
        """
        timeout_us = _timeout_us(timeout_s)
        deadline_us, attempt = now_us() + timeout_us, 0
        while True:
            try:
                return self._infer(model, arrays, deadline_us, timeout_us)
            except MxPoolError as error:
                again_us = now_us() + pause_us(error, attempt, random.random())
                if not error.retryable or attempt >= retries or again_us >= deadline_us:
                    raise
            attempt += 1
            self._closed.wait((again_us - now_us()) / 1e6)

    def push(
        self, model: str, frames: Iterable[Mapping[str, Any]], in_flight: int = 64, timeout_s: float = 30.0
    ) -> Iterator[dict[str, Any]]:
        """Run every dict of arrays in ``frames``; yields their outputs in the same order.

        At most ``in_flight`` frames are sent and not yet yielded. Frames are taken, and answers received, only while
        the caller asks for the next result. A full queue is waited out. ``timeout_s`` is for each frame, from the
        moment it is sent.

        Raises:
            MxPoolError: at the first frame that fails, with its index as ``fields["index"]``; frames after it are
                cancelled.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}, at least 1")
        self._check_usable()
        return self._push(model, frames, in_flight, _timeout_us(timeout_s))

    def submit(self, model: str, arrays: Mapping[str, Any], timeout_s: float = 30.0) -> Future[dict[str, Any]]:
        """Send one request by the client's I/O thread, which the first call starts.

        The arrays are copied before this returns. ``cancel()`` of the future, until it is done, frees the request at
        the broker. Raises as ``infer`` does for arrays that do not fit; everything else is the future's.
        """
        timeout_us = _timeout_us(timeout_s)
        deadline_us = now_us() + timeout_us
        with self._borrowed(deadline_us) as exchange:
            pieces = self._pieces(exchange, model, arrays, deadline_us, in_arena=False)
        job = Job(model, pieces, deadline_us, timeout_us)
        self._submitting().put(job)
        return job.future

    def control(self, verb: str, model: str = "", *, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Ask the broker for ``verb`` (docs/wire.md lists them); its reply.

        Raises:
            UnknownVerb, PermissionDenied, UnknownModel, MxPoolError: as the broker says.
        """
        timeout_us = _timeout_us(timeout_s)
        with self._borrowed(now_us() + timeout_us) as exchange:
            reply: dict[str, Any] = exchange.complete(exchange.ask(verb, model, timeout_us, arguments))
            return reply

    def status(self) -> dict[str, Any]:
        """The broker's counters, models and workers."""
        return self.control("stats")

    def models(self) -> list[str]:
        """The names of the models that the broker serves."""
        return list(self.control("list")["models"])

    def metadata(self, model: str) -> dict[str, Any]:
        """What the broker says of ``model``: inputs, outputs, ``max_batch_size``, platform, state."""
        return self.control("metadata", model)

    def close(self) -> None:
        """Close all connections. Calls that other threads are in end with ClientUnusable. Closing twice is allowed."""
        if os.getpid() != self._pid:
            return  # everything belongs to the parent
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            idle, self._idle, submitter = self._idle, [], self._submitter
            for exchange in self._busy:
                exchange.closing = True
            last = not self._callers
        self._wakeup.set()
        for exchange in idle:
            exchange.close()
        if submitter is not None:
            submitter.close()
        if last:
            self._end()

    def _infer(self, model: str, arrays: Mapping[str, Any], deadline_us: int, timeout_us: int) -> Outputs:
        with self._borrowed(deadline_us) as exchange:
            pieces = self._pieces(exchange, model, arrays, deadline_us)
            try:
                outputs: Outputs = exchange.complete(exchange.post(model, pieces, deadline_us, timeout_us))
                return outputs
            except _STALE:
                self._forms.forget(model)
                raise

    def _push(
        self, model: str, frames: Iterable[Mapping[str, Any]], in_flight: int, timeout_us: int
    ) -> Iterator[Outputs]:
        def pieces(frame: Mapping[str, Any]) -> list[Piece]:
            try:
                return exchange.pieces(form, frame)
            except InvalidRequest:
                return self._pieces(exchange, model, frame, now_us() + timeout_us)

        exchange = self._take(now_us() + timeout_us)
        try:
            form = self._forms.of(exchange, model, now_us() + timeout_us)
            yield from Push(exchange, model, frames, pieces, in_flight, timeout_us).results()
        except _STALE:
            self._forms.forget(model)
            raise
        except (MxPoolError, GeneratorExit):
            raise
        except BaseException:
            exchange.broken = True  # stopped at an unknown point, perhaps between two frames of a message
            raise
        finally:
            if os.getpid() == self._pid:  # else this generator is the copy that a fork left in a child
                exchange.cancel_all()
                self._leave(exchange)

    def _pieces(
        self, exchange: Exchange, model: str, arrays: Mapping[str, Any], deadline_us: int, *, in_arena: bool = True
    ) -> list[Piece]:
        """Checked and copied arrays; refused only if they do not fit the model as it is now."""
        form = self._forms.of(exchange, model, deadline_us)
        try:
            return exchange.pieces(form, arrays, in_arena=in_arena)
        except InvalidRequest:
            changed = self._forms.changed(exchange, form, deadline_us)
            if changed is None:
                raise
            return exchange.pieces(changed, arrays, in_arena=in_arena)

    @contextlib.contextmanager
    def _borrowed(self, deadline_us: int) -> Iterator[Exchange]:
        exchange = self._take(deadline_us)
        try:
            yield exchange
        except MxPoolError:
            raise
        except BaseException:
            exchange.broken = True  # stopped at an unknown point, perhaps between two frames of a message
            raise
        finally:
            self._leave(exchange)

    def _take(self, deadline_us: int) -> Exchange:
        """An exchange that no other thread uses: one that lay idle, or a new one."""
        self._check_usable()
        self._enter()
        try:
            exchange = self._idle_exchange() or self._open(self._wakeup, (deadline_us - now_us()) / 1e6)
        except BaseException:
            self._leave(None)
            raise
        with self._lock:
            exchange.closing = self._closed.is_set()
            self._busy.add(exchange)
        return exchange

    def _enter(self) -> None:
        with self._lock:
            if self._closed.is_set():
                raise ClientUnusable(CLOSED)
            self._callers += 1

    def _leave(self, exchange: Exchange | None) -> None:
        with self._lock:
            self._callers -= 1
            if exchange is not None:
                self._busy.discard(exchange)
                if not exchange.broken and not self._closed.is_set():
                    self._idle.append(exchange)
                    return
            last = self._closed.is_set() and not self._callers
        if exchange is not None:
            exchange.close()
        if last:
            self._end()

    def _idle_exchange(self) -> Exchange | None:
        """The one used last whose broker is still there; None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                exchange = self._idle.pop()
            exchange.check()
            if not exchange.broken:
                return exchange
            exchange.close()

    def _open(self, wakeup: Wakeup, timeout_s: float) -> Exchange:
        connection = connect(self._context, self.endpoint, wakeup, timeout_s)
        if connection.epoch != self._epoch:
            self._epoch = connection.epoch
            self._forms.clear()
        return Exchange(connection)

    def _submitting(self) -> Submitter:
        with self._lock:
            if self._closed.is_set():
                raise ClientUnusable(CLOSED)
            if self._submitter is None:
                self._submitter = Submitter(self._open, on_end=lambda: self._leave(None))
                self._submitter.start()
                self._callers += 1
            return self._submitter

    def _end(self) -> None:
        """The last caller is out: no socket is open any more, and term does not wait."""
        self._context.term()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClientUnusable("a client cannot be used after a fork; make a new one in the child")
        if self._closed.is_set():
            raise ClientUnusable(CLOSED)


def _timeout_us(timeout_s: float) -> int:
    """Microseconds; what a caller computes as its time left may be nothing, which is an error like any late answer."""
    if math.isnan(timeout_s):
        raise ValueError("timeout_s is not a number")
    if timeout_s <= 0:
        raise DeadlineExceeded(timeout_s=timeout_s)
    return math.ceil(min(timeout_s, TIMEOUT_MAX_S) * 1e6)
