from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from mxpool import faults
from mxpool.config import BrokerConfig, Config, DeviceConfig, ModelConfig, build, read
from mxpool.errors import ConfigInvalid
from mxpool.spec import default_sizes

TABLES: dict[tuple[str, ...], type[BaseModel]] = {
    ("broker",): BrokerConfig,
    ("devices", "gpu0"): DeviceConfig,
    ("models", "ranking"): ModelConfig,
}
KEYS = [(*table, key) for table, model in TABLES.items() for key in faults.keyed_fields(model)]


def tree(**model: Any) -> dict[str, Any]:
    """A config of one model, with ``model`` changed."""
    return {"models": {"ranking": {"path": "ranking.onnx", **model}}}


def on_device(kind: str, **model: Any) -> dict[str, Any]:
    """A config of one model with workers on the CPU and on a device of ``kind``."""
    return {**tree(workers={"cpu": 1, "gpu0": 2}, **model), "devices": {"gpu0": {"kind": kind}}}


def refused(given: dict[str, Any]) -> ConfigInvalid:
    with pytest.raises(ConfigInvalid) as caught:
        build(given, "mx.toml")
    return caught.value


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "mx.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_with_one_path_is_a_whole_config(tmp_path: Path) -> None:
    loaded = read(write(tmp_path, '[models.ranking]\npath = "ranking.onnx"\n'))
    model = loaded.models["ranking"]
    assert model.path == str(tmp_path / "ranking.onnx")
    assert (model.max_batch_size, model.workers, model.slot_count, model.graph) == (128, {"cpu": 1}, 6, "prefer")
    assert (model.max_queue_size, model.max_queue_bytes, model.max_queue_delay_us) == (256, 256 << 20, 0)
    assert (model.run_timeout_ms, model.load_timeout_ms, model.threads) == (30_000, 60_000, 1)
    assert loaded.broker.endpoints == ()
    assert loaded.devices == {"cpu": DeviceConfig(kind="cpu", index=0)}


def test_every_key_of_the_design_is_taken(tmp_path: Path) -> None:
    text = """
    [broker]
    endpoint = ["ipc:///run/mx-broker/broker.sock", "tcp://127.0.0.1:5555"]
    arena_users = ["root", 1000]
    heartbeat_s = 30
    [devices.gpu0]
    kind = "maca"
    index = 3
    [models.ranking]
    path = "/srv/ranking.onnx"
    backend = "mine"
    max_batch_size = 64
    dims = { image = [3, 48, 192], one = [] }
    batch_sizes = [1, 8, 64]
    graph = "require"
    load = "eager"
    workers = { gpu0 = 2, cpu = 1 }
    queue = "per_worker"
    slots = 9
    pad = "repeat"
    fixed_input_buffers = true
    threads = 4
    options = { use_tf32 = 0, mode = "x", on = true, factor = 1.5 }
    """
    loaded = read(write(tmp_path, text))
    assert loaded.broker.endpoints == ("ipc:///run/mx-broker/broker.sock", "tcp://127.0.0.1:5555")
    assert loaded.broker.arena_users == (0, 1000)
    spec = loaded.models["ranking"].spec("ranking", loaded.devices["gpu0"])
    assert (spec.device_kind, spec.device_index, spec.sizes) == ("maca", 3, (1, 8, 64))
    assert spec.dims == {"image": (3, 48, 192), "one": ()}
    assert (spec.graph, spec.threads, spec.max_batch_size, spec.path) == ("require", 4, 64, "/srv/ranking.onnx")
    assert spec.options == {"use_tf32": 0, "mode": "x", "on": True, "factor": 1.5}


def test_one_endpoint_may_stand_without_an_array() -> None:
    loaded = build({**tree(), "broker": {"endpoint": "tcp://127.0.0.1:5555"}}, "mx.toml")
    assert loaded.broker.endpoints == ("tcp://127.0.0.1:5555",)


def test_a_bad_value_is_one_line_with_file_key_and_what_is_allowed() -> None:
    error = refused(tree(max_batch_size=300_000))
    assert str(error) == "mx.toml: models.ranking.max_batch_size: 300000 is more than 65536; allowed: 0 to 65_536"
    assert (error.fields["source"], error.fields["key"]) == ("mx.toml", "models.ranking.max_batch_size")


