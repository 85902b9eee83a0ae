"""Every example in docs/wire.md is what the code makes, and reads as what stands beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mxpool import messages, wire
from mxpool.errors import QueueFull

TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
EXAMPLES = {
    name: (bytes.fromhex(data), ast.literal_eval(fields.strip()))
    for name, data, fields in re.findall(r"```hex (\S+)\n(.*?)```\n+```python\n(.*?)```", TEXT, re.DOTALL)
}
INPUTS = wire.encode_tensors([("x", "FP32", (2, 2))])
OUTPUTS = wire.encode_tensors([("y", "FP32", (3,))])
TOKEN = bytes(range(16))
MADE = {
    "tensors": INPUTS,
    "hello": wire.encode_request(wire.HELLO, 1, extensions={"token": TOKEN}),
    "infer": wire.encode_request(wire.INFER, 7, "sum", 86_400_000_000, 2, INPUTS),
    "infer-arena": wire.encode_request(wire.INFER, 8, "sum", -2_500_000, 2, INPUTS, {"arena": [TOKEN, 4096, 16]}),
    "cancel": wire.encode_request(wire.CANCEL, 7),
    "control": wire.encode_request(wire.CONTROL, 9, "sum", extensions={"verb": "metadata"}),
    "result": wire.encode_result([7, 12], [2, 1], OUTPUTS),
    "error": wire.encode_error(7, QueueFull(model="sum", depth=256, limit=256, unit="requests", retry_after_ms=4)),
    "reply": wire.encode_reply(1, {"version": 1, "epoch": 4_027_504_011, "max_message_bytes": 67_108_864}),
    "link-hello": messages.encode(messages.HELLO, role="client", version=1, pid=4242),
    "link-welcome": messages.encode(messages.WELCOME, epoch=4_027_504_011, token=TOKEN, version=1, arenas=True),
    "link-arena": messages.encode(messages.ARENA, size=67_108_864),
    "link-arena-ok": messages.encode(messages.ARENA_OK, token=TOKEN, size=67_108_864),
}


def read(name: str, data: bytes) -> Any:
    """The example as the doc writes it: the array of a ZeroMQ header, or [kind, fields] of a link record."""
    return [*messages.decode(data)] if name.startswith("link-") else msgpack.unpackb(data)


def test_there_is_an_example_of_everything() -> None:
    assert EXAMPLES.keys() == MADE.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_the_code_makes_and_reads_as_the_text_says(name: str) -> None:
    data, fields = EXAMPLES[name]
    assert data == MADE[name]
    assert read(name, data) == fields


@pytest.mark.parametrize("name", ["hello", "infer", "infer-arena", "cancel", "control"])
def test_requests_are_accepted(name: str) -> None:
    assert wire.encode_request(*wire.decode_request(EXAMPLES[name][0])) == EXAMPLES[name][0]


@pytest.mark.parametrize("name", ["result", "error", "reply"])
def test_answers_are_accepted(name: str) -> None:
    assert wire.decode_answer(EXAMPLES[name][0])[1:] == tuple(EXAMPLES[name][1][3:-1])


def test_numbers_in_the_tables_are_those_of_the_code() -> None:
    kinds = {(name, int(kind)) for name, kind in re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", TEXT, re.MULTILINE)}
    over_zmq = ("INFER", "CANCEL", "CONTROL", "HELLO", "RESULT", "ERROR", "REPLY")
    over_link = ("HELLO", "WELCOME", "REFUSED", "ARENA", "ARENA_OK", "ARENA_REFUSED", "ARENA_DROP")
    assert kinds == {(name, getattr(wire, name)) for name in over_zmq} | {
        (name, getattr(messages, name)) for name in over_link
    }
    for value in (wire.HEADER_BYTES_MAX, wire.MODEL_CHARS_MAX, wire.TENSORS_MAX, wire.RANK_MAX):
        assert f"{value:,}" in TEXT
