"""What becomes of the values: strides, dtypes, bits, and arrays that the caller keeps on using."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import numpy.typing as npt
import pytest
from gates import Gate, wait_queued, wait_running
from onnx import TensorProto
from pool import Pool, echo, wait_until
from raw_peer import RawPeer

from mxpool import Client, wire
from mxpool.errors import InvalidTensor, ModelUnavailable

Array = npt.NDArray[Any]

SIDE = 192  # a row of 147 KB: by arena
DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1", "INT16": "i2",
    "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("models")

    def served(path: str) -> dict[str, Any]:
        return {"path": path, "max_batch_size": 4}

    for name in ("affine", "half"):
        (folder / name).mkdir()
    models = {
        "small": echo(8, tensors="x:FP32:6x4"),
        "large": echo(8, tensors=f"x:FP32:{SIDE}x{SIDE}"),
        "affine": served(made_models.affine(folder / "affine")),
        "half": served(made_models.identity(folder / "half", TensorProto.FLOAT16, ("N", 65_536))),
        "kinds": echo(4, tensors=",".join(f"{name.lower()}:{name}:3" for name in DTYPES)),
    }
    with Pool(models) as pool:
        yield pool


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    with pool.client() as client:
        yield client


# M2

Shape = tuple[int, ...]


def counted(shape: Shape) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def odd_strides(shape: Shape) -> Array:
    """One row whose first stride is nonsense, as numpy allows where an axis has one element."""
    return np.lib.stride_tricks.as_strided(counted((1, *shape[1:])), strides=(-7, shape[2] * 4, 4))


LAYOUTS: dict[str, Callable[[Shape], Array]] = {
    "transposed": lambda s: counted((s[0], s[2], s[1])).transpose(0, 2, 1),
    "batch axis last": lambda s: np.moveaxis(counted((s[1], s[2], s[0])), 2, 0),
    "backwards": lambda s: counted(s)[::-1],
    "every second row": lambda s: counted((2 * s[0], *s[1:]))[::2],
    "every second column backwards": lambda s: counted((s[0], s[1], 2 * s[2]))[:, :, ::-2],
    "broadcast rows": lambda s: np.broadcast_to(counted(s[1:]), s),
    "one value": lambda s: np.broadcast_to(np.float32(3.5), s),
    "fortran": lambda s: np.asfortranarray(counted(s)),
    "odd strides": odd_strides,
    "unaligned": lambda s: np.frombuffer(b"\0" + counted(s).tobytes(), np.float32, offset=1).reshape(s),
    "big-endian": lambda s: counted(s).astype(">f4"),
    "matrix of a subclass": lambda s: np.ma.MaskedArray(counted(s), mask=np.zeros(s, bool)),
    "a window": lambda s: np.lib.stride_tricks.sliding_window_view(counted((s[0], s[1], 2 * s[2])), s[2], 2)[:, :, 3],
}


@pytest.mark.parametrize("call", ["infer", "submit", "push"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_with_any_strides_is_answered_as_its_contiguous_copy(client: Client, layout: str, call: str) -> None:
    for model, shape in (("small", (4, 6, 4)), ("large", (4, SIDE, SIDE)), ("large", (11, SIDE, SIDE))):
        array = LAYOUTS[layout](shape)
        plain = np.array(array, np.float32, order="C")
        if call == "infer":
            outputs = client.infer(model, {"x": array})
        elif call == "submit":
            outputs = client.submit(model, {"x": array}).result(20)
        else:
            [outputs] = client.push(model, [{"x": array}])
        assert outputs["y"].tobytes() == plain.tobytes()


def test_every_datatype_comes_back_bit_for_bit(client: Client) -> None:
    random = np.random.default_rng(1)
    arrays = {}
    for name, code in DTYPES.items():
        dtype = np.dtype(code)
        bits = random.integers(0, 2 if name == "BOOL" else 256, 4 * 3 * dtype.itemsize, np.uint8)
        arrays[name.lower()] = bits.view(dtype).reshape(4, 3)
    outputs = client.infer("kinds", arrays)
    for name, array in arrays.items():
        assert outputs[f"y_{name}"].dtype == array.dtype
        assert outputs[f"y_{name}"].tobytes() == array.tobytes()


# M3


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.ones((1, 4), np.float64), "float64"),
        (np.ones((1, 4), np.int32), "int32"),
        (np.ones((1, 4), np.float16), "float16"),
        (np.ones((1, 4), np.bool_), "bool"),
        (np.ones((1, 2), np.complex64), "complex64"),
        (np.array([["a", "b", "c", "d"]]), "<U1"),
        (np.array([[1, None, 2, 3]]), "object"),
        ([[1.0, 2.0, 3.0, 4.0]], "float64"),
        ([[1, 2, 3, 4]], "int64"),
    ],
)
def test_another_dtype_is_refused_by_tensor_got_and_wanted(client: Client, array: Any, got: str) -> None:
    with pytest.raises(InvalidTensor) as caught:
        client.infer("affine", {"x": array})
    assert caught.value.fields["tensor"] == "x"
    assert got in caught.value.fields["got"]
    assert "float32" in caught.value.fields["expected"]
    assert (client.infer("affine", {"x": np.ones((1, 4), np.float32)})["y"] == 3).all()


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_no_datatype_is_cast_to_another(client: Client, wanted: str, given: str) -> None:
    arrays = {name.lower(): np.ones((1, 3), code) for name, code in DTYPES.items()}
    arrays[wanted.lower()] = np.ones((1, 3), DTYPES[given])
    if wanted == given:
        assert client.infer("kinds", arrays)[f"y_{wanted.lower()}"].dtype == DTYPES[wanted]
        return
    with pytest.raises(InvalidTensor) as caught:
        client.infer("kinds", arrays)
    assert caught.value.fields["tensor"] == wanted.lower()


@pytest.mark.parametrize("datatype", ["INT32", "UINT32", "FP64", "BF16", "BYTES", "fp32", "", "F" * 60_000])
def test_the_broker_refuses_a_datatype_of_the_same_size_that_no_library_would_send(pool: Pool, datatype: str) -> None:
    body = np.ones((1, 4), np.float32).tobytes()
    with RawPeer(pool.endpoint) as peer:
        tensors = wire.encode_tensors([("x", datatype, (1, 4))])
        peer.send(wire.encode_request(wire.INFER, 5, "affine", 0, 1, tensors), body)
        failure = peer.refusal()
        assert (failure.code, failure.fields["tensor"], failure.fields["expected"]) == ("invalid_tensor", "x", "FP32")
        assert len(failure.message) < 300
        peer.send(
            wire.encode_request(wire.INFER, 6, "affine", 0, 1, wire.encode_tensors([("x", "FP32", (1, 4))])), body
        )
        assert isinstance(peer.answer(), wire.Result)


# M5


def test_every_float16_comes_back_bit_for_bit_through_a_runtime(client: Client) -> None:
    every = np.arange(65_536, dtype=np.uint16).view(np.float16)[None]  # subnormals, infinities, all payloads of NaN
    answered = client.infer("half", {"x": every})["y"]
    assert answered.dtype == np.float16
    assert answered.tobytes() == every.tobytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float32])
def test_other_sixteen_bits_are_no_float16(client: Client, dtype: type) -> None:
    with pytest.raises(InvalidTensor, match="float16"):
        client.infer("half", {"x": np.zeros((1, 65_536), dtype)})


# M6, and bfloat16 of M5


@pytest.mark.parametrize(("kind", "word"), [(TensorProto.STRING, "string"), (TensorProto.BFLOAT16, "bfloat16")])
def test_a_model_with_a_type_that_is_not_served_is_refused_at_load_by_name(
    tmp_path: Path, kind: int, word: str
) -> None:
    bad = {"path": made_models.identity(tmp_path, kind), "max_batch_size": 4}
    with Pool({"bad": bad, "echo": echo()}, ready=["echo"]) as pool, pool.client() as client:
        reason = wait_until(lambda: pool.model("bad")["reason"], "the reason")
        assert "'x'" in reason
        assert word in reason.lower()
        assert pool.control("ready", "bad")["models"] == {"bad": "unavailable"}
        for array in (np.array([["a"]], object), np.zeros((1, 4), np.uint16), np.array([[b"a"]])):
            with pytest.raises(ModelUnavailable):
                client.infer("bad", {"x": array})
        assert client.infer("echo", {"x": np.ones((1, 4), np.float32)})["y"][0, 0] == 1


@pytest.mark.parametrize("value", [["a", "é"], [None, 1.0], ["\ud800"], [object()]])
def test_text_and_objects_are_refused_in_the_client_by_name(client: Client, value: list[Any]) -> None:
    for array in (np.array([value], object), [value]):
        with pytest.raises(InvalidTensor) as caught:
            client.infer("affine", {"x": array})
        assert caught.value.fields["tensor"] == "x"


# M8


@pytest.mark.parametrize("model", ["small", "large"])
def test_a_read_only_array_is_taken_and_an_answer_may_be_written_to(client: Client, model: str) -> None:
    array = counted((3, 6, 4) if model == "small" else (3, SIDE, SIDE))
    array.flags.writeable = False
    first = client.infer(model, {"x": array})["y"]
    first[...] = -1
    second = client.infer(model, {"x": array})["y"]
    assert (second == array).all()
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(second, array)


@pytest.mark.parametrize("width", [4, 32_768])
def test_an_array_may_be_changed_as_soon_as_it_is_submitted(width: int) -> None:
    with (
        Gate() as gate,
        Pool({"echo": echo(8, tensors=f"x:FP32:{width}", gate=gate.path)}) as pool,
        pool.client() as client,
    ):
        array = np.full((2, width), 1, np.float32)
        futures = []
        for value in range(1, 6):
            array[...] = value
            futures.append(client.submit("echo", {"x": array}))
            if value == 1:
                wait_running(pool)
        wait_queued(pool, 4)
        array[...] = -5
        gate.let(5)
        for value, future in enumerate(futures, 1):
            assert (future.result(20)["y"] == value).all()


@pytest.mark.parametrize("width", [4, 32_768])
def test_a_pushed_array_may_be_used_again_for_the_next_frame(width: int) -> None:
    def frames(array: Array) -> Iterator[dict[str, Array]]:
        for number in range(100):
            array[...] = number
            yield {"x": array}

    with Pool({"echo": echo(8, tensors=f"x:FP32:{width}")}) as pool, pool.client() as client:
        results = client.push("echo", frames(np.empty((1, width), np.float32)), in_flight=50)
        for number, outputs in enumerate(results):
            assert (outputs["y"] == number).all()
