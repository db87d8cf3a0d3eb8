"""How crops are drawn: as in BYOL, in torchvision and in TensorFlow."""

import math
import random

import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import RandomResizedCrop

from tico_ssl.config.views import ViewPolicy
from tico_ssl.views.executor import Views, sizes_of
from tico_ssl.views.geometry import COVERED, Boxes
from tico_ssl.views.table import PLACE, RETRIES

COUNT = 20_000
RATIO = (3 / 4, 4 / 3)
SAMPLINGS = ("clipped", "rejection", "distorted")
UNLIKELY = 1e-5  # share of sound samplers that a test of theirs refuses


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled(sampling: str, height: int, width: int, scale: tuple[float, float], count: int = COUNT) -> Tensor:
    """Boxes (count, 4): top, left, height, width."""
    uniforms, retries = (torch.rand(count, 1, columns, generator=generator()) for columns in (4, RETRIES.width))
    policy = ViewPolicy(crop_sampling=sampling, crop_scale=scale, crop_ratio=RATIO)
    return Boxes([policy])(uniforms, retries, torch.tensor([[height, width]]))[:, 0]


def by_torchvision(height: int, width: int, scale: tuple[float, float], count: int = COUNT) -> Tensor:
    image = torch.empty(1, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.tensor([RandomResizedCrop.get_params(image, scale, RATIO) for _ in range(count)]).float()


def likelihood(one: Tensor, other: Tensor) -> float:
    """Of so great a difference between two samples of one distribution: a chi-squared test of homogeneity over the
    cells of a joint grid of all columns, each cut at its quintiles."""
    both = torch.cat([one, other])
    cuts = torch.quantile(both, torch.linspace(0, 1, 6)[1:-1], dim=0)
    cells = sum(torch.bucketize(both[:, k].contiguous(), cuts[:, k].contiguous()) * 5**k for k in range(4))
    counts = torch.stack([torch.bincount(part, minlength=5**4) for part in cells.split(len(one))])
    counts = counts[:, counts.sum(dim=0) >= 10]  # so that cells are nearly normal
    return stats.chi2_contingency(counts.numpy()).pvalue if counts.shape[1] > 1 else 1.0


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0)])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (32, 32), (80, 400), (300, 60)])
def test_rejection_has_the_joint_distribution_of_torchvision(height, width, scale):
    expected = by_torchvision(height, width, scale)
    assert likelihood(sampled("rejection", height, width, scale), expected) > UNLIKELY
    for other in ("clipped", "distorted"):  # so the test tells them apart
        assert likelihood(sampled(other, height, width, scale), expected) < UNLIKELY


@pytest.mark.parametrize(("height", "width", "box"), [(50, 1000, [0, 466, 50, 67]), (1000, 50, [466, 0, 67, 50])])
def test_where_no_try_fits_the_crop_is_central_and_of_the_nearest_ratio(height, width, box):
    """A tenth of the area and a ratio of 4 : 3 are higher than the strip."""
    scale = (0.1, 1.0)
    assert by_torchvision(height, width, scale, 1).tolist() == [box]
    assert sampled("rejection", height, width, scale, 100).unique(dim=0).tolist() == [box]


def test_the_fallback_is_as_frequent_as_in_torchvision():
    """A strip in which a try fits now and then, so that some images find none in ten."""
    height, width, scale = 100, 700, (0.08, 1.0)
    central = torch.tensor([0.0, 283, 100, 133])
    ours, theirs = (
        int((boxes == central).all(dim=1).sum())
        for boxes in (sampled("rejection", height, width, scale), by_torchvision(height, width, scale))
    )
    share = (ours + theirs) / (2 * COUNT)
    assert 0.05 < share < 0.95
    assert abs(ours - theirs) < 4.5 * math.sqrt(2 * COUNT * share * (1 - share))


