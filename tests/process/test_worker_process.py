from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import onnxruntime
import psutil
import pytest
import wheels
from worker_rig import EPOCH, WorkerRig, make_spec

from mxpool import messages
from mxpool.shm.link import LinkClosed

GONE_WITHIN_S = 1.0  # of the end of the link: docs/design.md
IDLE_WINDOW_S = 1.0


def echo(max_batch_size: int = 8, **options: Any) -> WorkerRig:
    return WorkerRig(make_spec(backend="echo", max_batch_size=max_batch_size, options=options))


def test_a_worker_says_hello_loads_binds_and_answers_batches_in_its_slots() -> None:
    with echo() as rig:
        hello = rig.expect(messages.HELLO)
        assert hello == {"role": "worker", "version": messages.LINK_VERSION, "pid": rig.process.pid}
    with echo() as rig:
        ready = rig.ready()
        assert (ready["in_flight"], ready["sizes"]) == (1, [1, 2, 4, 8])
        rig.views(1).inputs["x"][:3] = np.arange(12).reshape(3, 4)
        rig.run(slot=1, rows=3, size=4, generation=7, sequence=41)
        done = rig.done()
        assert (done.epoch, done.slot, done.generation, done.error) == (EPOCH, 1, 7, None)
        assert 0 < done.t_start_us <= done.t_end_us
        assert (rig.views(1).outputs["y"][:3] == rig.views(1).inputs["x"][:3]).all()
        assert rig.started_sequence() == 41


