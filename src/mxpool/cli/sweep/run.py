"""A sweep from its first broker to its advice; one broker is alive at a time."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from mxpool.cli import memory
from mxpool.cli.closed_loop import pids
from mxpool.cli.surroundings import Calls, Surroundings, signature
from mxpool.cli.sweep import figures
from mxpool.cli.sweep.advice import advise
from mxpool.cli.sweep.axes import Combination
from mxpool.cli.sweep.broker_process import CannotServe, SweptBroker, closed_quietly
from mxpool.cli.sweep.clients import Clients, Load
from mxpool.cli.sweep.cpu_samples import CpuSamples
from mxpool.cli.sweep.plan import Plan
from mxpool.cli.sweep.toml_text import to_toml, tree
from mxpool.errors import MxPoolError

RATE_SHARE = 0.8  # of what the slowest combination reached: all can answer it, and none idles
CLIENT_RATE = 5000.0  # requests/s that one client can offer on time; 10,000 to 11,000 were the most on a 2-core machine
START_MAX_S = 15.0  # of a broker and its processes, beside the loading itself

Row = dict[str, Any]
Measure = Callable[[Clients], Load]


class Sweep:
    """``rows`` has one entry for each combination, filled as they are measured; ``rate`` once it is known."""

    def __init__(self, plan: Plan, surroundings: Surroundings, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._around = surroundings
        self._say = say
        self.rate = plan.rate
        self.rows: list[Row] = [_empty(combination) for combination in plan.combinations]
        self.interrupted = False

    def run(self) -> None:
        """Measure all. A signal ends it early, with ``interrupted`` set and what runs taken down."""
        try:
            with _one_interrupt():
                if self.rate is not None:
                    self._each(("saturated", "offered"))
                    return
                self._each(("saturated",))
                reached = [row["saturated"]["requests_per_s"] for row in self.rows if row["saturated"]]
                self.rate = self._common_rate(min(reached, default=0.0)) or None
                if self.rate is not None:
                    self._each(("offered",))
        except KeyboardInterrupt:
            self.interrupted = True

    def _common_rate(self, slowest: float) -> float:
        """What every combination can answer, and the clients can send."""
        rate, most = RATE_SHARE * slowest, CLIENT_RATE * self._plan.clients
        if rate > most:
            self._say(
                f"offering {most:,.0f} requests/s, not {rate:,.0f}: {self._plan.clients} client(s) can keep "
                "the schedule of no more; give more --clients, or more --rows"
            )
        return round(min(rate, most), 1)

    def told(self) -> dict[str, Any]:
        """All figures, as printed by ``--json``."""
        plan = self._plan
        return {
            "model": plan.model,
            "device": plan.device,
            "kind": plan.kind,
            "rows": plan.traffic.rows,
            "seconds": plan.traffic.seconds,
            "clients": plan.clients,
            "rate": self.rate,
            "interrupted": self.interrupted,
            "combinations": self.rows,
            "recommended": None if self.interrupted else advise(self.rows),
        }

    def _each(self, phases: Sequence[str]) -> None:
        for combination, row in zip(self._plan.combinations, self.rows, strict=True):
            if row["error"]:
                continue
            self._say(f"{combination}: {' and '.join(phases)}")
            try:
                self._combination(combination, row, phases)
            except (CannotServe, MxPoolError) as error:
                row["error"] = str(error)
                self._say(f"{combination}: {error}")

    def _combination(self, combination: Combination, row: Row, phases: Sequence[str]) -> None:
        plan = self._plan
        with contextlib.ExitStack() as stack:
            broker = stack.enter_context(SweptBroker(plan.model, self._around.environ))
            broker.start(to_toml(tree(plan.config, plan.model, plan.device, combination, broker.endpoint)))
            client = self._around.connect(broker.endpoint)
            stack.callback(closed_quietly, client)
            within_s = START_MAX_S + plan.config.models[plan.model].load_timeout_ms / 1000
            status = broker.wait_ready(client, within_s, self._around.clock, self._around.pause)
            _note_graph(row, status["models"][plan.model]["workers"], plan.kind)
            clients = stack.enter_context(Clients(plan.clients, broker.environ))
            with broker.log_path.open("ab") as log:
                rows = clients.start(self._setup(broker.endpoint), log)
            for phase in phases:
                row[phase] = self._phase(phase, client, clients, self._in_flight(client, combination.workers, rows))
            row["memory"] = self._memory(client)

    def _setup(self, endpoint: str) -> dict[str, Any]:
        plan = self._plan
        npz = None if plan.traffic.npz is None else str(plan.traffic.npz.absolute())
        return {
            "endpoint": endpoint,
            "model": plan.model,
            "rows": plan.traffic.rows,
            "npz": npz,
            "timeout_s": plan.traffic.timeout_s,
        }

    def _in_flight(self, client: Calls, workers: int, rows: int) -> int:
        """Requests that keep every worker busy with full batches: two batches each, as far as the queue takes them."""
        batch = max(signature(client, self._plan.model).max_batch_size, 1)
        running = math.ceil(batch * workers / rows)
        queued = min(running, self._plan.config.models[self._plan.model].max_queue_size)
        return max(running + queued, self._plan.traffic.in_flight)

    def _phase(self, phase: str, client: Calls, clients: Clients, in_flight: int) -> dict[str, Any]:
        """Measure one phase."""
        plan, before = self._plan, client.status()
        beside = {f"client-{index}": pid for index, pid in enumerate(clients.pids)}
        with CpuSamples(pids(before), beside) as samples:
            if phase == "saturated":
                load = clients.closed(in_flight, plan.traffic.seconds, plan.traffic.timeout_s)
            else:
                assert self.rate is not None
                load = clients.open(self.rate, plan.traffic.seconds, plan.traffic.timeout_s)
        after = client.status()
        cores_here = len(os.sched_getaffinity(0))
        sent = {"in_flight": in_flight} if phase == "saturated" else figures.offered_figures(load, plan.traffic.seconds)
        return {
            **figures.load_figures(load),
            **sent,
            **figures.cpu_figures(samples.percents(), samples.cores(), list(beside), cores_here),
            **figures.broker_figures(before["models"][plan.model], after["models"][plan.model]),
        }

    def _memory(self, client: Calls) -> dict[str, int | None]:
        """Bytes that are taken while the combination serves."""
        status = client.status()
        device = self._plan.config.devices[self._plan.device]
        reports = [worker["report"] for worker in status["models"][self._plan.model]["workers"]]
        known = [report["device_bytes"] for report in reports if report.get("device_bytes") is not None]
        return {
            "device_bytes": sum(known) if known else None,
            "device_used_bytes": memory.device_used_bytes(device.kind, device.index),
            "resident_bytes": memory.resident_bytes(list(pids(status).values())),
        }


def _empty(combination: Combination) -> Row:
    return {
        "workers": combination.workers,
        "graph": combination.graph,
        "graph_on": None,
        "notes": [],
        "error": None,
        "memory": {},
        "saturated": None,
        "offered": None,
    }


def _note_graph(row: Row, workers: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Whether the workers replay a graph, and if it was wanted and is not so, why."""
    reports = [worker["report"] for worker in workers]
    row["graph_on"] = all(report.get("graph") == "on" for report in reports)
    row["notes"] = []
    if row["graph"] == "off":
        return
    if kind == "cpu":
        row["notes"].append("the graph is off: a cpu has none")
        return
    for failure in [found for report in reports if (found := report.get("graph_failure"))][:1]:
        where = ", ".join(f"{name} {failure[name]}" for name in ("size", "node") if failure.get(name))
        row["notes"].append(f"not captured ({where}): {failure.get('reason')}")
    if not row["graph_on"] and not row["notes"]:
        row["notes"].append("the graph is off; the workers do not say why")


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt; later ones do not disturb the taking down."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def caught(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, caught) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
