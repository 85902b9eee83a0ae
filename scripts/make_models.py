"""Writes example ONNX models with random weights; the same bytes every time.

    scripts/make_models DIR [NAME...]

Needs the package onnx, which the extra ``dev`` brings. ``[N]`` is the batch axis. All values are float32.

=============  ================================================================  =====================================
name           inputs                                                            outputs
=============  ================================================================  =====================================
ranking        numerical [N,48], categorical [N,39], keyword_vec [N,768]         score_0, score_1, score_2 [N,1], 0..1
ranking_wide   the same, with one Concat of 41 inputs
overhead       the same inputs                                                   mean_* [N,1]: the mean of each row
tiny_cnn       image [N,3,224,224]; 0.09 M parameters, 128 channels at 112x112   logits [N,10]
mid_cnn        image [N,3,224,224]; 4.5 M parameters                             logits [N,1000]
resnet18       image [N,3,224,224]; 11.7 M parameters                            logits [N,1000]
frames         frame [N,150000]                                                  head [N,64]: the first 64 values
coupled        x [N,16]                                                          y [N,8]
=============  ================================================================  =====================================

``coupled`` quantises its input by the largest value of the whole batch, so that a row's answer depends on the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8  # read by ONNX Runtime 1.12, the oldest one of interest
SEED = 20_240

NUMERICAL, CATEGORICAL, KEYWORDS = 48, 39, 768
VOCABULARY, EMBEDDING = 1_800, 16
CROSS_LAYERS, EXPERTS, TOWERS = 6, 8, 3
HIDDEN, EXPERT_WIDTH, TOWER_WIDTH = 128, 64, 64
CONCAT_INPUTS_MAX = 32  # what a CUDA Concat can take during graph capture

Array = npt.NDArray[Any]


class Graph:
    """Nodes and weights of a model as they are written down; every method returns the name of what it adds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        # RandomState's stream is frozen by numpy's compatibility policy; that of default_rng is not.
        self._random = np.random.RandomState(SEED)

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """One node."""
        names = list(outputs) or [f"{kind.lower()}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"{kind}_{len(self.nodes)}", **attributes))
        return names[0]

    def constant(self, value: Array) -> str:
        """A weight with that value."""
        name = f"w_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def random(self, *shape: int, fan_in: int) -> str:
        """A weight that keeps the variance of ``fan_in`` inputs after a Relu."""
        values = self._random.standard_normal(shape) * math.sqrt(2 / fan_in)
        return self.constant(values.astype(np.float32))

    def dense(self, x: str, width_in: int, width_out: int, activation: str = "") -> str:
        """``activation(x @ w + b)``."""
        product = self.op("MatMul", x, self.random(width_in, width_out, fan_in=width_in))
        total = self.op("Add", product, self.constant(np.zeros(width_out, np.float32)))
        return self.op(activation, total) if activation else total

    def conv(self, x: str, channels: tuple[int, int], kernel: int, stride: int = 1, *, groups: int = 1) -> str:
        """A convolution with bias that keeps the size, or halves it at stride 2."""
        given, made = channels
        weight = self.random(made, given // groups, kernel, kernel, fan_in=given // groups * kernel * kernel)
        bias = self.constant(np.zeros(made, np.float32))
        pads = [(kernel - 1) // 2] * 4
        return self.op(
            "Conv", x, weight, bias, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads, group=groups
        )

    def classifier(self, x: str, channels: int, classes: int) -> None:
        """Mean over the image, then one dense layer named ``logits``."""
        pooled = self.op("Flatten", self.op("GlobalAveragePool", x), axis=1)
        self.rename(self.dense(pooled, channels, classes), "logits")

    def rename(self, old: str, new: str) -> None:
        """Give the output of the last node its public name."""
        assert list(self.nodes[-1].output) == [old]
        self.nodes[-1].output[0] = new

    def model(self, inputs: dict[str, list[int]], outputs: dict[str, list[int]]) -> onnx.ModelProto:
        """The checked model; dims are those of one row."""

        def values(rows: dict[str, list[int]]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *dims]) for name, dims in rows.items()]

        graph = helper.make_graph(self.nodes, self.name, values(inputs), values(outputs), self.weights)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="mxpool"
        )
        onnx.checker.check_model(model)
        return model


