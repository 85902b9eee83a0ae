"""Opening an ONNX Runtime session: the runtime itself, its provider, its options, and its errors as ours.

The runtime is imported on first use, after the device's environment is set, and only where this backend runs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.errors import LoadFailed, ModelInvalid, NotServable, ProviderUnavailable
from mxpool.spec import ModelSpec

Arrays = dict[str, npt.NDArray[Any]]

PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "mxpool[cpu]"),
    "cuda": ("CUDAExecutionProvider", "mxpool[cuda] in place of onnxruntime"),
    "maca": ("MACAExecutionProvider", "the vendor's onnxruntime wheel for MACA"),
}
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
_NO_MEMORY = re.compile("out of memory|Failed to allocate memory|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED")
_NODE = re.compile(r"Name:'([^']*)'")
PROVIDER_PREFIX = "provider."  # of options that go to the execution provider
SWITCHES = ("enable_cpu_mem_arena", "enable_mem_pattern")  # attributes of SessionOptions, booleans
LEVELS = {"disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED"}
LEVELS["all"] = "ORT_ENABLE_ALL"


def one_line(error: BaseException) -> str:
    """The message of ``error`` without line breaks, at most ``REASON_CHARS_MAX`` characters."""
    return " ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__


def for_want_of_memory(text: str) -> bool:
    """True if the runtime says that a device had no memory left, which may be over at the next try."""
    return _NO_MEMORY.search(text) is not None


def failed_node(error: BaseException) -> str:
    """The node that the runtime's executor names as the one that failed, or empty."""
    found = _NODE.search(str(error))
    return found.group(1) if found else ""


def import_runtime(device_kind: str) -> Any:
    """The onnxruntime module, known to have the device's provider.

    Raises:
        ProviderUnavailable: if it cannot be imported, or was built without that provider. Never another one instead.
    """
    provider, package = PROVIDERS[device_kind]
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        reason = f"onnxruntime cannot be imported ({one_line(error)})"
        raise ProviderUnavailable(provider=provider, actual="nothing", reason=reason, package=package) from None
    available = runtime.get_available_providers()
    if provider not in available:
        reason = f"the installed onnxruntime {runtime.__version__} was built without it"
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
        if not key.startswith(PROVIDER_PREFIX):
            _apply(runtime, options, spec.path, key, value)
    return options


def provider_options(spec: ModelSpec, known: Collection[str] | None) -> dict[str, str]:
    """Those of ``spec.options`` that begin with ``provider.``, as the provider takes them; ``known`` None takes all.

    Raises:
        NotServable: for one that is not ``known``.
    """
    found: dict[str, str] = {}
    for key, value in spec.options.items():
        if not key.startswith(PROVIDER_PREFIX):
            continue
        name = key.removeprefix(PROVIDER_PREFIX)
        if known is not None and name not in known:
            reason = f"options of the provider are {', '.join(sorted(known)) or 'none'}"
            raise NotServable(path=spec.path, what="option", name=key, reason=reason)
        found[name] = str(int(value)) if isinstance(value, bool) else str(value)
    return found


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


def quiet_run_options(runtime: Any) -> Any:
    """RunOptions for serving: a failed batch is answered and counted, not logged as well."""
    options: Any = runtime.RunOptions()
    options.log_severity_level = LOG_FATAL
    return options


def open_session(runtime: Any, spec: ModelSpec, options: Any, provider_options: Mapping[str, str] | None = None) -> Any:
    """An InferenceSession of the device's provider, which takes ``provider_options``.

    Raises:
        ModelInvalid: if the file is not a model that this runtime can load.
        ProviderUnavailable: if the session does not run on the provider asked for.
    """
    provider, package = PROVIDERS[spec.device_kind]
    try:
        providers = [(provider, dict(provider_options))] if provider_options else [provider]
        # onnxruntime 1.12, which MACA builds are made of, takes that keyword and ignores it.
        old = spec.device_kind == "maca"
        switches = {} if old else {"enable_fallback": 0}
        session: Any = runtime.InferenceSession(os.fspath(spec.path), options, providers=providers, **switches)
        if old:
            session.disable_fallback()
    except MemoryError:
        raise LoadFailed(model=spec.name, reason="not enough memory for the model") from None
    except Exception as error:  # noqa: BLE001 - the runtime's errors share no base but Exception
        if for_want_of_memory(str(error)) or "CUDA failure" in str(error):  # no call into CUDA fails for a file
            raise LoadFailed(model=spec.name, reason=one_line(error)) from None
        raise ModelInvalid(path=spec.path, reason=one_line(error)) from None
    actual = session.get_providers()
    if actual[:1] != [provider]:
        reason = f"the session fell back to another provider ({loader_message(runtime, provider)})"
        raise ProviderUnavailable(provider=provider, actual=", ".join(actual), reason=reason, package=package)
    return session


def loader_message(runtime: Any, provider: str) -> str:
    """Why the dynamic loader does not take the library of ``provider``, in its own words."""
    library = f"libonnxruntime_providers_{provider.removesuffix('ExecutionProvider').lower()}.so"
    path = Path(runtime.__file__).parent / "capi" / library
    try:
        ctypes.CDLL(os.fspath(path))
    except OSError as error:
        return one_line(error)
    return f"{library} can be loaded; see the runtime's log above"


def run_on_copies(session: Any, inputs: Arrays, outputs: Arrays, run_options: Any) -> None:
    """The way back from fixed buffers: arrays made anew for this batch, results copied into ``outputs``.

    Raises:
        ValueError: if a result has not the shape of its output. Whatever the runtime raises passes.
    """
    feeds = {name: np.array(rows) for name, rows in inputs.items()}
    for (name, rows), result in zip(outputs.items(), session.run(None, feeds, run_options), strict=True):
        if result.shape != rows.shape:
            raise ValueError(f"output {name!r} has the shape {result.shape}, expected {rows.shape}")
        rows[...] = result
