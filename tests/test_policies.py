"""Policies: what comes with the package is what the papers and their code say, and what only some policies do."""

import math
from importlib import resources
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.views import ViewPolicy, named_policy, packaged_policies, shorter_side
from tico_ssl.runtime.errors import UserError
from tico_ssl.views import operations
from tico_ssl.views.executor import Views
from tico_ssl.views.geometry import cut_jigsaw, piece_side
from tico_ssl.views.table import JIGSAW, OPERATIONS, left_out

PLAIN = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter": 0.0, "greyscale": 0.0}


class Row(NamedTuple):
    """One view of a table: strengths are brightness, contrast, saturation and hue."""

    crop: tuple[float, float]
    jitter: float
    strengths: tuple[float, float, float, float] | None
    greyscale: float
    blur: float
    solarise: float
    more: dict[str, Any] = {}  # noqa: RUF012


BYOL, SIMCLR, MOCO = (0.4, 0.4, 0.2, 0.1), (0.8, 0.8, 0.8, 0.2), (0.4, 0.4, 0.4, 0.1)
ALL, TWICE = (0.08, 1.0), {"count": 2}
BY_BYOL, BY_SIMCLR = ("clipped", "bicubic", "tenth"), ("distorted", "bicubic", "tenth")
BY_TORCHVISION, BY_SOLO_LEARN = ("rejection", "bilinear", "full"), ("rejection", "bicubic", "full")
PIXELS = {  # how crops are drawn and resized, and the kernel of the blur, if there is any
    "byol": BY_BYOL,
    "byol-small": BY_BYOL,
    "asymmetric-small": BY_SOLO_LEARN,
    "symmetric-small": BY_SOLO_LEARN,
    "simclr": BY_SIMCLR,
    "simclr-small": BY_SIMCLR,
    "lightly-small": BY_TORCHVISION,
    "moco-v1": BY_TORCHVISION,
    "moco-v1-small": BY_TORCHVISION,
    "moco-v2": BY_TORCHVISION,
    "moco-small": BY_SOLO_LEARN,
    "swav": BY_TORCHVISION,
    "swav-2x224": BY_TORCHVISION,
    "swav-small": BY_SOLO_LEARN,
    "barlow-twins": BY_SOLO_LEARN,
    "vicreg": BY_SOLO_LEARN,
    "vicreg-small": BY_SOLO_LEARN,
    "pirl": BY_TORCHVISION,
    "supervised": BY_TORCHVISION,
    "ablation-baseline": BY_BYOL,
    "ablation-no-greyscale": BY_BYOL,
    "ablation-no-colour": BY_BYOL,
    "ablation-crop-blur": BY_BYOL,
    "ablation-crop": BY_BYOL,
}
TABLE = {
    "byol": [Row(ALL, 0.8, BYOL, 0.2, 1.0, 0.0), Row(ALL, 0.8, BYOL, 0.2, 0.1, 0.2)],
    "byol-small": [Row(ALL, 0.8, BYOL, 0.2, 0.0, 0.0), Row(ALL, 0.8, BYOL, 0.2, 0.0, 0.2)],
    "asymmetric-small": [Row(ALL, 0.8, BYOL, 0.2, 0.0, 0.0), Row(ALL, 0.8, BYOL, 0.2, 0.0, 0.2)],
    "symmetric-small": [Row(ALL, 0.8, SIMCLR, 0.2, 0.5, 0.0, TWICE)],
    "barlow-twins": [Row(ALL, 0.8, BYOL, 0.2, 1.0, 0.0), Row(ALL, 0.8, BYOL, 0.2, 0.1, 0.2)],
    "simclr": [Row(ALL, 0.8, SIMCLR, 0.2, 0.5, 0.0, TWICE)],
    "lightly-small": [Row(ALL, 0.8, MOCO, 0.2, 0.0, 0.0, TWICE)],
    "simclr-small": [Row(ALL, 0.8, MOCO, 0.2, 0.0, 0.0, TWICE)],
    "moco-v1": [Row((0.2, 1.0), 1.0, (0.4, 0.4, 0.4, 0.4), 0.2, 0.0, 0.0, TWICE | {"greyscale_first": True})],
    "moco-v1-small": [Row(ALL, 0.8, MOCO, 0.2, 0.0, 0.0, TWICE)],
    "moco-v2": [Row((0.2, 1.0), 0.8, MOCO, 0.2, 0.5, 0.0, TWICE)],
    "moco-small": [Row(ALL, 0.8, MOCO, 0.2, 0.5, 0.0, TWICE)],
    "swav": [
        Row((0.14, 1.0), 0.8, SIMCLR, 0.2, 0.5, 0.0, TWICE),
        Row((0.05, 0.14), 0.8, SIMCLR, 0.2, 0.5, 0.0, {"count": 6, "relative_size": 0.428571}),
    ],
    "swav-small": [
        Row((0.2, 1.0), 0.8, (0.6, 0.6, 0.6, 0.2), 0.2, 0.0, 0.0),
        Row((0.2, 1.0), 0.8, (0.6, 0.6, 0.6, 0.2), 0.2, 0.0, 0.2),
        Row((0.08, 0.5), 0.8, SIMCLR, 0.2, 0.1, 0.1, {"count": 6, "relative_size": 0.5625}),
    ],
    "swav-2x224": [Row(ALL, 0.8, SIMCLR, 0.2, 0.5, 0.0, TWICE)],
    "vicreg": [Row(ALL, 0.8, BYOL, 0.2, 0.5, 0.1, TWICE)],
    "vicreg-small": [Row((0.2, 1.0), 0.8, BYOL, 0.2, 0.0, 0.1, TWICE)],
    "pirl": [
        Row(ALL, 1.0, (0.4, 0.4, 0.4, 0.2), 0.2, 0.0, 0.0),
        Row((0.6, 1.0), 1.0, (0.4, 0.4, 0.4, 0.2), 0.2, 0.0, 0.0, {"relative_size": 1.138393, "jigsaw": 3}),
    ],
    "supervised": [Row(ALL, 0.0, None, 0.0, 0.0, 0.0)],
    "ablation-baseline": [Row(ALL, 0.8, BYOL, 0.2, 1.0, 0.0), Row(ALL, 0.8, BYOL, 0.2, 0.1, 0.2)],
    "ablation-no-greyscale": [Row(ALL, 0.8, BYOL, 0.0, 1.0, 0.0), Row(ALL, 0.8, BYOL, 0.0, 0.1, 0.2)],
    "ablation-no-colour": [Row(ALL, 0.0, None, 0.0, 1.0, 0.0), Row(ALL, 0.0, None, 0.0, 0.1, 0.2)],
    "ablation-crop-blur": [Row(ALL, 0.0, None, 0.0, 1.0, 0.0), Row(ALL, 0.0, None, 0.0, 0.1, 0.0)],
    "ablation-crop": [Row(ALL, 0.0, None, 0.0, 0.0, 0.0, TWICE)],
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 6, size: int = 24, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator(1))


