"""A stand-in for onnxruntime-gpu on a machine without a GPU: the real CPU runtime underneath, CUDA's rules on top.

What it copies of the CUDA provider (../shared facts were measured on a card, see docs/bench):

* bound buffers are device buffers, inputs are read when the batch runs, which is when the stream comes to it;
* ``enable_cuda_graph`` refuses models with control flow; the first run of a ``gpu_graph_id`` captures, every later one
  replays: it reads and writes the captured addresses whatever is bound, and checks nothing;
* a Concat of more than 32 inputs fails the capture, and the run after it succeeds without a graph;
* options that the provider does not know are refused.

``MXPOOL_STANDIN_FAULT``: ``capture:NODE`` (fails at that node), ``capture_at:SIZE``, ``memory_at:SIZE`` (no memory to
capture that size), ``silent`` (captures hold nothing and the run after them is plain), ``empty`` (replays compute
nothing), ``blind`` (replays compute the captured run's answers again), ``run:N`` (the Nth run fails),
``session_memory`` (none to open a session), ``deadly`` (a capture loses the device), ``no_provider``, ``fallback`` (the
session falls back to the CPU).
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def _real() -> Any:
    """The installed onnxruntime, imported under its own name, which this module then takes back."""
    own = sys.modules.pop(__name__)
    here, path = str(Path(__file__).parents[1]), list(sys.path)
    sys.path[:] = [entry for entry in path if str(Path(entry or ".").resolve()) != str(Path(here).resolve())]
    try:
        return importlib.import_module("onnxruntime")
    finally:
        sys.path[:] = path
        sys.modules[__name__] = own


real = _real()
from cuda.bindings import runtime as cuda  # noqa: E402

__version__ = real.__version__
RunOptions, SessionOptions, GraphOptimizationLevel = real.RunOptions, real.SessionOptions, real.GraphOptimizationLevel
CONTROL_FLOW = {"If", "Loop", "Scan"}
CONCAT_INPUTS_MAX = 32
GRAPH_ID, NO_SYNC = "gpu_graph_id", "disable_synchronize_execution_providers"
KNOWN = {"device_id", "user_compute_stream", "enable_cuda_graph", "use_tf32", "gpu_mem_limit", "prefer_nhwc"}
faults = dict(fault.partition(":")[::2] for fault in os.environ.get("MXPOOL_STANDIN_FAULT", "").split(",") if fault)


class Failure(Exception):
    """As the runtime's own errors: of no common base, with the node in its text."""


def get_available_providers() -> list[str]:
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return names[1:] if "no_provider" in faults else names


def _nodes(graph: Any) -> Any:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


