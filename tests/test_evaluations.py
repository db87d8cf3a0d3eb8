"""Protocols against brute force, scikit-learn and closed forms; and the comparison with an untrained twin."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.linear_model import LogisticRegression

from tico_ssl import embed, evaluate, load_backbone, pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import decode
from tico_ssl.data.formats.packed import open_packed
from tico_ssl.data.source import spread_evenly
from tico_ssl.data.sources import open_source
from tico_ssl.evaluations import few_shot
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations.few_shot import few_shot_accuracy
from tico_ssl.evaluations.rankme import rankme
from tico_ssl.features import regression
from tico_ssl.features.extraction import extract, needed_side, pixels
from tico_ssl.features.frozen import Features
from tico_ssl.features.knn import knn_predictions
from tico_ssl.features.linear import fit_probe, number_held_out, probe
from tico_ssl.features.regression import fit_linear, fit_linears, minimise
from tico_ssl.features.settings import LinearConfig, Voters
from tico_ssl.features.splits import splits
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.pipeline.packing import pack
from tico_ssl.report import report
from tico_ssl.report.names import elsewhere
from tico_ssl.results.reading import read_record
from tico_ssl.results.record import SEEN, same_source, split_in_words
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.errors import UserError
from tico_ssl.training import online_knn


def clusters(count, classes=4, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, classes, (count,), generator=generator)
    return centres[labels] + 0.8 * torch.randn(count, width, generator=generator), labels


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (5, 0.1), (20, 0.07), (200, 0.1)])
def test_knn_equals_brute_force(k, temperature):
    train, labels = clusters(150)
    queries, _ = clusters(40, seed=1)
    (predicted,) = knn_predictions(train, labels, queries, [Voters(k=k, temperature=temperature)], chunk=7)
    for query, found in zip(queries.double().numpy(), predicted.tolist()):
        features = train.double().numpy()
        cosines = features @ query / np.linalg.norm(features, axis=1) / np.linalg.norm(query)
        votes = np.zeros(4)
        for place in np.argsort(-cosines)[:k]:
            votes[labels[place]] += math.exp(cosines[place] / temperature)
        assert found == votes.argmax()


def test_knn_finds_itself():
    train, labels = clusters(100)
    (predicted,) = knn_predictions(train, labels, train, [Voters(k=1, temperature=0.07)])
    assert torch.equal(predicted, labels)


@pytest.mark.parametrize("weight_decay", [1e-3, 1e-1])
def test_the_linear_probe_is_multinomial_logistic_regression(weight_decay):
    features, labels = clusters(400)
    queries, _ = clusters(100, seed=1)
    ours = fit_linear(features.double().float(), labels, weight_decay, iterations=500)
    reference = LogisticRegression(C=1 / (weight_decay * len(features)), tol=1e-10, max_iter=5000)
    reference.fit(features.double().numpy(), labels.numpy())
    expected = torch.from_numpy(reference.predict_proba(queries.double().numpy())).float()
    assert torch.allclose(ours(queries).softmax(dim=1), expected, atol=2e-3)


@settings(max_examples=15, deadline=None)
@given(images=st.integers(3, 60), width=st.integers(1, 12), classes=st.integers(2, 6), seed=st.integers(0, 2**31))
def test_every_regression_ends_where_its_gradient_is_zero(images, width, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, width, generator=generator, dtype=torch.float64) * 10 ** (width % 3 - 1)
    labels = torch.randint(classes, (images,), generator=generator)
    decays = (1e-3, 1e-1, 10.0)
    for decay, linear in zip(decays, fit_linears(features, labels, decays, iterations=1000, classes=classes)):
        linear.requires_grad_(True)
        loss = torch.nn.functional.cross_entropy(linear(features), labels) + decay / 2 * linear.weight.square().sum()
        loss.backward()
        # No place is lower by more than gradient^2 / (2 decay), as far as the weights go.
        assert linear.weight.grad.square().sum() / (2 * decay) < 1e-9
        assert linear.bias.grad.abs().max() < 1e-6


def test_regressions_made_at_once_are_those_made_alone():
    features, labels = clusters(300)
    decays = torch.tensor((1e-4, 1e-2, 1.0), dtype=torch.float64)
    together = minimise(features.double(), labels, decays, iterations=300, classes=4)
    for one, weights in zip(decays, together):
        alone = minimise(features.double(), labels, one.view(1), iterations=300, classes=4)
        assert torch.allclose(weights, alone[0], atol=1e-6)


def test_numbers_of_classes_may_have_gaps(monkeypatch):
    train, labels = clusters(60)
    test, asked = clusters(30, seed=1)
    asked[:3] = 4  # a class without training images
    rows = []
    monkeypatch.setattr(regression, "minimise", lambda *a: rows.append(a[-1]) or minimise(*a))
    cpu, wide = torch.device("cpu"), torch.tensor([2, 7, 5_000, 90_000, 8])
    few = few_shot.Config(draws=2)
    for measure in (lambda f: probe(f, LinearConfig(), cpu), lambda f: few_shot_accuracy(f, [1, 5], few, cpu)):
        plain = measure(Features(train, test, labels, asked))
        assert measure(Features(train, test, wide[labels], wide[asked])) == plain
    assert set(rows) == {4}


def test_a_regression_without_anything_to_learn_stays_at_zero():
    linear = fit_linear(torch.zeros(10, 3), torch.arange(10) % 2, 1e-3, iterations=50)
    assert torch.equal(linear.weight, torch.zeros(2, 3))
    assert linear.bias.abs().max() < 1e-6


@pytest.mark.parametrize("images", [2, 3, 40])
def test_an_image_is_left_to_train_on_however_many_are_held_out(images):
    features = torch.randn(images, 5, generator=torch.Generator().manual_seed(0))
    config = LinearConfig(held_out=0.999)
    assert number_held_out(images, config) == images - 1
    assert fit_probe(features, torch.arange(images) % 2, config).weight_decay in config.weight_decays


def test_features_that_are_not_finite_are_no_features():
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16)
    backbone.network.bn1.weight.data[0] = math.nan
    source = from_arrays("black", torch.zeros(3, 3, 16, 16, dtype=torch.uint8), None)
    with pytest.raises(UserError, match="non-finite features for 3 of 3 images: its weights are damaged"):
        extract(backbone, source, torch.device("cpu"))


def test_rankme_at_known_spectra():
    assert rankme(torch.ones(50, 8)) == pytest.approx(1, abs=1e-4)
    assert rankme(torch.eye(8).repeat(5, 1)) == pytest.approx(8, rel=1e-4)
    q, _ = torch.linalg.qr(torch.randn(30, 3, dtype=torch.float64))
    shares = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert rankme(q * shares) == pytest.approx(2**1.5, rel=1e-4)  # entropy 1.5 bits


def test_results_stand_beside_untrained_and_pixels_and_say_everything(run):
    result = evaluate(run.folder, "knn")
    assert result.numbers.keys() == {"trained", "untrained", "pixels"}
    assert all(0 <= value <= 100 for numbers in result.numbers.values() for value in numbers.values())
    line = open_run(run.folder).results()[-1]
    assert line["protocol"] == "knn"
    assert line["settings"]["voters"] == [{"k": 20, "temperature": 0.07}, {"k": 200, "temperature": 0.1}]
    assert line["data"] == {"source": "textures", "train": 300, "test": 2000, "split": "the data's own"}
    assert len(line["checkpoint"]) == 16
    assert line["seed"] == 0
    json.dumps(line)


def test_overrides_of_a_protocol_and_their_errors(run):
    result = evaluate(run.folder, "knn", overrides={"voters": [{"k": 3, "temperature": 0.5}]})
    assert list(result.numbers["trained"]) == ["top1_k3"]
    with pytest.raises(UserError, match=r"evaluation linear: unknown key 'iteration'; did you mean 'iterations'\?"):
        evaluate(run.folder, "linear", overrides={"iteration": 3})


@pytest.mark.parametrize("protocol", ["all", ["knn"], ("knn", "linear")])
def test_one_call_is_one_protocol(run, protocol):
    with pytest.raises(UserError, match="evaluate computes one protocol: call it for each, or give `tico evaluate RUN"):
        evaluate(run.folder, protocol)


def test_linear_and_rankme_run_on_a_run(run):
    linear, rank = evaluate(run.folder, "linear"), evaluate(run.folder, "rankme")
    assert linear.numbers["trained"]["top5"] >= linear.numbers["trained"]["top1"]
    assert 1 <= rank.numbers["trained"]["rankme"] <= rank.numbers["trained"]["width"] == 32


def test_evaluation_leaves_the_backbone_as_it_was(run):
    before = run.backbone_file.read_bytes()
    context = open_context(run.folder)
    state = {name: value.clone() for name, value in context.backbones["trained"].state_dict().items()}
    context.features("trained")
    assert all(torch.equal(value, state[name]) for name, value in context.backbones["trained"].state_dict().items())
    assert run.backbone_file.read_bytes() == before


def test_the_untrained_twin_is_fair(run):
    """Same shape, other weights, BatchNorm calibrated on the data, the same every time."""
    one, other = (open_context(run.folder).backbones for _ in range(2))
    twin = one["untrained"].state_dict()
    assert twin.keys() == one["trained"].state_dict().keys()
    assert all(torch.equal(value, other["untrained"].state_dict()[name]) for name, value in twin.items())
    assert not torch.equal(twin["network.bn1.running_mean"], torch.zeros_like(twin["network.bn1.running_mean"]))
    assert (twin["network.layer1.0.bn2.weight"] == 1).all()


def test_data_without_a_test_split_are_split_within_classes(run, folder_of_images):
    train, test, how, _ = splits(open_source(DataConfig(source=str(folder_of_images))), None, seed=0)
    assert (len(train), len(test)) == (10, 2)
    assert test.labels.tolist() == [0, 1]
    assert "held out" in how
    names = {source.names(i) for source in (train, test) for i in range(len(source))}
    assert len(names) == 12
    result = evaluate(run.folder, "knn", data=str(folder_of_images))
    assert "pixels" not in result.numbers  # images of many sizes


def test_only_images_that_pretraining_has_seen_are_said_to_be(run, tiny, folder_of_images, tmp_path):
    """Of held-out images of the run's own data, wherever the command is given; other images are new to it."""
    own = pretrain("demo", str(folder_of_images), tmp_path / "own", tiny | {"training.batch_size": 4})
    for place, seen in [(None, True), (f"{folder_of_images}/", True), (folder_of_images / "cats", None)]:
        context = open_context(own.folder, place)
        assert context.data.get(SEEN) is seen
        assert ("seen without labels" in split_in_words(context.data)) is bool(seen)
    assert SEEN not in open_context(run.folder, str(folder_of_images)).data
    assert SEEN not in open_context(own.backbone_file, str(folder_of_images)).data  # a file knows no data
    assert SEEN not in open_context(run.folder).data  # they have a test split, which pretraining leaves out


