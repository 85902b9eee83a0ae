"""The stand-in for MetaX's runtime has no name and no signature that onnxruntime 1.12.1 has not."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import numpy as np
import pytest
import standins

ROOT = Path(__file__).parents[3]
SNAPSHOT: dict[str, Any] = json.loads((standins.STANDINS / "maca" / "onnxruntime-1.12.1.json").read_text())
CLASSES = ("InferenceSession", "OrtValue", "RunOptions", "SessionOptions")
Enter = Callable[..., Any]
GRAPH = {"maca_graph_switch": "1", "maca_graph_opt_shape": "x:8x4", "maca_graph_max_opt_batch": "8"}


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    return lambda *faults: standins.enter(monkeypatch, "maca", ",".join(faults))


def parameters(signature: str) -> list[tuple[str, str]]:
    """Names and defaults of ``(arg0: str, b=1)``; annotations are left out."""
    bare = re.sub(r": (?:'[^']*'|\w+)", "", signature.split(" ->", maxsplit=1)[0])
    arguments = ast.parse(f"def f{bare}: ...").body[0].args  # type: ignore[attr-defined]
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [""] * (len(positional) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    found = [(argument.arg, default) for argument, default in zip(positional, defaults, strict=True)]
    return [*found, *([("**", arguments.kwarg.arg)] if arguments.kwarg else [])]


def test_the_snapshot_is_that_of_the_release_that_the_vendors_build_is_made_from() -> None:
    assert SNAPSHOT["version"] == "1.12.1"
    assert "ortvalue_from_numpy_with_onnx_type" not in SNAPSHOT["classes"]["OrtValue"]


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_member_is_in_the_snapshot_with_the_same_parameters(name: str, enter: Enter) -> None:
    known, owner = SNAPSHOT["classes"][name], getattr(enter(), name)
    members = {key: inspect.getattr_static(owner, key) for key in dir(owner) if not key.startswith("_")}
    assert members.keys() <= known.keys()
    for key, member in {**members, "__init__": owner.__init__}.items():
        function = member.__func__ if isinstance(member, staticmethod) else member
        own = [part for part in parameters(str(inspect.signature(function))) if part[0] != "self"]
        assert own == parameters(known[key]), f"{name}.{key}"


def test_every_public_function_and_class_is_in_the_snapshot(enter: Enter) -> None:
    runtime = enter()
    own = {name for name, value in vars(runtime).items() if getattr(value, "__module__", "") == runtime.__name__}
    assert {name for name in own if name[0] != "_"} <= {*SNAPSHOT["functions"], *SNAPSHOT["classes"]}
    assert runtime.__version__ == "1.12.1"
    levels = SNAPSHOT["classes"]["GraphOptimizationLevel"]
    assert all(name in levels for name in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"))


@pytest.mark.parametrize("name", ["SessionOptions", "RunOptions"])
def test_settings_have_the_attributes_of_1_12_and_no_others(name: str, enter: Enter) -> None:
    settings = getattr(enter(), name)()
    for key in (key for key, kind in SNAPSHOT["classes"][name].items() if kind == "property"):
        setattr(settings, key, getattr(settings, key))
    for key in ("add_provider_for_devices", "training_mode", "add_active_adapter", "no_such"):
        with pytest.raises(AttributeError, match=key):
            getattr(settings, key)
    with pytest.raises(AttributeError, match="no_such"):
        settings.no_such = 1


def open_session(runtime: Any, path: str, options: dict[str, str] | None = None, **keywords: Any) -> Any:
    providers = [("MACAExecutionProvider", options or {})]
    session = runtime.InferenceSession(path, runtime.SessionOptions(), providers=providers, **keywords)
    session.disable_fallback()
    return session


def test_keywords_calls_and_options_that_1_12_has_not_are_refused(enter: Enter, tmp_path: Path) -> None:
    runtime, path = enter(), made_models.affine(tmp_path)
    with pytest.raises(TypeError, match="enable_fallback"):
        open_session(runtime, path, enable_fallback=0)
    session = open_session(runtime, path)
    for name in ("run_async", "io_binding_v2", "get_input_memory_infos"):
        with pytest.raises(AttributeError):
            getattr(session, name)
    with pytest.raises(AttributeError):
        _ = runtime.OrtValue.ortvalue_from_numpy_with_onnx_type
    with pytest.raises(TypeError):
        runtime.RunOptions().add_run_config_entry("one")


@pytest.mark.parametrize(
    "changes",
    [
        {"maca_graph_switch": "yes"},
        {"maca_graph_switch": 1},
        {"maca_graph_switch": "0"},
        {"maca_graph_max_opt_batch": "16"},
        {"maca_graph_max_opt_batch": ""},
        {"maca_graph_opt_shape": ""},
        {"maca_graph_opt_shape": "x:8x5"},
        {"maca_graph_opt_shape": "x:8,4"},
        {"maca_graph_opt_shape": "y:8x4"},
        {"maca_graph_opt_shape": "x:8x4,x:8x4"},
        {"gpu_graph_id": "1"},
        {"enable_cuda_graph": "1"},
    ],
    ids=str,
)
def test_options_are_checked_to_the_letter(changes: dict[str, Any], enter: Enter, tmp_path: Path) -> None:
    runtime, path = enter(), made_models.affine(tmp_path)
    open_session(runtime, path, GRAPH)
    with pytest.raises(RuntimeError):
        open_session(runtime, path, {**GRAPH, **changes})


def test_a_replay_reads_the_captured_address_whatever_it_is_given(enter: Enter, tmp_path: Path) -> None:
    runtime = enter()
    session = open_session(runtime, made_models.affine(tmp_path), GRAPH)
    one, two = np.ones((8, 4), np.float32), np.full((8, 4), 2, np.float32)
    values = [runtime.OrtValue.ortvalue_from_numpy(array) for array in (one, two)]
    answers = [session.run_with_ort_values(["y"], {"x": value})[0].numpy()[0, 0] for value in values]
    assert answers == [3, 3]
    one[...] = 5
    assert session.run_with_ort_values(["y"], {"x": values[1]})[0].numpy()[0, 0] == 11
    with pytest.raises(RuntimeError, match="the graph is for"):
        session.run(["y"], {"x": one[:4]})


def test_a_session_that_would_fall_back_to_the_cpu_by_itself_is_noticed(enter: Enter, tmp_path: Path) -> None:
    runtime = enter()
    session = runtime.InferenceSession(made_models.affine(tmp_path), providers=["MACAExecutionProvider"])
    with pytest.raises(AssertionError, match="tried again on the CPU"):
        session.run(None, {"x": np.ones((1, 4), np.float32)})


def test_memory_of_a_result_comes_again_only_when_the_result_is_gone(enter: Enter, tmp_path: Path) -> None:
    runtime = enter()
    session = open_session(runtime, made_models.affine(tmp_path))
    value = runtime.OrtValue.ortvalue_from_numpy(np.ones((2, 4), np.float32))
    (first,) = session.run_with_ort_values(None, {"x": value})
    (second,) = session.run_with_ort_values(None, {"x": value})
    assert first.data_ptr() != second.data_ptr()
    address = second.data_ptr()
    del first, second
    (third,) = session.run_with_ort_values(None, {"x": value})
    assert third.data_ptr() == address
