"""The broker's half of a worker's life, for tests: starts a real worker process and speaks to it record by record."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mxpool import messages
from mxpool.shm.layout import SlotLayout, SlotViews
from mxpool.shm.link import Link, Packet
from mxpool.shm.segment import Segment
from mxpool.spec import ModelSpec, default_sizes
from mxpool.tensors import Signature

EPOCH = 0xABCDEF0123456789
ANSWER_TIMEOUT_S = 60.0


def make_spec(path: str = "none", backend: str = "onnxruntime", **fields: Any) -> ModelSpec:
    """A spec with the sizes that the config would give it."""
    max_batch_size = fields.setdefault("max_batch_size", 8)
    sizes = fields.pop("sizes", default_sizes(max_batch_size))
    return ModelSpec(name="model", path=path, backend=backend, sizes=sizes, **fields)


class WorkerRig:
    """A worker process; a context manager that leaves no process, descriptor or memory behind."""

    def __init__(self, spec: ModelSpec, *, slots: int = 2, prefix: Sequence[str] = (), **popen: Any) -> None:
        self.spec = spec
        self.slots = slots
        self.link, theirs = Link.pair()
        self.status = Segment.create(4096)
        self.segment: Segment | None = None
        self.layout: SlotLayout
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        with theirs:
            self.command = [*prefix, sys.executable, "-m", "mxpool.cli.worker", "--link-fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                self.command, pass_fds=[theirs.fileno()], stderr=self.stderr, start_new_session=True, **popen
            )

    def __enter__(self) -> WorkerRig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()
        self.status.close()
        if self.segment is not None:
            self.segment.close()
        self.stderr.close()

    def packet(self) -> Packet:
        """The next record; LinkClosed if the worker ends instead."""
        packet = self.link.receive(ANSWER_TIMEOUT_S)
        assert packet is not None, f"no record within {ANSWER_TIMEOUT_S} s"
        return packet

    def expect(self, kind: int) -> dict[str, Any]:
        """The fields of the next record, which is of ``kind``."""
        found, fields = messages.decode(self.packet().data)
        assert found == kind, (found, fields)
        return fields

    def send_load(self) -> None:
        """LOAD, after the worker's HELLO."""
        self.expect(messages.HELLO)
        record = messages.encode(messages.LOAD, worker="model-cpu-0", model=self.spec.name, spec=self.spec.to_wire())
        self.link.send(record, [self.status.fd])

    def load(self) -> tuple[Signature, dict[str, Any]]:
        """Up to SIGNATURE: the signature and the report."""
        self.send_load()
        fields = self.expect(messages.SIGNATURE)
        return Signature.from_wire(fields["signature"]), fields["report"]

    def load_failure(self) -> dict[str, Any]:
        """Up to LOAD_FAILED: its fields."""
        self.send_load()
        return self.expect(messages.LOAD_FAILED)

    def ready(self) -> dict[str, Any]:
        """Up to READY: its fields."""
        signature, _ = self.load()
        self.layout = SlotLayout(signature, self.slots)
        self.segment = Segment.create(self.layout.size_bytes)
        record = messages.encode(messages.BIND, slots=self.slots)
        self.link.send(record, [self.segment.fd])
        return self.expect(messages.READY)

    def views(self, slot: int) -> SlotViews:
        """The tensors of ``slot``, as broker and worker see them."""
        assert self.segment is not None
        return self.layout.views(self.segment.map, slot)

    def run(self, slot: int, rows: int, size: int, *, generation: int = 1, sequence: int = 1) -> None:
        """Send a RUN."""
        self.link.send(messages.encode_run(messages.Run(EPOCH, slot, generation, rows, size, sequence)))

    def done(self) -> messages.Done:
        """The next record, a DONE."""
        return messages.decode_done(self.packet().data)

    def stop(self) -> None:
        """Send a STOP."""
        self.link.send(messages.encode(messages.STOP))

    def started_sequence(self) -> int:
        """The worker's status word."""
        return int.from_bytes(self.status.map[:8], sys.byteorder)

    def exit_code(self, timeout_s: float = ANSWER_TIMEOUT_S) -> int:
        """Wait for the process's end."""
        return self.process.wait(timeout_s)

    def seconds_to_exit(self) -> float:
        """How long the process took to end from now on."""
        begin_s = time.monotonic()
        self.exit_code()
        return time.monotonic() - begin_s

    def log(self) -> str:
        """What it wrote to stderr so far."""
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")

    def threads(self) -> int:
        """Its threads now."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))
