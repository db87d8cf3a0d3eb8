"""`tico data check | pack | verify | preview`, and every kind of data through the whole of training."""

import gzip
import io
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tico_ssl import pretrain
from tico_ssl.cli import app, main
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import decode
from tico_ssl.data.formats.packed import PAGE
from tico_ssl.data.sources import open_source
from tico_ssl.runtime.errors import UserError


@pytest.fixture
def tico():
    def call(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    return call


def test_check_says_what_is_there(tico, folder_of_images, tmp_path):
    text = tico("data", "check", folder_of_images)
    assert "12 files" in text
    assert "PNG 12" in text
    (folder_of_images / "cats" / "bad.png").write_text("no image")
    text = tico("data", "check", folder_of_images, "--out", tmp_path / "bad.jsonl", code=1)
    assert "1 file cannot be read (7.7%)" in text
    assert "next       tico pretrain photos" in text  # training passes over it
    assert '"file": "cats/bad.png"' in (tmp_path / "bad.jsonl").read_text()


def test_large_jpegs_are_reduced_to_be_packed_but_not_to_be_checked(tico, tmp_path):
    root = tmp_path / "photographs"
    root.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((1600, 1200)).save(root / "x.jpg")
    assert "1600 to 1600 pixels" in tico("data", "check", root)
    tico("data", "pack", root, tmp_path / "packed.tico", "--size", "150")
    expected = decode(root / "x.jpg", shorter=150)[:, :, 25:175]  # an eighth, of which the centre
    assert torch.equal(open_source(DataConfig(source=str(tmp_path / "packed.tico"))).images[0], expected)


@pytest.mark.parametrize("jpeg", [False, True])
def test_a_packed_file_trains_like_the_folder(tico, folder_of_images, tmp_path, tiny, capsys, jpeg):
    packed = tmp_path / "images.tico"
    text = tico("data", "pack", folder_of_images, packed, "--size", "24", *(["--jpeg"] if jpeg else []))
    assert "12 images" in text
    source = open_source(DataConfig(source=str(packed)))
    assert source.classes == ("cats", "dogs")
    assert source.labels.tolist() == [0] * 6 + [1] * 6
    tiny |= {"data.limit": None, "training.batch_size": 4, "training.epochs": 1}
    pretrain("demo", data=str(packed), out=tmp_path / "run", overrides=tiny)
    assert ("decoded by" if jpeg else "memory-mapped") in capsys.readouterr().out


@pytest.mark.parametrize("jpeg", [False, True])
def test_verify_reads_everything(tico, folder_of_images, tmp_path, monkeypatch, capsys, jpeg):
    packed = tmp_path / "images.tico"
    tico("data", "pack", folder_of_images, packed, "--size", "16", *(["--jpeg"] if jpeg else []))
    line = f"{packed}: 12 images, {packed.stat().st_size:,} bytes, all checksums are correct\n"
    assert tico("data", "verify", packed) == line
    with packed.open("r+b") as file:
        file.seek(PAGE + 100)  # within the first image
        byte = file.read(1)[0]
        file.seek(PAGE + 100)
        file.write(bytes([byte ^ 1]))
    monkeypatch.setattr(sys, "argv", ["tico", "data", "verify", str(packed)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {packed}: damaged (image 0, cats/1.png)\n"


def test_verify_of_something_else_is_one_line(tico, folder_of_images):
    for path, text in ((folder_of_images / "cats" / "1.png", "not a packed file"), ("none.tico", "cannot be read")):
        with pytest.raises(UserError, match=text):
            tico("data", "verify", path)


def test_preview_draws_a_picture(tico, folder_of_images, tmp_path):
    for views in ("byol", "swav", "pirl", "supervised"):
        method = "pirl" if views == "pirl" else "tico"
        words = ["views=[{}, {}]"] if views == "supervised" else [f"views={views}", f"method.name={method}"]
        out = tmp_path / f"{views}.png"
        tico("data", "preview", folder_of_images, "data.image_size=48", *words, "--out", out)
        with Image.open(out) as picture:
            assert picture.width > 12 * 40


def test_preview_passes_over_bad_files(tico, folder_of_images, tmp_path):
    """The image after a bad one is drawn in its place."""
    cats, dogs = folder_of_images / "cats", folder_of_images / "dogs"
    words = ["data", "preview", folder_of_images, "data.image_size=32", "--count", "4", "--out"]
    for bad, following in ((cats / "1.png", cats / "11.png"), (dogs / "0.png", dogs / "10.png")):
        bad.write_bytes(following.read_bytes())
    assert "left out" not in tico(*words, tmp_path / "expected.png")
    (cats / "1.png").write_text("no image")
    (dogs / "0.png").write_bytes(b"")
    text = tico(*words, tmp_path / "found.png")
    assert "left out cats/1.png: not in a known image format" in text
    assert "left out dogs/0.png: empty file" in text
    assert (tmp_path / "found.png").read_bytes() == (tmp_path / "expected.png").read_bytes()
    for file in folder_of_images.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 12 images can be read"):
        tico(*words, tmp_path / "none.png")


def shard(path, count=12):
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 24, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            for name, content in ((f"{number:04}.png", buffer.getvalue()), (f"{number:04}.cls", b"%d" % (number % 2))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_tar_shards_and_parquet_train(tmp_path, tiny):
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "train-0.tar")
    shard(tmp_path / "shards" / "train-1.tar")
    pattern = str(tmp_path / "shards" / "train-{0..1}.tar")
    assert len(open_source(DataConfig(source=pattern))) == 24
    assert len(open_source(DataConfig(source=str(tmp_path / "shards")))) == 24
    tiny |= {"data.limit": None, "training.batch_size": 8, "training.epochs": 1}
    run = pretrain("demo", data=pattern, out=tmp_path / "run", overrides=tiny)
    assert run.metrics()[-1]["step"] == 3

    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source = open_source(DataConfig(source=pattern))
    rows = []
    for place in range(10):
        buffer = io.BytesIO()
        Image.fromarray(source.fetch(place).permute(1, 2, 0).numpy()).save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": f"{place}.png"})
    table = pyarrow.table({"image": rows, "label": list(range(10))})
    parquet.write_table(table, tmp_path / "train.parquet", row_group_size=4)
    opened = open_source(DataConfig(source=str(tmp_path / "train.parquet")))
    assert torch.equal(opened.fetch(7), source.fetch(7))
    assert opened.labels.tolist() == list(range(10))


@pytest.mark.parametrize("name", ["train-0.tar.gz", "train-0.tgz"])
def test_a_folder_of_compressed_shards_is_to_be_unpacked(tmp_path, folder_of_images, name):
    shard(tmp_path / "plain.tar")
    packed = tmp_path / "shards" / name
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes()))
    for place in (packed, packed.parent):
        with pytest.raises(UserError, match=f"{name}: compressed, and only a plain tar"):
            open_source(DataConfig(source=str(place)))
    (folder_of_images / name).write_bytes(packed.read_bytes())  # where the images came from
    assert len(open_source(DataConfig(source=str(folder_of_images)))) == 12


def test_nothing_that_matches_is_said(tmp_path):
    with pytest.raises(UserError):
        open_source(DataConfig(source=str(tmp_path / "train-{0..3}.tar")))


def test_images_of_four_channels_leave_colours_alone(tmp_path, tiny, capsys):
    root = tmp_path / "bands"
    root.mkdir()
    for number in range(8):
        np.save(root / f"{number}.npy", np.random.default_rng(number).integers(0, 4000, (20, 24, 4), dtype=np.uint16))
    tiny |= {"data.limit": None, "training.batch_size": 4, "training.epochs": 1, "backbone.channels": 4}
    tiny |= {"data.mean": [0.5] * 4, "data.std": [0.25] * 4}
    pretrain("demo", data=str(root), out=tmp_path / "run", overrides=tiny)
    assert "images of 4 channels: greyscale and jitter are left out" in capsys.readouterr().out
