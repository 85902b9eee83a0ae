"""The broker as a whole: put together, run to its end, taken apart."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
from functools import partial
from types import FrameType
from typing import Any

import zmq

from mxpool import errors, wire
from mxpool.broker.client_links import ArenaPolicy, ClientLinks
from mxpool.broker.clients import Client, ClientBook
from mxpool.broker.control import Answer, Control
from mxpool.broker.endpoints import Door, Endpoint, clients_max, connections_max
from mxpool.broker.front import Front
from mxpool.broker.intake import Intake
from mxpool.broker.loop import Loop
from mxpool.broker.private_worker import PrivateWorker
from mxpool.broker.served import ServedModel
from mxpool.broker.supervisor import Supervisor
from mxpool.broker.worker_process import WorkerProcess
from mxpool.clock import now_us
from mxpool.config import Config
from mxpool.errors import MxPoolError

log = logging.getLogger(__name__)

RECEIVE_PARTS, RECEIVE_PART = 8, 16  # messages in a pass: about a millisecond of small ones; more fill batches better
LOOK_US = 500  # large messages take longer: workers are looked at this often, two batches of a device's graph
BUSY_TIMER_US = 1_000  # under load, when nothing waits, timers are looked at this often
OUTBOX_RETRY_US = 5_000  # ROUTER does not tell when a slow client has room again
ABANDON_US = 10_000_000  # a worker that is still there 5 s after its SIGKILL hangs in the kernel
BEAT_MAX_S = 10.0  # links that say nothing, and listeners that rest, are looked at this often
FAREWELL_US = 1_000_000  # at the end, how long answers may still wait for slow clients


class Broker:
    """One event loop. ``run`` makes one pass after another, each in the order in which its steps are written."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.epoch = secrets.randbits(63) | 1
        self.models: dict[str, ServedModel] = {}
        self._started_us = now_us()
        self._signals = 0
        self._end_at_us: int | None = None
        self._stopping_workers = False
        self._beat_at_us = 0
        self._timer_us = 0
        self._more = False
        self._front_stirred = False

    def open(self) -> None:
        """Bind the endpoints and make everything else; no worker is started yet.

        Raises:
            MxPoolError: an endpoint cannot be taken; nothing is left behind.
        """
        config = self.config.broker
        self.loop = Loop()
        self._catch_signals()  # before anything is there that a signal could leave behind
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._book = ClientBook(config.outbox_messages, config.outbox_bytes)
        self.front = Front(self._context, self._book, config.max_message_bytes)
        self.supervisor = Supervisor(self.loop)
        devices = self.config.devices
        self._private = PrivateWorker(self.models, devices, self.supervisor, self.epoch, self.front.send)
        workers = 1 + sum(model.worker_count for model in self.config.models.values())  # and a private one
        limit = clients_max(config.max_clients, workers)
        self._endpoints = [Endpoint(address) for address in config.endpoints]
        self._door = Door(self.front.socket, self._endpoints, connections_max(limit, workers))
        policy = ArenaPolicy(config.arenas, config.arena_users, config.arena_groups)
        self._links = ClientLinks(self.loop, self._book, self.epoch, policy, limit, self._client_gone)
        control = Control(self.models, self.supervisor.workers, self, self._counters, config.admin_users)
        self.intake = Intake(self.front, self._book, self.models, control.take)
        self.intake.greeting = {
            "version": wire.VERSION,
            "epoch": self.epoch,
            "max_message_bytes": config.max_message_bytes,
        }
        try:
            for endpoint in self._endpoints:
                endpoint.bind(self.front.socket, config.heartbeat_s)
                if endpoint.listener is not None:
                    self._links.listen(endpoint.listener)
        except MxPoolError:
            self.close()
            raise
        self.loop.add(self.front.fileno(), self._on_front)
        self.loop.add(self._door.fileno(), self._door.watch)
        self._door.watch()  # a ZMQ descriptor tells of changes since the last look, so there must be a first one
        for name in self.config.models:
            self._add_model(name)

    def _add_model(self, name: str) -> None:
        model = self.config.models[name]
        served = self.models[name] = ServedModel(name, model, self.epoch, self.front.send, self.supervisor)
        for device, count in model.workers.items():
            spec = model.spec(name, self.config.devices[device])
            for number in range(count):
                self.supervisor.add(WorkerProcess(f"{name}-{device}-{number}", device, spec, served))

    def run(self) -> int:
        """Serve until a signal, drain, and return the exit code."""
        log.info("serving endpoints=%s models=%s", ",".join(e.address for e in self._endpoints), ",".join(self.models))
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # tickets die by reference count; cycles are made only by rare errors
        while not self._ended(now_us()):
            self._pass()
        log.info("stopped")
        return 0

    def _pass(self) -> None:
        """Wait; workers and links; messages; deadlines and deaths; outboxes; lost clients; batches."""
        front = self.front
        readable = self._more or front.pending()
        if readable:
            self._timer_us = min(self._timer_us, now_us() + BUSY_TIMER_US)
            self.loop.wait(0)
        else:
            self.loop.wait((self._due_us() - now_us()) / 1e6)
        if readable or self._front_stirred:
            self._front_stirred = False
            self._more = self._receive()
        now = now_us()
        if now >= self._timer_us:
            self.supervisor.tick(now)
            self._private.tick()
            for model in self.models.values():
                model.tick(now)
            self._beat(now)
            self._timer_us = now + BUSY_TIMER_US
        if front.waiting:
            front.flush()
        while front.lost:
            self._drop(front.lost.pop())  # before the next step, since it can free slots
        for model in self.models.values():
            model.schedule(now)

    def _receive(self) -> bool:
        """Take messages; True if more are there. A device whose batches are short must not stand still meanwhile."""
        look_us = now_us() + LOOK_US
        for _ in range(RECEIVE_PARTS):
            if not self.front.receive(self.intake.take, RECEIVE_PART):
                return False
            if now_us() >= look_us:
                self.loop.wait(0)
                for model in self.models.values():
                    model.hand_out_ready()
                look_us = now_us() + LOOK_US
        return True

    def _on_front(self) -> None:
        self._front_stirred = True
        self.front.stirred()

    def _due_us(self) -> int:
        """When to wake although nothing happens; what is due then is done in the pass after."""
        times = [self._beat_at_us, self.supervisor.due_us(), self._private.due_us()]
        if self._end_at_us is not None and self._end_at_us > now_us():
            times.append(self._end_at_us)
        times.extend(model.core.due_us() for model in self.models.values())
        self._timer_us = min(time for time in times if time is not None)
        return min(self._timer_us, now_us() + OUTBOX_RETRY_US) if self.front.waiting else self._timer_us

    # Clients

    def _client_gone(self, client: Client) -> None:
        """Its queued work is freed; what runs is not answered."""
        self.front.forget(client)  # first: it counts the answers that nobody will read, unless the client is gone
        self._book.forget(client)
        for ticket in list(client.tickets.values()):
            ticket.model.cancel(ticket, None, "client_gone")
        self._private.client_gone(client)

    def _drop(self, client: Client) -> None:
        if client.peer is not None:
            self._links.end(client.peer)
        else:
            self._client_gone(client)

    def _beat(self, now: int) -> None:
        """Ask libzmq whether clients without a link (tcp, other libraries) are still there; forget the silent ones."""
        if now < self._beat_at_us:
            return
        self._beat_at_us = now + int(min(self.config.broker.heartbeat_s, BEAT_MAX_S) * 1e6)
        self._book.ghosts.clear()
        self._links.beat(now)
        for client in list(self._book.by_identity.values()):
            if client.peer is not None:
                continue
            if client.tickets or self._private.is_held_by(client):
                self.front.send(client, wire.encode_reply(0, {}), None)
            elif not client.outbox:
                self._book.forget(client)

    def _counters(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "uptime_s": (now_us() - self._started_us) / 1e6,
            "connected_clients": self._door.connections,
            "linked_clients": len(self._book.peers),
            "messages_received": self.front.received,
            "messages_sent": self.front.sent,
            "undeliverable": self.front.undeliverable,
            "refused": self.intake.refused,
            "state": "draining" if all(self.models[name].core.draining for name in self.config.models) else "serving",
        }

    # The end

    def _catch_signals(self) -> None:
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.loop.add(wake_fd, partial(os.eventfd_read, wake_fd))

        def caught(_signal: int, _frame: FrameType | None) -> None:
            self._signals += 1
            os.eventfd_write(wake_fd, 1)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, caught)

    def drain(self, model: str) -> None:
        """Take no more requests for ``model``; what was accepted is answered."""
        served = self.models[model]
        if not served.core.draining:
            log.info("draining model=%s queued=%d", model, served.core.depth)
            served.core.draining = True

    def refer(self, model: str, client: Client | None) -> str:
        """Start a private worker beside ``model``, for ``client``; the name to ask it by. See PrivateWorker.start."""
        return self._private.start(model, client)

    def release(self, answer: Answer, client: Client | None) -> None:
        """End the private worker of ``client``, and answer then."""
        self._private.release(answer, client)

    def _ended(self, now: int) -> bool:
        """Drive the shutdown: drain, then stop the workers; a second signal skips the draining."""
        if not self._signals:
            return False
        if self._end_at_us is None:
            longest_ms = max(model.config.run_timeout_ms for model in self.models.values())
            self._end_at_us = now + 2 * longest_ms * 1000 + FAREWELL_US
            for name in self.models:
                self.drain(name)
        if not self._stopping_workers:
            idle = all(model.core.idle for model in self.models.values())
            if not idle and now < self._end_at_us and self._signals < 2:
                return False
            self._refuse_rest()
            self._stopping_workers = True
            self._end_at_us = now + ABANDON_US
            self.supervisor.stop(now)
        if self.supervisor.alive and now < self._end_at_us:
            return False
        self._refuse_rest()  # what a worker that had to be killed was running
        self._end_at_us = min(self._end_at_us, now + FAREWELL_US)
        return not self.front.waiting or now >= self._end_at_us

    def _refuse_rest(self) -> None:
        for model in self.models.values():
            for ticket in model.core.queued():
                model.cancel(ticket, errors.ShuttingDown(what="the broker"), "failed")

    def close(self) -> None:
        """Take everything apart; every worker is dead."""
        self._door.close()
        self.front.close(FAREWELL_US // 1000 if self._stopping_workers else 0)
        self._context.term()  # sends what libzmq still holds; removes the ipc path, before the lock is given up
        for peer in list(self._book.peers.values()):
            peer.close()  # last: a client takes the end of its link for the end of its answers
        for endpoint in self._endpoints:
            endpoint.close()
        for model in self.models.values():
            model.close()
        self.supervisor.close()
        self.loop.close()


def run(config: Config) -> int:
    """Serve ``config`` until SIGTERM or SIGINT; the exit code.

    Raises:
        EndpointInUse: if an endpoint cannot be taken.
    """
    broker = Broker(config)
    broker.open()
    try:
        return broker.run()
    finally:
        broker.supervisor.kill_all()
        broker.close()
