"""Model files and devices that cannot be served, threads that were not asked for, outputs that do not fit."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from gates import zombies
from onnx import TensorProto, helper
from pool import Pool, echo, soak, wait_until
from worker_rig import WorkerRig, make_spec

from mxpool.errors import ModelUnavailable, RunFailed

X4 = {"x": np.ones((1, 4), np.float32)}
TRIGGER = 1000.0
CANARY = -7.5


def folder_for(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def written(folder: Path, content: bytes, name: str = "model.onnx") -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def cut(folder: Path) -> str:
    whole = Path(made_models.affine(folder)).read_bytes()
    return written(folder, whole[:-20])


def damaged(folder: Path) -> str:
    whole = bytearray(Path(made_models.affine(folder)).read_bytes())
    whole[len(whole) // 2 :] = b"\xff" * (len(whole) - len(whole) // 2)
    return written(folder, bytes(whole))


def directory(folder: Path) -> str:
    (folder / "model.onnx").mkdir()
    return str(folder / "model.onnx")


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "model.onnx")
    return str(folder / "model.onnx")


def link_loop(folder: Path) -> str:
    path = folder / "model.onnx"
    path.symlink_to(path)
    return str(path)


def unreadable(folder: Path) -> str:
    path = Path(made_models.affine(folder))
    path.chmod(0)
    return str(path)


# What is wrong, and a word of the reason that tells it from the others.
FILES: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda folder: str(folder / "model.onnx"), "No such file"),
    "empty": (lambda folder: written(folder, b""), "it is empty"),
    "zeros": (lambda folder: written(folder, bytes(64)), ""),
    "text": (lambda folder: written(folder, b"not a model, but some words\n" * 20), ""),
    "cut": (cut, ""),
    "damaged": (damaged, ""),
    "directory": (directory, "it is a directory"),
    "fifo": (fifo, "it is not a regular file"),
    "link-loop": (link_loop, "symbolic links"),
    "unreadable": (unreadable, "Permission denied"),
    "opset": (lambda folder: made_models.identity(folder, opset=99), "99"),
    "ir": (lambda folder: made_models.identity(folder, ir=99), "99"),
    "operator": (made_models.unknown_operator, "NoSuchOperator"),
    "string": (lambda folder: made_models.identity(folder, TensorProto.STRING), "string"),
    "bfloat16": (lambda folder: made_models.identity(folder, TensorProto.BFLOAT16), "bfloat16"),
    "shape-by-data": (made_models.nonzero, "'where'"),
    "count-by-data": (made_models.unique, "'y'"),
}
# So that the broker's workers cannot read what the file's mode denies, also where root runs the tests.
WITHOUT_OVERRIDE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]


def test_every_bad_file_is_refused_with_one_line_that_names_it_and_the_others_are_served(tmp_path: Path) -> None:
    paths = {name: make(folder_for(tmp_path, name)) for name, (make, _) in FILES.items()}
    models: dict[str, Any] = {name: {"path": path, "max_batch_size": 4} for name, path in paths.items()}
    models["good"] = {"path": made_models.affine(folder_for(tmp_path, "good")), "max_batch_size": 4}
    prefix = WITHOUT_OVERRIDE if os.getuid() == 0 else []
    with Pool(models, ready=["good"], prefix=prefix) as pool, pool.client() as client:
        wait_until(
            lambda: all(pool.model(name)["state"] == "unavailable" for name in FILES),
            f"all refused; {pool.control('ready')}",
            timeout_s=60,
        )
        assert (client.infer("good", X4)["y"] == 3).all()
        for name, (_, word) in FILES.items():
            found = pool.model(name)
            assert paths[name] in found["reason"], name
            assert word in found["reason"], (name, found["reason"])
            assert "\n" not in found["reason"], name
            (worker,) = found["workers"]
            assert (worker["state"], worker["restarts"]) == ("dead", 0), name
            with pytest.raises(ModelUnavailable, match="is unavailable"):
                client.infer(name, X4)
        assert pool.control("ready")["models"]["good"] == "ready"
        assert zombies(pool) == []


def test_a_file_that_makes_the_runtime_abort_takes_only_its_own_worker() -> None:
    with Pool({"abort": echo(abort_on_load=True), "echo": echo()}, ready=["echo"]) as pool, pool.client() as client:
        wait_until(lambda: "SIGABRT" in pool.model("abort")["workers"][0]["reason"], "its reason")
        assert client.infer("echo", X4)["y"].shape == (1, 4)
        assert pool.model("echo")["workers"][0]["restarts"] == 0


@pytest.mark.parametrize(("kind", "package"), [("cuda", "mxpool[cuda]"), ("maca", "the vendor's onnxruntime wheel")])
def test_a_provider_that_the_runtime_lacks_is_named_with_its_package_and_never_replaced_by_the_cpu(
    tmp_path: Path, kind: str, package: str
) -> None:
    provider = f"{kind.upper()}ExecutionProvider"
    if provider in onnxruntime.get_available_providers():
        pytest.skip(f"gpu: this onnxruntime has {provider}")
    asked = {"path": made_models.affine(tmp_path), "workers": {"gpu0": 1}}
    with Pool({"asked": asked, "echo": echo()}, devices={"gpu0": {"kind": kind}}, ready=["echo"]) as pool:
        stats = wait_until(lambda: (model := pool.model("asked"))["state"] == "unavailable" and model, "the refusal")
        assert f"{provider} was asked for, " in stats["reason"]
        assert package in stats["reason"]
        with pool.client() as client:
            with pytest.raises(ModelUnavailable, match=provider):
                client.infer("asked", X4)
            assert client.infer("echo", X4)["y"].shape == (1, 4)


@contextlib.contextmanager
def one_cpu() -> Iterator[list[str]]:
    yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


@contextlib.contextmanager
def half_a_cpu() -> Iterator[list[str]]:
    """A cgroup with a quota, of version 1 or 2; where none can be made, the test cannot run."""
    top = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").is_dir() else Path("/sys/fs/cgroup")
    group = top / f"mxpool-test-{os.getpid()}"
    quota = ("cpu.cfs_quota_us", "50000") if top.name == "cpu" else ("cpu.max", "50000 100000")
    try:
        group.mkdir()
        (group / quota[0]).write_text(quota[1])
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"root: no cgroup with a quota can be made here ({error.strerror})")
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()  # possible only once every process in it has ended


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("confined", [one_cpu, half_a_cpu])
def test_a_confined_worker_has_its_configured_threads_and_no_affinity_error(
    tmp_path: Path, threads: int, confined: Callable[[], contextlib.AbstractContextManager[list[str]]]
) -> None:
    model = {"path": made_models.affine(tmp_path), "max_batch_size": 4, "threads": threads, "workers": {"cpu": 2}}
    with confined() as prefix, Pool({"affine": model}, prefix=prefix) as pool:
        with pool.client() as client:
            for _ in range(20):
                assert (client.infer("affine", X4)["y"] == 3).all()
        for pid in pool.worker_pids("affine"):
            tasks = [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
            assert len(tasks) == threads + 1, tasks  # and the one that watches for the broker's end
        assert "affinity" not in pool.log()
        assert "rror" not in pool.log()


def heavy(folder: Path) -> str:
    """A few milliseconds of matrix products for a batch of 8."""
    weight = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32) / 25
    names = ["x", *(f"t{number}" for number in range(15)), "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in itertools.pairwise(names)]
    taken: list[made_models.Port] = [("x", made_models.FLOAT, ["N", 512])]
    given: list[made_models.Port] = [("y", made_models.FLOAT, ["N", 512])]
    return made_models.save(
        folder, nodes, taken, given, [helper.make_tensor("w", made_models.FLOAT, [512, 512], weight)]
    )


def test_two_workers_are_not_slower_than_one(tmp_path: Path) -> None:
    """Spinning or unasked threads make them fight for the same CPUs."""
    path = heavy(tmp_path)
    models = {f"w{n}": {"path": path, "max_batch_size": 8, "workers": {"cpu": n}} for n in (1, 2)}
    frames = [{"x": np.ones((8, 512), np.float32)}] * soak(2000, 300)
    with Pool(models) as pool, pool.client() as client:

        def seconds(name: str) -> float:
            begin_s = time.perf_counter()
            assert len([*client.push(name, frames, in_flight=8)]) == len(frames)
            return time.perf_counter() - begin_s

        for name in models:
            seconds(name)
        best = {name: min(seconds(name) for _ in range(3)) for name in models}
        assert best["w1"] / best["w2"] > 0.8


def growing(folder: Path) -> str:
    """``y`` [N,4], but [N,8] if any value is above 100; ``z`` = x, which lies behind ``y`` in the slot."""
    weights = [
        helper.make_tensor("limit", made_models.FLOAT, [], [100.0]),
        helper.make_tensor("one", made_models.INT64, [1], [1]),
    ]
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "limit"], ["over"]),
        helper.make_node("Cast", ["over"], ["extra"], to=TensorProto.INT64),
        helper.make_node("Add", ["one", "extra"], ["columns"]),
        helper.make_node("Concat", ["one", "columns"], ["repeats"], axis=0),
        helper.make_node("Tile", ["x", "repeats"], ["y"]),
        helper.make_node("Identity", ["x"], ["z"]),
    ]
    taken: list[made_models.Port] = [("x", made_models.FLOAT, ["N", 4])]
    given: list[made_models.Port] = [("y", made_models.FLOAT, ["N", "M"]), ("z", made_models.FLOAT, ["N", 4])]
    return made_models.save(folder, nodes, taken, given, weights)


def test_an_output_that_outgrows_its_slot_is_an_error_and_writes_nothing_beside_it(tmp_path: Path) -> None:
    def fill(array: npt.NDArray[Any], value: float) -> None:
        array[...] = value

    with WorkerRig(make_spec(growing(tmp_path), max_batch_size=4), slots=3) as rig:
        rig.ready()
        for slot in (0, 2):
            for array in (*rig.views(slot).inputs.values(), *rig.views(slot).outputs.values()):
                fill(array, CANARY)
        fill(rig.views(1).inputs["x"], TRIGGER)
        rig.run(1, 4, 4)
        error = rig.done().error
        assert error is not None
        assert error[0] == "run_failed"
        for slot in (0, 2):
            for array in (*rig.views(slot).inputs.values(), *rig.views(slot).outputs.values()):
                assert (array == CANARY).all()
        fill(rig.views(1).inputs["x"], 2)
        rig.run(1, 4, 4)
        assert rig.done().error is None
        assert (rig.views(1).outputs["y"] == 2).all()


def test_requests_beside_one_whose_output_outgrows_its_slot_are_right(tmp_path: Path) -> None:
    model = {"path": growing(tmp_path), "max_batch_size": 1, "workers": {"cpu": 2}}
    with Pool({"growing": model}) as pool, pool.client() as client:
        values = [TRIGGER if number % 10 == 5 else number for number in range(100)]
        futures = [client.submit("growing", {"x": np.full((1, 4), value, np.float32)}) for value in values]
        for value, future in zip(values, futures, strict=True):
            if value == TRIGGER:
                with pytest.raises(RunFailed):
                    future.result(20)
            else:
                assert (future.result(20)["y"] == value).all()
        found = pool.model("growing")
        assert (found["failed"], found["ok"]) == (10, 90)
        assert sum(worker["restarts"] for worker in found["workers"]) == 0


@pytest.mark.parametrize("fixed_input_buffers", [True, False])
def test_alternating_row_counts_through_the_same_slots_give_the_right_shape_and_values(
    tmp_path: Path, fixed_input_buffers: bool
) -> None:
    model = {
        "path": made_models.affine(tmp_path),
        "max_batch_size": 8,
        "slots": 2,
        "fixed_input_buffers": fixed_input_buffers,
    }
    with Pool({"affine": model}) as pool, pool.client() as client:
        for number in range(soak(2000)):
            rows = (8, 1, 5, 2, 7, 3)[number % 6]
            sent = (np.arange(rows * 4) + number).reshape(rows, 4).astype(np.float32)
            outputs = client.infer("affine", {"x": sent})
            assert outputs["y"].shape == (rows, 4)
            assert (outputs["y"] == 2 * sent + 1).all()
