"""Formats of data as entries of a catalogue: which one reads a place, those of other packages, and what identifies
images without reading them."""

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from tico_ssl import evaluate, pretrain
from tico_ssl.config import catalogue
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.formats import KIND, names, recognise
from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.data.given import as_source
from tico_ssl.data.source import joined
from tico_ssl.data.sources import open_source, open_training
from tico_ssl.pipeline.packing import pack
from tico_ssl.runtime.errors import UserError


def noise(count: int, seed: int = 0, side: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def picture(path, seed: int = 0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(1, seed)[0]).save(path)
    return path


def opened(place, split="train"):
    return open_source(DataConfig(source=str(place)), split)


# ---------------------------------------------------------------------------------------------------- recognition


def test_every_format_says_what_it_is_and_decides_without_torch(tmp_path):
    picture(tmp_path / "images" / "1.png")
    np.save(tmp_path / "x.npy", noise(2))
    for name in ("x.txt", "x.tico", "x.parquet"):
        (tmp_path / name).touch()
    places = ["textures", "cifar10", "python:Mine", "x-{0..3}.tar", str(tmp_path / "images")]
    places += [str(tmp_path / name) for name in ("x.npy", "x.txt", "x.tico", "x.parquet")]
    code = f"""
import json, sys
from tico_ssl.data.formats import recognise
found = [recognise(place)[0] for place in {places!r}]
for place in ("nowhere", {str(tmp_path / "images" / "1.png")!r}):
    try:
        recognise(place)
    except ValueError:
        found.append("refused")
print(json.dumps([found, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, heavy = json.loads(done.stdout)
    assert found == [
        *("textures", "torchvision", "dataset", "shards", "folder"),
        *("numpy", "list", "packed", "parquet", "refused", "refused"),
    ]
    assert not heavy
    for name in catalogue.entries(KIND):
        assert catalogue.summary(KIND, name)
        assert catalogue.load(KIND, name)


def test_what_is_more_special_comes_first(tmp_path):
    """A data set that is handed out as a folder, then tables, then archives, then any folder."""
    picture(tmp_path / "photos" / "1.png")
    assert recognise(str(tmp_path))[0] == "folder"
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(tmp_path / "photos" / "1.png", "1.png")
    assert recognise(str(tmp_path))[0] == "shards"
    (tmp_path / "table.parquet").touch()
    assert recognise(str(tmp_path))[0] == "parquet"
    for name in VOC_CLASSES:
        listing = tmp_path / "ImageSets" / "Main" / f"{name}_trainval.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.touch()
    assert recognise(str(tmp_path))[0] == "voc2007"


def test_a_format_can_be_named(tmp_path):
    picture(tmp_path / "photos" / "1.png")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(tmp_path / "photos" / "1.png", "inside.png")
    assert [opened(tmp_path).names(0), opened(f"folder:{tmp_path}").names(0)] == ["shard.tar:inside", "photos/1.png"]
    with pytest.raises(UserError, match="the format 'numpy' does not read"):
        opened(f"numpy:{tmp_path}")
    picture(tmp_path / "folder:odd" / "1.png")
    assert recognise(str(tmp_path / "folder:odd"))[0] == "folder"


def test_a_folder_that_is_there_wins_over_a_data_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [recognise(name)[0] for name in ("imagenet", "textures", "cifar10")]
    assert before == ["torchvision", "textures", "torchvision"]
    picture(tmp_path / "imagenet" / "train" / "n01440764" / "1.png")
    picture(tmp_path / "textures" / "1.png")
    assert [recognise(name)[0] for name in ("imagenet", "textures", "cifar10")] == ["imagenet", "folder", "torchvision"]
    assert recognise("textures:textures") == ("textures", "textures")
    assert recognise("torchvision:imagenet") == ("torchvision", "imagenet")
    assert set(names()) >= {"textures", "cifar10", "imagenet"}


OUTSIDE = '''
"""Raw pixels."""
from pathlib import Path

import numpy as np
import torch

from tico_ssl.data.source import Source, file_identity


def matches(place):
    return Path(place).suffix == ".raw"


def open(place, split, reading, config):
    if split == "test":
        return None
    pixels = torch.from_numpy(np.fromfile(place, np.uint8)).view(-1, reading.channels, 8, 8)
    return Source("raw", len(pixels), pixels.__getitem__, identity=lambda i: file_identity(Path(place), i))
'''


def test_a_format_of_another_package(tmp_path, monkeypatch):
    package = tmp_path / "lab_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "raw.py").write_text(OUTSIDE)
    (package / "half.py").write_text("def matches(place):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    pixels = noise(5).transpose(0, 3, 1, 2)
    pixels.tofile(tmp_path / "x.raw")
    place = f"lab_of_mine.raw:{tmp_path / 'x.raw'}"
    source = opened(place)
    assert torch.equal(torch.stack([source.fetch(i) for i in range(5)]), torch.from_numpy(pixels))
    assert opened(place, "test") is None
    assert source.fingerprint() == opened(place).fingerprint() != source.subset(torch.arange(4)).fingerprint()
    picture(tmp_path / "photos" / "1.png")
    assert len(open_source(DataConfig(source=[place, str(tmp_path / "photos")]))) == 6
    for wrong, line in (
        (f"lab_of_mine.raw:{tmp_path}", "does not read"),
        ("lab_of_mine.nothing:x", "cannot be imported"),
        ("lab_of_mine.half:x", "has no 'open'"),
        (str(tmp_path / "x.raw"), r"a folder, or a \.npy"),
    ):
        with pytest.raises(UserError, match=line):
            opened(wrong)


# ---------------------------------------------------------------------------------------------------- identity


def in_files(root):
    for number in range(6):
        picture(root / f"{number}.png", number)
    return root


def in_a_list(root):
    in_files(root / "files")
    (root / "list.txt").write_text("".join(f"files/{number}.png\n" for number in range(6)))
    return root / "list.txt"


def in_shards(root):
    in_files(root / "files")
    (root / "tar").mkdir()
    for shard in range(2):
        with tarfile.open(root / "tar" / f"{shard}.tar", "w") as tar:
            for number in range(3):
                tar.add(root / "files" / f"{3 * shard + number}.png", f"{number}.png")
    return root / "tar"


def in_parquet(root):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = [file.read_bytes() for file in sorted(in_files(root / "files").iterdir())]
    parquet.write_table(arrow.table({"image": files}), root / "train.parquet")
    return root / "train.parquet"


def packed(root, jpeg=False):
    pack(from_arrays("x", torch.from_numpy(noise(6).transpose(0, 3, 1, 2)), None), root / "x.tico", 8, jpeg=jpeg)
    return root / "x.tico"


def packed_jpegs(root):
    return packed(root, jpeg=True)


def in_numpy(root):
    np.save(root / "x.npy", noise(6))
    return root / "x.npy"


@pytest.mark.parametrize("make", [in_files, in_a_list, in_shards, in_parquet, packed, packed_jpegs, in_numpy])
def test_images_are_known_without_decoding(tmp_path, make):
    """The same again for the same images; another for others, for some of them, and in another order."""
    place = make(tmp_path)
    whole = opened(place)
    first, again = whole.fingerprint(), opened(place).fingerprint()
    assert first is not None
    assert first == again
    parts = [whole.subset(torch.tensor(places)).fingerprint() for places in ([0, 1], [1, 0], [3, 4], [0, 1, 2])]
    assert len({first, *parts}) == 5
    assert whole.subset(torch.tensor([0, 1])).fingerprint() == parts[0]
    if make is in_numpy:  # known by its pixels, whenever they were written
        np.save(place, noise(6, 1))
    else:
        home = place if place.is_dir() else place.parent
        for file in home.rglob("*.*"):
            os.utime(file, (1, 1))
    assert opened(place).fingerprint() != first


def test_what_is_joined_is_known_by_all_of_it(tmp_path):
    archive = opened(packed(tmp_path))
    arrays = [from_arrays("x", torch.from_numpy(noise(3, seed)), None) for seed in (0, 1)]
    unknown = replace(arrays[0], identity=None)
    one, other = (joined([part, archive]).fingerprint() for part in arrays)
    assert None not in (one, other)
    assert one != other
    assert joined([unknown, archive]).fingerprint() is None


def test_data_sets_by_name_are_known_by_their_files(tmp_path):
    home = tmp_path / "dtd" / "dtd"
    for split, number in (("train", 1), ("test", 2)):
        picture(home / "images" / "dotted" / f"{number}.jpg", number)
        (home / "labels").mkdir(exist_ok=True)
        (home / "labels" / f"{split}1.txt").write_text(f"dotted/{number}.jpg\n")
    config = DataConfig(source="dtd", root=str(tmp_path))
    known = [open_source(config, split).fingerprint() for split in ("train", "train", "test")]
    assert None not in known
    assert known[0] == known[1] != known[2]
    os.utime(home / "images" / "dotted" / "1.jpg", (1, 1))
    assert open_source(config).fingerprint() != known[0]


# ---------------------------------------------------------------------------------------------------- objects


class Plain(Dataset):
    """Squares of one grey, one at a time, with labels by turns."""

    def __init__(self, grey: int, count: int = 24) -> None:
        self.grey, self.targets = grey, [number % 2 for number in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index):
        return Image.new("RGB", (16, 16), (self.grey, self.grey, self.grey)), self.targets[index]


class InMemory(Plain):
    """The same in one array."""

    def __init__(self, grey: int) -> None:
        super().__init__(grey)
        self.data = np.full((24, 16, 16, 3), grey, np.uint8)


@pytest.mark.parametrize("kind", [Plain, InMemory])
def test_objects_of_one_class_are_told_apart(kind):
    one, other = kind(10), kind(20)
    places = [as_source(data) for data in (one, other)]
    assert places[0] != places[1]
    assert [as_source(data) for data in (one, other)] == places
    sources = [opened(place) for place in places]
    assert [int(source.fetch(0).max()) for source in sources] == [10, 20]
    known = [source.fingerprint() for source in sources]
    if kind is InMemory:
        assert None not in known
        assert known[0] != known[1]
    else:
        assert known == [None, None]  # a transform may change, and nothing would show it: never kept


def test_an_object_is_there_as_long_as_its_run_may_need_it():
    place = as_source(Plain(33))
    assert int(open_training(DataConfig(source=place)).fetch(0).max()) == 33


def test_two_objects_side_by_side(tmp_path, tiny, capsys):
    settings = tiny | {"training.batch_size": 8, "training.epochs": 1}
    del settings["data.limit"]
    one, other = Plain(10), Plain(200, 30)
    run = pretrain("demo", data=one, out=tmp_path / "run", overrides=settings)
    theirs = evaluate(run.folder, "knn", data=other)
    own = evaluate(run.folder, "knn")
    assert own.data["source"] == as_source(one) == run.recipe().data.source
    assert theirs.data["source"] == as_source(other) != own.data["source"]
    assert [own.data["train"] + own.data["test"], theirs.data["train"] + theirs.data["test"]] == [24, 30]
    assert not list((run.folder / "features").glob("*.safetensors"))


def test_the_number_of_an_object_does_not_keep_a_run_from_its_end(tmp_path, tiny):
    settings = tiny | {"training.batch_size": 8, "training.epochs": 1}
    del settings["data.limit"]
    run = pretrain("demo", data=Plain(10), out=tmp_path / "run", overrides=settings)
    assert pretrain("demo", data=Plain(10), out=run.folder, overrides=settings, resume=True).folder == run.folder
    with pytest.raises(UserError, match=r"data\.source was python:Plain"):
        pretrain("demo", data=InMemory(10), out=run.folder, overrides=settings, resume=True)
