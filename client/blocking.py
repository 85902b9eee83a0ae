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
from mxpool.client.exchange import CLOSED, Exchange
from mxpool.client.forms import Forms
from mxpool.client.greeting import connect
from mxpool.client.pending import Piece
from mxpool.client.pool import Pool
from mxpool.client.push import Push
from mxpool.client.resending import completed
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
    tries again. Nothing is sent twice unless asked for (``retries``), but for what a full queue refused of ``push``
    or of a request that was split.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        """Find the broker's endpoint (``mxpool.endpoint``); nothing is opened yet. Raises ConfigInvalid."""
        self.endpoint = endpoints.resolve(endpoint, os.environ)
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pool = Pool(self._open, on_empty=self._context.term)  # empty: no socket is open, and term does not wait
        self._submitter_lock = threading.Lock()
        self._submitter: Submitter | None = None
        self._epoch = 0
        self._forms = Forms()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, model: str, arrays: Mapping[str, Any], timeout_s: float = 30.0, retries: int = 0) -> dict[str, Any]:
        """Run one request and wait for its outputs, by name.

            image = np.zeros((1, 3, 224, 224), np.float32)  # one row of an FP32 input with the dims [3, 224, 224]
            scores = client.infer("resnet", {"image": image})["scores"]  # (1, 1000) float32, say

        A request that is larger than a batch waits a full queue out; a smaller one is refused by it. ``retries`` more
        attempts are made within ``timeout_s`` after errors that are ``retryable``, with the broker's pauses between
        them; after BrokerLost or WorkerDied the request may then run twice.

        Raises:
            InvalidTensor: the arrays are not what the model takes; nothing was sent.
            DeadlineExceeded: no answer within ``timeout_s``; at once where that is 0 or less.
            ValueError: ``timeout_s`` is NaN.
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
            self._pool.pause(again_us - now_us())

    def push(
        self, model: str, frames: Iterable[Mapping[str, Any]], in_flight: int = 64, timeout_s: float = 30.0
    ) -> Iterator[dict[str, Any]]:
        """Run every dict of arrays in ``frames``; yields their outputs in the same order.

        At most ``in_flight`` frames are sent and not yet yielded. Frames are taken, and answers received, only while
        the caller asks for the next result. A full queue is waited out. ``timeout_s`` is for each frame, from the
        moment it is sent.

        Raises:
            ValueError: ``in_flight`` is below 1, or ``timeout_s`` is NaN; by the call itself, as the next one.
            DeadlineExceeded: ``timeout_s`` is 0 or less.
            MxPoolError: at the first frame that fails, with its index as ``fields["index"]``; frames after it are
                cancelled.
        """
        if not (type(in_flight) is int and in_flight >= 1):
            raise ValueError(f"in_flight is {in_flight}, at least 1")
        self._check_usable()
        return self._push(model, frames, in_flight, _timeout_us(timeout_s))

    def submit(self, model: str, arrays: Mapping[str, Any], timeout_s: float = 30.0) -> Future[dict[str, Any]]:
        """Send one request by the client's I/O thread, which the first call starts.

        The arrays are copied before this returns. ``cancel()`` of the future, until it is done, frees the request at
        the broker. The call itself may wait: up to 1 s for a connection that has to be opened, and at the first use
        of a model, up to ``timeout_s``, until that is loaded.

        Raises:
            InvalidTensor: the arrays are not what the model takes; nothing was sent.
            DeadlineExceeded: ``timeout_s`` is 0 or less, or ended before the model was known.
            ValueError: ``timeout_s`` is NaN.
            MxPoolError: there is no broker, or no such model. What comes after it is the future's.
        """
        timeout_us = _timeout_us(timeout_s)
        deadline_us = now_us() + timeout_us
        with self._lent(deadline_us) as exchange:
            pieces = self._pieces(exchange, model, arrays, deadline_us, in_arena=False)
        job = Job(model, pieces, deadline_us, timeout_us)
        self._submitting().put(job)
        return job.future

    def control(self, verb: str, model: str = "", *, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Ask the broker for ``verb`` (docs/wire.md lists them); its reply.

        Raises:
            UnknownVerb, PermissionDenied, UnknownModel, MxPoolError: as the broker says.
            DeadlineExceeded: no reply within ``timeout_s``; at once where that is 0 or less.
            ValueError: ``timeout_s`` is NaN.
        """
        timeout_us = _timeout_us(timeout_s)
        with self._lent(now_us() + timeout_us) as exchange:
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
        if self._pool.close():
            with self._submitter_lock:
                submitter = self._submitter
            if submitter is not None:
                submitter.close()

    def _infer(self, model: str, arrays: Mapping[str, Any], deadline_us: int, timeout_us: int) -> Outputs:
        with self._lent(deadline_us) as exchange:
            pieces = self._pieces(exchange, model, arrays, deadline_us)
            try:
                outputs: Outputs = completed(exchange, exchange.post(model, pieces, deadline_us, timeout_us))
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

        exchange = self._pool.take(now_us() + timeout_us)
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
                self._pool.leave(exchange)

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

    def _lent(self, deadline_us: int) -> contextlib.AbstractContextManager[Exchange]:
        self._check_usable()
        return self._pool.lent(deadline_us)

    def _open(self, wakeup: Wakeup, timeout_s: float) -> Exchange:
        connection = connect(self._context, self.endpoint, wakeup, timeout_s)
        if connection.epoch != self._epoch:
            self._epoch = connection.epoch
            self._forms.clear()
        return Exchange(connection)

    def _submitting(self) -> Submitter:
        with self._submitter_lock:
            if self._submitter is None or self._submitter.ended:
                self._pool.enter()
                self._submitter = Submitter(self._open, on_end=lambda: self._pool.leave(None))
                self._submitter.start()
            return self._submitter

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClientUnusable("a client cannot be used after a fork; make a new one in the child")
        if self._pool.closed:
            raise ClientUnusable(CLOSED)


def _timeout_us(timeout_s: float) -> int:
    """Microseconds; what a caller computes as its time left may be nothing, which is an error like any late answer."""
    if math.isnan(timeout_s):
        raise ValueError("timeout_s is not a number")
    if timeout_s <= 0:
        raise DeadlineExceeded(timeout_s=timeout_s)
    return math.ceil(min(timeout_s, TIMEOUT_MAX_S) * 1e6)
