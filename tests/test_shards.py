"""Tar shards: every image of them in any order, and an index that is never trusted more than the shard."""

import gzip
import io
import json
import multiprocessing
import os
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl.data.decoding import BadImage, Reading
from tico_ssl.data.formats import _tar_index, shards
from tico_ssl.data.formats._tar_index import index_places
from tico_ssl.data.formats.shards import expand_braces, open_shards
from tico_ssl.runtime.errors import UserError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(seed: int, height: int = 9, width: int = 7) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def png(seed: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(seed).permute(1, 2, 0).numpy()).save(stream, kind)
    return stream.getvalue()


def pack(path, files: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def labelled(seeds) -> list[tuple[str, bytes]]:
    return [
        file
        for seed in seeds
        for file in ((f"{seed:04d}.png", png(seed)), (f"{seed:04d}.cls", f"{seed % 3}\n".encode()))
    ]


@pytest.fixture
def folder(tmp_path):
    """Three shards of four images, 0 to 11."""
    for number in range(3):
        pack(tmp_path / "shards" / f"train-{number:04d}.tar", labelled(range(4 * number, 4 * number + 4)))
    return tmp_path / "shards"


def check(source, seeds) -> None:
    """The images of a source are those of these seeds."""
    seeds = list(seeds)
    assert len(source) == len(seeds)
    for place, seed in enumerate(seeds):
        assert torch.equal(source.fetch(place), pixels(seed))


def error_of(pattern, *mentions: str) -> None:
    with pytest.raises(UserError) as caught:
        open_shards(str(pattern))
    line = str(caught.value)
    assert "\n" not in line
    for text in mentions:
        assert text in line


# ---------------------------------------------------------------------------------------------------- contents


def test_pixels_labels_and_names(folder):
    source = open_shards(str(folder))
    check(source, range(12))
    assert source.labels.tolist() == [seed % 3 for seed in range(12)]
    assert source.labels.dtype == torch.int64
    assert source.name == "shards"
    assert source.images is None
    assert source.names(0) == "train-0000.tar:0000"
    assert source.names(11) == "train-0002.tar:0011"


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_and_folders(tmp_path, form):
    """Longer than a header has room for, and dots in folders do not end a key."""
    long = "v1.0/" + "deep/" * 40 + "n" * 120
    shard = pack(tmp_path / "x.tar", [("./a/0.png", png(0)), (f"{long}.png", png(1)), ("häß/x.png", png(2))], form)
    source = open_shards(str(shard))
    check(source, range(3))
    assert [source.names(i) for i in range(3)] == ["x.tar:a/0", f"x.tar:{long}", "x.tar:häß/x"]


def test_names_that_are_not_utf8(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for number, name in enumerate(["é.png", "è.png"]):
            member = tarfile.TarInfo(name)
            member.size = len(png(number))
            tar.addfile(member, io.BytesIO(png(number)))
    source = open_shards(str(tmp_path / "x.tar"))
    check(source, range(2))
    assert source.names(0).encode() == rb"x.tar:\xe9"


def test_what_is_not_an_image_is_passed_over(tmp_path):
    files = [
        ("._a.png", b"mac"),
        (".hidden/a.png", b"x"),
        ("sub/.b.png", b"x"),
        ("a.txt", b"a caption"),
        ("a.PNG", png(0)),
        ("LICENSE", b"text"),
        ("b.cls", b"1"),
    ]
    source = open_shards(str(pack(tmp_path / "x.tar", files)))
    check(source, [0])
    assert source.labels is None


def test_the_plainest_and_first_image_of_a_key(tmp_path):
    files = [
        ("a.mask.png", png(9)),
        ("a.npy", b"embedding"),
        ("a.png", png(0)),
        ("a.cls", b"4"),
        ("a.png", png(8)),
        ("a.cls", b"5"),
        ("b.png", png(1)),
        ("b.cls", b"2"),
    ]
    source = open_shards(str(pack(tmp_path / "x.tar", files)))
    check(source, [0, 1])
    assert source.labels.tolist() == [4, 2]


def test_arrays_of_many_channels(tmp_path):
    array = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    stream = io.BytesIO()
    np.save(stream, array)
    source = open_shards(str(pack(tmp_path / "x.tar", [("a.npy", stream.getvalue())])), Reading(5))
    assert torch.equal(source.fetch(0), torch.from_numpy(array))


def test_one_channel(folder):
    assert open_shards(str(folder), Reading(1)).fetch(0).shape == (1, 9, 7)


def test_labels_in_json_unless_there_is_a_cls(tmp_path):
    files = [
        ("a.png", png(0)),
        ("a.json", b'{"label": 7, "more": []}'),
        ("b.json", json.dumps({"label": 1}).encode()),
        ("b.png", png(1)),
        ("b.cls", b"3"),
    ]
    assert open_shards(str(pack(tmp_path / "x.tar", files))).labels.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.txt", b"1"),
        ("b.cls", b"dog"),
        ("b.cls", b"-1"),
        ("b.cls", b"1.5"),
        ("b.cls", b""),
        ("b.cls", b"9" * 30),
        ("b.json", b'{"label": "dog"}'),
        ("b.json", b'{"label": true}'),
        ("b.json", b'{"label": 1.0}'),
        ("b.json", b'{"caption": "dog"}'),
        ("b.json", b"[1]"),
        ("b.json", b"3"),
        ("b.json", b"{"),
        ("b.json", b"\xff\xfe"),
    ],
)
def test_one_image_without_a_label_means_none(tmp_path, name, text):
    files = [("a.png", png(0)), ("a.cls", b"1"), ("b.png", png(1)), (name, text)]
    source = open_shards(str(pack(tmp_path / "x.tar", files)))
    assert len(source) == 2
    assert source.labels is None