def test_all_bad_values_are_told_at_once() -> None:
    error = refused({**tree(threads=0, pad="mirror"), "broker": {"max_clients": "many"}})
    assert error.fields["count"] == 3
    assert [line.split(": ")[1] for line in str(error).splitlines()] == [
        "broker.max_clients",
        "models.ranking.pad",
        "models.ranking.threads",
    ]


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        (tree(max_bach_size=8), "models.ranking.max_bach_size", "did you mean max_batch_size?"),
        (tree(zebra=8), "models.ranking.zebra", "unknown key; known: backend"),
        ({**tree(), "zebra": {}}, "zebra", "unknown key; known: broker, devices, models"),
        ({**tree(), "broker": {"metrics": "127.0.0.1:9464"}}, "broker.metrics", "this release has not got it"),
        (
            {**tree(), "devices": {"g": {"kind": "cuda", "memory_budget_mb": 4}}},
            "devices.g.memory_budget_mb",
            "this rel",
        ),
        (tree(unload="engine"), "models.ranking.unload", "this release has not got it"),
        (tree(load="lazy"), "models.ranking.load", "is not in this release; allowed: eager"),
        (tree(load="lru"), "models.ranking.load", "is not in this release; allowed: eager"),
        (tree(load="never"), "models.ranking.load", "is not one of them; allowed: eager"),
        (tree(graph="on"), "models.ranking.graph", '"on" is not one of them; allowed: off, prefer, require'),
        (tree(max_batch_size="8"), "models.ranking.max_batch_size", '"8" is not an integer'),
        (tree(max_batch_size=True), "models.ranking.max_batch_size", "true is not an integer"),
        (tree(max_batch_size=8.0), "models.ranking.max_batch_size", "8.0 is not an integer"),
        (tree(fixed_input_buffers=1), "models.ranking.fixed_input_buffers", "neither true nor false"),
        (tree(dims={"x": "3x4"}), "models.ranking.dims.x", "is not an array"),
        (tree(dims={"x": [3, 0]}), "models.ranking.dims.x[1]", "0 is less than 1"),
        (tree(dims={"x": [1] * 16}), "models.ranking.dims.x", "more than 15 entries"),
        (tree(options={"x": [1]}), "models.ranking.options.x", "not a string, number or boolean"),
        (tree(options={"x": 2**64}), "models.ranking.options.x", "64 bits"),
        (tree(workers={}), "models.ranking.workers", "is empty"),
        (tree(workers={"cpu": 0}), "models.ranking.workers.cpu", "0 is less than 1"),
        (tree(workers={"gpu7": 1}), "models.ranking.workers.gpu7", "no device of that name is declared; declared: cpu"),
        (tree(batch_sizes=[8, 1, 128]), "models.ranking.batch_sizes", "does not ascend"),
        (tree(batch_sizes=[8, 8, 128]), "models.ranking.batch_sizes", "does not ascend"),
        (tree(batch_sizes=[1, 64]), "models.ranking.batch_sizes", "does not end with 128"),
        (tree(max_batch_size=0, batch_sizes=[8]), "models.ranking.batch_sizes", "does not end with 1,"),
        (tree(slots=3, workers={"cpu": 3}), "models.ranking.slots", "3 is less than 4"),
        (tree(graph="require", fixed_input_buffers=False), "models.ranking.graph", "needs fixed_input_buffers"),
        (tree(path="ranking.bin"), "models.ranking.path", "ends in none of .onnx, .plan, .engine"),
        (tree(path="ranking.plan"), "models.ranking.path", "tensorrt backend, which is not in this release"),
        (tree(path="ranking.ENGINE"), "models.ranking.path", "tensorrt backend, which is not in this release"),
        (tree(backend="tensorrt"), "models.ranking.backend", "tensorrt backend, which is not in this release"),
        (tree(graph_batch_sizes=[8, 1, 128]), "models.ranking.graph_batch_sizes", "does not ascend"),
        (tree(graph_batch_sizes=[1, 64]), "models.ranking.graph_batch_sizes", "does not end with 128"),
        (on_device("maca", graph_batch_sizes=[1, 128]), "models.ranking.graph_batch_sizes", "has one graph"),
        (tree(path="a\0.onnx"), "models.ranking.path", "NUL"),
        (tree(path=""), "models.ranking.path", "is empty"),
        ({"models": {"ranking": {}}}, "models.ranking.path", "is missing; allowed: a file"),
        ({"models": {"ranking": 3}}, "models.ranking", "3 is not a table"),
        ({"models": [1]}, "models", "is not a table"),
        ({"models": {}}, "models", "is empty"),
        ({}, "models", "is missing"),
        ({**tree(), "devices": {"cpu": {"kind": "cuda"}}}, "devices.cpu.kind", "the device named cpu is of kind cpu"),
        ({**tree(), "devices": {"gpu0": {"kind": "tpu"}}}, "devices.gpu0.kind", "allowed: cpu, cuda, maca"),
        ({**tree(), "broker": {"admin_users": ["no such user"]}}, "broker.admin_users[0]", "no user of that name"),
        ({**tree(), "broker": {"admin_users": [-1]}}, "broker.admin_users[0]", "neither a name nor a uid"),
        ({**tree(), "broker": {"arena_groups": ["a\0"]}}, "broker.arena_groups[0]", "neither a name nor a gid"),
        ({**tree(), "broker": {"arena_groups": ["no such"]}}, "broker.arena_groups[0]", "no group of that name"),
        ({**tree(), "broker": {"endpoint": 5}}, "broker.endpoint", "is not an array"),
        ({**tree(), "broker": {"endpoint": [5]}}, "broker.endpoint[0]", "not a string"),
        ({**tree(), "broker": {"endpoint": "tcp://0.0.0.0:5555"}}, "broker.endpoint[0]", "loopback"),
        ({**tree(), "broker": {"heartbeat_s": float("nan")}}, "broker.heartbeat_s", "allowed: 1 to 3_600"),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_key(given: dict[str, Any], key: str, words: str) -> None:
    error = refused(given)
    assert error.fields["key"] == key
    assert words in error.fields["reason"]


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "/etc", ".", "..", "", "a" * 65, "a" * 300, "a\0b", "a\n", "A", "-a", "_a", ".a", "ä", "a b"],
)
def test_a_name_that_could_be_a_path_is_refused_alike_for_models_and_devices(name: str) -> None:
    reasons = {
        refused({"models": {name: {"path": "x.onnx"}}}).fields["reason"],
        refused({**tree(), "devices": {name: {"kind": "cpu"}}}).fields["reason"],
    }
    assert len(reasons) == 1
    assert "the first a letter or digit" in reasons.pop()


