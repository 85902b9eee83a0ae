"""Check: a moderate load for some minutes; every answer compared, memory and run_us p99 followed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mxpool import histogram
from mxpool.cli.closed_loop import FAILURES_MAX, pids
from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.asking import Asked
from mxpool.cli.verify.known_rows import KnownRows, Stretch, learn
from mxpool.cli.verify.material import Material
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.cli.verify.trend import MIB, SAMPLES_MIN, Sample, growth, rise
from mxpool.errors import BrokerLost, ClientUnusable, MxPoolError

SAMPLES = 10
SAMPLE_S_MIN = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What the soak reads of the world around it: a clock, memory of processes, memory of the model's devices."""

    clock: Callable[[], float]
    resident: Callable[[list[int]], int]
    device: Callable[[], int | None]


@dataclass(slots=True)
class Soak:
    """One soak. ``samples`` are taken while requests are under way, ten over its time, or one each second."""

    asked: Asked
    material: Material
    gauges: Gauges
    seconds: float
    samples: list[Sample] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    wrong: int = 0
    first: str = ""
    restarts: int = 0
    _before: Mapping[str, Any] = field(default_factory=dict)
    _sent: deque[Stretch] = field(default_factory=deque)

    def run(self) -> Iterator[Outcome]:
        """Load, watch, and judge: errors, memory, trend.

        Raises:
            BrokerLost, ClientUnusable: there is nothing left to watch.
        """
        known = learn(self.asked, self.material)
        workers = self.asked.workers()
        in_flight = 2 * max(len(workers), 1)
        clock = self.gauges.clock
        start_s = clock()
        end_s, step_s = start_s + self.seconds, max(self.seconds / SAMPLES, SAMPLE_S_MIN)
        self._sample(0.0)
        while clock() < end_s and self.failures.total() < FAILURES_MAX:
            self._load(known, in_flight, start_s, end_s, step_s)
        if clock() - start_s > self.samples[-1].at_s:
            self._sample(clock() - start_s)
        yield self._errors()
        yield self._memory()
        yield self._trend()

    def _load(self, known: KnownRows, in_flight: int, start_s: float, end_s: float, step_s: float) -> None:
        """Requests until the end or the first error."""
        self._sent.clear()
        try:
            for answer in self.asked.push(self._requests(known, end_s), in_flight):
                self._compare(known, self._sent.popleft(), answer)
                at_s = self.gauges.clock() - start_s
                if at_s >= len(self.samples) * step_s:
                    self._sample(at_s)
        except (BrokerLost, ClientUnusable):
            raise
        except MxPoolError as error:
            self.failures[error.code] += 1
            self.first = self.first or f"{error.code}: {error}"

    def _requests(self, known: KnownRows, end_s: float) -> Iterator[Arrays]:
        while self.gauges.clock() < end_s:
            stretch = known.stretch(self.material)
            self._sent.append(stretch)
            yield known.request(stretch)

    def _compare(self, known: KnownRows, stretch: Stretch, answer: Arrays) -> None:
        self.answered += 1
        found = known.difference(stretch, answer)
        if not known.right(found):
            self.wrong += 1
            self.first = self.first or f"{stretch}: {found}"

    def _sample(self, at_s: float) -> None:
        status = self.asked.client.status()
        stats = status["models"][self.asked.model]
        last = {key: sum(getattr(sample, key) for sample in self.samples) for key in ("answered", "errors", "wrong")}
        buckets = stats["run_us"].get("buckets", [])
        span = histogram.between(self._before.get("buckets", buckets), buckets)
        restarts = sum(worker.get("restarts", 0) for worker in stats.get("workers", []))
        self.restarts = restarts - self._before.get("restarts", restarts)
        self._before = {"buckets": buckets, "restarts": self._before.get("restarts", restarts)}
        self.samples.append(
            Sample(
                at_s=round(at_s, 3),
                answered=self.answered - last["answered"],
                errors=self.failures.total() - last["errors"],
                wrong=self.wrong - last["wrong"],
                resident_bytes=self.gauges.resident(list(pids(status).values())),
                device_bytes=self.gauges.device(),
                run_us_p99=histogram.percentile(span, 99),
            )
        )

    def _errors(self) -> Outcome:
        errors = self.failures.total()
        bad = errors or self.wrong or self.restarts
        rate = errors / max(self.answered + errors, 1)
        detail = f"{self.answered} answers, error rate {rate:.3%}, {self.wrong} wrong, {self.restarts} restarts"
        return Outcome(
            check="soak answers",
            compared=f"{self.samples[-1].at_s / 60:.1f} min, every answer against one known before",
            result=Result.FAILED if bad or not self.answered else Result.OK,
            detail=detail + (f": {self.first}" if self.first else ""),
            figures={
                "answers": self.answered,
                "errors": dict(self.failures),
                "error_rate": rate,
                "wrong": self.wrong,
                "restarts": self.restarts,
            },
        )

    def _memory(self) -> Outcome:
        settled = self.samples[1:] or self.samples  # the first second fills caches
        host, leaks = growth([sample.resident_bytes for sample in settled])
        on_device = [sample.device_bytes for sample in settled if sample.device_bytes is not None]
        device, device_leaks = growth(on_device)
        told = f"device {on_device[-1] / MIB:.0f} MiB ({device / MIB:+.1f})" if on_device else "device memory not told"
        return Outcome(
            check="soak memory",
            compared="last sample against the second; limit 32 MiB and 5 %",
            result=Result.FAILED if leaks or device_leaks else Result.OK,
            detail=f"host {settled[-1].resident_bytes / MIB:.0f} MiB ({host / MIB:+.1f}), {told}",
            figures={"host_growth_bytes": host, "device_growth_bytes": device if on_device else None},
        )

    def _trend(self) -> Outcome:
        points = [(one.at_s, float(one.run_us_p99)) for one in self.samples if one.run_us_p99 is not None]
        part, rising = rise(points)
        last = f"{points[0][1]:.0f} us first, {points[-1][1]:.0f} us last" if points else "no batches"
        word = "RISING" if rising else "flat" if len(points) >= SAMPLES_MIN else "too short for a trend"
        return Outcome(
            check="soak run_us p99",
            compared="slope over the whole time; limit 25 % and 200 us",
            result=Result.FAILED if rising else Result.OK,
            detail=f"{word}: {part:+.1%}, {last}",
            figures={"rise": part, "first_us": points[0][1] if points else None, "rising": rising},
        )
