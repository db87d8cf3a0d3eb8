"""The drawn data set: reproducible, balanced, and with the class in the pattern alone."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tico_ssl.data.formats.textures import CLASSES, draw_textures

Sample = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def train() -> Sample:
    return draw_textures(2000, seed=0)


@pytest.fixture(scope="module")
def held_out() -> Sample:
    return draw_textures(500, seed=1)


def _knn_accuracy(train: Sample, test: Sample, k: int = 20) -> float:
    """Share of the test rows whose k nearest training rows, by cosine, vote for the right class."""
    (bank, bank_labels), (queries, labels) = train, test
    nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).topk(k, dim=1).indices
    votes = F.one_hot(bank_labels[nearest], len(CLASSES)).sum(dim=1)
    return (votes.argmax(dim=1) == labels).float().mean().item()


def _linear_accuracy(train: Sample, test: Sample) -> float:
    """Test accuracy of a logistic regression on standardised rows."""
    (rows, labels), (test_rows, test_labels) = train, test
    mean, std = rows.mean(dim=0), rows.std(dim=0)
    rows, test_rows = (rows - mean) / std, (test_rows - mean) / std
    weight = torch.zeros(rows.shape[1], len(CLASSES), requires_grad=True)
    bias = torch.zeros(len(CLASSES), requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=50)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(rows @ weight + bias, labels)
        loss.backward()
        return loss

    optimiser.step(closure)
    return ((test_rows @ weight + bias).argmax(dim=1) == test_labels).float().mean().item()


def _pixels(sample: Sample) -> Sample:
    images, labels = sample
    return images.flatten(1).float() / 255, labels


def _colour_statistics(sample: Sample) -> Sample:
    images, labels = sample
    channels = images.flatten(2).float() / 255
    return torch.cat([channels.mean(dim=2), channels.std(dim=2)], dim=1), labels


def test_ten_distinct_class_names() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 10


@pytest.mark.parametrize("size", [8, 32, 64])
def test_shapes_and_types(size: int) -> None:
    images, labels = draw_textures(7, size=size)
    assert images.shape == (7, 3, size, size)
    assert images.dtype == torch.uint8
    assert labels.shape == (7,)
    assert labels.dtype == torch.int64


def test_same_seed_same_images() -> None:
    first, second = draw_textures(150, seed=3), draw_textures(150, seed=3)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    first = draw_textures(20)[0]
    after_drawing = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after_drawing, torch.rand(1))
    assert torch.equal(first, draw_textures(20)[0])


def test_different_seeds_differ() -> None:
    first, second = draw_textures(100, seed=0), draw_textures(100, seed=1)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_chunks_differ() -> None:
    images, _ = draw_textures(200)
    assert not torch.equal(images[:100], images[100:])


@pytest.mark.parametrize("count", [1, 99, 100, 101, 250])
def test_a_longer_draw_starts_with_the_shorter_one(count: int) -> None:
    short, long = draw_textures(count, seed=5), draw_textures(1000, seed=5)
    assert torch.equal(short[0], long[0][:count])
    assert torch.equal(short[1], long[1][:count])


@pytest.mark.parametrize("count", [10, 57, 1003])
def test_classes_are_balanced(count: int) -> None:
    shares = draw_textures(count)[1].bincount(minlength=len(CLASSES))
    assert shares.max() - shares.min() <= 1


def test_every_image_shows_its_pattern(train: Sample) -> None:
    """The two colours stay apart in grey, so a greyscale view keeps the class."""
    red, green, blue = (train[0].float() / 255).unbind(dim=1)
    grey = (0.299 * red + 0.587 * green + 0.114 * blue).flatten(1)
    assert grey.std(dim=1).min() > 0.05


def test_larger_images_show_as_many_periods() -> None:
    """The frequency is per image: at twice the size the colour changes half as often from pixel to pixel."""
    small, large = (draw_textures(200, size=size)[0].float().diff(dim=3).abs().mean() for size in (64, 128))
    assert 1.2 < small / large < 2.2


def test_pixels_do_not_give_the_class_away(train: Sample, held_out: Sample) -> None:
    assert _knn_accuracy(_pixels(train), _pixels(held_out)) <= 0.35


def test_colours_do_not_give_the_class_away(train: Sample, held_out: Sample) -> None:
    assert _linear_accuracy(_colour_statistics(train), _colour_statistics(held_out)) <= 0.22


@pytest.mark.parametrize("count", [0, -1])
def test_count_below_one_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count must be at least 1"):
        draw_textures(count)


def test_size_below_eight_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 8"):
        draw_textures(10, size=7)
