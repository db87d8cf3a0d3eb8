"""What a command proposes next is a command that fits the data, and that a shell takes as it is."""

import errno
import re
import shlex

import pytest
from PIL import Image
from typer.testing import CliRunner

from tico_ssl.cli import app
from tico_ssl.config.few_images import adapted
from tico_ssl.config.recipe import load_recipe, parse_override
from tico_ssl.config.sections import DataConfig
from tico_ssl.data import bad_files
from tico_ssl.data.checking import recommended
from tico_ssl.data.source import spread_evenly
from tico_ssl.data.sources import open_source
from tico_ssl.evaluations import _evaluate
from tico_ssl.results import table
from tico_ssl.runtime.errors import UserError, refusal


def proposed(*words: object) -> list[str]:
    """The words of the command that a command proposes."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = re.search(r"^next +(tico .*)$", done.output, re.MULTILINE)
    assert found, done.output
    return shlex.split(found[1])[1:]


@pytest.mark.parametrize(
    ("images", "side", "channels", "words"),
    [
        (300, 500.0, 3, ["photos-continue"]),
        (8_189, 112.0, 3, ["photos"]),
        (200_000, 500.0, 3, ["photos-vit"]),
        (60_000, 32.0, 3, ["photos", "data.image_size=32"]),
        (300, 64.0, 3, ["photos", "data.image_size=64"]),
        (8_000, 500.0, 4, ["photos", "backbone.channels=4"]),
        (100, 500.0, 1, ["photos", "backbone.channels=1"]),
    ],
)
def test_the_recipe_fits_the_images(images, side, channels, words):
    assert recommended(images, side, channels) == words
    recipe = load_recipe(words[0], dict(parse_override(word) for word in words[1:]))
    assert (recipe.data.source, recipe.backbone.channels) == ("", channels)  # not the demo's textures
    assert recipe.data.image_size <= 1.5 * side
    assert adapted(recipe, images).training.batch_size <= images


def test_paths_are_quoted_and_options_carried_along(tmp_path):
    root, packed = tmp_path / "Anna's photos", tmp_path / "all of them.tico"
    root.mkdir()
    for number in range(4):
        Image.new("L", (40, 40), 50 * number).save(root / f"{number}.png")
    options = ["data.image_size=32", "backbone.channels=1"]
    assert proposed("data", "check", root, "--channels", 1) == ["pretrain", "photos", "--data", str(root), *options]
    words = proposed("data", "pack", root, packed, "--channels", 1, "--size", 32)
    assert words == ["pretrain", "photos", "--data", str(packed), *options]


def test_a_quick_look_proposes_the_whole_of_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(_evaluate, "evaluate_all", lambda *_: [])
    monkeypatch.setattr(table, "print_results", lambda results: None)
    run, data = tmp_path / "my run", "Anna's photos"
    run.mkdir()
    options = ["--data", data, "--against", "other run", "--bf16"]
    given = ["evaluate", run, "knn", "linear.epochs=3", *options]
    assert proposed(*given, "--quick") == ["evaluate", str(run), "all", "linear.epochs=3", *options]
    assert proposed(*given) == ["report", str(run), "--data", data]


def test_a_proposal_can_be_carried_out_whatever_is_wrong_with_the_images(tmp_path):
    """With many bad files it says that these are left out; with one image it proposes no training."""
    for folder, good, bad in (("one", 1, 0), ("some", 1, 3), ("five", 5, 1)):
        (tmp_path / folder).mkdir()
        for number in range(good):
            Image.new("L", (40, 40), 40 * number).save(tmp_path / folder / f"{number}.png")
        for number in range(bad):
            (tmp_path / folder / f"bad{number}.png").write_bytes(b"nothing")

    def said(folder: str) -> str:
        return CliRunner().invoke(app, ["data", "check", str(tmp_path / folder)]).output

    assert "next       add images: a batch needs at least 2, and 1 can be read" in said("one")
    assert "next       add images: " in said("some")
    assert "data.image_size=32 data.most_bad=0.17" in said("five")  # one of six


def test_a_run_with_as_many_bad_files_as_are_proposed_begins(tmp_path, monkeypatch):
    """It tries some files: of these, more may be bad than of all."""
    monkeypatch.setattr(bad_files, "SAMPLE", 100)
    tried = spread_evenly(200, 100).tolist()
    for number in range(200):
        file = tmp_path / f"{number:03}.png"
        if number in tried[:29]:
            file.write_bytes(b"nothing")
        else:
            Image.new("L", (40, 40)).save(file)
    said = CliRunner().invoke(app, ["data", "check", str(tmp_path)]).output
    source = open_source(DataConfig(source=str(tmp_path)))
    assert "29 files cannot be read (14.5%)" in said
    (proposed,) = re.findall(r"data\.most_bad=([\d.]+)", said)
    bad_files.survey(source, float(proposed), bad_files.BadFiles(), 2)
    with pytest.raises(UserError, match="29 of 100 files tried"):
        bad_files.survey(source, 0.28, bad_files.BadFiles(), 2)


def test_keys_and_images_in_the_wrong_place_are_recognised(tmp_path):
    done = CliRunner().invoke(app, ["pretrain", "photos", str(tmp_path)])
    assert f"images are given with --data {tmp_path}" in str(done.exception)
    done = CliRunner().invoke(app, ["pretrain", "demo", "epochs=3"])
    assert "unknown key 'epochs'; did you mean 'training.epochs'?" in str(done.exception)


def test_a_file_that_cannot_be_written_has_the_name_that_was_given():
    for name in ("a/p.png.f807efec.tmp", "a/p.png.tmp", "a/p.png.partial", "a/p.png"):
        assert refusal(PermissionError(errno.EACCES, "Permission denied", name)).startswith(
            "a/p.png: Permission denied"
        )


def test_a_narrow_column_of_numbers_is_still_markdown():
    assert table.markdown_lines(["", "x"], [["1", "2"]], [])[1] == "| -: | -: |"


@pytest.mark.parametrize("option", ["--resume", "--overwrite", None])
def test_a_folder_that_is_no_run_is_not_said_to_go_on(option, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    words = ["pretrain", "demo", "--out", str(tmp_path / "mine"), *filter(None, [option])]
    with pytest.raises(UserError, match=r"is not a run folder \(it has no recipe.yaml\): choose another --out"):
        CliRunner().invoke(app, words, catch_exceptions=False)
