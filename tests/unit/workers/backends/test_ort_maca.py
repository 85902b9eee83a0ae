"""Against a stand-in that has no name newer than onnxruntime 1.12: tests/standins/maca."""

from __future__ import annotations

import logging
import mmap
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import pytest
import standins
from onnx import helper
from worker_rig import make_spec

from mxpool.errors import LoadFailed, ModelInvalid, NotServable, ProviderUnavailable, RunFailed
from mxpool.messages import GRAPH_HIT, GRAPH_MISS, GRAPH_OFF
from mxpool.shm.layout import SlotLayout
from mxpool.workers.backends.ort_maca import OrtMacaBackend
from mxpool.workers.backends.protocol import DeviceLost

Array = npt.NDArray[Any]
Enter = Callable[..., Any]
ROWS = 8


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    return lambda *faults: standins.enter(monkeypatch, "maca", ",".join(faults))


class Bound:
    """A backend bound to three slots in memory of the test's own."""

    def __init__(self, path: str, *, slots: int = 3, **fields: Any) -> None:
        self.backend = OrtMacaBackend()
        fields = {"graph_sizes": (ROWS,), "max_batch_size": ROWS, **fields}
        self.loaded = self.backend.load(make_spec(path, device_kind="maca", **fields))
        layout = SlotLayout(self.loaded.signature, slots)
        self.memory = mmap.mmap(-1, layout.size_bytes)
        self.slots = [layout.views(self.memory, slot) for slot in range(slots)]
        prepared = self.backend.bind(memoryview(self.memory), self.slots)
        self.sizes, self.report = prepared.sizes, prepared.report
        self.graphs: list[int] = []

    def run(self, x: Array, slot: int = 0) -> Array:
        """Answers to the rows of ``x``, padded with zeros."""
        views = self.slots[slot]
        ((_, given),) = views.inputs.items()
        given[...] = 0
        given[: len(x)] = x
        self.backend.start(slot, self.sizes[-1])
        assert self.backend.finish_due_us() == 0
        ran = self.backend.finish()
        assert 0 < ran.t_start_us <= ran.t_end_us
        self.graphs.append(ran.graph)
        ((_, answers),) = views.outputs.items()
        found: Array = answers[: len(x)].copy()
        return found


def rows(count: int, first: float = 0.5) -> Array:
    return np.arange(first, first + 4 * count, dtype=np.float32).reshape(count, 4)


def check_right(bound: Bound, *, runs: int = 6) -> None:
    """``y = 2x + 1`` for other rows in every batch and slot."""
    for number in range(runs):
        x = rows(number % ROWS + 1, first=100.0 * number)
        np.testing.assert_array_equal(bound.run(x, number % 3), 2 * x + 1)


def test_a_proven_graph_serves_the_full_batch_from_one_block_and_counts_hits(enter: Enter, tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path), sizes=(1, 2, 4, 8))
    assert bound.sizes == (ROWS,)
    check_right(bound)
    assert bound.graphs == [GRAPH_HIT] * 6
    expected = {
        "graph": "on",
        "graph_setting": "prefer",
        "sizes": [ROWS],
        "graph_sizes": [ROWS],
        "graph_failure": {},
        "graph_check": {"exact": True, "largest": 0.0, "tolerance": 0.0},
        "lanes": 1,
        "host": "copied",
        "in_flight": 1,
        "provider": "MACAExecutionProvider",
        "runtime": "onnxruntime 1.12.1",
    }
    assert {key: bound.report[key] for key in expected} == expected
    assert bound.report["capture_ms"] > 0
    assert bound.loaded.report["provider"] == "MACAExecutionProvider"


def test_the_graphs_options_are_the_strings_of_the_resolved_shapes(enter: Enter, tmp_path: Path) -> None:
    enter()
    made = made_models.save(
        tmp_path,
        [helper.make_node("Concat", ["numerical", "categorical", "keyword_vec"], ["y"], axis=1)],
        [(name, made_models.FLOAT, ["N", dim]) for name, dim in
         (("numerical", 48), ("categorical", None), ("keyword_vec", 768))],
        [("y", made_models.FLOAT, ["N", None])],
    )  # fmt: skip
    bound = Bound(made, max_batch_size=128, dims={"categorical": (39,)}, options={"provider.device_id": 0})
    assert bound.backend._session.get_provider_options()["MACAExecutionProvider"] == {
        "device_id": "0",
        "maca_graph_switch": "1",
        "maca_graph_opt_shape": "numerical:128x48,categorical:128x39,keyword_vec:128x768",
        "maca_graph_max_opt_batch": "128",
    }


def test_a_model_without_a_batch_axis_gives_its_dims_alone(enter: Enter, tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.affine(tmp_path, dims=(3, 4)), max_batch_size=0, sizes=(1,), graph_sizes=(1,))
    options = bound.backend._session.get_provider_options()["MACAExecutionProvider"]
    assert (options["maca_graph_opt_shape"], options["maca_graph_max_opt_batch"]) == ("x:3x4", "1")
    np.testing.assert_array_equal(bound.run(rows(3)), 2 * rows(3) + 1)
    assert bound.graphs == [GRAPH_HIT]


