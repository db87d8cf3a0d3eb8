"""Parquet files of images: the columns that are found, rows in any order, and what is said when something is wrong."""

import io
import json
import multiprocessing
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import BadImage, Reading
from tico_ssl.data.formats import parquet
from tico_ssl.data.formats.parquet import matches, open_parquet
from tico_ssl.data.sources import open_source
from tico_ssl.runtime.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def pixels(seed: int, height: int = 9, width: int = 7) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(seed).permute(1, 2, 0).numpy()).save(stream, "PNG")
    return stream.getvalue()


def structs(seeds, kind=STRUCT):
    rows = [{"bytes": png(seed), "path": f"{seed}.png"} for seed in seeds]
    return pa.array([{field.name: row[field.name] for field in kind} for row in rows], type=kind)


def write(path: Path, seeds=range(10), names: list[str] | None = None, rows: int = 3, **columns) -> Path:
    """A file in groups of three rows. Columns may replace `image` and `label`, or take them away."""
    seeds = list(seeds)
    columns = {"image": structs(seeds), "label": pa.array([seed % 3 for seed in seeds]), **columns}
    table = pa.table({name: column for name, column in columns.items() if column is not None})
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def check(source, seeds) -> None:
    """The images of a source are those of these seeds."""
    seeds = list(seeds)
    assert len(source) == len(seeds)
    for place, seed in enumerate(seeds):
        assert torch.equal(source.fetch(place), pixels(seed))


def error_of(path: Path, *mentions: str, split: str = "train") -> None:
    with pytest.raises(UserError) as caught:
        open_parquet(path, split)
    line = str(caught.value)
    assert "\n" not in line
    for text in mentions:
        assert text in line


# ---------------------------------------------------------------------------------------------------- contents


def test_pixels_labels_names_and_classes(tmp_path):
    source = open_parquet(write(tmp_path / "x.parquet", names=["cat", "dog", "owl"]))
    check(source, range(10))
    assert source.labels.tolist() == [seed % 3 for seed in range(10)]
    assert source.labels.dtype == torch.int64
    assert source.classes == ("cat", "dog", "owl")
    assert source.name == "x.parquet"
    assert source.images is None
    assert [source.names(i) for i in (0, 9)] == ["x.parquet:0", "x.parquet:9"]


@pytest.mark.parametrize(
    "columns",
    [
        {"image": pa.array([png(i) for i in range(10)])},
        {"image": pa.array([png(i) for i in range(10)], type=pa.large_binary())},
        {"image": structs(range(10), pa.struct([("bytes", pa.large_binary())]))},
        {"image": None, "img": structs(range(10))},
        {"image": None, "photo": structs(range(10)), "data": pa.array([b"x"] * 10)},
        {"image": pa.array(["a path"] * 10), "photo": structs(range(10))},
        {"image_id": pa.array(range(10)), "mask": structs(range(20, 30))},
    ],
)
def test_columns_of_images(tmp_path, columns):
    check(open_parquet(write(tmp_path / "x.parquet", **columns)), range(10))


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"label": None, "labels": pa.array(range(10))}, list(range(10))),
        ({"label": None, "fine_label": pa.array([2] * 10, type=pa.uint8())}, [2] * 10),
        ({"label": pa.array(["dog"] * 10), "labels": pa.array([1] * 10)}, [1] * 10),
        ({"label": None}, None),
        ({"label": pa.array(["dog"] * 10)}, None),
        ({"label": pa.array([1.0] * 10)}, None),
        ({"label": pa.array([-1] + [1] * 9)}, None),
        ({"label": pa.array([None] + [1] * 9)}, None),
    ],
)
def test_columns_of_labels(tmp_path, columns, labels):
    source = open_parquet(write(tmp_path / "x.parquet", names=["a"], **columns))
    assert labels == (None if source.labels is None else source.labels.tolist())
    assert source.classes == ()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"info": {"features": {"label": {"names": {"0": "a"}}}}}', "null"])
def test_a_strange_description_gives_no_classes(tmp_path, text):
    table = pq.read_table(write(tmp_path / "x.parquet")).replace_schema_metadata({"huggingface": text})
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_parquet(tmp_path / "x.parquet")
    assert source.classes == ()
    assert source.labels is not None


