"""Views: a pure function of images and uniform numbers, with the distributions that the policy states."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tico_ssl.config.section import validate
from tico_ssl.config.views import ViewPolicy
from tico_ssl.data.sources import Source
from tico_ssl.pipeline.sheet import CELL, COLUMNS, GAP, PIECE_GAP, preview, save_contact_sheet
from tico_ssl.runtime.errors import UserError
from tico_ssl.views import operations
from tico_ssl.views.centre import centre_crop
from tico_ssl.views.executor import Views
from tico_ssl.views.geometry import Boxes
from tico_ssl.views.operations import blur_kernel
from tico_ssl.views.table import OPERATIONS, PLACE

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter": 0.0, "greyscale": 0.0}
DRAWS = PLACE.width + sum(operation.width for operation in OPERATIONS)
EVERYTHING = {"flip": 0.5, "jitter": 0.8, "greyscale": 0.2, "blur": 0.5, "solarise": 0.5}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 6, size: int = 24, channels: int = 3, width: int | None = None) -> Tensor:
    shape = (count, channels, size, width or size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(1))


def views_of(*policies: dict, size: int = 16, mean=(0.0,) * 3, std=(1.0,) * 3) -> Views:
    return Views([ViewPolicy(**policy) for policy in policies], size, mean, std)


def sample_boxes(policy: ViewPolicy, count: int, height: int, width: int) -> tuple[Tensor, ...]:
    u = torch.rand(5, count, generator=generator())[:4].double().T.unsqueeze(1)
    return Boxes([policy])(u, u[..., :0], torch.tensor([[height, width]]))[:, 0].unbind(dim=1)


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    """Kolmogorov and Smirnov's distance of 20,000 values: beyond 2.4 / sqrt(n) once in 50,000 times."""
    assert values.min() >= low - 1e-2 * (high - low)
    assert values.max() <= high + 1e-2 * (high - low)
    ranked = ((values.sort().values - low) / (high - low)).double()
    expected = (torch.arange(len(ranked), dtype=torch.float64) + 0.5) / len(ranked)
    assert (ranked - expected).abs().max() < 2.4 / math.sqrt(len(ranked))


