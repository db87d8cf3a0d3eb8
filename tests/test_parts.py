"""Files with several images: frames of DICOM, pages of TIFF, tiles of what is too large; and such files from anyone."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl.config.sections import DataConfig
from tico_ssl.data import decoding, parts
from tico_ssl.data.decoding import BadImage, Reading, decode
from tico_ssl.data.sources import open_source
from tico_ssl.data.stored import open_stored
from tico_ssl.runtime.extras import install_command


def opened(place, channels: int = 1, **options):
    return open_source(DataConfig(source=str(place), **options), "train", channels)


def names(source) -> list[str]:
    return [source.names(i) for i in range(len(source))]


def deep(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4096, shape, dtype=np.uint16)


def levels(values: np.ndarray, high: int) -> np.ndarray:
    """Bytes of the range from 0."""
    return np.rint(values.astype(np.float64) * 255 / high)


# ------------------------------------------------------------------------------------------------ DICOM


def dicom(path, array: np.ndarray, **tags):
    """A file of one frame or several, 12 bits of 16, grey unless it is uint8 with colours."""
    pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    colours = array.dtype == np.uint8
    file.Rows, file.Columns = array.shape[-3:-1] if colours else array.shape[-2:]
    file.SamplesPerPixel, file.PhotometricInterpretation = (3, "RGB") if colours else (1, "MONOCHROME2")
    file.BitsAllocated, file.BitsStored, file.HighBit = (8, 8, 7) if colours else (16, 12, 11)
    file.PixelRepresentation = 0
    if colours:
        file.PlanarConfiguration = 0
    if array.ndim > (3 if colours else 2):
        file.NumberOfFrames = len(array)
    for name, value in tags.items():
        setattr(file, name, value)
    file.PixelData = array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
    return path


def test_values_of_dicom_are_in_the_units_of_the_modality(tmp_path):
    array = deep(6, 5)
    path = dicom(tmp_path / "x.dcm", array, RescaleSlope=1, RescaleIntercept=-1024)
    assert np.array_equal(Reading(1).decode(path)[0].numpy(), array.astype(int) - 1024)
    path = dicom(tmp_path / "y.dcm", array, RescaleSlope=0.5, RescaleIntercept=0)
    assert np.array_equal(Reading(1).decode(path)[0].numpy(), array / 2)
    assert np.array_equal(Reading(3).decode(path).numpy(), np.stack([array / 2] * 3))
    path = dicom(tmp_path / "z.dcm", array, RescaleSlope=1_000_000, RescaleIntercept=-1e12)
    np.testing.assert_allclose(Reading(1).decode(path)[0].numpy(), array * 1e6 - 1e12, rtol=1e-6)


def test_a_window_is_applied_unless_a_range_is_given(tmp_path):
    """PS3.3 C.11.2.1.2: from c - 0.5 - (w - 1) / 2 to c - 0.5 + (w - 1) / 2."""
    array = np.arange(0, 400, 4, dtype=np.uint16).reshape(10, 10)
    dicom(tmp_path / "x.dcm", array, WindowCenter=[200, 50], WindowWidth=[101, 10])
    expected = np.rint(((array - 199.5) / 100 + 0.5).clip(0, 1) * 255)
    source = opened(tmp_path)
    assert source.scaling is None
    assert np.array_equal(source.fetch(0)[0].numpy(), expected)
    given = opened(tmp_path, range=[0, 396])
    assert np.array_equal(given.fetch(0)[0].numpy(), levels(array, 396))


def test_if_some_have_windows_and_others_not_all_do_without(tmp_path):
    array = np.arange(100, dtype=np.uint16).reshape(10, 10)
    dicom(tmp_path / "a.dcm", array, WindowCenter=50, WindowWidth=3)
    dicom(tmp_path / "b.dcm", array)
    source = opened(tmp_path)
    assert source.scaling.limits == (0, 99)
    assert torch.equal(source.fetch(0), source.fetch(1))


def test_test_images_have_the_range_of_training_images_or_their_windows(tmp_path):
    array = np.arange(100, dtype=np.uint16).reshape(10, 10)
    windowed = {"WindowCenter": 50, "WindowWidth": 3}
    dicom(tmp_path / "train" / "a.dcm", array)
    dicom(tmp_path / "test" / "a.dcm", array, **windowed)
    train, test = (open_source(DataConfig(source=str(tmp_path)), split, 1) for split in ("train", "test"))
    assert torch.equal(train.fetch(0), test.fetch(0))
    dicom(tmp_path / "train" / "a.dcm", array, **windowed)
    assert open_source(DataConfig(source=str(tmp_path)), "test", 1).fetch(0).unique().numel() < 5


def test_what_is_white_at_zero_is_inverted(tmp_path):
    array = deep(6, 5)
    plain = dicom(tmp_path / "x.dcm", array)
    inverted = dicom(tmp_path / "y.dcm", array, PhotometricInterpretation="MONOCHROME1")
    assert (Reading(1).decode(plain).int() + Reading(1).decode(inverted).int() == 4095).all()
    windows = {"WindowCenter": 2048, "WindowWidth": 4096}
    plain = dicom(tmp_path / "x.dcm", array, **windows)
    inverted = dicom(tmp_path / "y.dcm", array, PhotometricInterpretation="MONOCHROME1", **windows)
    total = Reading(1).decode(plain).int() + Reading(1).decode(inverted).int()
    assert (total - 255).abs().max() <= 1


def test_frames_are_images(tmp_path):
    frames = deep(3, 6, 5)
    dicom(tmp_path / "a" / "scan.dcm", frames)
    dicom(tmp_path / "b" / "other.dcm", deep(6, 5, seed=1))
    source = opened(tmp_path, range=[0, 4095])
    assert names(source) == ["a/scan.dcm#1", "a/scan.dcm#2", "a/scan.dcm#3", "b/other.dcm"]
    assert source.labels.tolist() == [0, 0, 0, 1]
    for i in range(3):
        assert np.array_equal(source.fetch(i)[0].numpy(), levels(frames[i], 4095))
    assert len({source.identity(i) for i in range(4)}) == 4
    colours = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    path = dicom(tmp_path / "c.dcm", colours)
    assert np.array_equal(decode(path).numpy(), colours.transpose(2, 0, 1))


# ------------------------------------------------------------------------------------------------ pages


def test_pages_are_images_with_the_label_of_their_file(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    stack = deep(4, 12, 10)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tifffile.imwrite(tmp_path / "a" / "scan.tif", stack, photometric="minisblack")
    Image.fromarray(stack[0]).save(tmp_path / "b" / "one.tif")
    source = opened(tmp_path, range=[0, 4095])
    assert names(source) == [*(f"a/scan.tif#{i}" for i in range(1, 5)), "b/one.tif"]
    assert source.labels.tolist() == [0, 0, 0, 0, 1]
    for i in range(4):
        assert np.array_equal(source.fetch(i)[0].numpy(), levels(stack[i], 4095))
    config = DataConfig(source=str(tmp_path), range=[0, 4095], store="memory")
    stored = open_stored(config, "train", 1, None)
    assert all(torch.equal(stored.fetch(i), source.fetch(i)) for i in (0, 3, 4, 3))


@pytest.mark.parametrize(
    ("mode", "compression"),
    [("RGB", "tiff_lzw"), ("RGBA", "raw"), ("CMYK", "raw"), ("YCbCr", "raw"), ("YCbCr", "jpeg"), ("1", "group4")],
)
def test_a_page_is_the_image_that_it_would_be_in_a_file_of_its_own(tmp_path, mode, compression):
    pages = [Image.fromarray(deep(24, 16, 3, seed=i).astype(np.uint8)).convert(mode) for i in range(2)]
    upside_down = {"compression": compression, "tiffinfo": {decoding.ORIENTATION: 3}}
    pages[0].save(tmp_path / "x.tif", save_all=True, append_images=pages[1:], **upside_down)
    source = opened(tmp_path, 3)
    assert names(source) == ["x.tif#1", "x.tif#2"]
    for place, page in enumerate(pages):
        alone = io.BytesIO()
        page.save(alone, "TIFF", **upside_down)
        assert torch.equal(source.fetch(place), decode(alone.getvalue()))


def test_pages_of_one_channel_are_the_channels_that_are_asked_for(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    stack = deep(26, 12, 10)
    tifffile.imwrite(tmp_path / "x.tif", stack, photometric="minisblack")
    source = opened(tmp_path, 13, range=[0, 4095])
    assert names(source) == ["x.tif#1", "x.tif#2"]
    assert np.array_equal(source.fetch(1).numpy(), levels(stack[13:], 4095))
    with pytest.raises(BadImage, match="26 pages of one channel, while backbone"):
        opened(tmp_path, 5).fetch(0)


def test_smaller_copies_are_no_images(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        file.write(deep(64, 64))
        file.write(deep(32, 32), subfiletype=1)
    assert names(opened(tmp_path)) == ["x.tif"]


def test_without_the_library_one_line_says_what_to_install(tmp_path, monkeypatch):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "x.tif", deep(8, 8, 3), photometric="rgb")
    scan = dicom(tmp_path / "x.dcm", deep(8, 8))
    for name in ("tifffile", "pydicom"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(BadImage, match=re.escape(install_command("tiff"))):
        decode(tmp_path / "x.tif")
    with pytest.raises(BadImage, match=re.escape(install_command("dicom"))):
        decode(scan)


# ------------------------------------------------------------------------------------------------ tiles


@pytest.mark.parametrize(("height", "width"), [(100, 70), (64, 64), (65, 32), (20, 200), (10, 10)])
def test_tiles_cover_the_image_and_are_alike(height, width):
    covered = np.zeros((height, width), int)
    found = parts.boxes(height, width, 32)
    for top, left, tall, wide in found:
        covered[top : top + (tall or height), left : left + (wide or width)] += 1
    assert covered.all()
    assert len(set(found)) == len(found) == -(-height // 32) * -(-width // 32)
    assert len({box[2:] for box in found}) == 1


LAYOUTS = {
    "strips": {"rowsperstrip": 7},
    "compressed strips": {"rowsperstrip": 7, "compression": "zlib"},
    "tiles": {"tile": (16, 32)},
    "compressed tiles": {"tile": (16, 16), "compression": "zlib", "predictor": True},
    "planes": {"planarconfig": "separate", "tile": (16, 16)},
    "a whole": {"rowsperstrip": 100},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_of_a_tiff_are_pieces_of_the_whole(tmp_path, layout):
    tifffile = pytest.importorskip("tifffile")
    separate = "planarconfig" in LAYOUTS[layout]
    array = deep(100, 70, 3)
    written = array.transpose(2, 0, 1) if separate else array
    tifffile.imwrite(tmp_path / "x.tif", written, photometric="rgb", **LAYOUTS[layout])
    source = opened(tmp_path, 3, tiles=32, range=[0, 4095])
    assert names(source)[:4] == ["x.tif@0,0", "x.tif@32,0", "x.tif@38,0", "x.tif@0,32"]
    whole = levels(array, 4095).transpose(2, 0, 1)
    for i, (top, left, tall, wide) in enumerate(parts.boxes(100, 70, 32)):
        assert np.array_equal(source.fetch(i).numpy(), whole[:, top : top + tall, left : left + wide])


def test_tiles_have_the_colours_of_the_whole(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    picture = Image.fromarray(deep(24, 24, 3).astype(np.uint8))
    picture.convert("CMYK").save(tmp_path / "x.tif")
    whole = decode(tmp_path / "x.tif")
    source = opened(tmp_path, 3, tiles=16)
    assert (source.fetch(0).float() - whole[:, :16, :16]).abs().max() <= 1
    picture.convert("LAB").save(tmp_path / "x.tif")
    with pytest.raises(BadImage, match="colours of the kind CIELAB"):
        opened(tmp_path, 3, tiles=16).fetch(0)
    # A fourth sample that is not called transparency is none
    tifffile.imwrite(tmp_path / "x.tif", deep(24, 24, 4), photometric="rgb", extrasamples=["unspecified"])
    assert np.array_equal(
        opened(tmp_path, 3, range=[0, 4095]).fetch(0), levels(deep(24, 24, 4), 4095)[..., :3].transpose(2, 0, 1)
    )


def test_tiles_of_colours_multiplied_by_their_opacity_lie_on_white_as_the_whole_does(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    colours, opacity = deep(24, 24, 3) % 256, deep(24, 24, 1, seed=1) % 256
    multiplied = np.concatenate([colours * opacity // 255, opacity], axis=-1)
    for kind in (np.uint8, np.uint16):
        full = np.iinfo(kind).max
        values = (multiplied * (full // 255)).astype(kind)
        tifffile.imwrite(tmp_path / "x.tif", values, photometric="rgb", extrasamples=["assocalpha"])
        tile = Reading(3).decode(tmp_path / "x.tif", part=decoding.Part(0, (0, 0, 24, 24))).numpy() * (255 / full)
        expected = (colours * (opacity / 255) + 255 - opacity).transpose(2, 0, 1)
        assert np.abs(tile - expected).max() < 3
        whole = Reading(3).decode(tmp_path / "x.tif").numpy() * (255 / full)
        assert np.abs(whole - expected).max() < 3


@pytest.mark.parametrize("kind", [bool, np.uint8, np.uint16])
@pytest.mark.parametrize("pages", [1, 2])
def test_zero_is_white_where_a_tiff_says_so(tmp_path, kind, pages):
    tifffile = pytest.importorskip("tifffile")
    values = deep(24, 24)
    values = values > 2000 if kind is bool else values.astype(kind)
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        for _ in range(pages):
            file.write(values, photometric="miniswhite", contiguous=False)
    right = (~values).astype(np.uint8) * 255 if kind is bool else ~values
    for part in (None if pages == 1 else decoding.Part(1), decoding.Part(0, (0, 0, 24, 24))):
        assert np.array_equal(Reading(1).decode(tmp_path / "x.tif", part=part)[0].numpy(), right)


def test_tiles_of_other_files_are_pieces_of_the_upright_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[274] = 6
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=turned)
    source, upright = opened(tmp_path, 3, tiles=32), np.rot90(pixels, -1).transpose(2, 0, 1)
    for i, (top, left, tall, wide) in enumerate(parts.boxes(70, 40, 32)):
        assert np.array_equal(source.fetch(i).numpy(), upright[:, top : top + tall, left : left + wide])


@pytest.mark.parametrize("kind", range(14))
def test_an_orientation_of_any_type_is_a_size(kind):
    """Numbers of one byte are bytes in Pillow."""
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHI4s", decoding.ORIENTATION, kind, 1, b"\x06") + bytes(4)
    file = io.BytesIO()
    Image.new("RGB", (8, 4)).save(file, "JPEG", exif=exif)
    assert decoding.picture_size(file) in ((4, 8), (8, 4))


def test_what_is_too_large_as_a_whole_is_read_in_tiles(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "MOST_PIXELS", 1_000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "x.tif", deep(60, 60), tile=(16, 16))
    Image.new("L", (60, 60), 9).save(tmp_path / "x.png")
    for i, name in enumerate(("x.png", "x.tif")):
        with pytest.raises(BadImage, match=r"60 x 60|exceeds limit"):
            opened(tmp_path).fetch(i)
        assert name in names(opened(tmp_path))
    source = opened(tmp_path, tiles=30)
    assert len(source) == 8
    assert (source.fetch(0) == 9).all()
    assert source.fetch(7).shape == (1, 30, 30)
    monkeypatch.setattr(decoding, "MOST_TILED", 2_000)
    decoding._whole.cache_clear()
    with pytest.raises(BadImage):
        opened(tmp_path, tiles=30).fetch(0)


def test_background_is_left_out_by_the_stated_rule(tmp_path, capsys):
    """Half of the image is noise of deviation s, the other half has s / 100: all together they have s / sqrt(2)."""
    tifffile = pytest.importorskip("tifffile")
    array = np.full((64, 128), 10_000.0) + np.random.default_rng(0).normal(size=(64, 128)) * 300
    array[:, 64:] = 10_000 + (array[:, 64:] - 10_000) / 100
    tifffile.imwrite(tmp_path / "x.tif", array.astype(np.uint16), tile=(16, 16))
    assert len(opened(tmp_path, tiles=32)) == 8
    found = opened(tmp_path, tiles=32, tile_contrast=0.1)
    assert names(found) == ["x.tif@0,0", "x.tif@32,0", "x.tif@0,32", "x.tif@32,32"]
    assert "left out 4 of 8 tiles as background" in capsys.readouterr().out
    assert len(opened(tmp_path, tiles=32, tile_contrast=0.01)) == 8


# ------------------------------------------------------------------------------------------------ from anyone


def damaged(content: bytes, count: int):
    draw = np.random.default_rng(0)
    for _ in range(count):
        changed = bytearray(content)
        for place in draw.integers(0, min(len(changed), 600), 3):
            changed[place] = draw.integers(0, 256)
        yield bytes(changed[: draw.integers(1, len(changed) + 1)] if draw.random() < 0.3 else changed)


@pytest.mark.parametrize("suffix", [".tif", ".dcm"])
def test_damaged_files_are_images_or_one_line(tmp_path, suffix):
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path / "images" / f"x{suffix}"
    path.parent.mkdir()
    if suffix == ".tif":
        stream = io.BytesIO()
        tifffile.imwrite(stream, deep(3, 12, 10), photometric="minisblack")
        path.write_bytes(stream.getvalue())
    else:
        dicom(path, deep(3, 12, 10), WindowCenter=9, WindowWidth=9)
    for content in damaged(path.read_bytes(), 20):
        path.write_bytes(content)
        for options in ({}, {"tiles": 16}):
            source = opened(path.parent, range=[0, 4095], **options)
            try:
                assert source.fetch(len(source) - 1).dtype == torch.uint8
            except BadImage as error:
                assert "\n" not in str(error)


def test_a_small_page_does_not_inflate_to_a_large_one(tmp_path):
    pytest.importorskip("tifffile")
    bomb = zlib.compress(bytes(50_000_000))
    values = {256: 8, 257: 8, 258: 16, 259: 8, 262: 1, 273: 200, 277: 1, 278: 8, 279: len(bomb)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(values)) + entries + bytes(4)
    (tmp_path / "x.tif").write_bytes(head.ljust(200, b"\0") + bomb)
    with pytest.raises(BadImage, match="a strip or tile of more than 128 bytes"):
        Reading(1).decode(tmp_path / "x.tif", part=decoding.Part(0, (0, 0, 8, 8)))
    assert Reading(1).decode(tmp_path / "x.tif", part=decoding.Part()).shape == (1, 8, 8)


def in_deflate(tags: list[tuple[int, int, int]], pixels: int) -> bytes:
    """A grey TIFF of one strip or tile of so many black pixels, with further tags (number, type, value)."""
    content = zlib.compress(bytes(pixels), 1)
    where = (324, 325) if any(tag == 322 for tag, *_ in tags) else (273, 279)
    usual = [(258, 4, 8), (259, 4, 8), (262, 4, 1), (277, 4, 1), (where[0], 4, 400), (where[1], 4, len(content))]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in sorted([*usual, *tags]))
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", len(usual + tags)) + entries).ljust(400, b"\0") + content


SIXTEEN = [(256, 4, 16), (257, 4, 16)]
TALL = (323, 4, 30_000)


@pytest.mark.parametrize(
    "tile",
    [[(322, 4, 30_000), TALL], [(322, 4, 30_000), (322, 4, 30_016), (322, 4, 16), TALL], [(322, 9, 30_000), TALL]],
    ids=["large", "twice", "signed"],
)
def test_a_tile_is_limited_as_an_image_is(tmp_path, tile):
    """Memory is taken for a whole tile, whatever the size of its page."""
    content = in_deflate(SIXTEEN + tile, 1_000)
    (tmp_path / "x.tif").write_bytes(content)
    (tmp_path / "x.png").write_bytes(content)
    reading = Reading(3, tiles=16)
    for name in ("x.tif", "x.png"):
        for part in (None, decoding.Part(), decoding.Part(0, (0, 0, 16, 16))):
            with pytest.raises(BadImage, match=r"x 30000 pixels|1, 30000, 16, 1"):  # tifffile takes the last of two
                reading.decode(tmp_path / name, part=part)


def test_strips_and_tiles_may_be_somewhat_larger_than_their_page(tmp_path):
    pytest.importorskip("tifffile")
    for tags, pixels in (([(322, 4, 512), (323, 4, 512)], 512 * 512), ([(278, 4, 2**32 - 1)], 256)):
        (tmp_path / "x.tif").write_bytes(in_deflate(SIXTEEN + tags, pixels))
        for part in (None, decoding.Part(), decoding.Part(0, (0, 0, 16, 16))):
            assert Reading(1).decode(tmp_path / "x.tif", part=part).shape == (1, 16, 16)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_samples_beyond_the_channels_take_no_memory(tmp_path, channels):
    pytest.importorskip("tifffile")
    values = {256: 20_000, 257: 5_000, 258: 16, 259: 1, 262: 1, 273: 200, 277: 60_000, 278: 5_000, 279: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(values)) + entries + bytes(4)
    (tmp_path / "x.tif").write_bytes(head.ljust(900_000, b"\0"))
    for part in (None, decoding.Part(), decoding.Part(0, (0, 0, 5_000, 5_000))):
        with pytest.raises(BadImage, match="has 60000 channels"):
            Reading(channels).decode(tmp_path / "x.tif", part=part)


def test_jpegs_beside_pages_are_stored_as_reduced_as_they_are(tmp_path):
    """A small one that was kept for one command is not used by another that needs more pixels."""
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "x.tif", deep(2, 12, 10), photometric="minisblack")
    Image.fromarray(deep(160, 160).astype(np.uint8)).convert("RGB").save(tmp_path / "photo.jpg")
    sizes = []
    for shorter in (20, 80):
        config = DataConfig(source=str(tmp_path), range=[0, 4095], store="disk")
        sizes.append(open_stored(config, "train", 3, shorter).fetch(0).shape[-1])
    assert sizes == [20, 80]


def test_pages_in_a_circle_and_pages_without_end(tmp_path):
    entries = b"".join(
        int(tag).to_bytes(2, "little") + b"\x04\0\x01\0\0\0" + int(value).to_bytes(4, "little")
        for tag, value in ((256, 9), (257, 9))
    )
    circle = b"II*\0\x08\0\0\0\x02\0" + entries + b"\x08\0\0\0"
    (tmp_path / "x.tif").write_bytes(circle)
    source = opened(tmp_path)
    assert len(source) == 1
    with pytest.raises(BadImage):
        source.fetch(0)
    huge = circle[:-4] + bytes(4)
    (tmp_path / "x.tif").write_bytes(huge.replace(b"\x09\0\0\0", b"\0\0\0\x10"))
    source = opened(tmp_path, tiles=1 << 27)
    with pytest.raises(BadImage):
        source.fetch(0)