def test_with_the_graph_off_only_the_switch_is_given_and_nothing_is_captured(enter: Enter, tmp_path: Path) -> None:
    enter("capture", "hollow")
    bound = Bound(made_models.affine(tmp_path), graph="off")
    assert bound.backend._session.get_provider_options()["MACAExecutionProvider"] == {"maca_graph_switch": "0"}
    check_right(bound)
    assert set(bound.graphs) == {GRAPH_OFF}
    assert (bound.report["graph"], bound.report["graph_failure"], bound.sizes) == ("off", {}, (ROWS,))


def test_without_fixed_input_buffers_each_batch_has_arrays_of_its_own_and_no_graph(
    enter: Enter, tmp_path: Path
) -> None:
    enter()
    options = {"direct_slots": True}
    bound = Bound(made_models.affine(tmp_path), fixed_input_buffers=False, graph="require", options=options)
    check_right(bound)
    assert set(bound.graphs) == {GRAPH_OFF}
    assert (bound.report["graph"], bound.report["host"]) == ("off", "copied")


FAILURES = {
    "capture": (r"capture: operation not permitted", "branch"),
    "blind": (r"with the graph, y\[\d, \d\] differs by \S+ from a run without it \(two of those: 0\)$", ""),
    "hollow": (r"reported success and wrote nothing to output 'y'", ""),
}


