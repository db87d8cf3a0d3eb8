"""Batches: every image once per epoch, in an order that depends on the seed and the epoch alone."""

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.loader import Loader
from tico_ssl.data.source import Source
from tico_ssl.data.sources import DataConfig, open_source
from tico_ssl.errors import UserError

CPU = torch.device("cpu")


def numbered(count: int) -> Source:
    """Images of one pixel that hold their own number."""
    return from_arrays("numbers", torch.arange(count, dtype=torch.uint8).view(count, 1, 1, 1), None)


def loader(count: int = 23, batch_size: int = 5, seed: int = 0) -> Loader:
    return Loader(numbered(count), batch_size, seed, CPU)


def order(loader: Loader, start: int, stop: int) -> list[list[int]]:
    return [index.tolist() for _, index in loader.iterate(start, stop)]


@pytest.mark.parametrize(("count", "batch_size"), [(23, 5), (20, 5), (7, 7), (9, 2)])
def test_every_image_at_most_once_per_epoch(count, batch_size):
    it = loader(count, batch_size)
    assert it.steps_per_epoch == count // batch_size
    for epoch in range(3):
        batches = order(it, epoch * it.steps_per_epoch, (epoch + 1) * it.steps_per_epoch)
        seen = [number for batch in batches for number in batch]
        assert all(len(batch) == batch_size for batch in batches)
        assert len(seen) == len(set(seen)) == count // batch_size * batch_size
        assert set(seen) <= set(range(count))


def test_a_whole_number_of_batches_shows_every_image():
    it = loader(20, 5)
    assert sorted(number for batch in order(it, 0, 4) for number in batch) == list(range(20))


def test_what_is_left_out_changes_from_epoch_to_epoch():
    it = loader(23, 5)
    left_out = [set(range(23)) - {n for batch in order(it, 4 * e, 4 * e + 4) for n in batch} for e in range(20)]
    assert len(set().union(*left_out)) > 15


def test_images_belong_to_their_indices():
    for images, index in loader().iterate(0, 9):
        assert images.flatten().tolist() == index.tolist()
        assert images.dtype == torch.uint8


def test_the_order_is_a_function_of_seed_and_epoch():
    first = order(loader(seed=1), 0, 12)
    torch.manual_seed(5)
    np.random.default_rng(5).random()
    assert order(loader(seed=1), 0, 12) == first
    assert order(loader(seed=2), 0, 12) != first
    epochs = [tuple(map(tuple, first[4 * epoch : 4 * epoch + 4])) for epoch in range(3)]
    assert len(set(epochs)) == 3


def test_the_order_does_not_depend_on_the_batch_size():
    """The same permutation is cut into other pieces."""
    one, two = order(loader(20, 5), 0, 4), order(loader(20, 10), 0, 2)
    assert sum(one, []) == sum(two, [])  # noqa: RUF017 - short lists


def test_the_order_is_a_true_shuffle():
    """The first place of an epoch is any image alike: a chi-square of 20 cells stays below the 1e-5 quantile."""
    first = torch.tensor([loader(20, 5, seed).indices(0)[0].item() for seed in range(1000)])
    counts = torch.bincount(first, minlength=20).double()
    assert ((counts - 50).square() / 50).sum() < 56


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 11])
def test_starting_at_a_step_is_skipping_the_steps_before(start):
    assert order(loader(), start, 12) == order(loader(), 0, 12)[start:]


def test_nothing_to_do():
    assert order(loader(), 5, 5) == []


def test_a_batch_larger_than_the_data_is_one_line():
    with pytest.raises(UserError, match=r"training\.batch_size 24 .* 23 images of numbers"):
        loader(23, 24)


def folder_and_archive(tmp_path, ragged: bool = True) -> tuple[Source, list[torch.Tensor]]:
    """Image files, and the pixels that went into them."""
    draw = np.random.default_rng(0)
    pixels = [
        draw.integers(0, 256, (9 + i % 3, 8 + i % 2, 3) if ragged else (9, 8, 3), dtype=np.uint8) for i in range(14)
    ]
    for number, array in enumerate(pixels):
        Image.fromarray(array).save(tmp_path / f"{number:02d}.png")
    return open_source(DataConfig(source=str(tmp_path))), [torch.from_numpy(p).permute(2, 0, 1) for p in pixels]


@pytest.mark.parametrize("workers", [1, 4])
def test_streamed_images_are_those_of_the_files(tmp_path, workers):
    source, pixels = folder_and_archive(tmp_path)
    streamed = Loader(source, 4, 7, CPU, workers)
    assert streamed.storage == f"decoded by {workers} threads"
    batches = list(streamed.iterate(1, 9))
    assert len(batches) == 8
    for images, index in batches:
        assert all(torch.equal(image, pixels[place]) for image, place in zip(images, index.tolist(), strict=True))


def test_streamed_and_resident_images_come_in_the_same_order(tmp_path):
    source, pixels = folder_and_archive(tmp_path, ragged=False)
    resident = Loader(from_arrays("x", torch.stack(pixels), None), 4, 7, CPU)
    assert resident.storage == "in memory"
    for (images, index), (other, place) in zip(
        Loader(source, 4, 7, CPU).iterate(0, 6), resident.iterate(0, 6), strict=True
    ):
        assert torch.equal(index, place)
        assert torch.equal(torch.stack(list(images)), other)


def test_a_corrupt_file_is_noted_and_its_batch_stays_whole(tmp_path):
    source, _ = folder_and_archive(tmp_path)
    (tmp_path / "05.png").write_bytes(b"no image")
    loader = Loader(source, 7, 0, CPU)
    assert all(len(images) == 7 for images, _ in loader.iterate(0, 2))
    assert list(loader.bad.reasons) == ["05.png"]


def test_stopping_early_leaves_no_threads(tmp_path):
    import threading

    source, _ = folder_and_archive(tmp_path)
    before = threading.active_count()
    batches = Loader(source, 4, 0, CPU).iterate(0, 6)
    next(batches)
    batches.close()
    assert threading.active_count() == before
