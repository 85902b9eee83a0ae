from __future__ import annotations

import re
import time
from typing import Any

import psutil
import pytest
import wheels
from worker_rig import make_spec

from mxpool.errors import LoadFailed, NotServable
from mxpool.tensors import TensorSpec
from mxpool.workers.probe import probe

TIMEOUT_S = 60.0


def probe_echo(timeout_s: float = TIMEOUT_S, **options: Any) -> str:
    with pytest.raises(LoadFailed) as caught:
        probe(make_spec(backend="echo", options=options), timeout_s)
    assert psutil.Process().children() == []
    return caught.value.message


def test_a_probe_tells_the_signature_and_what_loading_took_and_leaves_no_process() -> None:
    loaded = probe(make_spec(wheels.k_neighbors(), max_batch_size=32), TIMEOUT_S)
    assert loaded.signature.inputs == (TensorSpec("input", "FP32", (4,)),)
    assert loaded.signature.outputs == (TensorSpec("label", "INT64", ()), TensorSpec("probabilities", "FP32", (2,)))
    assert loaded.report["provider"] == "CPUExecutionProvider"
    assert loaded.report["load_us"] > 0
    assert psutil.Process().children() == []


def test_a_refusal_arrives_as_the_error_that_it_is() -> None:
    with pytest.raises(NotServable) as caught:
        probe(make_spec(wheels.text_direction()), TIMEOUT_S)
    assert caught.value.fields["name"] == "x"
    assert "dims = " in caught.value.message


def test_a_loader_that_aborts_is_an_error_that_names_the_signal() -> None:
    assert "SIGABRT" in probe_echo(abort_on_load=True)


def test_a_loader_that_exits_is_an_error_with_its_code() -> None:
    assert re.search(r"ended with exit code 3: it wrote nothing", probe_echo(load_exit=3))


def test_a_loader_that_takes_too_long_is_ended() -> None:
    begin_s = time.monotonic()
    assert "no signature within 0.5 s" in probe_echo(timeout_s=0.5, load_delay_ms=60_000)
    assert time.monotonic() - begin_s < 5
