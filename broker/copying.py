"""The bytes of one model's slots: rows in, padding, rows out. I/O on shared memory only."""

from __future__ import annotations

from mxpool.broker.tickets import Ticket
from mxpool.shm.layout import SlotLayout
from mxpool.shm.segment import Segment


class SlotMemory:
    """Copies rows into and out of the slots of ``segment``, which it does not own.

    A slot's *dirty mark* is one above the highest row that may be other than zero. It is raised before bytes are
    written, so zero padding below it is always enough.
    """

    def __init__(self, layout: SlotLayout, segment: Segment, repeat_padding: bool) -> None:
        signature = layout.signature
        self._bytes = memoryview(segment.map)
        input_rows = [spec.row_bytes for spec in signature.inputs]
        output_rows = [spec.row_bytes for spec in signature.outputs]
        slots = range(layout.slots)
        self._inputs = [list(zip(layout.input_offsets(slot), input_rows, strict=True)) for slot in slots]
        self._outputs = [list(zip(layout.output_offsets(slot), output_rows, strict=True)) for slot in slots]
        self._dirty = [0] * layout.slots
        self._repeat = repeat_padding

    def copy_in(self, ticket: Ticket, body: bytes | memoryview) -> None:
        """Copy a request's tensors, joined in ``body``, to its rows; the size was checked before."""
        batch, row, rows = ticket.batch, ticket.row, ticket.rows
        assert batch is not None
        slot, memory = batch.slot, self._bytes
        end = row + rows
        self._dirty[slot] = max(self._dirty[slot], end)
        position = 0
        for offset, row_bytes in self._inputs[slot]:
            size = rows * row_bytes
            start = offset + row * row_bytes
            memory[start : start + size] = body[position : position + size]
            position += size

    def body(self, slot: int, row: int, rows: int) -> bytes:
        """The inputs of ``rows`` rows from ``row`` on, as ``copy_in`` got them: a copy."""
        return self._joined(self._inputs[slot], row, rows)

    def pad(self, slot: int, rows: int, size: int) -> None:
        """Fill rows ``rows`` to ``size``: zeros below the dirty mark, or the last row again and again."""
        dirty = self._dirty[slot]
        end = size if self._repeat else min(size, dirty)
        if end <= rows:
            return
        memory = self._bytes
        for offset, row_bytes in self._inputs[slot]:
            start = offset + rows * row_bytes
            filling = bytes(memory[start - row_bytes : start]) if self._repeat else bytes(row_bytes)
            memory[start : offset + end * row_bytes] = filling * (end - rows)
        self._dirty[slot] = max(dirty, end) if self._repeat or dirty > size else rows

    def answer(self, slot: int, row: int, rows: int) -> bytes:
        """The outputs of ``rows`` rows from ``row`` on, joined in the signature's order: a copy."""
        return self._joined(self._outputs[slot], row, rows)

    def _joined(self, tensors: list[tuple[int, int]], row: int, rows: int) -> bytes:
        memory = self._bytes
        return b"".join(
            [memory[offset + row * row_bytes : offset + (row + rows) * row_bytes] for offset, row_bytes in tensors]
        )

    def release(self) -> None:
        """Let go of the segment's mapping, so that it can be closed."""
        self._bytes.release()
