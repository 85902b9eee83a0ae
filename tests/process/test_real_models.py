"""Real models from wheels, and the example models, end to end: what the pool answers is what a plain session says."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import wheels
from pool import Pool, soak, wait_until

from mxpool import Client
from mxpool.errors import InvalidTensor, MxPoolError, RunFailed
from mxpool.spec import default_sizes

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
Random = np.random.Generator

MAKE_MODELS = Path(__file__).parents[2] / "scripts" / "make_models"
LIGHT = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
VOCABULARY, SEQUENCE = 30_522, 16
TOKEN_DIMS = {name: [SEQUENCE] for name in TOKENS}
ALONE = 1e-5


def floats(name: str, *dims: int) -> Callable[[int, Random], Feeds]:
    return lambda rows, random: {name: random.standard_normal((rows, *dims)).astype(np.float32)}


def ranking_rows(rows: int, random: Random) -> Feeds:
    return {
        "numerical": random.standard_normal((rows, 48)).astype(np.float32),
        "categorical": random.integers(0, 1800, (rows, 39)).astype(np.float32),
        "keyword_vec": random.standard_normal((rows, 768)).astype(np.float32),
    }


def token_rows(rows: int, random: Random) -> Feeds:
    ids = random.integers(0, VOCABULARY, (rows, SEQUENCE))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


class Case(NamedTuple):
    """A model, how it is served, and rows for it. ``coupled``: a row's answer depends on those beside it."""

    path: Callable[[Path], str]
    max_batch_size: int
    rows: Callable[[int, Random], Feeds]
    dims: dict[str, list[int]] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    coupled: bool = False


def made(name: str) -> Callable[[Path], str]:
    return lambda folder: str(folder / f"{name}.onnx")


def packaged(find: Callable[[], str]) -> Callable[[Path], str]:
    return lambda _: find()


CASES = {
    "boosting": Case(packaged(wheels.gradient_boosting), 16, floats("input", 4)),
    "neighbors": Case(packaged(wheels.k_neighbors), 16, floats("input", 4)),
    "direction": Case(packaged(wheels.text_direction), 8, floats("x", 3, 48, 192), {"x": [3, 48, 192]}),
    "detection": Case(packaged(wheels.text_detection), 4, floats("x", 3, 64, 96), {"x": [3, 64, 96]}),
    "recognition": Case(
        lambda _: wheels.model("rapidocr", "PP-OCRv6_rec_small.onnx"), 4, floats("x", 3, 48, 64), {"x": [3, 48, 64]}
    ),
    "embedding": Case(packaged(wheels.sentence_embedding), 4, token_rows, TOKEN_DIMS),
    "ranking": Case(made("ranking"), 32, ranking_rows),
    "overhead": Case(made("overhead"), 16, ranking_rows),
    "coupled": Case(made("coupled"), 8, floats("x", 16), coupled=True),
}


