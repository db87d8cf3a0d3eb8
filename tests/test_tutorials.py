"""The tutorials do what they promise: their commands and their Python run from top to bottom at small size, and what a
reader is told to expect is there."""

import copy
import csv
import json
import re
from pathlib import Path

import pytest
import torch

from snippets import ROOT, Desk, small_changes, small_studies, snippets_of
from tico_ssl import LARS, load_backbone, load_classifier
from tico_ssl.methods._base import Batch
from tico_ssl.methods.tico import Config, TiCo
from tico_ssl.results.run_folder import Run
from tico_ssl.results.statistics import Spread

TUTORIALS = ROOT / "docs" / "tutorials"
TINY_RECIPE = {key: value for key, value in small_changes("photos").items() if key != "training.batch_size"}


SMALL_STUDY = [f"{key}={value}" for key, value in small_changes("photos").items() if key != "training.epochs"]
SHORT_BUDGETS = {"{seconds: 300}": "{seconds: 0.02}", "{seconds: 600}": "{seconds: 0.05}"}
SMALL_LOOP = {
    "SIZE, BATCH, EPOCHS, WORKERS = 128, 256, 100, 8": "SIZE, BATCH, EPOCHS, WORKERS = 32, 16, 12, 0",
    "HIDDEN, DIM = 2048, 256": "HIDDEN, DIM = 16, 8",
    '"training.batch_size": BATCH}': f'"training.batch_size": BATCH}} | {TINY_RECIPE!r}',
    "Trainer(max_epochs=EPOCHS)": "Trainer(max_epochs=2, accelerator='cpu', logger=False, enable_progress_bar=False, "
    "enable_model_summary=False, enable_checkpointing=False)",
}


@pytest.fixture
def follow(tmp_path, monkeypatch, capsys):
    """Carries out a tutorial in a folder of its own: `follow(page, replaced words)`. A tutorial makes all its runs
    itself. Returns the desk, and what each snippet printed, by its text."""
    monkeypatch.chdir(tmp_path)
    small_studies(monkeypatch)

    def followed(name: str, replaced=None) -> tuple[Desk, dict[str, str]]:
        desk = Desk(tmp_path, TUTORIALS / name, replaced=replaced or {}, small_study=SMALL_STUDY)
        page = desk.page.read_text(encoding="utf-8")
        assert [old for old in desk.replaced if old not in page] == []
        printed = {}
        for snippet in desk.snippets:
            if not snippet.text.startswith("pip install"):
                desk.carry_out(snippet)
                printed[snippet.text] = capsys.readouterr().out
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
    checked = printed["tico data check photos/ --out bad_files.jsonl"]
    assert "48 files" in checked and "next       tico pretrain photos" in checked
    assert Path("bad_files.jsonl").read_text() == ""
    assert Path("views.png").stat().st_size > 1000

    evaluated = {line["protocol"]: line["numbers"] for line in Run(Path("runs/photos")).results()}
    promised = {
        "rankme": "embedding_rankme",
        "alignment-uniformity": "alignment",
        "neighbour-consistency": "same_image",
    }
    assert evaluated.keys() == promised.keys()
    for protocol, metric in promised.items():
        assert metric in evaluated[protocol]["trained"] and metric in evaluated[protocol]["untrained"]
    report = Path("runs/photos/report.html").read_text(encoding="utf-8")
    assert "<html" in report and not re.search(r"<(script|img|link)[^>]*(src|href)=.?https?:", report)

    found = rows_of("found/search.csv")
    similar = [float(row["cosine"]) for row in found]
    assert len(found) == 5 and found[0]["path"] == "1.jpg" and similar[0] == pytest.approx(1, abs=1e-5)
    assert similar == sorted(similar, reverse=True)
    assert Path("found/search.html").is_file() and Path("curated/curate.html").is_file()
    assert len({row["path"] for row in rows_of("curated/subset.csv")}) == 20

    pairs, backbone = rows_of("pairs.csv"), load_backbone("runs/photos")
    assert [row["photo"] for row in pairs] == sorted(map(str, Path("photos").glob("*.jpg")))
    assert all(row["photo"] != row["nearest"] for row in pairs)
    with torch.no_grad():
        one, other = backbone(backbone.preprocess([pairs[0]["photo"], pairs[0]["nearest"]]))
    assert float(pairs[0]["similarity"]) == pytest.approx(torch.cosine_similarity(one, other, dim=0).item(), abs=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter
def test_labelled_photos_to_a_classifier_in_onnx(follow):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    desk, printed = follow("labelled-to-onnx.md")
    assert "2 classes" in printed["tico data check labelled/"]
    verdict = printed["tico evaluate runs/pets knn linear"]
    assert "retraining helped" in verdict and "95 % interval" in verdict
    said = printed["tico finetune runs/pets --data labelled/"]
    assert "most frequent class" in said
    results = json.loads(Path("runs/pets/classifier/results.json").read_text())
    assert f"accuracy {results['accuracy']:.1f} %" in said
    assert Path("runs/pets/classifier/report.html").is_file()

    names = desk.names  # what the page's Python has defined
    model = load_classifier("runs/pets/classifier")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (model.backbone.mean, model.backbone.std))
    assert names["classes"] == ["cats", "dogs"] == list(model.classes)
    predictions = rows_of("predictions.csv")
    assert len(predictions) == 48
    for row in predictions:
        label, probability = names["classify"](row["file"])
        pixels = torch.from_numpy(names["preprocess"](row["file"])) / 255
        likely = model((pixels - mean) / std).softmax(dim=1).max().item()
        assert probability == pytest.approx(likely, abs=1e-4)  # of the same pixels
        assert label == row["class"] or float(row["probability"]) < 0.75  # of pixels that are not rounded
    assert sum(float(row["probability"]) > 0.9 for row in predictions) > 24
    first = next(row for row in predictions if row["file"].endswith("/1.jpg"))
    assert f"('{first['class']}', " in list(printed.values())[-1]


