"""Files, names and recipes from anyone: a right result or one line, in bounded time and memory, and nothing of them
runs."""

import ast
import io
import itertools
import json
import os
import resource
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file

import tico_ssl
from tico_ssl import load_backbone, pretrain
from tico_ssl.classifying.predict import Predictions
from tico_ssl.classifying.summary import print_predictions
from tico_ssl.cli import main
from tico_ssl.config.recipe import load_recipe, parse_override
from tico_ssl.config.sections import DataConfig
from tico_ssl.config.study import Study, expand, load_study
from tico_ssl.config.yaml_text import parse_yaml
from tico_ssl.data.checking import check
from tico_ssl.data.decoding import BadImage, decode
from tico_ssl.data.fingerprint import require_same_images
from tico_ssl.data.formats.packed import open_packed
from tico_ssl.data.formats.shards import open_shards
from tico_ssl.data.sources import open_source, open_training
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.pipeline.packing import pack
from tico_ssl.report.html import inline_json, tag
from tico_ssl.runtime import progress
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable, printable_lines
from tico_ssl.runtime.progress import SafeConsole

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="links, pipes and devices as Linux has them")


def picture(path: Path, value: int = 0, side: int = 12) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side, 3), value, dtype=np.uint8)).save(path)
    return path


def png(width: int, height: int, mode: int = 6, rows: int | None = None) -> bytes:
    """A PNG of one colour, a thousandth of its pixels in size, or of its first rows."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = bytes(1 + width * {0: 1, 2: 3, 6: 4}[mode])
    packer, content = zlib.compressobj(), b""
    for _ in range(height if rows is None else rows):
        content += packer.compress(row)
    header = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", content + packer.flush()) + chunk(b"IEND", b"")


def tico(*words: str, cwd: Path | None = None, seconds: float = 60) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tico_ssl", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=cwd, check=False)


def one_line(work) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "photos"
    for number in range(6):
        picture(root / ("cats" if number % 2 else "dogs") / f"{number}.png", number)
    return root


@LINUX
def test_a_pipe_and_a_device_are_no_images_and_nothing_waits_for_them(folder):
    os.mkfifo(folder / "cats" / "x.jpg")
    (folder / "dogs" / "zero.png").symlink_to("/dev/zero")
    started = time.monotonic()
    report = check(open_training(DataConfig(source=str(folder))))
    assert time.monotonic() - started < 10
    assert dict(report.bad) == {"cats/x.jpg": "not a regular file", "dogs/zero.png": "not a regular file"}
    (folder / "list.txt").write_text("cats/x.jpg\ncats/1.png\n")
    listed = open_source(DataConfig(source=str(folder / "list.txt")))
    with pytest.raises(BadImage, match="not a regular file"):
        listed.fetch(0)


@LINUX
def test_links_in_a_circle_give_each_image_once(folder, capsys):
    for link, target in (("loop", "."), ("cats/up", ".."), ("dogs/up", "../.."), ("cats/again.png", "1.png")):
        (folder / link).symlink_to(target)
    os.link(folder / "cats" / "3.png", folder / "cats" / "hard.png")
    source = open_source(DataConfig(source=str(folder)))
    assert sorted(source.names(i) for i in range(len(source))) == [
        *("cats/1.png", "cats/3.png", "cats/5.png", "dogs/0.png", "dogs/2.png", "dogs/4.png")
    ]
    assert source.classes == ("cats", "dogs")
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert "photos: left out 5 links to what is there already, such as loop" in capsys.readouterr().out


@LINUX
def test_links_to_images_elsewhere_are_images(tmp_path, folder):
    chosen = tmp_path / "chosen"
    (chosen / "a").mkdir(parents=True)
    (chosen / "b").symlink_to(folder / "dogs")
    (chosen / "a" / "1.png").symlink_to(folder / "cats" / "1.png")
    source = open_source(DataConfig(source=str(chosen)))
    assert [source.names(i) for i in range(len(source))] == ["a/1.png", "b/0.png", "b/2.png", "b/4.png"]
    assert source.labels.tolist() == [0, 1, 1, 1]


def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch):
    scan = os.scandir

    def refusing(path):
        if Path(path).name == "cats":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    message = one_line(lambda: open_source(DataConfig(source=str(folder))))
    assert "photos/cats: cannot be read (Permission denied)" in message


# -------------------------------------------------------------------------------------------------------- images


def memory_of(code: str) -> tuple[str, float]:
    """What a program says, and the memory that it took at most, in MB. getrusage would count that of this process,
    from which it was forked."""
    status = "[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')]"
    script = f"{code}\nprint(int({status}[0]) / 1e3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    said, peak = done.stdout.rsplit("\n", 2)[:2]
    return said, float(peak)


@LINUX
def test_an_image_that_would_fill_the_memory_is_refused_by_its_header(tmp_path):
    (tmp_path / "huge.png").write_bytes(png(14_000, 14_000, rows=9))
    (tmp_path / "large.png").write_bytes(png(9_000, 9_000, rows=999))
    code = f"""
