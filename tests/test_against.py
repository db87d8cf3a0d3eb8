"""Models beside the one under evaluation: their numbers are those of each alone, and they are found in every table."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tico_ssl import evaluate
from tico_ssl.cli import app
from tico_ssl.config.recipe import dump_recipe, load_recipe
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.evaluations._classification import training
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._detection import protocol as detection
from tico_ssl.evaluations._estimate import measure_pace
from tico_ssl.evaluations._evaluate import evaluate_all
from tico_ssl.evaluations._session import quick_look
from tico_ssl.evaluations.detection import Config as DetectionConfig
from tico_ssl.features import subjects
from tico_ssl.features.extraction import extract_all
from tico_ssl.features.homes import others_beside
from tico_ssl.features.lazy import weights_digest
from tico_ssl.features.subjects import open_others, open_subject
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import load_backbone, save_backbone
from tico_ssl.report import one_run
from tico_ssl.results.finished import finished
from tico_ssl.results.reading import read_record
from tico_ssl.results.record import Result
from tico_ssl.results.run_folder import Run
from tico_ssl.results.table import print_results
from tico_ssl.results.verdict import collapse_verdict, verdict
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest
from tico_ssl.runtime.progress import console

SHORT = {"epochs": 1, "least_steps": 0, "batch_size": 8, "precision": "fp32"}
ON_FILES = {
    "knn": {},
    "svm": {"costs": [1.0], "folds": 2},  # of whole images
    "corruptions": {"kinds": ["gaussian-noise"], "iterations": 3},
    "alignment-uniformity": {},  # of augmented views
    "linear-augmented": SHORT,
}
IN_MEMORY = {"linear": {"iterations": 3}, "semi-supervised": SHORT | {"shares": [0.5]}, "fine-tune": SHORT}


def small_backbone(width, size, seed, mean=(0.485, 0.456, 0.406), channels=3):
    torch.manual_seed(seed)
    config = BackboneConfig(name=f"tico/resnet10-w{width}", zero_gamma=False, channels=channels)
    return build_backbone(config, size, mean, (0.25,) * channels)


def write_models(folder):
    save_backbone(small_backbone(2, 8, 0), folder / "a.safetensors")
    save_backbone(small_backbone(4, 24, 1, (0.5, 0.5, 0.5)), folder / "b.safetensors")
    torch.save(small_backbone(2, 8, 2).network.state_dict(), folder / "w.pth")


def write_run(folder, data, initial=False, lasting=2):
    """A run folder as training leaves it."""
    write_models(folder.parent)
    changes = {"data.source": data, "data.image_size": 8, "backbone.name": "tico/resnet10-w2"}
    (folder / "checkpoints").mkdir(parents=True)
    run = Run(folder)
    run.recipe_file.write_text(dump_recipe(load_recipe("demo", changes | {"training.epochs": lasting})))
    shutil.copy(folder.parent / "a.safetensors", run.backbone_file)
    if initial:
        save_backbone(small_backbone(2, 8, 5), run.initial_file)
    return run


def noise(count, side=8):
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def write_arrays():
    labels = np.arange(48) % 4
    np.savez("x.npz", x_train=noise(48), y_train=labels, x_test=noise(20), y_test=labels[:20])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Models, and images in memory."""
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path)
    write_arrays()
    return tmp_path


def evaluated(run, protocols, data, against=()):
    given = {f"{name}.{key}": value for name, values in protocols.items() for key, value in values.items()}
    return {result.protocol: result for result in evaluate_all(run, [*protocols], data, given, against=against)}


