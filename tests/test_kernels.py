"""The Triton kernels do what `operations` does. Without a GPU they are run by Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tico_ssl.config.views import ViewPolicy
from tico_ssl.runtime import fallbacks
from tico_ssl.views import executor, operations
from tico_ssl.views.executor import Views, sizes_of
from tico_ssl.views.table import BLUR, GREYSCALE, JITTER, PLACE, SOLARISE, Draw

kernels = pytest.importorskip("tico_ssl.views.kernels")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEP = 1 / 255
TOLERANCE = STEP / 2  # pixels are kept in half precision
COLOURED = {"jitter": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.5, "greyscale": 0.4}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(seed: int, count: int, height: int, width: int) -> torch.Tensor:
    """Noise in one half, a flat colour in the other: edges, and colours without chroma among them."""
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator(seed))
    images[:, :, height // 2 :] = images[:, :, :1, :1]
    images[::2, :, -1] = 90
    return images.to(DEVICE)


def decided(seed: int, count: int, policy: ViewPolicy) -> torch.Tensor:
    """What follows the crop of so many images."""
    uniforms = torch.rand(count, kernels.COLUMNS.width, generator=generator(seed))
    return kernels.COLUMNS.decide(uniforms, kernels.COLUMNS.rules([policy])[:, 0]).to(DEVICE)


def column(d: torch.Tensor, draw: Draw, name: str = "apply") -> torch.Tensor:
    """A column of decisions, to read or to write."""
    return kernels.COLUMNS.named(d, draw)[name]


def finished(crops: torch.Tensor, d: torch.Tensor, taps: int, grey_first: bool) -> torch.Tensor:
    """By the operations, in double precision, up to solarisation."""
    view, d = crops.double(), d.double()
    steps = [JITTER, GREYSCALE]
    for step in reversed(steps) if grey_first else steps:
        view = step.operator(view, **kernels.COLUMNS.named(d, step))
    return operations.gaussian_blur(view, **kernels.COLUMNS.named(d, BLUR), kernel_size=taps) if taps else view


def assert_finished(actual: torch.Tensor, crops: torch.Tensor, d: torch.Tensor, taps: int, grey_first: bool) -> None:
    before = finished(crops, d, taps, grey_first)
    expected = operations.solarise(before, column(d, SOLARISE))
    mean, std = (torch.tensor(values, device=DEVICE).view(1, 3, 1, 1) for values in (MEAN, STD))
    error = (actual * std + mean - expected).abs()
    error[((before - 0.5).abs() < TOLERANCE) & (column(d, SOLARISE) > 0).view(-1, 1, 1, 1)] = (
        0  # either side of the threshold
    )
    assert error.max() < TOLERANCE


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    size=st.sampled_from([8, 16, 31, 32, 40]),
    interpolation=st.sampled_from(["bicubic", "bilinear"]),
)
def test_crops_are_those_of_the_operations(seed, height, width, size, interpolation):
    images = pictures(seed, 3, height, width)
    views = Views([ViewPolicy()], size, MEAN, STD)
    boxes = views.decide(views.draw(3, generator(seed)), sizes_of(images))[:, 0, : PLACE.width].to(DEVICE)
    expected = operations.resized_crop(images.double() / 255, *boxes.unbind(dim=1), size, interpolation)
    for dtype in (torch.float32, torch.float16):
        actual = kernels.resized_crop(images, boxes, size, dtype, interpolation)
        assert actual.dtype == dtype
        assert (actual.double() - expected).abs().max() < TOLERANCE


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([12, 24, 33]),
    taps=st.sampled_from([0, 1, 3, 7, 17, 23]),
    grey_first=st.booleans(),
    as_bytes=st.booleans(),
)
def test_finished_views_are_those_of_the_operations(seed, size, taps, grey_first, as_bytes):
    taps = taps if taps // 2 < size else 3
    policy = ViewPolicy(**COLOURED, blur=0.5 if taps else 0.0, solarise=0.5)
    crops = pictures(seed, 6, size, size)
    d = decided(seed, 6, policy)
    crops = crops if as_bytes else crops / 255
    actual = kernels.finish(crops, d, taps, grey_first, MEAN, STD, torch.float32)
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert_finished(actual, crops / 255 if as_bytes else crops, d, taps, grey_first)


def test_every_order_of_the_jitter():
    from itertools import permutations

    orders = torch.tensor(list(permutations(range(4))), dtype=torch.float32)
    crops = pictures(0, len(orders), 16, 16) / 255
    d = decided(1, len(orders), ViewPolicy(**COLOURED | {"jitter": 1.0}))
    column(d, JITTER, "order").copy_(orders)
    assert_finished(kernels.finish(crops, d, 0, False, MEAN, STD, torch.float32), crops, d, 0, False)


def test_a_flat_image_stays_flat_to_the_bit():
    """Weights are rounded to half precision, and divided by the sum of what they were rounded to."""
    images = torch.full((2, 3, 40, 30), 173, dtype=torch.uint8, device=DEVICE)
    boxes = torch.tensor([[3.0, 2, 31, 17, 1], [0, 0, 40, 30, 0]], device=DEVICE)
    crops = kernels.resized_crop(images, boxes, 32, torch.float16)
    assert crops.unique().numel() == 1
    blurred = kernels.finish(crops, _blurred(2), 5, False, (0.0,) * 3, (1.0,) * 3, torch.float32)
    assert (blurred.max() - blurred.min()) < 1e-6


@pytest.mark.parametrize("size", [14, 32, 224])
def test_the_full_kernel_blurs_by_its_standard_deviation(size):
    """The variance of a blurred impulse, per axis; taps are kept in half precision."""
    d = _blurred(1)
    impulse = torch.zeros(1, 3, size, size, device=DEVICE)
    impulse[..., size // 2, size // 2] = 1
    taps = operations.full_blur_kernel(size, 2.0)
    blurred = kernels.finish(impulse, d, taps, False, (0.0,) * 3, (1.0,) * 3, torch.float32)[0, 0].double().cpu()
    places = torch.arange(size, dtype=torch.float64) - size // 2
    for axis in (0, 1):
        profile = blurred.sum(dim=axis) / blurred.sum()
        assert float(profile @ places.square()) == pytest.approx(1.3**2, rel=0.01)


def test_an_image_is_finished_alike_in_any_batch():
    crops = pictures(3, 5, 24, 24) / 255
    d = decided(4, 5, ViewPolicy(**COLOURED, blur=0.5, solarise=0.5))
    whole = kernels.finish(crops, d, 3, False, MEAN, STD, torch.float32)
    alone = kernels.finish(crops[3:4], d[3:4], 3, False, MEAN, STD, torch.float32)
    assert torch.equal(whole[3:4], alone)


def test_the_executor_gives_the_same_views_by_kernels_and_by_operations(monkeypatch):
    policies = [
        ViewPolicy(**COLOURED, blur=1.0),
        ViewPolicy(**COLOURED, jigsaw=2, blur=0.5, greyscale_first=True),
        ViewPolicy(**COLOURED, blur=1.0, blur_kernel="full", crop_sampling="rejection", interpolation="bilinear"),
        ViewPolicy(**COLOURED, blur=1.0, blur_kernel="full", crop_sampling="distorted", size=14),
    ]
    views = Views(policies, 40, MEAN, STD)
    images, uniforms = pictures(7, 4, 50, 60), views.draw(4, generator(8)).to(DEVICE)
    monkeypatch.setattr(executor, "by_kernels", lambda device: False)
    expected = views(images, uniforms)
    monkeypatch.setattr(executor, "by_kernels", lambda device: True)
    for actual, slow in zip(views(images, uniforms), expected, strict=True):
        assert actual.shape == slow.shape
        assert (actual - slow).abs().max() < 2 * TOLERANCE / min(STD)


def test_kernels_that_cannot_be_compiled_are_noted(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC")

    monkeypatch.setattr(kernels, "resized_crop", broken)
    executor._no_kernels.cache_clear()
    fallbacks.drain()
    for _ in range(2):  # in every run of a process, not in the first alone
        assert not executor.by_kernels(torch.device("cuda"))
        (reason,) = fallbacks.drain().values()
        assert reason and "\n" not in reason
    executor._no_kernels.cache_clear()


def _blurred(count: int) -> torch.Tensor:
    d = torch.zeros(count, kernels.COLUMNS.width, device=DEVICE)
    column(d, BLUR).fill_(1)
    column(d, BLUR, "sigma").fill_(1.3)
    return d