from pathlib import Path
from tico_ssl.data.decoding import BadImage, decode
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        decode(path)
    except BadImage as error:
        print(error.reason)
"""
    said, peak = memory_of(code)
    assert said.count("pixels") >= 2
    assert said.count("\n") == 1
    assert peak < 600  # with torch and Pillow


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 24\n%%EndComments\nshowpage\n%%EOF\n"


@LINUX
def test_no_image_starts_a_program(tmp_path, folder, monkeypatch):
    """Ghostscript, with which Pillow reads EPS, whatever the name of the file."""
    programs, mark = tmp_path / "programs", tmp_path / "ran"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\necho ran >> {mark}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for once
    (folder / "cats" / "1.png").write_bytes(EPS)
    for tiles in (None, 16):
        with suppress(UserError):
            report = check(open_source(DataConfig(source=str(folder), tiles=tiles)))
            assert {reason for _, reason in report.bad} == {"not in a known image format"}
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["ICO", "ICNS", "PCX", "TGA", "JPEG2000", "DDS", "AVIF"])
def test_only_the_formats_that_are_listed_are_images(kind):
    stream = io.BytesIO()
    try:
        Image.new("RGB", (16, 16)).save(stream, kind)
    except (OSError, KeyError):
        pytest.skip(f"this Pillow does not write {kind}")
    with pytest.raises(BadImage, match="not in a known image format"):
        decode(stream.getvalue())


def test_pictures_are_opened_in_one_place():
    """Where the formats are limited."""
    opening = {
        file.name
        for file in Path(tico_ssl.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Image.open", "PIL.Image.open")
    }
    assert opening == {"opening.py"}


def test_the_largest_image_of_one_colour_is_still_an_image(tmp_path):
    (tmp_path / "scan.png").write_bytes(png(5_000, 7_000, 0))  # a page at 600 dots per inch
    assert decode(tmp_path / "scan.png", 1).shape == (1, 7_000, 5_000)


def test_a_jpeg_of_a_thousand_scans_is_refused():
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG", progressive=True)
    assert decode(stream.getvalue()).shape == (3, 64, 64)
    begin, end = stream.getvalue().rindex(b"\xff\xda"), len(stream.getvalue()) - 2
    scan = stream.getvalue()[begin:end]
    with pytest.raises(BadImage, match="more than 500 scans"):
        decode(stream.getvalue()[:end] + 1_000 * scan + b"\xff\xd9")


def test_arrays_claim_no_more_than_they_have(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6, 3)})
    (tmp_path / "claim.npy").write_bytes(header.getvalue() + bytes(100))
    with pytest.raises(BadImage):
        decode(tmp_path / "claim.npy")
    one_line(lambda: open_source(DataConfig(source=str(tmp_path / "claim.npy"))))


# --------------------------------------------------------------------------------------- arrays and their labels


@pytest.mark.parametrize("labels", [[-1, 0, 1, 2], [0, 1, 2, 2**62], [0, 1, 2, 200_000]])
def test_class_numbers_are_small_and_not_negative(tmp_path, labels):
    path = tmp_path / "x.npz"
    np.savez(path, x_train=np.zeros((4, 8, 8, 3), np.uint8), y_train=np.array(labels))
    message = one_line(lambda: open_training(DataConfig(source=str(path))))
    assert f"{path}: class numbers are from 0 to 99,999, but image" in message
    np.savez(path, x_train=np.zeros((4, 8, 8, 3), np.uint8), y_train=np.array([0, 1, 2, 2**64 - 1], np.uint64))
    one_line(lambda: open_training(DataConfig(source=str(path))))


def test_labels_by_class_are_minus_one_zero_or_one(tmp_path):
    path = tmp_path / "x.npz"
    for labels, right in (([[1, 0], [-1, 1]], True), ([[1, 7], [0, 1]], False)):
        np.savez(path, images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.array(labels))
        if right:
            assert open_training(DataConfig(source=str(path))).labels.tolist() == labels
        else:
            assert "image 0 has 7" in one_line(lambda: open_training(DataConfig(source=str(path))))


def test_a_flipped_bit_in_an_npz_is_found(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, x_train=np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8))
    content, draw = path.read_bytes(), np.random.default_rng(1)
    whole = open_training(DataConfig(source=str(path))).images
    found = 0
    for place in draw.integers(0, 8 * len(content), 60):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert torch.equal(open_training(DataConfig(source=str(path))).images, whole)  # a time or the like
        except UserError:
            found += 1
    assert found > 50


def test_an_array_larger_than_memory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x_train=np.zeros((1000, 8, 8, 3), np.uint8))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 40}.get)
    assert "does not fit into memory" in one_line(lambda: open_training(DataConfig(source=str(path))))


def test_pickled_arrays_are_refused(tmp_path):
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self):
            return Path.touch, (trap,)

    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x_train=np.array([Trap()], dtype=object))
    torch.save({"method": Trap()}, tmp_path / "x.pth")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes())
    for name in ("x.npy", "x.npz"):
        one_line(lambda name=name: open_source(DataConfig(source=str(tmp_path / name))))
    with pytest.raises(BadImage):
        open_source(DataConfig(source=str(tmp_path / "images")), channels=4).fetch(0)
    from tico_ssl.features.subjects import import_model

    np.savez(tmp_path / "data.npz", images=np.zeros((9, 16, 16, 3), np.uint8))
    one_line(lambda: import_model("tico/resnet10-w2", tmp_path / "x.pth", str(tmp_path / "data.npz")))
    assert not trap.exists()


# ------------------------------------------------------------------------------------------------------ archives


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def encoded(value: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (10, 10), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def test_a_label_of_a_megabyte_is_none(tmp_path):
    path = shard(tmp_path / "a.tar", {"1.png": encoded(), "1.cls": b"0" * (1 << 20) + b"3"})
    assert open_shards(str(path)).labels is None
    path = shard(tmp_path / "b.tar", {"1.png": encoded(), "1.cls": b"3\n"})
    assert open_shards(str(path)).labels.tolist() == [3]


def test_an_index_that_came_with_a_shard_is_not_trusted(tmp_path):
    path = shard(tmp_path / "a.tar", {"1.png": encoded(5)})
    before = open_shards(str(path)).fetch(0)
    index = tmp_path / "a.tar.index.npz"
    with np.load(index) as archive:
        fields = dict(archive)
    for name, value in (("sizes", 2**60), ("offsets", -1), ("offsets", 2**62), ("labels", -7)):
        np.savez(index, **fields | {name: np.array([value])})
        assert torch.equal(open_shards(str(path)).fetch(0), before)


def test_headers_of_a_tar_are_bounded(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        entry = tarfile.TarInfo("1.png")
        entry.size, entry.pax_headers = 10, {"comment": "x" * 200_000}
        tar.addfile(entry, io.BytesIO(bytes(10)))
    assert "a header of" in one_line(lambda: open_shards(str(path)))
    path = shard(tmp_path / "b.tar", {"1.png": encoded()})
    content = bytearray(path.read_bytes())
    content[124:136] = b"77777777777\0"  # a size of eight gigabytes
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)
    one_line(lambda: open_shards(str(path)))


def test_braces_that_stand_for_billions_of_shards_are_refused_at_once(tmp_path):
    started = time.monotonic()
    one_line(lambda: open_shards(str(tmp_path / "{0..999999999}-{0..999999999}.tar")))
    shard(tmp_path / "a.tar", {"1.png": encoded()})
    assert "more than" in one_line(lambda: open_shards(str(tmp_path / ("a" + "{,,,,,,,,,}" * 8 + ".tar"))))
    assert time.monotonic() - started < 20


def test_pages_of_parquet_with_checksums_are_verified(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, images = tmp_path / "a.parquet", [encoded(i) for i in range(40)]
    table = arrow.table({"image": images, "label": list(range(40))})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[content.index(images[7]) + 40] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(BadImage, match=r"(?i)checksum|crc"):
        open_source(DataConfig(source=str(path))).fetch(0)


def test_groups_of_parquet_have_the_rows_of_the_file(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, lines = tmp_path / "a.parquet", set()
    parquet.write_table(arrow.table({"image": [encoded(i) for i in range(6)]}), path, row_group_size=2)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for place in range(footer, len(content) - 8):
        if content[place] == 4:  # a number of 2 in the footer's code, here made 19
            path.write_bytes(content[:place] + bytes([38]) + content[place + 1 :])
            try:
                source = open_source(DataConfig(source=str(path)))
                assert [source.names(i) for i in range(len(source))] == [f"a.parquet:{i}" for i in range(6)]
            except UserError as error:
                lines.add(str(error))
    assert f"{path}: damaged, its groups have 23 rows and not 6" in lines


def test_columns_of_parquet_have_different_names(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [pyarrow.array([b"x"]), pyarrow.array([b"y"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["image", "image"]), tmp_path / "x.parquet")
    assert "same name" in one_line(lambda: open_source(DataConfig(source=str(tmp_path / "x.parquet"))))


def test_names_of_classes_in_parquet_may_be_any_text(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = arrow.table({"image": [encoded()], "label": [0]})
    for text in ("[" * 100_000, "{", "null", '{"info": {"features": {"label": {"names": 3}}}}'):
        parquet.write_table(table.replace_schema_metadata({"huggingface": text}), path)
        assert open_source(DataConfig(source=str(path))).classes == ()


# -------------------------------------------------------------------------------------------------- packed files


def crafted(path: Path, **changes) -> None:
    """A packed file whose header says something else, with all checksums right."""
    from tico_ssl.data.formats.packed import MAGIC, PREAMBLE, SPLIT, first_page

    content = path.read_bytes()
    _, _, _, offset, size, _ = PREAMBLE.unpack_from(content)
    header = json.loads(content[offset : offset + size])
    sections = header["sections"] | changes.pop("sections", {})
    text = json.dumps(header | {"sections": sections} | changes).encode()
    preamble = PREAMBLE.pack(MAGIC, SPLIT, zlib.crc32(text), offset, len(text), offset + len(text))
    path.write_bytes(first_page(preamble) + content[4096:offset] + text)


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 10**15},
        {"count": -1},
        {"count": 0},
        {"count": "4"},
        {"count": True},
        {"size": 10**9},
        {"size": 0},
        {"channels": 0},
        {"channels": 4},
        {"kind": "other"},
        {"kind": "jpeg", "count": 3},
        {"name": 3},
        {"classes": 3},
        {"classes": [[]]},
        {"sections": {"data": [0, 2**63, None]}},
        {"sections": {"data": [4096, 0, None]}},
        {"sections": {"index": [4096, 4097, 0]}},
        {"sections": {"names": "abc"}},
        {"sections": {"labels": [1, 2]}},
        {"splits": {"train": 3}},
        {"splits": {"train": 10**30}},
        {"splits": {"train": -1, "val": 5}},
        {"splits": {"train": 2, "training": 2}},
        {"splits": {"cats": 4}},
        {"splits": [4]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_no_header_of_a_packed_file_is_trusted(tmp_path, changes):
    images = torch.arange(4 * 3 * 8 * 8, dtype=torch.uint8).view(4, 3, 8, 8)
    from tico_ssl.data.arrays import from_arrays

    path = tmp_path / "x.tico"
    pack(from_arrays("some", images, torch.arange(4)), path, 8)
    assert torch.equal(open_packed(path).take(torch.arange(4)), images)
    crafted(path, **changes)
    assert str(path) in one_line(lambda: open_packed(path))


def test_a_packed_file_that_is_cut_while_in_use_is_one_line(tmp_path):
    from tico_ssl.data.arrays import from_arrays

    path = tmp_path / "x.tico"
    pack(from_arrays("some", torch.zeros(64, 3, 32, 32, dtype=torch.uint8), None), path, 32)
    source = open_packed(path)
    os.truncate(path, 8192)
    for use in (lambda: source.fetch(60), lambda: source.take(torch.tensor([60]))):
        assert "was cut short while in use, to 8,192 bytes" in one_line(use)


# ----------------------------------------------------------------------------------------- what a run began with


def test_a_run_is_not_resumed_with_other_images(tmp_path, tiny):
    path, images = tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.save(path, images)
    settings = tiny | {"data.limit": None, "training.epochs": 2}

    class Stop(Exception):
        pass

    def stopping(*_):
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tico_ssl.training.pretrain._train", stopping)
        with pytest.raises(Stop):
            pretrain("demo", data=str(path), out=tmp_path / "run", overrides=settings)
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
        message = one_line(
            lambda: pretrain("demo", data=str(path), out=tmp_path / "run", overrides=settings, resume=True)
        )
        assert "not the images that the run began with (content changed)" in message
        content[5000] ^= 1
        path.write_bytes(content)
        with pytest.raises(Stop):
            pretrain("demo", data=str(path), out=tmp_path / "run", overrides=settings, resume=True)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "3", '{"images": 6}'])
def test_what_is_remembered_of_images_may_be_damaged(folder, tmp_path, text):
    file, source = tmp_path / "images.json", open_source(DataConfig(source=str(folder)))
    file.write_text(text)
    assert one_line(lambda: require_same_images(source, file)).startswith(f"{file}: damaged; remove it")


def test_names_labels_and_some_bytes_of_files_are_remembered(folder):
    from tico_ssl.data.fingerprint import glance

    before = glance(open_training(DataConfig(source=str(folder))))
    assert before == glance(open_training(DataConfig(source=str(folder))))
    picture(folder / "cats" / "1.png", 200)
    after = glance(open_training(DataConfig(source=str(folder))))
    assert {key for key in before if before[key] != after[key]} == {"content"}
    (folder / "cats" / "1.png").rename(folder / "dogs" / "1.png")
    after = glance(open_training(DataConfig(source=str(folder))))
    assert {key for key in before if before[key] != after[key]} == {"names", "labels", "content"}


# ----------------------------------------------------------------------------------------------------- backbones


def test_metadata_of_weights_load_nothing(tmp_path):
    trap = tmp_path / "trap.pth"
    torch.save({}, trap)
    path = tmp_path / "backbone.safetensors"
    config = {"name": "timm/resnet18", "stem": "auto"}
    for name, value in (
        ("checkpoint_path", str(trap)),
        ("pretrained", True),
        ("pretrained_cfg", {"file": str(trap)}),
        ("pretrained_cfg_overlay", {"file": str(trap)}),
        ("cache_dir", str(tmp_path)),
        ("block", {"a": 1}),
    ):
        about = {"config": config | {"arguments": {name: value}}, "image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
        save_file({"x": torch.zeros(1)}, path, metadata={"tico_ssl": json.dumps(about)})
        assert f"'{name}'" in one_line(lambda: load_backbone(path))
    about["config"] = config | {"name": "torchvision/resnet18", "arguments": {"weights": "DEFAULT"}}
    save_file({"x": torch.zeros(1)}, path, metadata={"tico_ssl": json.dumps(about)})
    assert "'weights'" in one_line(lambda: load_backbone(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"name": "tico/resnet10-w100000"}},
        {"config": {"name": "tico/resnet10-w4", "channels": 10**9}},
        {"range": [[0, 1], [0, 1]]},
        {"range": [1, 0]},
        {"config": {"name": "timm/nosuch"}},
        {"config": {"name": "hf-hub:someone/something"}},
        {"config": 3},
        {"image_size": 10**9},
        {"image_size": "32"},
        {"mean": [0.5]},
        {"std": None},
        {"std": [0.5, 0.0, 0.5]},
        {"std": [0.5, -0.5, 0.5]},
        {"std": [0.5, 1e-300, 0.5]},
        {"std": [0.5, float("inf"), 0.5]},
        {"mean": [0.5, float("nan"), 0.5]},
        {"mean": [0.5, 1e300, 0.5]},
        {"other": 1},
    ],
    ids=str,
)
def test_metadata_of_weights_are_checked_before_memory_is_taken(tmp_path, changes):
    config = load_recipe("demo", {"backbone.name": "tico/resnet10-w4"}).backbone
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone(config, 32), path)
    state = load_backbone(path).network.state_dict()
    about = {"config": config.model_dump(mode="json"), "image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    save_file(state, path, metadata={"tico_ssl": json.dumps(about)})
    load_backbone(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_file(state, path, metadata={"tico_ssl": json.dumps(about | changes)})
    one_line(lambda: load_backbone(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_metadata_that_are_no_json_are_one_line(tmp_path):
    for text in ("{", "[" * 100_000, "3", "null", '{"config": {}}'):
        save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", metadata={"tico_ssl": text})
        one_line(lambda: load_backbone(tmp_path / "x.safetensors"))


# ------------------------------------------------------------------------------------------- recipes and studies


@pytest.mark.parametrize(
    "override",
    [
        *("description=!!int x", "description=!!timestamp x", "description=!!bool x", "description=!!float x"),
        *(
            "description=" + "[" * 5_000,
            "description=" + "{a: " * 5_000,
            "description=&a [*a]",
            "views.²=1",
            "views.-1=1",
        ),
        *("views." + "9" * 5_000 + "=1", "training.seed=" + "9" * 5_000, "data.source=[]", "data.source=['']"),
        *("x=!!python/object/apply:os.system [id]", "description=!!binary x", "a={<<: 3}"),
        *("data.source=a\0b", 'data.source="a\\0b"', "description=\udcff", "description=\x1b[2J"),
    ],
)
def test_a_value_that_does_not_convert_is_one_line(override):
    one_line(lambda: load_recipe("demo", dict([parse_override(override)])))


def test_dates_are_texts():
    for text in ("2020-13-45", "2020-01-31", "2001-12-14t21:59:43.10-05:00"):
        assert load_recipe("demo", dict([parse_override(f"description={text}")])).description == text


def test_keys_given_twice_are_refused(tmp_path):
    for text in ("training: {epochs: 1}\nmethod: {}\ntraining: {epochs: 2}", "training:\n  epochs: 1\n  'epochs': 2"):
        (tmp_path / "x.yaml").write_text(text)
        assert "line 3: key" in one_line(lambda: load_recipe(tmp_path / "x.yaml"))
    assert parse_yaml("{a: &a {k: 1}, b: {<<: *a, k: 2}}", "x")["b"] == {"k": 2}


def test_numbers_are_decimal():
    for value in ("010", "1:30", "0b11", "08"):
        assert repr(value) in one_line(
            lambda value=value: load_recipe("demo", dict([parse_override(f"training.epochs={value}")]))
        )
    for value, number in (("-5", -5), ("0", 0), ("1_000", 1000), ("0x1F", 31), ("+3", 3)):
        assert parse_yaml(value, "x") == number


def test_aliases_may_not_multiply(tmp_path):
    letters = "abcdefghij"
    lists = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    maps = "a: &a {k: 1}\n"
    for before, letter in itertools.pairwise(letters):
        many = ", ".join([f"*{before}"] * 9)
        lists += f"{letter}: &{letter} [{many}]\n"
        maps += f"{letter}: &{letter} {{<<: [{many}]}}\n"
    for bomb in (lists, maps):
        started = time.monotonic()
        assert "with every alias spelled out" in one_line(lambda bomb=bomb: parse_yaml(bomb, "bomb"))
        assert time.monotonic() - started < 5
    (tmp_path / "long.yaml").write_text("# " + "x" * 10**6)
    assert "longer than" in one_line(lambda: load_recipe(tmp_path / "long.yaml"))
    (tmp_path / "bomb.yaml").write_text(lists)
    done = tico("describe", str(tmp_path / "bomb.yaml"), seconds=20)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_a_study_stays_in_its_folder():
    study = Study(grid={"method/../../../../outside": [1.0, 2.0], "a/b.rho": [3], "c/d.rho": [4]})
    for variant in expand(study):
        assert "/" not in variant.name
        assert not variant.name.startswith(".")
    with pytest.raises(UserError, match="longer than"):
        expand(Study(grid={"method.rho": ["x" * 500]}))
    with pytest.raises(UserError, match="runs: a grid"):
        expand(Study(grid={f"method.{i}": list(range(100)) for i in range(20)}))


def test_a_study_of_a_grid_with_slashes_writes_nothing_elsewhere(tmp_path):
    (tmp_path / "s.yaml").write_text("grid: {method/../../../../outside: [1.0]}\nprotocols: [rankme]\n")
    with pytest.raises(UserError):
        from tico_ssl import study

        study(tmp_path / "s.yaml", out=tmp_path / "inner" / "study")
    assert {path.name for path in tmp_path.iterdir()} <= {"s.yaml", "inner"}
    assert load_study(tmp_path / "s.yaml").grid


def test_code_from_elsewhere_is_announced_before_it_runs(tmp_path):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("import sys; sys.stderr.write('running\\n')")
    (tmp_path / "lab" / "mine.py").write_text("def matches(place): return False\n")
    (tmp_path / "r.yaml").write_text("base: demo\nmethod: {name: lab.mine}\n")
    done = tico("describe", "r.yaml", cwd=tmp_path)
    announced, ran = done.stderr.index("note: method 'lab.mine' is code from outside"), done.stderr.index("running")
    assert announced < ran
    assert "note:" not in done.stdout
    (tmp_path / "r.yaml").write_text("base: demo\ndata: {source: 'lab.mine:x'}\n")
    done = tico("pretrain", "r.yaml", cwd=tmp_path)
    assert done.stderr.index("note: data format 'lab.mine' is code from outside") < done.stderr.index("running")
    assert "note:" not in tico("describe", "demo").stderr


# --------------------------------------------------------------------------------------------- names on a screen

NASTY = "\x1b[2J\x07\x9b31m\r\nfake\u202egnp.\u2028\udcff"


def test_names_are_shown_on_one_line_without_commands():
    shown = printable(NASTY)
    assert shown.isprintable()
    assert shown == "\\x1b[2J\\x07\\x9b31m\\r\\nfake\\u202egnp.\\u2028\\xff"
    assert printable("café 日本") == "café 日本"
    assert printable_lines("a\x1b\nb") == "a\\x1b\nb"
    assert str(UserError(f"{NASTY}: bad")) == f"{shown}: bad"


def test_whatever_is_printed_commands_no_terminal():
    from rich.table import Table

    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=True, width=200)
    table = Table(title=NASTY)
    table.add_row(NASTY.replace("\udcff", ""))
    console.print(table)
    console.print(NASTY, markup=False)
    text = stream.getvalue()
    assert "\x1b[2J" not in text
    assert not {"\x07", "\x9b", "\r", "\u202e", "\u2028"} & set(text)


@LINUX
def test_names_of_files_and_classes_command_no_terminal(tmp_path, monkeypatch, capsys):
    root = tmp_path / "odd"
    for name in ("a\x1b[2Jb", "c\x9bd"):
        (root / name).mkdir(parents=True)
        (root / name / "bad\x1b[31m.png").write_text("x")
        picture(root / name / "good\x07.png")
    monkeypatch.setattr(sys, "argv", ["tico", "data", "check", str(root)])
    with pytest.raises(SystemExit):
        main()
    monkeypatch.setattr(sys, "argv", ["tico", "data", "check", str(root) + "\x1b[2J"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr()
    assert "bad\\x1b[31m.png" in said.out
    assert "\\x1b[2J" in said.err
    assert not {"\x1b", "\x07", "\x9b"} & set(said.out + said.err)


def test_text_in_reports_is_text():
    evil = '</script><img src=x onerror="alert(1)">\'"&'
    assert "<img" not in tag("p", evil, [evil], title=evil, data_x=evil)
    assert "<" not in inline_json({evil: [evil, {"a": evil}]})
    assert json.loads(inline_json({evil: evil})) == {evil: evil}


def test_names_in_brackets_are_shown_as_they_are(monkeypatch, capsys):
    """A library that lays out tables takes such brackets for colours, and [/x] for a mistake."""
    names = ["IMG_1 [edited].webp", "[/x].png", "[bold]", ":cat:"]
    print_predictions(Predictions(images=4, seconds=1.0, first=[[name, name, 0.5, name, 0.25] for name in names]), None)
    shown = capsys.readouterr().out.replace("50.0 %", "")
    assert all(shown.count(name) == 3 for name in names)
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", SafeConsole(file=screen, width=200, force_terminal=True))
    bar = progress.bar(progress.words("status"))
    bar.add_task("[/x]", total=1, status="[edited] [/y]")
    progress.console.print(bar.get_renderable())
    assert "[/x]" in screen.getvalue()
    assert "[edited] [/y]" in screen.getvalue()


def test_a_report_of_a_run_with_evil_names_has_no_markup_of_theirs(tmp_path, tiny):
    from tico_ssl.report import report

    evil = "<img src=x onerror=alert(1)>"
    root = tmp_path / "images"
    for place in range(40):
        picture(root / (evil, "b<script>alert(2)<")[place % 2] / f"{place}<script>alert(3)<.png", 5 * place, 16)
    settings = tiny | {"data.limit": None, "training.epochs": 1, "description": f"{evil}<script>alert(4)</script>"}
    run = pretrain("demo", data=str(root), out=tmp_path / "run", overrides=settings)
    with run.results_file.open("a") as file:
        numbers = {evil: {evil: 1.0}, "untrained": {evil: 2.0}}
        file.write(json.dumps({"protocol": evil, "numbers": numbers, "data": {"name": evil}, "settings": {}}) + "\n")
    page = report([run.folder], points=40).read_text()
    assert "<img src=x" not in page
    assert "alert(1)" in page or "onerror" in page  # it is there, as text
    for number in (2, 3, 4):
        assert f"<script>alert({number})" not in page
