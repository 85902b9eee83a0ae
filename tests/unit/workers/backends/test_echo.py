from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_rig import make_spec

from mxpool.clock import now_us
from mxpool.errors import NotServable, RunFailed
from mxpool.shm.layout import SlotLayout, SlotViews
from mxpool.tensors import TensorSpec
from mxpool.workers.backends.echo import EchoBackend


def bound(max_batch_size: int = 8, slots: int = 2, **options: Any) -> tuple[EchoBackend, list[SlotViews]]:
    backend = EchoBackend()
    spec = make_spec(backend="echo", max_batch_size=max_batch_size, options=options)
    layout = SlotLayout(backend.load(spec).signature, slots)
    memory = memoryview(bytearray(layout.size_bytes))
    views = [layout.views(memory, slot) for slot in range(slots)]
    assert backend.bind(memory, views).sizes == spec.sizes
    return backend, views


def run(backend: EchoBackend, slot: int, size: int) -> None:
    backend.start(slot, size)
    backend.finish()


def test_outputs_are_the_inputs_of_the_rows_that_run_and_no_others() -> None:
    backend, views = bound()
    views[1].inputs["x"][...] = np.arange(32).reshape(8, 4)
    run(backend, 1, 4)
    assert (views[1].outputs["y"][:4] == views[1].inputs["x"][:4]).all()
    assert (views[1].outputs["y"][4:] == 0).all()


def test_scale_and_offset_keep_each_tensors_datatype() -> None:
    backend, views = bound(tensors="a:FP32:2,b:INT64:", scale=1.5, offset=1)
    views[0].inputs["a"][0] = [0.5, 3]
    views[0].inputs["b"][0] = 7
    run(backend, 0, 1)
    assert views[0].outputs["y_a"][0].tolist() == [1.75, 5.5]
    assert views[0].outputs["y_b"][0] == 11
    assert views[0].outputs["y_b"].dtype == np.int64


def test_a_model_without_a_batch_axis_echoes_whole_arrays() -> None:
    backend, views = bound(max_batch_size=0, tensors="x:FP32:2x3")
    views[0].inputs["x"][...] = 5
    run(backend, 0, 1)
    assert views[0].outputs["y"].shape == (2, 3)
    assert (views[0].outputs["y"] == 5).all()


def test_the_signature_is_what_the_options_say() -> None:
    signature = EchoBackend().load(make_spec(backend="echo", options={"tensors": "a:FP16:2x3, b:BOOL:1"})).signature
    assert signature.inputs == (TensorSpec("a", "FP16", (2, 3)), TensorSpec("b", "BOOL", (1,)))
    assert [output.name for output in signature.outputs] == ["y_a", "y_b"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dealy_ms": 1}, "'dealy_ms' is not one of tensors, scale"),
        ({"tensors": "x:FP99:4"}, "'FP99' is not one of"),
        ({"tensors": "x"}, "options of 'echo'"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(NotServable, match=text):
        EchoBackend().load(make_spec(backend="echo", options=options))


def test_batches_in_flight_follow_one_another_as_on_one_device() -> None:
    backend, _ = bound(delay_ms=20, in_flight=2)
    assert backend.in_flight == 2
    begin_us = now_us()
    backend.start(0, 1)
    backend.start(1, 1)
    assert backend.finish_due_us() >= begin_us + 20_000
    first, second = backend.finish(), backend.finish()
    assert first.t_end_us - begin_us >= 20_000
    assert second.t_end_us - begin_us >= 40_000


def test_a_gate_holds_each_batch_for_one_byte(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    backend, _ = bound(gate=str(gate))
    try:
        backend.start(0, 1)
        assert backend.finish_due_us() > now_us()
        gate.write_bytes(b"1")
        assert backend.finish_due_us() <= now_us()
        backend.finish()
        backend.start(0, 1)
        assert backend.finish_due_us() > now_us()
    finally:
        backend.unload()


def test_a_row_that_starts_with_fail_on_fails_its_batch_only() -> None:
    backend, views = bound(fail_on=-1)
    views[0].inputs["x"][2, 0] = -1
    backend.start(0, 2)
    backend.finish()
    backend.start(0, 4)
    with pytest.raises(RunFailed, match="a row starts with -1"):
        backend.finish()
    run(backend, 1, 4)


def test_a_batch_that_hangs_is_never_due() -> None:
    backend, views = bound(hang_on=13, in_flight=2)
    views[0].inputs["x"][0, 0] = 13
    backend.start(0, 1)
    assert backend.finish_due_us() > now_us()
