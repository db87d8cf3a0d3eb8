"""From labelled images to a classifier that names others: what it promises, on images that colour tells apart."""

import csv
import errno
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import tico_ssl
from tico_ssl.classifying import heads, making
from tico_ssl.classifying import predict as predicting
from tico_ssl.classifying.finetune import finetune
from tico_ssl.classifying.held_out import divided
from tico_ssl.classifying.images import places_of
from tico_ssl.classifying.journal import Batch, Journal
from tico_ssl.classifying.place import classifier_file
from tico_ssl.classifying.predict import predict
from tico_ssl.classifying.scores import Verdicts, scores_of
from tico_ssl.cli import app
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.evaluations._classification import training
from tico_ssl.exporting._classifier import load_with_head
from tico_ssl.features import batches
from tico_ssl.features.linear import fit_probe
from tico_ssl.features.settings import LinearConfig
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import read_described, save_backbone, write_described
from tico_ssl.runtime.errors import UserError, one_line

COLOURS = {"=blue": (20, 30, 220), "green <b>": (20, 200, 30), "red": (220, 30, 20)}  # names that need care
PER_CLASS = 12
WHOLE = {"head": "whole", "epochs": 2, "batch_size": 8, "precision": "fp32"}


def draw(folder: Path, colours: dict[str, tuple[int, int, int]], count: int, seed: int = 0) -> Path:
    """Noisy images of a colour per class folder."""
    random = np.random.default_rng(seed)
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            noisy = np.asarray(colour) + random.normal(0, 15, (20, 24, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("data") / "colours", COLOURS, PER_CLASS)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    """A tiny untrained backbone as a file."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("backbones") / "tiny.safetensors"
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16), file)
    return file


@pytest.fixture(scope="module")
def made(labelled, backbone, tmp_path_factory):
    return finetune(backbone, str(labelled), tmp_path_factory.mktemp("run") / "classifier")


@pytest.fixture
def many(labelled, tmp_path) -> Path:
    """More images than a batch has (see `small_batches`), one of them unreadable."""
    photos = tmp_path / "photos"
    for file in sorted(labelled.rglob("*.png")):
        photos.mkdir(exist_ok=True)
        shutil.copy(file, photos / f"{file.parent.name}-{file.name}")
    (photos / "broken.png").write_text("no image")
    return photos


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(batches, "BATCH", 8)


# -------------------------------------------------------------------------------------------------- finetune


def test_what_colour_tells_apart_is_named_rightly(made):
    assert made.results["accuracy"] == 100
    assert made.summary == "accuracy 100.0 % on 6 photos (95 % interval 61.0 to 100.0; most frequent class: 33.3 %)"
    assert {file.name for file in made.folder.iterdir()} - {"lock"} == {
        "classifier.safetensors",
        "report.html",
        "results.json",
    }
    written = json.loads((made.folder / "results.json").read_text())
    assert written["confusion"] == [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
    assert [row["class"] for row in written["classes"]] == sorted(COLOURS)
    assert all(row["precision"] == row["recall"] == 100 for row in written["classes"])
    assert "held out" in written["data"]["split"]


def test_names_and_their_order_survive_the_file(made, labelled):
    model = tico_ssl.load_classifier(made.folder)
    assert model.classes == tuple(sorted(COLOURS))
    assert not model.training
    for name in COLOURS:
        (best, probability), *others = model.predict(labelled / name / "0.png", top=9)[0]
        assert best == name and len(others) == 2
        assert probability + sum(p for _, p in others) == pytest.approx(1)
    same = tico_ssl.load_classifier(made.folder / "classifier.safetensors")
    assert classifier_file(made.folder.parent) == made.folder / "classifier.safetensors"  # of the run folder
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True))


def test_the_head_on_plain_features_is_the_fitted_one():
    torch.manual_seed(0)
    features, labels = torch.randn(60, 5) * torch.tensor([1, 9, 0.1, 3, 0]) + 7, torch.arange(60) % 3
    probe = fit_probe(features, labels, LinearConfig(), classes=4)
    folded = probe.folded()
    assert folded.weight.shape == (4, 5)
    torch.testing.assert_close(folded(features), probe(features), atol=1e-4, rtol=1e-4)


def test_an_export_gets_all_that_the_input_needs(made):
    whole = load_with_head(made.folder)
    size, channels = whole.image_size, whole.config.channels
    assert (size, len(whole.mean), len(whole.std), channels) == (16, 3, 3, 3)
    assert whole.classes == tuple(sorted(COLOURS))
    assert whole(torch.zeros(2, channels, size, size)).shape == (2, 3)


def test_a_damaged_or_other_file_is_refused(made, backbone, tmp_path):
    with pytest.raises(UserError, match="without a classifier"):
        tico_ssl.load_classifier(backbone)
    damaged = bytearray((made.folder / "classifier.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(UserError, match=r"the checksum of .* is wrong.*finetune"):
        tico_ssl.load_classifier(tmp_path / "damaged.safetensors")


def test_a_file_that_makes_no_probabilities_is_refused(made, labelled, tmp_path):
    """Whose checksums are right: it may come from anyone."""
    whole = made.folder / "classifier.safetensors"
    other = tmp_path / "classifier.safetensors"
    state, about = read_described(whole)
    for changes, words in (({"std": [0.0] * 3}, "'std' must be positive"), ({"mean": [1e300] * 3}, "'mean.0'")):
        write_described(other, state, about | changes)
        assert words in refused("predict", other, labelled, "--out", tmp_path / "out.csv")
    write_described(other, state | {"head.weight": state["head.weight"] * float("nan")}, about)
    assert "not finite" in refused("predict", other, labelled, "--out", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_the_page_shows_mistakes_and_escapes_names(backbone, tmp_path):
    data = draw(tmp_path / "data" / "train", COLOURS, 6).parent
    draw(data / "test", COLOURS, 2, seed=1)
    (data / "test" / "red" / "0.png").rename(data / "test" / "green <b>" / "red.png")  # a wrong label
    found = finetune(backbone, str(data), tmp_path / "out").results
    assert found["accuracy"] == pytest.approx(100 * 5 / 6)
    assert found["data"]["split"] == "the data's own"
    assert found["confusion"][1] == [0, 2, 1]
    text = (tmp_path / "out" / "report.html").read_text()
    assert "green &lt;b&gt;" in text and "green <b>" not in text
    assert text.count("labelled green") == 1 and "data:image/webp" in text


def test_a_folder_val_beside_train_and_test_chooses(backbone, tmp_path, capsys):
    data = draw(tmp_path / "data" / "train", COLOURS, 4).parent
    for split in ("val", "test"):
        draw(data / split, {name: colour for name, colour in COLOURS.items() if name != "=blue"}, 2, seed=1)
    assert finetune(backbone, str(data), tmp_path / "linear").results["images"] == 4
    assert "chosen on 4 images of val" in capsys.readouterr().out
    found = finetune(backbone, str(data), tmp_path / "whole", WHOLE | {"epochs": 1}).results
    assert "12 images; kept is the best epoch on 4 images of val" in capsys.readouterr().out
    assert found["classes"][0]["recall"] is None


def test_an_untrained_model_by_name_is_taken_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    labels = np.arange(20) % 2
    images = (random.integers(0, 60, (20, 16, 16, 3)) + 150 * labels[:, None, None, None]).astype(np.uint8)
    np.savez("shades.npz", images=images, labels=labels)
    made = finetune("tico/resnet10-w4", "shades.npz")
    assert (made.results["accuracy"], made.results["backbone"]) == (100, "untrained")
    assert tico_ssl.load_classifier(made.folder).classes == ("0", "1")


def test_scores_are_shares_of_the_counts():
    truth, named = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    verdicts = Verdicts(truth, named, torch.tensor([0.9, 0.8, 0.7, 0.6]), truth == named, torch.arange(4), 3)
    found = scores_of(verdicts, ("a", "b", "c"), most_frequent=0)
    assert (found["accuracy"], found["most_frequent_class"]["accuracy"]) == (75, 75)
    assert [row["recall"] for row in found["classes"]] == [pytest.approx(200 / 3), 100, None]
    assert [row["precision"] for row in found["classes"]] == [100, 50, None]
    assert verdicts.mistakes(5).tolist() == [2]


def test_images_are_held_out_of_every_class_but_never_all():
    labels = torch.tensor([0] * 20 + [1] * 10 + [2])
    kept, out = divided(labels, 0.1, seed=0)
    assert labels[out].tolist() == [0, 0, 1]
    assert sorted([*kept.tolist(), *out.tolist()]) == list(range(31))
    assert 2 in labels[divided(labels, 0.99, seed=0)[0]]


@pytest.fixture(scope="module")
def whole(labelled, backbone, tmp_path_factory):
    return finetune(backbone, str(labelled), tmp_path_factory.mktemp("classifiers") / "whole", WHOLE)


def test_the_whole_network_is_trained_and_its_best_epoch_kept(whole, made):
    assert whole.results["settings"]["head"] == "whole"
    assert whole.results["chosen"].keys() == {"epoch", "validation_top1", "validation_images"}
    before, after = (tico_ssl.load_classifier(each.folder).backbone for each in (made, whole))
    assert not torch.equal(next(before.parameters()), next(after.parameters()))
    assert not list(whole.folder.glob("training-*"))


def test_an_interrupted_training_continues_to_the_same_classifier(whole, labelled, backbone, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def die(self, epoch, epochs, classifier):
        if epoch == 2:
            raise Killed
        keep(self, epoch, epochs, classifier)

    keep = heads.BestEpoch.__call__
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(heads.BestEpoch, "__call__", die)
        patch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
        finetune(backbone, str(labelled), tmp_path / "out", WHOLE)
    assert list((tmp_path / "out").glob("training-*/last.pt"))
    (tmp_path / "out" / "classifier.safetensors.0123abcd.tmp").write_text("cut off")  # by another kill
    again = finetune(backbone, str(labelled), tmp_path / "out", WHOLE)
    assert again.results["chosen"] == whole.results["chosen"]
    files = [each.folder / "classifier.safetensors" for each in (again, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_on_a_full_disk_an_earlier_classifier_stays_what_it_was(
    made, labelled, backbone, tmp_path, full_disk, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "classifier"
    shutil.copytree(made.folder, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with full_disk(len(before["report.html"]) // 2), pytest.raises(OSError) as caught:
        finetune(backbone, str(labelled), folder, overwrite=True)
    assert f"{folder / 'report.html'}: " in (one_line(caught.value) or "")
    monkeypatch.setattr(making, "save_classifier", refuse)  # the last file
    with pytest.raises(OSError, match="No space left"):
        finetune(backbone, str(labelled), folder, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


# -------------------------------------------------------------------------------------------------- predict


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predictions_are_those_of_the_module_to_the_bit(made, labelled, tmp_path):
    predict(made.folder, [str(labelled)], tmp_path / "out.csv", top=2)
    rows = rows_of(tmp_path / "out.csv")
    model = tico_ssl.load_classifier(made.folder)
    files = sorted(str(file) for file in labelled.rglob("*.png"))
    assert [row["file"] for row in rows] == files
    inputs = model.preprocess(files).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = model(inputs).softmax(dim=1).sort(dim=1, descending=True)
    for rank, suffix in enumerate(["", "_2"]):
        probabilities = torch.tensor([float(row[f"probability{suffix}"]) for row in rows])
        assert torch.equal(probabilities, expected.values[:, rank])
        named = [model.classes[i] for i in expected.indices[:, rank].tolist()]
        assert [row[f"class{suffix}"].removeprefix("'") for row in rows] == named
    assert any(row["class"] == "'=blue" for row in rows)  # no formula in a spreadsheet
    assert "class_3" not in rows[0]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_killed_command_continues_to_the_same_file(made, many, tmp_path, monkeypatch, small_batches, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    whole, broken = tmp_path / f"whole.{suffix}", tmp_path / f"broken.{suffix}"
    found = predict(made.folder, [str(many)], whole)
    assert (found.images, found.unreadable, found.before) == (3 * PER_CLASS, 1, 0)
    append = Journal.append

    def die(self, batch):
        if batch.begin >= 16:
            self.path.open("ab").write(b'{"begin": 16, "cut off')
            raise KeyboardInterrupt
        append(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "append", die)
        predict(made.folder, [str(many)], broken)
    assert not broken.exists()
    with pytest.raises(UserError, match="another model, other images or another top="):
        predict(made.folder, [str(many)], broken, top=1)
    found = predict(made.folder, [str(many)], broken)
    assert (found.images, found.before) == (3 * PER_CLASS, 16)
    assert broken.read_bytes() == whole.read_bytes()
    bad = [json.loads(line) for line in Path(f"{broken}.bad_files.jsonl").read_text().splitlines()]
    assert [line["file"] for line in bad] == [str(many / "broken.png")]
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(UserError, match="overwrite=True"):
        predict(made.folder, [str(many)], broken)


@pytest.mark.parametrize("moment", ["before the table", "after the table"])
def test_wherever_a_command_is_killed_bad_files_are_listed_beside_a_table(made, many, tmp_path, monkeypatch, moment):
    out, write = tmp_path / "out.csv", predicting.write_table

    def die(*arguments):
        if moment == "after the table":
            write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(predicting, "write_table", die)
        predict(made.folder, [str(many)], out)
    if not out.exists():
        predict(made.folder, [str(many)], out)
    assert "broken.png" in Path(f"{out}.bad_files.jsonl").read_text()


def test_a_classifier_made_meanwhile_is_not_replaced(made, labelled, backbone, tmp_path, monkeypatch):
    @contextmanager
    def after_another(folder):
        shutil.copytree(made.folder, folder)
        yield

    monkeypatch.setattr(making, "_alone", after_another)
    with pytest.raises(UserError, match="has a classifier"):
        finetune(backbone, str(labelled), tmp_path / "out")


def test_two_commands_never_write_the_same_predictions(made, many, tmp_path, monkeypatch, small_batches):
    whole, both = tmp_path / "whole.csv", tmp_path / "both.csv"
    predict(made.folder, [str(many)], whole)
    append = Journal.append

    def meanwhile(self, batch):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="another command writes"):
            patch.setattr(Journal, "append", append)
            predict(made.folder, [str(many)], both, overwrite=True)
        append(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", meanwhile)
        predict(made.folder, [str(many)], both)
    assert both.read_bytes() == whole.read_bytes()


def test_a_disk_that_is_full_of_predictions_is_named(made, many, tmp_path, full_disk):
    with full_disk(16), pytest.raises(OSError) as caught:
        predict(made.folder, [str(many)], tmp_path / "out.csv")
    assert str(tmp_path / "out.csv") in (one_line(caught.value) or "")


def test_every_format_has_the_same_predictions(made, many, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    files = [tmp_path / f"out.{suffix}" for suffix in ("csv", "jsonl", "parquet")]
    for file in files:
        predict(made.folder, [str(many)], file, top=2)
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    table = parquet.read_table(files[2]).to_pylist()
    assert [list(line) for line in lines[:1]] == [["file", "class", "probability", "class_2", "probability_2"]]
    for row, line, record in zip(rows_of(files[0]), lines, table, strict=True):
        assert row["class"].removeprefix("'") == line["class"] == record["class"]
        assert float(row["probability"]) == line["probability"]
        assert np.float32(line["probability"]) == np.float32(record["probability"])


def test_a_batch_after_a_gap_is_not_taken_from_a_journal(tmp_path):
    journal = Journal(tmp_path / "j", {"model": "m"}, anew=False)
    for begin, end in ((0, 8), (16, 24)):
        journal.append(Batch(begin, end, [], []))
    assert Journal(tmp_path / "j", {"model": "m"}, anew=False).done == 8


def test_files_patterns_and_folders_are_taken_in_order(labelled, tmp_path, monkeypatch):
    red, green = labelled / "red", labelled / "green <b>"
    assert places_of([str(red / "0.png"), str(red / "1*.png"), str(green)]) == [
        [str(red / "0.png"), *(str(red / f"{n}.png") for n in (1, 10, 11))],
        str(green),
    ]
    with pytest.raises(UserError, match="no file matches"):
        places_of([str(tmp_path / "*.jpg")])


def test_a_batch_of_bad_files_is_passed_over(made, labelled, tmp_path, small_batches):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(20):
        good = number in (9, 10)
        file = photos / f"{number:02}.png"
        shutil.copy(labelled / "red" / "0.png", file) if good else file.write_text("")
    found = predict(made.folder, [str(photos)], tmp_path / "out.jsonl")
    assert (found.images, found.unreadable, len(found.first_bad)) == (2, 18, 18)
    for number in (9, 10):
        (photos / f"{number:02}.png").write_text("")
    with pytest.raises(UserError, match="none of the 20 images can be read"):
        predict(made.folder, [str(photos)])


# -------------------------------------------------------------------------------------------------- commands


def test_from_files_to_a_table(labelled, backbone, tmp_path):
    def tico(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    out, table = tmp_path / "out", tmp_path / "out.csv"
    said = tico("finetune", str(backbone), "seed=1", "--data", str(labelled), "--out", str(out))
    interval = "95 % interval 61.0 to 100.0"
    assert said.splitlines()[-1] == f"accuracy 100.0 % on 6 photos ({interval}; most frequent class: 33.3 %)"
    said = tico("predict", str(out), str(labelled / "red"), "--out", str(table), "--top", "1")
    assert "12 images" in said and "images/s" in said
    assert {row["class"] for row in rows_of(table)} == {"red"}
    said = tico("predict", str(out), str(labelled))
    assert f"... and {3 * PER_CLASS - predicting.FIRST} more: --out" in said


def refused(*words: object) -> str:
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_mistakes_are_one_clear_line(made, labelled, backbone, tmp_path):
    (tmp_path / "empty").mkdir()
    one = draw(tmp_path / "one", {"red": COLOURS["red"]}, 3)
    np.savez(tmp_path / "same.npz", images=np.zeros((6, 16, 16, 3), np.uint8), labels=np.zeros(6, np.int64))
    out = tmp_path / "out"
    assert "no labels" in refused("finetune", backbone, "--data", labelled / "red", "--out", out)
    assert "no labels" in refused("finetune", backbone, "--data", one, "--out", out)
    assert "of one class" in refused("finetune", backbone, "--data", tmp_path / "same.npz", "--out", out)
    assert "no trained backbone" in refused("finetune", tmp_path / "nowhere", "--data", labelled)
    assert "no images" in refused("finetune", backbone, "--data", tmp_path / "empty", "--out", out)
    assert "did you mean 'linear'" in refused("finetune", backbone, "head=liner", "--data", labelled)
    assert "epochs" in refused("finetune", backbone, "epochs=3", "--data", labelled)
    assert "--overwrite" in refused("finetune", backbone, "--data", labelled, "--out", made.folder)
    assert "no classifier here" in refused("predict", tmp_path / "nowhere", labelled)
    assert "no classifier here" in refused("predict", tmp_path / "empty", labelled)
    assert "nowhere" in refused("predict", made.folder, tmp_path / "nowhere")
    assert "no images found" in refused("predict", made.folder, tmp_path / "empty")
    assert ".parquet" in refused("predict", made.folder, labelled, "--out", tmp_path / "out.xls")
    assert not out.exists()


def test_python_takes_one_place_or_several_of_any_kind(made, labelled):
    alone = predict(made.folder, str(labelled / "red"))
    assert alone.images > 0
    for given in (labelled / "red", [labelled / "red"], sorted((labelled / "red").iterdir())):
        assert predict(made.folder, given).by_class == alone.by_class


@pytest.mark.parametrize("top", [0, -1])
def test_at_least_one_class_is_named(made, labelled, top):
    for use in (
        lambda: predict(made.folder, str(labelled), top=top),
        lambda: tico_ssl.load_classifier(made.folder).predict(Image.new("RGB", (16, 16)), top=top),
    ):
        with pytest.raises(UserError, match=f"top is {top}: at least one class"):
            use()


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_other_programs_get_the_classes_with_the_network(format, made, labelled, tmp_path):
    model, name = tico_ssl.load_classifier(made.folder), sorted(COLOURS)[1]
    images = model.preprocess(labelled / name / "0.png")
    out = tmp_path / ("classifier.onnx" if format == "onnx" else "classifier.pt2")
    if format == "onnx":
        runtime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        tico_ssl.export(made.folder, format, out)
        session = runtime.InferenceSession(str(out))
        about = session.get_modelmeta().custom_metadata_map
        (logits,) = session.run(["logits"], {"images": images.numpy()})
    else:
        tico_ssl.export(made.folder / "classifier.safetensors", format, out)
        extra = {"about.json": ""}
        logits = torch.export.load(out, extra_files=extra).module()(images).numpy()
        about = json.loads(extra["about.json"])
    assert json.loads(about["classes"]) == list(model.classes)
    assert model.classes[logits.argmax()] == name
    np.testing.assert_allclose(logits, model(images).detach().numpy(), atol=1e-4)
    with pytest.raises(UserError, match="is a classifier, which goes to onnx or torch-export; timm takes backbones"):
        tico_ssl.export(made.folder, "timm", tmp_path / "x.pth")
    with pytest.raises(UserError, match="a classifier has no target network"):
        tico_ssl.export(made.folder, format, out, network="target")


def test_deep_images_are_mapped_by_the_range_of_the_backbone(tmp_path):
    """Of training, validation, test and new images alike, and of the queries of a search."""
    from tico_ssl.looking_up.searching import search

    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2), ("test", 2)):
        for name, level in (("dark", 2_000), ("light", 9_000)):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                values = random.normal(level, 300, (20, 24)).clip(0).astype(np.uint16)
                Image.fromarray(values).save(tmp_path / "data" / split / name / f"{number}.png")
    config, file = BackboneConfig(name="tico/resnet10-w4", channels=1), tmp_path / "deep.safetensors"
    torch.manual_seed(0)
    save_backbone(build_backbone(config, 16, (0.5,), (0.25,), (0.0, 12_000.0)), file)
    made = finetune(file, str(tmp_path / "data"), tmp_path / "classifier")
    assert made.results["accuracy"] == 100
    new = [str(path) for path in sorted((tmp_path / "data" / "test").rglob("*.png"))]
    found = predict(tmp_path / "classifier", new)
    ours = tico_ssl.load_classifier(tmp_path / "classifier").predict(new, top=2)
    for (_, name, probability, *_), ranking in zip(found.first, ours, strict=True):
        assert (name, probability) == (ranking[0][0], pytest.approx(ranking[0][1], rel=1e-5))
    (near,) = search(file, str(tmp_path / "data"), [new[0]], top=1)
    assert near.matches[0].path == "test/dark/0.png" and near.matches[0].score == pytest.approx(1, abs=1e-5)