def test_a_run_finds_its_images_from_any_folder_and_takes_no_others_of_their_name(
    tiny, folder_of_images, tmp_path, monkeypatch
):
    there, here = tmp_path / "there", tmp_path / "here"
    shutil.copytree(folder_of_images, there / "odd")
    monkeypatch.chdir(there)
    own = pretrain("demo", "odd", "run", tiny | {"training.batch_size": 4}).folder.absolute()
    (there / "odd" / "cats" / "1.png").unlink()  # where a run began, its images may be looked after
    found = evaluate(own, "rankme").data
    assert (found["source"], found.get(SEEN), found["train"] + found["test"]) == ("odd", True, 11)

    shutil.copytree(folder_of_images / "cats", here / "odd")
    monkeypatch.chdir(here)
    assert evaluate(own, "rankme").data == found | {"source": str(there / "odd")}
    assert SEEN not in (others := evaluate(own, "rankme", data="odd")).data
    assert others.data["source"] == str(here / "odd")
    report(own, points=5)
    record = read_record(own)
    assert [elsewhere(record, line) for line in record.results] == ["", "", f", on {here / 'odd'}"]

    (there / "odd").rename(there / "elsewhere")
    for use in (evaluate, lambda run, protocol: embed(run, out=tmp_path / "features.npz")):
        with pytest.raises(UserError, match="was trained on other images than 'odd' here; say where they are with dat"):
            use(own, "rankme")
    assert SEEN not in evaluate(own, "rankme", data="odd").data
    shutil.rmtree(here / "odd")
    with pytest.raises(UserError, match="was trained on 'odd', which is not here: say where it is with data="):
        evaluate(own, "rankme")
    shutil.copytree(folder_of_images, here / "odd")  # moved together
    assert evaluate(own, "rankme").data.get(SEEN) is True


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("photos", "photos/", True),
        ("photos", "./photos", True),
        (["a/", "b"], "a + b", True),
        (["a", "b"], ["b", "a"], False),
        (["a", "b"], "a", False),
        ("s3://bucket/a", "s3://bucket/a", True),
        ("textures", "cifar10", False),
    ],
)
def test_data_are_the_same_however_they_are_written(one, other, same):
    assert same_source(one, other) is same_source(other, one) is same


