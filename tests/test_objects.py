"""Data in a Python program: torch data sets and lists keep their labels wherever they go."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from tico_ssl import embed, evaluate, pretrain
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.given import as_source
from tico_ssl.data.item_labels import labels_of
from tico_ssl.data.sources import open_training
from tico_ssl.runtime.errors import UserError

COUNT = 24


class Pairs(Dataset):
    """Images with labels that nothing lists."""

    def __init__(self, label=lambda place: place % 3) -> None:
        self.label, self.read = label, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place):
        self.read += 1
        return Image.new("RGB", (16, 16), (10 * place, 100, 50)), self.label(place)


def opened(data):
    return open_training(DataConfig(source=as_source(data)))


def test_pairs_keep_their_labels_from_pretraining_to_features(tmp_path, tiny, capsys):
    settings = tiny | {"training.batch_size": 8, "training.epochs": 1, "data.limit": None}
    pairs = Pairs()
    run = pretrain("demo", data=pairs, out=tmp_path / "run", overrides=settings)
    assert f"{COUNT} images (3 classes)" in capsys.readouterr().out
    assert evaluate(run.folder, "knn").numbers["trained"]
    with np.load(embed(run.folder, pairs, tmp_path / "f.npz")) as table:
        assert table["labels"].tolist() == [place % 3 for place in range(COUNT)]
    read = pairs.read
    opened(pairs)
    assert pairs.read - read < COUNT  # labels are read once


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor, lambda number: np.array([number])])
def test_labels_of_items_are_numbers_of_any_kind(kind):
    assert labels_of(Pairs(lambda place: kind(place % 2)))[0].tolist() == [place % 2 for place in range(COUNT)]


def test_labels_may_be_names():
    found = opened([(np.zeros((8, 9, 3), np.uint8), name) for name in ("dog", "cat", "dog")])
    assert (found.labels.tolist(), found.classes) == ([1, 0, 1], ("cat", "dog"))
    assert found.fetch(0).shape == (3, 8, 9)


def test_items_may_be_tensors_of_any_layout():
    image = torch.arange(3 * 8 * 9, dtype=torch.uint8).reshape(3, 8, 9)
    colours = (
        image,
        image.permute(1, 2, 0),
        image.permute(1, 2, 0).numpy(),
        Image.fromarray(image.permute(1, 2, 0).numpy()),
    )
    for form in colours:
        assert torch.equal(opened([form] * 2).fetch(0), image)
    for form in (image[0], image[:1], image[0].numpy(), image[:1].permute(1, 2, 0)):
        assert torch.equal(opened([form] * 2).fetch(0), image[:1].expand(3, -1, -1))
    floats = image / 255
    for form in (floats.requires_grad_(), floats.detach().bfloat16()):
        assert opened([form] * 2).fetch(0).shape == image.shape


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3, 0, 8),
        torch.zeros(1, 3, 8, 8),
        torch.zeros(5, 8, 8),
        torch.zeros(3, 8, 8, dtype=torch.complex64),
        torch.zeros(3, 8, 8).to_sparse(),
        Image.new("RGB", (0, 0)),
        (),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_items_that_are_no_images_are_named(wrong):
    with pytest.raises(UserError, match="item 0"):
        opened([wrong] * 2).fetch(0)


class Column:
    """As pandas has them: an array, and no sequence."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=object)


@pytest.mark.parametrize("kind", [list, np.array, tuple, Column])
def test_lists_of_labels_may_be_names(kind):
    pairs, other = Pairs(), Pairs()
    pairs.targets = kind(["dog", "cat"] * (COUNT // 2))
    other.targets = kind(["cat", "ant"] * (COUNT // 2))
    pairs.classes = other.classes = ["dog", "cat"]  # in another order than the numbers
    assert [labels_of(pairs)[0].tolist()[:2], labels_of(pairs)[1]] == [[1, 0], ("cat", "dog")]
    assert labels_of(Subset(pairs, [0, 3]))[0].tolist() == [1, 0]
    assert labels_of(ConcatDataset([pairs, pairs]))[1] == ("cat", "dog")
    assert pairs.read == 0
    assert labels_of(ConcatDataset([pairs, other]))[1] == ()  # by what the items say: 0, 1, 2, and not by these names


def test_names_of_items_are_their_own():
    pairs = Pairs(lambda place: "ab"[place % 2])
    pairs.classes = ["b", "a"]
    labels, classes = labels_of(pairs)
    assert (labels.tolist()[:2], classes) == ([0, 1], ("a", "b"))


@pytest.mark.parametrize(
    "listed", [[0.5] * COUNT, [None] * COUNT, [[1], [1, 2]], {"a": 1}, len, np.zeros((COUNT, 2, 2))]
)
def test_what_is_no_list_of_labels_is_none(listed):
    pairs = Pairs()
    pairs.targets, pairs.classes = listed, None
    assert labels_of(pairs)[0].tolist() == [place % 3 for place in range(COUNT)]


def test_several_labels_an_item():
    assert labels_of(Pairs(lambda place: torch.tensor([1, -1])))[0].tolist() == [[1, -1]] * COUNT


@pytest.mark.parametrize("label", [lambda place: {"boxes": []}, lambda place: 0.5, lambda place: None])
def test_what_is_no_class_is_no_label(label):
    pairs = Pairs(label)
    assert labels_of(pairs) == (None, ())
    assert pairs.read < COUNT


def test_parts_of_data_sets_and_several_of_them():
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    tensors = TensorDataset(images, torch.tensor([3, 1, 2, 0]))
    assert labels_of(tensors)[0].tolist() == [3, 1, 2, 0]
    part = Subset(tensors, [2, 0])
    assert labels_of(part)[0].tolist() == [2, 3]
    assert labels_of(ConcatDataset([tensors, part]))[0].tolist() == [3, 1, 2, 0, 2, 3]
    assert labels_of(TensorDataset(images))[0] is None
    assert labels_of(Subset(Pairs(), [1, 5]))[0].tolist() == [1, 2]


def test_a_list_of_pairs_may_name_files(tmp_path):
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "a.png")
    found = opened([(tmp_path / "a.png", 0), (str(tmp_path / "a.png"), 1)])
    assert (len(found), found.labels.tolist()) == (2, [0, 1])
    assert found.fetch(1)[:, 0, 0].tolist() == [1, 2, 3]


def test_a_list_of_places_is_one_still(tmp_path):
    assert as_source(["a", tmp_path]) == ["a", str(tmp_path)]


def test_what_is_no_image_is_one_line():
    for wrong, said in (([1, 2], r"item 0 is int: an image is"), ([np.zeros((2, 2, 2, 2))], "item 0: shape")):
        with pytest.raises(UserError, match=said):
            opened(wrong).fetch(0)
