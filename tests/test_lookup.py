"""Features of any number of images in a table, the nearest images of a query, near-duplicates, outliers and subsets."""

import csv
import io
import json
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tico_ssl import embed, load_backbone
from tico_ssl.cli import main
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.features import batches, embedding, feature_store
from tico_ssl.features.album import open_album
from tico_ssl.features.extraction import extract
from tico_ssl.features.feature_store import FeatureStore
from tico_ssl.features.subjects import open_subject
from tico_ssl.features.tables import WRITERS
from tico_ssl.looking_up import duplicates, index, outliers
from tico_ssl.looking_up.coverage import k_centre, medoid
from tico_ssl.looking_up.curating import curate
from tico_ssl.looking_up.duplicates import RARE, chosen_threshold, groups
from tico_ssl.looking_up.searching import search
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.locks import alone_in

CPU = torch.device("cpu")


def smooth(seed: int, side: int = 40) -> Image.Image:
    """A picture of a few soft patches of warm colours, unlike any other."""
    patches = np.random.default_rng(seed).integers([128, 60, 0], [256, 180, 80], (5, 5, 3))
    return Image.fromarray(patches.astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny network with random weights, as a backbone file."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("model") / "b.safetensors"
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w8", zero_gamma=False), 24), file)
    return file


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Forty images in three splits of two classes; one cannot be read."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for number in range(40):
        split = "train" if number < 22 else "val" if number < 32 else "test"
        path = root / split / ("ants" if number % 3 else "bees") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        smooth(number).save(path)
    (root / "val" / "bees" / "24.png").write_text("not an image")
    return root


@pytest.fixture
def small_blocks(monkeypatch):
    """Batches of four images, two to a block."""
    monkeypatch.setattr(batches, "BATCH", 4)
    monkeypatch.setattr(feature_store, "BATCH", 4)
    monkeypatch.setattr(feature_store, "BLOCK", 8)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --------------------------------------------------------------------------------------------------------- embed


def test_features_in_blocks_are_those_of_the_whole(model, photos, tmp_path, small_blocks, monkeypatch):
    held, append = [], FeatureStore.append

    def noted(self, features, *more):
        held.append(len(features))
        append(self, features, *more)

    monkeypatch.setattr(FeatureStore, "append", noted)
    embed(model, str(photos), tmp_path / "f.npy")
    assert max(held) <= 8 and sum(held) == 39  # memory holds a block at a time
    subject = open_subject(model, str(photos))
    album = open_album(subject.data, 3)
    whole = torch.cat([extract(subject.backbone, part.source, CPU).features for part in album.parts])
    np.testing.assert_allclose(np.load(tmp_path / "f.npy"), whole.numpy(), atol=1e-5)


def test_features_are_those_of_the_backbone(model, photos, tmp_path):
    embed(model, str(photos), tmp_path / "f.npy")
    backbone, rows = load_backbone(model), read_csv(tmp_path / "f.npy.csv")
    for place in (0, 21, 22, 38):
        expected = backbone(backbone.preprocess(photos / rows[place]["path"])).detach().numpy()[0]
        np.testing.assert_allclose(np.load(tmp_path / "f.npy")[place], expected, atol=1e-5)


def test_every_split_is_there_with_its_name(model, photos, tmp_path):
    embed(model, str(photos), tmp_path / "f.csv")
    rows = read_csv(tmp_path / "f.csv")
    assert [row["split"] for row in rows] == ["train"] * 22 + ["test"] * 8 + ["val"] * 9
    assert all((photos / row["path"]).is_file() and row["path"].startswith(row["split"]) for row in rows)
    assert {(row["label"], row["class"]) for row in rows} == {("0", "ants"), ("1", "bees")}
    embed(model, str(photos), tmp_path / "v.csv", split="val")
    assert read_csv(tmp_path / "v.csv") == [row for row in rows if row["split"] == "val"]
    with pytest.raises(UserError, match="has no split val, only train"):
        embed(model, str(photos / "train"), tmp_path / "f.csv", split="val")
    embed(model, str(photos / "train"), tmp_path / "t.csv")
    assert [row["path"] for row in read_csv(tmp_path / "t.csv")][:1] == ["ants/01.png"]


def test_files_that_cannot_be_read_are_named(model, photos, tmp_path, capsys):
    embed(model, str(photos), tmp_path / "f.npz")
    lines = (tmp_path / "f.npz.bad_files.jsonl").read_text().splitlines()
    assert [json.loads(line)["file"] for line in lines] == ["val/bees/24.png"]
    assert "val/bees/24.png: not in a known image format" in capsys.readouterr().out
    embed(model, str(photos / "train"), tmp_path / "f.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.npz"]


def test_normalised_features_have_length_one(model, photos, tmp_path):
    raw, unit = (np.load(embed(model, str(photos), tmp_path / f"{n}.npy", normalise=n)) for n in (False, True))
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=1e-6)