def test_labels_that_are_not_there_are_asked_for(run, folder_of_images, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(folder_of_images.rglob("*.png"))):
        path.rename(flat / f"{number}.png")
    with pytest.raises(UserError, match="knn needs labels"):
        evaluate(run.folder, "knn", data=str(flat))
    assert evaluate(run.folder, "rankme", data=str(flat)).numbers["trained"]["rankme"] >= 1


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv", ".parquet", ".pt"])
def test_embed_writes_features_with_names(run, folder_of_images, tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    out = embed(run.folder, data=str(folder_of_images), out=tmp_path / f"features{suffix}")
    if suffix == ".npz":
        with np.load(out) as archive:
            names, labels, features = archive["names"].tolist(), archive["labels"], archive["features"]
    elif suffix in (".csv", ".npy"):
        table = out.with_name("features.npy.csv") if suffix == ".npy" else out
        header, *rows = [line.split(",") for line in table.read_text().splitlines()]
        assert header[:5] == ["path", "split", "label", "class", "feature_0"][: 5 if suffix == ".csv" else 4]
        assert rows[0][1:4] == ["train", "0", "cats"]
        names, labels = [row[0] for row in rows], [int(row[2]) for row in rows]
        features = np.load(out) if suffix == ".npy" else np.array([[float(value) for value in row[4:]] for row in rows])
    elif suffix == ".pt":
        table = torch.load(out, weights_only=True)
        names, labels, features = table["paths"], table["labels"].tolist(), table["features"].numpy()
    else:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(out).to_pydict()
        assert [*table] == ["path", "split", "label", "class", "features"]
        names, labels, features = table["path"], table["label"], np.array(table["features"])
    assert names[0] == "cats/1.png"
    assert list(labels) == [0] * 6 + [1] * 6
    backbone = load_backbone(run.folder)
    expected = backbone(backbone.preprocess([decode(folder_of_images / names[3])]))
    assert np.allclose(features[3], expected.detach().numpy(), atol=1e-5)


def test_large_photographs_are_embedded_as_preprocess_has_them(run, tmp_path):
    """Decoded in full, where evaluations make do with a fraction."""
    assert needed_side(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 224)) == 256
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    for number in range(2):
        Image.fromarray(noise).resize((160, 120)).save(tmp_path / f"{number}.jpg")
    out = embed(run.folder, data=str(tmp_path), out=tmp_path / "features.npz")
    backbone = load_backbone(run.folder)
    assert decode(tmp_path / "0.jpg", shorter=19).shape == (3, 30, 40)  # of which 16 are seen
    with np.load(out) as archive:
        expected, reduced = (
            backbone(backbone.preprocess([image])).detach().numpy()
            for image in (tmp_path / "0.jpg", decode(tmp_path / "0.jpg", shorter=19))
        )
        assert np.allclose(archive["features"][0], expected, atol=1e-5)
        assert not np.allclose(archive["features"][0], reduced, atol=1e-5)


