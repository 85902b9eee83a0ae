"""Messages that no client of ours sends: valid ones with damage, nonsense, and every field at its bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np

from mxpool import messages, wire

BODY = np.ones((1, 4), np.float32).tobytes()
TENSORS = wire.encode_tensors([("x", "FP32", (1, 4))])
NESTED = 60_000  # a header has 65,536 bytes at most


class Message(NamedTuple):
    """Frames, and what must come back: ``once`` for exactly one error to ``request_id`` (0: it cannot be read)."""

    frames: list[bytes]
    once: bool
    request_id: int = 0


packed: Callable[[Any], bytes] = msgpack.packb  # also of what no header may hold


def infer(request_id: int, *, body: list[bytes] | None = None, **fields: Any) -> list[bytes]:
    """A request for ``echo``, with other ``fields`` in their places."""
    names = ("version", "kind", "id", "model", "deadline", "rows", "tensors", "extensions")
    good: tuple[Any, ...] = (wire.VERSION, wire.INFER, request_id, "echo", 0, 1, TENSORS, {})
    header = packed([fields.get(name, value) for name, value in zip(names, good, strict=True)])
    return [header, *([BODY] if body is None else body)]


UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "array of 4 G": b"\xdd\xff\xff\xff\xff",
    "map of 4 G": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bin of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "ext of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "an ext": packed(msgpack.ExtType(1, b"x")),
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "a byte that is not used": b"\xc1",
    "nested arrays": b"\x91" * NESTED,
    "nested maps": b"\x81\x01" * (NESTED // 2),
    "one byte more": infer(1)[0] + b"\0",
    "one byte less": infer(1)[0][:-1],
    "two headers": infer(1)[0] * 2,
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "a number": b"\x01",
    "a map": packed({"version": 1}),
    "an empty array": b"\x90",
    "a header beyond its limit": packed([wire.VERSION, wire.INFER, 1, "x" * wire.HEADER_BYTES_MAX]),
    "a deep tensor list in its place": packed([b"\x91" * NESTED]),
}
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, 1.5, float("nan"), float("inf"),
    "", "x" * 65, "\0", "../echo", b"", b"x", b"\xff" * 100, [], [[]], [1] * 100, {}, {"a": 1}, {1: 2}, {b"a": {}},
    {"arena": None}, {"arena": []}, {"arena": [b"", 0, 16]}, {"arena": [b"x" * 16, 2**64 - 1, -1]}, {"verb": {}},
]  # fmt: skip
SHAPES: list[Any] = [
    [], [1], [4], [4, 1], [1, 4, 1], [0, 4], [2, 4], [8, 4], [9, 4], [-1, 4], [1, -4], [2**62, 4], [2**63 - 1] * 2,
    [1.0, 4], [None, 4], [True, 4], [1] * 16, [1] * 17, "14", {}, None,
]  # fmt: skip


def refused(request_id: int, random_: random.Random) -> Message:
    """One whose only answer is an error; it names the id, unless the header cannot even be unpacked."""
    frames = _refused(request_id, random_)
    return Message(frames, True, wire.readable_id(frames[0]))


def _refused(request_id: int, random_: random.Random) -> list[bytes]:
    choose = random_.choice
    match random_.randrange(7):
        case 0:
            field = choose(["kind", "model", "rows", "tensors"])
            good: tuple[Any, ...] = {"kind": (1, 2, 3, 4), "model": ("echo",), "rows": (1,)}.get(field, ())
            return infer(request_id, **{field: choose([value for value in ODD if not _among(value, good)])})
        case 1:
            return infer(request_id, tensors=packed([["x", "FP32", choose(SHAPES)]]))
        case 2:
            return infer(request_id, body=[bytes(choose([0, 1, 15, 17, 32, 4096, 100_000]))])
        case 3:
            return infer(request_id, body=[BODY] * choose([0, 2, 3, 1000]))
        case 4:
            reference = [choose(ODD), choose(ODD), choose(ODD)]
            arena = choose([reference, reference[0], reference * 2])
            return infer(request_id, body=[], extensions={"arena": arena})
        case 5:
            return infer(request_id, body=[], kind=wire.CONTROL, extensions={"verb": choose(ODD), "x": 1})
    tensors = choose([[], [["x"]], [["y", "FP32", [1, 4]]], [["x", "FP32", [1, 4]]] * 2, {"x": 1}, 7, ["x"] * 513])
    return infer(request_id, tensors=packed(tensors))


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


def damaged(request_id: int, random_: random.Random) -> Message:
    """A valid message of which a few bytes were changed, taken out or put in: it may even be valid still."""
    request_id += 1 << 40  # damage is not to make the id of another message of it
    verb = random_.choice(["live", "ready", "list", "metadata", "stats", "slots"])
    frames = random_.choice(
        [
            infer(request_id),
            infer(request_id, kind=wire.CANCEL, body=[]),
            infer(request_id, kind=wire.CONTROL, body=[], extensions={"verb": verb}),
            infer(request_id, body=[], extensions={"arena": [bytes(16), 0, 16]}),
        ]
    )
    which = random_.randrange(len(frames))
    frames[which] = damage(frames[which], random_)
    return Message(frames, False)


def damage(data: bytes, random_: random.Random) -> bytes:
    """``data`` with a few bytes changed, taken out or put in."""
    changed = bytearray(data)
    for _ in range(random_.choice([1, 1, 1, 2, 5])):
        at = random_.randrange(len(changed) + 1)
        match random_.randrange(4):
            case 0:
                changed[at:at] = random_.randbytes(random_.choice([1, 4]))
            case 1:
                del changed[at : at + random_.choice([1, 3])]
            case _ if at < len(changed):
                changed[at] ^= 1 << random_.randrange(8)
    return bytes(changed)


def nonsense(request_id: int, random_: random.Random) -> Message:
    """Random bytes in a random number of frames."""
    del request_id
    return Message(
        [random_.randbytes(random_.choice([0, 1, 8, 64, 500])) for _ in range(random_.choice([1, 2, 5]))], False
    )


def unreadable(request_id: int, random_: random.Random) -> Message:
    """One of UNREADABLE, alone or before other frames."""
    del request_id
    header = random_.choice(list(UNREADABLE.values()))
    return Message([header, *[b"x"] * random_.choice([0, 1, 1000])], True, wire.readable_id(header))


def stream(seed: int, count: int) -> Iterator[Message]:
    """``count`` of all kinds, the same for the same seed. Request ids count up from 1."""
    random_ = random.Random(seed)
    kinds: list[Callable[[int, random.Random], Message]] = [refused, refused, damaged, damaged, nonsense, unreadable]
    for request_id in range(1, count + 1):
        yield random_.choice(kinds)(request_id, random_)


def records(seed: int, count: int) -> Iterator[bytes]:
    """Records for a link that has said HELLO, or has not: none of them may be taken."""
    random_ = random.Random(seed)
    good = [
        messages.encode(messages.HELLO, role="client", version=messages.LINK_VERSION, pid=1),
        messages.encode(messages.ARENA, size=4096),
        messages.encode(messages.ARENA_DROP, token=bytes(16)),
    ]
    of_workers = [
        messages.encode(messages.READY, in_flight=1, sizes=[1], report={}),
        messages.encode(messages.SIGNATURE, signature={}, report={}),
        messages.encode(messages.LOAD_FAILED, code="x", message="x", fields={}, cannot_boot=True),
        messages.encode_done(messages.Done(1, 0, 1, 0, 0, 0, None)),
        messages.encode_run(messages.Run(1, 0, 1, 1, 1, 1)),
    ]
    for _ in range(count):
        match random_.randrange(4):
            case 0:
                yield damage(random_.choice(good), random_)
            case 1:
                yield random_.randbytes(random_.choice([1, 2, 64, 60_000])) or b"x"
            case 2:
                yield bytes((random_.choice([1, 21, 24]),)) + random_.choice(list(UNREADABLE.values()))
            case _:
                yield random_.choice(of_workers)