def test_a_model_by_name_with_its_weights(model, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(load_backbone(model).network.state_dict(), "w.pth")
    monkeypatch.setattr("tico_ssl.features.subjects.USUAL_SIZE", 24)
    found, expected = (
        np.load(embed(name, str(photos), f"{number}.npy", weights=weights))
        for number, (name, weights) in enumerate([("tico/resnet10-w8", "w.pth"), (model, None)])
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    embed("tico/resnet10-w8", str(photos), "r.npy", split="test")
    assert "tico/resnet10-w8 has random weights; weights= gives" in capsys.readouterr().out


def stopped_after(blocks: int, monkeypatch):
    """Ctrl-C after some blocks were written."""
    append, count = FeatureStore.append, iter(range(blocks))

    def until_then(self, *given):
        if next(count, None) is None:
            raise KeyboardInterrupt
        append(self, *given)

    monkeypatch.setattr(FeatureStore, "append", until_then)


@pytest.mark.parametrize("suffix", WRITERS)
def test_interrupted_is_uninterrupted_to_the_byte(model, photos, tmp_path, small_blocks, monkeypatch, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    whole, again = tmp_path / f"whole{suffix}", tmp_path / f"again{suffix}"
    embed(model, str(photos), whole)
    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopped_after(2, stopping)
        embed(model, str(photos), again)
    assert not again.exists() and (tmp_path / f"again{suffix}.partial").is_dir()
    made, compute = [], feature_store.feature_batches

    def noted(backbones, source, *more, **named):
        made.append(len(source))
        return compute(backbones, source, *more, **named)

    monkeypatch.setattr(feature_store, "feature_batches", noted)
    embed(model, str(photos), again)
    assert made == [6, 8, 10]  # what is left of the training split, and the other two
    assert whole.read_bytes() == again.read_bytes()
    assert not (tmp_path / f"again{suffix}.partial").exists()


@pytest.mark.parametrize("damage", ["rows", "journal", "cut", "other model"])
def test_what_is_left_is_verified(model, photos, tmp_path, small_blocks, monkeypatch, damage):
    whole, again = tmp_path / "whole.npy", tmp_path / "again.npy"
    embed(model, str(photos / "train"), whole)
    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopped_after(2, stopping)
        embed(model, str(photos / "train"), again, normalise=damage == "other model")
    rows, journal = (tmp_path / "again.npy.partial" / name for name in ("rows.f32", "journal.jsonl"))
    content = bytearray(rows.read_bytes())
    if damage == "rows":
        content[len(content) * 3 // 4] ^= 1
        rows.write_bytes(content)
    elif damage == "journal":
        journal.write_text(journal.read_text().replace('"done": 16', '"done": 17'))
    elif damage == "cut":
        rows.write_bytes(content[:-5])
    embed(model, str(photos / "train"), again)
    assert whole.read_bytes() == again.read_bytes()


# -------------------------------------------------------------------------------------------------------- search


def unit(features) -> torch.Tensor:
    return F.normalize(torch.as_tensor(features), dim=1)


def test_search_is_brute_force_and_quick_the_second_time(model, photos, tmp_path, monkeypatch):
    asked = [photos / "train" / "ants" / "01.png", tmp_path / "new.png"]
    smooth(99).save(asked[1])
    found = search(model, str(photos), asked, top=5, out=tmp_path / "out")
    embed(model, str(photos), tmp_path / "f.npy")
    paths = [row["path"] for row in read_csv(tmp_path / "f.npy.csv")]
    backbone = load_backbone(model)
    for query, one in zip(asked, found, strict=True):
        expected = unit(np.load(tmp_path / "f.npy")) @ unit(backbone(backbone.preprocess(query)).detach())[0]
        order = expected.argsort(descending=True)[:5]
        assert [match.path for match in one.matches] == [paths[i] for i in order]
        assert torch.allclose(torch.tensor([match.score for match in one.matches]), expected[order], atol=1e-5)
    assert found[0].matches[0].path == "train/ants/01.png"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"search.html", "search.png", "search.csv"}
    assert len(read_csv(tmp_path / "out" / "search.csv")) == 10
    monkeypatch.setattr(feature_store, "feature_batches", None)  # would be called to compute anything
    assert search(model, str(photos), asked, top=5) == found
    assert len(search(model, str(photos), asked[:1], top=1000)[0].matches) == 39


def test_two_searches_at_once_compute_once(model, photos, tmp_path, monkeypatch, capsys):
    """The second waits for what the first computes, and reads it."""
    query, other = photos / "train" / "ants" / "01.png", tmp_path / "other"
    (other / "a").mkdir(parents=True)
    for number in range(3):
        smooth(200 + number).save(other / "a" / f"{number}.png")
    inside, go_on, fill = threading.Event(), threading.Event(), feature_store.fill

    def slowly(*given, **named):
        inside.set()
        go_on.wait(20)
        fill(*given, **named)

    monkeypatch.setattr(index, "fill", slowly)
    monkeypatch.setattr(index, "PATIENCE", 0.05)
    monkeypatch.setattr(index.time, "sleep", lambda seconds: go_on.set())
    found = []
    first = threading.Thread(target=lambda: found.append(search(model, str(other), [query], top=3)))
    first.start()
    assert inside.wait(20)
    found.append(search(model, str(other), [query], top=3))
    first.join()
    assert found[0] == found[1] and len(found[0][0].matches) == 3
    assert "another command computes these features" in capsys.readouterr().out


def line_of(capsys, *words) -> str:
    """The one line with which a command is refused."""
    sys.argv = ["tico", *map(str, words)]
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_python_takes_one_query_or_several(model, photos):
    query = next(path for path in sorted(photos.rglob("*.png")))
    several = search(model, str(photos), [query], top=3)
    assert search(model, str(photos), str(query), top=3) == search(model, str(photos), query, top=3) == several


def test_bad_input_is_one_line(model, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    smooth(1).save(tmp_path / "one" / "a.png")
    Path("notes.png").write_text("hello")
    assert "notes.png: cannot be read as an image" in line_of(capsys, "search", model, photos, "--query", "notes.png")
    assert "empty: no images found" in line_of(capsys, "search", model, "empty", "--query", "one/a.png")
    assert "empty: no images found" in line_of(capsys, "curate", model, "empty")
    assert "nothing to be compared with" in line_of(capsys, "curate", model, "one")
    assert "--subset=40: there are only 39 images" in line_of(capsys, "curate", model, photos, "--subset", 40)
    assert not Path("curated").exists()


def test_the_commands_say_what_they_found(model, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    query = photos / "test" / "ants" / "34.png"
    monkeypatch.setattr(sys, "argv", ["tico", "search", str(model), str(photos), "--query", str(query), "--top", "2"])
    main_ends_well()
    said = capsys.readouterr().out
    assert "1.0000" in said and "test/ants/34.png" in said
    monkeypatch.setattr(sys, "argv", ["tico", "curate", str(model), str(photos), "--subset", "3", "--out", "c"])
    main_ends_well()
    said = capsys.readouterr().out
    assert "39 of " in said and "subset     3;" in said and "wrote      c/curate.html" in said


def main_ends_well():
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


# -------------------------------------------------------------------------------------------------------- curate


def points(count: int, width: int, seed: int) -> torch.Tensor:
    return unit(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)))


def brute_force_components(rows, threshold) -> list[list[int]]:
    near = rows @ rows.T >= threshold
    left, found = set(range(len(rows))), []
    while left:
        part, front = set(), {min(left)}
        while front:
            part |= front
            front = {int(j) for i in front for j in near[i].nonzero().ravel()} - part
        left -= part
        found.append(sorted(part))
    return sorted(part for part in found if len(part) > 1)


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 0.95])
def test_groups_are_connected_components(monkeypatch, threshold):
    monkeypatch.setattr(duplicates, "ROWS", 8)
    monkeypatch.setattr(duplicates, "COLUMNS", 16)
    rows = points(90, 5, seed=1)
    nearest = outliers.neighbour_cosines(rows, 1, CPU, 32)[:, 0]
    assert groups(rows, nearest, threshold, CPU) == brute_force_components(rows, threshold)


def test_exact_copies_are_found_at_one():
    """The length of a row is one but for rounding, and so is the cosine of a copy."""
    rows = F.normalize(torch.randn(300, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    rows = torch.cat([rows, rows])
    cosines = (rows @ rows.T).fill_diagonal_(-1)
    assert (cosines.max(dim=1).values < 1).any()
    assert groups(rows, cosines.max(dim=1).values, 1.0, CPU) == [[i, i + 300] for i in range(300)]


def test_the_threshold_separates_copies_from_neighbours():
    """Whatever the scale of the distances, and also where every fourth image has a copy."""
    rows = points(2_000, 64, seed=2)
    for copies in (0, 20, 500):
        noise = torch.randn(copies, 64, generator=torch.Generator().manual_seed(3))
        both = unit(torch.cat([rows, rows[:copies] + 0.002 * noise]))
        for shift in (0.0, 5.0):  # far from the origin, all cosines are near 1
            seen = unit(both + shift * F.one_hot(torch.tensor(0), 64))
            nearest = outliers.neighbour_cosines(seen, 1, CPU, 4_096)[:, 0]
            found = groups(seen, nearest, chosen_threshold(nearest).cosine, CPU)
            group_of = {place: number for number, group in enumerate(found) for place in group}
            assert all(group_of[place] == group_of[2_000 + place] for place in range(copies))
            assert sum(map(len, found)) - 2 * copies <= 2 * RARE * 2_000  # ordinary images; half of that is expected


def test_outlier_scores_are_mean_distances_to_neighbours():
    rows = points(50, 4, seed=4)
    cosines = (rows @ rows.T).fill_diagonal_(-2)
    expected = cosines.topk(7, dim=1).values
    assert torch.allclose(outliers.neighbour_cosines(rows, 7, CPU, 16), expected, atol=1e-6)


def greedy_centres(rows, count) -> list[int]:
    """By the definition, in double precision."""
    distances = 1 - rows.double() @ rows.double().T
    chosen = [int(distances.mean(dim=1).argmin())]
    while len(chosen) < count:
        chosen.append(int(distances[:, chosen].amin(dim=1).argmax()))
    return chosen


@pytest.mark.parametrize(("count", "width", "seed"), [(1, 3, 0), (2, 3, 1), (40, 3, 2), (60, 16, 3)])
def test_k_centre_is_the_greedy_one(count, width, seed):
    rows = points(count, width, seed)
    chosen, far = k_centre(rows, count, CPU)
    assert chosen[0] == medoid(rows)
    assert chosen == greedy_centres(rows, count) and sorted(chosen) == list(range(count))
    assert all(a >= b - 1e-6 for a, b in pairwise(far[1:]))


def test_of_equal_images_each_is_chosen_once():
    chosen, far = k_centre(points(1, 4, seed=0).expand(5, -1), 5, CPU)
    assert sorted(chosen) == [0, 1, 2, 3, 4] and max(far) < 1e-6


@pytest.fixture(scope="module")
def dirty(tmp_path_factory) -> Path:
    """Sixty pictures; of twelve there is a copy: exact, encoded again or cropped. Three are stripes of cold colours."""
    root = tmp_path_factory.mktemp("dirty") / "<b>photos"
    (root / "a&b").mkdir(parents=True)
    (root / "z").mkdir()
    for number in range(60):
        smooth(number, 64).save(root / "a&b" / f"{number:02}.png")
    for number in range(12):
        path = root / "z" / f"{number:02}<i>.png"
        if number < 4:
            path.write_bytes((root / "a&b" / f"{number:02}.png").read_bytes())
        elif number < 8:
            content = io.BytesIO()
            smooth(number, 64).save(content, "JPEG", quality=80)
            Image.open(content).save(path)
        else:
            smooth(number, 64).crop((1, 1, 63, 63)).save(path)
    for number in range(3):
        stripes = np.indices((64, 64)).sum(axis=0) // (number + 1) % 2 * 255
        cold = np.stack([0 * stripes, stripes, 0 * stripes + 255], axis=-1)
        Image.fromarray(cold.astype(np.uint8)).save(root / "z" / f"odd{number}.png")
    return root


def test_planted_copies_and_outliers_are_found(model, dirty, tmp_path):
    found = curate(model, str(dirty), tmp_path / "out", subset=5)
    expected = {(f"a&b/{number:02}.png", f"z/{number:02}<i>.png") for number in range(12)}
    assert expected <= {tuple(sorted(member.path for member in group)) for group in found.groups}
    assert len(found.groups) <= 14
    assert {member.path for member in found.outliers[:3]} == {f"z/odd{number}.png" for number in range(3)}
    assert found.across_classes >= 12 and found.across_splits == 0
    rows = read_csv(tmp_path / "out" / "duplicates.csv")
    assert len(rows) == found.copies and rows[0]["member"] == "1" and float(rows[0]["nearest_cosine"]) > 0.999
    assert len(read_csv(tmp_path / "out" / "outliers.csv")) == 75
    assert [row["path"] for row in read_csv(tmp_path / "out" / "subset.csv")] == [m.path for m in found.subset]
    assert (tmp_path / "out" / "figures" / "nearest-neighbours.png").is_file()
    page = (tmp_path / "out" / "curate.html").read_text(encoding="utf-8")
    assert "<i>" not in page and "<b>" not in page
    assert "z/00&lt;i&gt;.png" in page and "a&amp;b/00.png" in page
    assert not list(dirty.parent.glob("*.csv")) and len([*dirty.rglob("*.png")]) == 75


CURATED = ("curate.html", "duplicates.csv", "outliers.csv", "figures")


def test_a_folder_has_the_files_of_the_last_call_alone(model, photos, tmp_path):
    out = tmp_path / "out"
    curate(model, str(photos), out, subset=2)
    assert len(read_csv(out / "subset.csv")) == 2
    curate(model, str(photos), out)
    assert {file.name for file in out.iterdir()} == {*CURATED, "bad_files.jsonl"}


def test_two_commands_never_write_to_one_folder(model, photos, tmp_path):
    query = next(photos.rglob("*.png"))
    with alone_in(tmp_path / "out", ""):
        for command in (
            lambda: curate(model, str(photos), tmp_path / "out"),
            lambda: search(model, str(photos), [query], out=tmp_path / "out"),
        ):
            with pytest.raises(UserError, match=r"another command writes to .*: wait for its end, or choose another"):
                command()
        assert [file.name for file in (tmp_path / "out").iterdir()] == ["lock"]
        assert search(model, str(photos), [query])


def test_a_threshold_may_be_given(model, dirty, tmp_path):
    found = curate(model, str(dirty), tmp_path / "none", threshold=-1)
    assert [len(group) for group in found.groups] == [75]
    assert "75 images, of which 12 are shown" in (tmp_path / "none" / "curate.html").read_text()
    with pytest.raises(UserError, match="a cosine is from -1 to 1"):
        curate(model, str(dirty), threshold=1.5)


def test_formats_are_known_without_torch():
    assert sorted(WRITERS) == sorted(embedding.SUFFIXES)
