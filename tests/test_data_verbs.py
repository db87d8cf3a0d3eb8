"""`tico data check | pack | preview`, and every kind of data through the whole of training."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tico_ssl import pretrain
from tico_ssl.cli import app
from tico_ssl.data.sources import DataConfig, open_source
from tico_ssl.errors import UserError


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
    assert "1 files cannot be read (7.7%)" in text
    assert '"file": "cats/bad.png"' in (tmp_path / "bad.jsonl").read_text()


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


def test_preview_draws_a_picture(tico, folder_of_images, tmp_path):
    for views in ("byol", "swav", "pirl", "supervised"):
        method = ["method.name=tico"] if views != "supervised" else ["views=[{}, {}]"]
        words = method if views == "supervised" else [f"views={views}", *method]
        out = tmp_path / f"{views}.png"
        tico("data", "preview", folder_of_images, "data.image_size=48", *words, "--out", out)
        with Image.open(out) as picture:
            assert picture.width > 12 * 40


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
