"""DICOM files: how many frames one has, and a frame's values in the units of the modality, read with pydicom."""

import math
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from tico_ssl.data.names import DICOM_SUFFIXES
from tico_ssl.runtime.extras import install_command

MARK = slice(128, 132)  # where DICM is
DEFLATED = b"1.2.840.10008.1.2.1.99"  # a transfer syntax
MOST_FRAMES = 100_000
Allow = Callable[[int, int], None]


def is_dicom(name: str) -> bool:
    """By the suffix of a file."""
    return name.lower().endswith(DICOM_SUFFIXES)


def _library() -> Any:
    try:
        import pydicom
    except ImportError as error:
        raise ValueError(f"DICOM files need pydicom: {install_command('dicom')}") from error
    return pydicom


def _require_plain(file: BinaryIO) -> None:
    """Refuse files that are compressed as a whole: they may inflate to any size, header and all."""
    file.seek(0)
    if DEFLATED in file.read(4096):
        raise ValueError("a deflated DICOM file: convert it to another transfer syntax")
    file.seek(0)


def size_of(file: BinaryIO) -> tuple[int, int, int]:
    """Height and width of the frames of a file, and their number."""
    _require_plain(file)
    header = _library().dcmread(file, stop_before_pixels=True, specific_tags=["Rows", "Columns", "NumberOfFrames"])
    frames = int(header.get("NumberOfFrames") or 1)
    if not 1 <= frames <= MOST_FRAMES:
        raise ValueError(f"{frames} frames")
    return int(header.Rows), int(header.Columns), frames


def read_dicom(file: BinaryIO, number: int, windowed: bool, allow: Allow) -> np.ndarray:
    """A frame as (height, width, channels): rescaled by slope and intercept, MONOCHROME1 inverted so that more is
    brighter. If `windowed`, grey values within the file's window become bytes."""
    pydicom = _library()
    _require_plain(file)
    header = pydicom.dcmread(file, stop_before_pixels=True)
    allow(int(header.Columns), int(header.Rows))
    file.seek(0)
    array: np.ndarray = pydicom.pixels.pixel_array(file, index=number)
    if array.ndim == 3:  # colours have no window
        return array
    kind = header.get("PhotometricInterpretation")
    if kind == "PALETTE COLOR":
        coloured: np.ndarray = pydicom.pixels.apply_color_lut(array, header)
        return (coloured >> 8).astype(np.uint8) if coloured.dtype == np.uint16 else coloured
    values, inverted = _rescaled(array, header), kind == "MONOCHROME1"
    if windowed and header.get("WindowCenter") is not None and header.get("WindowWidth") is not None:
        levels = _windowed(values.astype(np.float64), header)
        bytes: np.ndarray = np.rint(255 * (1 - levels if inverted else levels)).astype(np.uint8)
        return bytes[..., None]
    if inverted:
        values = _rescaled(_opposite(array, header), header)
    return values[..., None]


def _opposite(array: np.ndarray, header: Any) -> np.ndarray:
    """Stored values mirrored in the range that they can have."""
    bits, signed = int(header.BitsStored), int(header.PixelRepresentation)
    return (-1 if signed else (1 << bits) - 1) - array.astype(np.int64)


def _rescaled(array: np.ndarray, header: Any) -> np.ndarray:
    """In the units of the modality (CT: Hounsfield units); whole numbers stay whole."""
    slope, intercept = float(header.get("RescaleSlope") or 1), float(header.get("RescaleIntercept") or 0)
    if not math.isfinite(slope) or not math.isfinite(intercept):
        raise ValueError(f"rescale slope {slope} and intercept {intercept}")
    whole = array.dtype.kind in "ui" and slope.is_integer() and intercept.is_integer()
    if whole and (slope, intercept) == (1, 0) and array.dtype.itemsize <= 4:
        return array
    largest = max(int(array.max(initial=0)), -int(array.min(initial=0))) if whole else 0
    if whole and largest * abs(slope) + abs(intercept) < 2**31:
        return (array.astype(np.int64) * int(slope) + int(intercept)).astype(np.int32)
    return (array.astype(np.float64) * slope + intercept).astype(np.float32)


def _windowed(values: np.ndarray, header: Any) -> np.ndarray:
    """From 0 to 1 by the first window, as PS3.3 C.11.2.1 defines it."""
    centre, width = (float(_first(header.get(name))) for name in ("WindowCenter", "WindowWidth"))
    function = str(header.get("VOILUTFunction") or "LINEAR")
    if not math.isfinite(centre) or not math.isfinite(width) or width <= 0:
        raise ValueError(f"a window of width {width} at {centre}")
    levels: np.ndarray
    if function == "SIGMOID":
        levels = 1 / (1 + np.exp((-4 * (values - centre) / width).clip(-700, 700)))
    elif function == "LINEAR_EXACT":
        levels = (values - centre) / width + 0.5
    else:
        levels = (values - (centre - 0.5)) / max(width - 1, 1e-9) + 0.5
    return levels.clip(0, 1)


def _first(value: Any) -> Any:
    """Of several windows, the first."""
    return value if isinstance(value, str | int | float) or not hasattr(value, "__getitem__") else value[0]
