"""The tutorials do what they promise: their commands and their Python run from top to bottom at small size, and what a
reader is told to expect is there."""

import copy
import csv
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from snippets import ROOT, Desk, small_studies, snippets_of
from stand_ins import SIDE
from tico_ssl import LARS, load_backbone, load_classifier
from tico_ssl.methods._base import Batch
from tico_ssl.methods.tico import Config, TiCo
from tico_ssl.results.run_folder import Run

TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.fixture
def follow(tmp_path, monkeypatch, capsys):
    """Carries out a tutorial in a folder of its own: `follow(page, replaced words of its Python)`. A tutorial makes
    all its runs itself. Returns the desk, and what was printed after each snippet."""
    monkeypatch.chdir(tmp_path)
    small_studies(monkeypatch)

    def followed(name: str, replaced=None) -> tuple[Desk, list[str]]:
        desk = Desk(tmp_path, TUTORIALS / name, None, {}, replaced or {})
        printed = []
        for snippet in desk.snippets:
            if not snippet.text.startswith("pip install"):
                desk.carry_out(snippet)
                printed.append(capsys.readouterr().out)
        return desk, printed

    return followed


def rows_of(file: str) -> list[dict[str, str]]:
    with Path(file).open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def test_there_are_four_tutorials_with_commands_and_python():
    pages = sorted(TUTORIALS.glob("*.md"))
    assert len(pages) == 4
    for page in pages:
        assert {snippet.kind for snippet in snippets_of(page)} >= {"command", "python"}


def test_photos_to_search(follow):
    _, printed = follow("photos-to-search.md")
    checked = printed[0]
    assert "48 files" in checked and "next       tico pretrain photos" in checked
    assert Path("bad_files.jsonl").read_text() == ""
    assert Path("views.png").stat().st_size > 1000

    evaluated = Run(Path("runs/photos")).results()
    numbers = {result.protocol: result.numbers for result in evaluated}
    assert numbers.keys() == {"rankme", "alignment-uniformity", "neighbour-consistency"}
    assert "embedding_rankme" in numbers["rankme"]["trained"] and "alignment" in numbers["alignment-uniformity"]["trained"]
    assert all({"trained", "untrained"} <= named.keys() for named in numbers.values())
    assert "<html" in Path("runs/photos/report.html").read_text(encoding="utf-8")

    found = rows_of("found/search.csv")
    assert len(found) == 5 and found[0]["path"] == "1.jpg" and float(found[0]["cosine"]) == pytest.approx(1, abs=1e-5)
    similar = [float(row["cosine"]) for row in found]
    assert similar == sorted(similar, reverse=True)
    assert Path("found/search.html").is_file() and Path("curated/curate.html").is_file()
    assert len({row["path"] for row in rows_of("curated/subset.csv")}) == 20

    backbone = load_backbone("runs/photos")
    pairs = rows_of("pairs.csv")
    assert [row["photo"] for row in pairs] == sorted(map(str, Path("photos").glob("*.jpg")))
    assert all(row["photo"] != row["nearest"] for row in pairs)
    with torch.no_grad():
        a, b = backbone(backbone.preprocess([pairs[0]["photo"], pairs[0]["nearest"]]))
    assert float(pairs[0]["similarity"]) == pytest.approx(torch.cosine_similarity(a, b, dim=0).item(), abs=1e-4)


def test_labelled_photos_to_a_classifier_in_onnx(follow):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    desk, printed = follow("labelled-to-onnx.md")
    assert "2 classes" in printed[0]
    assert "95 % interval" in next(text for text in printed if "helped" in text or "Cannot tell" in text)
    results = json.loads(Path("runs/pets/classifier/results.json").read_text())
    assert 0 <= results["accuracy"] <= 100
    assert Path("runs/pets/classifier/report.html").is_file()

    names = desk.names  # what the page's Python has defined
    assert names["classes"] == ["cats", "dogs"] == list(load_classifier("runs/pets/classifier").classes)
    predictions = rows_of("predictions.csv")
    assert len(predictions) == 48
    for row in predictions:
        label, probability = names["classify"](row["file"])
        assert label == row["class"]
        assert probability == pytest.approx(float(row["probability"]), abs=1e-3)
    assert printed[-1].startswith("('")


def test_two_methods_compared(follow):
    _, printed = follow("comparing-methods.md", {})
    plan = next(text for text in printed if "seed0" in text and "by time" in text)
    assert [line.split()[0] for line in plan.splitlines()] == [
        f"{method}-lr-{rate}-seed0" for method in ("tico", "vicreg") for rate in ("0.06", "0.2")
    ]
    summary = json.loads(Path("runs/study-two-methods/results.json").read_text())
    rows = {row["run"]: row for row in summary["runs"]}
    assert rows.keys() == {"tico", "vicreg"}
    for row in rows.values():
        assert len(row["seeds"]) == 3
    table = next(text for text in printed if text.startswith("| "))
    assert all(text in table for text in ("| tico", "| vicreg", "gain", "helped?", "collapsed?", "untrained"))
    assert "TiCo minus VICReg: " in printed[-1] and "95 % interval" in printed[-1]
    assert any(Path("runs/study-two-methods").glob("*report*.html")) or Path("report/report.html").is_file()


SMALL_LOOP = {
    "SIZE, BATCH, EPOCHS, WORKERS = 128, 256, 100, 8": f"SIZE, BATCH, EPOCHS, WORKERS = {SIZE * 2}, 16, 12, 0",
    "HIDDEN, DIM = 2048, 256": "HIDDEN, DIM = 16, 8",
}


def test_your_own_loop(follow, monkeypatch):
    pass
