"""Starts workers, brings them to their slots, and takes note of their deaths."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mxpool import errors, messages
from mxpool.broker.loop import Loop
from mxpool.broker.served import ServedModel
from mxpool.broker.worker_process import WorkerProcess, describe_exit
from mxpool.clock import now_us
from mxpool.errors import MxPoolError
from mxpool.shm.layout import SlotLayout
from mxpool.shm.link import LinkClosed
from mxpool.shm.segment import Segment
from mxpool.tensors import Signature

log = logging.getLogger(__name__)

STOP_TIMEOUT_US = 5_000_000
CAPTURES_MAX = 2  # tries that may each take the device down before a graph that is only preferred is given up
BOOTING = ("starting", "loading", "loaded", "binding")


class Supervisor:
    """All workers of the broker. Implements ``served.Dispatcher``."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.workers: dict[str, WorkerProcess] = {}
        self.stopping = False
        self._allocated: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add(self._wake_fd, self._on_allocated)

    def add(self, worker: WorkerProcess) -> None:
        """Supervise ``worker``, which is started at the next ``tick``."""
        self.workers[worker.name] = worker
        worker.life.restart_at_us = 0

    # served.Dispatcher

    def run(self, worker: str, job: messages.Run) -> None:
        """Send a job."""
        try:
            self.workers[worker].link.send(messages.encode_run(job))
        except LinkClosed as error:
            self.kill(worker, f"its link failed: {error}")

    def kill(self, worker: str, reason: str) -> None:
        """End a worker; its batches are dealt with when it is reaped."""
        found = self.workers[worker]
        if not found.failure:
            found.failure = reason
            log.warning("worker killed worker=%s pid=%s reason=%s", worker, found.pid, reason)
        found.served.core.roster.close(worker)
        found.kill()

    # Time

    def tick(self, now: int) -> None:
        """Start what is due, end what has not loaded or stopped in time."""
        for worker in self.workers.values():
            life = worker.life
            if worker.state == "dead":
                if life.restart_at_us is not None and now >= life.restart_at_us and not self.stopping:
                    self._start(worker, now)
            elif worker.state in BOOTING and now >= self._load_deadline(worker):
                self.kill(worker.name, f"not ready within load_timeout_ms={worker.served.config.load_timeout_ms}")
            elif worker.kill_at_us is not None and now >= worker.kill_at_us:
                self.kill(worker.name, "it did not stop in time")

    @staticmethod
    def _load_deadline(worker: WorkerProcess) -> int:
        return worker.started_us + worker.served.config.load_timeout_ms * 1000

    def due_us(self) -> int | None:
        """When ``tick`` has something to do; None for never."""
        times: list[int] = []
        for worker in self.workers.values():
            if worker.state == "dead":
                if worker.life.restart_at_us is not None and not self.stopping:
                    times.append(worker.life.restart_at_us)
            elif worker.state in BOOTING and not worker.failure:
                times.append(self._load_deadline(worker))
            if worker.kill_at_us is not None and worker.state != "dead" and not worker.failure:
                times.append(worker.kill_at_us)
        return min(times, default=None)

    def _start(self, worker: WorkerProcess, now: int) -> None:
        first = worker.started_us == 0
        worker.life.restart_at_us = None
        try:
            worker.spawn(now)
        except (OSError, MxPoolError) as error:
            worker.life.died(now, f"cannot be started: {error}")
            log.warning("worker not started worker=%s reason=%s", worker.name, error)
            self._judge(worker.served)
            return
        if not first:
            worker.life.started()
        self._loop.add(worker.link.fileno(), partial(self._on_link, worker))
        self._loop.add(worker.pidfd, partial(self._on_exit, worker))
        self._loop.add(worker.stderr_fd, partial(self._on_stderr, worker))
        log.info("worker started worker=%s pid=%d device=%s", worker.name, worker.process.pid, worker.device)

    # Descriptors

    def _on_stderr(self, worker: WorkerProcess) -> None:
        if not worker.read_stderr():
            self._loop.remove(worker.stderr_fd)  # called because it is readable: there is nothing but its end

    def _on_link(self, worker: WorkerProcess) -> None:
        try:
            packet = worker.link.receive_nowait()
            if packet is not None:
                self._record(worker, packet.data)
        except LinkClosed:
            self._loop.remove(worker.link.fileno())
            if worker.state != "stopping" and not worker.failure and not worker.cannot_boot:
                worker.kill()  # its process is gone or useless; the pidfd tells when it is over
        except Exception as error:  # the boundary: whatever a backend makes its worker say ends that worker only
            log.exception("record of a worker refused worker=%s", worker.name)
            self.kill(worker.name, f"{type(error).__name__}: {error}")

    def _record(self, worker: WorkerProcess, data: bytes) -> None:
        if data[0] == messages.DONE:
            worker.batches += 1
            worker.served.completed(worker.name, messages.decode_done(data), now_us())
            return
        kind, fields = messages.decode(data)
        if worker.state == "stopping":
            return  # it was told to go before it was ready
        if kind == messages.HELLO:
            if fields.get("version") != messages.LINK_VERSION:
                raise errors.MalformedMessage(
                    reason=f"link version {fields.get('version')}, not {messages.LINK_VERSION}"
                )
            worker.load()
        elif kind == messages.SIGNATURE:
            self._signature(worker, fields)
        elif kind == messages.READY:
            self._ready(worker, fields)
        elif kind == messages.LOAD_FAILED:
            worker.failure, worker.cannot_boot = str(fields["message"]), bool(fields["cannot_boot"])
        else:
            raise errors.MalformedMessage(reason=f"link record kind {kind} from a worker")

    def _on_exit(self, worker: WorkerProcess) -> None:
        now = now_us()
        for fd in (worker.pidfd, worker.link.fileno(), worker.stderr_fd):
            self._loop.remove(fd)
        self._drain_completions(worker)
        started = worker.started_sequence()
        state = worker.state
        code = worker.bury()
        worker.served.lost(worker.name, started, now)
        if state == "stopping":
            log.info("worker stopped worker=%s", worker.name)
            return
        reason = worker.failure or describe_exit(code, worker.stderr)
        if code == messages.EXIT_DEVICE_LOST and state == "binding":
            worker.lost_in_bind += 1
            if worker.lost_in_bind >= CAPTURES_MAX and worker.spec.graph == "prefer":
                why = f"capturing took the device down {worker.lost_in_bind} times: {reason}"
                worker.spec = replace(worker.spec, graph_lost=why)
        worker.life.died(now, reason, worker.cannot_boot or code == messages.EXIT_CANNOT_BOOT)
        log.warning("worker died worker=%s code=%d reason=%s", worker.name, code, reason)
        self._judge(worker.served)

    def _drain_completions(self, worker: WorkerProcess) -> None:
        try:
            while (packet := worker.link.receive_nowait()) is not None:
                if packet.data[0] in (messages.DONE, messages.LOAD_FAILED):
                    self._record(worker, packet.data)
        except LinkClosed:
            pass
        except Exception:
            log.exception("record of a dead worker refused worker=%s", worker.name)

    def _judge(self, served: ServedModel) -> None:
        """Refuse a model's requests once all its workers are given up."""
        workers = [worker for worker in self.workers.values() if worker.served is served]
        if workers and all(worker.life.given_up and worker.state == "dead" for worker in workers):
            reason = workers[0].life.reason
            served.refuse_all(reason)
            log.error("model unavailable model=%s reason=%s", served.name, reason)

    # From signature to ready

    def _signature(self, worker: WorkerProcess, fields: dict[str, Any]) -> None:
        served = worker.served
        worker.state = "loaded"
        worker.report = dict(fields["report"])
        signature = Signature.from_wire(fields["signature"])
        if served.segment is not None and served.signature == signature:
            worker.bind()
        elif served.signature is None:
            served.signature = signature
            served.report = worker.report
            self._allocate(served, SlotLayout(signature, served.config.slot_count))
        elif served.signature != signature:
            self.kill(worker.name, "its signature differs from that of the model's other workers")
        # else: the slots are being made; _open binds every worker that waits

    def _allocate(self, served: ServedModel, layout: SlotLayout) -> None:
        def make() -> None:
            done: Callable[[], None]
            try:
                done = partial(self._open, served, layout, Segment.create(layout.size_bytes))
            except Exception as error:  # noqa: BLE001 - whatever it is, the model must not wait for slots for ever
                done = partial(self._no_room, served, error)
            self._allocated.append(done)
            os.eventfd_write(self._wake_fd, 1)

        try:
            threading.Thread(target=make, name=f"allocate-{served.name}", daemon=True).start()
        except RuntimeError as error:  # no room for a thread
            self._no_room(served, error)

    def _on_allocated(self) -> None:
        os.eventfd_read(self._wake_fd)
        while self._allocated:
            self._allocated.popleft()()

    def _open(self, served: ServedModel, layout: SlotLayout, segment: Segment) -> None:
        workers = [worker for worker in self.workers.values() if worker.served is served]
        if not workers:  # a private worker that ended meanwhile
            segment.close()
            return
        served.open(layout, segment)
        log.info("slots made model=%s slots=%d bytes=%d", served.name, layout.slots, layout.size_bytes)
        for worker in workers:
            if worker.state == "loaded":
                try:
                    worker.bind()
                except LinkClosed as error:
                    self.kill(worker.name, f"its link failed: {error}")

    def _no_room(self, served: ServedModel, error: Exception) -> None:
        """The slots could not be made: all workers go, and come back at the slow pace."""
        served.signature = None
        for worker in self.workers.values():
            if worker.served is served and worker.state != "dead":
                worker.life.give_up()
                self.kill(worker.name, str(error))

    def _ready(self, worker: WorkerProcess, fields: dict[str, Any]) -> None:
        served, report = worker.served, fields["report"]
        in_flight, sizes = int(fields["in_flight"]), tuple(fields["sizes"])
        assert served.signature is not None
        if in_flight not in (1, 2) or sorted(set(sizes)) != list(sizes) or sizes[-1] < served.signature.max_rows:
            raise errors.MalformedMessage(reason=f"READY with {in_flight} in flight, sizes {sizes}")
        worker.state = "ready"
        worker.life.ready()
        worker.lost_in_bind = 0
        worker.report.update(report, sizes=list(sizes), in_flight=in_flight)
        served.report = worker.report
        served.unavailable = ""
        served.core.worker_ready(worker.name, in_flight, sizes)
        config = worker.spec
        log.info(
            "worker ready worker=%s ms=%d fixed_inputs=%d maca_graph=%d queue_shared=%d",
            worker.name,
            (now_us() - worker.started_us) // 1000,
            config.fixed_input_buffers,
            report.get("graph", "off") == "on",
            served.config.queue == "shared",
        )

    # The end

    def stop(self, now: int) -> None:
        """Ask every worker to finish and go; those that do not within 5 s are killed.

        One that still loads is killed at once: it runs nothing, and would not hear of it before its load ends.
        """
        self.stopping = True
        for worker in self.workers.values():
            self._stop(worker, now)

    def retire(self, worker: WorkerProcess) -> None:
        """End one worker for good, as ``stop`` does. Once it is dead, ``forget`` it."""
        worker.life.restart_at_us = None
        self._stop(worker, now_us())

    def forget(self, worker: WorkerProcess) -> None:
        """``worker`` is dead and will not be started again: its name is free."""
        del self.workers[worker.name]

    @staticmethod
    def _stop(worker: WorkerProcess, now: int) -> None:
        if worker.kill_at_us is None:
            worker.kill_at_us = now + STOP_TIMEOUT_US
        if worker.state in BOOTING:
            worker.state = "stopping"
            worker.kill()
        elif worker.state in ("ready", "stopping"):
            worker.state = "stopping"
            try:
                worker.link.send(messages.encode(messages.STOP))
            except LinkClosed:
                worker.kill()

    def kill_all(self) -> None:
        """End and reap every process that is left: the broker itself is failing, or all are stopped already.

        One that a SIGKILL does not end within a second hangs in the kernel and is left to init.
        """
        for worker in self.workers.values():
            if worker.state != "dead":
                worker.kill()
                try:
                    worker.process.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    log.error("worker cannot be ended worker=%s pid=%s", worker.name, worker.pid)
                    continue
                worker.bury()

    @property
    def alive(self) -> int:
        """Processes that are not reaped."""
        return sum(worker.state != "dead" for worker in self.workers.values())

    def close(self) -> None:
        """Let go of the eventfd; every worker is dead."""
        self._loop.remove(self._wake_fd)
        os.close(self._wake_fd)