@pytest.mark.parametrize(
    ("height", "width", "means"),
    [
        (375, 500, {"clipped": 0.518, "rejection": 0.433, "distorted": 0.388}),
        (32, 32, {"clipped": 0.534, "rejection": 0.490, "distorted": 0.432}),
    ],
)
def test_the_sampling_decides_how_large_crops_are(height, width, means):
    """Mean shares of the image at the usual scale, from 0.08 to 1."""
    for sampling, mean in means.items():
        *_, rows, columns = sampled(sampling, height, width, (0.08, 1.0), 10 * COUNT).unbind(dim=1)
        assert float((rows * columns).mean() / (height * width)) == pytest.approx(mean, abs=2e-3)
    assert means["rejection"] == pytest.approx(mean_area_that_fits(height, width), abs=1e-3)


def mean_area_that_fits(height: int, width: int) -> float:
    """By quadrature over area and logarithm of the ratio; that ten tries fail is too rare to count."""
    middles = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    area = (0.08 + 0.92 * middles) * height * width
    ratio = torch.exp(math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * middles).unsqueeze(1)
    columns, rows = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (rows <= height) & (columns <= width)
    return float((rows * columns)[fits].mean() / (height * width))


# ---------------------------------------------------------------------------------------------------- TensorFlow's


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    assert stats.kstest(values.double().numpy(), stats.uniform(low, high - low).cdf).pvalue > UNLIKELY


def one_by_one(height: int, width: int, scale: tuple[float, float], draw: random.Random) -> tuple[int, ...]:
    """A distorted crop as TensorFlow makes it, with a hundred tries: of all heights that the ratio allows, one."""
    least, most = (share * height * width for share in scale)
    for _ in range(100):
        ratio = draw.uniform(*RATIO)
        lowest, highest = (round(math.sqrt(area / ratio)) for area in (least, most))
        allowed = [h for h in range(1, min(highest, height) + 1) if round(h * ratio) <= width]
        rows = draw.choice([h for h in allowed if h >= lowest] or allowed[-1:])
        rows += rows * round(rows * ratio) < least
        rows -= rows * round(rows * ratio) > most
        columns = round(rows * ratio)
        if rows <= height and columns <= width and max(least, COVERED * height * width) <= rows * columns <= most:
            return draw.randrange(max(1, height - rows)), draw.randrange(max(1, width - columns)), rows, columns
    return 0, 0, height, width


@pytest.mark.parametrize(("height", "width"), [(375, 500), (50, 32), (32, 32), (13, 11), (100, 500)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 0.7)])
def test_distorted_has_the_joint_distribution_of_tensorflow(height, width, scale):
    draw = random.Random(2)
    expected = torch.tensor([one_by_one(height, width, scale, draw) for _ in range(COUNT)]).float()
    assert likelihood(sampled("distorted", height, width, scale), expected) > UNLIKELY


def test_a_distorted_crop_is_uniform_in_ratio_and_height():
    """On an image so large and square, with areas so small, that every draw fits."""
    side, scale = 20_000, (0.2, 0.5)
    boxes = sampled("distorted", side, side, scale)
    top, left, height, width = boxes.unbind(dim=1)
    ratio = width / height
    assert_uniform(ratio, *RATIO)
    lowest, highest = (side * (share / ratio).sqrt() for share in scale)
    assert_uniform((height - lowest) / (highest - lowest), 0, 1)
    assert_uniform(top / (side - height), 0, 1)
    assert_uniform(left / (side - width), 0, 1)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (32, 32), (10, 10), (100, 600)])
def test_a_distorted_crop_keeps_to_its_bounds(height, width):
    boxes = sampled("distorted", height, width, (0.08, 0.9))
    top, left, rows, columns = boxes.unbind(dim=1)
    areas = rows * columns / (height * width)
    whole = areas == 1  # where no try fitted
    assert whole.double().mean() < 1e-2
    assert areas[~whole].min() >= COVERED
    assert areas[~whole].max() <= 0.9
    assert (columns[~whole] >= rows[~whole] * RATIO[0] - 0.5 - 1e-4).all()
    assert (columns[~whole] <= rows[~whole] * RATIO[1] + 0.5 + 1e-4).all()
    # A crop never touches the last row or column, unless it has them all.
    assert ((top + rows < height) | (rows == height)).all()
    assert ((left + columns < width) | (columns == width)).all()