class _Binding:
    def __init__(self, session: InferenceSession) -> None:
        self.session = session
        self.inputs: list[tuple[Any, ...]] = []
        self.outputs: list[tuple[Any, ...]] = []
        self._cpu = session.cpu.io_binding()

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        self._check(device_type, device_id, element_type, shape, buffer_ptr)
        self.inputs.append((name, element_type, shape, buffer_ptr))
        self._cpu.bind_input(name, "cpu", 0, element_type, shape, buffer_ptr)

    def bind_output(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        self._check(device_type, device_id, element_type, shape, buffer_ptr)
        self.outputs.append((name, element_type, shape, buffer_ptr))
        self._cpu.bind_output(name, "cpu", 0, element_type, shape, buffer_ptr)

    @staticmethod
    def _check(device_type: str, device_id: int, element_type: Any, shape: Any, address: int) -> None:
        size = int(np.prod(shape)) * np.dtype(element_type).itemsize
        if (device_type, device_id) != ("cuda", 0) or not cuda.machine.lies_in(cuda.machine.device, address, size):
            raise Failure(f"{size} bytes at {address:#x} are not device memory")

    @property
    def size(self) -> int:
        return int(self.inputs[0][2][0])

    def run(self) -> None:
        self.session.cpu.run_with_iobinding(self._cpu)

    def output_bytes(self) -> list[bytes]:
        import ctypes

        return [
            ctypes.string_at(pointer, int(np.prod(shape)) * np.dtype(kind).itemsize)
            for _, kind, shape, pointer in self.outputs
        ]

    def write(self, outputs: list[bytes]) -> None:
        import ctypes

        for (_, _, _, pointer), data in zip(self.outputs, outputs, strict=True):
            ctypes.memmove(pointer, data, len(data))


class InferenceSession:
    """A session of the CUDA provider."""

    living = most_living = 0

    def __del__(self) -> None:
        InferenceSession.living -= 1
        if cuda.LOST_AFTER and cuda.machine.lost:
            os.abort()  # as the real one may

    def __init__(self, path: str, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
        InferenceSession.living += 1
        InferenceSession.most_living = max(InferenceSession.most_living, InferenceSession.living)
        assert enable_fallback == 0
        ((name, given),) = providers
        if name != "CUDAExecutionProvider" or set(given) - KNOWN:
            raise Failure(f"unknown provider or option: {providers}")
        if not all(isinstance(value, str) for value in given.values()):
            raise Failure("provider options are strings")
        if not cuda.machine.device_is_set or cuda.machine.flags != cuda.cudaDeviceScheduleBlockingSync:
            raise Failure("the device was not made ready")
        if "session_memory" in faults:
            raise Failure("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc(&p, size)")
        self.cpu = real.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._providers = ["CPUExecutionProvider"] if "fallback" in faults else [name, "CPUExecutionProvider"]
        self._stream = cuda.find_stream(int(given["user_compute_stream"]))
        self._graphs_on = given["enable_cuda_graph"] == "1"
        self._graphs: dict[str, _Binding] = {}
        self._answers: dict[str, list[bytes]] = {}
        self._broken: set[str] = set()
        self._runs = 0
        self._bad_node = self._look(path) if self._graphs_on else ""

    def _look(self, path: str) -> str:
        """Refuse control flow; the name of a node that cannot be captured, or ""."""
        import onnx

        bad = ""
        for node in _nodes(onnx.load(path, load_external_data=False).graph):
            if node.op_type in CONTROL_FLOW:
                raise Failure(
                    f"This session cannot use the graph capture feature as requested by the user "
                    f"as the model has control flow nodes. Name:'{node.name}'"
                )
            if (node.op_type == "Concat" and len(node.input) > CONCAT_INPUTS_MAX) or node.name == faults.get("capture"):
                bad = bad or node.name or node.op_type
        return bad

    def get_providers(self) -> list[str]:
        return self._providers

    def get_inputs(self) -> Any:
        return self.cpu.get_inputs()

    def get_outputs(self) -> Any:
        return self.cpu.get_outputs()

    def io_binding(self) -> _Binding:
        return _Binding(self)

    def run(self, names: Any, feeds: Any, run_options: Any = None) -> Any:
        assert not self._graphs_on or self._entry(run_options, GRAPH_ID) == "-1"
        cuda.drain(self._stream)
        return self.cpu.run(names, feeds)

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        self._graphs.pop(str(graph_annotation_id), None)

    def run_with_iobinding(self, binding: _Binding, run_options: Any) -> None:
        self._runs += 1
        if str(self._runs) == faults.get("run"):
            raise Failure("Non-zero status code returned while running MatMul node. Name:'MatMul_7'")
        graph_id = self._entry(run_options, GRAPH_ID) or "0"
        if not self._graphs_on or graph_id == "-1" or graph_id in self._broken:
            self._stream.work.append(binding.run)
        elif graph_id in self._graphs:
            self._stream.work.append(lambda: self._replay(graph_id))
        else:
            self._capture(graph_id, binding)
        if self._entry(run_options, NO_SYNC) != "1":
            cuda.drain(self._stream)

    @staticmethod
    def _entry(run_options: Any, key: str) -> str:
        try:
            return str(run_options.get_run_config_entry(key))
        except RuntimeError:
            return ""

    def _capture(self, graph_id: str, binding: _Binding) -> None:
        if "deadly" in faults:
            cuda.machine.lost = True
            raise Failure("CUDA failure 700: an illegal memory access was encountered")
        if str(binding.size) == faults.get("memory_at"):
            self._broken.add(graph_id)
            raise Failure("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc(&p, size)")
        if self._bad_node or str(binding.size) == faults.get("capture_at"):
            self._broken.add(graph_id)
            node = self._bad_node or "Reshape_1"
            raise Failure(
                f"[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running "
                f"Concat node. Name:'{node}' Status Message: CUDA error cudaErrorStreamCaptureUnsupported:operation "
                f"not permitted when stream is capturing"
            )
        cuda.drain(self._stream)
        binding.run()
        self._answers[graph_id] = binding.output_bytes()
        if "silent" in faults:
            self._broken.add(graph_id)
        else:
            self._graphs[graph_id] = binding

    def _replay(self, graph_id: str) -> None:
        if "blind" in faults:
            self._graphs[graph_id].write(self._answers[graph_id])
        elif "empty" not in faults:
            self._graphs[graph_id].run()
