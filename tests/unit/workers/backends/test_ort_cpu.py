from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, ClassVar

import made_models
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import wheels
from onnx import TensorProto, numpy_helper
from worker_rig import make_spec

from mxpool.errors import LoadFailed, ModelInvalid, NotServable, RunFailed
from mxpool.shm.layout import SlotLayout
from mxpool.tensors import Signature
from mxpool.workers.backends.ort_cpu import OrtCpuBackend

Arrays = dict[str, npt.NDArray[Any]]
RANDOM = np.random.default_rng(1)


class Bound:
    """A backend that is bound to ``slots`` slots in memory of the test's own."""

    def __init__(self, path: str, *, slots: int = 2, **fields: Any) -> None:
        self.spec = make_spec(path, **fields)
        self.backend = OrtCpuBackend()
        loaded = self.backend.load(self.spec)
        self.signature: Signature = loaded.signature
        self.report = loaded.report
        self.layout = SlotLayout(self.signature, slots)
        self.memory = mmap.mmap(-1, self.layout.size_bytes)
        self.slots = [self.layout.views(self.memory, slot) for slot in range(slots)]
        prepared = self.backend.bind(memoryview(self.memory), list(self.slots))
        self.sizes, self.bind_report = prepared.sizes, prepared.report

    def fill(self, slot: int, feeds: Arrays) -> None:
        """Write ``feeds`` as the first rows, zeros behind them."""
        for name, rows in feeds.items():
            view = self.slots[slot].inputs[name]
            view[...] = 0
            view[: len(rows)] = rows

    def run(self, slot: int, size: int) -> Arrays:
        """Run the slot; views of its outputs."""
        self.backend.start(slot, size)
        assert self.backend.finish_due_us() == 0
        ran = self.backend.finish()
        assert 0 < ran.t_start_us <= ran.t_end_us
        return {name: view[:size] for name, view in self.slots[slot].outputs.items()}


