"""A private worker beside a served model: the same file without a graph, for a client that compares answers.

There is one at a time. It ends when that client asks for it, when that client is gone, or with the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mxpool import errors
from mxpool.broker.clients import Client
from mxpool.broker.control import Answer
from mxpool.broker.served import Answer as Send
from mxpool.broker.served import ServedModel
from mxpool.broker.supervisor import Supervisor
from mxpool.broker.worker_process import WorkerProcess
from mxpool.config import DeviceConfig, ModelConfig
from mxpool.wire import MODEL_CHARS_MAX

log = logging.getLogger(__name__)

SUFFIX = "@plain"  # no configured name has an @; a long name is cut, since there is one at a time
SLOTS = 2  # the fewest that a config may ask for: it is there to be right, not fast


class PrivateWorker:
    """Starts and ends the private worker. Its model stands among ``models`` while it is there.

    ``models`` changes in ``start`` and ``tick`` only; neither is called while somebody goes through it.
    """

    def __init__(
        self,
        models: dict[str, ServedModel],
        devices: Mapping[str, DeviceConfig],
        supervisor: Supervisor,
        epoch: int,
        send: Send,
    ) -> None:
        self._models = models
        self._devices = devices
        self._supervisor = supervisor
        self._epoch = epoch
        self._send = send
        self._served: ServedModel | None = None
        self._worker: WorkerProcess | None = None
        self._holder: Client | None = None
        self._ending = False
        self._answers: list[Answer] = []

    def start(self, name: str, holder: Client | None) -> str:
        """Start a private worker for the model ``name``, which ``holder`` asked for; the name to ask it by.

        Raises:
            UnknownModel: there is no such model, or it is a private worker's.
            ShuttingDown, ModelUnavailable: the model has no ready worker to be compared.
            Rejected: another private worker is there, or not quite gone.
        """
        base = self._models.get(name)
        if base is None or base.private:
            raise errors.UnknownModel(model=name)
        if self._served is not None:
            raise errors.Rejected(reason=f"{self._served.name} is there; one private worker is allowed at a time")
        if base.core.draining:
            raise errors.ShuttingDown(what=f"model {name!r}")
        original = self._chosen(base)
        if original is None:
            raise errors.ModelUnavailable(model=name, reason=base.unavailable or base.state)
        config = _plain(base.config, original.device, tuple(original.report["sizes"]))
        served = ServedModel(
            name[: MODEL_CHARS_MAX - len(SUFFIX)] + SUFFIX, config, self._epoch, self._send, self._supervisor
        )
        spec = config.spec(served.name, self._devices[original.device])
        worker = WorkerProcess(f"{served.name}-{original.device}-0", original.device, spec, served)
        self._served, self._worker, self._holder, self._ending = served, worker, holder, False
        self._models[served.name] = served
        self._supervisor.add(worker)
        log.info("private worker asked for model=%s sizes=%s", name, ",".join(map(str, config.batch_sizes)))
        return served.name

    def _chosen(self, base: ServedModel) -> WorkerProcess | None:
        """The worker to be compared: the first that replays graphs, or else the first; None if none is ready."""
        ready = [
            worker for worker in self._supervisor.workers.values() if worker.served is base and worker.state == "ready"
        ]
        return next((worker for worker in ready if worker.report.get("graph") == "on"), ready[0] if ready else None)

    def release(self, answer: Answer, client: Client | None) -> None:
        """End the private worker; ``answer`` is called when its process is gone, at once if there is none.

        Raises:
            Rejected: it is there for another client.
        """
        if self._served is None:
            answer({"released": False})
            return
        if self._holder is not None and self._holder is not client:
            raise errors.Rejected(reason=f"{self._served.name} is there for another client")
        self._answers.append(answer)
        self._end("it was released")

    def is_held_by(self, client: Client) -> bool:
        """True if the private worker is there for ``client``."""
        return self._holder is client

    def client_gone(self, client: Client) -> None:
        """End the private worker if it was there for ``client``."""
        if self.is_held_by(client):
            self._end("its client is gone")

    def _end(self, reason: str) -> None:
        """Refuse what waits; what runs is answered, within the time that a worker has to stop."""
        assert self._served is not None
        assert self._worker is not None
        self._holder = None
        if not self._ending:
            log.info("private worker ends model=%s reason=%s", self._served.name, reason)
            self._ending = True
            self._served.core.draining = True
            self._refuse_queued(self._served)
            self._supervisor.retire(self._worker)

    @staticmethod
    def _refuse_queued(served: ServedModel) -> None:
        for ticket in served.core.queued():
            served.cancel(ticket, errors.ShuttingDown(what=f"model {served.name!r}"), "failed")

    def due_us(self) -> int | None:
        """0 if ``tick`` has something to do, else None: at the broker's end everything is taken apart at once."""
        ended = self._ending and self._worker is not None and self._worker.state == "dead"
        return 0 if ended and not self._supervisor.stopping else None

    def tick(self) -> None:
        """Forget the model once its worker is reaped: its slots are given back."""
        if self.due_us() is None:
            return
        assert self._served is not None
        assert self._worker is not None
        served, answers = self._served, self._answers
        self._refuse_queued(served)  # what the worker ran when it had to be killed
        self._supervisor.forget(self._worker)
        del self._models[served.name]
        served.close()
        self._served = self._worker = None
        self._answers, self._ending = [], False
        log.info("private worker gone model=%s", served.name)
        for answer in answers:
            answer({"released": True})


def _plain(config: ModelConfig, device: str, sizes: tuple[int, ...]) -> ModelConfig:
    """The config of the private worker: the same values at the same padded sizes, and nothing that replays."""
    update: dict[str, Any] = {
        "graph": "off",
        "batch_sizes": sizes,
        "graph_batch_sizes": (),
        "workers": {device: 1},
        "queue": "shared",
        "slots": SLOTS,
    }
    return config.model_copy(update=update)
