from __future__ import annotations

from pathlib import Path

import pytest

from mxpool.cli import startup
from mxpool.errors import ConfigInvalid

FILE = """
[broker]
endpoint = "ipc:///run/file.sock"
[models.ranking]
path = "ranking.onnx"
graph = "off"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mx.toml"
    path.write_text(FILE)
    return path


def test_the_flag_wins_over_the_variable_and_the_variable_over_the_file(file: Path) -> None:
    variable = {"MX_BROKER_ENDPOINT": "ipc:///run/variable.sock"}
    assert startup.from_file(file, "ipc:///run/flag.sock", variable).broker.endpoints == ("ipc:///run/flag.sock",)
    assert startup.from_file(file, None, variable).broker.endpoints == ("ipc:///run/variable.sock",)
    assert startup.from_file(file, None, {}).broker.endpoints == ("ipc:///run/file.sock",)


def test_without_flag_variable_and_key_the_endpoint_is_the_default_of_the_clients(tmp_path: Path) -> None:
    settled = startup.from_flags(["a=a.onnx"], [], None, None, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert settled.broker.endpoints in (
        (f"ipc://{tmp_path}/mx-broker/broker.sock",),
        ("ipc:///run/mx-broker/broker.sock",),
    )


def test_a_bad_endpoint_in_the_environment_is_refused_by_the_name_of_the_variable(file: Path) -> None:
    with pytest.raises(ConfigInvalid, match="MX_BROKER_ENDPOINT"):
        startup.from_file(file, None, {"MX_BROKER_ENDPOINT": "http://x"})


def test_switches_in_the_environment_win_over_the_file(file: Path) -> None:
    assert startup.from_file(file, None, {"MX_MACA_GRAPH": "1"}).models["ranking"].graph == "prefer"


def test_flags_alone_serve_each_model_on_the_cpu_with_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dims = ["ocr:x=3x48x192", "ocr:y=7"]
    settled = startup.from_flags(["ranking=r.onnx", "ocr=/srv/o=1.onnx"], dims, 16, "ipc:///run/a.sock", {})
    assert {name: model.path for name, model in settled.models.items()} == {
        "ranking": str(tmp_path / "r.onnx"),
        "ocr": "/srv/o=1.onnx",
    }
    assert {model.max_batch_size for model in settled.models.values()} == {16}
    assert all(model.workers == {"cpu": 1} for model in settled.models.values())
    assert settled.models["ocr"].dims == {"x": (3, 48, 192), "y": (7,)}


@pytest.mark.parametrize(
    ("models", "dims", "key", "words"),
    [
        (["ranking"], [], "--model", "'ranking' is not NAME=PATH"),
        (["a=x.onnx", "a=y.onnx"], [], "--model", "'a' is given twice"),
        (["a=x.onnx"], ["b:x=3"], "--dims", "no --model is named 'b'"),
        (["a=x.onnx"], ["a:x=3xq"], "--dims", "is not NAME:input=3x48x192"),
        (["a=x.onnx"], ["a:x"], "--dims", "is not NAME:input=3x48x192"),
        (["a=x.onnx"], ["a:x=0"], "models.a.dims.x[0]", "0 is less than 1"),
        (["../a=x.onnx"], [], 'models."../a"', "a name is made of"),
        (["a="], [], "models.a.path", "is empty"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_their_name(
    models: list[str], dims: list[str], key: str, words: str
) -> None:
    with pytest.raises(ConfigInvalid, match="command line") as caught:
        startup.from_flags(models, dims, None, "ipc:///run/a.sock", {})
    assert caught.value.fields["key"] == key
    assert words in caught.value.fields["reason"]
