"""Images of more than eight bits and of any number of channels: values as they are, one stated map to bytes, what is
found in a sample by closed forms, and a run that keeps what it found."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from test_png import encoded
from tico_ssl import load_backbone, pretrain
from tico_ssl.config.sections import DataConfig
from tico_ssl.data import depth
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.bad_files import BadFiles, survey
from tico_ssl.data.decoding import Reading, decode
from tico_ssl.data.depth import to_bytes
from tico_ssl.data.measuring import settled, statistics
from tico_ssl.data.sources import open_source, open_training
from tico_ssl.data.stored import open_stored
from tico_ssl.features.subjects import data_config
from tico_ssl.pipeline.packing import pack
from tico_ssl.runtime.errors import UserError
from tico_ssl.views import operations

RAMP = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)


def deep(height: int = 9, width: int = 7, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, (height, width, channels), dtype=np.uint16)


def pnm16(array: np.ndarray) -> bytes:
    height, width, channels = array.shape
    return b"P%d\n# drawn\n%d %d\n65535\n" % ({1: 5, 3: 6}[channels], width, height) + array.astype(">u2").tobytes()


def folder_of(root, arrays, suffix: str = ".npy"):
    root.mkdir(parents=True, exist_ok=True)
    for number, array in enumerate(arrays):
        np.save(root / f"{number:03d}{suffix}", array)
    return root


def opened(place, channels: int = 1, split="train", **options):
    return open_source(DataConfig(source=str(place), **options), split, channels)


# ------------------------------------------------------------------------------------------------ values as they are


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_sixteen_bits_of_a_png_survive(tmp_path, channels):
    array = deep(channels=channels)
    (tmp_path / "x.png").write_bytes(encoded(array))
    found = Reading(channels).decode(tmp_path / "x.png")
    assert np.array_equal(found.numpy(), array.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_of_a_pnm_survive(channels):
    array = deep(channels=channels)
    assert np.array_equal(Reading(channels).decode(pnm16(array)).numpy(), array.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
@pytest.mark.parametrize("options", [{}, {"compression": "zlib", "predictor": True}, {"tile": (16, 16)}])
def test_sixteen_bits_of_a_tiff_survive(tmp_path, channels, options):
    tifffile = pytest.importorskip("tifffile")
    array = deep(40, 24, channels)
    photometric = "rgb" if channels == 3 else "minisblack"
    written = array[..., 0] if channels == 1 else array
    layout = {} if channels == 1 else {"planarconfig": "contig"}
    tifffile.imwrite(tmp_path / "x.tif", written, photometric=photometric, **layout, **options)
    assert np.array_equal(Reading(channels).decode(tmp_path / "x.tif").numpy(), array.transpose(2, 0, 1))


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32, ">u2", np.float64])
def test_arrays_survive(tmp_path, kind):
    array = (deep(channels=2).astype(np.float64) - 1000).clip(0).astype(kind)
    np.save(tmp_path / "x.npy", array)
    assert np.array_equal(Reading(2).decode(tmp_path / "x.npy").numpy(), array.transpose(2, 0, 1))


def test_float_pictures_survive(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    Image.fromarray(values).save(tmp_path / "x.tiff")
    assert np.array_equal(Reading(1).decode(tmp_path / "x.tiff")[0].numpy(), values)


# ------------------------------------------------------------------------------------------------ the map to bytes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60_000), st.integers(1, 5_535), st.booleans())
def test_within_the_range_the_error_is_half_a_level(low, width, floats):
    values = torch.from_numpy(np.linspace(low, low + width, 997).reshape(1, 1, -1))
    values = values if floats else values.round().to(torch.int32).to(torch.uint16)
    found = to_bytes(values, (float(low), float(low + width)))
    back = low + found.double() * width / 255
    assert float((back - values.double()).abs().max()) <= (0.5 + 1e-4) * width / 255
    assert found.min() == 0
    assert found.max() == 255


def test_outside_the_range_values_are_clipped_and_channels_have_their_own():
    values = torch.tensor([[[-5.0, 0, 10, 99, float("nan")]], [[0, 100, 140, 200, float("inf")]]])
    found = to_bytes(values, ((0.0, 10.0), (100.0, 200.0)))
    assert found[:, 0].tolist() == [[0, 0, 255, 255, 0], [0, 0, 102, 255, 255]]


def test_bytes_are_never_touched():
    image = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    assert to_bytes(image, (0.0, 10.0)) is image


def test_a_given_range_is_for_deep_images_only(tmp_path):
    Image.fromarray(RAMP).save(tmp_path / "a.png")
    Image.fromarray(np.full((4, 4), 77, np.uint8)).save(tmp_path / "b.png")
    source = opened(tmp_path, range=[0, 65535])
    assert np.array_equal(source.fetch(0)[0].numpy(), np.rint(RAMP / 257))
    assert (source.fetch(1) == 77).all()
    assert source.scaling.line() == "16-bit images: 0 to 65,535 becomes 0 to 255 (data.range)"


@pytest.mark.parametrize("wrong", [[1], [3, 3], [2, 1], "all", [[0, 1], [2]], [0, float("inf")], [0, 10**400], []])
def test_a_range_that_is_none_is_one_line(wrong):
    from tico_ssl.config.recipe import load_recipe

    with pytest.raises(UserError, match=r"data\.range") as caught:
        load_recipe("demo", {"data.range": wrong})
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ what is found


def test_the_range_is_that_of_the_percentiles_and_is_said(tmp_path, capsys):
    """One value in 200 at either end is left out: 0 and 60,000 of 1,000 and of 2,000."""
    values = np.concatenate([[0] * 4, np.linspace(1000, 2000, 992).round(), [60_000] * 4]).astype(np.uint16)
    source = opened(folder_of(tmp_path / "x", [values.reshape(20, 50)] * 3))
    low, high = source.scaling.limits
    assert 1000 <= low <= 1003
    assert 1997 <= high <= 2000
    assert f"16-bit images: {low:,.0f} to {high:,.0f} becomes 0 to 255 (the percentiles" in capsys.readouterr().out
    assert source.fetch(0).unique().numel() == 256


def test_bands_have_ranges_of_their_own_and_colours_share_one(tmp_path):
    bands = np.stack([np.arange(100), 500 * np.arange(100)], axis=-1).astype(np.uint16).reshape(10, 10, 2)
    (first, second) = opened(folder_of(tmp_path / "bands", [bands] * 2), 2).scaling.limits
    assert (first, second) == ((0, 99), (0, 49500))
    grey = np.stack([bands[..., 0]] * 2 + [bands[..., 1]], axis=-1)
    assert len(opened(folder_of(tmp_path / "colours", [grey]), 3).scaling.limits) == 2


def test_photos_are_left_alone(tmp_path, capsys):
    for number in range(3):
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    source = opened(tmp_path, 3)
    assert source.scaling is None
    config = DataConfig(source=str(tmp_path))
    assert settled(config, source, 3) is config
    assert capsys.readouterr().out == ""


def test_the_test_split_has_the_range_of_the_training_split(tmp_path):
    folder_of(tmp_path / "train", [np.arange(100, dtype=np.uint16).reshape(10, 10)])
    folder_of(tmp_path / "test", [np.full((10, 10), 50, np.uint16) + np.eye(10, dtype=np.uint16)])
    assert opened(tmp_path, split="test").fetch(0).unique().tolist() == [round(255 * v / 99) for v in (50, 51)]


def test_mean_and_deviation_are_those_of_all_pixels():
    images = torch.tensor([[0, 255], [51, 204]], dtype=torch.uint8).view(2, 2, 1, 1).expand(2, 2, 4, 4)
    mean, std = statistics(from_arrays("x", images.contiguous(), None))
    assert mean == pytest.approx((0.1, 0.9))
    assert std == pytest.approx((0.1, 0.1))
    flat = from_arrays("x", torch.full((3, 1, 4, 4), 51, dtype=torch.uint8), None)
    assert statistics(flat) == ((0.2,), (pytest.approx(1 / 255, abs=1e-6),))


def test_arrays_of_one_size_are_mapped_too(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=deep(8, 8, 2)[None].repeat(3, 0), x_test=deep(8, 8, 2)[None] // 2)
    for split, array in (("train", deep(8, 8, 2)), ("test", deep(8, 8, 2) // 2)):
        source = opened(tmp_path / "x.npz", 2, split, range=[0, 65535])
        assert source.images.dtype == torch.uint8
        assert np.array_equal(source.images[0].numpy(), np.rint(array / 257).transpose(2, 0, 1))


# ------------------------------------------------------------------------------------------------ channels


def test_transparent_pngs_have_four_channels_if_asked_for(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert np.array_equal(opened(tmp_path, 4).fetch(0).numpy(), pixels.transpose(2, 0, 1))
    assert opened(tmp_path, 3).fetch(0).shape == (3, 5, 6)


def test_images_of_other_channels_are_said(tmp_path):
    for number in range(3):
        Image.new("RGB", (5, 5)).save(tmp_path / f"{number}.png")
    source = opened(tmp_path, 4)
    with pytest.raises(UserError, match=r"3 of 3 files .*has 3 channels, while backbone.channels is 4, as all of them"):
        survey(source, 0.05, BadFiles(), 1)


def test_deep_colours_become_grey_and_lie_on_white_like_shallow_ones(tmp_path):
    shallow = np.random.default_rng(0).integers(0, 256, (5, 6, 4), dtype=np.uint8)
    Image.fromarray(shallow).save(tmp_path / "shallow.png")
    (tmp_path / "deep.png").write_bytes(encoded(shallow.astype(np.uint16) * 257))
    for channels in (1, 3):
        difference = decode(tmp_path / "deep.png", channels).int() - decode(tmp_path / "shallow.png", channels).int()
        assert difference.abs().max() <= 1


# ------------------------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Two bands of 16 bits, the second with a hundredth of the values of the first."""
    draw = np.random.default_rng(0)
    scale = np.array([20_000, 200])
    arrays = [(scale * (1 + draw.random((20, 20, 2)))).astype(np.uint16) for _ in range(12)]
    return folder_of(tmp_path_factory.mktemp("scans") / "scans", arrays)


