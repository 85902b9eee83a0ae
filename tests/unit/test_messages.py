from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool import messages
from mxpool.errors import MalformedMessage, PermissionDenied

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
RUNS = st.builds(messages.Run, U64, U32, U32, U32, U32, U64)
ERRORS = st.none() | st.tuples(
    st.text(max_size=9),
    st.text(max_size=9),
    st.dictionaries(st.text(max_size=5), I64 | st.text(max_size=5), max_size=3),
)
DONES = st.builds(messages.Done, U64, U32, U32, st.integers(0, 2), I64, I64, ERRORS)
FIELDS = st.dictionaries(
    st.text(max_size=9).filter(lambda key: key != "kind"), I64 | st.text(max_size=9) | st.binary(max_size=9), max_size=4
)


def changed(data: bytes, at: int, value: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([value]) + data[at + 1 :]


@given(RUNS)
def test_a_run_decodes_to_what_was_encoded(run: messages.Run) -> None:
    assert messages.decode_run(messages.encode_run(run)) == run


@given(DONES)
def test_a_done_decodes_to_what_was_encoded(done: messages.Done) -> None:
    assert messages.decode_done(messages.encode_done(done)) == done


@given(st.integers(0, 255), FIELDS)
def test_any_other_record_decodes_to_what_was_encoded(kind: int, fields: dict[str, Any]) -> None:
    assert messages.decode(messages.encode(kind, **fields)) == (kind, fields)


@given(RUNS, st.integers(0, 1000), st.integers(0, 255))
def test_a_run_with_one_byte_changed_is_read_as_what_it_says_or_refused(run: messages.Run, at: int, value: int) -> None:
    data = changed(messages.encode_run(run), at, value)
    with contextlib.suppress(MalformedMessage):
        assert messages.encode_run(messages.decode_run(data)) == data


@given(DONES, st.integers(0, 1000), st.integers(0, 255))
def test_a_done_with_one_byte_changed_is_read_or_refused(done: messages.Done, at: int, value: int) -> None:
    with contextlib.suppress(MalformedMessage):
        read = messages.decode_done(changed(messages.encode_done(done), at, value))
        assert read.error is None or list(map(type, read.error)) == [str, str, dict]


@given(st.integers(0, 255), FIELDS, st.integers(0, 1000), st.integers(0, 255))
def test_any_other_record_with_one_byte_changed_is_read_or_refused(
    kind: int, fields: dict[str, Any], at: int, value: int
) -> None:
    with contextlib.suppress(MalformedMessage):
        _, read = messages.decode(changed(messages.encode(kind, **fields), at, value))
        assert all(isinstance(key, str) for key in read)


@given(st.binary(max_size=80))
def test_random_bytes_are_read_or_refused_by_every_decoder(data: bytes) -> None:
    for decode in (messages.decode, messages.decode_run, messages.decode_done):
        with contextlib.suppress(MalformedMessage):
            decode(data)


@given(RUNS, DONES)
def test_cut_or_longer_hot_records_are_refused(run: messages.Run, done: messages.Done) -> None:
    for data in (messages.encode_run(run)[:-1], messages.encode_run(run) + b"x"):
        with pytest.raises(MalformedMessage):
            messages.decode_run(data)
    whole = messages.encode_done(done)
    with pytest.raises(MalformedMessage):
        messages.decode_done(whole[: len(whole) - 1])
    with pytest.raises(MalformedMessage):
        messages.decode_done(whole + b"x")


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x91\x01", b"\x01\x81\x01\x01", b"\x01\x80\x00", b"\x01\xc1"])
def test_a_record_that_is_no_map_with_string_keys_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        messages.decode(data)


def test_an_error_in_a_record_keeps_code_message_and_fields() -> None:
    error = PermissionDenied(uid=7, action="pass an arena")
    kind, fields = messages.decode(messages.encode(messages.ARENA_REFUSED, **messages.error_fields(error)))
    assert kind == messages.ARENA_REFUSED
    assert fields == {
        "code": "permission_denied",
        "message": error.message,
        "fields": {"uid": 7, "action": "pass an arena"},
    }


def test_the_hot_records_lie_where_the_docstring_says() -> None:
    run = messages.encode_run(messages.Run(1, 2, 3, 4, 5, 6))
    assert run == b"\x06" + b"".join(
        value.to_bytes(size, "little") for value, size in ((1, 8), (2, 4), (3, 4), (4, 4), (5, 4), (6, 8))
    )
    done = messages.encode_done(messages.Done(1, 2, 3, messages.GRAPH_HIT, -5, 6, None))
    assert done == b"\x07" + b"".join(
        value.to_bytes(size, "little", signed=value < 0)
        for value, size in ((1, 8), (2, 4), (3, 4), (0, 1), (1, 1), (-5, 8), (6, 8))
    )
    assert msgpack.unpackb(messages.encode(messages.STOP)[1:]) == {}
