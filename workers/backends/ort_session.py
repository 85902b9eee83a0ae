"""Opening an ONNX Runtime session: the runtime itself, its provider, its options, and its errors as ours.

The runtime is imported on first use, after the device's environment is set, and only where this backend runs.
"""

from __future__ import annotations

import importlib
import os
import stat
from pathlib import Path
from typing import Any

from mxpool.errors import LoadFailed, ModelInvalid, NotServable, ProviderUnavailable
from mxpool.spec import ModelSpec

PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "mxpool[cpu]"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "maca": ("MACAExecutionProvider", "the vendor's onnxruntime wheel for MACA"),
}
CPU_ONLY = "this release serves onnxruntime models on the CPU only"
REASON_CHARS_MAX = 500  # a runtime's message can hold a whole graph; the first part tells what happened
LOG_ERROR, LOG_FATAL = 3, 4

# ONNX Runtime takes any key silently, so that a typing error would go unseen: these are the keys that it knows and
# that change neither what is served nor what it writes to disk.
CONFIG_ENTRIES = frozenset(
    {
        "mlas.disable_kleidiai",
        "mlas.enable_gemm_fastmath_arm64_bfloat16",
        "optimization.disable_specified_optimizers",
        "optimization.enable_cast_chain_elimination",
        "optimization.enable_gelu_approximation",
        "session.allow_released_opsets_only",
        "session.disable_aot_function_inlining",
        "session.disable_double_qdq_remover",
        "session.disable_prepacking",
        "session.disable_quant_qdq",
        "session.dynamic_block_base",
        "session.enable_quant_qdq_cleanup",
        "session.force_spinning_stop",
        "session.inter_op.allow_spinning",
        "session.intra_op.allow_spinning",
        "session.intra_op_thread_affinities",
        "session.qdq_matmulnbits_accuracy_level",
        "session.qdqisint8allowed",
        "session.set_denormal_as_zero",
        "session.strict_shape_type_inference",
        "session.use_deterministic_compute",
        "session.x64quantprecision",
    }
)
SWITCHES = ("enable_cpu_mem_arena", "enable_mem_pattern")  # attributes of SessionOptions, booleans
LEVELS = {"disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED"}
LEVELS["all"] = "ORT_ENABLE_ALL"


def one_line(error: BaseException) -> str:
    """The message of ``error`` without line breaks, at most ``REASON_CHARS_MAX`` characters."""
    return " ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__


def import_runtime(device_kind: str) -> Any:
    """The onnxruntime module, known to have the device's provider.

    Raises:
        ProviderUnavailable: if it cannot be imported, or was built without that provider. Never another one instead.
    """
    provider, package = PROVIDERS[device_kind]
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        reason = f"onnxruntime cannot be imported ({one_line(error)}); pip install mxpool[cpu] brings the CPU build"
        if device_kind != "cpu":
            reason += f", and {CPU_ONLY}"
        raise ProviderUnavailable(provider=provider, actual="nothing", reason=reason, package=package) from None
    available = runtime.get_available_providers()
    if provider not in available:
        reason = f"the installed onnxruntime {runtime.__version__} was built without it, and {CPU_ONLY}"
        raise ProviderUnavailable(provider=provider, actual=", ".join(available), reason=reason, package=package)
    return runtime


def check_file(path: str) -> None:
    """Refuse what is not a readable file with something in it: the runtime's own words do not tell these apart.

    Raises:
        ModelInvalid: with the reason; a FIFO is never opened, since that would wait for its writer.
    """
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):
            reason = "it is a directory" if stat.S_ISDIR(found.st_mode) else "it is not a regular file"
            raise ModelInvalid(path=path, reason=reason)
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise ModelInvalid(path=path, reason=reason) from None
    if found.st_size == 0:
        raise ModelInvalid(path=path, reason="it is empty")


def session_options(runtime: Any, spec: ModelSpec) -> Any:
    """SessionOptions for one worker: ``spec.threads`` threads that sleep when idle, and ``spec.options``.

    Raises:
        NotServable: for an option that is not known, or a value it cannot have.
    """
    options: Any = runtime.SessionOptions()
    # A set thread count also keeps the runtime from pinning threads, which fails in a cpuset of fewer CPUs.
    options.intra_op_num_threads = spec.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = LOG_ERROR
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    for key, value in spec.options.items():
        _apply(runtime, options, spec.path, key, value)
    return options


def _apply(runtime: Any, options: Any, path: str, key: str, value: Any) -> None:
    if key in CONFIG_ENTRIES:
        options.add_session_config_entry(key, str(int(value)) if isinstance(value, bool) else str(value))
    elif key in SWITCHES and isinstance(value, bool):
        setattr(options, key, value)
    elif key == "graph_optimization_level" and value in LEVELS:
        options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, LEVELS[value])
    else:
        raise NotServable(path=path, what="option", name=key, reason=_allowed(key, value))


def _allowed(key: str, value: Any) -> str:
    if key in SWITCHES:
        return f"{value!r} is not true or false"
    if key == "graph_optimization_level":
        return f"{value!r} is not one of {', '.join(LEVELS)}"
    return f"onnxruntime options are graph_optimization_level, {', '.join((*SWITCHES, *sorted(CONFIG_ENTRIES)))}"


def open_session(runtime: Any, spec: ModelSpec, options: Any) -> Any:
    """An InferenceSession of the device's provider.

    Raises:
        ModelInvalid: if the file is not a model that this runtime can load.
        ProviderUnavailable: if the session does not run on the provider asked for.
    """
    provider, package = PROVIDERS[spec.device_kind]
    try:
        session: Any = runtime.InferenceSession(os.fspath(spec.path), options, providers=[provider], enable_fallback=0)
    except MemoryError:
        raise LoadFailed(model=spec.name, reason="not enough memory for the model") from None
    except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
        raise ModelInvalid(path=spec.path, reason=one_line(error)) from None
    actual = session.get_providers()
    if actual[:1] != [provider]:
        reason = "the session fell back to another provider"
        raise ProviderUnavailable(provider=provider, actual=", ".join(actual), reason=reason, package=package)
    return session