def test_every_file_lists_its_classes_in_an_order_of_its_own(tmp_path):
    names = ["bear", "cat", "dog"]
    write(tmp_path / "train-0.parquet", range(3), names, label=pa.array([0, 1, 2]))
    write(tmp_path / "train-1.parquet", range(2), ["dog", "bear"], label=pa.array([0, 1]))
    write(tmp_path / "test-0.parquet", range(2), ["cat", "dog"], label=pa.array([0, 1]))
    write(tmp_path / "test-1.parquet", range(2), label=pa.array([2, 1]))  # without names, with the same numbers
    assert open_parquet(tmp_path).labels.tolist() == [0, 1, 2, 2, 0]
    test = open_parquet(tmp_path, "test")
    assert (test.labels.tolist(), test.classes) == ([1, 2, 2, 1], tuple(names))
    write(tmp_path / "test-0.parquet", range(2), ["owl", "dog"], label=pa.array([1, 1]))
    assert open_parquet(tmp_path, "test").labels.tolist() == [2, 2, 2, 1]
    write(tmp_path / "test-0.parquet", range(2), ["owl", "dog"], label=pa.array([0, 1]))
    with pytest.raises(UserError, match=r"test-0.parquet: class 'owl' is none of those of the training images"):
        open_parquet(tmp_path, "test")
    for file in [*tmp_path.glob("train*"), tmp_path / "test-1.parquet"]:
        file.unlink()
    assert open_parquet(tmp_path, "test").classes == ("owl", "dog")


def test_names_for_too_few_labels_are_none(tmp_path):
    assert open_parquet(write(tmp_path / "x.parquet", names=["cat"])).classes == ()


def test_channels(tmp_path):
    assert open_parquet(write(tmp_path / "x.parquet"), reading=Reading(1)).fetch(0).shape == (1, 9, 7)
    stream, array = io.BytesIO(), np.arange(60, dtype=np.uint8).reshape(5, 4, 3)
    np.save(stream, array)
    column = pa.array([{"bytes": stream.getvalue(), "path": "a.npy"}], type=STRUCT)
    source = open_parquet(write(tmp_path / "y.parquet", [0], image=column), reading=Reading(5))
    assert torch.equal(source.fetch(0), torch.from_numpy(array))


def test_missing_and_bad_images_are_named(tmp_path):
    rows = [None, {"bytes": None, "path": "a.png"}, {"bytes": b"nothing", "path": "b.png"}, {"bytes": png(3)}]
    column = pa.array([*rows, {"bytes": b"", "path": None}], type=STRUCT)
    source = open_parquet(write(tmp_path / "x.parquet", range(5), image=column))
    for place in (0, 1):
        with pytest.raises(BadImage, match=rf"x\.parquet:{place}.*no image"):
            source.fetch(place)
    with pytest.raises(BadImage, match=r"x\.parquet:2:b\.png"):
        source.fetch(2)
    assert torch.equal(source.fetch(3), pixels(3))
    with pytest.raises(BadImage, match="empty"):
        source.fetch(4)


# ---------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("inside", ["", "data"])
def test_splits_by_the_names_of_files(tmp_path, inside):
    root = tmp_path / "set"
    folder = root / inside
    write(folder / "train-00001-of-00002.parquet", range(10, 14))
    write(folder / "train-00000-of-00002.parquet", range(10))
    write(folder / "validation-00000-of-00001.parquet", range(20, 25))
    train, test = open_parquet(root), open_parquet(root, "test")
    check(train, range(14))
    check(test, range(20, 25))
    assert train.labels.tolist() == [seed % 3 for seed in range(14)]
    assert train.names(10) == "train-00001-of-00002.parquet:0"
    assert train.name == "set"
    write(folder / "test.parquet", range(30, 32))
    check(open_parquet(root, "test"), range(30, 32))


TRAIN, TEST, VALIDATION = range(7), range(10, 13), range(20, 22)