def views_of(*policies: dict, size: int = 16, channels: int = 3) -> Views:
    return Views([ViewPolicy(**policy) for policy in policies], size, (0.0,) * channels, (1.0,) * channels)


def packaged(name: str) -> list[ViewPolicy]:
    return [ViewPolicy.model_validate(view) for view in named_policy(name)]


def assert_even(values: Tensor, kinds: int) -> None:
    """Whole numbers below `kinds`, each as often as the others within four and a half standard deviations."""
    counts = torch.bincount(values.flatten(), minlength=kinds).double()
    assert len(counts) == kinds
    share = 1 / kinds
    assert (counts - values.numel() * share).abs().max() <= 4.5 * math.sqrt(values.numel() * share * (1 - share))


# ---------------------------------------------------------------------------------------------------- the tables


def test_the_tables_are_complete():
    assert set(TABLE) == set(PIXELS) == set(packaged_policies())


@pytest.mark.parametrize("name", TABLE)
def test_a_packaged_policy_is_what_its_source_says(name):
    for view, row in zip(packaged(name), TABLE[name], strict=True):
        assert view.crop_scale == row.crop
        if row.strengths is not None:
            assert (view.brightness, view.contrast, view.saturation, view.hue) == row.strengths
        assert (view.jitter, view.greyscale, view.blur, view.solarise) == (
            (row.jitter, row.greyscale, row.blur, row.solarise)
        )
        sampling, interpolation, kernel = PIXELS[name]
        assert (view.crop_sampling, view.interpolation) == (sampling, interpolation)
        assert view.blur == 0 or view.blur_kernel == kernel
        assert (view.flip, view.crop_ratio, view.blur_sigma) == (0.5, (3 / 4, 4 / 3), (0.1, 2.0))
        special = ("count", "size", "relative_size", "jigsaw", "greyscale_first")
        expected = {key: ViewPolicy.model_fields[key].default for key in special} | row.more
        assert {key: getattr(view, key) for key in special} == expected


