from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool import wire
from mxpool.errors import MalformedMessage, QueueFull, UnsupportedVersion, from_wire

IDS = st.integers(1, wire.U64_MAX)
NAMES = st.text(max_size=wire.MODEL_CHARS_MAX)
SHAPES = st.lists(st.integers(0, wire.I64_MAX), max_size=wire.RANK_MAX).map(tuple)
TENSORS = st.lists(st.tuples(st.text(max_size=20), st.text(max_size=8), SHAPES), max_size=5)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9) | st.binary(max_size=9)
MAPS = st.dictionaries(st.text(max_size=9), PLAIN | st.lists(PLAIN, max_size=3), max_size=4)
REQUESTS = st.builds(
    wire.Request,
    st.integers(wire.INFER, wire.HELLO),
    IDS,
    NAMES,
    st.integers(-wire.I64_MAX, wire.I64_MAX),
    st.integers(0, wire.ROWS_MAX),
    st.binary(max_size=60),
    MAPS,
)


@st.composite
def damaged(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid message with one byte changed, taken out, put in, or the end cut off; or random bytes."""
    data = bytearray(draw(valid))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    match draw(st.integers(0, 4)):
        case 0:
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        case 1:
            del data[at : at + 1]
        case 2:
            data[at:at] = bytes([draw(st.integers(0, 255))])
        case 3:
            del data[at:]
        case _:
            return draw(st.binary(max_size=80))
    return bytes(data)


ENCODED_REQUESTS = REQUESTS.map(lambda request: wire.encode_request(*request))
ENCODED_ANSWERS = st.one_of(
    st.builds(
        lambda rows, tensors: wire.encode_result([i + 1 for i, _ in enumerate(rows)], rows, tensors),
        st.lists(st.integers(1, 128), max_size=5),
        TENSORS.map(wire.encode_tensors),
    ),
    st.builds(wire.encode_reply, IDS, MAPS),
    st.builds(
        lambda request_id, depth: wire.encode_error(
            request_id, QueueFull(model="m", depth=depth, limit=depth, unit="requests", retry_after_ms=1)
        ),
        st.integers(0, wire.U64_MAX),
        st.integers(0, 1000),
    ),
)


@given(REQUESTS)
def test_a_request_decodes_to_what_was_encoded(request: wire.Request) -> None:
    assert wire.decode_request(wire.encode_request(*request)) == request


@given(damaged(ENCODED_REQUESTS))
def test_a_damaged_request_is_read_as_what_it_says_or_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage, UnsupportedVersion):
        request = wire.decode_request(data)
        assert wire.decode_request(wire.encode_request(*request)) == request


@given(TENSORS)
def test_tensors_decode_to_what_was_encoded(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    assert wire.decode_tensors(wire.encode_tensors(tensors)) == tensors


@given(damaged(TENSORS.map(wire.encode_tensors)))
def test_damaged_tensors_are_read_as_what_they_say_or_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        tensors = wire.decode_tensors(data)
        assert wire.decode_tensors(wire.encode_tensors(tensors)) == tensors


@given(damaged(ENCODED_ANSWERS))
def test_a_damaged_answer_raises_nothing_but_the_two_errors(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage, UnsupportedVersion):
        wire.decode_answer(data)


@given(damaged(ENCODED_REQUESTS))
def test_an_id_is_read_or_is_zero_whatever_the_bytes(data: bytes) -> None:
    assert 0 <= wire.readable_id(data) <= wire.U64_MAX


@given(REQUESTS, st.integers(-1000, 1000).filter(lambda version: version != wire.VERSION))
def test_another_version_is_told_whatever_follows_it(request: wire.Request, version: int) -> None:
    fields = [version, *list(request)[: request.rows % 7]]
    with pytest.raises(UnsupportedVersion) as caught:
        wire.decode_request(msgpack.packb(fields))
    assert caught.value.fields == {"version": version, "minimum": 1, "maximum": 1}


def test_unknown_keys_of_extensions_are_kept_and_harmless() -> None:
    data = wire.encode_request(wire.INFER, 1, "m", extensions={"from the future": 1})
    assert wire.decode_request(data).extensions == {"from the future": 1}


VALID: list[Any] = [1, wire.INFER, 7, "model", 0, 1, b"", {}]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (1, 0),
        (1, 5),
        (1, True),
        (1, "1"),
        (2, 0),
        (2, -1),
        (2, 1.0),
        (2, True),
        (3, b"model"),
        (3, "m" * 65),
        (3, None),
        (4, -(2**63)),
        (4, 2**63),
        (4, None),
        (5, -1),
        (5, 2**31),
        (5, 1.5),
        (6, "text"),
        (6, []),
        (7, []),
        (7, None),
        (7, {b"key": 1}),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_refused(position: int, value: Any) -> None:
    fields = [*VALID]
    fields[position] = value
    with pytest.raises(MalformedMessage):
        wire.decode_request(msgpack.packb(fields))


@pytest.mark.parametrize("fields", [VALID[:7], [*VALID, 0], [], {}, 1, [None], ["1"], [True, *VALID[1:]]])
def test_another_number_of_fields_or_no_array_is_refused(fields: Any) -> None:
    with pytest.raises(MalformedMessage):
        wire.decode_request(msgpack.packb(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # array32, map32, str32, bin32, ext32 that announce 4 GiB
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 60_000,  # nested
        msgpack.packb(VALID) + b"\x00",
        msgpack.packb(VALID)[:-1],
        b"\xc1",
        b"\x81\x91\x01\x01",  # a map with an array for a key
        b"\xa1\xff",  # not UTF-8
    ],
)
def test_hostile_messagepack_is_malformed(data: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_answer, wire.decode_tensors):
        with pytest.raises(MalformedMessage):
            decode(data)
    assert wire.readable_id(data) in (0, VALID[2])


def test_a_header_above_the_limit_is_refused_unread() -> None:
    data = msgpack.packb([*VALID[:7], {"k": b"x" * wire.HEADER_BYTES_MAX}])
    with pytest.raises(MalformedMessage, match="at most 65536"):
        wire.decode_request(data)


@pytest.mark.parametrize(
    "tensors",
    [
        [["x", "FP32", [1]]] * (wire.TENSORS_MAX + 1),
        [["x", "FP32", [1] * (wire.RANK_MAX + 1)]],
        [["x", "FP32", [-1]]],
        [["x", "FP32", [2**63]]],
        [["x", "FP32", [True]]],
        [["x", "FP32", 4]],
        [["x", "FP32"]],
        [["x", "FP32", [1], 0]],
        [[b"x", "FP32", [1]]],
        [["x", 1, [1]]],
        ["x"],
        {},
    ],
)
def test_tensors_of_another_form_are_refused(tensors: Any) -> None:
    with pytest.raises(MalformedMessage):
        wire.decode_tensors(msgpack.packb(tensors))


def test_answers_decode_to_what_was_encoded() -> None:
    tensors = wire.encode_tensors([("y", "FP32", (3,))])
    assert wire.decode_answer(wire.encode_result([4, 5], [1, 2], tensors)) == wire.Result([4, 5], [1, 2], tensors)
    assert wire.decode_answer(wire.encode_reply(6, {"live": True})) == wire.Reply(6, {"live": True})
    error = QueueFull(model="m", depth=3, limit=3, unit="requests", retry_after_ms=9)
    failure = wire.decode_answer(wire.encode_error(7, error))
    assert isinstance(failure, wire.Failure)
    assert failure.request_id == 7
    rebuilt = from_wire(failure.code, failure.message, failure.fields)
    assert (type(rebuilt), rebuilt.message, rebuilt.fields) == (QueueFull, error.message, error.fields)


@pytest.mark.parametrize(
    "fields",
    [
        [1, 16, [1], [1, 2], b"", {}],
        [1, 16, 1, [1], b"", {}],
        [1, 16, [1], [1], "text", {}],
        [1, 17, 1, "code", "message", [], {}],
        [1, 17, 1, 5, "message", {}, {}],
        [1, 18, 1, [], {}],
        [1, 18, "1", {}, {}],
        [1, 99, 1, {}, {}],
        [1],
    ],
)
def test_an_answer_of_another_form_is_malformed(fields: Any) -> None:
    with pytest.raises(MalformedMessage):
        wire.decode_answer(msgpack.packb(fields))
