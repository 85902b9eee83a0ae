from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from fake_client import FakeClient, mxpool

from mxpool.errors import RunFailed


def test_a_short_run_prints_rates_latencies_errors_and_cpu() -> None:
    client = FakeClient(status={"broker": {"pid": os.getpid()}}, failures={5: RunFailed(model="ranking", reason="x")})
    ran = mxpool(client, "bench", "ranking", "--seconds", 0.05, "--rows", 2, "--in-flight", 3, "--json")
    assert ran.exit_code == 0
    figures = json.loads(ran.stdout)
    assert (figures["in_flight"], figures["rows"], figures["errors"]) == (3, 2, {"run_failed": 1})
    assert figures["requests"] == len(client.sent) - 1
    assert figures["rows_per_s"] > figures["requests_per_s"] > 0
    assert set(figures["latency_ms"]) == {"p50", "p90", "p99"}
    assert set(figures["cores"]) == {"client", "broker"}
    assert client.sent[0]["x"].shape == (2, 3)


def test_a_files_arrays_are_sent_as_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.full((7, 3), 5, np.float32))
    client = FakeClient()
    ran = mxpool(client, "bench", "ranking", "--seconds", 0.01, "--npz", tmp_path / "in.npz")
    assert np.all(client.sent[0]["x"] == 5)
    assert "7 rows each" in ran.stdout
    assert "p99 ms" in ran.stdout


def test_a_run_without_an_answer_exits_with_1() -> None:
    failures = dict.fromkeys(range(1000), RunFailed(model="ranking", reason="x"))
    ran = mxpool(FakeClient(failures=failures), "bench", "ranking", "--seconds", 0.05)
    assert ran.exit_code == 1
    assert "error run_failed" in ran.stdout


def test_a_run_that_errors_cut_short_says_so_and_exits_with_1() -> None:
    failures = dict.fromkeys(range(1, 1000), RunFailed(model="ranking", reason="x"))
    ran = mxpool(FakeClient(failures=failures), "bench", "ranking", "--seconds", 30, "--json")
    figures = json.loads(ran.stdout)
    assert (ran.exit_code, figures["cut_short"], figures["requests"]) == (1, True, 1)
    assert "100 requests failed" in ran.stderr
    whole = mxpool(FakeClient(), "bench", "ranking", "--seconds", 0.01, "--json")
    assert (whole.exit_code, json.loads(whole.stdout)["cut_short"]) == (0, False)


@pytest.mark.parametrize("flag", [("--rate", 5), ("--config", "x.toml"), ("--csv", "x.csv"), ("graph=off",)])
def test_what_belongs_to_a_sweep_is_refused_without_one(flag: tuple[object, ...]) -> None:
    ran = mxpool(FakeClient(), "bench", "ranking", *flag)
    assert (ran.exit_code, "goes with --sweep" in ran.stderr) == (2, True)


def test_a_sweep_takes_no_endpoint_since_its_brokers_are_its_own() -> None:
    ran = mxpool(FakeClient(), "bench", "ranking", "--sweep", "workers=1", "--config", "x.toml")
    assert (ran.exit_code, "no -e" in ran.stderr) == (2, True)
