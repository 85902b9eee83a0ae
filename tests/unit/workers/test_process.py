from __future__ import annotations

import os
from typing import Any

import pytest
from worker_rig import make_spec

from mxpool import messages
from mxpool.shm.layout import SlotLayout
from mxpool.shm.link import Link
from mxpool.spec import ModelSpec
from mxpool.workers import process
from mxpool.workers.backends.echo import EchoBackend
from mxpool.workers.backends.protocol import Loaded, Prepared, Ran


class NotedEcho(EchoBackend):
    """Notes the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def load(self, spec: ModelSpec) -> Loaded:
        self.calls.append("load")
        return super().load(spec)

    def bind(self, memory: memoryview, slots: Any) -> Prepared:
        self.calls.append(f"bind {len(memory)} bytes, {len(slots)} slots")
        return super().bind(memory, slots)

    def finish(self) -> Ran:
        self.calls.append("finish")
        return super().finish()

    def unload(self) -> None:
        self.calls.append("unload")
        super().unload()


def send(link: Link, kind: int, size_bytes: int, **fields: Any) -> None:
    """A record with a memory descriptor."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, size_bytes)
    link.send(messages.encode(kind, **fields), [fd])
    os.close(fd)


def test_a_worker_loads_binds_the_whole_segment_runs_and_unloads_before_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = NotedEcho()
    monkeypatch.setattr(process, "create", lambda _: backend)
    spec = make_spec(backend="echo", max_batch_size=2)
    layout = SlotLayout(EchoBackend().load(spec).signature, 2)
    broker, socket = Link.pair()
    worker = Link(socket)
    send(broker, messages.LOAD, 4096, worker="w", model="model", spec=spec.to_wire())
    send(broker, messages.BIND, layout.size_bytes, slots=2)
    broker.send(messages.encode_run(messages.Run(1, 0, 1, 1, 1, 1)))
    broker.send(messages.encode(messages.STOP))
    assert process.run_worker(worker, {}) == process.EXIT_STOPPED
    bound = f"bind {layout.size_bytes} bytes, 2 slots"
    assert backend.calls == ["load", bound, "finish", "unload"]
    broker.close()
    worker.close()
