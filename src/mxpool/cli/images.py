"""Images as arrays: decoded, resized, scaled and laid out as a model takes them. Needs the extra ``images``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mxpool.cli.exits import BadSource
from mxpool.tensors import TensorSpec

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class Layout(str, enum.Enum):
    """Where the channels of an image are."""

    nchw = "nchw"
    nhwc = "nhwc"


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads images for the input ``spec``, whose dims are (C, H, W) or (H, W, C).

    A pixel p of 0 to 255 becomes ``(p * scale - mean) / std``, by channel where ``mean`` and ``std`` have one value for
    each, then the input's datatype. ``size`` (width, height) replaces the size in the dims.
    """

    spec: TensorSpec
    layout: Layout = Layout.nchw
    size: tuple[int, int] | None = None
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def read(self, path: Path) -> npt.NDArray[Any]:
        """One image as an array of the input's datatype and layout, without a batch axis.

        The first frame of an animation; turned upright as its EXIF tag says.

        Raises:
            BadSource: if it cannot be decoded, or the input does not take images.
        """
        channels, size = self._geometry()
        pixels = _decode(path, _MODES[channels], size).astype(np.float32).reshape(size[1], size[0], channels)
        values = (pixels * np.float32(self.scale) - _by_channel(self.mean)) / _by_channel(self.std)
        laid_out = values.transpose(2, 0, 1) if self.layout is Layout.nchw else values
        if self.spec.dtype.kind in "ui":  # a plain cast would wrap around
            limits = np.iinfo(self.spec.dtype)
            laid_out = np.clip(np.rint(laid_out), limits.min, limits.max)
        return np.ascontiguousarray(laid_out).astype(self.spec.dtype)

    def _geometry(self) -> tuple[int, tuple[int, int]]:
        """Channels, and (width, height)."""
        dims = self.spec.dims
        if len(dims) != 3:
            raise BadSource(f"input {self.spec.name!r} has dims {list(dims)}: an image needs three")
        channels, height, width = dims if self.layout is Layout.nchw else (dims[2], dims[0], dims[1])
        if channels not in _MODES:
            raise BadSource(
                f"input {self.spec.name!r} has {channels} channels in layout {self.layout.value}: not 1, 3 or 4"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise BadSource(f"--{name} has {len(values)} values, the image {channels} channels")
        return channels, self.size or (width, height)


def _by_channel(values: tuple[float, ...]) -> npt.NDArray[np.float32]:
    return np.asarray(values, np.float32)


def _decode(path: Path, mode: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 - an extra
    except ImportError:
        raise BadSource(f"{path}: images need pillow: pip install 'mxpool[images]'") from None
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert(mode)
            resized = upright if upright.size == size else upright.resize(size, Image.Resampling.BILINEAR)
            return np.asarray(resized)
    except UnidentifiedImageError:
        raise BadSource(f"{path}: not an image that can be decoded") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise BadSource(f"{path}: {error}") from None
