"""Control requests: what the broker tells about itself, and what an administrator may change."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mxpool import __version__, errors
from mxpool.broker.clients import Client
from mxpool.broker.served import ServedModel
from mxpool.broker.worker_process import WorkerProcess
from mxpool.clock import now_us
from mxpool.errors import MxPoolError

Answer = Callable[["dict[str, Any] | MxPoolError"], None]


class Order(NamedTuple):
    """A control request: ``answer`` is called once with its payload or error, at once or when it is carried out.

    ``uid`` is the user who asks, None where the transport does not tell; ``client`` is who asks.
    """

    verb: str
    model: str
    arguments: dict[str, Any]
    uid: int | None
    answer: Answer
    client: Client | None = None


class Changeable(Protocol):
    """What an administrator's verbs act on."""

    def drain(self, model: str) -> None:
        """Stop taking requests for ``model``, or for all models where it is ""."""

    def refer(self, model: str, client: Client | None) -> str:
        """Start a private worker for ``model``; see ``private_worker.PrivateWorker.start``."""
        ...

    def release(self, answer: Answer, client: Client | None) -> None:
        """End the private worker of ``client``, and answer then."""


class Control:
    """Answers control verbs. ``admins`` are the uids that may change something, beside root and the broker's own."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        workers: dict[str, WorkerProcess],
        broker: Changeable,
        counters: Callable[[], dict[str, Any]],
        admins: tuple[int, ...],
    ) -> None:
        self._models = models
        self._workers = workers
        self._broker = broker
        self._counters = counters
        self._admins = {0, os.getuid(), *admins}
        self._verbs: dict[str, Callable[[str], dict[str, Any]]] = {
            "live": lambda _: {"live": True},
            "ready": self._ready,
            "list": lambda _: {"models": sorted(model.name for model in self._served())},
            "metadata": self._metadata,
            "stats": self._stats,
            "slots": self._slots,
        }

    def take(self, order: Order) -> None:
        """Carry out ``order``; unknown arguments are ignored, as extensions are.

        Raises:
            UnknownVerb, UnknownModel, PermissionDenied, Rejected: nothing was changed.
        """
        if order.verb in ("drain", "reference", "release"):
            self._change(order)
            return
        found = self._verbs.get(order.verb)
        if found is None:
            raise errors.UnknownVerb(verb=order.verb[:64])
        order.answer(found(order.model))

    def _model(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise errors.UnknownModel(model=name)
        return model

    def _served(self) -> list[ServedModel]:
        """What the config names: a private worker's model is for whoever asked for it."""
        return [model for model in self._models.values() if not model.private]

    def _chosen(self, name: str) -> list[ServedModel]:
        return [self._model(name)] if name else list(self._models.values())

    def _ready(self, name: str) -> dict[str, Any]:
        chosen = [self._model(name)] if name else self._served()
        states = {model.name: model.state for model in chosen}
        return {"ready": all(state == "ready" for state in states.values()), "models": states}

    def _metadata(self, name: str) -> dict[str, Any]:
        model = self._model(name)
        if model.signature is None:
            raise errors.ModelUnavailable(model=name, reason=model.unavailable or "loading")
        return {
            "name": name,
            "platform": model.report.get("backend", ""),
            "path": model.config.path,
            "state": model.state,
            "report": model.report,
            **model.signature.to_wire(),
        }

    def _stats(self, name: str) -> dict[str, Any]:
        return {
            "broker": {"version": __version__, "pid": os.getpid(), **self._counters()},
            "models": {model.name: self._model_stats(model) for model in self._chosen(name)},
        }

    def _model_stats(self, model: ServedModel) -> dict[str, Any]:
        workers = [
            {
                "worker": worker.name,
                "device": worker.device,
                "device_kind": worker.spec.device_kind,
                "device_index": worker.spec.device_index,
                "pid": worker.pid,
                "state": worker.state,
                "restarts": worker.life.restarts,
                "reason": worker.life.reason,
                "in_flight": model.core.roster.in_flight(worker.name),
                "batches": worker.batches,
                "report": worker.report,
                "stderr": list(worker.stderr)[-5:] if worker.life.reason else [],
            }
            for worker in self._workers.values()
            if worker.served is model
        ]
        return {
            "state": model.state,
            "reason": model.unavailable,
            "config": {
                "graph": model.config.graph,
                "queue": model.config.queue,
                "fixed_input_buffers": model.config.fixed_input_buffers,
            },
            "queue": "per_worker" if model.core.limits.per_worker else "shared",
            "queue_depth": model.core.depth,
            "slots": len(model.core.slots),
            "free_slots": model.core.slots.free_count,
            "segment_bytes": model.layout.size_bytes if model.layout else 0,
            "workers": workers,
            **model.counters.to_wire(),
        }

    def _slots(self, name: str) -> dict[str, Any]:
        model = self._model(name)
        core, now = model.core, now_us()
        holders = core.holders()
        rows = []
        for slot in range(len(core.slots)):
            batch = holders.get(slot)
            rows.append(
                {
                    "slot": slot,
                    "state": core.slots.state(slot).value,
                    "generation": core.slots.generation(slot),
                    "requests": batch.live if batch else 0,
                    "rows": batch.rows if batch else 0,
                    "worker": batch.worker if batch else "",
                    "held_us": now - batch.oldest_us if batch and batch.tickets else 0,
                }
            )
        return {"slots": rows}

    def _change(self, order: Order) -> None:
        if order.uid not in self._admins:
            uid = order.uid if order.uid is not None else "unknown"
            raise errors.PermissionDenied(uid=uid, action=f"{order.verb} (admin_users)")
        if order.verb == "reference":
            order.answer({"model": self._broker.refer(order.model, order.client)})
        elif order.verb == "release":
            self._broker.release(order.answer, order.client)
        else:
            for model in [self._model(order.model)] if order.model else self._served():
                if model.private:  # it ends with its client
                    raise errors.UnknownModel(model=order.model)
                self._broker.drain(model.name)
            order.answer({"draining": True})
