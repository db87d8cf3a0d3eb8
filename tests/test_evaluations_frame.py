"""The frame around protocols: features kept on disk, models by name, `all`, few-shot, and the probe between epochs."""

import json
import multiprocessing
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from torchvision.models import resnet18
from typer.testing import CliRunner

from tico_ssl import evaluate, pretrain
from tico_ssl.cli import app
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.sources import open_source
from tico_ssl.evaluations import few_shot
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._evaluate import evaluate_all, overrides_by_protocol
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.extraction import extract_all
from tico_ssl.features.frozen import Features
from tico_ssl.features.lazy import weights_digest
from tico_ssl.features.subjects import import_model
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import load_backbone, save_backbone
from tico_ssl.pipeline.packing import pack
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator

CPU = torch.device("cpu")
SHORT = {"linear-augmented", "semi-supervised", "fine-tune"}  # protocols that train, made short by the next line
QUICK = {"epochs": 1, "least_steps": 0, "batch_size": 8, "precision": "fp32"}


def small_backbone(seed=0):
    torch.manual_seed(seed)
    return build_backbone(BackboneConfig(name="tico/resnet10-w2", zero_gamma=False), 8)


def noise(count, seed=0, side=8):
    values = torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(seed))
    return values.to(torch.uint8)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with a backbone file and labelled images."""
    monkeypatch.chdir(tmp_path)
    save_backbone(small_backbone(), tmp_path / "b.safetensors")
    arrays = {"x_train": noise(48), "y_train": np.arange(48) % 4, "x_test": noise(20, 1), "y_test": np.arange(20) % 4}
    np.savez(tmp_path / "x.npz", **{name: np.asarray(value) for name, value in arrays.items()})
    return tmp_path


@pytest.fixture
def extractions(monkeypatch):
    """What goes through a network, by the number of images."""
    from tico_ssl.features import cache as module

    made = []
    monkeypatch.setattr(
        module,
        "extract_all",
        lambda networks, source, *a, **k: made.append(len(source)) or extract_all(networks, source, *a, **k),
    )
    return made


# ---------------------------------------------------------------------------------------------------- features on disk


def test_a_second_protocol_and_a_second_command_do_not_extract_again(here, extractions):
    short = {"iterations": 3}
    first = evaluate("b.safetensors", "linear", "x.npz", short)
    assert extractions == [48, 20]  # trained and untrained at once
    evaluate("b.safetensors", "few-shot", "x.npz", short)
    again = evaluate("b.safetensors", "linear", "x.npz", short)
    assert len(extractions) == 2
    assert again.numbers == first.numbers
    evaluate("b.safetensors", "linear", "x.npz", short, cache=False)
    assert len(extractions) == 4


def test_what_is_read_is_what_was_made_and_damage_is_made_good(here, extractions):
    cache, source = FeatureCache(here / "features"), from_arrays("noise", noise(30), None)
    made = cache.extract(small_backbone(), source, CPU)
    (file,) = (here / "features").iterdir()
    for damage in (
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"",
        lambda data: b"nonsense",
    ):
        kept = cache.extract(small_backbone(), source, CPU)
        assert torch.equal(kept.features, made.features)
        assert torch.equal(kept.places, made.places)
        before = len(extractions)
        file.write_bytes(damage(file.read_bytes()))
        assert torch.equal(cache.extract(small_backbone(), source, CPU).features, made.features)
        assert len(extractions) == before + 1
    assert [path.name for path in (here / "features").iterdir()] == [file.name]


def test_other_weights_other_images_and_other_cuts_are_other_features(here, extractions):
    cache, images = FeatureCache(here / "features"), noise(12, side=10)
    changed = small_backbone()
    changed.network.bn1.running_mean[0] += 1e-6
    for backbone in (small_backbone(), small_backbone(1), changed):
        cache.extract(backbone, from_arrays("noise", images, None), CPU)
    other = images.clone()
    other[5, 1, 2, 3] ^= 1
    cache.extract(small_backbone(), from_arrays("noise", other, None), CPU)
    cache.extract(small_backbone(), from_arrays("noise", images[:11], None), CPU)
    cache.extract(small_backbone(), from_arrays("noise", images, None), CPU, whole=True)
    in_full = FeatureCache(here / "features", reduced_decoding=False)
    in_full.extract(small_backbone(), from_arrays("noise", images, None), CPU)
    assert len(list((here / "features").iterdir())) == len(extractions) == 7


def test_raw_pixels_are_compared_only_if_all_images_have_one_size(here):
    assert "pixels" in evaluate("b.safetensors", "knn", "x.npz").numbers
    arrays = dict(np.load("x.npz"))
    np.savez("x.npz", **arrays | {"x_test": noise(20, 1, side=10).numpy()})
    assert evaluate("b.safetensors", "knn", "x.npz").numbers.keys() == {"trained", "untrained"}


def test_bf16_leaves_alone_what_prepares_images_otherwise(here):
    short = {"linear-augmented": QUICK | {"lrs": [0.1]}, "corruptions": {"kinds": ["contrast"], "iterations": 5}}
    for protocol, settings in short.items():
        exact, rough = (evaluate("b.safetensors", protocol, "x.npz", settings, bf16=bf16) for bf16 in (False, True))
        assert exact.numbers == rough.numbers, protocol


def test_only_frozen_features_are_in_bf16(here):
    context = open_context("b.safetensors", "x.npz", bf16=True)
    rough, exact = context.features("trained"), context.features("trained", exact=True)
    assert torch.equal(exact.train, open_context("b.safetensors", "x.npz").features("trained").train)
    assert not torch.equal(rough.train, exact.train)
    assert context.exact_cache.dtype == torch.float32


def test_files_are_known_by_name_size_and_time(folder_of_images):
    def known():
        return open_source(DataConfig(source=str(folder_of_images))).fingerprint()

    first = known()
    assert known() == first
    file = next(folder_of_images.rglob("1.png"))
    os.utime(file, (1, 1))
    touched = known()
    file.rename(file.with_name("1b.png"))
    renamed = known()
    file.with_name("1b.png").unlink()
    assert len({first, touched, renamed, known()}) == 4


def test_images_in_archives_are_known_by_the_file_and_their_place(tmp_path):
    source = from_arrays("noise", noise(20), None)
    pack(source, tmp_path / "a.tico", 8)
    place = str(tmp_path / "a.tico")
    opened = open_source(DataConfig(source=place))
    whole = opened.fingerprint()
    half = opened.subset(torch.arange(10)).fingerprint()
    other = opened.subset(torch.arange(10, 20)).fingerprint()
    assert len({whole, half, other}) == 3
    os.utime(place, (1, 1))
    assert opened.fingerprint() != whole
    assert replace(opened, identity=None).fingerprint() is None  # no identity: never cached


def test_a_folder_that_cannot_be_written_costs_time_and_not_the_result(here, capsys):
    (here / "b").write_text("a file where the folder would be")
    result = evaluate("b.safetensors", "knn", "x.npz")
    assert result.numbers["trained"]
    assert "was not saved" in capsys.readouterr().out


def test_the_digest_of_weights_is_that_of_every_bit():
    one, other = small_backbone(), small_backbone()
    assert weights_digest(one) == weights_digest(other)
    assert weights_digest(one.to(memory_format=torch.channels_last)) == weights_digest(other)
    other.network.bn1.num_batches_tracked += 1
    assert weights_digest(one) != weights_digest(other)


# ---------------------------------------------------------------------------------------------------- models by name


def test_a_model_by_name_is_an_untrained_one(here):
    result = evaluate("tico/resnet10-w2", "linear", "x.npz", {"iterations": 3})
    assert result.numbers.keys() == {"untrained", "pixels"}
    assert result.checkpoint == "untrained"
    assert (here / "runs" / "models" / "tico-resnet10-w2-untrained" / "results.jsonl").is_file()
    text = CliRunner().invoke(app, ["evaluate", "tico/resnet10-w2", "knn", "--data", "x.npz"]).output
    assert "untrained" in text
    assert "Pretraining" not in text
    assert "difference" not in text


@pytest.mark.parametrize("form", ["plain.pth", "prefixed.pth", "file.safetensors"])
def test_a_model_with_weights_from_elsewhere(here, form, capsys):
    """torchvision's own ResNet-18, whose stem is not that for small images, gives the same features here."""
    torch.manual_seed(3)
    theirs = resnet18().eval()
    state = theirs.state_dict()
    if form == "prefixed.pth":
        state = {"epoch": 3, "state_dict": {f"module.encoder_q.{name}": value for name, value in state.items()}}
    (save_file if form.endswith("safetensors") else torch.save)(state, here / form)
    path = import_model("torchvision/resnet18", here / form, "x.npz")
    assert "ignored   fc.* (2 tensors)" in capsys.readouterr().out
    assert list(path.parent.iterdir()) == [path]
    theirs.fc = torch.nn.Identity()
    backbone = load_backbone(path)
    assert backbone.image_size == 8
    images = backbone.preprocess(noise(4))
    with torch.no_grad():
        assert torch.equal(backbone(images), theirs(images))