@pytest.mark.parametrize("place", ["classes.txt", "classnames.txt", "../classes.txt", "../classnames.txt"])
def test_classes_are_named_beside_the_shards_or_above(folder, place):
    assert open_shards(str(folder)).classes == ()
    (folder / place).write_bytes("cat\r\n big dog \nKäuzchen\n\n".encode())
    for pattern in (folder, folder / "train-0001.tar", folder / "train-{0000..0001}.tar"):
        assert open_shards(str(pattern)).classes == ("cat", "big dog", "Käuzchen")
    (folder / "classes.txt").write_text("a\nb\nc\nunseen")  # the nearest counts, and more names than labels are fine
    assert open_shards(str(folder)).classes == ("a", "b", "c", "unseen")


@pytest.mark.parametrize("text", ["", "cat\ndog"])
def test_too_few_class_names_are_none(folder, text):
    (folder / "classes.txt").write_text(text)
    source = open_shards(str(folder))
    assert source.classes == ()
    assert source.labels is not None


def test_images_without_labels_have_no_classes(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\ndog")
    assert open_shards(str(pack(tmp_path / "x.tar", [("a.png", png(0))]))).classes == ()


def test_a_bad_image_is_named(tmp_path):
    shard = pack(tmp_path / "x.tar", [("a.png", b"nothing"), ("b.png", b""), ("c.png", png(2))])
    source = open_shards(str(shard))
    with pytest.raises(BadImage, match=r"x\.tar:a\.png"):
        source.fetch(0)
    with pytest.raises(BadImage, match="empty"):
        source.fetch(1)
    assert torch.equal(source.fetch(2), pixels(2))


# ---------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "seeds"),
    [
        ("train-0001.tar", range(4, 8)),
        ("", range(12)),
        ("*.tar", range(12)),
        ("*", range(12)),
        ("train-000[02].tar", [*range(4), *range(8, 12)]),
        ("train-{0000..0002}.tar", range(12)),
        ("train-{0002..0001}.tar", range(4, 12)),
        ("{train,train}-{000,000}{0,2}.tar", [*range(4), *range(8, 12)]),
        ("tr{ain-00{00..01},ain-0002}.tar", range(12)),
        ("train-000{0..1}*", range(8)),
    ],
)
def test_patterns(folder, pattern, seeds):
    open_shards(str(folder))  # leaves index files, which a glob must not take for shards
    check(open_shards(f"{folder}/{pattern}"), seeds)


def test_braces():
    assert list(expand_braces("a{8..10}")) == ["a8", "a9", "a10"]
    assert list(expand_braces("a{08..10}b")) == ["a08b", "a09b", "a10b"]
    assert list(expand_braces("{a,b}{0..1}")) == ["a0", "a1", "b0", "b1"]
    assert list(expand_braces("{a}{..}")) == ["{a}{..}"]


