"""Whatever an image is given as, the network sees the same."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.images import as_images
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.runtime.errors import UserError


def noise(height=20, width=30, channels=3):
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.fixture(scope="module")
def backbone():
    return build_backbone(BackboneConfig(name="tico/resnet10-w2"), 16)


def test_every_form_of_an_image_is_the_same_image(backbone, tmp_path):
    array = noise()
    path = tmp_path / "a.png"
    Image.fromarray(array).save(path)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    expected = backbone.preprocess([tensor])
    assert expected.shape == (1, 3, 16, 16)
    for form in (array, tensor, array.transpose(2, 0, 1), torch.from_numpy(array), Image.open(path), path, str(path)):
        assert torch.equal(backbone.preprocess(form), expected)
        assert torch.equal(backbone.preprocess([form, form]), torch.cat([expected, expected]))
    assert torch.equal(backbone.preprocess((path, array)), torch.cat([expected, expected]))
    assert torch.equal(backbone.preprocess(tmp_path.glob("*.png")), expected)
    batches = (np.stack([array, array]), torch.stack([tensor, tensor]))
    assert torch.equal(backbone.preprocess(batches[0]), torch.cat([expected, expected]))
    torch.testing.assert_close(backbone.preprocess(batches[1]), torch.cat([expected, expected]), rtol=0, atol=0.05)


def test_orientation_and_transparency_are_as_in_files(backbone, tmp_path):
    image = Image.fromarray(noise(20, 30, 4), "RGBA")
    image.save(tmp_path / "a.png")
    assert torch.equal(backbone.preprocess(image), backbone.preprocess(tmp_path / "a.png"))
    turned = Image.fromarray(noise())
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "b.jpg", quality=100, exif=turned.getexif())
    opened = Image.open(tmp_path / "b.jpg")
    assert torch.equal(backbone.preprocess(opened), backbone.preprocess(tmp_path / "b.jpg"))
    assert as_images(opened, 3)[0].shape == (3, 30, 20)


def test_grey_images_have_their_value_in_every_channel(backbone):
    grey = noise(channels=1)
    expected = backbone.preprocess(np.stack([grey] * 3, axis=-1))
    for form in (grey, grey[..., None], torch.from_numpy(grey), torch.from_numpy(grey)[None], Image.fromarray(grey)):
        assert torch.equal(backbone.preprocess(form), expected)


def test_arrays_of_other_types_are_scaled_as_files_are(backbone):
    array = noise()
    for form in (array / 255, array.astype(np.uint16) * 257):
        assert torch.equal(backbone.preprocess(form), backbone.preprocess(array))


@pytest.mark.parametrize("size", [16, 20])
def test_a_tensor_with_a_gradient_is_the_same_image(backbone, size):
    tensor = torch.from_numpy(noise(size, size)).permute(2, 0, 1)[None]
    made = backbone.preprocess((tensor / 255).requires_grad_())
    torch.testing.assert_close(made, backbone.preprocess(tensor))
    assert not made.requires_grad


def test_arrays_of_black_and_white_are_black_and_white(backbone):
    mask = noise() > 100
    assert torch.equal(backbone.preprocess(mask), backbone.preprocess(mask.astype(np.uint8) * np.uint8(255)))


@pytest.mark.parametrize("form", [lambda wrong: wrong, lambda wrong: [wrong]])
@pytest.mark.parametrize(
    "wrong",
    [
        Image.new("RGB", (0, 0)),
        np.zeros((4, 4, 3), complex),
        np.array([[["a", None, 1]]], object),
        torch.zeros(3, 4, 4, dtype=torch.bool),
        torch.zeros(3, 4, 4, dtype=torch.complex64),
        torch.zeros(3, 4, 4).to_sparse(),
        torch.zeros(0, 3, 4, 4),
        torch.zeros(2, 3, 0, 4),
        torch.zeros(2, 3, 0, 4, dtype=torch.uint8),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_values_that_are_no_pixels_are_one_line(backbone, wrong, form):
    with pytest.raises(UserError):
        backbone.preprocess(form(wrong))


@pytest.mark.parametrize(
    "wrong", [3, None, {"a": 1}, np.zeros((4, 5, 7), np.uint8), torch.zeros(2), np.zeros((0, 5, 3))]
)
def test_what_is_no_image_is_one_line(backbone, wrong):
    with pytest.raises(UserError, match=r"an image is a path|channels are needed"):
        backbone.preprocess([wrong])


@pytest.mark.parametrize("batch", [False, True])
def test_tensors_of_other_types_are_the_same_image_or_one_line(backbone, batch):
    """Integers are bytes if they fit, floats are from 0 to 1; what was multiplied by 255 or normalised is refused."""
    pixels = torch.from_numpy(noise(16, 16)).permute(2, 0, 1)
    pixels = torch.stack([pixels, pixels]) if batch else pixels
    expected = backbone.preprocess(pixels)
    for same in (pixels.long(), (pixels.int() * 257).to(torch.uint16), pixels / 255, (pixels / 255).double()):
        torch.testing.assert_close(backbone.preprocess(same), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(backbone.preprocess((pixels / 255).bfloat16()), expected, rtol=0, atol=0.02)
    for wrong in (pixels.float(), expected, torch.full_like(expected, torch.nan)):
        with pytest.raises(UserError, match="floats from 0 to 1, or uint8"):
            backbone.preprocess(wrong if batch else wrong.view(3, 16, 16))


def test_deep_tensors_are_mapped_as_deep_arrays_are():
    deep = np.random.default_rng(0).integers(0, 4096, (16, 16, 1), np.uint16)
    limits = (300.0, 2_000.0)
    (expected,) = as_images(deep, 1, limits)
    tensor = torch.from_numpy(deep).permute(2, 0, 1)
    for same in (tensor, tensor.float(), tensor[None], tensor.int()):
        torch.testing.assert_close(as_images(same, 1, limits)[0], expected, rtol=0, atol=1)


def test_wide_integers_are_bytes_if_they_fit(backbone):
    array = noise()
    assert torch.equal(backbone.preprocess(array.astype(np.int64)), backbone.preprocess(array))


def test_a_missing_file_is_named(backbone, tmp_path):
    with pytest.raises(UserError, match=r"gone\.jpg"):
        backbone.preprocess(tmp_path / "gone.jpg")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3, 4]), st.booleans())
def test_shapes_are_kept(height, width, channels, first):
    array = np.zeros((height, width, channels), np.uint8)
    given = torch.from_numpy(array).permute(2, 0, 1) if first else array
    ambiguous = not first and height == channels and width != channels
    (found,) = as_images(given, channels)
    assert found.shape == (channels, height, width) or ambiguous