def reference(path: str, feeds: Arrays) -> Arrays:
    """What a plain session with one thread computes from arrays of its own."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def random_rows(signature: Signature, rows: int) -> Arrays:
    """Random inputs; integers are small enough to be tokens of any vocabulary."""
    found: Arrays = {}
    for spec in signature.inputs:
        shape = signature.shape(spec, rows)
        is_float = spec.datatype.startswith("FP")
        found[spec.name] = (RANDOM.random(shape) if is_float else RANDOM.integers(0, 2, shape)).astype(spec.dtype)
    return found


REAL_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradient_boosting": (wheels.gradient_boosting, {"max_batch_size": 32}),
    "k_neighbors": (wheels.k_neighbors, {"max_batch_size": 32}),
    "text_direction": (wheels.text_direction, {"dims": {"x": (3, 48, 192)}}),
    "text_detection": (wheels.text_detection, {"dims": {"x": (3, 64, 96)}, "max_batch_size": 4}),
    "sentence_embedding": (
        wheels.sentence_embedding,
        {"dims": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (16,)), "max_batch_size": 4},
    ),
    "mul_1": (wheels.mul_1, {"max_batch_size": 3}),
}


@pytest.mark.parametrize("fixed", [True, False], ids=["in place", "fresh arrays"])
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_answer_bit_for_bit_as_a_plain_session_on_the_same_padded_batch(name: str, fixed: bool) -> None:
    path, fields = REAL_MODELS[name][0](), REAL_MODELS[name][1]
    bound = Bound(path, fixed_input_buffers=fixed, **fields)
    for slot, size in enumerate(bound.sizes[-2:]):
        rows = max(size - 1, 1)
        bound.fill(slot, random_rows(bound.signature, rows))
        feeds = {tensor: view[:size].copy() for tensor, view in bound.slots[slot].inputs.items()}
        outputs = bound.run(slot, size)
        expected = reference(path, feeds)
        assert outputs.keys() == expected.keys()
        for tensor, values in outputs.items():
            assert values.dtype == expected[tensor].dtype
            assert values.tobytes() == expected[tensor].tobytes(), tensor


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_a_model_with_a_fixed_batch_of_one_is_served_whole_and_gives_the_published_answer(name: str) -> None:
    path = wheels.light(name)
    bound = Bound(path, max_batch_size=0)
    (given,) = bound.slots[0].inputs.values()
    given[...] = (np.arange(given.size, dtype=np.float32) / given.size).reshape(given.shape)
    bound.run(0, 1)
    (output,) = bound.slots[0].outputs.values()
    published = TensorProto.FromString(Path(path.replace(".onnx", "_output_0.pb")).read_bytes())
    np.testing.assert_allclose(output, numpy_helper.to_array(published), rtol=1e-3, atol=1e-6)


def test_every_slot_and_size_has_its_own_binding_and_touches_nothing_else(tmp_path: Path) -> None:
    bound = Bound(made_models.affine(tmp_path), slots=3, max_batch_size=4)
    for views in bound.slots:
        views.outputs["y"][...] = -7
    for slot, views in enumerate(bound.slots):
        views.inputs["x"][...] = slot + np.arange(16).reshape(4, 4)
    bound.run(1, 2)
    assert (bound.slots[1].outputs["y"][:2] == 2 * bound.slots[1].inputs["x"][:2] + 1).all()
    assert (bound.slots[1].outputs["y"][2:] == -7).all()
    assert (bound.slots[0].outputs["y"] == -7).all()
    assert (bound.slots[2].outputs["y"] == -7).all()
    assert bound.bind_report["bindings"] == 3 * len(bound.sizes)


def test_binding_and_warm_up_leave_the_slots_of_a_running_pool_alone(tmp_path: Path) -> None:
    first = Bound(made_models.affine(tmp_path), max_batch_size=4)
    for views in first.slots:
        views.inputs["x"][...] = 3
        views.outputs["y"][...] = 5
    before = first.memory[:]
    second = OrtCpuBackend()
    second.load(first.spec)
    report = second.bind(memoryview(first.memory), first.slots).report
    assert first.memory[:] == before
    assert [size for size, _ in report["warm_up_us"]] == [1, 2, 4]


def test_an_answer_follows_its_input_when_a_slot_is_used_again(tmp_path: Path) -> None:
    bound = Bound(made_models.affine(tmp_path), max_batch_size=4)
    for value in range(5):
        bound.fill(0, {"x": np.full((3, 4), value, np.float32)})
        assert (bound.run(0, 4)["y"][:3] == 2 * value + 1).all()


def test_a_batch_that_the_runtime_refuses_fails_alone() -> None:
    path, fields = wheels.sentence_embedding(), REAL_MODELS["sentence_embedding"][1]
    bound = Bound(path, **fields)
    bound.fill(0, random_rows(bound.signature, 2))
    bound.slots[0].inputs["input_ids"][1, 3] = 30_522
    with pytest.raises(RunFailed) as caught:
        bound.run(0, 2)
    assert "30522" in caught.value.message
    assert "\n" not in caught.value.message
    bound.slots[0].inputs["input_ids"][1, 3] = 30_521
    bound.run(0, 2)


def test_an_output_of_another_shape_than_bound_is_an_error_and_leaves_the_neighbours_alone(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="warm-up at 1 rows"):
        Bound(made_models.lying_output(tmp_path))


@pytest.mark.parametrize("fixed", [True, False], ids=["in place", "fresh arrays"])
def test_an_output_that_changes_its_shape_at_run_time_fails_the_batch_and_is_never_spread(
    tmp_path: Path, fixed: bool
) -> None:
    bound = Bound(made_models.shrinking(tmp_path), max_batch_size=2, fixed_input_buffers=fixed)
    for views in bound.slots:
        views.outputs["y"][...] = -7
    bound.fill(0, {"x": np.full((2, 4), 2, np.float32)})
    with pytest.raises(RunFailed):
        bound.run(0, 2)
    assert all((views.outputs["y"] == -7).all() for views in bound.slots)
    bound.fill(0, {"x": np.full((2, 4), 1, np.float32)})
    assert (bound.run(0, 2)["y"] == 1).all()


class WatchedSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """Keeps what the last ``run`` was fed with."""

    fed: ClassVar[Arrays] = {}

    def run(self, names: Any, feeds: Arrays, options: Any = None) -> Any:
        type(self).fed = feeds
        return super().run(names, feeds, options)


def test_fresh_arrays_share_no_memory_with_the_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", WatchedSession)
    bound = Bound(made_models.affine(tmp_path), fixed_input_buffers=False)
    bound.run(1, 4)
    assert WatchedSession.fed["x"].shape == (4, 4)
    assert not np.shares_memory(WatchedSession.fed["x"], bound.slots[1].inputs["x"])


class DriftingSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A runtime that puts its outputs elsewhere than it was told to."""

    def io_binding(self) -> Any:
        binding, elsewhere = super().io_binding(), np.zeros(64, np.float32)

        def bind_output(name: str, device: str, index: int, kind: Any, shape: Any, _: int) -> None:
            type(binding).bind_output(binding, name, device, index, kind, shape, elsewhere.ctypes.data)

        binding.bind_output = bind_output
        return binding


