"""All checks of one model, in the order in which each can rely on those before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mxpool.cli import memory
from mxpool.cli.surroundings import Calls, Surroundings
from mxpool.cli.verify import consecutive, coupling, crowd, every_slot, on_off, startup_flags
from mxpool.cli.verify.asking import Asked, graph_is_on
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.cli.verify.private_worker import private_worker
from mxpool.cli.verify.soak import Gauges, Soak
from mxpool.cli.verify.trend import Sample
from mxpool.errors import BrokerLost, ClientUnusable, MxPoolError, ShuttingDown


@dataclass(slots=True)
class Verification:
    """One run. ``outcomes`` grow as ``run`` goes on; ``samples`` are those of the soak."""

    surroundings: Surroundings
    client: Calls
    model: str
    material: Material
    timeout_s: float = 30.0
    load_timeout_s: float = 120.0
    clients: int = 4
    soak_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def run(self) -> Iterator[Outcome]:
        """Each outcome as it is found.

        Raises:
            BrokerLost, ClientUnusable: the rest cannot be checked.
        """
        for outcome in self._all():
            self.outcomes.append(outcome)
            yield outcome

    def _all(self) -> Iterator[Outcome]:
        batched = self.material.signature.batched
        asked = Asked(self.client, self.model, self.timeout_s, self.surroundings.client, batched)
        stats = asked.stats()
        if stats.get("state") == "draining":
            raise ShuttingDown(what=f"model {self.model!r}")
        ran, restarts = _rows(stats), _restarts(stats)
        yield from startup_flags.check(stats)
        if not asked.workers():
            return
        yield from _guarded("repeat", lambda: [consecutive.check_repeat(asked, self.material)])
        yield from self._beside_plain(asked)
        yield from _guarded("every slot", lambda: [every_slot.check(asked, self.material)])
        yield from _guarded("coupling", lambda: [coupling.check(asked, self.material)])
        yield from _guarded("clients at once", lambda: [crowd.check(asked, self.material, self.clients)])
        if self.soak_s:
            yield from _guarded("soak", self._soak(asked).run)
        yield from self._traffic(asked, ran)
        yield from _deaths(asked, restarts)

    def _beside_plain(self, asked: Asked) -> Iterator[Outcome]:
        """The checks that a private worker with the graph off makes sharper; without a graph it is not started."""
        check = "graph on/off"
        with contextlib.ExitStack() as stack:
            plain: Asked | None = None
            if any(graph_is_on(worker) for worker in asked.workers()):
                found: tuple[Calls, str] | None = None
                try:
                    entered = private_worker(self.surroundings, self.model, self.load_timeout_s)
                    found = stack.enter_context(entered)
                except (BrokerLost, ClientUnusable):
                    raise
                except MxPoolError as error:
                    yield _error(check, error)
                if found is not None:
                    beside = Asked(*found, self.timeout_s)
                    plain = beside
                    yield from _guarded(check, lambda: on_off.check(asked, beside, self.material))
            else:
                why = "no worker replays a graph: there is nothing to compare"
                yield Outcome(check=check, compared="", result=Result.SKIPPED, detail=why)
            yield from _guarded("consecutive inputs", lambda: [consecutive.check(asked, plain, self.material)])

    def _soak(self, asked: Asked) -> Soak:
        devices = _devices(asked.workers())
        gauges = Gauges(
            clock=self.surroundings.clock, resident=memory.resident_bytes, device=lambda: _device_bytes(devices)
        )
        soak = Soak(asked, self.material, gauges, self.soak_s)
        self.samples = soak.samples
        return soak

    def _traffic(self, asked: Asked, ran: int) -> Iterator[Outcome]:
        """Rows of others share batches with ours: where rows are coupled, that changes answers."""
        others = _rows(asked.stats()) - ran - asked.rows
        if others > 0:
            yield Outcome(
                check="other traffic",
                compared="rows that were not ours",
                result=Result.NOTE,
                detail=f"{others} rows of others ran meanwhile; where rows are coupled, they change answers",
                figures={"rows": others},
            )


def _rows(stats: dict[str, Any]) -> int:
    """Live rows that ran. Requests would not do: a large one is split on its way, a refused one is sent again."""
    return int(stats.get("batch_rows", 0))


def _restarts(stats: dict[str, Any]) -> int:
    return sum(int(worker.get("restarts", 0)) for worker in stats.get("workers", []))


def _deaths(asked: Asked, before: int) -> Iterator[Outcome]:
    """A worker that died of a check, or beside it, is no way to go live."""
    deaths = _restarts(asked.stats()) - before
    if deaths > 0:
        detail = f"workers were started again {deaths} times meanwhile; mxpool status has the reason"
        figures = {"restarts": deaths}
        yield Outcome(check="workers", compared="restarts", result=Result.FAILED, detail=detail, figures=figures)


def _guarded(check: str, found: Callable[[], Iterable[Outcome]]) -> Iterator[Outcome]:
    """The outcomes of a check; an error ends it as failed, and the next check goes on."""
    try:
        yield from found()
    except (BrokerLost, ClientUnusable):
        raise
    except MxPoolError as error:
        yield _error(check, error)


def _error(check: str, error: MxPoolError) -> Outcome:
    detail = f"{error.code}: {error}"
    return Outcome(check=check, compared="", result=Result.FAILED, detail=detail, figures={"error": error.code})


def _devices(workers: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Kind and index of the devices that workers run on."""
    return {(str(worker.get("device_kind", "cpu")), int(worker.get("device_index", 0))) for worker in workers}


def _device_bytes(devices: set[tuple[str, int]]) -> int | None:
    known = [used for used in (memory.device_used_bytes(*device) for device in devices) if used is not None]
    return sum(known) if known else None