@pytest.mark.parametrize("name", TABLE)
def test_a_packaged_policy_names_its_source_and_spells_out_its_operations(name):
    text = (resources.files("tico_ssl") / "recipes" / "views" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    for view in named_policy(name):
        chosen = {"crop_scale", "crop_sampling", "interpolation", "flip", "jitter", "greyscale", "blur", "solarise"}
        assert chosen | ({"blur_kernel"} if view["blur"] > 0 else set()) <= set(view)


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"supervised"}))
def test_a_recipe_names_its_policy(name):
    recipe = load_recipe("demo", {"views": name} | ({"method": "pirl"} if name == "pirl" else {}))
    assert recipe.views == packaged(name)
    views = Views(recipe.views, recipe.data.image_size, recipe.data.mean, recipe.data.std)
    made = views(pictures(2), views.draw(2, generator()))
    assert len(made) == sum(row.more.get("count", 1) for row in TABLE[name])
    assert all(view.isfinite().all() and len(view) == 2 for view in made)


def test_supervised_training_has_one_view():
    views = Views(packaged("supervised"), 16, (0.0,) * 3, (1.0,) * 3)
    (view,) = views(pictures(), views.draw(6, generator()))
    assert view.shape == (6, 3, 16, 16)
    with pytest.raises(UserError, match="needs 2 views"):
        load_recipe("demo", {"views": "supervised"})


def test_the_ablation_begins_with_byol():
    assert packaged("ablation-baseline") == packaged("byol")


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(UserError, match=r"'byoll'.*did you mean 'byol'"):
        named_policy("byoll")


# ---------------------------------------------------------------------------------------------------- sizes, colours


@pytest.mark.parametrize(("image_size", "local"), [(224, 96), (128, 55), (32, 14)])
def test_local_crops_follow_the_image_size(image_size, local):
    views = Views(packaged("swav"), image_size, (0.0,) * 3, (1.0,) * 3)
    made = views(pictures(1), views.draw(1, generator()))
    assert [view.shape[-1] for view in made] == [image_size] * 2 + [local] * 6


def test_a_size_in_pixels_stays_as_it_is():
    assert [ViewPolicy(size=96).side(image_size) for image_size in (32, 224)] == [96, 96]
    assert [ViewPolicy().side(image_size) for image_size in (32, 224)] == [32, 224]
    assert ViewPolicy(relative_size=0.01).side(8) == 1