def assert_frequency(hits: int, trials: int, probability: float) -> None:
    """Within four standard deviations."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    assert abs(hits - trials * probability) <= 4 * deviation


# ---------------------------------------------------------------------------------------------------- executor


def test_the_same_uniforms_give_the_same_views():
    views = views_of(EVERYTHING, EVERYTHING | {"blur": 1.0})
    uniforms = views.draw(6, generator(3))
    assert uniforms.shape == (6, 2, DRAWS)
    assert torch.equal(uniforms, views.draw(6, generator(3)))
    torch.manual_seed(0)
    first = views(pictures(), uniforms)
    torch.manual_seed(1)  # nothing else is random
    second = views(pictures(), uniforms)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_other_uniforms_give_other_views():
    views = views_of(EVERYTHING)
    one, two = (views(pictures(), views.draw(6, generator(seed)))[0] for seed in (3, 4))
    assert all(not torch.equal(a, b) for a, b in zip(one, two))


def test_two_views_of_one_policy_differ():
    views = views_of(EVERYTHING, EVERYTHING)
    one, two = views(pictures(), views.draw(6, generator()))
    assert all(not torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("piece", [slice(0, 1), slice(2, 5), slice(3, 6)])
@pytest.mark.parametrize("ragged", [False, True])
def test_views_of_an_image_do_not_depend_on_the_rest_of_the_batch(piece, ragged):
    views = views_of(EVERYTHING, EVERYTHING | {"blur": 1.0, "solarise": 0.0}, size=32)
    images = [image[:, : 12 + 2 * i] for i, image in enumerate(pictures())] if ragged else pictures()
    uniforms = views.draw(6, generator(5))
    whole, part = views(images, uniforms), views(images[piece], uniforms[piece])
    for all_of_them, some in zip(whole, part, strict=True):
        torch.testing.assert_close(some, all_of_them[piece], rtol=0, atol=1e-6)


def test_a_sequence_of_images_is_as_good_as_a_batch():
    views = views_of(EVERYTHING, EVERYTHING)
    uniforms = views.draw(6, generator(6))
    for batch, sequence in zip(views(pictures(), uniforms), views(list(pictures()), uniforms), strict=True):
        torch.testing.assert_close(batch, sequence, rtol=0, atol=1e-6)


def test_images_of_different_sizes():
    views = views_of(EVERYTHING, EVERYTHING)
    images = [pictures(1, height, width=width)[0] for height, width in [(8, 30), (64, 9), (1, 1), (17, 17)]]
    for view in views(images, views.draw(4, generator())):
        assert view.shape == (4, 3, 16, 16)
        assert view.isfinite().all()


def test_count_and_size_make_multi_crop():
    views = views_of({}, {}, {"count": 6, "size": 8, "crop_scale": (0.05, 0.14)})
    made = views(pictures(), views.draw(6, generator()))
    assert [tuple(view.shape) for view in made] == [(6, 3, 16, 16)] * 2 + [(6, 3, 8, 8)] * 6
    assert all(not torch.equal(made[2], other) for other in made[3:])


def test_with_nothing_switched_on_a_view_is_the_normalised_image():
    views = views_of(PLAIN, size=24, mean=MEAN, std=STD)
    images = pictures()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    (view,) = views(images, views.draw(6, generator()))
    torch.testing.assert_close(view, (images / 255 - mean) / std, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"flip": 1.0}, lambda x: x.flip(-1)),
        ({"greyscale": 1.0}, lambda x: operations.greyscale(x, torch.ones(len(x), dtype=torch.bool))),
        ({"solarise": 1.0}, lambda x: torch.where(x >= 0.5, 1 - x, x)),
        (
            {"blur": 1.0, "blur_sigma": (1.5, 1.5)},
            lambda x: operations.gaussian_blur(x, torch.full((len(x),), 1.5), torch.ones(len(x), dtype=torch.bool), 3),
        ),
        ({"jitter": 1.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}, lambda x: x),
    ],
)
def test_probability_one_means_always(change, expected):
    views = views_of(PLAIN | change, size=24)
    images = pictures(50)
    (view,) = views(images, views.draw(50, generator()))
    torch.testing.assert_close(view, expected(images / 255), rtol=0, atol=1e-5)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
def test_probability_zero_and_one_hold_for_the_extreme_uniforms(extreme):
    never, always = (
        views_of(PLAIN, size=24),
        views_of(PLAIN | {"flip": 1.0, "solarise": 1.0, "greyscale": 1.0}, size=24),
    )
    uniforms = torch.full((6, 1, DRAWS), extreme)
    images = pictures()
    torch.testing.assert_close(never(images, uniforms)[0], images / 255, rtol=0, atol=1e-5)
    (view,) = always(images, uniforms)
    grey = operations.greyscale((images / 255).flip(-1), torch.ones(6, dtype=torch.bool))
    torch.testing.assert_close(view, torch.where(grey >= 0.5, 1 - grey, grey), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["flip", "greyscale", "solarise", "blur", "jitter"])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_frequencies(name, probability):
    count, size = 2000, 20 if name == "blur" else 4  # the smallest view that blur changes
    views = views_of(PLAIN | {name: probability, "blur_sigma": (1.0, 2.0)}, size=size)
    images = pictures(1, size).expand(count, -1, -1, -1)
    (view,) = views(images, views.draw(count, generator(8)))
    changed = (view - images / 255).abs().amax(dim=(1, 2, 3)) > 1e-3
    assert_frequency(int(changed.sum()), count, probability)


def test_operations_are_drawn_independently():
    """The share of images that are both mirrored and solarised is the product of the two."""
    count = 4000
    views = views_of(PLAIN | {"flip": 0.5, "solarise": 0.5}, size=2)
    image = torch.tensor([[[200, 10], [10, 10]]] * 3, dtype=torch.uint8)
    (view,) = views(image.expand(count, -1, -1, -1), views.draw(count, generator()))
    mirrored = view[:, 0, 0, 0] < view[:, 0, 0, 1]
    solarised = view[:, 0, 0].amax(dim=1) < 0.5
    assert_frequency(int(solarised.sum()), count, 0.5)
    assert_frequency(int((mirrored & solarised).sum()), count, 0.25)


def test_brightness_is_uniform_in_its_range():
    count = 20_000
    policy = PLAIN | {"jitter": 1.0, "brightness": 0.4, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    views = views_of(policy, size=1)
    grey = torch.full((count, 3, 1, 1), 100, dtype=torch.uint8)
    (view,) = views(grey, views.draw(count, generator()))
    assert_uniform(view[:, 0, 0, 0] * 255 / 100, 0.6, 1.4)


def test_a_strength_above_one_never_turns_brightness_negative():
    policy = PLAIN | {"jitter": 1.0, "brightness": 1.5, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    views = views_of(policy, size=1)
    (view,) = views(torch.full((500, 3, 1, 1), 50, dtype=torch.uint8), views.draw(500, generator()))
    assert view.min() >= 0
    assert view.max() <= 2.5 * 50 / 255 + 1e-5
    assert_frequency(int((view[:, 0, 0, 0] < 50 / 255).sum()), 500, 0.4)


def test_hue_shifts_stay_within_their_range():
    count = 500
    policy = PLAIN | {"jitter": 1.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.1}
    views = views_of(policy, size=1)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1).expand(count, -1, -1, -1)
    (view,) = views(red, views.draw(count, generator()))
    assert (view[:, 0] > 0.999).all()  # within a sixth of the circle red stays the largest
    green, blue = view[:, 1, 0, 0], view[:, 2, 0, 0]
    assert torch.maximum(green, blue).max() <= 0.6 + 1e-5
    assert (torch.minimum(green, blue) < 1e-5).all()
    assert_frequency(int((green > blue).sum()), count, 0.5)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_colours_are_left_alone_where_there_are_not_three(channels):
    policy = {"jitter": 1.0, "greyscale": 1.0, "crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0}
    views = views_of(policy, size=24, mean=(0.0,) * channels, std=(1.0,) * channels)
    images = pictures(channels=channels)
    (view,) = views(images, views.draw(6, generator()))
    torch.testing.assert_close(view, images / 255, rtol=0, atol=1e-5)


def test_blur_and_solarise_work_on_any_number_of_channels():
    views = views_of(PLAIN | {"blur": 1.0, "solarise": 1.0}, size=24, mean=(0.5,), std=(0.5,))
    images = pictures(channels=1)
    (view,) = views(images, views.draw(6, generator()))
    assert view.shape == (6, 1, 24, 24)
    assert view.max() <= 1e-6  # solarised: nothing above one half


@pytest.mark.parametrize(("size", "kernel"), [(224, 23), (32, 3), (96, 9), (128, 13), (64, 7), (16, 1)])
def test_the_blur_kernel_is_a_tenth_of_the_view(size, kernel):
    assert blur_kernel(size) == kernel


@pytest.mark.parametrize("size", [1, 2, 7, 19, 20, 33, 225])
def test_every_size_can_be_blurred(size):
    views = views_of({"blur": 1.0}, size=size)
    (view,) = views(pictures(2), views.draw(2, generator()))
    assert view.shape == (2, 3, size, size)
    assert view.isfinite().all()


# ---------------------------------------------------------------------------------------------------- crops


@pytest.mark.parametrize("scale", [(0.08, 0.5), (0.3, 0.6)])
def test_the_share_of_the_area_is_uniform(scale):
    """On a square image and below 3/4 of its area no crop is clipped."""
    _, _, height, width = sample_boxes(ViewPolicy(crop_scale=scale), 20_000, 4000, 4000)
    assert_uniform(height * width / 4000**2, *scale)


def test_the_aspect_ratio_is_uniform_in_its_logarithm():
    _, _, height, width = sample_boxes(ViewPolicy(crop_scale=(0.1, 0.5)), 20_000, 4000, 4000)
    assert_uniform((width / height).log(), math.log(3 / 4), math.log(4 / 3))


def test_the_place_is_uniform():
    top, left, height, width = sample_boxes(ViewPolicy(crop_scale=(0.1, 0.5)), 20_000, 4000, 5000)
    assert_uniform(top / (4000 - height), 0, 1)
    assert_uniform(left / (5000 - width), 0, 1)


def test_area_ratio_and_place_are_independent():
    top, left, height, width = sample_boxes(ViewPolicy(crop_scale=(0.1, 0.5)), 20_000, 4000, 4000)
    rows = torch.stack([height * width, width / height, top / (4000 - height), left / (4000 - width)])
    correlation = torch.corrcoef(rows) - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < 4 / math.sqrt(20_000)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 200), (200, 3), (32, 32), (375, 500)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (1.0, 1.0), (1e-4, 1e-4)])
def test_crops_are_whole_pixels_inside_the_image(height, width, scale):
    boxes = sample_boxes(ViewPolicy(crop_scale=scale, crop_ratio=(0.2, 5.0)), 2000, height, width)
    top, left, rows, columns = boxes
    assert all(torch.equal(values, values.round()) for values in boxes)
    assert (rows >= 1).all()
    assert (columns >= 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + rows <= height).all()
    assert (left + columns <= width).all()


@pytest.mark.parametrize("side", [1, 2, 3, 31, 224, 1000, 1024, 4097])
def test_the_largest_uniform_stays_inside(side):
    largest = 1 - 2**-24
    for first in (0.0, 0.5, largest):
        u = torch.tensor([[first, 0.5, largest, largest]])
        top, left, height, width = Boxes([ViewPolicy()])(u, u[..., :0], torch.tensor([side, side]))[0]
        assert top + height <= side
        assert left + width <= side


def test_every_place_is_reached():
    """A crop of 3 of 5 pixels begins at 0, 1 and 2, each a third of the time."""
    policy = ViewPolicy(crop_scale=(0.36, 0.36), crop_ratio=(1.0, 1.0))
    top, _, height, _ = sample_boxes(policy, 3000, 5, 5)
    assert (height == 3).all()
    for start in (0, 1, 2):
        assert_frequency(int((top == start).sum()), 3000, 1 / 3)


def test_the_whole_image_is_kept_when_the_policy_says_so():
    top, left, height, width = sample_boxes(ViewPolicy(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0)), 10, 30, 30)
    assert (top == 0).all()
    assert (left == 0).all()
    assert (height == 30).all()
    assert (width == 30).all()


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"crop_scale": [0.5, 0.1]}, "crop_scale"),
        ({"crop_scale": [0.0, 1.0]}, "crop_scale"),
        ({"crop_scale": [0.1, 1.1]}, "crop_scale"),
        ({"crop_scale": [0.1]}, "crop_scale"),
        ({"crop_scale": 0.5}, "crop_scale"),
        ({"crop_scale": ["a", 1.0]}, "crop_scale"),
        ({"crop_ratio": [2.0, 1.0]}, "crop_ratio"),
        ({"crop_sampling": "clip"}, "crop_sampling"),
        ({"interpolation": "nearest"}, "interpolation"),
        ({"blur_kernel": 3}, "blur_kernel"),
        ({"crop_ratio": [-1.0, 1.0]}, "crop_ratio"),
        ({"blur_sigma": [0.0, 1.0]}, "blur_sigma"),
        ({"blur_sigma": [2.0, 1.0]}, "blur_sigma"),
        ({"flip": 1.5}, "flip"),
        ({"flip": -0.1}, "flip"),
        ({"flip": True}, "flip"),
        ({"hue": 0.6}, "hue"),
        ({"brightness": -1.0}, "brightness"),
        ({"count": 0}, "count"),
        ({"count": 1.5}, "count"),
        ({"size": 0}, "size"),
        ({"sise": 8}, "size"),
        ({"relative_size": 0.0}, "relative_size"),
        ({"relative_size": 96}, "relative_size"),
        ({"size": 96, "relative_size": 0.5}, "relative_size"),
        ({"jigsaw": -1}, "jigsaw"),
        ({"jigsaw": 3.0}, "jigsaw"),
        ({"jigsaw": 9}, "jigsaw"),
        ({"greyscale_first": 1}, "greyscale_first"),
    ],
)
def test_bad_values_are_one_line(values, expected):
    with pytest.raises(UserError) as caught:
        validate(ViewPolicy, values, "here")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- centre and sheet


def test_a_batch_of_the_right_size_is_kept_whole():
    images = pictures(size=16)
    assert torch.equal(centre_crop(images, 16), images / 255)


def test_the_centre_is_seven_eighths_of_the_shorter_side():
    """A frame of one sixteenth of the shorter side is cut off; the long side loses what is beyond the square."""
    image = torch.zeros(3, 64, 96, dtype=torch.uint8)
    image[:, 4:60, 20:76] = 255
    assert torch.equal(centre_crop([image], 28), torch.ones(1, 3, 28, 28))
    image[:, 4] = 0
    assert centre_crop([image], 28)[0, :, 0].max() < 1


def test_the_centre_crop_of_a_batch_is_that_of_its_images():
    images = pictures(size=40, width=30)
    expected = torch.cat([centre_crop(image[None], 16) for image in images])
    torch.testing.assert_close(centre_crop(images, 16), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(centre_crop(list(images), 16), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (3, 2)])
def test_tiny_images_have_a_centre(shape):
    cropped = centre_crop([torch.full((3, *shape), 51, dtype=torch.uint8)], 16)
    torch.testing.assert_close(cropped, torch.full((1, 3, 16, 16), 0.2), rtol=0, atol=1e-5)


def sheet_of(path, views: Views, images: Tensor | list[Tensor]) -> np.ndarray:
    save_contact_sheet(path, images, views(images, views.draw(len(images), generator())), views)
    with Image.open(path) as sheet:
        assert sheet.mode == "RGB"
        return np.asarray(sheet).astype(int)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 3), (40, COLUMNS)])
def test_the_contact_sheet_has_a_row_per_view(tmp_path, count, columns, channels):
    """Small views take less height; the originals stand a little apart."""
    views = views_of({}, {"jigsaw": 3}, {"size": 8}, mean=(0.5,) * channels, std=(0.5,) * channels)
    pixels = sheet_of(tmp_path / "views.png", views, pictures(count, channels=channels))
    height = CELL + 2 * GAP + CELL + GAP + CELL + GAP + CELL // 2
    assert pixels.shape == (height, columns * (CELL + GAP) - GAP, 3)
    if channels < 3:
        assert (pixels == pixels[..., :1]).all()


def test_the_contact_sheet_shows_the_pixels_of_the_views(tmp_path):
    """Normalisation is undone: a view of an even colour has that colour on the sheet, and paper lies between."""
    views = views_of(PLAIN, PLAIN | {"jigsaw": 2}, mean=MEAN, std=STD)
    colour = torch.tensor([200, 100, 50], dtype=torch.uint8).view(3, 1, 1)
    pixels = sheet_of(tmp_path / "v.png", views, [colour.expand(3, 20, 40), colour.expand(3, 9, 9)])
    is_colour = np.abs(pixels - [200, 100, 50]).max(axis=2) <= 1
    assert (is_colour | (pixels == 255).all(axis=2)).all()
    left, right = is_colour[:, :CELL], is_colour[:, CELL + GAP :]
    assert not is_colour[:, CELL : CELL + GAP].any()
    assert left[CELL // 4 : 3 * CELL // 4].all()  # an image twice as wide as high, whole
    assert not left[: CELL // 4].any()
    assert right[:CELL].all()
    start = CELL + 2 * GAP
    assert is_colour[start : start + CELL, :CELL].all()
    mosaic = left[start + CELL + GAP :]
    assert mosaic.sum() == 4 * ((CELL - PIECE_GAP) // 2) ** 2
    assert not mosaic[CELL // 2].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (7, 500)])
def test_the_contact_sheet_takes_images_of_any_shape(tmp_path, shape):
    images = [torch.zeros(3, *shape, dtype=torch.uint8), *pictures(2)]
    pixels = sheet_of(tmp_path / "v.png", views_of({}, {}), images)
    assert pixels.shape[1] == 3 * (CELL + GAP) - GAP
    assert (pixels[:CELL, :CELL] == 0).any()


@pytest.mark.parametrize(("images", "shown"), [(100, 4), (3, 3)])
def test_a_preview_shows_evenly_spaced_images(tmp_path, images, shown):
    values = torch.arange(images, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 10, 10)
    source = Source("even", images, values.__getitem__)
    preview(source, views_of(PLAIN, PLAIN, size=10), tmp_path / "v.png", count=4)
    with Image.open(tmp_path / "v.png") as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape[1] == shown * (CELL + GAP) - GAP
    expected = [0, 25, 50, 75] if images == 100 else [0, 1, 2]
    assert pixels[CELL // 2, CELL // 2 :: CELL + GAP, 0].tolist() == expected


def test_a_preview_is_a_function_of_its_seed(tmp_path):
    images = pictures()
    source, views = Source("same", len(images), images.__getitem__), views_of({}, {"jigsaw": 3})
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        preview(source, views, tmp_path / f"{name}.png", seed=seed)
    first, again, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == again
    assert first != other
