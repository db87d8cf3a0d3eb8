"""Real folders hold broken files: training goes on without them, each is named once, too many stop it beforehand."""

import json
import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tico_ssl import embed, evaluate, pretrain
from tico_ssl.cli import app
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.checking import check
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.sources import open_source
from tico_ssl.data.splits import Part
from tico_ssl.features.album import Album
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.feature_store import fill, opened_store
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.results.table import print_results
from tico_ssl.results.verdict import images_tested
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.json_lines import read_json_lines
from tico_ssl.training.setup import prepare


def noise(seed, height=24, width=20):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Forty good files in two classes and every kind of bad one."""
    root = tmp_path / "photos"
    for number in range(40):
        path = root / ("cats" if number % 2 else "dogs") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise(number).save(path)
    cats = root / "cats"
    (cats / "empty.jpg").write_bytes(b"")
    (cats / "text.png").write_text("not an image")
    whole = cats / "whole.jpg"
    noise(99, 64, 64).save(whole)
    (cats / "truncated.jpg").write_bytes(whole.read_bytes()[:200])
    whole.unlink()
    (cats / "link.png").symlink_to("nowhere.png")
    return root


BAD = {"cats/empty.jpg", "cats/text.png", "cats/truncated.jpg", "cats/link.png"}


def test_training_goes_on_and_names_each_bad_file_once(tmp_path, tiny, folder, capsys):
    tiny |= {"data.limit": None, "training.batch_size": 11, "data.most_bad": 0.2, "training.epochs": 4}
    run = pretrain("demo", data=str(folder), out=tmp_path / "run", overrides=tiny)
    lines = [json.loads(line) for line in run.bad_files_file.read_text().splitlines()]
    assert sorted(line["file"] for line in lines) == sorted(BAD)
    reasons = {line["file"]: line["reason"] for line in lines}
    assert reasons["cats/empty.jpg"] == "empty file"
    assert capsys.readouterr().out.count(f"4 bad files left out so far, listed in {run.bad_files_file}\n") == 1
    assert len(run.metrics()) == 16


def test_too_many_stop_the_run_before_it_begins(tmp_path, tiny, folder):
    tiny |= {"data.limit": None, "training.batch_size": 8}
    with pytest.raises(UserError, match=r"photos: 4 of 44 files tried cannot be read, such as cats/.*data\.most_bad"):
        pretrain("demo", data=str(folder), out=tmp_path / "run", overrides=tiny)
    assert not (tmp_path / "run").exists()


def test_an_unreadable_image_is_replaced_by_the_next_readable_one_of_its_class(folder):
    source, bad = open_source(DataConfig(source=str(folder))), BadFiles()
    places = {source.names(i): i for i in range(len(source))}
    assert torch.equal(readable(source, places["cats/text.png"], bad), source.fetch(places["cats/01.png"]))
    unlabelled = replace(source, labels=None)
    assert torch.equal(readable(unlabelled, places["cats/text.png"], bad), source.fetch(places["dogs/00.png"]))
    alone = replace(source, labels=torch.arange(len(source)))
    assert torch.equal(readable(alone, places["cats/text.png"], bad), source.fetch(places["dogs/00.png"]))
    assert set(bad.reasons) <= BAD
    with pytest.raises(BadImage):
        source.fetch(places["cats/text.png"])


def test_batches_have_the_labels_of_their_pictures(tmp_path, tiny):
    """Classes are bright and dark; bad files of each stand between files of the other."""
    root = tmp_path / "greys"
    for number in range(40):
        path = root / f"{number:02}-{'dark' if number % 2 else 'bright'}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (16, 16), 20 if number % 2 else 220).save(path)
        if number in (6, 7, 38, 39):
            path.write_text("not an image")
    source = open_source(DataConfig(source=str(root)))
    source = replace(source, labels=torch.tensor([int("dark" in source.names(i)) for i in range(len(source))]))
    settings = {"views.*.jitter": 0.0, "views.*.greyscale": 0.0, "data.most_bad": 0.2, "training.batch_size": 20}
    recipe = load_recipe("demo", tiny | settings | {"data.limit": None, "data.image_size": 16})
    loader = prepare(recipe, torch.device("cpu"), source).loader
    for raw in loader.iterate(0, 4):
        dark = views_of(loader, raw).mean(dim=(1, 2, 3)) < 0
        assert torch.equal(dark.long(), raw.label)


def views_of(loader, raw):
    return loader.views.make(raw.pixels, raw.decisions)[0].float()


def test_nothing_readable_is_said(tmp_path):
    (tmp_path / "a.png").write_text("x")
    (tmp_path / "b.png").write_text("y")
    with pytest.raises(UserError, match="none of the 2 images can be read"):
        readable(open_source(DataConfig(source=str(tmp_path))), 0, BadFiles())


def test_features_leave_bad_files_out_with_their_labels(tmp_path, tiny, folder):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny | {"training.epochs": 1})
    out = embed(run.folder, data=str(folder), out=tmp_path / "features.npz")
    with np.load(out) as archive:
        assert len(archive["names"]) == len(archive["features"]) == len(archive["labels"]) == 40
        for name, label in zip(archive["names"], archive["labels"]):
            assert label == (0 if name.startswith("cats") else 1)
    named = read_json_lines(tmp_path / "features.npz.bad_files.jsonl")
    assert {line["file"] for line in named} == BAD and all(line["reason"] for line in named)
    numbers = evaluate(run.folder, "knn", data=str(folder)).numbers
    assert 0 <= numbers["trained"]["top1_k20"] <= 100


def test_evaluations_count_and_name_what_they_leave_out(tmp_path, folder, capsys):
    for split in ("train", "test"):
        shutil.copytree(folder, tmp_path / "both" / split, symlinks=True)
    for file in (tmp_path / "both/test/dogs").glob("0*"):
        file.unlink()
    (tmp_path / "both/test/cats/empty.jpg").unlink()
    model = tmp_path / "b.safetensors"
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w2", zero_gamma=False), 16), model)
    short = {"epochs": 1, "least_steps": 0, "batch_size": 8}
    protocols = {
        "knn": {},
        "linear-augmented": short | {"lrs": [0.1]},
        "fine-tune": short,
        "corruptions": {"kinds": ["contrast"], "iterations": 3},
    }
    for protocol, settings in protocols.items():
        for repeated in (False, True):
            result = evaluate(model, protocol, str(tmp_path / "both"), settings)
            assert (result.data["train"], result.data["test"]) == (44, 38)
            assert result.data["unread"] == {"train": 4, "test": 3}, (protocol, repeated)
            assert images_tested(result.line) == 35
    print_results([result])
    text = " ".join(capsys.readouterr().out.split())
    assert "40 training and 35 test images (the data's own)" in text
    listed = tmp_path / "b" / "results.bad_files.jsonl"
    assert f"4 training images and 3 test images left out, which cannot be read; all are in {listed}" in text
    assert "cats/text.png: " in text
    lines = read_json_lines(listed)
    named = [(line["split"], line["file"]) for line in lines]
    assert sorted(named) == sorted(
        [("train", name) for name in BAD] + [("test", name) for name in BAD - {"cats/empty.jpg"}]
    )
    assert all(line["reason"] and line["source"] == str(tmp_path / "both") for line in lines)


def test_an_error_that_passes_is_not_kept_with_the_features(tmp_path, folder):
    cache, source = FeatureCache(tmp_path / "features"), open_source(DataConfig(source=str(folder)))
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w2", zero_gamma=False), 16)

    def fails(place):
        if place % 10 == 0:
            raise BadImage(source.names(place), "Input/output error")
        return source.fetch(place)

    def extracted(images):
        return len(cache.extract(backbone, images, torch.device("cpu")).places)

    assert extracted(replace(source, fetch=fails)) < 40
    assert extracted(source) == 40
    with opened_store(tmp_path / "store", "key", backbone.width) as store:
        rows = []
        for images in (replace(source, fetch=fails), source):
            fill(store, Album((Part("train", images),)), backbone, torch.device("cpu"))
            rows.append(len(store.places()))
    assert rows[0] < rows[1] == 40
    tried = []
    assert extracted(replace(source, fetch=lambda place: tried.append(place) or source.fetch(place))) == 40
    assert len(tried) == 4  # once more, those that cannot be read


def test_check_finds_bad_files_sizes_formats_and_duplicates(folder):
    (folder / "dogs" / "again.png").write_bytes((folder / "dogs" / "00.png").read_bytes())
    noise(7, 30, 50).save(folder / "dogs" / "grey.webp", lossless=True)
    report = check(open_source(DataConfig(source=str(folder))))
    assert {name for name, _ in report.bad} == BAD
    assert report.files == 46
    assert report.formats == {"PNG": 41, "WEBP": 1}
    assert report.duplicates == [["dogs/00.png", "dogs/again.png"]]
    assert (report.heights.max(), report.widths.max()) == (30, 50)
    text = "\n".join(report.lines())
    assert "46 files" in text
    assert "42 readable" in text
    assert "1 copy of another file, such as dogs/00.png = dogs/again.png" in text


def test_check_says_which_images_are_in_several_splits(tmp_path):
    for number, name in enumerate(["train/a/0", "train/a/1", "train/b/2", "test/a/3", "test/b/4"]):
        file = tmp_path / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        noise(number, 20, 20).save(file)
    shutil.copy(tmp_path / "train/a/0.png", tmp_path / "train/a/copy.png")
    assert "leaks" not in CliRunner().invoke(app, ["data", "check", str(tmp_path)]).output
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "test/a/copy.png")
    text = CliRunner().invoke(app, ["data", "check", str(tmp_path)]).output
    assert "1 image in more than one split, such as train/a/1.png = test/a/copy.png" in " ".join(text.split())


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes are Linux's")
def test_names_of_any_bytes(tmp_path, tiny):
    root = tmp_path / "odd"
    root.mkdir()
    for number, name in enumerate([b"caf\xe9.png", "日本 .png".encode(), b"new\nline.png", b"quote'\".png"]):
        noise(number).save(os.fsdecode(os.fsencode(root) + b"/" + name), format="PNG")
    (root / os.fsdecode(b"bad\xff.png")).write_text("not an image")
    source = open_source(DataConfig(source=str(root)))
    assert len(source) == 5
    report = check(source)
    assert [name for name, _ in report.bad] == ["bad\\xff.png"]
    tiny |= {"data.limit": None, "training.batch_size": 2, "data.most_bad": 0.5, "training.epochs": 1}
    run = pretrain("demo", data=str(root), out=tmp_path / "run", overrides=tiny)
    assert json.loads(run.bad_files_file.read_text())["file"] == "bad\\xff.png"
    assert embed(run.folder, out=tmp_path / "features.csv").read_text(encoding="utf-8").count("caf\\xe9.png") == 1


def test_a_text_file_lists_paths(tmp_path, folder):
    (tmp_path / "list.txt").write_text("# mine\nphotos/dogs/02.png\n\nphotos/cats/01.png\n")
    source = open_source(DataConfig(source=str(tmp_path / "list.txt")))
    assert [source.names(i) for i in range(2)] == ["photos/dogs/02.png", "photos/cats/01.png"]
    assert source.labels is None
    assert torch.equal(source.fetch(1), torch.from_numpy(np.asarray(noise(1)).transpose(2, 0, 1).copy()))
    (tmp_path / "list.txt").write_text("photos/dogs/nowhere.png\n")
    with pytest.raises(UserError, match=r"list\.txt: lists a file that does not exist: photos/dogs/nowhere\.png"):
        open_source(DataConfig(source=str(tmp_path / "list.txt")))


def test_several_folders_are_one_source(tmp_path):
    for place in ("one/a", "one/b", "two/b", "two/c"):
        (tmp_path / place).mkdir(parents=True)
        noise(len(place)).save(tmp_path / place / "0.png")
    both = open_source(DataConfig(source=[str(tmp_path / "one"), str(tmp_path / "two")]))
    assert both.classes == ("a", "b", "c")
    assert both.labels.tolist() == [0, 1, 1, 2]
    assert both.names(2) == "two/b/0.png"
    flat = open_source(DataConfig(source=[str(tmp_path / "one" / "a"), str(tmp_path / "two")]))
    assert len(flat) == 3
    assert flat.labels is None


def test_ten_thousand_files_are_indexed(tmp_path):
    names = [tmp_path / f"{folder:03}" / f"{number:03}.jpg" for folder in range(20) for number in range(500)]
    for name in names:
        name.parent.mkdir(exist_ok=True)
        name.touch()
    source = open_source(DataConfig(source=str(tmp_path)))
    assert len(source) == 10_000
    assert source.names(7) == "000/007.jpg"
    assert source.labels.bincount().tolist() == [500] * 20
