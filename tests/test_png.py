"""PNG files of whole bytes per value: the values that they have, and damage that ends no process."""

import contextlib
import io
import itertools
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tico_ssl.data import png
from tico_ssl.data.decoding import BadImage, Reading

COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # types by number of channels


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def filtered(rows: np.ndarray, size: int, chosen: itertools.cycle) -> bytes:
    """Rows of bytes with the filters of the specification, written down byte by byte; `size` bytes are a pixel."""
    out, above = b"", [0] * rows.shape[1]
    for row in rows.astype(int).tolist():
        kind, left, corner = next(chosen), [0] * size + row, [0] * size + above
        out += bytes([kind])
        for at, value in enumerate(row):
            a, b, c = left[at], above[at], corner[at]
            paeth = min((a, b, c), key=lambda near: abs(a + b - c - near))  # of equal ones the first
            out += bytes([(value - (0, a, b, (a + b) // 2, paeth)[kind]) % 256])
        above = row
    return out


def encoded(array: np.ndarray, interlaced: bool = False, filters=(0, 1, 2, 3, 4), parts: int = 1) -> bytes:
    """An array (height, width, channels), uint8 or uint16, as a PNG."""
    height, width, channels = array.shape
    size = channels * array.itemsize
    raw = array.astype(array.dtype.newbyteorder(">")).view(np.uint8).reshape(height, width, size)
    chosen, stream = itertools.cycle(filters), b""
    passes = png.ADAM7 if interlaced else ((0, 0, 1, 1),)
    for left, top, across, down in passes:
        piece = raw[top::down, left::across]
        if piece.size:
            stream += filtered(piece.reshape(len(piece), -1), size, chosen)
    header = struct.pack(">IIBBBBB", width, height, 8 * array.itemsize, COLOURS[channels], 0, 0, interlaced)
    content = zlib.compress(stream)
    cuts = np.linspace(0, len(content), parts + 1).astype(int)
    pixels = b"".join(chunk(b"IDAT", content[a:b]) for a, b in itertools.pairwise(cuts))
    return png.SIGNATURE + chunk(b"IHDR", header) + chunk(b"tEXt", b"Title\0a") + pixels + chunk(b"IEND", b"")


def noise(height: int, width: int, channels: int, deep: bool = True) -> np.ndarray:
    kind = np.uint16 if deep else np.uint8
    return np.random.default_rng(0).integers(0, np.iinfo(kind).max + 1, (height, width, channels), dtype=kind)


@settings(max_examples=150, deadline=None)
@given(
    *[st.integers(1, 19)] * 2,
    st.integers(1, 4),
    *[st.booleans()] * 2,
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_values_are_those_of_the_file(height, width, channels, deep, interlaced, filters, parts):
    array = noise(height, width, channels, deep)
    found = png.decode(encoded(array, interlaced, filters, parts))
    assert np.array_equal(found.permute(1, 2, 0).numpy(), array)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_transparent_colour_is_opacity(channels):
    array = noise(9, 8, channels)
    array[4, 5] = array[0, 0]
    data = encoded(array)
    colour = chunk(b"tRNS", array[0, 0].astype(">u2").tobytes())
    data = data[: data.index(b"IDAT") - 4] + colour + data[data.index(b"IDAT") - 4 :]
    found = png.decode(data).permute(1, 2, 0).numpy()
    assert np.array_equal(found[..., :-1], array)
    assert np.argwhere(found[..., -1] == 0).tolist() == [[0, 0], [4, 5]] and found[..., -1].max() == 65535
    if channels == 3:  # as with eight bits
        on_white = Reading(3).decode(data).permute(1, 2, 0).numpy()
        assert (on_white[4, 5] == 65535).all() and np.array_equal(on_white[1:4], array[1:4])


def test_the_encoder_of_these_tests_is_right():
    for interlaced in (False, True):
        array = noise(11, 13, 3, deep=False)
        with Image.open(io.BytesIO(encoded(array, interlaced))) as image:
            assert np.array_equal(np.array(image), array)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_no_flipped_bit_ends_the_process_or_changes_the_pixels_in_silence(deep, interlaced):
    """A bit that is flipped is an error, or is none that pixels depend on. Deep images are tried in every bit."""
    array = noise(5, 4, 3, deep)
    data, reading = encoded(array, interlaced), Reading(3)
    whole, changed = reading.decode(data), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own, of files that are left to it
        for bit in range(8 * len(data)):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                pixels = reading.decode(bytes(damaged))
            except BadImage:
                continue
            if pixels.shape != whole.shape or not torch.equal(pixels, whole):
                changed.append(bit // 8)
    assert not changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "damaged: "),  # the checksum of the stream
        (lambda content: content[: len(content) // 2], "truncated"),
        (lambda content: zlib.compress(zlib.decompress(content)[:-9]), "truncated"),
        (lambda content: zlib.compress(b"\5" + zlib.decompress(content)[1:]), "an unknown filter"),
        (lambda content: b"not compressed", "damaged: "),
        (lambda content: b"", "truncated"),
    ],
)
def test_what_is_wrong_is_said(change, reason):
    data = encoded(noise(9, 9, 3))
    at = data.index(b"IDAT")
    size = int.from_bytes(data[at - 4 : at], "big")
    changed = data[: at - 4] + chunk(b"IDAT", change(data[at + 4 : at + 4 + size])) + chunk(b"IEND", b"")
    with pytest.raises(BadImage) as caught:
        Reading(3).decode(changed, "x.png")
    assert reason in caught.value.reason


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=60), st.sampled_from([8, 16]), st.sampled_from([0, 2, 4, 6, 3, 9]))
def test_any_bytes_in_place_of_chunks_end_no_process(first, second, bits, colours):
    header = struct.pack(">IIBBBBB", 3, 3, bits, colours, 0, 0, 0)
    for body in (first + second, chunk(b"IDAT", first) + second, chunk(b"tRNS", first) + chunk(b"IDAT", second)):
        with contextlib.suppress(BadImage):
            Reading(3).decode(png.SIGNATURE + chunk(b"IHDR", header) + body)
