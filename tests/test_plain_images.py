"""Plain images, decoded without Pillow: the same pixels, and what is not plain is left to it."""

import io
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps
from PIL.PngImagePlugin import PngInfo

from tico_ssl.data.codecs import decoder_of
from tico_ssl.data.decoding import BadImage, decode
from tico_ssl.data.plain import Plain, plain


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photograph(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth, as JPEGs are made for."""
    return Image.fromarray(noise(6, 8)).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def saved(picture: Image.Image, kind: str, orientation: int | None = None, **options) -> bytes:
    stream = io.BytesIO()
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    picture.save(stream, kind, **options)
    return stream.getvalue()


def jpeg(picture: Image.Image, orientation: int = 1, **options) -> bytes:
    return saved(picture, "JPEG", orientation, **options)


def by_pillow(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as picture:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(picture).convert("RGB"))).permute(2, 0, 1)


@pytest.fixture
def quickly_decoded(monkeypatch) -> list[int]:
    """Sizes of the files that Pillow did not have to decode."""
    found, by_library = [], Plain.decode

    def noting(self: Plain, data: bytes) -> torch.Tensor | None:
        if (pixels := by_library(self, data)) is not None:
            found.append(len(data))
        return pixels

    if any(decoder_of(kind) is None for kind in ("jpeg", "webp")):
        pytest.skip("Pillow decodes all")
    monkeypatch.setattr(Plain, "decode", noting)
    return found


def text_of_png(key: str, text: str) -> PngInfo:
    info = PngInfo()
    info.add_text(key, text)
    return info


def with_note(data: bytes, note: bytes) -> bytes:
    """A JPEG with a note before everything else."""
    return data[:2] + b"\xff\xe1" + (2 + len(note)).to_bytes(2, "big") + note + data[2:]


def with_xmp(data: bytes, text: str) -> bytes:
    return with_note(data, b"http://ns.adobe.com/xap/1.0/\0" + text.encode())


def with_orientation(data: bytes, order: str, kind: int, value: bytes, count: int = 1) -> bytes:
    """A JPEG with EXIF of a single entry, the orientation, of any type."""
    entry = struct.pack(order + "HHI", 274, kind, count) + value.ljust(4, b"\0") + bytes(4)
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, 1)
    return with_note(data, b"Exif\0\0" + head + entry)


NOISE = Image.fromarray(noise(43, 61))
SMOOTH = photograph(61, 43)
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
PLAIN = {
    "jpeg": jpeg(NOISE),
    "jpeg 4:2:0": jpeg(NOISE, subsampling="4:2:0"),
    "jpeg 4:4:4": jpeg(NOISE, subsampling="4:4:4", quality=98),
    "progressive jpeg": jpeg(NOISE, progressive=True),
    "grey jpeg": jpeg(NOISE.convert("L")),
    **{f"jpeg, orientation {number}": jpeg(NOISE, number) for number in range(2, 9)},
    "jpeg with XMP": with_xmp(saved(NOISE, "JPEG"), 'tiff:Orientation="1"'),
    "lossy webp": saved(SMOOTH, "WEBP", quality=80),
    "poor webp": saved(NOISE, "WEBP", quality=5),
    "lossless webp": saved(NOISE, "WEBP", lossless=True),
    "extended webp": saved(SMOOTH, "WEBP", icc_profile=PROFILE),
    "extended lossless webp": saved(SMOOTH, "WEBP", icc_profile=PROFILE, lossless=True),
    "jpeg of big-endian EXIF": with_orientation(saved(NOISE, "JPEG"), ">", 3, b"\0\3"),
    "webp of one pixel": saved(SMOOTH.crop((0, 0, 1, 1)), "WEBP"),
}
CLEAR = NOISE.copy()
CLEAR.putalpha(Image.fromarray(noise(43, 61)[..., 0]))
FRAMES = {"save_all": True, "append_images": [SMOOTH]}
NOT_PLAIN = {
    "CMYK jpeg": jpeg(NOISE.convert("CMYK")),
    "jpeg rotated by XMP": with_xmp(saved(NOISE, "JPEG"), 'tiff:Orientation="6"'),
    "rotated jpeg whose EXIF is not first": with_xmp(jpeg(NOISE, 6), "text"),
    "jpeg rotated by a long number": with_orientation(saved(NOISE, "JPEG"), ">", 4, b"\0\0\0\6"),
    "jpeg whose orientation is a byte": with_orientation(saved(NOISE, "JPEG"), "<", 1, b"\6"),
    "jpeg whose orientation has no value": with_orientation(saved(NOISE, "JPEG"), "<", 3, b"\6", count=0),
    "png": saved(NOISE, "PNG"),
    "grey png": saved(NOISE.convert("L"), "PNG"),
    "png of one bit": saved(NOISE.convert("1"), "PNG"),
    "palette png": saved(NOISE.convert("P"), "PNG"),
    "transparent png": saved(CLEAR, "PNG"),
    "png with a transparent colour": saved(NOISE, "PNG", transparency=NOISE.getpixel((5, 5))),
    "rotated png": saved(NOISE, "PNG", 6),
    "png rotated by XMP": saved(NOISE, "PNG", pnginfo=text_of_png("XML:com.adobe.xmp", 'tiff:Orientation="6"')),
    "animated png": saved(NOISE, "PNG", **FRAMES),
    "transparent webp": saved(CLEAR, "WEBP"),
    "transparent lossless webp": saved(CLEAR, "WEBP", lossless=True),
    "rotated webp": saved(NOISE, "WEBP", 6),
    "animated webp": saved(NOISE, "WEBP", **FRAMES),
    "gif": saved(NOISE, "GIF"),
    "bmp": saved(NOISE, "BMP"),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_images_are_pillows_to_the_bit(quickly_decoded, kind):
    data = PLAIN[kind]
    found = decode(data)
    assert quickly_decoded == [len(data)]
    assert found.dtype == torch.uint8
    assert torch.equal(found, by_pillow(data))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["JPEG", "WEBP"]), st.booleans(), st.integers(0, 100))
def test_plain_images_of_any_size_are_pillows_to_the_bit(height, width, kind, lossless, quality):
    picture = NOISE.resize((width, height), Image.Resampling.BILINEAR)
    data = saved(picture, kind, quality=quality, **({"lossless": lossless} if kind == "WEBP" else {}))
    header = plain(data)
    assert header == (kind.lower(), height, width)
    assert torch.equal(header.decode(data), by_pillow(data))


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_other_images_are_left_to_pillow(quickly_decoded, kind):
    data = NOT_PLAIN[kind]
    assert decode(data).shape == ((3, 61, 43) if "rotated" in kind else (3, 43, 61))
    assert quickly_decoded == []
    if not re.search("transparent|animated webp", kind):  # which lies on white here; Pillow begins with another frame
        assert torch.equal(decode(data), by_pillow(data))


def test_grey_values_are_left_to_pillow(quickly_decoded):
    assert all(decode(data, channels=1).shape[0] == 1 for data in PLAIN.values())
    assert quickly_decoded == []


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_image_that_breaks_off_is_whole_or_an_error(kind):
    data, whole = PLAIN[kind], decode(PLAIN[kind])
    for end in range(0, len(data), max(1, len(data) // 100)):
        try:
            assert torch.equal(decode(data[:end], name="x"), whole)
        except BadImage as error:
            assert error.name == "x"


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_jpeg_that_breaks_off_is_described_by_pillow(quickly_decoded, options):
    data = jpeg(photograph(400, 300), quality=98, **options)
    for shorter in (None, 100):
        with pytest.raises(BadImage) as caught:
            decode(data[: len(data) // 2], name="x.jpg", shorter=shorter)
        assert caught.value.reason.startswith("image file is truncated")
        assert "/" not in caught.value.reason
    assert quickly_decoded == []


@pytest.mark.parametrize("kind", PLAIN)
def test_pillow_alone_will_do(monkeypatch, kind):
    monkeypatch.setattr(Plain, "decode", lambda self, data: None)
    assert torch.equal(decode(PLAIN[kind]), by_pillow(PLAIN[kind]))
    with pytest.raises(BadImage, match="truncated"):
        decode(jpeg(photograph(400, 300), quality=98)[:9000])
