"""Ragged images, and crops of them that are torch's own bit for bit. Without a GPU the kernels are interpreted."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tico_ssl.data.ragged import Ragged
from tico_ssl.views import executor
from tico_ssl.views.table import CROP, FLIP, PLACE
from tico_ssl.views.taps import taps

ragged_kernels = pytest.importorskip("tico_ssl.views.ragged_kernels")
triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPOLATIONS = st.sampled_from(["bicubic", "bilinear"])


def pictures(seed: int, count: int, largest: int, channels: int = 3) -> list[torch.Tensor]:
    """Noise of different sizes; half of them black and white, whose sums overshoot."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, largest + 1, (count, 2), generator=generator).tolist()
    images = [torch.randint(0, 256, (channels, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    return [image if number % 2 else (image > 127).byte() * 255 for number, image in enumerate(images)]


def boxes(seed: int, sizes: torch.Tensor) -> torch.Tensor:
    """A random box in every image, some of them mirrored."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(len(sizes), 5, generator=generator)
    box = torch.zeros(len(sizes), PLACE.width)
    named = PLACE.named(box, CROP)
    for side, extent, begin, axis in (("height", 0, "top", 2), ("width", 1, "left", 3)):
        named[side].copy_((u[:, extent] * sizes[:, extent]).floor() + 1)
        named[begin].copy_((u[:, axis] * (sizes[:, extent] - named[side] + 1)).floor())
    PLACE.named(box, FLIP)["apply"].copy_(u[:, 4] < 0.5)
    return box


def by_torch(image: torch.Tensor, box: torch.Tensor, size: int, interpolation: str) -> torch.Tensor:
    top, left, height, width = (int(value) for value in PLACE.named(box[None], CROP).values())
    cut = image[None, :, top : top + height, left : left + width]
    resized = F.interpolate(cut, (size, size), mode=interpolation, antialias=True)[0]
    return resized.flip(-1) if PLACE.named(box[None], FLIP)["apply"] else resized


def test_images_come_back_as_they_were_and_are_not_copied():
    images = pictures(0, 5, 20)
    ragged = Ragged.of(images)
    assert all(torch.equal(ragged[place], image) for place, image in enumerate(images))
    chosen = ragged.take(torch.tensor([3, 3, 1]))
    assert [len(chosen), chosen.memory.data_ptr()] == [3, ragged.memory.data_ptr()]
    assert torch.equal(chosen[1], images[3])
    assert torch.equal(chosen[2], images[1])


@settings(max_examples=60, deadline=None)
@given(extent=st.integers(1, 900), size=st.sampled_from([1, 7, 32, 96, 112, 224]), interpolation=INTERPOLATIONS)
def test_taps_are_torchs(extent, size, interpolation):
    """One row of noise, resized by the sums that the taps say."""
    row = torch.randint(0, 256, (extent,), dtype=torch.uint8, generator=torch.Generator().manual_seed(extent))
    expected = F.interpolate(row.expand(1, 3, size, extent), (size, size), mode=interpolation, antialias=True)[0, 0, 0]
    found = taps(extent, size, interpolation)
    index = torch.from_numpy(found.first)[:, None] + torch.arange(found.weights.shape[1])
    products = row[index.clamp(max=extent - 1)].long() * torch.from_numpy(found.weights).long()
    rounded = (products.sum(dim=1) + (1 << (found.bits - 1))) >> found.bits
    assert torch.equal(rounded.clamp(0, 255).byte(), expected)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([8, 32, 40, 96]),
    largest=st.sampled_from([30, 150]),
    channels=st.sampled_from([1, 3, 4]),
    interpolation=INTERPOLATIONS,
)
def test_crops_are_torchs_to_the_bit(seed, size, largest, channels, interpolation):
    images = pictures(seed, 4, largest, channels)
    ragged = Ragged.of(images)
    box = boxes(seed + 1, ragged.sizes)
    crops = ragged_kernels.resized_crop(ragged.to(DEVICE), box.to(DEVICE), size, interpolation)
    expected = torch.stack([by_torch(image, one, size, interpolation) for image, one in zip(images, box)])
    assert torch.equal(crops.cpu(), expected)


def test_a_strong_reduction_is_exact_too():
    """Hundreds of taps, whose sums no single-precision number holds."""
    image = torch.full((1, 24, 1400), 255, dtype=torch.uint8)
    image[..., ::3] = 7
    ragged, box = Ragged.of([image]), torch.zeros(1, PLACE.width)
    PLACE.named(box, CROP)["height"].fill_(24), PLACE.named(box, CROP)["width"].fill_(1400)
    crops = ragged_kernels.resized_crop(ragged.to(DEVICE), box.to(DEVICE), 8)
    assert torch.equal(crops[0].cpu(), by_torch(image, box[0], 8, "bicubic"))


def test_a_device_is_asked_before_it_cuts_crops(monkeypatch):
    """The trial compares bits, here with kernels that are interpreted, and with one that is wrong."""
    monkeypatch.setattr(executor, "by_kernels", lambda device: True)
    executor.crops_ragged.cache_clear()
    assert executor.crops_ragged(DEVICE)
    executor.crops_ragged.cache_clear()
    right = ragged_kernels.resized_crop
    monkeypatch.setattr(ragged_kernels, "resized_crop", lambda *given: right(*given) + 1)
    assert not executor.crops_ragged(DEVICE)
    executor.crops_ragged.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled on a GPU")
def test_kernels_are_compiled_once_for_images_of_all_sizes(monkeypatch):
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details))
    for largest in (40, 48, 57, 96, 130):
        ragged = Ragged.of(pictures(largest, 4, largest))
        ragged_kernels.resized_crop(ragged.to(DEVICE), boxes(1, ragged.sizes).to(DEVICE), 20)
    assert len(compiled) <= 2  # one for columns, one for rows