def test_stop_finishes_what_is_started_then_the_worker_exits_with_0(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with echo(in_flight=2, gate=str(gate)) as rig:
        assert rig.ready()["in_flight"] == 2
        rig.run(0, 1, 1, sequence=1)
        rig.run(1, 1, 1, sequence=2)
        rig.stop()
        with pytest.raises(subprocess.TimeoutExpired):
            rig.exit_code(timeout_s=0.2)
        gate.write_bytes(b"12")
        assert [rig.done().slot, rig.done().slot] == [0, 1]
        assert rig.exit_code() == 0


def test_stop_before_a_model_is_loaded_exits_with_0() -> None:
    with echo() as rig:
        rig.expect(messages.HELLO)
        rig.stop()
        assert rig.exit_code() == 0


def test_a_worker_without_a_model_exits_with_0_when_the_broker_is_gone() -> None:
    with echo() as rig:
        rig.expect(messages.HELLO)
        rig.link.close()
        assert rig.exit_code() == 0
        assert rig.log() == ""


def test_an_idle_worker_exits_with_0_at_once_when_the_broker_is_gone() -> None:
    with echo() as rig:
        rig.ready()
        rig.link.close()
        assert rig.seconds_to_exit() < GONE_WITHIN_S
        assert rig.exit_code() == 0


def test_a_worker_that_is_stuck_in_a_batch_is_gone_within_a_second_of_its_broker() -> None:
    with echo(hang_on=13) as rig:
        rig.ready()
        rig.views(0).inputs["x"][0, 0] = 13
        rig.run(0, 1, 1)
        rig.link.close()
        assert rig.seconds_to_exit() < GONE_WITHIN_S
        assert rig.exit_code() == 0


def test_a_worker_that_is_still_loading_is_gone_within_a_second_of_its_broker() -> None:
    with echo(load_delay_ms=60_000) as rig:
        rig.send_load()
        rig.link.close()
        assert rig.seconds_to_exit() < GONE_WITHIN_S


def test_signals_to_the_whole_group_do_not_take_a_worker_from_its_requests() -> None:
    with echo() as rig:
        rig.ready()
        for number in (signal.SIGINT, signal.SIGTERM):
            rig.process.send_signal(number)
        rig.run(0, 1, 1)
        assert rig.done().error is None
        rig.stop()
        assert rig.exit_code() == 0


def test_a_failed_batch_is_answered_with_its_error_and_the_worker_goes_on() -> None:
    with echo(fail_on=-1) as rig:
        rig.ready()
        rig.views(0).inputs["x"][0, 0] = -1
        rig.run(0, 1, 1)
        error = rig.done().error
        assert error is not None
        assert error[0] == "run_failed"
        rig.run(1, 1, 1)
        assert rig.done().error is None


def test_the_status_word_of_a_killed_worker_names_the_batch_that_it_was_running() -> None:
    with echo(crash_on=666) as rig:
        rig.ready()
        rig.views(1).inputs["x"][0, 0] = 666
        for sequence, slot in ((1, 0), (2, 1), (3, 0)):
            rig.run(slot, 1, 1, sequence=sequence)
        assert rig.done().slot == 0
        assert rig.exit_code() == -signal.SIGKILL
        assert rig.started_sequence() == 2
        with pytest.raises(LinkClosed):
            rig.link.receive_nowait()


def test_zero_rows_never_run() -> None:
    with echo(crash_on=0) as rig:
        rig.ready()
        rig.run(0, rows=0, size=1)
        error = rig.done().error
        assert error is not None
        assert "0 rows cannot run" in error[1]


def test_a_worker_that_hears_nonsense_is_sick_and_says_so_once() -> None:
    with echo() as rig:
        rig.ready()
        rig.link.send(b"\xff nonsense")
        assert rig.exit_code() == 70
        assert rig.log().count("Traceback") == 1


def test_options_that_mean_nothing_cannot_boot() -> None:
    with echo(dealy_ms=1) as rig:
        failure = rig.load_failure()
        assert (failure["code"], failure["cannot_boot"]) == ("not_servable", True)
        assert "dealy_ms" in failure["message"]
        assert rig.exit_code() == 78


@pytest.mark.parametrize(("kind", "provider"), [("cuda", "CUDAExecutionProvider"), ("maca", "MACAExecutionProvider")])
def test_a_device_that_the_runtime_lacks_is_never_replaced_by_the_cpu(tmp_path: Path, kind: str, provider: str) -> None:
    if provider in onnxruntime.get_available_providers():
        pytest.skip(f"gpu: this onnxruntime has {provider}")
    with WorkerRig(make_spec(made_models.affine(tmp_path), device_kind=kind)) as rig:
        failure = rig.load_failure()
        assert (failure["code"], failure["cannot_boot"]) == ("provider_unavailable", True)
        assert provider in failure["message"]
        assert "CPUExecutionProvider" in failure["message"]
        assert "was built without it" in failure["message"]
        assert rig.exit_code() == 78


def test_a_failure_of_the_machine_while_loading_is_told_and_may_be_retried() -> None:
    with echo(gate="/nowhere/gate") as rig:
        failure = rig.load_failure()
        assert (failure["code"], failure["cannot_boot"]) == ("load_failed", False)
        assert "FileNotFoundError" in failure["message"]
        assert rig.exit_code() == 70
        assert rig.log().count("Traceback") == 1


def test_a_device_that_is_hidden_from_the_service_is_refused_before_a_runtime_is_loaded() -> None:
    spec = make_spec(backend="echo", device_kind="cuda", device_index=1)
    with WorkerRig(spec, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"}) as rig:
        assert "CUDA_VISIBLE_DEVICES=0 hides it" in rig.load_failure()["message"]
        assert rig.exit_code() == 78


def test_a_broken_file_cannot_boot_and_the_reason_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(bytes(64))
    with WorkerRig(make_spec(str(path))) as rig:
        failure = rig.load_failure()
        assert (failure["code"], failure["cannot_boot"]) == ("model_invalid", True)
        assert str(path) in failure["message"]
        assert "\n" not in failure["message"]
        assert rig.exit_code() == 78


def test_a_runtime_that_aborts_on_a_file_takes_only_its_worker() -> None:
    with echo(abort_on_load=True) as rig:
        rig.send_load()
        assert rig.exit_code() == -signal.SIGABRT


def test_a_model_that_cannot_be_bound_says_so(tmp_path: Path) -> None:
    with WorkerRig(make_spec(made_models.lying_output(tmp_path))) as rig, pytest.raises(AssertionError) as caught:
        rig.ready()
    kind, fields = caught.value.args[0]
    assert kind == messages.LOAD_FAILED
    assert fields["cannot_boot"] is False
    assert "warm-up at 1 rows" in fields["message"]


def test_a_bad_token_fails_its_batch_and_the_next_batch_of_a_real_model_is_right() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    spec = make_spec(wheels.sentence_embedding(), max_batch_size=2, dims=dict.fromkeys(names, (8,)))
    with WorkerRig(spec) as rig:
        rig.ready()
        views = rig.views(0)
        views.inputs["input_ids"][...] = [range(8), range(100, 108)]
        views.inputs["attention_mask"][...] = 1
        feeds = {name: view.copy() for name, view in views.inputs.items()}
        views.inputs["input_ids"][1, 0] = 30_522
        rig.run(0, 2, 2)
        error = rig.done().error
        assert error is not None
        assert "30522" in error[1]
        assert "30522" not in rig.log()  # answered, and not written for every request as well
        views.inputs["input_ids"][...] = feeds["input_ids"]
        rig.run(0, 2, 2)
        assert rig.done().error is None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(spec.path, options, providers=["CPUExecutionProvider"])
        assert views.outputs["last_hidden_state"].tobytes() == session.run(None, feeds)[0].tobytes()


ONE_CPU = ("taskset", "-c", str(min(os.sched_getaffinity(0))))


@pytest.mark.parametrize("prefix", [(), ONE_CPU], ids=["all CPUs", "one CPU"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_worker_has_its_configured_threads_and_one_that_watches_its_broker(
    tmp_path: Path, threads: int, prefix: tuple[str, ...]
) -> None:
    spec = make_spec(made_models.affine(tmp_path), threads=threads)
    with WorkerRig(spec, prefix=prefix) as rig:
        rig.ready()
        rig.run(0, 1, 1)
        assert rig.done().error is None
        assert rig.threads() == threads + 1
        assert "affinity" not in rig.log()
        assert "rror" not in rig.log()


def test_an_idle_worker_uses_no_cpu_time(tmp_path: Path) -> None:
    with WorkerRig(make_spec(made_models.affine(tmp_path), threads=2)) as rig:
        rig.ready()
        rig.run(0, 1, 1)
        rig.done()
        process = psutil.Process(rig.process.pid)
        before = process.cpu_times()
        with pytest.raises(subprocess.TimeoutExpired):
            rig.exit_code(timeout_s=IDLE_WINDOW_S)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.01  # one tick of the clock


def test_a_worker_holds_one_link_and_passes_it_to_no_child() -> None:
    with echo() as rig:
        rig.ready()
        proc = Path(f"/proc/{rig.process.pid}")
        sockets = [entry for entry in (proc / "fd").iterdir() if str(entry.readlink()).startswith("socket:")]
        assert len({str(entry.readlink()) for entry in sockets}) == 1
        for entry in sockets:
            fields = (proc / "fdinfo" / entry.name).read_text().split()
            assert int(fields[fields.index("flags:") + 1], 8) & os.O_CLOEXEC


@pytest.mark.parametrize("argument", ["0", "x", "77"])
def test_a_descriptor_that_is_no_link_is_a_usage_error(argument: str) -> None:
    with WorkerRig(make_spec(backend="echo")) as rig:
        command = [*rig.command[:-1], argument]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"{argument} is not a link" in ended.stderr