def session(path: str) -> Any:
    """A plain session with a worker's thread count: more threads add in another order."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(plain: Any, feeds: Feeds) -> Feeds:
    names = [output.name for output in plain.get_outputs()]
    return dict(zip(names, plain.run(None, feeds), strict=True))


def padded(feeds: Feeds, size: int) -> Feeds:
    return {name: np.concatenate([a, np.zeros((size - len(a), *a.shape[1:]), a.dtype)]) for name, a in feeds.items()}


def row(arrays: Feeds, number: int) -> Feeds:
    return {name: array[number : number + 1] for name, array in arrays.items()}


def close(left: Feeds, right: Feeds) -> bool:
    return left.keys() == right.keys() and all(
        np.allclose(left[name], right[name], rtol=ALONE, atol=ALONE) for name in right
    )


def in_state(pool: Pool, name: str, state: str) -> bool:
    return bool(pool.model(name)["state"] == state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_into = tmp_path_factory.mktemp("models")
    subprocess.run([MAKE_MODELS, made_into, "ranking", "overhead", "coupled"], check=True, timeout=120)
    return made_into


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Pool]:
    models = {
        name: {"path": case.path(folder), "max_batch_size": case.max_batch_size, "dims": case.dims}
        for name, case in CASES.items()
    }
    with Pool(models) as pool:
        yield pool


@pytest.mark.parametrize("name", CASES)
def test_every_row_count_is_bit_equal_to_a_plain_session_on_the_same_padded_batch(
    served: Pool, folder: Path, name: str
) -> None:
    case = CASES[name]
    plain = session(case.path(folder))
    random = np.random.default_rng(zlib.crc32(name.encode()))
    sizes = default_sizes(case.max_batch_size)
    with served.client() as client:
        for count in range(1, case.max_batch_size + 1):
            feeds = case.rows(count, random)
            answered = client.infer(name, feeds)
            size = next(size for size in sizes if size >= count)
            expected = run(plain, padded(feeds, size))
            assert answered.keys() == expected.keys()
            for output, array in expected.items():
                assert answered[output].dtype == array.dtype
                assert answered[output].tobytes() == array[:count].tobytes(), (count, output)
    assert served.model(name)["failed"] == 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.coupled])
def test_rows_of_a_batch_are_what_they_are_alone_for_several_clients_at_once(
    served: Pool, folder: Path, name: str
) -> None:
    case = CASES[name]
    plain = session(case.path(folder))
    random = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    clients = 4
    count = soak(300, 12)
    requests = [[case.rows(1 + number % 3, random) for number in range(count)] for _ in range(clients)]
    answers: list[list[Feeds]] = [[] for _ in range(clients)]

    def push(number: int) -> None:
        with served.client() as client:
            answers[number] += client.push(name, requests[number], in_flight=8)

    threads = [threading.Thread(target=push, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sent, got in zip(requests, answers, strict=True):
        assert len(got) == count
        for feeds, outputs in zip(sent, got, strict=True):
            rows = len(next(iter(feeds.values())))
            for index in range(rows):
                assert close(row(outputs, index), run(plain, row(feeds, index)))


def test_rows_that_are_coupled_depend_on_their_neighbours_and_one_row_batches_end_that(
    served: Pool, folder: Path
) -> None:
    """What docs/behaviour.md says of dynamic quantisation; the pool can neither see nor undo it."""
    small = np.random.default_rng(3).standard_normal((1, 16)).astype(np.float32)
    alone = run(session(str(folder / "coupled.onnx")), {"x": small})["y"]
    with served.client() as client:
        together = client.infer("coupled", {"x": np.concatenate([small, small * 100])})["y"][:1]
        assert np.abs(together - alone).max() > 0.1
    with Pool({"coupled": {"path": str(folder / "coupled.onnx"), "max_batch_size": 1}}) as pool:
        with pool.client() as client:
            futures = [client.submit("coupled", {"x": small * factor}) for factor in (1, 100, 1)]
            answers = [future.result(20)["y"] for future in futures]
        assert answers[0].tobytes() == answers[2].tobytes() == alone.tobytes()


def test_a_token_out_of_range_fails_its_batch_and_no_other_and_the_worker_goes_on() -> None:
    model = {
        "path": wheels.sentence_embedding(),
        "max_batch_size": 4,
        "dims": TOKEN_DIMS,
        "max_queue_delay_us": 1_000_000,  # two requests of two rows fill a batch before that
    }
    plain = session(wheels.sentence_embedding())
    good, bad = token_rows(2, np.random.default_rng(4)), token_rows(2, np.random.default_rng(5))
    bad["input_ids"][1, 3] = VOCABULARY
    with Pool({"embedding": model}) as pool, pool.client() as client:
        futures = [client.submit("embedding", feeds) for feeds in (good, bad, good, good)]
        for future in futures[:2]:
            with pytest.raises(RunFailed, match=str(VOCABULARY)) as caught:
                future.result(20)
            assert not caught.value.retryable
            assert "\n" not in caught.value.message
        expected = run(plain, {name: np.concatenate([array, array]) for name, array in good.items()})
        answered = [future.result(20)["last_hidden_state"] for future in futures[2:]]
        assert np.concatenate(answered).tobytes() == expected["last_hidden_state"].tobytes()
        found = pool.model("embedding")
        assert (found["failed"], found["ok"], found["batches"]) == (2, 2, 2)
        assert found["workers"][0]["restarts"] == 0


def test_two_shapes_of_one_file_are_two_models_that_never_meet_and_neither_starves() -> None:
    dims = {"small": (3, 64, 64), "wide": (3, 64, 96)}
    models = {
        name: {"path": wheels.text_detection(), "max_batch_size": 4, "dims": {"x": list(row_dims)}}
        for name, row_dims in dims.items()
    }
    plain = session(wheels.text_detection())
    count = soak(200, 30)
    with Pool(models) as pool:
        spent: dict[str, list[float]] = {name: [] for name in dims}
        wrong: list[str] = []

        def ask(name: str) -> None:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            with pool.client() as client:
                for _ in range(count):
                    feeds = floats("x", *dims[name])(1, random)
                    begin_s = time.perf_counter()
                    outputs = client.infer(name, feeds)
                    spent[name].append(time.perf_counter() - begin_s)
                    if outputs["fetch_name_0"].tobytes() != run(plain, feeds)["fetch_name_0"].tobytes():
                        wrong.append(name)

        threads = [threading.Thread(target=ask, args=(name,)) for name in dims]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        medians = {name: statistics.median(times) for name, times in spent.items()}
        assert 1 / 3 < medians["wide"] / medians["small"] < 3
        with pool.client() as client, pytest.raises(InvalidTensor, match="wrong shape"):
            client.infer("small", floats("x", 3, 64, 96)(1, np.random.default_rng(0)))


def test_a_batch_axis_that_the_file_fixes_is_served_as_it_is_or_one_at_a_time() -> None:
    models = {
        "whole": {"path": wheels.mul_1(), "max_batch_size": 0},
        "rows": {"path": wheels.mul_1(), "max_batch_size": 3},
        "sigmoid": {"path": wheels.model("onnxruntime", "sigmoid.onnx"), "max_batch_size": 0},
        "refused": {"path": wheels.mul_1(), "max_batch_size": 8},
    }
    with Pool(models, ready=["whole", "rows", "sigmoid"]) as pool, pool.client() as client:
        weights = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
        sent = np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32)
        assert (client.infer("whole", {"X": sent})["Y"] == sent * weights).all()
        for count in (1, 2, 3):
            assert (client.infer("rows", {"X": sent[:count]})["Y"] == sent[:count] * weights[:count]).all()
        assert pool.model("rows")["padding_rows"] == 3
        cube = np.random.default_rng(2).standard_normal((3, 4, 5)).astype(np.float32)
        expected = run(session(wheels.model("onnxruntime", "sigmoid.onnx")), {"x": cube})["y"]
        assert client.infer("sigmoid", {"x": cube})["y"].tobytes() == expected.tobytes()
        wait_until(lambda: pool.model("refused")["state"] == "unavailable", "a refusal")
        assert "its first dim is fixed at 3; set max_batch_size = 0, or 3" in pool.model("refused")["reason"]


def test_an_output_that_is_no_tensor_is_refused_by_name() -> None:
    for max_batch_size in (0, 3):
        model = {"path": wheels.iris(), "max_batch_size": max_batch_size}
        with Pool({"iris": model}, ready=()) as pool:
            wait_until(partial(in_state, pool, "iris", "unavailable"), "a refusal")
            reason = pool.model("iris")["reason"]
            assert "output 'probabilities' cannot be served" in reason
            assert wheels.iris() in reason
            with pool.client() as client, pytest.raises(MxPoolError, match="probabilities"):
                client.infer("iris", {"float_input": np.zeros((3, 2), np.float32)})


def reference(name: str) -> Array:
    """The output that the model's authors give for ``arange(n).reshape(shape) / n``."""
    tensor = onnx.TensorProto()
    tensor.ParseFromString(Path(wheels.light(name).replace(".onnx", "_output_0.pb")).read_bytes())
    array: Array = onnx.numpy_helper.to_array(tensor)
    return array


def check_light(client: Client, name: str) -> None:
    size = 3 * 224 * 224
    image = (np.arange(size).reshape(1, 3, 224, 224) / size).astype(np.float32)
    (spec,) = client.metadata(name)["inputs"]
    (answered,) = client.infer(name, {spec[0]: image}, timeout_s=60).values()
    expected = reference(name)
    assert answered.shape == expected.shape
    assert np.allclose(answered, expected, rtol=1e-3, atol=1e-7)  # what the onnx backend tests allow
    plain = session(wheels.light(name))
    (output,) = run(plain, {spec[0]: image}).values()
    assert answered.tobytes() == output.tobytes()


def test_image_models_give_the_outputs_that_their_authors_published() -> None:
    models = {name: {"path": wheels.light(name), "max_batch_size": 0} for name in LIGHT}
    with Pool(models, ready=()) as pool, pool.client() as client:
        for name in LIGHT:
            wait_until(partial(in_state, pool, name, "ready"), name, timeout_s=60)
            check_light(client, name)