@pytest.mark.parametrize(
    "files",
    [
        {"data/train-00000-of-00002": TRAIN[:4], "data/train-00001-of-00002": TRAIN[4:], "data/test-0": TEST},
        {"data/train-0": TRAIN, "data/validation-0": VALIDATION},
        {"data/train/0000": TRAIN[:2], "data/train/0001": TRAIN[2:], "data/validation/0000": VALIDATION},
        {"plain_text/train-00000-of-00001": TRAIN, "plain_text/test-00000-of-00001": TEST},
        {"default/train/0000": TRAIN[:5], "default/train/0001": TRAIN[5:], "default/test/0000": TEST},
        {"default/partial-train/0000": TRAIN, "default/partial-validation/0000": VALIDATION},
        {"train/0000": TRAIN, "validation/0000": VALIDATION, "test/0000": TEST},
        {"cropped/train-0": TRAIN, "cropped/valid-0": VALIDATION},
        {"0000": TRAIN[:3], "0001": TRAIN[3:]},
        {"default/0000": TRAIN},
        {"Data/Train-0": TRAIN, "Data/Test-0": TEST},
    ],
)
def test_layouts_of_the_hub(tmp_path, files):
    root = tmp_path / "set"
    for name, seeds in files.items():
        write(root / f"{name}.parquet", seeds)
    (root / "README.md").write_text("about")
    (root / ".cache" / "train").mkdir(parents=True)
    (root / "preview.png").write_bytes(png(0))
    config = DataConfig(source=str(root))
    train, test = open_source(config), open_source(config, "test")
    check(train, TRAIN)
    assert train.name == "set"
    expected = next((seeds for seeds in (TEST, VALIDATION) if seeds in files.values()), None)
    if expected is None:
        assert test is None
    else:
        check(test, expected)


def test_several_configurations_are_to_be_chosen_from(tmp_path):
    for name in ("full_numbers", "cropped_digits"):
        write(tmp_path / name / "train-0.parquet", TRAIN)
    error_of(tmp_path, "cropped_digits, full_numbers", f"such as {tmp_path}/cropped_digits")
    check(open_source(DataConfig(source=str(tmp_path / "full_numbers"))), TRAIN)


def test_folders_of_images_are_not_taken_for_parquet(tmp_path):
    """Files beside images or deep inside describe them."""
    for name in ("train/cats/0", "train/dogs/0", "test/cats/0"):
        (tmp_path / f"{name}.png").parent.mkdir(parents=True)
        (tmp_path / f"{name}.png").write_bytes(png(0))
    for name in ("", "deep"):
        write(tmp_path / "train" / "cats" / name / "metadata.parquet")
        assert not matches(str(tmp_path / "train"))
    assert not matches(str(tmp_path))
    assert not matches(str(tmp_path / "nowhere"))
    assert open_source(DataConfig(source=str(tmp_path))).classes == ("cats", "dogs")


def test_files_whose_names_say_nothing_are_for_training(tmp_path):
    write(tmp_path / "0000.parquet", range(3))
    write(tmp_path / "0001.parquet", range(3, 6))
    (tmp_path / "._0001.parquet").write_bytes(b"mac")
    check(open_parquet(tmp_path), range(6))
    assert open_parquet(tmp_path, "test") is None
    write(tmp_path / "val.parquet", range(6, 8))
    check(open_parquet(tmp_path), range(6))
    check(open_parquet(tmp_path, "test"), range(6, 8))


def test_a_single_file_is_for_training(tmp_path):
    path = write(tmp_path / "test-0.parquet")
    check(open_parquet(path), range(10))
    assert open_parquet(path, "test") is None


def test_labels_only_if_all_files_have_them(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", label=None)
    source = open_parquet(tmp_path)
    assert len(source) == 20
    assert source.labels is None


def test_empty_files_and_groups_among_others(tmp_path):
    write(tmp_path / "a.parquet", [])
    write(tmp_path / "b.parquet", range(4))
    with pq.ParquetWriter(tmp_path / "c.parquet", pq.read_schema(tmp_path / "b.parquet")) as writer:
        table = pq.read_table(tmp_path / "b.parquet")
        for part in (table[:0], table[:2], table[:0], table[2:], table[:0]):
            writer.write_table(part)
    check(open_parquet(tmp_path), [*range(4), *range(4)])


# ---------------------------------------------------------------------------------------------------- groups


@pytest.fixture
def reads(monkeypatch):
    """Counts the groups that are read."""
    counted, read = [], parquet.Reader._read
    lock = threading.Lock()

    def counting(self, process, group):
        with lock:
            counted.append(group)
        return read(self, process, group)

    monkeypatch.setattr(parquet.Reader, "_read", counting)
    return counted


def test_groups_are_read_once_while_they_fit(tmp_path, reads):
    source = open_parquet(write(tmp_path / "x.parquet", range(30)))
    places = list(range(30)) * 2
    random.Random(0).shuffle(places)
    for place in places:
        assert torch.equal(source.fetch(place), pixels(place))
    assert sorted(reads) == list(range(10))


def test_the_budget_bounds_what_is_kept(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 1)
    source = open_parquet(write(tmp_path / "x.parquet", range(9)))
    check(source, range(9))
    assert reads == [0, 1, 2]
    for place in (0, 8, 1):
        source.fetch(place)
    assert reads == [0, 1, 2, 0, 2, 0]


def test_threads_read_a_group_once(tmp_path, reads):
    source = open_parquet(write(tmp_path / "x.parquet", range(30)))
    places = list(range(30)) * 10
    random.Random(0).shuffle(places)
    with ThreadPoolExecutor(8) as pool:
        for place, image in zip(places, pool.map(source.fetch, places)):
            assert torch.equal(image, pixels(place))
    assert sorted(reads) == list(range(10))


def test_threads_beyond_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 1)
    source = open_parquet(write(tmp_path / "x.parquet", range(12)))
    places = list(range(12)) * 20
    random.Random(0).shuffle(places)
    with ThreadPoolExecutor(8) as pool:
        for place, image in zip(places, pool.map(source.fetch, places)):
            assert torch.equal(image, pixels(place))