def test_grey_before_the_jitter_is_a_grey_that_no_hue_changes():
    jitter = {"jitter": 1.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.9, "hue": 0.5, "greyscale": 1.0}
    first, last = (views_of(PLAIN | jitter | {"greyscale_first": first}, size=24) for first in (True, False))
    uniforms = first.draw(6, generator())
    grey = operations.greyscale(pictures() / 255, torch.ones(6, dtype=torch.bool))
    torch.testing.assert_close(first(pictures(), uniforms)[0], grey, rtol=0, atol=2e-4)  # LUMA adds up to 0.9999
    (view,) = last(pictures(), uniforms)
    assert ((view - grey).abs().amax(dim=(1, 2, 3)) > 1e-2).all()
    assert torch.equal(view[:, 0], view[:, 2])


def test_without_greyscale_its_place_does_not_matter():
    first, last = (views_of({"greyscale": 0.0, "greyscale_first": first}) for first in (True, False))
    uniforms = first.draw(6, generator())
    assert torch.equal(first(pictures(), uniforms)[0], last(pictures(), uniforms)[0])


@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_what_is_left_out_without_colours(channels):
    assert left_out(ViewPolicy(), channels) == ["jitter", "greyscale"]
    assert left_out(ViewPolicy(jitter=0.0), channels) == ["greyscale"]
    assert left_out(ViewPolicy(jitter=0.0, greyscale=0.0, blur=1.0, solarise=1.0), channels) == []
    assert left_out(ViewPolicy(), 3) == []


# ---------------------------------------------------------------------------------------------------- jigsaw


def places(count: int, side: int) -> Tensor:
    """Images whose first two channels say in which row and column a pixel is."""
    along = torch.arange(side, dtype=torch.uint8)
    rows, columns = along.view(-1, 1).expand(side, side), along.expand(side, side)
    return torch.stack([rows, columns, torch.zeros_like(rows)]).expand(count, -1, -1, -1)


@pytest.mark.parametrize(("grid", "side", "piece"), [(3, 255, 64), (3, 36, 9), (2, 25, 9), (4, 250, 47), (1, 20, 15)])
def test_every_piece_is_a_square_of_its_own_cell(grid, side, piece):
    views = views_of(PLAIN | {"jigsaw": grid, "size": side})
    (view,) = views(places(20, side), views.draw(20, generator()))
    assert view.shape == (20, grid**2, 3, piece, piece)
    rows, columns = (view[:, :, :2] * 255).round().long().unbind(dim=2)
    top, left = rows[..., 0, 0], columns[..., 0, 0]
    along = torch.arange(piece)
    assert torch.equal(rows, (top[..., None, None] + along[:, None]).expand_as(rows))
    assert torch.equal(columns, (left[..., None, None] + along).expand_as(columns))
    cell = side // grid
    assert (top % cell + piece <= cell).all()
    assert (left % cell + piece <= cell).all()
    order = top // cell * grid + left // cell
    assert torch.equal(order.sort(dim=1).values, torch.arange(grid**2).expand(20, -1))


def test_pieces_are_cut_from_the_mirrored_crop():
    views, mirrored = (views_of(PLAIN | {"jigsaw": 3, "flip": flip}, size=24) for flip in (0.0, 1.0))
    uniforms = views.draw(6, generator())
    expected = views(pictures().flip(-1), uniforms)[0]
    torch.testing.assert_close(mirrored(pictures(), uniforms)[0], expected, rtol=0, atol=1e-5)


def test_orders_and_places_are_drawn_evenly():
    """Of a cell of 6 pixels a piece takes 5: two places along each side."""
    u = torch.rand(4000, 9, 3, generator=generator())
    pieces = (cut_jigsaw(places(4000, 18).float(), u, 3)[:, :, :2, 0, 0]).long()
    cells, within = pieces // 6, pieces % 6
    order = cells[..., 0] * 3 + cells[..., 1]
    for position in range(9):
        assert_even(order[:, position], 9)
    assert_even(order[:, 0] * 9 + order[:, 1] - order[:, 0] - (order[:, 1] > order[:, 0]).long(), 72)  # ordered pairs
    assert_even(within[:, :, 0] * 2 + within[:, :, 1], 4)
    assert_even(within[:, 0, 0] * 2 + within[:, 1, 0], 4)  # and each piece on its own