# ---------------------------------------------------------------------------------------------------- the same numbers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Protocols on one model beside others, and on each of the others alone. JPEGs are decoded at a quarter of their
    size for the one, and at half of it for the other."""
    folder = tmp_path_factory.mktemp("made")
    for split, count in (("train", 24), ("test", 8)):
        for number, image in enumerate(noise(count, 56)):
            path = folder / "jpegs" / split / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize((64, 56)).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(training, "gc", SimpleNamespace(collect=lambda: None))  # which takes as long as all the rest
        write_models(folder)
        write_arrays()
        beside = evaluated("a.safetensors", ON_FILES, "jpegs", ["b.safetensors"])
        beside |= evaluated("a.safetensors", IN_MEMORY, "x.npz", ["b.safetensors", "tico/resnet10-w4"])
        alone = evaluated("b.safetensors", ON_FILES, "jpegs") | evaluated("b.safetensors", IN_MEMORY, "x.npz")
        random = evaluated("tico/resnet10-w4", IN_MEMORY, "x.npz")
    return SimpleNamespace(folder=folder, beside=beside, alone=alone, random=random)


@pytest.mark.parametrize("protocol", [*ON_FILES, *IN_MEMORY])
def test_a_column_has_the_numbers_of_that_model_alone(made, protocol):
    beside = made.beside[protocol].numbers
    assert beside["b"] == made.alone[protocol].numbers["trained"]
    if protocol in IN_MEMORY:
        assert beside["resnet10-w4"] == made.random[protocol].numbers["untrained"]


def test_the_columns_are_in_order_and_differ(made):
    assert list(made.beside["knn"].numbers) == ["trained", "untrained", "b"]
    assert list(made.beside["linear"].numbers) == ["trained", "untrained", "b", "resnet10-w4", "pixels"]
    found = made.beside["corruptions"].numbers
    assert found["b"] != found["trained"] != found["untrained"]


def test_the_model_itself_has_the_numbers_that_it_has_without_others(made, monkeypatch, capsys):
    """And what was trained for it is found finished."""
    monkeypatch.chdir(made.folder)
    for protocol, result in evaluated("a.safetensors", ON_FILES, "jpegs").items():
        assert result.numbers == {name: made.beside[protocol].numbers[name] for name in ("trained", "untrained")}
        assert "against" not in result.data
    assert "linear-augmented trained: already done" in capsys.readouterr().out


def test_a_result_says_which_models_it_compares(made):
    found = made.beside["linear"].data["against"]
    assert found["b"] == {"model": "b.safetensors", "checkpoint": made.alone["linear"].checkpoint}
    assert found["resnet10-w4"] == {"model": "tico/resnet10-w4", "checkpoint": "untrained"}
    kept = [json.loads(line) for line in (made.folder / "a" / "results.jsonl").read_text().splitlines()]
    assert [line["data"]["against"] for line in kept if line["protocol"] == "linear"] == [found]


def test_features_are_kept_with_the_model_that_they_are_of(here, monkeypatch):
    from tico_ssl.features import cache

    passes = []
    monkeypatch.setattr(cache, "extract_all", lambda nets, *a: passes.append(len(nets)) or extract_all(nets, *a))
    alone = evaluate("b.safetensors", "knn", "x.npz")
    assert passes == [2, 2]  # two networks, training and test images
    one = evaluate("a.safetensors", "knn", "x.npz", against=["b.safetensors"])
    assert passes == [2, 2, 2, 2]  # those of the other model were there
    assert one.numbers["b"] == alone.numbers["trained"]


def test_models_that_see_the_same_pixels_share_one_pass_over_the_images(here):
    context = open_context("a.safetensors", "x.npz", against=["b.safetensors", "tico/resnet10-w2=w.pth"])
    assert context.alike == [["trained", "untrained"], ["b"], ["resnet10-w2"]]
    assert open_context("a.safetensors", "x.npz", against=["a.safetensors"]).alike == [["trained", "untrained", "a"]]
    assert measure_pace(context).trained > 0


def test_a_quick_look_is_at_the_same_images_for_every_model(made, monkeypatch):
    from tico_ssl.evaluations import _session

    monkeypatch.chdir(made.folder)
    monkeypatch.setattr(_session, "QUICK_TRAIN", 6)
    context = quick_look(open_context("a.safetensors", "jpegs", against=["b.safetensors"]))
    ours, theirs = (context.images(name)[0] for name in ("trained", "b"))
    assert len(ours) == len(theirs) == 6
    assert [ours.names(i) for i in range(6)] == [theirs.names(i) for i in range(6)]
    assert ours.fetch(0).shape[-1] < theirs.fetch(0).shape[-1]


# ---------------------------------------------------------------------------------------------------- which models


def test_weights_from_elsewhere_and_the_command_line(here):
    words = ["evaluate", "a.safetensors", "knn", "--data", "x.npz", "--against", "tico/resnet10-w2=w.pth"]
    shown = CliRunner().invoke(app, [*words, "--against", "b.safetensors"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "Also: 45.0 % of resnet10-w2 (" in " ".join(shown.output.split())
    (line,) = (here / "a" / "results.jsonl").read_text().splitlines()
    numbers = json.loads(line)["numbers"]
    assert list(numbers) == ["trained", "untrained", "resnet10-w2", "b", "pixels"]
    alone = evaluate("tico/resnet10-w2", "knn", "x.npz", weights="w.pth")
    assert numbers["resnet10-w2"] == alone.numbers["trained"]


def test_columns_have_names_that_tell_them_apart(here):
    for name in ("x/run", "y/run", "z/trained", "lr=0.1"):
        (here / name / "checkpoints").mkdir(parents=True)
        shutil.copy("a.safetensors", Run(here / name).backbone_file)
    given = ["x/run", "y/run", "z/trained", "lr=0.1", "b.safetensors", "tico/resnet10-w2", "tico/resnet10-w2=w.pth"]
    found = others_beside("a.safetensors", given)
    names = ["run", "y-run", "z-trained", "lr=0.1", "b", "resnet10-w2", "tico-resnet10-w2=w.pth"]
    assert list(found) == names
    assert [other.given for other in found.values()] == given
    assert (found["lr=0.1"].model, found["tico-resnet10-w2=w.pth"].weights) == ("lr=0.1", "w.pth")
    with pytest.raises(UserError, match=r"^against=x/run: given twice$"):
        others_beside("a.safetensors", ["x/run", "x/run"])


def test_models_that_cannot_be_compared_are_one_line(here):
    save_backbone(small_backbone(2, 8, 0, (0.5,), 1), here / "grey.safetensors")
    for model, words in (
        ("nowhere", "nowhere: no trained backbone"),
        ("tico/resnet10-w2=gone.pth", "gone.pth: no such file"),
        ("grey.safetensors", r"takes images of 1 channel, and a.safetensors takes 3"),
    ):
        with pytest.raises(UserError, match=words):
            evaluate("a.safetensors", "knn", "x.npz", against=[model])


def test_a_result_without_the_asked_columns_is_not_the_one_that_is_asked_for():
    fields = {"protocol": "knn", "settings": {}, "checkpoint": "c", "seed": 0, "numbers": {}, "seconds": 0.0}
    plain = Result(**fields, data={"train": 3}, images="i")
    more = Result(**fields, data={"train": 3, "against": {"b": {"checkpoint": "d"}}}, images="i")
    assert finished([vars(plain)], like=more) is None
    assert finished([vars(more)], like=plain) == more
    assert finished([vars(more)], like=more) == more


# ---------------------------------------------------------------------------------------------------- initial weights


def test_weights_that_a_run_started_from_are_a_column_by_themselves(here, capsys):
    run = write_run(here / "run", "x.npz", initial=True)
    result = evaluate(run.folder, "linear", overrides={"iterations": 3})
    assert list(result.numbers) == ["trained", "initial", "untrained", "pixels"]
    alone = evaluate(run.initial_file, "linear", "x.npz", {"iterations": 3})
    assert result.numbers["initial"] == alone.numbers["trained"]
    run.initial_file.unlink()
    assert "initial" not in evaluate(run.folder, "knn").numbers


def columns(**values):
    return {name: {"top1": value} for name, value in values.items()}


def line(differences=None, **values):
    return {"protocol": "linear", "numbers": columns(**values), "data": {"test": 900}, "differences": differences or {}}


def test_the_verdict_is_over_the_initial_weights_where_there_are_any():
    pairs = {"initial": {"top1": [1.1, 5.3]}, "b": {"top1": [-4.8, -0.6]}}
    found = verdict([line(pairs, trained=87.3, initial=84.1, untrained=41.0, b=90.0, pixels=30.0)])
    assert str(found) == (
        "Pretraining helped: linear top1 87.3 % against 84.1 % of the weights it started from: "
        "+3.2 points (95 % interval +1.1 to +5.3, 900 test images). "
        "Also: 41.0 % untrained, 90.0 % of b (-2.7, -4.8 to -0.6) and 30.0 % from raw pixels."
    )
    assert found.gain == pytest.approx(3.2)
    worse = [line(trained=70.0, initial=84.1, untrained=41.0)]
    assert verdict(worse).harmed
    assert collapse_verdict({}, worse) == "no"  # it is far from untrained
    beside = verdict([line(trained=80.0, untrained=41.0, b=90.0)])
    assert str(beside).endswith("Also: 90.0 % of b.")


def test_the_table_shows_the_gain_over_the_initial_weights_and_other_models_last(capsys, monkeypatch):
    data = {"source": "x", "train": 1, "test": 900, "split": "given"}
    numbers = columns(b=90.0, trained=80.0, initial=84.1, untrained=41.0)
    numbers["trained"] |= {"top5": 99.0}
    numbers["untrained"] |= {"top5": 50.0}
    pairs = {"initial": {"top1": [-6.0, -2.2]}}
    monkeypatch.setattr(console, "width", 100)
    print_results([Result("linear", {}, data, "c", 0, numbers, 1.0, differences=pairs)])
    lines = [re.split("[│┃]", line)[1:-1] for line in capsys.readouterr().out.splitlines() if line[:1] in "│┃"]
    head, top1, top5 = ([cell.strip() for cell in line] for line in lines if line)
    assert head == ["protocol", "trained", "initial", "untrained", "over initial", "b"]
    assert top1 == ["linear top1 (%) ↑", "80.0", "84.1", "41.0", "-4.1 [-6.0, -2.2]", "90.0"]
    assert top5 == ["linear top5 (%) ↑", "99.0", "", "50.0", "", ""]  # not over anything else


# ---------------------------------------------------------------------------------------------------- detection


def test_detectors_are_trained_on_every_column(here, monkeypatch):
    """The training itself is that of every backbone: here only which, and where it is kept."""
    made = []

    def noted(job, backbone):
        made.append((job.folder.name, backbone))
        return {"box_ap": float(len(made))}

    monkeypatch.setattr(detection, "train", noted)
    run = write_run(here / "run", "x.npz", initial=True)
    subject = open_subject(run.folder)
    others = open_others(run.folder, ["b.safetensors"], subject)
    pictures = SimpleNamespace(rule="voc", classes=("c",), __len__=lambda: 1, fingerprint=lambda: "digest")
    splits = SimpleNamespace(train=pictures, test=pictures, how="given")
    monkeypatch.setattr(detection, "len", lambda pictures: 1, raising=False)
    context = detection.PictureContext(subject, splits, "voc", others=others)
    result = detection.compare(context, DetectionConfig(), masks=False)
    assert result.numbers == {n: {"box_ap": i + 1.0} for i, n in enumerate(["trained", "initial", "untrained", "b"])}
    places = [name for name, _ in made]
    assert (places[0], places[2]) == ("trained", "untrained")
    assert all(place.startswith(f"{name}-") for place, name in ((places[1], "initial"), (places[3], "b")))
    assert made[3][1] is others["b"].backbone
    assert list(result.data["against"]) == ["initial", "b"]


# ---------------------------------------------------------------------------------------------------- reports


def test_the_report_names_the_columns(here):
    run = write_run(here / "run", "x.npz", initial=True)
    evaluate(run.folder, "knn", against=[Path("b.safetensors")])
    text = str(one_run.evaluations(read_record(run.folder)).content)
    assert "initial: the weights that it started from" in text
    assert "b: b.safetensors." in text
    assert ">initial<" in text and ">b<" in text


def test_a_backbone_that_is_replaced_while_it_is_opened_has_its_own_digest(tmp_path, monkeypatch):
    """`evaluate` beside `pretrain --resume`: a result must not be taken for that of other weights."""
    file, config = tmp_path / "backbone.safetensors", BackboneConfig(name="tico/resnet10-w4")

    def trained() -> None:
        save_backbone(build_backbone(config, 16, (0.5,) * 3, (0.2,) * 3), file)

    def opened(place):
        backbone = load_backbone(place)
        if not replaced:
            replaced.append(trained())
        return backbone

    trained()
    replaced: list = []
    monkeypatch.setattr(subjects, "load_backbone", opened)
    subject = open_subject(file, DataConfig(source="textures"))
    assert subject.checkpoint == digest(file)
    assert weights_digest(subject.backbone) == weights_digest(load_backbone(file))