def test_a_part_of_a_packed_file_gives_its_own_features(tmp_path):
    """Its tensor is that of the whole file, of which only some rows count."""
    images = torch.randint(0, 256, (600, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pack(from_arrays("random", images, None), tmp_path / "r.tico", 16)
    places = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:300]
    part, copied = open_packed(tmp_path / "r.tico").subset(places), from_arrays("copy", images[places], None)
    assert torch.equal(pixels(part), pixels(copied))
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16)
    found, expected = (extract(backbone, source, torch.device("cpu")) for source in (part, copied))
    assert found.places.tolist() == list(range(300))
    assert torch.equal(found.features, expected.features)


# ---------------------------------------------------------------------------------------------------- several labels


@pytest.fixture
def several_labels(tmp_path):
    """Twenty images with three labels each: there, not there, hard to say."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    labels = generator.integers(-1, 2, (20, 3))
    np.savez(tmp_path / "several.npz", images=images, labels=labels, classes=np.array(["cat", "dog", "owl"]))
    return str(tmp_path / "several.npz"), labels


def test_images_of_several_classes_are_held_out_from_the_whole(several_labels):
    place, labels = several_labels
    train, test, how, _ = splits(open_source(DataConfig(source=place)), None, seed=0)
    assert (len(train), len(test)) == (16, 4)
    assert "held out" in how
    assert sorted(train.labels.tolist() + test.labels.tolist()) == sorted(labels.tolist())


@pytest.mark.parametrize("decays", [(1e-3,), (1e-4, 1e-3)])
def test_a_linear_probe_needs_two_training_images(decays):
    def found(images, **settings):
        train, labels = torch.eye(3, 8)[:images], torch.arange(3)[:images]
        config = LinearConfig(weight_decays=decays, **settings)
        return probe(Features(train, torch.eye(3, 8), labels, torch.arange(3)), config, torch.device("cpu"))

    for images in (0, 1):
        with pytest.raises(UserError, match=rf"^a linear classifier needs two training images or more, not {images}$"):
            found(images)
    assert found(2)["top1"] > 0
    assert found(3, held_out=0.9)["top1"] > 0  # of three images, two are held out to choose by, not all


def test_a_class_of_one_image_is_not_tested():
    """There would be nothing to recognise it by."""
    labels = torch.tensor([0] * 20 + [1] * 20 + list(range(2, 32)))
    source = from_arrays("x", torch.arange(70, dtype=torch.uint8).view(70, 1, 1, 1), labels)
    train, test, *_ = splits(source, None, seed=0)
    assert (len(train), len(test)) == (62, 8)
    assert test.labels.bincount().tolist() == [4, 4]
    with pytest.raises(UserError, match=r"^x: too few images to hold some out for a test$"):
        splits(source.subset(torch.arange(40, 70)), None, seed=0)


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_protocols_of_one_class_an_image_say_so(run, several_labels, protocol):
    with pytest.raises(UserError, match=f"^{protocol} needs one class per image; these images have several$"):
        evaluate(run.folder, protocol, data=several_labels[0])


def test_several_labels_are_there_for_who_can_use_them(run, several_labels):
    context = open_context(run.folder, several_labels[0])
    train, test = context.features("trained").raw_labels("svm")
    assert train.shape == (16, 3)
    assert test.shape == (4, 3)
    assert set(train.unique().tolist()) == {-1, 0, 1}
    with pytest.raises(UserError, match="svm needs labels"):
        Features(torch.zeros(2, 3), torch.zeros(2, 3)).raw_labels("svm")
    assert evaluate(run.folder, "rankme", data=several_labels[0]).numbers["trained"]["rankme"] >= 1


def test_no_knn_between_epochs_on_several_labels(several_labels, folder_of_images):
    for place, expected in ((several_labels[0], False), (str(folder_of_images), True)):
        recipe = load_recipe("demo", {"data.source": place, "training.knn_every_epochs": 1})
        knn = online_knn.OnlineKnn.of(recipe, open_source(recipe.data), torch.device("cpu"))
        assert (knn is not None) == expected


@pytest.mark.parametrize("turns", [True, False])
def test_knn_between_epochs_has_images_of_every_class(turns, monkeypatch):
    """At equal distances, as in curves of earlier versions, unless that would miss classes, which take turns."""
    images, labels = torch.arange(1_000).view(-1, 1, 1, 1), torch.arange(1_000) % 10
    source = from_arrays("x", images, labels if turns else labels.sort().values)
    monkeypatch.setattr(online_knn, "open_stored", lambda *given: source)
    recipe = load_recipe("demo", {"training.knn_images": 100})
    knn = online_knn.OnlineKnn.of(recipe, source, torch.device("cpu"))
    assert torch.equal(knn.queries.images, knn.bank.images)
    assert torch.equal(knn.bank.images, images[spread_evenly(1_000, 100) if turns else torch.arange(0, 1_000, 10)])
    assert len(knn.bank.labels.unique()) == 10


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_embed_writes_a_column_for_every_class(run, several_labels, tmp_path, suffix):
    place, labels = several_labels
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    out = embed(run.folder, data=place, out=tmp_path / f"features{suffix}")
    names = ["label_cat", "label_dog", "label_owl"]
    if suffix == ".npz":
        with np.load(out) as archive:
            assert np.array_equal(archive["labels"], labels)
    elif suffix == ".csv":
        header, *rows = [line.split(",") for line in out.read_text().splitlines()]
        assert header[:6] == ["path", "split", *names, "feature_0"]
        assert [[int(value) for value in row[2:5]] for row in rows] == labels.tolist()
    else:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(out)
        assert table.column_names == ["path", "split", *names, "features"]
        assert np.array_equal(np.stack([table[name].to_numpy() for name in names], axis=1), labels)
