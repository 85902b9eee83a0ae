from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_rig import make_spec

from mxpool.shm.layout import SlotLayout
from mxpool.workers.backends import registry

PAGE = Path(__file__).parents[4] / "docs" / "backends.md"


def block(language: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example of the page, installed and created by its name."""
    metadata = tmp_path / "negate-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: negate\nVersion: 1.0\n")
    group, point = (line.strip() for line in block("ini").splitlines()[1:3])
    (metadata / "entry_points.txt").write_text(f"[{group.removesuffix(' =')}]\n{point}\n")
    (tmp_path / "negate_backend.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return registry.create(make_spec(backend="negate"))


def test_the_example_serves_batches_and_leaves_other_rows_alone(backend: Any) -> None:
    loaded = backend.load(make_spec(backend="negate", max_batch_size=4))
    assert loaded.report["backend"] == "negate"
    layout = SlotLayout(loaded.signature, 2)
    memory = mmap.mmap(-1, layout.size_bytes)
    slots = [layout.views(memory, slot) for slot in range(2)]
    assert backend.bind(memoryview(memory), slots).sizes == (1, 2, 4)
    slots[1].inputs["x"][...] = np.arange(16).reshape(4, 4)
    backend.start(1, 2)
    ran = backend.finish()
    assert 0 < ran.t_start_us <= ran.t_end_us
    assert (slots[1].outputs["y"][:2] == -slots[1].inputs["x"][:2]).all()
    assert (slots[1].outputs["y"][2:] == 0).all()
    assert (slots[0].outputs["y"] == 0).all()
    backend.unload()
