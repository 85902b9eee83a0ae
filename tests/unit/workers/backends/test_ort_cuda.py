"""The CUDA backend against a stand-in for the device and its runtime: see tests/standins/cuda."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import pytest
import standins
from worker_rig import make_spec

from mxpool.clock import now_us
from mxpool.errors import LoadFailed, ModelInvalid, NotServable, ProviderUnavailable, RunFailed
from mxpool.messages import GRAPH_HIT, GRAPH_MISS, GRAPH_OFF
from mxpool.shm.layout import SlotLayout
from mxpool.workers.backends.ort_cuda import OrtCudaBackend
from mxpool.workers.backends.protocol import DeviceLost

Arrays = dict[str, npt.NDArray[Any]]
MAKE_MODELS = Path(__file__).parents[4] / "scripts" / "make_models"
RANDOM = np.random.default_rng(5)


class Bound:
    """A backend bound to ``slots`` slots, on the stand-in that the test has entered."""

    def __init__(self, path: str, *, slots: int = 3, **fields: Any) -> None:
        self.backend = OrtCudaBackend()
        loaded = self.backend.load(make_spec(path, device_kind="cuda", **fields))
        self.signature = loaded.signature
        self.layout = SlotLayout(loaded.signature, slots)
        self.memory = mmap.mmap(-1, self.layout.size_bytes)
        self.slots = [self.layout.views(self.memory, slot) for slot in range(slots)]
        prepared = self.backend.bind(memoryview(self.memory), list(self.slots))
        self.sizes = prepared.sizes
        self.report = {**loaded.report, **prepared.report}

    def fill(self, slot: int, rows: npt.NDArray[Any]) -> None:
        self.slots[slot].inputs["x"][: len(rows)] = rows

    def run(self, slot: int, size: int) -> int:
        """Run a batch; the word that it is counted under."""
        self.backend.start(slot, size)
        return self.backend.finish().graph

    def answers(self, slot: int, rows: int) -> npt.NDArray[Any]:
        return self.slots[slot].outputs["y"][:rows]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def entered(fault: str = "") -> Any:
        return standins.enter(monkeypatch, "cuda", fault)

    return entered


def machine() -> Any:
    import cuda.bindings.runtime  # type: ignore[import-not-found]  # noqa: PLC0415

    return cuda.bindings.runtime.machine


def rows_of(count: int) -> npt.NDArray[Any]:
    return RANDOM.random((count, 4), np.float32)


def test_batches_are_replayed_at_every_captured_size_and_answer_their_own_input(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=64)
    assert bound.sizes == (1, 8, 32, 64)
    assert bound.report["graph"] == "on"
    assert bound.report["graph_sizes"] == [1, 8, 32, 64]
    assert (bound.report["host"], bound.report["lanes"]) == ("pinned", 2)
    assert bound.report["graph_failure"] == {}
    assert bound.report["capture_ms"] > 0
    assert bound.report["device_bytes"] == 2 * bound.layout.slot_bytes
    for size in (1, 64, 8, 64, 32, 1):
        rows = rows_of(size)
        bound.fill(1, rows)
        assert bound.run(1, size) == GRAPH_HIT
        assert (bound.answers(1, size) == 2 * rows + 1).all()


def test_a_hundred_inputs_give_a_hundred_answers(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    seen = set()
    for turn in range(100):
        rows = rows_of(8)
        bound.fill(turn % 3, rows)
        assert bound.run(turn % 3, 8) == GRAPH_HIT
        assert (bound.answers(turn % 3, 8) == 2 * rows + 1).all()
        seen.add(bound.answers(turn % 3, 8).tobytes())
    assert len(seen) == 100


def test_two_batches_in_flight_do_not_touch_each_other(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    assert bound.backend.in_flight == 2
    first, second = rows_of(8), rows_of(3)
    bound.fill(0, first)
    bound.fill(2, second)
    bound.backend.start(0, 8)
    bound.backend.start(2, 8)
    bound.slots[2].outputs["y"][...] = -7
    bound.backend.finish()
    assert (bound.answers(0, 8) == 2 * first + 1).all()
    assert (bound.slots[2].outputs["y"] == -7).all(), "the second batch has not been waited for"
    bound.backend.finish()
    assert (bound.answers(2, 3) == 2 * second + 1).all()


def test_only_the_rows_of_the_size_are_written(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=64)
    for views in bound.slots:
        views.outputs["y"][...] = -7
    bound.run(1, 8)
    assert (bound.slots[1].outputs["y"][8:] == -7).all()
    assert (bound.slots[0].outputs["y"] == -7).all()
    assert (bound.slots[2].outputs["y"] == -7).all()


def test_binding_leaves_the_slots_of_a_running_pool_alone(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path))
    for views in bound.slots:
        views.inputs["x"][...] = 3
        views.outputs["y"][...] = 5
    before = bound.memory[:]
    machine().locked.clear()  # another process's registrations are its own
    second = OrtCudaBackend()
    second.load(make_spec(made_models.affine(tmp_path), device_kind="cuda"))
    second.bind(memoryview(bound.memory), list(bound.slots))
    assert bound.memory[:] == before


def test_without_the_graph_batches_run_plain_at_the_usual_sizes(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8, graph="off")
    assert bound.sizes == (1, 2, 4, 8)
    assert (bound.report["graph"], bound.report["graph_setting"]) == ("off", "off")
    rows = rows_of(4)
    bound.fill(0, rows)
    assert bound.run(0, 4) == GRAPH_OFF
    assert (bound.answers(0, 4) == 2 * rows + 1).all()


def test_without_fixed_buffers_arrays_are_made_anew(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8, graph="off", fixed_input_buffers=False)
    assert (bound.report["host"], bound.backend.in_flight) == ("copied", 1)
    rows = rows_of(8)
    bound.fill(0, rows)
    assert bound.run(0, 8) == GRAPH_OFF
    assert (bound.answers(0, 8) == 2 * rows + 1).all()
    assert machine().device == {}
    bound.backend.unload()


def test_slots_that_cannot_be_registered_are_staged_and_the_report_says_so(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    enter("register")
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    assert (bound.report["host"], bound.report["graph"]) == ("staged", "on")
    first, second = rows_of(8), rows_of(8)
    bound.fill(0, first)
    bound.fill(1, second)
    bound.backend.start(0, 8)
    bound.backend.start(1, 8)
    bound.backend.finish()
    bound.backend.finish()
    assert (bound.answers(0, 8) == 2 * first + 1).all()
    assert (bound.answers(1, 8) == 2 * second + 1).all()


def made(tmp_path: Path, name: str) -> str:
    """One of the example models."""
    subprocess.run([MAKE_MODELS, str(tmp_path), name], check=True, capture_output=True)
    return str(tmp_path / f"{name}.onnx")


def test_ranking_wide_cannot_be_captured_and_is_served_plain_with_the_node_and_the_size(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    """Its Concat of 41 raises during capture, and the run after that succeeds without a graph."""
    enter()
    bound = Bound(made(tmp_path, "ranking_wide"), max_batch_size=8)
    assert bound.sizes == (1, 2, 4, 8)
    assert (bound.report["graph"], bound.report["graph_setting"]) == ("off", "prefer")
    failure = bound.report["graph_failure"]
    assert failure["size"] == 8
    assert failure["node"].startswith("Concat")
    assert "when stream is capturing" in failure["reason"]
    assert bound.run(0, 8) == GRAPH_MISS


def test_ranking_is_captured_where_ranking_wide_is_not(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    assert Bound(made(tmp_path, "ranking"), max_batch_size=8).report["graph"] == "on"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("capture_at:8", r"at 8 rows: .*Name:'Reshape_1'"),
        ("silent", "the capture left no graph behind"),
        ("empty", "replay and plain run differ by inf at y"),
        ("blind", "replay and plain run differ by"),
    ],
)
def test_a_graph_that_is_required_and_not_right_is_refused_and_preferred_it_is_served_plain(
    enter: Callable[..., Any], tmp_path: Path, fault: str, reason: str
) -> None:
    enter(fault)
    path = made_models.affine(tmp_path)
    with pytest.raises(NotServable, match=reason):
        Bound(path, max_batch_size=32, graph="require")
    bound = Bound(path, max_batch_size=32)
    assert bound.report["graph_failure"]["size"] > 0
    rows = rows_of(32)
    bound.fill(0, rows)
    assert bound.run(0, 32) == GRAPH_MISS
    assert (bound.answers(0, 32) == 2 * rows + 1).all()


@pytest.mark.parametrize("fault", ["", "blind"])
def test_a_graph_of_which_nothing_shows_that_it_reads_its_input_does_not_serve(
    enter: Callable[..., Any], tmp_path: Path, fault: str
) -> None:
    enter(fault)
    path = made_models.beyond(tmp_path, threshold=1e9)
    with pytest.raises(NotServable, match="no two inputs have different answers"):
        Bound(path, graph="require")
    bound = Bound(path)
    bound.fill(0, rows_of(8) + 2e9)
    assert bound.run(0, 8) == GRAPH_MISS
    assert (bound.answers(0, 8) > 0).all()


def test_a_model_that_answers_all_small_inputs_alike_is_asked_with_larger_ones(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    enter()
    assert Bound(made_models.beyond(tmp_path)).report["graph"] == "on"


def test_a_blind_graph_of_such_a_model_is_found(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter("blind")
    assert "differ by" in Bound(made_models.beyond(tmp_path)).report["graph_failure"]["reason"]


def test_the_session_that_could_not_be_captured_is_gone_before_another_is_opened(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    runtime = enter("capture_at:8")
    assert Bound(made_models.affine(tmp_path)).report["graph"] == "off"
    assert runtime.InferenceSession.most_living == 1


def test_an_error_of_the_runtime_in_the_proof_is_a_failed_capture(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter("run:20")
    path = made_models.affine(tmp_path)
    with pytest.raises(NotServable, match="MatMul_7"):
        Bound(path, graph="require")
    bound = Bound(path)
    assert bound.report["graph_failure"]["node"] == "MatMul_7"
    assert bound.run(0, 8) == GRAPH_MISS


def test_a_model_with_control_flow_is_served_plain_or_refused(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    path = made_models.conditional(tmp_path)
    with pytest.raises(NotServable, match="control flow"):
        Bound(path, graph="require")
    bound = Bound(path)
    failure = bound.report["graph_failure"]
    assert (failure["size"], failure["node"]) == (0, "Choose")
    assert failure["reason"].startswith("This session cannot use the graph capture feature")
    bound.fill(0, rows_of(4))
    assert bound.run(0, 4) == GRAPH_MISS


def test_a_bad_file_is_refused_as_such_and_not_as_a_graph_that_cannot_be(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    enter()
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ModelInvalid):
        Bound(str(path))


def test_sizes_of_the_config_and_of_a_fixed_batch_axis_are_kept(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    path = made_models.affine(tmp_path)
    assert Bound(path, max_batch_size=64, graph_sizes=(4, 64)).sizes == (4, 64)
    assert Bound(made_models.affine(tmp_path, (3, 4)), max_batch_size=3).sizes == (3,)
    single = Bound(made_models.affine(tmp_path, (3, 4)), max_batch_size=0)
    assert single.sizes == (1,)
    single.slots[0].inputs["x"][...] = 2
    assert single.run(0, 1) == GRAPH_HIT
    assert (single.slots[0].outputs["y"] == 5).all()


def test_a_batch_that_the_runtime_fails_is_that_batch_alone(enter: Callable[..., Any], tmp_path: Path) -> None:
    runtime = enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    runtime.faults["run"] = str(bound.backend._session.session._runs + 2)
    rows = rows_of(8)
    bound.fill(0, rows)
    bound.backend.start(0, 8)
    bound.backend.start(1, 8)
    bound.backend.finish()
    assert bound.backend.finish_due_us() == 0
    with pytest.raises(RunFailed, match="MatMul_7"):
        bound.backend.finish()
    assert (bound.answers(0, 8) == 2 * rows + 1).all()
    assert bound.run(0, 8) == GRAPH_HIT


def test_a_sticky_error_means_that_the_device_is_lost(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    bound.backend.start(0, 8)
    machine().lost = True
    with pytest.raises(DeviceLost, match="cudaErrorLaunchFailure"):
        bound.backend.finish()
    with pytest.raises(DeviceLost):
        bound.backend.start(0, 8)


def test_finish_is_due_within_the_time_that_batches_take(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    bound.backend.start(0, 8)
    assert bound.backend.finish_due_us() <= now_us(), "nothing is known yet"
    bound.backend.finish()
    bound.backend._expected_us[8] = 1_000_000
    before_us = now_us()
    bound.backend.start(0, 8)
    assert before_us + 750_000 <= bound.backend.finish_due_us() <= now_us() + 750_000
    bound.backend.finish()
    assert bound.backend._expected_us[8] < 1_000_000


def test_unload_leaves_nothing_on_the_device_and_lets_go_of_the_slots(
    enter: Callable[..., Any], tmp_path: Path
) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), max_batch_size=8)
    bound.run(0, 8)
    bound.backend.unload()
    left = machine()
    assert (left.device, left.locked, left.streams) == ({}, {}, {})
    bound.slots.clear()
    bound.memory.close()  # BufferError if a view were left


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_provider", r"CUDAExecutionProvider was asked for, CPUExecutionProvider is there.*mxpool\[cuda\]"),
        ("no_driver", "cudaErrorInsufficientDriver"),
        ("no_device", "CUDA_VISIBLE_DEVICES"),
        ("fallback", "fell back to another provider"),
    ],
)
def test_what_is_missing_is_one_error_and_never_a_session_on_the_cpu(
    enter: Callable[..., Any], tmp_path: Path, fault: str, words: str
) -> None:
    enter(fault)
    with pytest.raises(ProviderUnavailable, match=words):
        Bound(made_models.affine(tmp_path))


@pytest.mark.parametrize("fault", ["memory", "context", "session_memory", "memory_at:8"])
def test_a_device_without_room_may_be_tried_again(enter: Callable[..., Any], tmp_path: Path, fault: str) -> None:
    """Another process may hold the memory now, or a dead one's not be given back yet."""
    enter(fault)
    with pytest.raises(LoadFailed, match=r"cudaErrorMemoryAllocation|out of memory") as caught:
        Bound(made_models.affine(tmp_path), graph="require")
    assert type(caught.value) is LoadFailed  # its subclasses mean: never as it is


def test_provider_options_are_passed_on_and_unknown_ones_refused(enter: Callable[..., Any], tmp_path: Path) -> None:
    enter()
    Bound(made_models.affine(tmp_path), options={"provider.use_tf32": False})
    for name in ("use_tf23", "enable_cuda_graph", "user_compute_stream"):
        with pytest.raises(NotServable, match=f"option 'provider.{name}'"):
            Bound(made_models.affine(tmp_path), options={f"provider.{name}": "1"})
