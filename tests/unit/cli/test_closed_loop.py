from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from fake_client import PAIR, ROWS, SINGLE, FakeClient

from mxpool.cli import closed_loop
from mxpool.cli.surroundings import Arrays
from mxpool.errors import BrokerLost, QueueFull, RunFailed
from mxpool.tensors import Signature


class Slow(FakeClient):
    """Answers in order, ``in_flight`` behind what it took, each ``step_s`` after the one before."""

    def __init__(self, step_s: float, **scripted: Any) -> None:
        super().__init__(**scripted)
        self.now_s = 0.0
        self.step_s = step_s
        self.most_in_flight = 0

    def time(self) -> float:
        return self.now_s

    def push(
        self, model: str, frames: Iterable[Mapping[str, Any]], *, in_flight: int, timeout_s: float
    ) -> Iterator[Arrays]:
        assert (model, timeout_s) == ("ranking", 1)
        frames, open_requests, more = iter(frames), 0, True
        while more or open_requests:
            while more and open_requests < in_flight:
                more = next(frames, None) is not None
                open_requests += more
            self.most_in_flight = max(self.most_in_flight, open_requests)
            if not open_requests:
                return
            self.now_s += self.step_s
            self.sent.append({})
            if len(self.sent) - 1 in self.failures:
                raise self.failures[len(self.sent) - 1]
            open_requests -= 1
            yield {}


def measured(client: Slow, seconds: float, in_flight: int) -> closed_loop.Tally:
    return closed_loop.closed_loop(
        client, "ranking", [{}], in_flight=in_flight, seconds=seconds, timeout_s=1, clock=client.time
    )


def test_the_loop_keeps_so_many_under_way_and_stops_at_its_time() -> None:
    client = Slow(0.01)
    tally = measured(client, 1.0, 4)
    assert client.most_in_flight == 4
    assert len(tally.latencies_s) == pytest.approx(104, abs=2)
    assert tally.elapsed_s == pytest.approx(1.03, abs=0.02)
    figures = tally.figures(8)
    assert figures["requests_per_s"] == pytest.approx(100, abs=2)
    assert figures["rows_per_s"] == pytest.approx(800, abs=16)
    assert figures["latency_ms"]["p50"] == pytest.approx(40, abs=0.01)


def test_a_failure_is_counted_by_its_code_and_the_loop_goes_on() -> None:
    failures = {3: RunFailed(model="ranking", reason="x"), 7: RunFailed(model="ranking", reason="x")}
    tally = measured(Slow(0.01, failures=failures), 0.5, 2)
    assert tally.failures == {"run_failed": 2}
    assert len(tally.latencies_s) > 40


def test_a_broker_that_refuses_everything_is_not_asked_for_ever() -> None:
    full = QueueFull(model="ranking", depth=1, limit=1, unit="requests", retry_after_ms=1)
    tally = measured(Slow(0.0, failures=dict.fromkeys(range(1000), full)), 1.0, 2)
    assert (tally.failures, tally.latencies_s) == ({"queue_full": closed_loop.FAILURES_MAX}, [])
    assert tally.figures(1)["latency_ms"] == {"p50": None, "p90": None, "p99": None}


def test_a_lost_broker_ends_the_loop() -> None:
    with pytest.raises(BrokerLost):
        measured(Slow(0.01, failures={2: BrokerLost(endpoint="ipc:///x", reason="gone")}), 1.0, 2)


@pytest.mark.parametrize("signature", [ROWS, SINGLE, PAIR])
def test_random_inputs_fit_the_model_and_differ(signature: Signature) -> None:
    blocks = closed_loop.random_blocks(signature, 5)
    for block in blocks:
        for spec in signature.inputs:
            assert block[spec.name].shape == signature.shape(spec, 5)
            assert block[spec.name].dtype == spec.dtype
            assert np.all((block[spec.name] >= 0) & (block[spec.name] <= 1))
    first = signature.inputs[0].name
    assert not np.array_equal(blocks[0][first], blocks[1][first])


def test_cpu_use_is_told_for_processes_that_can_be_seen_and_only_for_those() -> None:
    cpu = closed_loop.CpuClock({"me": os.getpid(), "nobody": 2**22 + 1})
    before = os.times().user
    while os.times().user < before + 0.05:
        pass
    assert cpu.cores(0.1)["me"] >= 0.4
    assert set(cpu.cores(0.1)) == {"me"}


def test_processes_are_named_as_the_broker_names_them() -> None:
    workers = [{"worker": "r-cpu-0", "pid": 12}, {"worker": "r-cpu-1", "pid": None}]
    status = {"broker": {"pid": 11}, "models": {"r": {"workers": workers}}}
    assert closed_loop.pids(status) == {"broker": 11, "r-cpu-0": 12}
    assert closed_loop.pids({}) == {}