RANKING_INPUTS = {"numerical": [NUMERICAL], "categorical": [CATEGORICAL], "keyword_vec": [KEYWORDS]}
IMAGE = {"image": [3, 224, 224]}


def _ranking_features(graph: Graph, concat_max: int) -> str:
    """All features of a row side by side: 39 embeddings, 48 numbers, 768 keyword values."""
    last = graph.constant(np.array(VOCABULARY - 1, np.int64))
    first = graph.constant(np.array(0, np.int64))
    # Clipped, so that no value of a request can fail the batch that it shares with others.
    ids = graph.op("Clip", graph.op("Cast", "categorical", to=TensorProto.INT64), first, last)
    parts = []
    for column in range(CATEGORICAL):
        id_ = graph.op("Gather", ids, graph.constant(np.array(column, np.int64)), axis=1)
        parts.append(graph.op("Gather", graph.random(VOCABULARY, EMBEDDING, fan_in=EMBEDDING), id_, axis=0))
    parts += ["numerical", "keyword_vec"]
    while len(parts) > concat_max:
        parts = [graph.op("Concat", *parts[:concat_max], axis=1), *parts[concat_max:]]
    return graph.op("Concat", *parts, axis=1)


def _cross(graph: Graph, x0: str, width: int) -> str:
    """Cross layers: ``x = x0 * (x @ w) + b + x``."""
    x = x0
    for _ in range(CROSS_LAYERS):
        weight = graph.op("MatMul", x, graph.random(width, 1, fan_in=2 * width))
        crossed = graph.op("Add", graph.op("Mul", x0, weight), graph.constant(np.zeros(width, np.float32)))
        x = graph.op("Add", crossed, x)
    return x


def _ranking(name: str, concat_max: int) -> onnx.ModelProto:
    graph = Graph(name)
    width = CATEGORICAL * EMBEDDING + NUMERICAL + KEYWORDS
    x = _cross(graph, _ranking_features(graph, concat_max), width)
    axis = graph.constant(np.array([1], np.int64))
    experts = []
    for _ in range(EXPERTS):
        hidden = graph.dense(x, width, HIDDEN, "Relu")
        experts.append(graph.op("Unsqueeze", graph.dense(hidden, HIDDEN, EXPERT_WIDTH, "Relu"), axis))
    stacked = graph.op("Concat", *experts, axis=1)
    for tower in range(TOWERS):
        gate = graph.op("Softmax", graph.dense(x, width, EXPERTS), axis=1)
        mixed = graph.op("MatMul", graph.op("Unsqueeze", gate, axis), stacked)
        hidden = graph.dense(graph.op("Squeeze", mixed, axis), EXPERT_WIDTH, TOWER_WIDTH, "Relu")
        graph.rename(graph.dense(hidden, TOWER_WIDTH, 1, "Sigmoid"), f"score_{tower}")
    return graph.model(RANKING_INPUTS, {f"score_{tower}": [1] for tower in range(TOWERS)})


def ranking() -> onnx.ModelProto:
    """A ranking model of about 190 nodes and 2.7 M parameters; no Concat has more than 32 inputs."""
    return _ranking("ranking", CONCAT_INPUTS_MAX)


def ranking_wide() -> onnx.ModelProto:
    """The same with one Concat of 41 inputs, which the CUDA provider refuses to capture."""
    return _ranking("ranking_wide", CATEGORICAL + 2)


def overhead() -> onnx.ModelProto:
    """The inputs of ranking and no work: what is left is everything around a model."""
    graph = Graph("overhead")
    for name in RANKING_INPUTS:
        graph.op("ReduceMean", name, outputs=[f"mean_{name}"], axes=[1], keepdims=1)
    return graph.model(RANKING_INPUTS, {f"mean_{name}": [1] for name in RANKING_INPUTS})