def test_a_runtime_that_does_not_write_to_the_slots_is_found_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", DriftingSession)
    with pytest.raises(NotServable, match=r"output 'y' .*does not write it to the memory"):
        Bound(made_models.affine(tmp_path))


def test_a_model_that_fails_on_whatever_it_is_given_is_refused_with_the_runtimes_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"fails on zeros and on ones: .*Reshape"):
        Bound(made_models.never_runs(tmp_path))


def test_two_sizes_alternate_without_a_trace_of_each_other() -> None:
    bound = Bound(wheels.text_detection(), slots=1, dims={"x": (3, 32, 32)}, max_batch_size=2)
    feeds = [random_rows(bound.signature, 1), random_rows(bound.signature, 2)]
    expected = [reference(bound.spec.path, each)["fetch_name_0"] for each in feeds]
    for turn in range(20):
        size = turn % 2 + 1
        bound.fill(0, feeds[size - 1])
        assert bound.run(0, size)["fetch_name_0"].tobytes() == expected[size - 1].tobytes()


def test_float16_goes_through_bit_for_bit_with_nan_payloads_and_subnormals(tmp_path: Path) -> None:
    bound = Bound(made_models.identity(tmp_path, TensorProto.FLOAT16, ("N", 65_536)), max_batch_size=1)
    pattern = np.arange(65_536, dtype=np.uint16)
    bound.slots[0].inputs["x"][0] = pattern.view(np.float16)
    assert (bound.run(0, 1)["y"].view(np.uint16) == pattern).all()


@pytest.mark.parametrize(
    "kind", [TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.STRING], ids=TensorProto.DataType.Name
)
def test_a_datatype_that_numpy_has_not_is_refused_by_name(tmp_path: Path, kind: int) -> None:
    with pytest.raises(NotServable, match=r"input 'x' .*its type is tensor\((bfloat16|float8e4m3fn|string)\)"):
        Bound(made_models.identity(tmp_path, kind, ("N", 4), opset=19, ir=9))


@pytest.mark.parametrize(
    ("make", "tensor", "reason"),
    [
        (made_models.scalar_output, "total", "scalar"),
        (made_models.transposed_output, "y", "its batch axis is 1"),
        (made_models.state_input, "state", "its batch axis is 1"),
        (made_models.nonzero, "where", "depends on the data"),
        (made_models.unique, "y", "depends on the data"),
        (made_models.pairwise, "y", "others change with it"),
        (made_models.input_as_output, "x", "input of the graph as well"),
    ],
)
def test_a_model_that_cannot_be_batched_is_refused_with_the_tensor_by_name(
    tmp_path: Path, make: Any, tensor: str, reason: str
) -> None:
    with pytest.raises(NotServable) as caught:
        Bound(make(tmp_path))
    assert repr(tensor) in caught.value.message
    assert reason in caught.value.message


