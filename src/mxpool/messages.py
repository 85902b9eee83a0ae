"""Records on a link (AF_UNIX SEQPACKET) between the broker and one worker or one client.

The first byte is the kind. Two kinds are hot and have a fixed layout, little-endian, no padding::

    RUN   offset 0 u8 kind, 1 u64 epoch, 9 u32 slot, 13 u32 generation, 17 u32 rows, 21 u32 size, 25 u64 sequence
    DONE  offset 0 u8 kind, 1 u64 epoch, 9 u32 slot, 13 u32 generation, 17 u8 status, 18 u8 graph,
          19 i64 t_start_us, 27 i64 t_end_us        (status 1: an error follows, MessagePack [code, message, fields])

All others are the kind byte and one MessagePack map; what the map holds stands beside each kind below.
Both ends are this version of mxpool: records are decoded strictly but not versioned beyond HELLO.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgpack

from mxpool.errors import MalformedMessage, MxPoolError

LINK_VERSION = 1

HELLO = 1  # peer → broker {role: "worker" | "client", version, pid}
LOAD = 2  # broker → worker {worker, model, spec}; descriptor: its status segment (8 bytes used)
SIGNATURE = 3  # worker → broker {signature, report}
BIND = 4  # broker → worker {slots}; descriptor: the slot segment
READY = 5  # worker → broker {in_flight, sizes, report}: batches at once, batch sizes ascending
RUN = 6  # broker → worker, fixed
DONE = 7  # worker → broker, fixed
STOP = 8  # broker → worker {}: finish what is started, unload, exit 0
LOAD_FAILED = 9  # worker → broker {code, message, fields, cannot_boot}; the worker exits
EXIT_CANNOT_BOOT = 78  # EX_CONFIG of sysexits.h, after LOAD_FAILED: the same file and config will fail again
EXIT_DEVICE_LOST = 71  # EX_OSERR: the device is lost to this process; the next may have it
WELCOME = 20  # broker → client {epoch, token, version, arenas}
REFUSED = 25  # broker → client {code, message, fields}, then end of file: too many clients
ARENA = 21  # client → broker {size}; descriptor: a shrink-sealed memfd
ARENA_OK = 22  # broker → client {token, size}
ARENA_REFUSED = 23  # broker → client {code, message, fields}
ARENA_DROP = 24  # client → broker {token}

GRAPH_WORDS = ("off", "hit", "miss")
GRAPH_OFF, GRAPH_HIT, GRAPH_MISS = 0, 1, 2

_pack = cast("Callable[[object], bytes]", msgpack.packb)
_RUN = struct.Struct("<BQIIIIQ")
_DONE = struct.Struct("<BQIIBBqq")


class Run(NamedTuple):
    """Run ``slot`` padded to ``size`` rows, of which ``rows`` are live."""

    epoch: int
    slot: int
    generation: int
    rows: int
    size: int
    sequence: int


class Done(NamedTuple):
    """A batch ended; ``error`` is None when its outputs lie in the slot."""

    epoch: int
    slot: int
    generation: int
    graph: int
    t_start_us: int
    t_end_us: int
    error: tuple[str, str, dict[str, Any]] | None


def encode_run(run: Run) -> bytes:
    """RUN as bytes."""
    return _RUN.pack(RUN, *run)


def decode_run(data: bytes) -> Run:
    """Read a RUN; MalformedMessage for anything else."""
    if len(data) != _RUN.size or data[0] != RUN:
        raise MalformedMessage(reason="not a RUN record")
    return Run(*_RUN.unpack(data)[1:])


def encode_done(done: Done) -> bytes:
    """DONE as bytes."""
    status = 0 if done.error is None else 1
    head = _DONE.pack(DONE, done.epoch, done.slot, done.generation, status, done.graph, done.t_start_us, done.t_end_us)
    return head if done.error is None else head + _pack(list(done.error))


def decode_done(data: bytes) -> Done:
    """Read a DONE; MalformedMessage for anything else."""
    if len(data) < _DONE.size or data[0] != DONE:
        raise MalformedMessage(reason="not a DONE record")
    _, epoch, slot, generation, status, graph, t_start_us, t_end_us = _DONE.unpack_from(data)
    if graph >= len(GRAPH_WORDS):
        raise MalformedMessage(reason=f"DONE with graph {graph}")
    if status == 0 and len(data) == _DONE.size:
        return Done(epoch, slot, generation, graph, t_start_us, t_end_us, None)
    try:
        match msgpack.unpackb(data[_DONE.size :]):
            case [str(code), str(message), dict(fields)]:
                return Done(epoch, slot, generation, graph, t_start_us, t_end_us, (code, message, fields))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        pass
    raise MalformedMessage(reason="DONE with an unreadable error")


def encode(kind: int, **fields: Any) -> bytes:
    """A record that is not hot: the kind byte and a MessagePack map."""
    return bytes((kind,)) + _pack(fields)


def decode(data: bytes) -> tuple[int, dict[str, Any]]:
    """Kind and fields of a record that is not hot.

    Raises:
        MalformedMessage: for any bytes that ``encode`` cannot have made.
    """
    try:
        kind, fields = data[0], msgpack.unpackb(memoryview(data)[1:])
    except (IndexError, ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessage(reason=f"link record: {type(error).__name__}") from None
    if type(fields) is not dict or not all(type(key) is str for key in fields):
        raise MalformedMessage(reason="link record: not a map with string keys")
    return kind, fields


def error_fields(error: MxPoolError) -> dict[str, Any]:
    """``error`` as the fields of LOAD_FAILED or ARENA_REFUSED."""
    return {"code": error.code, "message": error.message, "fields": error.fields}
