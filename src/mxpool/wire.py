"""The bytes between client and broker, protocol version 1. docs/wire.md is the reference.

A message from a client is a header frame, then at most one body frame. The header is one MessagePack array::

    position  field       type   meaning
    0         version     int    1
    1         kind        int    INFER 1, CANCEL 2, CONTROL 3, HELLO 4
    2         request id  u64    chosen by the client, 1 or more, unique on its connection
    3         model       str    name, up to 64 characters; "" where none is meant
    4         deadline    i64    us; > 0 absolute CLOCK_MONOTONIC, < 0 minus the time left, 0 none
    5         rows        int    rows of the batch axis (1 for models without one)
    6         tensors     bin    MessagePack array of [name, datatype, shape]; a bin so that a receiver can
                                 compare it, unparsed, with one that it has checked before
    7         extensions  map    str keys; unknown ones are ignored

Only INFER has a body: every tensor, little-endian and C-contiguous, joined in the order of ``tensors``; with the
extension ``arena: [token, offset, size]`` the same bytes lie in the client's arena and no body follows.

A message from the broker is a header, and for RESULT one body::

    RESULT 16   [1, 16, ids, rows, tensors, {}]     answers to several requests that ran as neighbours in one batch:
                                                    rows[i] rows belong to ids[i], the body holds all of them
    ERROR  17   [1, 17, id, code, message, {fields}, {}]      id 0: the request's id could not be read
    REPLY  18   [1, 18, id, {payload}, {}]                    answer to CONTROL and HELLO
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from mxpool.errors import MalformedMessage, MxPoolError, UnsupportedVersion

VERSION = 1
INFER, CANCEL, CONTROL, HELLO = 1, 2, 3, 4
RESULT, ERROR, REPLY = 16, 17, 18

HEADER_BYTES_MAX = 65_536  # a header names tensors; 64 KiB holds 500 of them
MODEL_CHARS_MAX = 64
TENSORS_MAX = 512
RANK_MAX = 16
U64_MAX = 2**64 - 1
I64_MAX = 2**63 - 1
ROWS_MAX = 2**31 - 1

_pack: Callable[[object], bytes] = msgpack.Packer(autoreset=True).pack


class Request(NamedTuple):
    """A checked header from a client; fields as in the table above."""

    kind: int
    request_id: int
    model: str
    deadline_us: int
    rows: int
    tensors: bytes
    extensions: dict[str, Any]


def encode_request(
    kind: int,
    request_id: int,
    model: str = "",
    deadline_us: int = 0,
    rows: int = 0,
    tensors: bytes = b"",
    extensions: dict[str, Any] | None = None,
) -> bytes:
    """The header frame of a request."""
    return _pack([VERSION, kind, request_id, model, deadline_us, rows, tensors, extensions or {}])


def _unpack(data: bytes) -> Any:
    if len(data) > HEADER_BYTES_MAX:
        raise MalformedMessage(reason=f"header of {len(data)} bytes, at most {HEADER_BYTES_MAX}")
    try:
        return msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessage(reason=f"not MessagePack: {type(error).__name__}") from None


def _check_version(fields: Any) -> None:
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        raise MalformedMessage(reason="the header is not an array that starts with a version")
    if fields[0] != VERSION:
        raise UnsupportedVersion(version=fields[0], minimum=VERSION, maximum=VERSION)


def decode_request(data: bytes) -> Request:
    """Parse a client's header; types and bounds are checked, meaning (the model, its tensors) is not.

    Raises:
        MalformedMessage: for any bytes that ``encode_request`` cannot have made, whatever a peer sends.
        UnsupportedVersion: for another version, whatever follows it.
    """
    fields = _unpack(data)
    if type(fields) is list and len(fields) == 8:
        version, kind, request_id, model, deadline_us, rows, tensors, extensions = fields
        if (  # one condition for what is right, and words only for what is not: this runs for every request
            type(version) is type(kind) is type(request_id) is type(deadline_us) is type(rows) is int
            and version == VERSION
            and INFER <= kind <= HELLO
            and 1 <= request_id <= U64_MAX
            and type(model) is str
            and len(model) <= MODEL_CHARS_MAX
            and -I64_MAX <= deadline_us <= I64_MAX
            and 0 <= rows <= ROWS_MAX
            and type(tensors) is bytes
            and type(extensions) is dict
            and (not extensions or all(type(key) is str for key in extensions))
        ):
            return Request(kind, request_id, model, deadline_us, rows, tensors, extensions)
    _check_version(fields)
    raise MalformedMessage(reason=_fault(fields))


def _fault(fields: list[Any]) -> str:
    """What is wrong with the fields of a request, which are not what ``decode_request`` takes."""
    if len(fields) != 8:
        return f"a header has 8 fields, this one {len(fields)}"
    _, kind, request_id, model, deadline_us, rows, tensors, _ = fields
    if not (type(kind) is int and INFER <= kind <= HELLO):
        return "kind is not one of 1 to 4"
    if not (type(request_id) is int and 1 <= request_id <= U64_MAX):
        return "request id is not an integer from 1 to 2^64-1"
    if not (type(model) is str and len(model) <= MODEL_CHARS_MAX):
        return f"model is not a string of at most {MODEL_CHARS_MAX} characters"
    if not (type(deadline_us) is int and -I64_MAX <= deadline_us <= I64_MAX):
        return "deadline is not a signed 64-bit integer"
    if not (type(rows) is int and 0 <= rows <= ROWS_MAX):
        return f"rows is not an integer from 0 to {ROWS_MAX}"
    if type(tensors) is not bytes:
        return "tensors is not a bin"
    return "extensions is not a map with string keys"


def readable_id(data: bytes) -> int:
    """The request id of a header that was refused, or 0 where none can be read. Raises nothing."""
    if len(data) > HEADER_BYTES_MAX:
        return 0  # not worth parsing: that is why it was refused
    try:
        fields = msgpack.unpackb(data)
        request_id = fields[2]
    except Exception:  # noqa: BLE001 - the bytes are known to be bad; any failure means "no id"
        return 0
    return request_id if type(request_id) is int and 0 < request_id <= U64_MAX else 0


def encode_tensors(tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The ``tensors`` bin: names, KServe datatypes and whole shapes (batch axis included)."""
    return _pack([[name, datatype, list(shape)] for name, datatype, shape in tensors])