def test_one_at_a_time_a_scalar_output_and_a_state_on_another_axis_are_served(tmp_path: Path) -> None:
    scalar = Bound(made_models.scalar_output(tmp_path), max_batch_size=0, dims={"x": (2, 4)})
    scalar.slots[0].inputs["x"][...] = 1.5
    scalar.backend.start(0, 1)
    scalar.backend.finish()
    assert scalar.slots[0].outputs["total"][()] == 12
    state = Bound(made_models.state_input(tmp_path), max_batch_size=0, dims={"x": (3, 4), "state": (2, 3, 4)})
    assert [output.dims for output in state.signature.outputs] == [(2, 3, 4)]


def test_a_list_of_maps_is_refused_by_name() -> None:
    with pytest.raises(NotServable, match="output 'probabilities'"):
        Bound(wheels.iris(), max_batch_size=3)


def test_a_batch_axis_fixed_at_the_maximum_is_served_at_that_size_only() -> None:
    bound = Bound(wheels.mul_1(), max_batch_size=3)
    assert bound.sizes == (3,)
    assert [size for size, _ in bound.bind_report["warm_up_us"]] == [3]


def test_a_full_description_in_the_file_spares_the_probing_runs(tmp_path: Path) -> None:
    assert Bound(made_models.affine(tmp_path)).report["probed"] is False
    assert Bound(made_models.affine(tmp_path, (None, 4))).report["probed"] is True


def broken_files(folder: Path) -> dict[str, str]:
    """Path by what is wrong with it."""
    good = Path(made_models.affine(folder)).read_bytes()
    contents = {
        "empty": b"",
        "zeros": bytes(64),
        "truncated": good[:-20],
        "text": b"this is not a model\n" * 20,
        "garbage": bytes(np.random.default_rng(3).integers(0, 256, 4096, np.uint8)),
    }
    made = {}
    for name, data in contents.items():
        (folder / f"{name}.onnx").write_bytes(data)
        made[name] = str(folder / f"{name}.onnx")
    for name, path in (
        ("opset 99", lambda f: made_models.identity(f, opset=99)),
        ("ir 99", lambda f: made_models.identity(f, ir=99)),
        ("unknown operator", made_models.unknown_operator),
    ):
        (folder / name).mkdir()
        made[name] = path(folder / name)
    return {**made, "directory": str(folder), "missing": str(folder / "no.onnx")}


PLAIN_REASONS = {"empty": "it is empty", "directory": "it is a directory", "missing": "No such file or directory"}
BROKEN = [
    "empty",
    "zeros",
    "truncated",
    "text",
    "garbage",
    "opset 99",
    "ir 99",
    "unknown operator",
    "directory",
    "missing",
]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_with_its_path_and_one_line(tmp_path: Path, kind: str) -> None:
    path = broken_files(tmp_path)[kind]
    with pytest.raises(ModelInvalid) as caught:
        OrtCpuBackend().load(make_spec(path))
    assert caught.value.message.startswith(f"model file {path}: ")
    assert "\n" not in caught.value.message
    assert PLAIN_REASONS.get(kind, "") in caught.value.message


def test_a_graph_that_is_required_is_refused_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(NotServable, match="no device graphs"):
        OrtCpuBackend().load(make_spec(made_models.affine(tmp_path), graph="require"))


def test_unload_lets_go_of_every_view(tmp_path: Path) -> None:
    bound = Bound(made_models.affine(tmp_path))
    bound.run(0, 4)
    bound.backend.unload()
    bound.slots.clear()
    bound.memory.close()  # BufferError if a view were left