def test_a_name_with_braces_and_a_home(folder, tmp_path, monkeypatch):
    (folder / "train-0000.tar").rename(tmp_path / "{a,b}[1].tar")
    check(open_shards(str(tmp_path / "{a,b}[1].tar")), range(4))
    monkeypatch.setenv("HOME", str(tmp_path))
    check(open_shards("~/shards"), range(4, 12))


# ---------------------------------------------------------------------------------------------------- the index


def no_scan(shard):
    raise AssertionError(f"{shard} is scanned again")


def test_a_shard_is_scanned_once(folder, monkeypatch):
    open_shards(str(folder))
    assert len(list(folder.glob("*.tar.index.npz"))) == 3
    assert not list(folder.glob("*.tmp"))
    monkeypatch.setattr(_tar_index, "scan", no_scan)
    source = open_shards(str(folder))
    check(source, range(12))
    assert source.labels.tolist() == [seed % 3 for seed in range(12)]
    assert source.names(5) == "train-0001.tar:0005"


def test_a_stale_index_is_made_anew(folder):
    shard = folder / "train-0000.tar"
    open_shards(str(shard))
    pack(shard, labelled(range(20, 26)))
    check(open_shards(str(shard)), range(20, 26))
    check(open_shards(str(shard)), range(20, 26))