@pytest.mark.parametrize("name", ["a", "0", "a.b", "ranking-gpu0_1", "a" * 64])
def test_names_of_letters_digits_and_three_signs_are_taken(name: str) -> None:
    assert list(build({"models": {name: {"path": "x.onnx"}}}, "mx.toml").models) == [name]


def test_a_socket_path_that_the_kernel_would_cut_is_refused_with_its_length_and_the_limit() -> None:
    path = "/run/" + "a" * 120 + "/broker.sock"
    error = refused({**tree(), "broker": {"endpoint": f"ipc://{path}"}})
    assert error.fields["key"] == "broker.endpoint[0]"
    assert str(len(path) + len(".link")) in error.fields["reason"]
    assert "107" in error.fields["reason"]


def test_the_longest_socket_path_stated_is_taken_and_one_byte_more_is_not() -> None:
    longest = "/" + "a" * 101
    build({**tree(), "broker": {"endpoint": f"ipc://{longest}"}}, "mx.toml")
    assert "at most 102 bytes" in str(faults.keyed_fields(BrokerConfig)["endpoint"].json_schema_extra)
    refused({**tree(), "broker": {"endpoint": f"ipc://{longest}a"}})


def test_any_file_is_a_model_where_the_backend_is_named() -> None:
    loaded = build(tree(path="weights.bin", backend="echo"), "mx.toml", "/srv")
    assert loaded.models["ranking"].spec("ranking", loaded.devices["cpu"]).backend == "echo"