@pytest.mark.parametrize("fault", FAILURES)
def test_preferred_and_failed_the_plain_session_serves_and_every_batch_is_a_miss(
    fault: str, enter: Enter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    enter(fault)
    reason, node = FAILURES[fault]
    with caplog.at_level(logging.WARNING):
        bound = Bound(made_models.affine(tmp_path))
    check_right(bound)
    assert bound.graphs == [GRAPH_MISS] * 6
    failure = bound.report["graph_failure"]
    assert (bound.report["graph"], bound.report["graph_sizes"]) == ("off", [])
    assert (failure["size"], failure["node"]) == (ROWS, node)
    assert re.search(reason, failure["reason"])
    assert "maca graph off model=model size=8" in caplog.text


@pytest.mark.parametrize("fault", FAILURES)
def test_required_and_failed_nothing_is_served(fault: str, enter: Enter, tmp_path: Path) -> None:
    enter(fault)
    reason, node = FAILURES[fault]
    named = r"node branch\): .*" if node else ""
    with pytest.raises(NotServable, match=rf"no maca graph at 8 rows.*{named}{reason}"):
        Bound(made_models.affine(tmp_path), graph="require")


def test_a_model_whose_answers_never_differ_has_no_graph_for_nothing_proves_one(enter: Enter, tmp_path: Path) -> None:
    enter()
    node = helper.make_node("Sub", ["x", "x"], ["y"])
    ports: list[made_models.Port] = [("x", made_models.FLOAT, ["N", 4])]
    bound = Bound(made_models.save(tmp_path, [node], ports, [("y", made_models.FLOAT, ["N", 4])]))
    assert "nothing would show that a replay reads its input" in bound.report["graph_failure"]["reason"]
    np.testing.assert_array_equal(bound.run(rows(2)), 0 * rows(2))
    assert bound.graphs == [GRAPH_MISS]


def test_a_build_that_does_not_know_the_graphs_options_serves_plainly_without_any_of_them(
    enter: Enter, tmp_path: Path
) -> None:
    enter("options")
    bound = Bound(made_models.affine(tmp_path))
    check_right(bound)
    assert bound.backend._session.get_provider_options()["MACAExecutionProvider"] == {}
    reason = bound.report["graph_failure"]["reason"]
    assert re.search("this build has no graphs: .*Unknown provider option: 'maca_graph_switch'", reason)
    with pytest.raises(NotServable, match="no maca graph at 8 rows"):
        Bound(made_models.affine(tmp_path), graph="require")


def test_a_run_that_succeeds_and_writes_nothing_fails_its_batch_alone(enter: Enter, tmp_path: Path) -> None:
    enter("unwritten")
    for graph, fixed in (("require", True), ("off", True), ("off", False)):
        bound = Bound(made_models.affine(tmp_path), graph=graph, fixed_input_buffers=fixed)
        check_right(bound)
        with pytest.raises(RunFailed, match="reported success and wrote nothing to output 'y'"):
            bound.run(rows(2, first=13))
        check_right(bound)


def test_a_worker_whose_card_is_gone_leaves_instead_of_failing_every_batch(enter: Enter, tmp_path: Path) -> None:
    runtime = enter()
    bound = Bound(made_models.affine(tmp_path))
    check_right(bound)
    runtime._LOST_AFTER = 1
    with pytest.raises(DeviceLost, match="launch failure; and what ran at start: MACA error 719"):
        bound.run(rows(2))


def test_a_runtime_that_never_writes_is_found_at_load(enter: Enter, tmp_path: Path) -> None:
    enter("silent")
    for graph in ("off", "prefer"):
        with pytest.raises(LoadFailed, match=r"warm-up at 8 rows: the runtime reported success and wrote nothing"):
            Bound(made_models.affine(tmp_path), graph=graph)


def test_results_outside_of_host_memory_are_copied_by_the_runtime(enter: Enter, tmp_path: Path) -> None:
    enter("off_host")
    check_right(Bound(made_models.affine(tmp_path)))


def test_a_runtime_that_copies_the_block_is_refused(enter: Enter, tmp_path: Path) -> None:
    enter("copies")
    with pytest.raises(NotServable, match=r"input 'x'.*copies it instead of using the memory"):
        Bound(made_models.affine(tmp_path))


@pytest.mark.parametrize(("fault", "words"), [("absent", "was built without it"), ("fallback", "fell back")])
def test_the_cpu_never_stands_in_for_the_device(fault: str, words: str, enter: Enter, tmp_path: Path) -> None:
    enter(fault)
    for graph in ("off", "prefer", "require"):
        with pytest.raises(ProviderUnavailable, match=f"MACAExecutionProvider.*CPUExecutionProvider.*{words}"):
            Bound(made_models.affine(tmp_path), graph=graph)


@pytest.mark.parametrize("graph", ["require", "off"])
def test_direct_slots_are_read_where_they_lie_if_the_build_follows_addresses(
    graph: str, enter: Enter, tmp_path: Path
) -> None:
    enter("follows")
    bound = Bound(made_models.affine(tmp_path), graph=graph, options={"direct_slots": True})
    check_right(bound, runs=9)
    assert bound.report["host"] == "direct"
    assert {value.data_ptr() for values in bound.backend._values.values() for value in values.values()} == {
        views.inputs["x"].ctypes.data for views in bound.slots
    }


def test_direct_slots_are_never_served_by_a_graph_that_reads_the_captured_address(enter: Enter, tmp_path: Path) -> None:
    enter()
    with pytest.raises(NotServable, match="with inputs at another address than the captured one"):
        Bound(made_models.affine(tmp_path), graph="require", options={"direct_slots": True})
    bound = Bound(made_models.affine(tmp_path), options={"direct_slots": True})
    check_right(bound)
    assert bound.graphs == [GRAPH_MISS] * 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"provider.maca_graph_switch": "1"}, "provider.maca_graph_switch'.*set from the keys graph"),
        ({"provider.maca_graph_opt_shape": "x:8x4"}, "provider.maca_graph_opt_shape"),
        ({"maca_graph_max_opt_batch": "8"}, "maca_graph_max_opt_batch'.*set from the keys graph"),
        ({"direct_slots": "yes"}, "direct_slots'.*'yes' is not true or false"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_options_that_are_not_the_users_to_set_are_refused_by_name(
    options: dict[str, Any], words: str, enter: Enter, tmp_path: Path
) -> None:
    enter()
    with pytest.raises(NotServable, match=words):
        Bound(made_models.affine(tmp_path), options=options)


def test_options_of_the_provider_pass_as_strings_and_its_refusal_names_them(enter: Enter, tmp_path: Path) -> None:
    enter()
    options = {"provider.gpu_mem_limit": 1 << 30, "provider.do_copy_in_default_stream": True}
    bound = Bound(made_models.affine(tmp_path), graph="off", options=options)
    given = bound.backend._session.get_provider_options()["MACAExecutionProvider"]
    assert given == {"gpu_mem_limit": "1073741824", "do_copy_in_default_stream": "1", "maca_graph_switch": "0"}
    with pytest.raises(ModelInvalid, match="Unknown provider option: 'typing_error'"):
        Bound(made_models.affine(tmp_path), options={"provider.typing_error": 1})


def test_a_batch_that_the_runtime_refuses_fails_and_the_next_one_is_right(enter: Enter, tmp_path: Path) -> None:
    enter()
    bound = Bound(made_models.lookup(tmp_path), graph="off")
    with pytest.raises(RunFailed, match="indices"):
        bound.run(np.array([99]))
    np.testing.assert_array_equal(bound.run(np.array([3, 1])), [3, 1])


def test_loading_and_proving_leave_the_slots_alone(enter: Enter, tmp_path: Path) -> None:
    enter()
    backend = OrtMacaBackend()
    loaded = backend.load(make_spec(made_models.affine(tmp_path), device_kind="maca", max_batch_size=ROWS))
    layout = SlotLayout(loaded.signature, 2)
    memory = mmap.mmap(-1, layout.size_bytes)
    memory.write(b"\x5a" * layout.size_bytes)
    slots = [layout.views(memory, slot) for slot in range(2)]
    backend.bind(memoryview(memory), slots)
    assert memory[:] == b"\x5a" * layout.size_bytes
    slots[0].outputs["y"][...] = 7
    backend.start(1, ROWS)
    backend.finish()
    assert (slots[0].outputs["y"] == 7).all()


def test_unload_lets_go_of_the_slots_and_of_the_session(enter: Enter, tmp_path: Path) -> None:
    enter("follows")
    bound = Bound(made_models.affine(tmp_path), options={"direct_slots": True})
    bound.run(rows(2))
    session = weakref.ref(bound.backend._session)
    bound.backend.unload()
    bound.slots.clear()
    bound.memory.close()  # BufferError if anything still held the slots
    assert session() is None