def test_a_shard_of_the_same_size_and_another_time(folder):
    shard = folder / "train-0000.tar"
    pack(shard, labelled([0]))
    open_shards(str(shard))
    size = shard.stat().st_size
    pack(shard, labelled([5]))
    os.utime(shard, ns=(1, 1))
    assert shard.stat().st_size == size
    check(open_shards(str(shard)), [5])


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "flipped", "foreign"])
def test_a_damaged_index_is_made_anew(folder, damage):
    shard = folder / "train-0000.tar"
    open_shards(str(shard))
    index = index_places(shard)[0]
    data = index.read_bytes()
    if damage == "foreign":
        np.savez(index, other=np.zeros(3))
    elif damage == "flipped":
        with np.load(index) as archive:
            place = data.index(archive["offsets"].tobytes())
        index.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    else:
        index.write_bytes({"cut": data[: len(data) // 2], "text": b"<html>", "empty": b""}[damage])
    check(open_shards(str(shard)), range(4))
    with np.load(index) as archive:
        assert len(archive["offsets"]) == 4


def test_where_nothing_can_be_written_the_cache_holds_the_index(folder, tmp_path, monkeypatch):
    """A folder in the place of the index refuses it to anyone, as a read-only folder does to all but root."""
    shard = folder / "train-0000.tar"
    beside, cached = index_places(shard)
    (beside / "x").mkdir(parents=True)
    check(open_shards(str(shard)), range(4))
    assert cached.is_file()
    assert cached.parent == tmp_path / "cache" / "tico-ssl"
    assert not list(folder.glob("*.tmp"))
    monkeypatch.setattr(_tar_index, "scan", no_scan)
    check(open_shards(str(shard)), range(4))


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder(folder):
    folder.chmod(0o555)
    try:
        check(open_shards(str(folder)), range(12))
        assert not list(folder.glob("*.npz"))
        assert index_places(folder / "train-0000.tar")[1].is_file()
    finally:
        folder.chmod(0o755)


def test_nowhere_to_write_is_no_error(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    shard = folder / "train-0000.tar"
    (index_places(shard)[0] / "x").mkdir(parents=True)
    check(open_shards(str(shard)), range(4))


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert index_places(tmp_path / "x.tar")[1].parent == tmp_path / ".cache" / "tico-ssl"
    assert index_places(tmp_path / "a" / "x.tar")[1] != index_places(tmp_path / "b" / "x.tar")[1]


# ---------------------------------------------------------------------------------------------------- many at a time


def test_threads_with_fewer_descriptors_than_shards(folder, monkeypatch):
    """Shards are closed and opened while others are read."""
    monkeypatch.setattr(shards, "OPEN_SHARDS", 1)
    source = open_shards(str(folder))
    places = [*range(12)] * 30
    random.Random(0).shuffle(places)
    with ThreadPoolExecutor(8) as pool:
        for place, image in zip(places, pool.map(source.fetch, places)):
            assert torch.equal(image, pixels(place))


def test_descriptors_are_closed(folder):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    source = open_shards(str(folder))
    check(source, range(12))
    assert len(os.listdir("/proc/self/fd")) == before + 3  # noqa: PTH208
    del source
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def _in_a_fork(source, places, answers) -> None:
    answers.put([bool(torch.equal(source.fetch(place), pixels(place))) for place in places])


def test_forks(folder):
    source = open_shards(str(folder))
    check(source, range(12))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    places = [list(range(12)), list(range(11, -1, -1))]
    processes = [context.Process(target=_in_a_fork, args=(source, order, answers)) for order in places]
    for process in processes:
        process.start()
    check(source, range(12))
    assert [answers.get(timeout=30) for _ in processes] == [[True] * 12] * 2
    for process in processes:
        process.join()


# ---------------------------------------------------------------------------------------------------- errors


def test_nothing_matches(tmp_path, folder):
    error_of(tmp_path / "none.tar", "none.tar", "no such")
    error_of(tmp_path / "*.tar", "*.tar", "no such")
    error_of(folder / "train-{0000..0005}.tar", "train-0003.tar")
    (tmp_path / "empty").mkdir()
    error_of(tmp_path / "empty", "empty", "no tar files")


def test_no_images(tmp_path):
    error_of(pack(tmp_path / "x.tar", [("a.txt", b"a"), ("a.cls", b"1")]), "x.tar", "no images")
    error_of(pack(tmp_path / "y.tar", []), "y.tar", "no images")


def test_a_shard_without_images_among_others(folder):
    pack(folder / "a.tar", [("readme.txt", b"a")])
    check(open_shards(str(folder)), range(12))


def test_compressed_shards_are_to_be_unpacked(folder, tmp_path):
    for path, name in ((folder, "x.tar.gz"), (tmp_path / "only", "y.tgz"), (folder, "misnamed.tar")):
        path.mkdir(exist_ok=True)
        (path / name).write_bytes(gzip.compress((folder / "train-0000.tar").read_bytes()))
    error_of(folder / "x.tar.gz", "x.tar.gz", "unpack")
    error_of(folder / "misnamed.tar", "misnamed.tar", "unpack")
    error_of(tmp_path / "only", "y.tgz", "unpack")
    (folder / "misnamed.tar").unlink()
    check(open_shards(str(folder)), range(12))


def test_damaged_shards_are_named(folder):
    whole = (folder / "train-0001.tar").read_bytes()
    header = whole.index(b"0006.png")
    damages = {
        "within the data": whole[: header + 520],
        "within a header": whole[: header + 100],
        "between members": whole[:header],
        "a header": whole[: header + 10] + b"?" + whole[header + 11 :],
        "nothing": b"",
        "text": b"<html>404</html>" * 100,
    }
    for data in damages.values():
        (folder / "train-0001.tar").write_bytes(data)
        error_of(folder, "train-0001.tar", "damaged")
        assert not index_places(folder / "train-0001.tar")[0].exists()


def test_a_shard_that_goes_away_or_shrinks(folder):
    shard = folder / "train-0000.tar"
    source = open_shards(str(shard))
    os.truncate(shard, 600)
    with pytest.raises(BadImage, match="shorter"):
        source.fetch(3)
    source = open_shards(str(folder / "train-0001.tar"))
    (folder / "train-0001.tar").unlink()
    with pytest.raises(BadImage, match="No such file"):
        source.fetch(0)


def test_a_folder_named_like_a_shard(tmp_path):
    (tmp_path / "shards" / "x.tar").mkdir(parents=True)
    error_of(tmp_path / "shards", "x.tar")


def test_sparse_members_are_refused(tmp_path):
    """Their bytes do not lie in one piece."""
    shard = pack(tmp_path / "x.tar", [("a.png", png(0))], tarfile.GNU_FORMAT)
    data = bytearray(shard.read_bytes())
    data[156:157] = b"S"
    data[386:410] = b"%011o\0%011o\0" % (0, len(png(0)))
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    shard.write_bytes(data)
    error_of(shard, "x.tar", "sparse")