@pytest.mark.parametrize("suffix", ["onnx", "ONNX"])
def test_the_suffix_names_the_backend(suffix: str) -> None:
    loaded = build(tree(path=f"/srv/model.{suffix}"), "mx.toml")
    assert loaded.models["ranking"].spec("ranking", loaded.devices["cpu"]).backend == "onnxruntime"


def test_a_device_of_any_kind_may_be_declared_and_used_by_a_backend_of_another_package() -> None:
    build({**tree(), "devices": {"gpu0": {"kind": "cuda"}}}, "mx.toml")
    loaded = build(on_device("cuda", backend="mine"), "mx.toml")
    assert loaded.models["ranking"].spec("ranking", loaded.devices["gpu0"]).device_kind == "cuda"


@pytest.mark.parametrize("size", [0, 1, 5, 128])
def test_sizes_default_to_powers_of_two(size: int) -> None:
    loaded = build(tree(max_batch_size=size), "mx.toml")
    assert loaded.models["ranking"].spec("ranking", loaded.devices["cpu"]).sizes == default_sizes(size)


def test_without_fixed_buffers_a_worker_is_told_to_use_no_graph() -> None:
    loaded = build(tree(fixed_input_buffers=False), "mx.toml")
    spec = loaded.models["ranking"].spec("ranking", loaded.devices["cpu"])
    assert (spec.graph, spec.fixed_input_buffers) == ("off", False)


@pytest.mark.parametrize(("workers", "slots"), [({"cpu": 1}, 6), ({"cpu": 2}, 6), ({"cpu": 2, "gpu0": 3}, 12)])
def test_slots_grow_with_the_workers_of_all_devices(workers: dict[str, int], slots: int) -> None:
    given = {**tree(workers=workers, backend="echo"), "devices": {"gpu0": {"kind": "cuda"}}}
    assert build(given, "mx.toml").models["ranking"].slot_count == slots


def test_a_config_cannot_be_changed() -> None:
    loaded = build(tree(), "mx.toml")
    with pytest.raises(ValidationError, match="frozen"):
        loaded.models["ranking"].threads = 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[models", "not a TOML file"),
        (b"\xff\xfe", "not a TOML file"),
        (b"a = 1\na = 2\n", "not a TOML file"),
        (b"a = " + b"[" * 100_000, "not a TOML file"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_by_its_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigInvalid, match=words) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigInvalid) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")


def test_relative_model_paths_start_at_the_file_and_not_at_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    path = write(tmp_path / "etc", '[models.ranking]\npath = "../models/ranking.onnx"\n')
    relative = Path(os.path.relpath(path))
    assert read(relative).models["ranking"].path == str(tmp_path / "models/ranking.onnx")


SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["off", "shared", "cpu", "x.onnx", "tcp://127.0.0.1:5", "ipc:///run/a", "root", "echo", "eager"]),
    st.dates(),
    st.datetimes(),
    st.just(datetime.time(1)),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(keys=st.sampled_from(KEYS), value=VALUES)
def test_any_value_for_any_key_loads_or_is_refused_by_that_key(keys: tuple[str, ...], value: Any) -> None:
    given: dict[str, Any] = {**tree(), "devices": {"gpu0": {"kind": "cuda"}}}
    table = given
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = value
    try:
        assert isinstance(build(given, "mx.toml"), Config)
    except ConfigInvalid as error:
        message = str(error)
    else:
        return
    assert all(line.startswith(f"mx.toml: {faults.key_text(keys)}") for line in message.split("\n"))


@given(
    value=st.dictionaries(st.text(max_size=70), VALUES, max_size=3), table=st.sampled_from(["", "models", "devices"])
)
def test_any_table_loads_or_is_refused_in_lines_of_bounded_length(value: dict[str, Any], table: str) -> None:
    given = {**tree(), table: value} if table else value
    try:
        build(given, "mx.toml")
    except ConfigInvalid as error:
        message = str(error)
    else:
        return
    assert all(len(line) < 600 and line.startswith("mx.toml: ") for line in message.split("\n"))


def test_every_key_says_what_it_is_and_what_it_takes() -> None:
    for model in TABLES.values():
        for key, field in faults.keyed_fields(model).items():
            extra = field.json_schema_extra
            assert field.description, key
            assert isinstance(extra, dict), key
            assert extra["allowed"], key
