"""One model being served: its core's decisions carried out on slots, links and answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mxpool import errors, messages, wire
from mxpool.broker.admission import Admission
from mxpool.broker.clients import Client
from mxpool.broker.copying import SlotMemory
from mxpool.broker.core import Limits, ModelCore
from mxpool.broker.telemetry import BatchRecord, ModelCounters
from mxpool.broker.tickets import Batch, Ticket
from mxpool.clock import now_us
from mxpool.config import ModelConfig
from mxpool.errors import MxPoolError
from mxpool.shm.layout import SlotLayout
from mxpool.shm.segment import Segment
from mxpool.tensors import Signature

log = logging.getLogger(__name__)

Answer = Callable[[Client, bytes, "bytes | None"], None]


class Dispatcher(Protocol):
    """Who carries jobs to workers."""

    def run(self, worker: str, job: messages.Run) -> None:
        """Send ``job``; a worker that cannot take it is killed, and its death reported later."""

    def kill(self, worker: str, reason: str) -> None:
        """End a hung worker; its death is reported later."""


class ServedModel:
    """A model from loading to drained. ``signature`` is None until its first worker has reported it."""

    def __init__(self, name: str, config: ModelConfig, epoch: int, answer: Answer, dispatcher: Dispatcher) -> None:
        self.name = name
        self.config = config
        self.epoch = epoch
        self.counters = ModelCounters()
        self.signature: Signature | None = None
        self.layout: SlotLayout | None = None
        self.segment: Segment | None = None
        self.unavailable = ""
        self.report: dict[str, Any] = {}
        limits = Limits(
            max_queue_size=config.max_queue_size,
            max_queue_bytes=config.max_queue_bytes,
            max_queue_delay_us=config.max_queue_delay_us,
            per_worker=config.queue == "per_worker",
            run_timeout_us=config.run_timeout_ms * 1000,
        )
        self.core = ModelCore(name, limits)
        self._answer = answer
        self._dispatcher = dispatcher
        self._admission: Admission | None = None
        self._memory: SlotMemory | None = None
        self._answer_tensors: dict[int, bytes] = {}

    @property
    def private(self) -> bool:
        """True if it is there for one client alone: see ``private_worker``. No configured name has an @."""
        return "@" in self.name

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``restarting``, ``unavailable`` or ``draining``."""
        if self.core.draining:
            return "draining"
        if self.unavailable:
            return "unavailable"
        if len(self.core.roster):
            return "ready"
        return "loading" if self._memory is None else "restarting"

    def open(self, layout: SlotLayout, segment: Segment) -> None:
        """Start to take requests: ``segment`` holds the slots of ``layout`` and is owned from now on."""
        signature = layout.signature
        self.layout, self.segment = layout, segment
        self._admission = Admission(self.name, signature)
        self._memory = SlotMemory(layout, segment, self.config.pad == "repeat")
        self.core.open_slots(layout.slots, signature.max_rows, self._admission.row_bytes)

    # Requests

    def admit(self, client: Client, request: wire.Request, body: bytes | memoryview, now: int) -> None:
        """Check, accept and place one request.

        Raises:
            MxPoolError: nothing was accepted; counted as rejected.
        """
        counters = self.counters
        counters.received += 1
        try:
            if self._admission is None or self._memory is None or self.unavailable:
                raise errors.ModelUnavailable(model=self.name, reason=self.unavailable or "loading")
            self._admission.check(request, len(body))
            if request.request_id in client.tickets:
                raise errors.InvalidRequest(reason=f"request id {request.request_id} is in use")
            deadline = request.deadline_us
            if deadline < 0:
                deadline = now - deadline
            ticket = Ticket(client, request.request_id, request.rows, now, deadline, self)
            if self.core.submit(ticket, now):
                self._memory.copy_in(ticket, body)
            else:
                ticket.body = body
        except MxPoolError:
            counters.outcomes["rejected"] += 1
            raise
        client.tickets[request.request_id] = ticket

    def cancel(self, ticket: Ticket, error: MxPoolError | None, outcome: str) -> None:
        """End a request without a run; ``error`` is its answer, None where nobody is left to read it."""
        if self.core.drop(ticket):
            self._end(ticket, error, outcome)

    def _end(self, ticket: Ticket, error: MxPoolError | None, outcome: str) -> None:
        self.counters.outcomes[outcome] += 1
        ticket.client.tickets.pop(ticket.request_id, None)
        if error is not None:
            self._answer(ticket.client, wire.encode_error(ticket.request_id, error), None)

    def refuse_all(self, reason: str) -> None:
        """No worker is left that could run anything: answer all that waits, and refuse what comes."""
        self.unavailable = reason
        for ticket in self.core.queued():
            self.cancel(ticket, errors.ModelUnavailable(model=self.name, reason=reason), "failed")

    # The scheduling step

    def tick(self, now: int) -> None:
        """Expire what is late, end workers that hang."""
        for ticket in self.core.expired(now):
            waited_s = max(ticket.deadline_us - ticket.arrival_us, 0) / 1e6  # a deadline may have passed on the way
            self._end(ticket, errors.DeadlineExceeded(timeout_s=waited_s), "expired")
        for worker in self.core.roster.overdue(now, self.core.limits.run_timeout_us):
            self._dispatcher.kill(worker, f"a batch ran longer than run_timeout_ms={self.config.run_timeout_ms}")

    def schedule(self, now: int) -> None:
        """Give slots to what waits for one, close what is due, and hand batches to workers until nothing moves."""
        core, memory = self.core, self._memory
        if memory is None or not core.waiting:
            return
        for ticket in (*core.retries(now), *core.refill(now)):
            memory.copy_in(ticket, ticket.body)
            ticket.body = None
        while core.depth:
            core.close_due(now)
            assigned = core.assign(now)
            if not assigned:
                return
            self._hand_out(assigned, memory)

    def hand_out_ready(self) -> None:
        """Hand closed batches to workers that can take them; none is closed for it."""
        if self._memory is not None and self.core.depth:
            self._hand_out(self.core.assign(now_us()), self._memory)

    def _hand_out(self, batches: list[Batch], memory: SlotMemory) -> None:
        for batch in batches:
            if batch.size > batch.rows:
                begin = now_us()
                memory.pad(batch.slot, batch.rows, batch.size)
                batch.merge_us = now_us() - begin
            job = messages.Run(self.epoch, batch.slot, batch.generation, batch.rows, batch.size, batch.sequence)
            self._dispatcher.run(batch.worker, job)

    # Workers

    def completed(self, worker: str, done: messages.Done, now: int) -> None:
        """Answer the batch that ``worker`` has run; records of another epoch or generation are counted and dropped."""
        batch = None
        if done.epoch == self.epoch:
            batch = self.core.complete(worker, done.slot, done.generation, now)
        if batch is None:
            self.counters.stale_completions += 1
            return
        if self._memory is not None:
            # What is ready goes first: the worker is idle, and answering takes a while.
            self._hand_out(self.core.assign(now), self._memory)
        live = [ticket for ticket in batch.tickets if ticket.live]
        if done.error is None:
            self._split(batch, live)
        else:
            code, message, fields = done.error
            for ticket in live:
                ticket.live = False
                self._end(ticket, errors.from_wire(code, message, fields), "failed")
        self._record(batch, live, done, now)
        self.core.release(batch)

    def _split(self, batch: Batch, live: list[Ticket]) -> None:
        """Send the outputs: neighbours of one client travel in one message."""
        assert self._memory is not None
        for client, ids, rows, first in _runs(live):
            count = sum(rows)
            body = self._memory.answer(batch.slot, first, count)
            self._answer(client, wire.encode_result(ids, rows, self._description(count)), body)
        self.counters.outcomes["ok"] += len(live)
        for ticket in live:
            ticket.live = False
            del ticket.client.tickets[ticket.request_id]

    def _description(self, rows: int) -> bytes:
        found = self._answer_tensors.get(rows)
        if found is None:
            assert self.layout is not None
            signature = self.layout.signature
            found = self._answer_tensors[rows] = wire.encode_tensors(
                [(spec.name, spec.datatype, signature.shape(spec, rows)) for spec in signature.outputs]
            )
        return found

    def _record(self, batch: Batch, live: list[Ticket], done: messages.Done, completed: int) -> None:
        run_us = max(done.t_end_us - done.t_start_us, 0)
        core = self.core
        core.mean_run_us += (run_us - core.mean_run_us) * 0.1
        waits = [max(done.t_start_us - ticket.arrival_us, 0) for ticket in live]
        record = BatchRecord(
            model=self.name,
            worker=batch.worker,
            slot_count=len(batch.tickets),
            batch_samples=sum([ticket.rows for ticket in live]),
            padded_batch=batch.size,
            oldest_queue_us=max(waits, default=0),
            avg_queue_us=sum(waits) // len(waits) if waits else 0,
            merge_us=batch.merge_us,
            run_us=run_us,
            split_us=now_us() - completed,
            queue_depth=batch.queue_depth,
            graph=messages.GRAPH_WORDS[done.graph],
            close=batch.close,
        )
        self.counters.batch(record, batch.rows, failed=done.error is not None)
        log.debug("batch %s", record)

    def lost(self, worker: str, started: int, now: int) -> None:
        """``worker`` is dead and reaped, its completions were drained, and it had started sequence ``started``."""
        lost = self.core.worker_lost(worker, started, now)
        for ticket in lost.failed:
            self._end(ticket, errors.WorkerDied(worker=worker, model=self.name), "worker_died")
        for ticket, slot in lost.again:
            assert self._memory is not None
            ticket.body = self._memory.body(slot, ticket.row, ticket.rows)
        self.core.reaped(lost.incarnation)

    def close(self) -> None:
        """Let go of the slots. No worker of the model is left."""
        if self._memory is not None and self.segment is not None:
            self._memory.release()
            self.segment.close()
            self._memory = None


def _runs(live: list[Ticket]) -> Iterator[tuple[Client, list[int], list[int], int]]:
    """Neighbouring rows of one client: the client, its request ids, their rows, and the first row."""
    client: Any = None
    ids: list[int] = []
    rows: list[int] = []
    first = end = 0
    for ticket in live:
        if ticket.client is not client or ticket.row != end:
            if ids:
                yield client, ids, rows, first
            client, ids, rows, first = ticket.client, [], [], ticket.row
        ids.append(ticket.request_id)
        rows.append(ticket.rows)
        end = ticket.row + ticket.rows
    if ids:
        yield client, ids, rows, first