def test_two_methods_compared(follow):
    _, printed = follow("comparing-methods.md", SHORT_BUDGETS)
    plan = printed["tico study rates.yaml --dry-run"].splitlines()
    names = [f"{method}-lr-{rate}" for method in ("tico", "vicreg") for rate in (0.06, 0.2)]
    assert [line.split()[0] for line in plan if "by time" in line] == [f"{name}-seed0" for name in names]
    chosen = json.loads(Path("runs/study-rates/results.json").read_text())["rows"]
    assert [row["run"] for row in chosen] == names
    assert all("top1_k20" in row["numbers"]["knn"] for row in chosen)

    rows = {row["run"]: row for row in json.loads(Path("runs/study-two-methods/results.json").read_text())["rows"]}
    assert rows.keys() == {"tico", "vicreg"}
    values = {name: row["numbers"]["linear"]["top1"]["trained"]["values"] for name, row in rows.items()}
    assert all(row["seeds"] == [0, 1, 2] and row["failed"] == {} and row["epochs"] >= 1 for row in rows.values())
    table = printed["tico compare runs/study-two-methods --format markdown"]
    for text in ("| tico", "| vicreg", "knn top1_k20", "linear top1", "untrained", "gain", "helped?", "collapsed?"):
        assert text in table
    assert "</table>" in Path("runs/study-two-methods/report.html").read_text(encoding="utf-8")

    difference = Spread.of([one - other for one, other in zip(values["tico"], values["vicreg"])])
    low, high = difference.interval or (difference.mean,) * 2
    told = f"TiCo minus VICReg: {difference.mean:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f}"
    assert list(printed.values())[-1].strip() == told


@pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and its own use of torch
def test_your_own_loop(follow):
    pytest.importorskip("lightning")
    desk, printed = follow("your-own-loop.md", SMALL_LOOP)
    names = desk.names
    told = next(text for text in printed.values() if text.startswith("epoch 1: loss"))
    assert told.count("\n") == 12 and "dimensions" in told
    state = torch.load("encoder.pth")
    assert all(torch.equal(state[key], value) for key, value in names["encoder"].state_dict().items())
    assert "knn top1_k20" in printed["tico evaluate torchvision/resnet18 knn --data labelled/ --weights encoder.pth"]

    trained = names["module"].method.backbone.state_dict()
    saved = load_backbone("tico.safetensors").state_dict()
    assert trained and all(torch.equal(saved[key], value) for key, value in trained.items())
    assert len(rows_of("features.csv")) == 48


@pytest.mark.parametrize("step", [0, 7])
def test_the_step_of_your_own_loop_is_the_package_s(step, tmp_path, monkeypatch):
    """Loss, weights, target and covariance, from the same weights and views, over two steps."""
    monkeypatch.chdir(tmp_path)
    desk = Desk(tmp_path, TUTORIALS / "your-own-loop.md", replaced=SMALL_LOOP)
    for snippet in [snippet for snippet in desk.snippets if snippet.kind == "python"][:3]:  # up to the step
        desk.carry_out(snippet)
    names = desk.names
    method = TiCo(copy.deepcopy(names["encoder"]), names["width"], Config(hidden=16, dim=8, ema_start=0.95)).train()
    method.projector.load_state_dict(names["projector"].state_dict())
    method.target.load_state_dict(names["target"].state_dict())
    optimizer = LARS(method.online().parameters(), weight_decay=1.5e-6)
    for number in (step, step + 1):
        views = tuple(torch.randn(2, 6, 3, 32, 32))
        own = names["train_step"](*views, number)
        for group in optimizer.param_groups:
            group["lr"] = names["learning_rate"](number)
        loss = method(Batch(views, torch.arange(6), None)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.after_step(number / names["steps"])
        assert own.item() == pytest.approx(loss.item(), abs=1e-6)
    for mine, theirs in ((names["online"], method.online()), (names["target"], method.target)):
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[key], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(names["criterion"].covariance, method.covariance())