def tiny_cnn() -> onnx.ModelProto:
    """Few parameters and large activations."""
    graph = Graph("tiny_cnn")
    x = graph.op("Relu", graph.conv("image", (3, 128), 3, 2))
    for channels, stride in (((128, 128), 1), ((128, 256), 2), ((256, 128), 2)):
        x = graph.op("Relu", graph.conv(x, (channels[0], channels[0]), 3, stride, groups=channels[0]))
        x = graph.op("Relu", graph.conv(x, channels, 1))
    graph.classifier(x, 128, 10)
    return graph.model(IMAGE, {"logits": [10]})


def mid_cnn() -> onnx.ModelProto:
    """Plain convolutions."""
    graph = Graph("mid_cnn")
    x = "image"
    for channels in ((3, 64), (64, 128), (128, 256), (256, 512)):
        x = graph.op("Relu", graph.conv(x, channels, 3, 2))
    x = graph.op("Relu", graph.conv(x, (512, 512), 3, 2))
    graph.classifier(x, 512, 1000)
    return graph.model(IMAGE, {"logits": [1000]})


def resnet18() -> onnx.ModelProto:
    """ResNet-18 (He et al. 2015) with batch normalisation folded into the convolutions."""
    graph = Graph("resnet18")
    x = graph.op("Relu", graph.conv("image", (3, 64), 7, 2))
    x = graph.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    given = 64
    for channels in (64, 128, 256, 512):
        for stride in (1 if channels == 64 else 2, 1):
            inner = graph.op("Relu", graph.conv(x, (given, channels), 3, stride))
            inner = graph.conv(inner, (channels, channels), 3)
            short = x if given == channels else graph.conv(x, (given, channels), 1, stride)
            x = graph.op("Relu", graph.op("Add", inner, short))
            given = channels
    graph.classifier(x, 512, 1000)
    return graph.model(IMAGE, {"logits": [1000]})


def frames() -> onnx.ModelProto:
    """600 KB a row in, 256 bytes out: measures the way of large frames."""
    graph = Graph("frames")
    start, end, axis = (graph.constant(np.array([value], np.int64)) for value in (0, 64, 1))
    graph.op("Slice", "frame", start, end, axis, outputs=["head"])
    return graph.model({"frame": [150_000]}, {"head": [64]})


def coupled() -> onnx.ModelProto:
    """A dynamically quantised MatMul."""
    graph = Graph("coupled")
    weight = graph.constant(np.random.RandomState(SEED).randint(-127, 128, (16, 8)).astype(np.int8))
    scale = graph.constant(np.array(0.01, np.float32))
    quantised = ["x_quantised", "x_scale", "x_zero"]
    graph.op("DynamicQuantizeLinear", "x", outputs=quantised)
    product = graph.op("MatMulInteger", quantised[0], weight, quantised[2])
    both = graph.op("Mul", quantised[1], scale)
    graph.op("Mul", graph.op("Cast", product, to=TensorProto.FLOAT), both, outputs=["y"])
    return graph.model({"x": [16]}, {"y": [8]})


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    make.__name__: make for make in (ranking, ranking_wide, overhead, tiny_cnn, mid_cnn, resnet18, frames, coupled)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the models that are asked for, all of them by default."""
    parser = argparse.ArgumentParser(prog="make_models", description="Write example ONNX models with random weights.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where NAME.onnx is written; made if it is missing")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {' '.join(MODELS)}")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in MODELS]
    if unknown:
        parser.error(f"no model named {', '.join(unknown)} (known: {', '.join(MODELS)})")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or MODELS:
        data = MODELS[name]().SerializeToString(deterministic=True)
        (arguments.folder / f"{name}.onnx").write_bytes(data)


if __name__ == "__main__":
    main()