def _in_a_fork(source, places, answers) -> None:
    answers.put([bool(torch.equal(source.fetch(place), pixels(place))) for place in places])


def test_forks(tmp_path):
    source = open_parquet(write(tmp_path / "x.parquet", range(12)))
    check(source, range(12))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_in_a_fork, args=(source, range(12), answers)) for _ in range(2)]
    for process in processes:
        process.start()
    check(source, range(12))
    assert [answers.get(timeout=30) for _ in processes] == [[True] * 12] * 2
    for process in processes:
        process.join()


def test_a_shuffle_of_five_thousand(tmp_path):
    """Groups of a hundred, as the hub writes them."""
    pool = [png(seed) for seed in range(50)]
    column = pa.array([{"bytes": pool[i % 50], "path": None} for i in range(5_000)], type=STRUCT)
    source = open_parquet(write(tmp_path / "x.parquet", range(5_000), rows=100, image=column))
    expected = [pixels(seed) for seed in range(50)]
    for place in torch.randperm(5_000, generator=torch.Generator().manual_seed(0)).tolist():
        assert torch.equal(source.fetch(place), expected[place % 50])


# ---------------------------------------------------------------------------------------------------- errors


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    error_of(path, "pip install ", "[parquet]'")


def test_nothing_there(tmp_path):
    error_of(tmp_path / "none.parquet", "none.parquet")
    error_of(tmp_path, str(tmp_path), "no .parquet files")
    error_of(write(tmp_path / "empty.parquet", []), "empty.parquet", "no rows")
    (tmp_path / "empty.parquet").rename(tmp_path / "test.parquet")
    error_of(tmp_path, "no training files", "test.parquet")


@pytest.mark.parametrize(
    "columns",
    [
        {"image": None},
        {"image": pa.array(["a path"] * 10)},
        {"image": pa.array([{"path": "a"}] * 10)},
        {"image": pa.array([{"bytes": "text"}] * 10)},
        {"image": None, "a": structs(range(10)), "b": structs(range(10))},
    ],
)
def test_no_column_of_images(tmp_path, columns):
    error_of(write(tmp_path / "x.parquet", **columns), "x.parquet", "label (int64)", *(columns.keys() - {"image"}))


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "footer"])
def test_damaged_files_are_named(tmp_path, damage):
    write(tmp_path / "a.parquet")
    path = write(tmp_path / "b.parquet")
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    damages = {
        "cut": data[: len(data) // 2],
        "text": b"<html>404</html>",
        "empty": b"",
        "footer": data[:footer] + b"\xff" * 100 + data[footer + 100 :],
    }
    path.write_bytes(damages[damage])
    error_of(tmp_path, "b.parquet", "not a readable parquet file")


def test_a_damaged_group_is_bad_images(tmp_path):
    path = write(tmp_path / "x.parquet", label=None)
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[start : start + 60] = bytes(60)
    path.write_bytes(data)
    source = open_parquet(path)
    assert torch.equal(source.fetch(0), pixels(0))
    with pytest.raises(BadImage, match=r"x\.parquet:4"):
        source.fetch(4)
    assert torch.equal(source.fetch(9), pixels(9))


def test_damaged_labels(tmp_path):
    path = write(tmp_path / "x.parquet")
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(2)
    start = column.dictionary_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    error_of(path, "x.parquet", "label")


def test_a_file_that_goes_away(tmp_path):
    path = write(tmp_path / "x.parquet")
    source = open_parquet(path)
    path.unlink()
    with pytest.raises(BadImage, match="No such file"):
        source.fetch(0)