def test_the_largest_uniform_stays_in_its_cell():
    for side in (3, 36, 255, 1000):
        pieces = cut_jigsaw(torch.zeros(1, 1, side, side), torch.full((1, 9, 3), 1 - 2**-24), 3)
        assert pieces.shape[-1] == piece_side(side // 3)


def test_pieces_have_colours_of_their_own():
    jitter = {"jitter": 1.0, "brightness": 0.4, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    views = views_of(PLAIN | jitter | {"jigsaw": 3}, size=12)
    (view,) = views(torch.full((500, 3, 12, 12), 100, dtype=torch.uint8), views.draw(500, generator()))
    factors = view[:, :, 0, 0, 0] * 2.55
    assert factors.min() >= 0.6 - 1e-5
    assert factors.max() <= 1.4 + 1e-5
    correlation = torch.corrcoef(factors.T) - torch.eye(9)
    assert correlation.abs().max() < 4.5 / math.sqrt(500)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pieces_are_blurred_and_solarised(channels):
    policy = {"jigsaw": 3, "blur": 1.0, "solarise": 1.0, "size": 96}
    views = views_of(policy, channels=channels)
    (view,) = views(pictures(2, channels=channels), views.draw(2, generator()))
    assert view.shape == (2, 9, channels, 24, 24)
    assert view.max() <= 0.5 + 1e-6


@pytest.mark.parametrize("piece", [slice(0, 1), slice(2, 5)])
def test_pieces_of_an_image_do_not_depend_on_the_rest_of_the_batch(piece):
    views = views_of({"jigsaw": 3, "blur": 0.5}, {}, {"jigsaw": 2}, size=64)
    images = [image[:, : 12 + 2 * i] for i, image in enumerate(pictures())]
    uniforms = views.draw(6, generator(5))
    for all_of_them, some in zip(views(images, uniforms), views(images[piece], uniforms[piece]), strict=True):
        torch.testing.assert_close(some, all_of_them[piece], rtol=0, atol=1e-6)


def test_a_jigsaw_does_not_change_what_is_drawn_for_the_other_views():
    plain, jigsaw = views_of({}, {}), views_of({}, {"jigsaw": 3})
    few, many = plain.draw(6, generator(2)), jigsaw.draw(6, generator(2))
    piece = JIGSAW.width + sum(operation.width for operation in OPERATIONS)
    assert many.shape == (6, 2, few.shape[-1] + 9 * piece)
    assert torch.equal(few, many[..., : few.shape[-1]])
    assert torch.equal(plain(pictures(), few)[0], jigsaw(pictures(), many)[0])


def test_more_pieces_than_pixels():
    with pytest.raises(UserError, match="2 pixels cannot be cut into 3 pieces"):
        views_of({"jigsaw": 3, "size": 2})


@pytest.mark.parametrize(
    ("views", "side"),
    [
        ([{"crop_scale": (0.08, 1.0)}], 792),  # 224 / sqrt(0.08) = 791.96
        ([{"crop_scale": (0.25, 1.0)}], 448),
        ([{"crop_scale": (1.0, 1.0)}], 224),
        ([{"crop_scale": (0.25, 1.0)}, {"crop_scale": (0.04, 0.14), "size": 96}], 480),
        ([{"crop_scale": (0.25, 1.0)}, {"crop_scale": (0.04, 0.14), "relative_size": 0.25}], 448),
    ],
)
def test_the_smallest_crop_of_an_image_of_the_least_size_has_the_pixels_of_its_view(views, side):
    policies = [ViewPolicy(**view) for view in views]
    assert shorter_side(policies, 224) == side
    for policy in policies:
        assert side * math.sqrt(policy.crop_scale[0]) >= policy.side(224)
