"""A stand-in for MetaX's onnxruntime on a machine without a card: 1.12's names, and the real CPU runtime underneath.

What can be called is what ``../onnxruntime-1.12.1.json`` holds, which was read from the published wheel: any other
name, keyword or number of arguments is an AttributeError or a TypeError, also where 1.12 would take it in silence.

What it does as the provider is said to (none of it was seen on a card): options are strings, checked strictly, and the
three of ``maca_graph_*`` belong together. With the switch on, the first run captures the addresses of its inputs, and
every later run reads those, whatever it is given; another shape is refused. Outputs are allocated by the runtime, and
the same memory comes again once the last result is gone. ``OrtValue.numpy`` copies.

``MXPOOL_STANDIN_FAULT``, several by comma: ``absent`` (built without the provider), ``fallback`` (the session runs on
the CPU), ``options`` (the graph's options are unknown, as to the published source), ``capture`` (it fails, at node
``branch``), ``hollow`` (replays write nothing and succeed), ``blind`` (replays give the first answer again), ``copies``
(tensors do not use the memory that they are given), ``unwritten`` (any run whose first value is 13 writes nothing and
succeeds), ``silent`` (no run ever writes), ``off_host`` (results do not lie in host memory), ``lost:N`` (from the Nth
run on, every one fails). Not a fault: ``follows`` (replays read the addresses that they are given).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np


def _real() -> Any:
    """The installed onnxruntime, imported under its own name, which this module then takes back."""
    own = sys.modules.pop(__name__)
    here, path = Path(__file__).resolve().parents[1], list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != here]
    try:
        return importlib.import_module("onnxruntime")
    finally:
        sys.path[:] = path
        sys.modules[__name__] = own


_runtime = _real()
_SNAPSHOT = json.loads((Path(__file__).parents[1] / "onnxruntime-1.12.1.json").read_text())
_FAULTS = set(filter(None, os.environ.get("MXPOOL_STANDIN_FAULT", "").split(",")))
_MACA, _CPU = "MACAExecutionProvider", "CPUExecutionProvider"
_GRAPH = ("maca_graph_switch", "maca_graph_opt_shape", "maca_graph_max_opt_batch")
_OTHERS = {"device_id", "gpu_mem_limit", "do_copy_in_default_stream"}
_TRIGGER = 13
_LOST_AFTER = next((int(fault.partition(":")[2]) for fault in _FAULTS if fault.startswith("lost:")), 0)
__version__ = _SNAPSHOT["version"]

GraphOptimizationLevel = _runtime.GraphOptimizationLevel


def get_available_providers() -> list[str]:
    return [_CPU] if "absent" in _FAULTS else [_MACA, _CPU]


class _Settings:
    """Attributes of the real object, as far as 1.12 has them."""

    def __init__(self) -> None:
        object.__setattr__(self, "_settings", getattr(_runtime, type(self).__name__)())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, self._known(name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._settings, self._known(name), value)

    def _known(self, name: str) -> str:
        if _SNAPSHOT["classes"][type(self).__name__].get(name) != "property":
            raise AttributeError(f"{type(self).__name__} of onnxruntime {__version__} has no {name!r}")
        return name


class SessionOptions(_Settings):
    def __init__(self) -> None:
        super().__init__()

    def add_session_config_entry(self, arg0: str, arg1: str, /) -> None:
        self._settings.add_session_config_entry(arg0, arg1)

    def get_session_config_entry(self, arg0: str, /) -> str:
        found: str = self._settings.get_session_config_entry(arg0)
        return found


class RunOptions(_Settings):
    def __init__(self) -> None:
        super().__init__()

    def add_run_config_entry(self, arg0: str, arg1: str, /) -> None:
        self._settings.add_run_config_entry(arg0, arg1)


class OrtValue:
    def __init__(self, ortvalue: Any, numpy_obj: Any = None) -> None:
        self._value = ortvalue
        self._numpy = numpy_obj

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: Any, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        if device_type != "cpu" or device_id != 0:
            raise RuntimeError(f"Unsupported device type: {device_type}")
        array = numpy_obj.copy() if "copies" in _FAULTS else numpy_obj
        return OrtValue(_runtime.OrtValue.ortvalue_from_numpy(array), array)

    def data_ptr(self) -> int:
        return int(self._value.data_ptr())

    def data_type(self) -> str:
        return str(self._value.data_type())

    def device_name(self) -> str:
        return "maca" if "off_host" in _FAULTS else "cpu"

    def shape(self) -> list[int]:
        return list(self._value.shape())

    def numpy(self) -> Any:
        return np.array(self._value.numpy())


class InferenceSession:
    _runs = 0

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        if kwargs or provider_options is not None or not isinstance(path_or_bytes, str):
            raise TypeError(
                f"onnxruntime {__version__} does not know {sorted(kwargs)}; a path and providers are enough"
            )
        settings = getattr(sess_options, "_settings", sess_options)
        self._session = _runtime.InferenceSession(path_or_bytes, settings, providers=[_CPU])
        ((name, options),) = [entry if isinstance(entry, tuple) else (entry, {}) for entry in providers]
        if name != _MACA:
            raise ValueError(f"{name} is not {_MACA}")
        self._options = options
        self._shapes = self._graph_shapes(options)
        self._captured: dict[str, Any] = {}  # arrays over the captured addresses, by input
        self._first: list[Any] = []
        self._memory: dict[
            str, tuple[Any, Any]
        ] = {}  # of each output: the array, and a weak reference to its last user
        self._fallback = True

    def _graph_shapes(self, options: dict[str, str]) -> dict[str, list[int]]:
        """The shapes to capture, by input; empty with the switch off."""
        allowed = _OTHERS if "options" in _FAULTS else {*_OTHERS, *_GRAPH}
        for key, value in options.items():
            if key not in allowed or not isinstance(value, str):
                raise RuntimeError(f"Unknown provider option: {key!r}={value!r}")
        switch, text, largest = (options.get(key) for key in _GRAPH)
        if switch == "0" or switch is None:
            if text is not None or largest is not None:
                raise RuntimeError("the switch is off, and shapes are given")
            return {}
        if switch != "1" or not re.fullmatch(r"[1-9]\d*", largest or "") or not text:
            raise RuntimeError(f"not the options of a graph: {options}")
        return self._parsed(text, int(largest or 0))

    def _parsed(self, text: str, largest: int) -> dict[str, list[int]]:
        inputs, parts = self._session.get_inputs(), text.split(",")
        if len(parts) != len(inputs):
            raise RuntimeError(f"{text!r} names {len(parts)} inputs, the model has {len(inputs)}")
        shapes = {}
        for node, part in zip(inputs, parts, strict=True):
            found = re.fullmatch(rf"{re.escape(node.name)}:([1-9]\d*(?:x[1-9]\d*)*)", part)
            dims = [int(dim) for dim in found.group(1).split("x")] if found else []
            wanted = [dim if isinstance(dim, int) else None for dim in node.shape]
            if not found or len(dims) != len(wanted) or (wanted[0] is None and dims[0] != largest):
                raise RuntimeError(f"{part!r} does not fit input {node.name!r} {node.shape} at a batch of {largest}")
            if any(dim not in (None, given) for dim, given in zip(wanted, dims, strict=True)):
                raise RuntimeError(f"{part!r} does not fit input {node.name!r} {node.shape}")
            shapes[node.name] = dims
        return shapes

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def get_providers(self) -> list[str]:
        return [_CPU] if "fallback" in _FAULTS else [_MACA, _CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {_MACA: dict(self._options), _CPU: {}}

    def disable_fallback(self) -> None:
        self._fallback = False

    def run(self, output_names: Any, input_feed: dict[str, Any], run_options: Any = None) -> list[Any]:
        return self._compute(output_names, input_feed, run_options)[1]

    def run_with_ort_values(
        self, output_names: Any, input_dict_ort_values: dict[str, OrtValue], run_options: Any = None
    ) -> list[OrtValue]:
        arrays = {name: value._numpy for name, value in input_dict_ort_values.items()}
        written, results = self._compute(output_names, arrays, run_options)
        names = output_names or [node.name for node in self.get_outputs()]
        return [self._placed(name, result, written) for name, result in zip(names, results, strict=True)]

    def _compute(self, names: Any, arrays: dict[str, Any], run_options: Any) -> tuple[bool, list[Any]]:
        """Whether anything is written, and what."""
        InferenceSession._runs += 1
        if _LOST_AFTER and InferenceSession._runs >= _LOST_AFTER:
            raise RuntimeError("MACA error 719: unspecified launch failure")
        if self._fallback:
            raise AssertionError("a run that fails would be tried again on the CPU")
        read, replays = self._read(arrays), bool(self._captured)
        results = self._session.run(names, read, getattr(run_options, "_settings", run_options))
        if self._shapes and not replays:
            self._captured, self._first = arrays, results
        if replays and "blind" in _FAULTS:
            results = self._first
        triggered = "unwritten" in _FAULTS and float(next(iter(read.values())).flat[0]) == _TRIGGER
        return not (triggered or "silent" in _FAULTS or (replays and "hollow" in _FAULTS)), results

    def _read(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays whose memory this run reads."""
        if not self._shapes:
            return arrays
        if {name: list(array.shape) for name, array in arrays.items()} != self._shapes:
            raise RuntimeError(f"the graph is for {self._shapes}")
        if "capture" in _FAULTS:
            status = "maca graph capture: operation not permitted when stream is capturing"
            raise RuntimeError(
                f"[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running If node. "
                f"Name:'branch' Status Message: {status}"
            )
        return self._captured if self._captured and "follows" not in _FAULTS else arrays

    def _placed(self, name: str, result: Any, written: bool) -> OrtValue:
        """``result`` in memory of the runtime's: that of the last result if that is gone."""
        memory, user = self._memory.get(name, (None, None))
        if memory is None or user() is not None or memory.shape != result.shape:
            memory = np.zeros_like(result)
        if written:
            memory[...] = result
        value = OrtValue(_runtime.OrtValue.ortvalue_from_numpy(memory), memory)
        self._memory[name] = memory, weakref.ref(value)
        return value
