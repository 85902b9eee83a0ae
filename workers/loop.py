"""The loop of a worker: take a RUN off the link, run the slot, answer DONE."""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from mxpool.clock import now_us
from mxpool.errors import MalformedMessage, RunFailed
from mxpool.messages import GRAPH_OFF, RUN, STOP, Done, Run, decode_run, encode_done
from mxpool.shm.link import Link, LinkClosed, Packet
from mxpool.workers.backends.protocol import Backend

log = logging.getLogger(__name__)

IDLE_WAIT_S = 30.0  # a bound, not a period: a record or the end of the link wakes the loop at once


class Bound(NamedTuple):
    """What the backend has bound: a RUN outside of it is refused."""

    slots: int
    sizes: Collection[int]


class _Started(NamedTuple):
    run: Run
    begin_us: int


def serve(link: Link, backend: Backend, bound: Bound, status: memoryview) -> None:
    """Run batches in the order in which they come, until STOP or the end of the link.

    What was started is finished before this returns, so that the backend can unload. ``status`` is the worker's status
    word (one unsigned 64-bit item): the sequence of a batch is written there just before the batch starts, and tells
    the broker after this process's death which batches ran.

    An error of the backend other than RunFailed is not caught: the process is sick and exits, the broker starts a
    fresh one and gives the batch to another worker.
    """
    started: deque[_Started] = deque()
    try:
        _serve(link, backend, bound, status, started)
        while started:
            link.send(_finish(backend, started.popleft()))
    except LinkClosed as closed:
        log.info("link to the broker ended reason=%r unfinished=%d", str(closed), len(started))
        while started:
            _finish(backend, started.popleft())


def _serve(link: Link, backend: Backend, bound: Bound, status: memoryview, started: deque[_Started]) -> None:
    while True:
        if started:
            full = len(started) >= backend.in_flight
            due_us = 0 if full else backend.finish_due_us() - now_us()
            if due_us <= 0:
                link.send(_finish(backend, started.popleft()))
                continue
            packet = _receive_within(link, due_us / 1e6)
        else:
            packet = link.receive(IDLE_WAIT_S)
        if packet is None:
            continue
        if packet.data[0] == STOP:
            return
        if packet.data[0] != RUN:
            raise MalformedMessage(reason=f"record of kind {packet.data[0]} while serving")
        run = decode_run(packet.data)
        if refusal := _refusal(run, bound):
            link.send(_done(run, GRAPH_OFF, now_us(), now_us(), refusal))
            continue
        status[0] = run.sequence
        started.append(_Started(run, now_us()))
        backend.start(run.slot, run.size)


def _receive_within(link: Link, seconds: float) -> Packet | None:
    """The next record, or None; waits microseconds, where poll waits for whole milliseconds."""
    # The link was opened early, so that its descriptor is one that select can take.
    readable, _, _ = select.select([link.fileno()], [], [], seconds)
    return link.receive_nowait() if readable else None


def _refusal(run: Run, bound: Bound) -> RunFailed | None:
    """Why ``run`` cannot be run as it is. No backend ever sees such a batch: zero rows crash some runtimes."""
    if not 1 <= run.rows <= run.size:
        return RunFailed(f"{run.rows} rows cannot run at {run.size}")
    if run.slot >= bound.slots or run.size not in bound.sizes:
        return RunFailed(f"slot {run.slot} at {run.size} rows is not bound")
    return None


def _finish(backend: Backend, started: _Started) -> bytes:
    """Wait for the oldest batch; DONE for it, with the error if the runtime failed it."""
    try:
        ran = backend.finish()
    except RunFailed as error:
        return _done(started.run, GRAPH_OFF, started.begin_us, now_us(), error)
    return _done(started.run, ran.graph, ran.t_start_us, ran.t_end_us, None)


def _done(run: Run, graph: int, t_start_us: int, t_end_us: int, error: RunFailed | None) -> bytes:
    failure = None if error is None else (error.code, error.message, error.fields)
    return encode_done(Done(run.epoch, run.slot, run.generation, graph, t_start_us, t_end_us, failure))