def test_where_no_distorted_crop_fits_the_image_is_kept_whole():
    assert sampled("distorted", 50, 1000, (0.08, 1.0), 100).unique(dim=0).tolist() == [[0, 0, 50, 1000]]


# ---------------------------------------------------------------------------------------------------- all


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 200), (200, 3), (32, 32), (4097, 1023)])
@pytest.mark.parametrize("extreme", [None, 0.0, 1 - 2**-24])
def test_boxes_are_whole_pixels_inside_the_image(sampling, height, width, extreme):
    uniforms, retries = (torch.rand(2000, 2, columns, generator=generator()) for columns in (4, RETRIES.width))
    if extreme is not None:
        uniforms[:] = retries[:] = extreme
    policies = [ViewPolicy(crop_sampling=sampling), ViewPolicy(crop_sampling=sampling, crop_ratio=(0.2, 5.0))]
    boxes = Boxes(policies)(uniforms, retries, torch.tensor([[height, width]]))
    assert torch.equal(boxes, boxes.round())
    corners, sides = boxes.split(2, dim=-1)
    assert corners.min() >= 0
    assert sides.min() >= 1
    assert (corners + sides <= torch.tensor([height, width])).all()


def views_of(*samplings: str) -> Views:
    return Views([ViewPolicy(crop_sampling=sampling) for sampling in samplings], 16, (0.0,) * 3, (1.0,) * 3)


def test_retries_have_a_random_stream_of_their_own():
    """A policy that draws again leaves all numbers of the others as they were."""
    plain, retried = views_of("clipped", "clipped"), views_of("clipped", "rejection")
    before, after = plain.draw(6, generator(3)), retried.draw(6, generator(3))
    place, rest = after.tensor_split([PLACE.width], dim=-1)
    assert torch.equal(before, torch.cat([place, rest[..., RETRIES.width :]], dim=-1))
    images = torch.randint(0, 256, (6, 3, 40, 30), dtype=torch.uint8, generator=generator())
    assert torch.equal(plain(images, before)[0], retried(images, after)[0])


def test_every_view_has_its_own_sampling():
    together = views_of("rejection", "clipped", "distorted", "rejection")
    images = [torch.zeros(3, 20 + 10 * i, 50, dtype=torch.uint8) for i in range(6)]
    uniforms = together.draw(6, generator(4))
    boxes = together.decide(uniforms, sizes_of(images))[..., :4]
    for number, policy in enumerate(together.policies):
        alone = views_of(policy.crop_sampling)
        of_it = uniforms[:, number : number + 1]
        if policy.crop_sampling == "clipped":
            of_it = torch.cat([of_it[..., : PLACE.width], of_it[..., together.place.width :]], dim=-1)
        assert torch.equal(alone.decide(of_it, sizes_of(images))[:, 0, :4], boxes[:, number])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_a_worker_cuts_the_crops_of_the_batch(sampling, interpolation):
    """Whatever the sizes of its images: those that go through torch's resampling, to the bit, and those through
    matrices, which do not round between columns and rows."""
    policy = ViewPolicy(crop_sampling=sampling, interpolation=interpolation)
    views = Views([policy, policy], 16, (0.0,) * 3, (1.0,) * 3)
    shapes = [(24, 30), (200, 70), (70, 500), (90, 90)]
    images = [torch.randint(0, 256, (3, *shape), dtype=torch.uint8, generator=generator()) for shape in shapes]
    uniforms = views.draw(4, generator(5))
    for number, image in enumerate(images):
        expected = views.crop([image], views.decide(uniforms, sizes_of(images))[number : number + 1])
        made = views.crop_bytes(image, uniforms[number, :, : views.place.width])
        for ours, theirs in zip(made, expected, strict=True):
            if theirs.dtype == torch.uint8:
                assert torch.equal(ours, theirs[0])
            else:  # half a level for each of two roundings, the first of which bicubic weights enlarge by up to 1.25
                assert (ours.float() - theirs[0] * 255).abs().max() <= 0.5 * 1.25 + 0.5