def test_processes_that_bring_the_same_weights_do_not_disturb_each_other(here):
    torch.save(small_backbone().network.state_dict(), here / "w.pth")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.starmap(import_model, [("tico/resnet10-w2", here / "w.pth", str(here / "x.npz"))] * 8, chunksize=1)
    assert len(set(paths)) == 1
    assert load_backbone(paths[0]).width == small_backbone().width


def test_weights_on_the_command_line(here):
    torch.save(small_backbone().network.state_dict(), here / "w.pth")
    words = ["evaluate", "tico/resnet10-w2", "knn", "--data", "x.npz", "--weights", "w.pth"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    (path,) = (here / "runs" / "models").glob("*.safetensors")
    assert f"load_backbone('{path.relative_to(here)}')" in result.output
    (line,) = (path.with_suffix("") / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["numbers"].keys() == {"trained", "untrained", "pixels"}


def test_weights_that_do_not_fit(here):
    def error_of(state, model="tico/resnet10-w2", name="w.pth"):
        torch.save(state, here / name)
        with pytest.raises(UserError) as caught:
            import_model(model, here / name, "x.npz")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    state = small_backbone().network.state_dict()
    assert "'conv1.weight' is 2x3x3x3, and tico/resnet10-w4 for 8 pixels has 4x" in error_of(state, "tico/resnet10-w4")
    assert "has no 'bn1.weight'" in error_of({k: v for k, v in state.items() if k != "bn1.weight"})
    assert "contains no named tensors" in error_of({"epoch": 3})
    assert "contains no named tensors" in error_of([1, 2])
    (here / "junk.pth").write_bytes(b"junk")
    with pytest.raises(UserError, match="not a weights file that is safe to load"):
        import_model("tico/resnet10-w2", here / "junk.pth", "x.npz")
    with pytest.raises(UserError, match="no such file"):
        import_model("tico/resnet10-w2", here / "absent.pth", "x.npz")
    with pytest.raises(UserError, match="weights= goes with the name of a model"):
        import_model("b.safetensors", here / "w.pth", "x.npz")
    with pytest.raises(UserError, match="say which images with data="):
        evaluate("torchvision/resnet18", "knn")
    with pytest.raises(UserError, match="did you mean 'resnet18'"):
        evaluate("torchvision/resnet8", "knn", "x.npz")


# ---------------------------------------------------------------------------------------------------- all


def left_out(text):
    return {line.split(":")[0].removeprefix("left out ") for line in text.splitlines() if line.startswith("left out ")}


def all_of(data, *words):
    words = [*words, *(f"{protocol}.{key}={value}" for protocol in SHORT for key, value in QUICK.items())]
    words += ["svm.costs=[1.0]", "few-shot.draws=2", "shares=[0.2]", "linear.iterations=3"]
    result = CliRunner().invoke(app, ["evaluate", "b.safetensors", "all", "--data", data, *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_all_on_labelled_images_says_what_was_left_out(here):
    text = all_of("x.npz")
    assert {"detection", "segmentation", "places205", "inaturalist2018"} <= left_out(text)
    made = {json.loads(line)["protocol"] for line in (here / "b" / "results.jsonl").read_text().splitlines()}
    assert {"knn", "linear", "rankme", "few-shot", "svm"} | SHORT <= made
    assert not made & left_out(text)
    assert "few-shot top1_10shot" in text
    assert re.search(r"\d+\.\d ± \d+\.\d", text)


def test_all_on_images_without_labels(here):
    for number, image in enumerate(noise(12)):
        (here / "flat").mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(here / "flat" / f"{number}.png")
    text = all_of("flat")
    assert {"knn", "linear", "few-shot", "svm", "detection"} | SHORT <= left_out(text)
    assert "left out fine-tune: fine-tune needs labels: class folders, or a data set with labels" in text
    assert "rankme (↑)" in text


def test_all_on_nothing_at_all_is_one_line(here):
    (here / "empty").mkdir()
    with pytest.raises(UserError, match=r"^empty: no protocol supports these data$"):
        evaluate_all("b.safetensors", ["all"], "empty")


def test_settings_for_one_protocol_and_for_those_that_have_them():
    given = overrides_by_protocol(["few-shot", "svm", "knn"], {"few-shot.draws": 2, "seed": 7, "iterations": 5})
    assert given == {"few-shot": {"draws": 2, "seed": 7, "iterations": 5}, "svm": {"iterations": 5}, "knn": {}}
    with pytest.raises(UserError, match=r"evaluation few-shot: unknown key 'drawz'; did you mean 'draws'\?"):
        evaluate("nowhere", "few-shot", overrides={"drawz": 3})


# ---------------------------------------------------------------------------------------------------- few-shot


def test_few_shot_is_logistic_regression_on_unit_features():
    random = torch.Generator().manual_seed(0)
    labels, truths = torch.arange(40) % 4, torch.arange(60) % 4
    centres = torch.randn(4, 6, generator=random)
    train, test = (centres[y] + torch.randn(len(y), 6, generator=random) for y in (labels, truths))
    config = few_shot.Config(draws=3, iterations=500)
    found = few_shot.few_shot_accuracy(Features(train, test, labels, truths), [5], config, CPU)
    order = torch.randperm(40, generator=generator(0, "probe", 1))
    accuracies = []
    for draw in range(3):
        places = []
        for label in range(4):
            members = order[labels[order] == label]
            places += [int(members[(5 * draw + i) % len(members)]) for i in range(5)]
        unit = [x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True) for x in (train, test)]
        reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(unit[0][places], labels[places].numpy())
        accuracies.append(100 * (reference.predict(unit[1]) == truths.numpy()).mean())
    assert found == {
        "top1_5shot": pytest.approx(np.mean(accuracies), abs=1e-3),
        "top1_5shot_std": pytest.approx(np.std(accuracies, ddof=1), abs=1e-3),
    }


def test_few_shot_leaves_out_what_a_class_does_not_have(here, capsys):
    result = evaluate("b.safetensors", "few-shot", "x.npz", {"shots": [1, 12, 13], "draws": 2})
    assert "few-shot leaves out 13 images per class: one class has only 12" in capsys.readouterr().out
    assert result.numbers["trained"].keys() == {f"top1_{n}shot{end}" for n in (1, 12) for end in ("", "_std")}
    with pytest.raises(UserError, match=r"^few-shot needs 50 images per class, one has 12: lower shots$"):
        evaluate("b.safetensors", "few-shot", "x.npz", {"shots": [50]})


# ---------------------------------------------------------------------------------------------------- between epochs


def test_a_linear_probe_between_epochs_does_not_touch_training(tiny, tmp_path):
    runs = {}
    for probe in (False, True):
        settings = tiny | {"training.knn_every_epochs": 1, "training.linear_probe": probe}
        runs[probe] = pretrain("demo", out=tmp_path / str(probe), overrides=settings)
    states = [torch.load(run.checkpoint_file, weights_only=True)["method"] for run in runs.values()]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    lines = [line for line in open_run(runs[True].folder).metrics() if "knn_top1_k20" in line]
    assert len(lines) == 3
    assert all(0 <= line["linear_top1"] <= line["linear_top5"] <= 100 for line in lines)
    assert not any("linear_top1" in line for line in runs[False].metrics())


def test_of_images_that_nothing_identifies_nothing_is_kept(here):
    made = []
    for identified in (True, True, False, False):
        context = open_context("b.safetensors", "x.npz", cache=True)
        if not identified:
            context.train = replace(context.train, identity=None)
        context.part(few_shot.Config(), "name", lambda place: made.append(place is not None) or {"one": 1.0})
    assert made == [True, False, False]  # the second was found finished; the last two were made each time


def test_a_second_command_does_not_touch_the_state_of_a_long_protocol(here):
    first, second = (open_context("b.safetensors", "x.npz", cache=True) for _ in range(2))

    def meanwhile(place):
        with pytest.raises(UserError, match=r"another command evaluates .*: wait for its end \(process"):
            second.part(few_shot.Config(), "name", lambda place: {"one": 2.0})
        return {"one": 1.0}

    assert first.part(few_shot.Config(), "name", meanwhile) == {"one": 1.0}
    assert second.part(few_shot.Config(), "name", meanwhile) == {"one": 1.0}  # found finished


def test_context_without_a_home_keeps_nothing(here):
    context = open_context("b.safetensors", "x.npz")
    context.features("trained")
    assert context.part(few_shot.Config(), "name", lambda place: {"here": float(place is None)}) == {"here": 1.0}
    assert not (here / "b").exists()
