"""How requests become batches, over a real broker and real workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
from gates import Gate, Rows, kill, rows, slot_states, wait_queued, wait_running, x
from onnx import helper
from pool import Pool, echo, wait_until
from wire_client import WireClient

from mxpool import wire
from mxpool.errors import InvalidTensor

ANSWER_S = 20.0


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result(ANSWER_S) for future in futures]


def closed(pool: Pool, model: str = "echo") -> dict[str, int]:
    return {reason: count for reason, count in pool.model(model)["close"].items() if count}


def with_batch_sum(folder: Path) -> str:
    """``y`` = each row plus the sum of all rows of the batch: shows whatever lies in the rows that nobody sent."""
    folder.mkdir()
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=1, axes=[0]),
        helper.make_node("Add", ["x", "total"], ["y"]),
    ]
    ports: list[made_models.Port] = [("x", made_models.FLOAT, ["N", 4])]
    return made_models.save(folder, nodes, ports, [("y", made_models.FLOAT, ["N", 4])], opset=11)


def test_a_batch_is_full_by_rows_and_not_by_requests() -> None:
    with Gate() as gate:
        model = echo(max_batch_size=128, gate=gate.path)
        with Pool({"echo": model}, log_level="debug") as pool, pool.client() as client:
            held = client.submit("echo", x(0))
            wait_running(pool)
            sent = [np.full((60, 4), number, np.float32) for number in range(10)]
            futures = [client.submit("echo", {"x": array}) for array in sent]
            wait_queued(pool, 10)
            gate.let(20)
            held.result(ANSWER_S)
            for array, outputs in zip(sent, results(futures), strict=True):
                assert (outputs["y"] == array).all()
            assert pool.model()["close"]["full"] >= 4  # asked first: a batch is logged when its answers are sent
            samples = [int(found) for found in re.findall(r"batch_samples=(\d+)", pool.log())]
            assert (sum(samples), max(samples)) == (601, 120)


def test_a_request_of_the_whole_batch_runs_and_one_row_more_is_split_by_the_library_or_refused() -> None:
    with Pool({"echo": echo(max_batch_size=128)}) as pool, pool.client() as client:
        whole = np.arange(128 * 4, dtype=np.float32).reshape(128, 4)
        assert (client.infer("echo", {"x": whole})["y"] == whole).all()
        assert pool.model()["last_batch"]["batch_samples"] == 128
        more = np.arange(129 * 4, dtype=np.float32).reshape(129, 4)
        assert (client.infer("echo", {"x": more})["y"] == more).all()
        assert pool.model()["batch_rows"] == 128 + 129
        with WireClient(pool.endpoint) as bare:
            refused = bare.infer("echo", {"x": more})
            request_id, failure = bare.one()
            assert request_id == refused
            assert isinstance(failure, wire.Failure)
            assert failure.code == "batch_too_large"
            assert "129" in failure.message
            assert "128" in failure.message
        assert pool.model()["rejected"] == 1


def test_an_idle_worker_takes_what_is_there_and_a_request_that_does_not_fit_closes_the_batch() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, pool.client() as client:
        futures = [client.submit("echo", x(1))]
        wait_running(pool)
        assert closed(pool) == {}  # a batch is counted when it has run
        futures += [client.submit("echo", {"x": np.full((5, 4), number, np.float32)}) for number in (2, 3)]
        wait_until(lambda: slot_states(pool) == ["filling", "ready", "running"], "one of the two batches closed")
        gate.let(3)
        assert [len(outputs["y"]) for outputs in results(futures)] == [1, 5, 5]
        assert closed(pool) == {"idle": 2, "full": 1}
        found = pool.model()
        assert (found["batches"], found["batch_rows"], found["padding_rows"]) == (3, 11, 6)


def test_a_batch_that_has_waited_its_delay_goes_to_a_busy_worker_that_has_room() -> None:
    with Gate() as gate:
        model = echo(gate=gate.path, in_flight=2, max_queue_delay_us=20_000)
        with Pool({"echo": model}) as pool, pool.client() as client:
            futures = [client.submit("echo", x(number)) for number in (1, 2)]
            wait_running(pool, 1)
            futures += [client.submit("echo", x(number)) for number in (3, 4)]
            wait_running(pool, 2)
            futures.append(client.submit("echo", x(5)))
            wait_until(lambda: slot_states(pool) == ["filling", "running", "running"], "a third one that waits")
            gate.let(3)
            assert [outputs["y"][0, 0] for outputs in results(futures)] == [1, 2, 3, 4, 5]
            assert pool.model()["close"]["delay"] >= 1
            assert pool.model()["batches"] == 3


def test_an_open_batch_is_closed_by_draining() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}) as pool, pool.client() as client:
        futures = [client.submit("echo", x(1))]
        wait_running(pool)
        futures.append(client.submit("echo", x(2)))
        wait_until(lambda: slot_states(pool) == ["filling", "running"], "an open batch")
        pool.control("drain", "echo")
        wait_until(lambda: slot_states(pool) == ["ready", "running"], "a closed batch")
        gate.let(2)
        assert [outputs["y"][0, 0] for outputs in results(futures)] == [1, 2]
        assert closed(pool) == {"idle": 1, "drain": 1}


def test_a_backend_that_takes_two_batches_has_two_and_no_more() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path, in_flight=2)}) as pool, pool.client() as client:
        sent = [np.full((8, 4), number, np.float32) for number in range(5)]
        futures = [client.submit("echo", {"x": array}) for array in sent]
        wait_until(lambda: slot_states(pool) == ["ready"] * 3 + ["running"] * 2, "two running, three ready")
        assert pool.model()["workers"][0]["in_flight"] == 2
        gate.let(1)
        futures[0].result(ANSWER_S)
        wait_until(lambda: slot_states(pool) == ["ready"] * 2 + ["running"] * 2, "the next one in its place")
        gate.let(4)
        for array, outputs in zip(sent, results(futures), strict=True):
            assert (outputs["y"] == array).all()


def test_with_one_queue_a_hung_worker_delays_nobody_but_its_own_batch() -> None:
    model = echo(workers=2, hang_on=13, max_batch_size=1)
    with Pool({"echo": model}) as pool, pool.client() as client:
        stuck = client.submit("echo", x(13))
        wait_running(pool)
        assert [outputs["y"][0, 0] for outputs in results([client.submit("echo", x(n)) for n in range(6)])] == [
            *range(6)
        ]
        assert not stuck.done()
        stuck.cancel()
        kill_busy(pool)


def kill_busy(pool: Pool) -> None:
    """End the worker that hangs, so that the broker can drain."""
    for worker in pool.model()["workers"]:
        if worker["in_flight"]:
            kill(worker["pid"])


def test_with_a_queue_for_each_worker_requests_are_dealt_out_in_turn_and_dealt_again_when_one_dies() -> None:
    model = echo(workers=2, hang_on=13, max_batch_size=1, queue="per_worker", slots=8)
    with Pool({"echo": model}) as pool, pool.client() as client:
        stuck = client.submit("echo", x(13))
        wait_running(pool)
        futures = [client.submit("echo", x(number)) for number in range(6)]
        wait_until(lambda: sum(future.done() for future in futures) == 3, "the half of the free worker")
        wait_queued(pool, 3)
        assert len({future.result()["y"][0, 0] % 2 for future in futures if future.done()}) == 1
        stuck.cancel()
        wait_until(lambda: pool.model()["cancelled"] == 1, "the cancel")
        kill_busy(pool)
        assert [outputs["y"][0, 0] for outputs in results(futures)] == [*range(6)]


def test_zero_padding_hides_what_an_earlier_batch_left_in_the_slot(tmp_path: Path) -> None:
    model = {"path": with_batch_sum(tmp_path / "sum"), "max_batch_size": 8, "batch_sizes": [8], "slots": 2}
    with Pool({"sum": model}) as pool, pool.client() as client:
        for number in range(4):  # the slot that was freed last is filled next
            client.infer("sum", {"x": np.full((8, 4), 1000, np.float32)})
            sent = rows(1, 2, 3) + number
            expected = sent + sent.sum(axis=0, keepdims=True)
            assert np.allclose(client.infer("sum", {"x": sent})["y"], expected, rtol=1e-6)
        assert pool.model("sum")["padding_rows"] == 4 * 5


def test_repeat_padding_writes_the_last_row_into_every_row_that_nobody_sent(tmp_path: Path) -> None:
    path = with_batch_sum(tmp_path / "sum")
    model = {"path": path, "max_batch_size": 8, "batch_sizes": [8], "slots": 2, "pad": "repeat"}
    with Pool({"sum": model}) as pool, pool.client() as client:
        for count in (3, 8, 1, 5, 2):
            sent = np.random.default_rng(count).standard_normal((count, 4)).astype(np.float32)
            padded = np.concatenate([sent, np.repeat(sent[-1:], 8 - count, axis=0)])
            expected = sent + padded.sum(axis=0, keepdims=True)
            assert np.allclose(client.infer("sum", {"x": sent})["y"], expected, rtol=1e-5, atol=1e-5)


def test_without_a_batch_axis_every_request_runs_alone() -> None:
    with Gate() as gate, Pool({"echo": echo(max_batch_size=0, gate=gate.path)}) as pool, pool.client() as client:
        sent: list[Rows] = [rows(number)[0] for number in range(5)]
        futures = [client.submit("echo", {"x": array}) for array in sent]
        wait_running(pool)
        with pytest.raises(InvalidTensor, match=r"expected \(4\)"):
            client.infer("echo", x(1))
        gate.let(5)
        for array, outputs in zip(sent, results(futures), strict=True):
            assert outputs["y"].shape == (4,)
            assert (outputs["y"] == array).all()
        assert (pool.model()["batches"], pool.model()["batch_rows"]) == (5, 5)


@pytest.mark.parametrize(
    ("make", "what", "reference"),
    [
        (
            made_models.state_input,
            "input 'state' cannot be served: its batch axis is 1, not 0",
            lambda arrays: {"y": arrays["x"] + arrays["state"]},
        ),
        (
            made_models.scalar_output,
            "output 'total' cannot be served: it is a scalar and has no batch axis",
            lambda arrays: {"y": arrays["x"], "total": arrays["x"].sum()},
        ),
        (
            made_models.transposed_output,
            "output 'y' cannot be served: its batch axis is 1, not 0",
            lambda arrays: {"y": arrays["x"].T},
        ),
    ],
)
def test_a_model_with_its_batch_axis_elsewhere_is_refused_by_name_and_served_one_at_a_time(
    tmp_path: Path, make: Callable[[Path], str], what: str, reference: Callable[[dict[str, Rows]], dict[str, Any]]
) -> None:
    path = make(tmp_path)
    names = {"x": [3, 4], "state": [2, 3, 4]} if make is made_models.state_input else {"x": [3, 4]}
    one_at_a_time = {"path": path, "max_batch_size": 0, "dims": names}
    with (
        Pool({"batched": {"path": path, "max_batch_size": 4}, "single": one_at_a_time}, ready=["single"]) as pool,
        pool.client() as client,
    ):
        wait_until(lambda: pool.model("batched")["state"] == "unavailable", "a refusal")
        assert what in pool.model("batched")["reason"]
        arrays = {name: np.random.default_rng(7).standard_normal(dims).astype("f4") for name, dims in names.items()}
        outputs = client.infer("single", arrays)
        expected = reference(arrays)
        assert outputs.keys() == expected.keys()
        for name, array in expected.items():
            assert outputs[name].shape == np.shape(array)
            assert np.allclose(outputs[name], array, rtol=1e-6)


def test_two_shapes_are_two_models_on_one_file_and_another_shape_is_refused(tmp_path: Path) -> None:
    path = made_models.affine(tmp_path, ("N", "W"))
    models = {f"w{width}": {"path": path, "max_batch_size": 4, "dims": {"x": [width]}} for width in (4, 6)}
    with Pool(models) as pool, pool.client() as client:
        for number in range(20):
            width = (4, 6)[number % 2]
            sent = np.full((1 + number % 4, width), number, np.float32)
            outputs = client.infer(f"w{width}", {"x": sent})
            assert outputs["y"].shape == sent.shape
            assert (outputs["y"] == 2 * sent + 1).all()
        with pytest.raises(InvalidTensor, match=r"wrong shape .*\(1, 6\).*\(1, 4\)"):
            client.infer("w4", {"x": np.zeros((1, 6), np.float32)})
        with WireClient(pool.endpoint) as bare:  # the broker does not rely on the library
            bare.infer("w4", {"x": np.zeros((1, 6), np.float32)})
            _, failure = bare.one()
            assert isinstance(failure, wire.Failure)
            assert failure.code == "invalid_tensor"
            assert "[1, 4]" in failure.message


def test_every_row_that_ran_is_counted_as_live_dead_or_padding() -> None:
    with Gate() as gate, Pool({"echo": echo(gate=gate.path)}, log_level="debug") as pool, pool.client() as client:
        futures = [client.submit("echo", x(0))]
        wait_running(pool)
        futures += [client.submit("echo", x(number, number)) for number in range(1, 4)]
        wait_queued(pool, 3)
        futures[2].cancel()  # its rows lie between others': they run as dead rows
        wait_until(lambda: pool.model()["cancelled"] == 1, "the cancel")
        gate.let(2)
        live = [futures[0], futures[1], futures[3]]
        assert [outputs["y"][0, 0] for outputs in results(live)] == [0, 1, 3]
        found = pool.model()
        assert (found["batch_rows"], found["dead_rows"], found["padding_rows"]) == (5, 2, 2)
        padded = [int(size) for size in re.findall(r"padded_batch=(\d+)", pool.log())]
        assert sum(padded) == found["batch_rows"] + found["dead_rows"] + found["padding_rows"]
