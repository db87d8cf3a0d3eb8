"""Features of files: decoded and preprocessed by worker processes, once for all networks, and only if needed."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl import embed, evaluate, load_backbone
from tico_ssl.config.section import validate
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.config.views import ViewPolicy, named_policy
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.sources import open_training
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._representation import augmented
from tico_ssl.features import batches, extraction, kept, subjects
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.extraction import extract, extract_all, image_batches, squashed
from tico_ssl.features.subjects import untrained_twin
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.pipeline import workers
from tico_ssl.runtime import progress
from tico_ssl.runtime.randomness import generator
from tico_ssl.views.executor import Views

CPU = torch.device("cpu")
SIZES = [(70, 90), (20, 31), (16, 16), (120, 66), (400, 9), (64, 64), (17, 300)]


def network(seed=0, size=16, name="tico/resnet10-w4"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_backbone(BackboneConfig(name=name), size)


@pytest.fixture
def photos(tmp_path):
    """Images of many sizes in two classes; three of the second are unreadable."""
    draw = np.random.default_rng(0)
    for number in range(150):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
        if number % 50 == 7:
            file.write_bytes(file.read_bytes()[:60])
    return tmp_path / "photos"


@pytest.fixture
def small_batches(monkeypatch):
    """Several batches, of which the last is smaller, a ring that is used more than once, and images prepared alone or
    together."""
    monkeypatch.setattr(batches, "BATCH", 33)
    monkeypatch.setattr(batches, "TOGETHER", 20_000)


@pytest.fixture(params=["processes", "threads"])
def source(photos, small_batches, monkeypatch, request):
    monkeypatch.setattr(batches, "CAN_FORK", workers.CAN_FORK and request.param == "processes")
    return open_training(DataConfig(source=str(photos)))


def readable(source):
    for place in range(len(source)):
        try:
            yield place, source.fetch(place)
        except BadImage:
            continue


@pytest.mark.parametrize("whole", [False, True])
def test_workers_preprocess_to_the_bit_as_load_backbone_does(source, whole):
    backbone = network()
    expected = dict(readable(source))
    assert len(expected) == 147
    made = [(images.clone(), places) for images, places in image_batches(source, backbone, CPU, whole)]
    assert [place for _, places in made for place in places] == [*expected]
    assert [len(places) for _, places in made] == [33, 33, 32, 31, 18]  # each without its unreadable images
    ours = torch.cat([images for images, _ in made])
    images = [*expected.values()]
    assert torch.equal(ours, squashed(backbone, images) if whole else backbone.preprocess(images))


def test_networks_that_share_a_pass_have_the_features_of_passes_of_their_own(source):
    one, other = network(0), network(1)
    other.train()
    together = extract_all([one, other], source, CPU)
    assert (one.training, other.training) == (True, True)
    for backbone, found in zip([one, other], together, strict=True):
        alone = extract(backbone, source, CPU)
        assert torch.equal(found.features, alone.features)
        assert torch.equal(found.places, alone.places)
        direct = backbone.eval()(backbone.preprocess([image for _, image in readable(source)]))
        assert torch.allclose(found.features, direct, atol=1e-5)
    assert not torch.allclose(together[0].features, together[1].features)


def test_augmented_views_of_files_are_those_of_a_batch_in_one_process(source, monkeypatch):
    monkeypatch.setattr(augmented, "BATCH", 33)
    (values,) = named_policy("byol-small")[:1]
    policy = validate(ViewPolicy, values, "views").model_copy(update={"count": 1})
    backbone = network().eval()
    found = augmented._one_view({"one": backbone}, source, policy, 3, 0, CPU, "views")["one"].features
    make = Views([policy], 16, backbone.mean, backbone.std)
    drawn = torch.cat(
        [make.draw(min(33, 150 - i), generator(3, "probe", augmented.DRAW, 0, i)) for i in range(0, 150, 33)]
    )
    images = dict(readable(source))
    (views,) = make([*images.values()], drawn[[*images]])
    with torch.no_grad():
        assert torch.allclose(found, backbone(views), atol=1e-5)


def counted(source):
    asked = []
    return replace(source, fetch=lambda place: asked.append(place) or source.fetch(place)), asked


def test_every_image_is_decoded_once_for_all_networks_that_see_the_same(photos, monkeypatch):
    monkeypatch.setattr(batches, "CAN_FORK", False)
    source, asked = counted(open_training(DataConfig(source=str(photos))))
    extract_all([network(0), network(1)], source, CPU)
    assert sorted(asked) == [*range(150)]
    asked.clear()
    small, large = extract_all([network(0), network(0, size=24)], source, CPU)
    assert len(asked) == 300
    assert not torch.equal(small.features, large.features)


def test_kept_batches_are_decoded_once_and_give_the_same_bits(photos, small_batches, monkeypatch):
    monkeypatch.setattr(batches, "CAN_FORK", False)
    source, asked = counted(open_training(DataConfig(source=str(photos))))
    fresh = [extract(network(seed), source, CPU) for seed in (0, 1)]
    monkeypatch.setattr(kept, "room", lambda device: 10**9)
    asked.clear()
    images = kept.KeptBatches()
    again = [extract(network(seed), source, CPU, batches=images) for seed in (0, 1)]
    assert len(asked) == 150
    for one, other in zip(fresh, again, strict=True):
        assert torch.equal(one.features, other.features)
        assert torch.equal(one.places, other.places)
    larger = extract(network(0, size=24), source, CPU, batches=images)
    assert torch.equal(larger.features, extract(network(0, size=24), source, CPU).features)


def test_images_are_not_kept_where_memory_is_short(photos, monkeypatch):
    monkeypatch.setattr(batches, "CAN_FORK", False)
    source, asked = counted(open_training(DataConfig(source=str(photos))))
    monkeypatch.setattr(kept, "room", lambda device: 150 * 3 * 16 * 16 * 4 - 1)
    images = kept.KeptBatches()
    for _ in range(2):
        extract(network(), source, CPU, batches=images)
    assert len(asked) == 300


def test_decoding_is_bounded_by_the_ring(photos, small_batches, monkeypatch):
    monkeypatch.setattr(batches, "CAN_FORK", False)
    source, asked = counted(open_training(DataConfig(source=str(photos))))
    first = next(iter(image_batches(source, network(), CPU)))
    assert len(first[1]) == 33
    assert len(asked) <= 33 + workers.AHEAD * workers.chosen_workers(None) * batches.CHUNK


def test_few_images_start_no_processes(photos, monkeypatch):
    monkeypatch.setattr(workers, "_Worker", lambda *given: pytest.fail("a process was started"))
    few = open_training(DataConfig(source=str(photos))).limited(batches.FEW)
    assert len(few) == batches.FEW
    assert 0 < len(extract(network(), few, CPU).places) <= batches.FEW


@pytest.mark.skipif(not workers.CAN_FORK, reason="no worker processes here")
def test_gentle_processes_yield_to_the_network():
    import os

    assert set(workers.ahead(lambda _: os.nice(0), range(4), 2, gentle=True)) == {os.nice(0) + workers.NICE}
    assert set(workers.ahead(lambda _: os.nice(0), range(4), 2)) == {os.nice(0)}


# -------------------------------------------------------------------------------------------------- the untrained twin


def test_a_second_command_builds_no_twin_and_decodes_nothing(photos, tmp_path, monkeypatch):
    save_backbone(network(), tmp_path / "b.safetensors")
    first = evaluate(tmp_path / "b.safetensors", "knn", str(photos))
    monkeypatch.setattr(subjects, "calibrate", lambda *given: pytest.fail("the twin was built"))
    monkeypatch.setattr(extraction, "prepared_batches", lambda *given: pytest.fail("images were decoded"))
    again = evaluate(tmp_path / "b.safetensors", "knn", str(photos))
    assert first.numbers == again.numbers
    assert again.numbers.keys() == {"trained", "untrained"}


def test_the_twin_is_known_by_how_it_is_made(photos):
    source = open_training(DataConfig(source=str(photos)))

    def known(backbone=None, images=source, seed=0, **options):
        return untrained_twin(backbone or network(), images, seed, CPU, **options).identity

    assert known() == known(network(5))  # of the trained weights it has nothing
    others = [
        known(network(size=24)),
        known(network(name="tico/resnet18-w4")),
        known(images=source.limited(100)),
        known(seed=1),
        known(reduced_decoding=False),
    ]
    assert len({known(), *others}) == 6
    assert known(images=replace(source, identity=None)) is None


def test_the_twins_features_are_those_of_the_network_that_protocols_get(photos, tmp_path):
    save_backbone(network(), tmp_path / "b.safetensors")
    context = open_context(tmp_path / "b.safetensors", str(photos))
    features = context.features("untrained").test
    assert torch.equal(features, extract(context.backbones["untrained"], context.test, CPU).features)
    assert context.backbones["untrained"] is context.backbones["untrained"]
    assert [*context.backbones] == ["trained", "untrained"]


# ------------------------------------------------------------------------------------------------------------ precision


def test_bf16_is_an_approximation_that_is_cached_apart_and_said(photos, tmp_path):
    save_backbone(network(), tmp_path / "b.safetensors")
    exact = evaluate(tmp_path / "b.safetensors", "rankme", str(photos))
    files = set((tmp_path / "b" / "features").iterdir())
    rough = evaluate(tmp_path / "b.safetensors", "rankme", str(photos), bf16=True)
    assert len(set((tmp_path / "b" / "features").iterdir()) - files) == len(files)
    assert rough.data == exact.data | {"precision": "bf16"}
    for name in ("trained", "untrained"):
        assert rough.numbers[name]["rankme"] == pytest.approx(exact.numbers[name]["rankme"], rel=0.1)


@pytest.mark.parametrize("side", [16, 40])
def test_only_the_network_computes_in_bf16(side):
    """Pixels are resized and normalised in float32 on any way."""
    images = torch.randint(0, 256, (20, 3, side, side), dtype=torch.uint8)
    backbone, source = network(), from_arrays("noise", images, None)
    seen = []
    backbone.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone()))
    rough = extract(backbone, source, CPU, dtype=torch.bfloat16).features
    exact = extract(backbone, source, CPU).features
    assert torch.equal(*seen)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.1 * exact.abs().max()


def test_embed_in_bf16(photos, tmp_path):
    save_backbone(network(), tmp_path / "b.safetensors")
    found = []
    for bf16 in (False, True):
        with np.load(embed(tmp_path / "b.safetensors", str(photos), tmp_path / "x.npz", bf16=bf16)) as archive:
            found.append(archive["features"])
    assert found[1].dtype == np.float32
    assert 0 < np.abs(found[0] - found[1]).max() < 0.1 * np.abs(found[0]).max()
    assert load_backbone(tmp_path / "b.safetensors").width == found[0].shape[1]


def test_the_cache_keeps_the_features_of_one_pass_apart(tmp_path):
    images = torch.randint(0, 256, (20, 3, 16, 16), dtype=torch.uint8)
    cache, source = FeatureCache(tmp_path), from_arrays("noise", images, None)
    cache.extract(network(1), source, CPU)
    made = cache.extract_all([network(0), network(1), network(2)], source, CPU)
    assert len([*tmp_path.iterdir()]) == 3
    for seed, found in enumerate(made):
        assert torch.equal(found.features, extract(network(seed), source, CPU).features)


# ------------------------------------------------------------------------------------------------------------- progress


def test_without_a_terminal_a_line_says_speed_and_time_left_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(clock)))
    items = [list(range(100))] * 6
    assert list(progress.track(items, 600, "features", "images", len)) == items
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 5
    form = r"features: \d00 of 600 images, [\d.]+ images/s, 0:\d\d:\d\d left"
    assert all(re.fullmatch(form, line) for line in lines), lines


def test_what_is_done_soon_is_not_spoken_of(capsys):
    assert list(progress.track(range(3), 3, "features")) == [0, 1, 2]
    assert list(progress.track(range(3), 3, None)) == [0, 1, 2]
    assert capsys.readouterr().out == ""
