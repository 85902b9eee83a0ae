"""Device graphs on a real CUDA device, run by ``scripts/gpu``; tests/process/test_cuda_pool.py has their like in CI."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import pytest
from graph_storm import MODEL, RowTable, Storm, table
from pool import Pool
from worker_rig import make_spec

from mxpool.errors import NotServable
from mxpool.messages import GRAPH_HIT, GRAPH_MISS
from mxpool.shm.layout import SlotLayout
from mxpool.workers.backends.ort_cuda import OrtCudaBackend

MAKE_MODELS = Path(__file__).parents[2] / "scripts" / "make_models.py"
DEVICES = {"gpu0": {"kind": "cuda"}}
SIZE = 128
BATCHES = int(os.environ.get("MXPOOL_HARDWARE_BATCHES", "10000"))
Arrays = dict[str, npt.NDArray[Any]]


class Bound:
    """A backend on the device, in this process."""

    def __init__(self, path: str, *, slots: int = 4, **fields: Any) -> None:
        self.backend = OrtCudaBackend()
        loaded = self.backend.load(make_spec(path, device_kind="cuda", **fields))
        self.layout = SlotLayout(loaded.signature, slots)
        self.memory = mmap.mmap(-1, self.layout.size_bytes)
        self.slots = [self.layout.views(self.memory, slot) for slot in range(slots)]
        prepared = self.backend.bind(memoryview(self.memory), list(self.slots))
        self.sizes, self.report = prepared.sizes, {**loaded.report, **prepared.report}
        self.rng = np.random.default_rng(1)

    def fill(self, slot: int) -> None:
        for array in self.slots[slot].inputs.values():
            array[...] = self.rng.random(array.shape, np.float32)

    def outputs(self, slot: int, size: int) -> list[bytes]:
        return [array[:size].tobytes() for array in self.slots[slot].outputs.values()]

    def run(self, slot: int, size: int) -> int:
        self.backend.start(slot, size)
        return self.backend.finish().graph


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, MAKE_MODELS, str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def rows(models: Path) -> Iterator[RowTable]:
    with Pool({MODEL: table(str(models / "ranking.onnx"), SIZE, graph="off")}, devices=DEVICES) as plain:
        yield RowTable(plain, SIZE, 16 * SIZE)


def test_ten_thousand_batches_of_any_size_are_replayed_bit_for_bit_as_plain_runs(models: Path) -> None:
    """In pairs in flight, in every slot: each replay against a plain run of the same size on the same bytes."""
    path = str(models / "ranking.onnx")
    graphs, plain = (
        Bound(path, max_batch_size=SIZE),
        Bound(path, max_batch_size=SIZE, graph="off", sizes=(1, 8, 32, 128)),
    )
    assert graphs.report["graph"] == "on", graphs.report
    assert graphs.sizes == plain.sizes == (1, 8, 32, 128)
    seen = set()
    for turn in range(0, BATCHES, 2):
        batches = [((turn + n) % 4, int(graphs.rng.choice(graphs.sizes))) for n in range(2)]
        for slot, size in batches:
            graphs.fill(slot)
            graphs.backend.start(slot, size)
        for slot, size in batches:
            assert graphs.backend.finish().graph == GRAPH_HIT
            for name, array in plain.slots[slot].inputs.items():
                array[...] = graphs.slots[slot].inputs[name]
            plain.run(slot, size)
            assert graphs.outputs(slot, size) == plain.outputs(slot, size), (turn, slot, size)
            seen.add(tuple(graphs.outputs(slot, size)))
    assert len(seen) > 0.99 * BATCHES, "answers follow their inputs"
    graphs.backend.unload()
    plain.backend.unload()


def test_random_requests_of_eight_clients_equal_plain_runs_while_the_worker_is_killed(
    models: Path, rows: RowTable
) -> None:
    path = str(models / "ranking.onnx")
    with Pool({MODEL: table(path, SIZE, graph="require")}, devices=DEVICES) as pool:
        storm = Storm(pool, rows, rows_max=SIZE)
        storm.run(BATCHES, kills=4, timeout_s=400)
        assert storm.wrong == []
        stats = pool.model(MODEL)
        print(f"\nstorm: {stats['batches']} batches, {dict(storm.counts)}, {stats['graph']}")
        assert stats["graph"]["hit"] == stats["batches"]
        assert stats["workers"][0]["restarts"] >= 4


def test_ranking_wide_raises_in_capture_and_is_served_plain_with_node_and_size(models: Path) -> None:
    path = str(models / "ranking_wide.onnx")
    bound = Bound(path, max_batch_size=SIZE)
    print(f"\nranking_wide: {bound.report['graph_failure']}")
    assert bound.report["graph"] == "off"
    failure = bound.report["graph_failure"]
    assert failure["size"] == SIZE
    assert "Concat" in failure["node"] + failure["reason"]
    bound.fill(0)
    assert bound.run(0, SIZE) == GRAPH_MISS
    first = bound.outputs(0, SIZE)
    bound.fill(0)
    bound.run(0, SIZE)
    assert bound.outputs(0, SIZE) != first
    bound.backend.unload()
    with pytest.raises(NotServable, match="graph 'require'"):
        Bound(path, max_batch_size=SIZE, graph="require")


def test_a_model_with_control_flow_is_served_plain(tmp_path: Path) -> None:
    bound = Bound(made_models.conditional(tmp_path), max_batch_size=8)
    print(f"\ncontrol flow: {bound.report['graph_failure']}")
    assert bound.report["graph"] == "off"
    bound.slots[0].inputs["x"][...] = 1
    assert bound.run(0, 8) == GRAPH_MISS
    assert (bound.slots[0].outputs["y"] == 2).all()
    bound.backend.unload()


def test_a_vision_model_is_captured_and_a_size_after_a_larger_one_shows_nothing_of_it(models: Path) -> None:
    bound = Bound(str(models / "tiny_cnn.onnx"), max_batch_size=16)
    print(f"\ntiny_cnn: {bound.report}")
    assert bound.report["graph"] == "on"
    bound.fill(0)
    bound.run(0, 1)
    alone = bound.outputs(0, 1)
    for size in (16, 1, 8, 1):
        bound.run(0, size)
        if size == 1:
            assert bound.outputs(0, 1) == alone
    bound.backend.unload()


def test_unloading_gives_the_device_memory_back_and_it_can_be_bound_again(models: Path) -> None:
    left = []
    for _ in range(3):
        bound = Bound(str(models / "ranking.onnx"), max_batch_size=SIZE)
        bound.fill(0)
        bound.run(0, SIZE)
        bound.backend.unload()
        left.append(bound.backend._device.free_bytes())
        bound.slots.clear()
        bound.memory.close()
    print(f"\nfree after each cycle: {left}")
    assert left[1] - left[2] <= 2 << 20