def decode_tensors(data: bytes) -> list[tuple[str, str, tuple[int, ...]]]:
    """Read a ``tensors`` bin.

    Raises:
        MalformedMessage: for any bytes that ``encode_tensors`` cannot have made.
    """
    fields = _unpack(data)
    if type(fields) is not list or len(fields) > TENSORS_MAX:
        raise MalformedMessage(reason=f"tensors is not an array of at most {TENSORS_MAX}")
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for entry in fields:
        if type(entry) is not list or len(entry) != 3:
            raise MalformedMessage(reason="a tensor is not [name, datatype, shape]")
        name, datatype, shape = entry
        if type(name) is not str or type(datatype) is not str:
            raise MalformedMessage(reason="a tensor's name or datatype is not a string")
        if type(shape) is not list or len(shape) > RANK_MAX:
            raise MalformedMessage(reason=f"a shape is not an array of at most {RANK_MAX}")
        if not all(type(dim) is int and 0 <= dim <= I64_MAX for dim in shape):
            raise MalformedMessage(reason="a dim is not an integer from 0 to 2^63-1")
        found.append((name, datatype, tuple(shape)))
    return found


class Result(NamedTuple):
    """Answers of one body: ``rows[i]`` consecutive rows belong to ``ids[i]``."""

    ids: list[int]
    rows: list[int]
    tensors: bytes


class Failure(NamedTuple):
    """A typed error for one request; ``errors.from_wire`` makes the exception."""

    request_id: int
    code: str
    message: str
    fields: dict[str, Any]


class Reply(NamedTuple):
    """The answer to a control request."""

    request_id: int
    payload: dict[str, Any]


def encode_result(ids: list[int], rows: list[int], tensors: bytes) -> bytes:
    """The header of a RESULT; the body follows as its own frame."""
    return _pack([VERSION, RESULT, ids, rows, tensors, {}])


def encode_error(request_id: int, error: MxPoolError) -> bytes:
    """The only frame of an ERROR."""
    return _pack([VERSION, ERROR, request_id, error.code, error.message, error.fields, {}])


def encode_reply(request_id: int, payload: dict[str, Any]) -> bytes:
    """The only frame of a REPLY."""
    return _pack([VERSION, REPLY, request_id, payload, {}])


def decode_answer(data: bytes) -> Result | Failure | Reply:
    """Parse a broker's header (the client trusts its broker's sizes; the shape is checked all the same).

    Raises:
        MalformedMessage: for bytes that no ``encode_*`` above can have made.
        UnsupportedVersion: for another version.
    """
    try:
        fields = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessage(reason=f"not MessagePack: {type(error).__name__}") from None
    _check_version(fields)
    # Plain comparisons: a match statement costs three times as much, and this runs for every answer.
    kind = fields[1] if len(fields) > 1 else None
    if kind == RESULT and len(fields) == 6:
        _, _, ids, rows, tensors, extensions = fields
        typed = type(ids) is type(rows) is list and type(tensors) is bytes and type(extensions) is dict
        if typed and len(ids) == len(rows):
            return Result(ids, rows, tensors)
    elif kind == ERROR and len(fields) == 7 and list(map(type, fields[2:])) == [int, str, str, dict, dict]:
        return Failure(*fields[2:6])
    elif kind == REPLY and len(fields) == 5 and list(map(type, fields[2:])) == [int, dict, dict]:
        return Reply(*fields[2:4])
    raise MalformedMessage(reason="the answer is not a RESULT, ERROR or REPLY")
