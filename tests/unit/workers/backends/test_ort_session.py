from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from worker_rig import make_spec

from mxpool.errors import LoadFailed, ModelInvalid, NotServable, ProviderUnavailable
from mxpool.workers.backends import ort_session


@pytest.mark.parametrize(
    ("kind", "provider", "package"),
    [("cuda", "CUDAExecutionProvider", "mxpool[cuda]"), ("maca", "MACAExecutionProvider", "the vendor's")],
)
def test_a_provider_that_the_runtime_lacks_is_refused_with_what_is_there(
    kind: str, provider: str, package: str
) -> None:
    if provider in onnxruntime.get_available_providers():
        pytest.skip(f"gpu: this onnxruntime has {provider}")
    with pytest.raises(ProviderUnavailable) as caught:
        ort_session.import_runtime(kind)
    text = caught.value.message
    assert text.startswith(f"{provider} was asked for, ")
    assert "CPUExecutionProvider" in text
    assert package in text
    assert f"onnxruntime {onnxruntime.__version__} was built without it" in text


def test_a_missing_runtime_is_refused_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ProviderUnavailable, match=r"cannot be imported.*mxpool\[cpu\]"):
        ort_session.import_runtime("cpu")
    with pytest.raises(ProviderUnavailable, match=r"cannot be imported.*mxpool\[cuda\]"):
        ort_session.import_runtime("cuda")


def test_a_session_that_fell_back_to_another_provider_is_refused_with_the_loaders_message(tmp_path: Path) -> None:
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    runtime = SimpleNamespace(InferenceSession=lambda *_, **__: session, __file__=str(tmp_path / "__init__.py"))
    with pytest.raises(ProviderUnavailable) as caught:
        ort_session.open_session(runtime, make_spec(device_kind="cuda"), None)
    assert "CUDAExecutionProvider was asked for, CPUExecutionProvider is there" in caught.value.message
    assert "libonnxruntime_providers_cuda.so: cannot open shared object file" in caught.value.message


def test_a_model_that_does_not_fit_into_memory_may_be_tried_again() -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    with pytest.raises(LoadFailed, match="not enough memory") as caught:
        ort_session.open_session(SimpleNamespace(InferenceSession=no_memory), make_spec(), None)
    assert type(caught.value) is LoadFailed  # its subclasses mean: never as it is


def test_a_worker_uses_the_configured_threads_and_none_of_them_spins() -> None:
    options = ort_session.session_options(onnxruntime, make_spec(threads=3))
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"
    assert options.log_severity_level == ort_session.LOG_ERROR


def test_known_options_reach_the_session() -> None:
    given: dict[str, Any] = {
        "session.set_denormal_as_zero": True,
        "session.dynamic_block_base": 4,
        "enable_cpu_mem_arena": False,
        "graph_optimization_level": "basic",
    }
    options = ort_session.session_options(onnxruntime, make_spec(options=given))
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.get_session_config_entry("session.dynamic_block_base") == "4"
    assert options.enable_cpu_mem_arena is False
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("session.set_denormals_as_zero", "1", "session.set_denormal_as_zero"),
        ("session.optimized_model_filepath", "/tmp/x", "onnxruntime options are"),
        ("enable_mem_pattern", "no", "'no' is not true or false"),
        ("graph_optimization_level", "most", "'most' is not one of disable, basic, extended, all"),
    ],
)
def test_an_option_that_the_runtime_would_ignore_is_refused_by_name(key: str, value: str, reason: str) -> None:
    with pytest.raises(NotServable) as caught:
        ort_session.session_options(onnxruntime, make_spec(options={key: value}))
    assert f"option {key!r}" in caught.value.message
    assert reason in caught.value.message


def test_options_of_the_provider_go_to_it_as_strings_and_unknown_ones_are_refused() -> None:
    spec = make_spec(options={"provider.use_tf32": False, "provider.gpu_mem_limit": 1 << 30}, device_kind="cuda")
    known = frozenset(["use_tf32", "gpu_mem_limit"])
    assert ort_session.provider_options(spec, known) == {"use_tf32": "0", "gpu_mem_limit": "1073741824"}
    assert ort_session.provider_options(spec, None) == {"use_tf32": "0", "gpu_mem_limit": "1073741824"}
    with pytest.raises(NotServable, match=r"option 'provider.use_tf32'.*options of the provider are gpu_mem_limit"):
        ort_session.provider_options(spec, frozenset(["gpu_mem_limit"]))
    ort_session.session_options(onnxruntime, spec)  # which leaves them alone


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Not root while the test runs: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65_534)
    yield
    os.seteuid(0)


@pytest.mark.usefixtures("as_nobody")
def test_an_unreadable_file_is_refused_as_such() -> None:
    with pytest.raises(ModelInvalid, match="Permission denied"):
        ort_session.check_file("/proc/1/mem")


def test_what_is_no_file_is_refused_with_what_it_is(tmp_path: Path) -> None:
    fifo, empty = tmp_path / "fifo", tmp_path / "empty"
    os.mkfifo(fifo)
    empty.touch()
    expected = {
        fifo: "not a regular file",
        empty: "is empty",
        tmp_path: "is a directory",
        tmp_path / "no": "No such file",
    }
    for path, reason in expected.items():
        with pytest.raises(ModelInvalid, match=reason):
            ort_session.check_file(str(path))
    with pytest.raises(ModelInvalid, match="null"):
        ort_session.check_file("a\0b")


def test_a_message_of_many_lines_becomes_one_of_bounded_length() -> None:
    assert ort_session.one_line(RuntimeError("a\n  b\tc")) == "a b c"
    assert len(ort_session.one_line(RuntimeError("x" * 10_000))) == ort_session.REASON_CHARS_MAX
    assert ort_session.one_line(RuntimeError()) == "RuntimeError"