SETTINGS = {"data.limit": None, "training.batch_size": 4, "training.epochs": 1, "backbone.channels": 2}


@pytest.fixture(scope="module")
def run(scans, tmp_path_factory):
    from tiny import TINY

    out = tmp_path_factory.mktemp("runs") / "run"
    return pretrain("demo", data=scans, out=out, overrides=TINY | SETTINGS)


def test_a_run_keeps_what_it_found(run, scans, tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is written that was not meant to be
        data = yaml.safe_load(run.recipe_file.read_text())["data"]
    assert np.shape(data["range"]) == (2, 2)
    assert np.shape(data["mean"]) == np.shape(data["std"]) == (2,)
    log = (run.folder / "train.log").read_text()
    assert "16-bit images: channel by channel" in log
    assert "channels have mean" in log
    assert data["mean"] == pytest.approx(statistics(open_training(DataConfig(source=str(scans)), 2))[0])
    pretrain("demo", data=scans, out=run.folder, overrides=tiny | SETTINGS, resume=True)
    with pytest.raises(UserError, match=r"data\.range"):
        given = {"data.range": [0, 1]}
        pretrain("demo", data=scans, out=run.folder, overrides=tiny | SETTINGS | given, resume=True)


def test_a_backbone_knows_the_range_of_its_images(run, scans, tmp_path):
    """Whatever a single file would suggest: a dark one stays dark."""
    backbone, recipe = load_backbone(run.folder), run.recipe()
    assert backbone.limits == recipe.data.range
    dark = np.full((20, 20, 2), [20_000, 200], np.uint16)
    np.save(tmp_path / "dark.npy", dark)
    found = [backbone.preprocess(tmp_path / "dark.npy"), backbone.preprocess(dark)]
    levels = to_bytes(torch.from_numpy(dark.transpose(2, 0, 1)), recipe.data.range)
    size = recipe.data.image_size
    expected = operations.normalise(levels[None, :, :size, :size].float() / 255, recipe.data.mean, recipe.data.std)
    for one in found:
        assert torch.allclose(one, expected, atol=1e-5)
    alone = data_config(run.backbone_file, scans, backbone)
    assert (alone.range, alone.mean) == (recipe.data.range, recipe.data.mean)


def test_stored_streamed_and_packed_images_are_the_same_bits(scans, tmp_path):
    config = DataConfig(source=str(scans), store="memory")
    streamed, stored = open_training(config, 2), open_stored(config, "train", 2, None)
    pack(streamed, tmp_path / "x.tico", 20)
    packed = opened(tmp_path / "x.tico", 2)
    for i in range(len(streamed)):
        for other in (stored.fetch(i), stored.fetch(i), packed.fetch(i)):
            assert torch.equal(streamed.fetch(i), other)


def test_another_range_is_another_image(scans):
    """In caches, that is."""
    one, same, other = (opened(scans, 2, range=[0, high]) for high in (100, 100, 200))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_the_map_without_a_range_takes_little_memory(monkeypatch):
    array = np.random.default_rng(0).integers(0, 65536, (20, 30_000, 3), dtype=np.uint16)
    expected = (array * (255 / 65535)).round().astype(np.uint8)
    monkeypatch.setattr(depth, "PIECE", 1 << 12)
    tracemalloc.start()
    try:
        made = depth.eight_bits(array)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * array.size  # the bytes, and a little for the floats
    finally:
        tracemalloc.stop()
    assert np.array_equal(made, expected)
