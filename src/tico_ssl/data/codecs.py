"""Decoders of torchcodec, or of torchvision where that is not installed."""

import functools
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["jpeg", "png", "webp"]
Decoder = Callable[[bytes], Tensor]


@functools.cache
def decoder_of(kind: Kind) -> Decoder | None:
    """From bytes to (channels, height, width): JPEG and WebP to RGB, PNG to the values that it has (torchvision needs
    verified ones, see `png`). None: there is no decoder."""
    try:
        return _of_torchcodec(kind)
    except Exception:
        pass
    try:
        return _of_torchvision(kind)
    except ImportError:
        return None


def _of_torchcodec(kind: Kind) -> Decoder:
    from torchcodec.decoders import decode_image  # from 0.16 on

    if kind == "png":
        return lambda data: decode_image(_tensor(data), mode="UNCHANGED", output_dtype="auto")
    return lambda data: decode_image(_tensor(data))


def _of_torchvision(kind: Kind) -> Decoder:
    from torchvision.io import ImageReadMode, decode_jpeg, decode_png, decode_webp

    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities of TorchVision")
    if kind == "jpeg":
        return lambda data: decode_jpeg(_tensor(data), mode=ImageReadMode.RGB, apply_exif_orientation=True)
    if kind == "webp":
        return lambda data: decode_webp(_tensor(data), mode=ImageReadMode.RGB)
    return lambda data: decode_png(_tensor(data), mode=ImageReadMode.UNCHANGED)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
