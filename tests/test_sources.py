"""Where pixels come from: folders, numpy archives and data sets, and what is said when something is wrong."""

import io
import pickle
import tarfile
import warnings
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset

from test_plain_images import jpeg, photograph
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_arrays, from_dataset
from tico_ssl.data.decoding import Reading, decode
from tico_ssl.data.fingerprint import glance
from tico_ssl.data.formats import dataset
from tico_ssl.data.formats.textures import CLASSES
from tico_ssl.data.formats.torchvision import SETS
from tico_ssl.data.given import as_source
from tico_ssl.data.names import SUFFIXES
from tico_ssl.data.source import Source, evenly_spaced, joined, spread_evenly
from tico_ssl.data.sources import open_source
from tico_ssl.pipeline.packing import pack
from tico_ssl.runtime.errors import UserError


def image(seed: int = 0, height: int = 12, width: int = 10, channels: int = 3) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def write(path, seed: int = 0, **shape) -> np.ndarray:
    """A lossless image file; returns its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = image(seed, **shape)
    Image.fromarray(pixels).save(path)
    return pixels


def channels_first(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def source(path, split: str = "train", channels: int = 3, **settings) -> Source | None:
    return open_source(DataConfig(source=str(path), **settings), split, channels)


def error_of(path, *mentions: str, **settings) -> str:
    """The one line that opening a path ends with."""
    with pytest.raises(UserError) as caught:
        source(path, **settings)
    line = str(caught.value)
    assert "\n" not in line
    for text in mentions:
        assert text in line
    return line


# ---------------------------------------------------------------------------------------------------- folders


def test_a_flat_folder_has_no_labels(tmp_path):
    expected = [channels_first(write(tmp_path / f"{number}.png", number)) for number in range(3)]
    found = source(tmp_path)
    assert len(found) == 3
    assert found.labels is None
    assert found.classes == ()
    assert [found.names(i) for i in range(3)] == ["0.png", "1.png", "2.png"]
    assert all(torch.equal(found.fetch(i), expected[i]) for i in range(3))
    assert found.fetch(0).dtype == torch.uint8
    assert source(tmp_path, "test") is None


def test_class_folders_are_labels(tmp_path):
    for name in ("dog", "cat", "ant"):
        for number in range(2):
            write(tmp_path / name / f"{number}.png")
    found = source(tmp_path)
    assert found.classes == ("ant", "cat", "dog")
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert [found.classes[label] for label in found.labels] == [found.names(i).split("/")[0] for i in range(6)]
    assert source(tmp_path, "test") is None


def test_the_class_is_the_topmost_folder(tmp_path):
    for place in ("a/x/1.png", "a/y/deep/2.png", "b/3.png", "b/x/4.png"):
        write(tmp_path / place)
    found = source(tmp_path)
    assert found.classes == ("a", "b")
    assert found.labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("test_name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders(tmp_path, test_name):
    for split, count in (("train", 3), (test_name, 2)):
        for name in ("a", "b"):
            for number in range(count):
                write(tmp_path / split / name / f"{number}.png")
    train, test = source(tmp_path), source(tmp_path, "test")
    assert (len(train), len(test)) == (6, 4)
    assert train.classes == test.classes == ("a", "b")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert test.labels.tolist() == [0, 0, 1, 1]


def test_a_train_folder_alone_has_no_test_images(tmp_path):
    write(tmp_path / "train" / "a" / "1.png")
    write(tmp_path / "train" / "b" / "1.png")
    assert source(tmp_path).classes == ("a", "b")
    assert source(tmp_path, "test") is None


def test_a_file_beside_class_folders_takes_the_labels_away(tmp_path):
    for place in ("a/1.png", "b/2.png", "3.png"):
        write(tmp_path / place)
    found = source(tmp_path)
    assert len(found) == 3
    assert found.labels is None
    assert found.classes == ()


def test_one_class_folder_is_no_label(tmp_path):
    write(tmp_path / "holiday" / "1.png")
    write(tmp_path / "holiday" / "2.png")
    found = source(tmp_path)
    assert len(found) == 2
    assert found.labels is None
    assert found.classes == ()


def test_hidden_and_other_files_are_passed_over(tmp_path):
    write(tmp_path / "a" / "1.png")
    write(tmp_path / "b" / "2.PNG")
    write(tmp_path / ".thumbnails" / "3.png")
    write(tmp_path / "a" / ".4.png")
    (tmp_path / "readme.txt").write_text("not an image")
    (tmp_path / "a" / "._1.png").write_bytes(b"\0\5\26\7")
    found = source(tmp_path)
    assert [found.names(i) for i in range(len(found))] == ["a/1.png", "b/2.PNG"]
    assert found.classes == ("a", "b")


def test_spaces_and_letters_of_other_languages_in_paths(tmp_path):
    pixels = write(tmp_path / "fotos från Åre 日本" / "en bild ü.png")
    found = source(tmp_path / "fotos från Åre 日本")
    assert found.names(0) == "en bild ü.png"
    assert torch.equal(found.fetch(0), channels_first(pixels))


def test_images_of_different_sizes(tmp_path):
    for number, (height, width) in enumerate([(8, 20), (30, 5)]):
        write(tmp_path / f"{number}.png", height=height, width=width)
    found = source(tmp_path)
    assert [tuple(found.fetch(i).shape) for i in range(2)] == [(3, 8, 20), (3, 30, 5)]
    assert found.images is None


def test_the_order_does_not_depend_on_the_file_system(tmp_path):
    for name in ("z", "m", "a", "k"):
        write(tmp_path / f"{name}.png")
    found = source(tmp_path)
    assert [found.names(i) for i in range(4)] == ["a.png", "k.png", "m.png", "z.png"]


def test_an_empty_folder_is_one_line(tmp_path):
    error_of(tmp_path, str(tmp_path), "no images found", ".jpg")
    (tmp_path / "readme.txt").write_text("still none")
    error_of(tmp_path, "no images found")


def test_a_path_that_does_not_exist_names_the_nearest(tmp_path):
    error_of("cifar-10", "cifar-10", "did you mean 'cifar10'")
    error_of("texture", "did you mean 'textures'")
    error_of(tmp_path / "nowhere", str(tmp_path / "nowhere"))


def test_a_file_of_another_kind_is_no_data(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    error_of(tmp_path / "notes.md", "notes.md", "folder", ".npz")


# ---------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif", "ppm"])
def test_every_format_is_read(tmp_path, suffix):
    assert f".{suffix}" in SUFFIXES
    Image.new("RGB", (7, 5), (200, 100, 50)).save(tmp_path / f"x.{suffix}")
    pixels = decode(tmp_path / f"x.{suffix}")
    assert pixels.shape == (3, 5, 7)
    assert (pixels.float().mean(dim=(1, 2)) - torch.tensor([200.0, 100.0, 50.0])).abs().max() < 6


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_every_mode_becomes_three_channels(tmp_path, mode):
    """Grey in the file is the same grey in all three channels; transparency is ignored."""
    grey = np.tile(np.array([[0, 255]], dtype=np.uint8), (4, 3))
    picture = Image.fromarray(grey.astype(np.uint16) * 257 if mode == "I;16" else grey)
    if mode == "CMYK":
        path = tmp_path / "x.tif"
        picture.convert("RGB").convert(mode).save(path)
    else:
        path = tmp_path / "x.png"
        (picture if mode == "I;16" else picture.convert("RGB").convert(mode)).save(path)
    pixels = decode(path)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, torch.from_numpy(grey).expand(3, -1, -1))


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    """Not clipped: a picture of a microscope or a telescope would be white all over."""
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    for channels in (1, 3):
        pixels = decode(tmp_path / "x.png", channels).numpy()
        assert np.abs(pixels.astype(int) - ramp // 257).max() <= 1


def test_colours_keep_their_order(tmp_path):
    Image.new("RGBA", (2, 2), (10, 20, 30, 255)).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png")[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_on_white(tmp_path, mode):
    Image.new(mode, (2, 2), (10, 20, 30, 0) if mode == "RGBA" else (10, 0)).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png")[:, 0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize(("scale", "expected"), [(1.0, [0, 128, 255]), (255.0, [0, 128, 255]), (4000.0, [0, 128, 255])])
def test_float_images_are_scaled_by_their_range(tmp_path, scale, expected):
    values = np.array([[0.0, 0.5, 1.0]], dtype=np.float32) * scale
    Image.fromarray(values).save(tmp_path / "x.tiff")
    assert decode(tmp_path / "x.tiff")[0, 0].tolist() == expected


def test_many_channels_come_from_arrays_and_tiffs(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    np.save(tmp_path / "last.npy", array)
    np.save(tmp_path / "first.npy", array.transpose(2, 0, 1))
    np.save(tmp_path / "deep.npy", array.astype(np.uint16) * 257)
    expected = torch.from_numpy(array.transpose(2, 0, 1).copy())
    for name in ("last", "first", "deep"):
        assert torch.equal(decode(tmp_path / f"{name}.npy", channels=4), expected)
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "bands.tif", array, photometric="minisblack", planarconfig="contig")
    assert torch.equal(decode(tmp_path / "bands.tif", channels=4), expected)
    with pytest.raises(UserError, match="no first or last axis of 7 channels"):
        decode(tmp_path / "last.npy", channels=7)


def test_absurd_dimensions_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tico_ssl.data.decoding.MOST_PIXELS", 100)
    write(tmp_path / "x.png")
    with pytest.raises(UserError, match=r"x\.png: not a readable image \(\d+ x \d+ pixels in \d+ bytes\)"):
        decode(tmp_path / "x.png")


def test_one_channel_is_the_luma(tmp_path):
    Image.new("RGB", (3, 2), (255, 0, 0)).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png", channels=1).tolist() == [[[76] * 3] * 2]


def test_a_file_has_the_channels_that_it_has(tmp_path):
    write(tmp_path / "x.png")
    with pytest.raises(UserError, match=r"has 3 channels, while backbone\.channels is 4"):
        decode(tmp_path / "x.png", channels=4)
    pixels = write(tmp_path / "y.png", channels=4)
    assert torch.equal(decode(tmp_path / "y.png", channels=4), channels_first(pixels))


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [(1, lambda x: x), (3, lambda x: np.rot90(x, 2)), (6, lambda x: np.rot90(x, -1)), (8, lambda x: np.rot90(x, 1))],
)
def test_images_are_turned_upright(tmp_path, orientation, turn):
    pixels = image(height=4, width=6)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    assert torch.equal(decode(tmp_path / "x.png"), channels_first(np.ascontiguousarray(turn(pixels))))


@pytest.mark.parametrize("contents", ["cut", "empty", "text"])
def test_a_corrupt_image_is_named(tmp_path, contents):
    path = tmp_path / "holiday 7.jpg"
    Image.fromarray(image(height=64, width=64)).save(path)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"<html>404</html>"}[contents])
    found = source(tmp_path)
    with pytest.raises(UserError, match=r"holiday 7\.jpg: not a readable image") as caught:
        found.fetch(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", sorted(SUFFIXES - {".pgm", ".dcm", ".dicom"}))
def test_a_file_cut_anywhere_is_an_image_or_one_line(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif} if suffix in (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff") else {}
    Image.fromarray(image(height=16, width=16)).save(path, **options)
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own, about what it could not read
        for end in range(0, len(whole), max(1, len(whole) // 60)):
            path.write_bytes(whole[:end])
            try:
                assert decode(path).shape == (3, 16, 16)
            except UserError as error:
                assert str(path) in str(error)


# ---------------------------------------------------------------------------------------------------- reduced decoding


@pytest.mark.parametrize(
    ("shorter", "left"), [(1, 150), (150, 150), (151, 300), (300, 300), (301, 600), (601, 1200), (5000, 1200)]
)
def test_a_large_jpeg_keeps_the_pixels_that_are_needed(shorter, left):
    data = jpeg(photograph(1600, 1200))
    assert Reading(3, shorter).decode(data).shape == (3, left, left * 4 // 3)
    assert Reading(1, shorter).decode(data).shape == (1, left, left * 4 // 3)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"orientation": 6}, {"progressive": True}])
def test_a_reduced_jpeg_is_the_whole_one_but_for_detail(tmp_path, mode, options):
    """Upright, and the mean of the pixels that each one stands for."""
    (tmp_path / "x.jpg").write_bytes(jpeg(photograph(1600, 1200, mode), **options))
    config = DataConfig(source=str(tmp_path))
    whole, reduced = (open_source(config, shorter=shorter).fetch(0).float() for shorter in (None, 300))
    assert reduced.shape == ((3, 400, 300) if "orientation" in options else (3, 300, 400))
    error = (torch.nn.functional.avg_pool2d(whole, 4) - reduced).abs()
    assert error.mean() < 1
    assert error.max() < 8


def test_what_need_not_or_cannot_be_reduced_is_exact(tmp_path):
    write(tmp_path / "a.png", height=120, width=160)
    (tmp_path / "b.jpg").write_bytes(jpeg(photograph(500, 375)))
    (tmp_path / "c.jpg").write_bytes(jpeg(photograph(1600, 1200)))
    config = DataConfig(source=str(tmp_path))
    whole = open_source(config)
    for shorter in (448, 188):  # 375 has no half that keeps either
        reduced = open_source(config, shorter=shorter)
        assert torch.equal(reduced.fetch(0), whole.fetch(0))
        assert torch.equal(reduced.fetch(1), whole.fetch(1))
        assert reduced.fetch(2).shape == ((3, 600, 800) if shorter == 448 else (3, 300, 400))
    exact = open_source(config.model_copy(update={"reduced_decoding": False}), shorter=30)
    assert all(torch.equal(exact.fetch(i), whole.fetch(i)) for i in range(3))


def test_photographs_with_a_second_picture_are_reduced_too(tmp_path):
    """As telephones write them, with a map of depths behind the picture."""
    picture = photograph(160, 120)
    picture.save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=[picture.resize((80, 60))])
    assert decode(tmp_path / "x.jpg").shape == (3, 120, 160)
    assert decode(tmp_path / "x.jpg", shorter=30).shape == (3, 30, 40)


def as_folder(root, file):
    return root


def as_list(root, file):
    (root / "list.txt").write_text(f"{file.name}\n")
    return root / "list.txt"


def as_imagenet(root, file):
    (root / "train" / "n01440764").mkdir(parents=True)
    file.rename(root / "train" / "n01440764" / file.name)
    return root


def as_tar(root, file):
    with tarfile.open(root / "x.tar", "w") as tar:
        tar.add(file, "0.jpg")
    return root / "x.tar"


def as_parquet(root, file):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": [{"bytes": file.read_bytes(), "path": None}]}), root / "x.parquet")
    return root / "x.parquet"


def as_packed(root, file):
    pack(source(root), root / "x.tico", 200, jpeg=True)
    return root / "x.tico"


@pytest.mark.parametrize("form", [as_folder, as_list, as_imagenet, as_tar, as_parquet, as_packed])
def test_every_kind_of_data_can_be_reduced(tmp_path, form):
    file = tmp_path / "x.jpg"
    file.write_bytes(jpeg(photograph(160, 120)))
    place = form(tmp_path, file)
    assert source(place).fetch(0).shape == (3, 120, 160)
    assert open_source(DataConfig(source=str(place)), shorter=30).fetch(0).shape == (3, 30, 40)


# ---------------------------------------------------------------------------------------------------- numpy


def stack(count: int = 6, height: int = 9, width: int = 8, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, channels), dtype=np.uint8)


def test_images_and_labels(tmp_path):
    images, labels = stack(), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "x.npz", images=images, labels=labels, classes=np.array(["a", "b", "c"]))
    found = source(tmp_path / "x.npz")
    assert torch.equal(found.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert torch.equal(found.fetch(2), found.images[2])
    assert found.labels.tolist() == labels.tolist()
    assert found.labels.dtype == torch.int64
    assert found.classes == ("a", "b", "c")
    assert source(tmp_path / "x.npz", "test") is None


def test_train_and_test_arrays(tmp_path):
    images = stack()
    np.savez(
        tmp_path / "x.npz",
        x_train=images[:4],
        y_train=np.arange(4).reshape(4, 1).astype(np.uint8),
        x_test=images[4:],
        y_test=np.array([3, 1]),
    )
    train, test = source(tmp_path / "x.npz"), source(tmp_path / "x.npz", "test")
    assert torch.equal(torch.cat([train.images, test.images]), torch.from_numpy(images).permute(0, 3, 1, 2))
    assert train.labels.tolist() == [0, 1, 2, 3]
    assert test.labels.tolist() == [3, 1]


def test_several_labels_an_image(tmp_path):
    labels = np.array([[1, -1, 0], [-1, -1, 1]] * 3)
    np.savez(tmp_path / "x.npz", x_train=stack(), y_train=labels, x_test=stack(1), y_test=labels[:1])
    train, test = source(tmp_path / "x.npz"), source(tmp_path / "x.npz", "test")
    assert train.labels.tolist() == labels.tolist()
    assert test.labels.tolist() == [[1, -1, 0]]
    np.savez(tmp_path / "y.npz", images=stack(), labels=labels[:5])
    error_of(tmp_path / "y.npz", "6 images", "5 labels")
    np.savez(tmp_path / "z.npz", images=stack(), labels=np.int64(3))
    error_of(tmp_path / "z.npz", "6 images", "1 label")


def test_arrays_without_labels(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=stack())
    np.save(tmp_path / "x.npy", stack())
    for name in ("x.npz", "x.npy"):
        found = source(tmp_path / name)
        assert found.labels is None
        assert torch.equal(found.images, torch.from_numpy(stack()).permute(0, 3, 1, 2))
        assert source(tmp_path / name, "test") is None


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize(
    ("layout", "channels"),
    [
        (lambda x: x, 3),  # channels last
        (lambda x: x.transpose(0, 3, 1, 2), 3),  # channels first
        (lambda x: x[..., 0], 1),  # no axis of channels
        (lambda x: x[..., :1], 1),
        (lambda x: x[..., :1].transpose(0, 3, 1, 2), 1),
    ],
)
def test_channels_first_last_or_absent(tmp_path, layout, channels, suffix):
    path = tmp_path / f"x.{suffix}"
    images = layout(stack())
    if suffix == "npy":
        np.save(path, images)
    else:
        np.savez(path, images=images)
    found = source(path, channels=channels)
    assert torch.equal(found.images, torch.from_numpy(stack()[..., :channels]).permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("shape", "channels"), [((6, 3, 9, 2), 3), ((6, 2, 9, 3), 3), ((6, 5, 4, 4), 5), ((6, 4, 4, 5), 5)]
)
def test_the_axis_of_channels_is_the_one_of_their_number(tmp_path, shape, channels):
    images = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    np.save(tmp_path / "x.npy", images)
    first = images if shape[1] == channels else images.transpose(0, 3, 1, 2)
    assert torch.equal(source(tmp_path / "x.npy", channels=channels).images, torch.from_numpy(first.copy()))


def test_more_than_three_channels(tmp_path):
    np.savez(tmp_path / "x.npz", images=stack(channels=5))
    assert source(tmp_path / "x.npz", channels=5).images.shape == (6, 5, 9, 8)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("array", [np.zeros((4, 8, 8, 3), np.complex64), np.zeros((4, 8), np.uint8)])
def test_arrays_of_the_wrong_kind_are_one_line(tmp_path, array, suffix):
    path = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        np.save(path, array)
    else:
        np.savez(path, images=array)
    error_of(path, str(path), "numbers", str(array.dtype), str(array.shape))


def test_the_number_of_channels_must_be_the_backbones(tmp_path):
    np.save(tmp_path / "x.npy", stack(channels=1))
    error_of(tmp_path / "x.npy", "1 channels", "backbone.channels is 3")


def test_wrong_keys_are_one_line_that_names_both(tmp_path):
    np.savez(tmp_path / "x.npz", pictures=stack(), tags=np.arange(6))
    error_of(tmp_path / "x.npz", "x_train", "images", "pictures", "tags")


def test_labels_must_match_the_images(tmp_path):
    np.savez(tmp_path / "x.npz", images=stack(), labels=np.arange(5))
    error_of(tmp_path / "x.npz", "6 images", "5 labels")


def test_an_archive_without_images_is_one_line(tmp_path):
    np.savez(tmp_path / "x.npz", images=stack(count=0))
    error_of(tmp_path / "x.npz", "no images found")


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("damage", ["cut", "text", "empty", "object", "renamed", "header"])
def test_damaged_archives_are_one_line(tmp_path, damage, suffix):
    """Cut by a full disk, a saved error page, nothing at all, a pickle, or the other kind of file under this name."""
    path = tmp_path / f"x.{suffix}"
    writers = {"npy": np.save, "npz": lambda file, array: np.savez(file, images=array)}
    with path.open("wb") as file:
        writers[suffix](file, stack() if damage != "object" else np.array([{"a": 1}], dtype=object))
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "header":
        path.write_bytes(whole[:7])
    elif damage in ("text", "empty"):
        path.write_text("<html>404</html>" if damage == "text" else "")
    elif damage == "renamed":
        with path.open("wb") as file:
            writers["npz" if suffix == "npy" else "npy"](file, stack())
    error_of(path, str(path))


def test_labels_that_are_no_numbers_are_one_line(tmp_path):
    np.savez(tmp_path / "x.npz", images=stack(), labels=np.array(list("abcabc")))
    line = error_of(tmp_path / "x.npz", str(tmp_path / "x.npz"))
    assert "labels" in line.replace(str(tmp_path), "")  # it is not the archive that is unreadable


# ---------------------------------------------------------------------------------------------------- parts of a source


def test_a_subset_keeps_everything_together(tmp_path):
    for name in ("a", "b"):
        for number in range(3):
            write(tmp_path / name / f"{number}.png", seed=number + (10 if name == "b" else 0))
    whole = source(tmp_path)
    part = whole.subset(torch.tensor([4, 0]))
    assert len(part) == 2
    assert [part.names(i) for i in range(2)] == ["b/1.png", "a/0.png"]
    assert part.labels.tolist() == [1, 0]
    assert torch.equal(part.fetch(0), whole.fetch(4))
    again = part.subset(torch.tensor([1]))
    assert again.names(0) == "a/0.png"
    assert torch.equal(again.fetch(0), whole.fetch(0))


def test_several_sources_are_one_and_share_classes_by_name():
    pixels = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1)
    first = from_arrays("a", pixels[:3], torch.tensor([0, 1, 1]), ("cat", "owl"))
    second = from_arrays("b", pixels[3:], torch.tensor([0, 0, 1, 1, 1]), ("bat", "cat"))
    both = joined([first, second])
    assert [int(both.fetch(i)) for i in range(8)] == list(range(8))
    assert both.classes == ("bat", "cat", "owl")
    assert both.labels.tolist() == [1, 2, 2, 0, 0, 1, 1, 1]
    assert both.names(3) == "b/0"
    several = replace(second, labels=torch.ones(5, 2, dtype=torch.int64))  # labels of an image that are no number
    assert joined([first, several]).labels is None
    assert joined([first, replace(second, labels=None)]).labels is None


def test_a_limit_is_spread_evenly(tmp_path):
    labels = np.repeat(np.arange(10), 30)
    np.savez(tmp_path / "x.npz", images=np.zeros((300, 8, 8, 3), np.uint8), labels=labels)
    found = source(tmp_path / "x.npz", limit=20)
    assert len(found) == len(found.images) == 20
    assert torch.bincount(found.labels).tolist() == [2] * 10
    odd = source(tmp_path / "x.npz", limit=43)
    assert len(odd) == 43
    assert set(torch.bincount(odd.labels).tolist()) == {4, 5}


@pytest.mark.parametrize("classes", [2, 10])
def test_a_limit_has_every_class_where_classes_take_turns(classes):
    """Images at equal distances would all be of one class."""
    labels = torch.arange(2_000) % classes
    found = from_arrays("x", torch.zeros(2_000, 1, 1, 1, dtype=torch.uint8), labels).limited(200).labels
    assert torch.bincount(found).min() > 100 / classes


@given(st.integers(0, 500), st.integers(0, 500))
def test_one_image_is_drawn_from_each_of_equal_parts(count, most):
    places, begins = spread_evenly(count, most), evenly_spaced(count, most)
    assert torch.equal(places, spread_evenly(count, most))
    assert len(places) == min(count, most)
    assert bool((begins <= places).all())
    assert bool((places < torch.tensor([*begins[1:].tolist(), count])[: len(begins)]).all())


def test_what_a_run_remembers_of_its_images_stays_between_versions():
    """Other places would refuse to resume every run of an earlier version."""
    source = Source("x", 2_000, lambda i: torch.zeros(1), content=lambda i: b"%d " % i)
    found = glance(source)
    assert found["names"] == crc32("\0".join(str(i) for i in range(0, 2_000, 2)).encode())
    assert found["content"] == crc32(b"".join(b"%d " % (i * 2_000 // 64) for i in range(64)))


def test_a_limit_takes_different_images(tmp_path):
    whole = from_arrays("x", torch.arange(7, dtype=torch.uint8).view(7, 1, 1, 1), None)
    for limit in range(1, 8):
        taken = whole.limited(limit).images.flatten().tolist()
        assert len(set(taken)) == limit
        assert taken == sorted(taken)
    assert whole.limited(None) is whole
    assert whole.limited(8) is whole


def test_a_limit_is_for_training_alone(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=stack(), x_test=stack())
    assert len(source(tmp_path / "x.npz", limit=2)) == 2
    assert len(source(tmp_path / "x.npz", "test", limit=2)) == 6


def test_textures_have_both_splits_and_differ():
    train = open_source(DataConfig(source="textures", image_size=16, limit=50))
    test = open_source(DataConfig(source="textures", image_size=16, limit=50), "test")
    assert train.images.shape == (50, 3, 16, 16)
    assert train.classes == test.classes == CLASSES
    assert not torch.equal(train.images, test.images[:50])


# ---------------------------------------------------------------------------------------------------- data sets


class Pictures(Dataset):
    """As people write them: Pillow images and labels."""

    classes = ("round", "square")

    def __init__(self, targets=None) -> None:
        if targets is not None:
            self.targets = targets

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        return Image.fromarray(image(index)), index % 2


class Arrays(Dataset):
    """As torchvision holds small images: all of them in one array."""

    def __init__(self, data, targets) -> None:
        self.data, self.targets = data, targets

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        raise AssertionError("the array is at hand")


def test_a_dataset_of_pictures():
    found = from_dataset("mine", Pictures(targets=[0, 1, 0, 1]))
    assert len(found) == 4
    assert found.classes == ("round", "square")
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert all(torch.equal(found.fetch(i), channels_first(image(i))) for i in range(4))
    assert from_dataset("mine", Pictures(), Reading(1)).fetch(0).shape == (1, 12, 10)


def test_a_dataset_that_does_not_list_its_labels_has_those_of_its_items():
    assert from_dataset("mine", Pictures()).labels.tolist() == [0, 1, 0, 1]


def test_a_dataset_of_jpegs_that_are_not_loaded_yet():
    class Lazy(Pictures):
        def __getitem__(self, index):
            return Image.open(io.BytesIO(jpeg(photograph(160, 120)))), 0

    assert from_dataset("mine", Lazy()).fetch(0).shape == (3, 120, 160)
    assert from_dataset("mine", Lazy(), Reading(3, 30)).fetch(0).shape == (3, 30, 40)


def test_a_dataset_of_images_alone():
    class Bare(Pictures):
        def __getitem__(self, index):
            return Image.fromarray(image(index))

    assert torch.equal(from_dataset("mine", Bare()).fetch(3), channels_first(image(3)))


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_dataset_of_arrays(kind):
    found = from_dataset("mine", Arrays(kind(stack()), [3, 1, 2, 0, 1, 1]))
    assert torch.equal(found.images, torch.from_numpy(stack()).permute(0, 3, 1, 2))
    assert torch.equal(found.fetch(1), found.images[1])
    assert found.labels.tolist() == [3, 1, 2, 0, 1, 1]


def test_a_dataset_of_grey_arrays():
    assert from_dataset("mine", Arrays(torch.from_numpy(stack()[..., 0]), torch.arange(6))).images.shape == (6, 1, 9, 8)


def test_negative_labels_mean_none():
    assert from_dataset("mine", Arrays(stack(), [0, 1, -1, -1, 0, 1])).labels is None
    assert from_dataset("mine", Arrays(stack(), [[0], [1], [-1], [-1], [0], [1]])).labels is None


def test_of_several_labels_negative_ones_are_kept():
    labels = [[1, -1], [-1, 0], [-1, -1]] * 2
    assert from_dataset("mine", Arrays(stack(), labels)).labels.tolist() == labels


@pytest.mark.parametrize("kind", [Arrays, lambda data, targets: list(zip(data, targets, strict=True))])
def test_a_dataset_sorted_anew_has_its_labels_in_that_order(kind):
    order, labels = [5, 3, 0, 1, 4, 2], [0, 1, 2, 3, 4, 5]
    dataset = kind(stack(), labels)
    config = DataConfig(source=as_source(dataset))
    assert open_source(config).labels.tolist() == labels
    if isinstance(dataset, list):
        dataset[:] = [dataset[place] for place in order]
    else:
        dataset.data, dataset.targets = dataset.data[order], order
    assert open_source(config).labels.tolist() == order


def test_labels_of_items_are_read_once():
    read = []

    class Counted(Pictures):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    config = DataConfig(source=as_source(Counted()))
    opened = [dataset.open(config.source, "train", Reading(), config) for _ in range(3)]
    assert [found.labels.tolist() for found in opened] == [[0, 1, 0, 1]] * 3
    assert (read.count(1), read.count(3)) == (1, 1)


@pytest.fixture
def fake_cifar(tmp_path, monkeypatch):
    """Six images in the layout of CIFAR-10, which has the same files with ten thousand in each."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = stack(12, 32, 32).transpose(0, 3, 1, 2)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = pixels[2 * number : 2 * number + 2].reshape(2, -1)
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [number, number + 1]}))
    names = [f"class {i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    return tmp_path, torch.from_numpy(np.ascontiguousarray(pixels))


def test_cifar10_by_name(fake_cifar):
    root, pixels = fake_cifar
    train = open_source(DataConfig(source="cifar10", root=str(root)))
    test = open_source(DataConfig(source="cifar10", root=str(root)), "test")
    assert torch.equal(train.images, pixels[:10])
    assert torch.equal(test.images, pixels[10:])
    assert train.labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert train.classes == tuple(f"class {i}" for i in range(10))


@pytest.mark.parametrize("name", sorted(SETS))
def test_an_absent_data_set_says_how_to_get_it(name, tmp_path):
    line = error_of(name, name, str(tmp_path), root=str(tmp_path))
    assert ("data.download=true" in line) == (name != "imagenet")  # which cannot be fetched
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_fails_is_one_line(tmp_path, monkeypatch):
    import urllib.error
    import urllib.request

    def refuse(*_, **__):
        raise urllib.error.URLError("Network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    error_of("cifar10", "cifar10", root=str(tmp_path), download=True)


def test_a_root_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    error_of("cifar10", "cifar10", root=str(tmp_path / "file"))
    error_of("cifar10", "cifar10", root=str(tmp_path / "file"), download=True)


def test_a_class_that_is_missing_in_the_test_does_not_shift_the_others(tmp_path):
    for place in ("train/a", "train/b", "train/c", "val/a", "val/c"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(tmp_path / place / "0.png")
    config = DataConfig(source=str(tmp_path))
    assert open_source(config, "train").labels.tolist() == [0, 1, 2]
    assert open_source(config, "test").labels.tolist() == [0, 2]
    (tmp_path / "val" / "d").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "val" / "d" / "0.png")
    with pytest.raises(UserError, match="a class that has no training folder"):
        open_source(config, "test")


def test_a_class_may_be_called_train(tmp_path):
    for place in ("train", "car", "plane"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(tmp_path / place / "0.png")
    source = open_source(DataConfig(source=str(tmp_path)), "train")
    assert source.classes == ("car", "plane", "train")
    assert open_source(DataConfig(source=str(tmp_path)), "test") is None
