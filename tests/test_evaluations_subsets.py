"""Which images protocols with labels use: shares and numbers of every class, lists of names."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.sources import open_source
from tico_ssl.evaluations._classification.subsets import listed, number_of_each, share_of_each
from tico_ssl.runtime.errors import UserError


def some_labels(*counts: int) -> torch.Tensor:
    """So many images of class 0, of class 1 ..., in a fixed jumble."""
    labels = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 3))
def test_a_share_is_one_of_every_class_at_least(counts, seed):
    labels = some_labels(*counts)
    small, large = (share_of_each(labels, share, seed) for share in (0.01, 0.1))
    assert torch.bincount(labels[small]).tolist() == [max(1, round(0.01 * count)) for count in counts]
    assert torch.bincount(labels[large]).tolist() == [max(1, round(0.1 * count)) for count in counts]
    assert set(small.tolist()) <= set(large.tolist())
    assert small.unique().tolist() == small.tolist()


def test_a_whole_share_is_everything_and_seeds_differ():
    labels = some_labels(50, 70)
    assert share_of_each(labels, 1.0, 0).tolist() == list(range(120))
    draws = {tuple(share_of_each(labels, 0.1, seed).tolist()) for seed in range(5)}
    assert len(draws) == 5
    assert torch.equal(share_of_each(labels, 0.1, 3), share_of_each(labels, 0.1, 3))


def test_cifars_one_per_cent_is_fifty_of_every_class():
    labels = some_labels(*[5000] * 10)
    assert torch.bincount(labels[share_of_each(labels, 0.01, 0)]).tolist() == [50] * 10


def test_draws_are_stratified_and_have_no_image_in_common():
    labels = some_labels(20, 25, 40)
    draws = [number_of_each(labels, 5, draw, seed=0) for draw in range(4)]
    for draw in draws:
        assert torch.bincount(labels[draw]).tolist() == [5, 5, 5]
    together = torch.cat(draws).tolist()
    assert len(set(together)) == len(together) == 60


def test_draws_begin_again_with_a_class_that_runs_out():
    labels = some_labels(6, 100)
    later = number_of_each(labels, 4, 1, seed=0)  # images 4, 5, 0 and 1 of the first class
    assert torch.bincount(labels[later]).tolist() == [4, 4]
    assert len(set(later.tolist())) == 8


def test_a_list_names_images_by_their_own_name_or_with_folders(folder_of_images, tmp_path):
    source = open_source(DataConfig(source=str(folder_of_images)))
    names = [source.names(place) for place in range(len(source))]
    file = tmp_path / "1percent.txt"
    file.write_text("3.png\n\ncats/1.png\n3.png\n8.png\n")
    found = [names[place] for place in listed(source, file).tolist()]
    assert sorted(found) == ["cats/1.png", "cats/3.png", "dogs/8.png"]


def test_lists_that_do_not_fit(folder_of_images, tmp_path):
    source = open_source(DataConfig(source=str(folder_of_images)))
    file = tmp_path / "list.txt"
    file.write_text("3.png\nn01440764_10026.JPEG\n")
    with pytest.raises(UserError, match=r"list.txt: 1 of 2 names .* for example n01440764_10026.JPEG$"):
        listed(source, file)
    file.write_text("\n")
    with pytest.raises(UserError, match="names no images"):
        listed(source, file)
    with pytest.raises(UserError, match="cannot be read"):
        listed(source, tmp_path / "absent.txt")
    arrays = from_arrays("arrays", torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.tensor(np.arange(3)))
    file.write_text("a.png\n")
    with pytest.raises(UserError, match="1 of 1 names"):
        listed(arrays, file)


def test_a_name_that_several_images_have_is_listed_with_its_folder(tmp_path):
    names = [f"c{place // 2}/{place % 2:03}.jpg" for place in range(6)]
    images = from_arrays("photos", torch.zeros(6, 3, 8, 8, dtype=torch.uint8), torch.arange(6) // 2)
    source = replace(images, names=names.__getitem__)
    file = tmp_path / "list.txt"
    file.write_text("c1/000.jpg\n000.jpg\n")
    several = r"list.txt: 000.jpg may be c0/000.jpg or c1/000.jpg of photos: list it with its folder$"
    with pytest.raises(UserError, match=several):
        listed(source, file)
    file.write_text("c1/000.jpg\nc2/001.jpg\n")
    assert listed(source, file).tolist() == [2, 5]
    top = replace(images, names=["a.jpg", "b.jpg", "c1/a.jpg", "c.jpg", "d.jpg", "e.jpg"].__getitem__)
    file.write_text("a.jpg\n")
    assert listed(top, file).tolist() == [0]
