"""Images are decoded once, and everything computed from them is the same to the bit."""

import pytest
import torch
from PIL import Image

from tico_ssl.config.recipe import load_recipe
from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source
from tico_ssl.data.store import SPARE, Store, free_memory, store_for
from tico_ssl.networks.storage import load_backbone
from tico_ssl.pipeline import loader as loading
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.workers import CAN_FORK, ahead
from tico_ssl.training.start import pretrain
from tico_ssl.views.executor import Views

CPU = torch.device("cpu")
BAD = 5


def pictures(count=23):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(30, 90, (count, 2), generator=generator).tolist()
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


class Counted:
    """A source whose image number 5 is bad, and how often each was decoded by this process."""

    def __init__(self):
        self.images, self.calls = pictures(), []

    def fetch(self, place):
        self.calls.append(place)
        if place == BAD:
            raise BadImage(str(place), "cut off")
        return self.images[place]

    def source(self):
        return Source("counted", len(self.images), self.fetch)


def store_of(counted, share=1.0):
    return Store(counted.source(), 3, round(share * sum(image.numel() for image in counted.images)))


def test_each_image_is_decoded_once_and_is_what_it_was():
    counted = Counted()
    source = store_of(counted).stored()
    for _ in range(3):
        for place, image in enumerate(counted.images):
            if place != BAD:
                assert torch.equal(source.fetch(place), image)
    assert sorted(counted.calls) == [place for place in range(len(counted.images)) if place != BAD]


def test_a_bad_image_stays_bad():
    source = store_of(Counted()).stored()
    for _ in range(2):
        with pytest.raises(BadImage, match="cut off"):
            source.fetch(BAD)


@pytest.mark.skipif(not CAN_FORK, reason="processes share memory by fork")
def test_what_a_worker_decodes_is_there_for_all():
    counted = Counted()
    store = store_of(counted)
    assert list(ahead(store.ensure, store.missing(), 2)) == [None] * len(counted.images)
    assert (store.missing(), counted.calls) == ([], [])
    assert all(torch.equal(store.fetch(p), image) for p, image in enumerate(counted.images) if p != BAD)
    assert counted.calls == []


def test_images_that_do_not_fit_are_decoded_each_time():
    counted = Counted()
    store = store_of(counted, share=0.5 / SPARE)
    source = store.stored()
    for _ in range(2):
        for place, image in enumerate(counted.images):
            if place != BAD:
                assert torch.equal(source.fetch(place), image)
    assert set(counted.calls[len(counted.images) - 1 :]) == set(store.missing()) - {BAD} != set()
    assert store.bytes <= store.capacity


def test_ragged_images_are_those_that_a_batch_would_have():
    counted = Counted()
    store = store_of(counted)
    for place in store.missing():
        store.ensure(place)
    ragged, source = store.ragged(), counted.source()
    assert isinstance(ragged, Ragged)
    assert all(torch.equal(ragged[p], readable(source, p, BadFiles())) for p in range(len(source)))


def test_a_store_is_for_what_fits_into_half_of_the_free_memory(monkeypatch):
    source = Source("one", 10, lambda _: torch.zeros(3, 100, 100, dtype=torch.uint8), content=lambda _: b"")
    needed = round(2 * SPARE * 10 * 30_000)
    monkeypatch.setattr("tico_ssl.data.store.free_memory", lambda: needed + 10)
    assert store_for(source, 3).expected == 300_000
    monkeypatch.setattr("tico_ssl.data.store.free_memory", lambda: needed - 10)
    assert store_for(source, 3) is None


def test_images_that_are_made_anew_each_time_are_not_kept():
    """A data set of the caller's own may augment them."""
    assert store_for(Source("given", 10, lambda _: torch.zeros(3, 9, 9, dtype=torch.uint8)), 3) is None


def test_a_worker_that_was_killed_with_the_lock_stops_nobody(monkeypatch):
    monkeypatch.setattr("tico_ssl.data.store.PATIENCE", 0.01)
    counted = Counted()
    store = store_of(counted)
    store._lock.acquire()
    assert torch.equal(store.fetch(0), counted.images[0])
    assert 0 in store.missing()


def test_free_memory_is_that_of_the_control_group_if_it_has_a_limit(tmp_path, monkeypatch):
    assert free_memory() > 0
    for name, text in {"max": "2000", "current": "900", "stat": "anon 5\ninactive_file 300\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr("tico_ssl.data.store.GROUP", tmp_path)
    assert free_memory() == 1400
    (tmp_path / "memory.max").write_text("max")
    assert free_memory() > 1400


@pytest.mark.parametrize("policy", ["byol", "symmetric-small"])
def test_batches_from_decoded_images_are_those_of_the_stream(policy, monkeypatch):
    """As on a GPU, whose kernel has tests of its own."""
    monkeypatch.setattr(loading, "crops_ragged", lambda device: True)
    monkeypatch.setattr(loading, "_has_room", lambda size, device: True)
    views = Views(load_recipe("cifar10/tico", {"views": policy}).views, 24, (0.5,) * 3, (0.25,) * 3)
    counted = Counted()
    store = store_of(counted)
    settled = Loader(store.stored(), views, 6, 1, CPU, 2, store=store)
    streamed = Loader(Counted().source(), views, 6, 1, CPU, 2)
    for step, (ours, theirs) in enumerate(zip(settled.iterate(2, 11), streamed.iterate(2, 11), strict=True)):
        assert torch.equal(ours.index, theirs.index)
        for mine, expected in zip(ours.pixels, theirs.pixels, strict=True):
            assert torch.equal(mine, expected), step
        pairs = zip(views.make(ours.pixels, ours.decisions), views.make(theirs.pixels, theirs.decisions), strict=True)
        assert all(torch.equal(mine, expected) for mine, expected in pairs)
    assert settled._ragged is not None


def test_a_run_is_the_same_with_and_without_a_store(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, image in enumerate(pictures(40)):
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(folder / f"{number}.png")
    changes = {
        "data.source": str(folder),
        "data.image_size": 16,
        "backbone.name": "tico/resnet10-w4",
        "training.epochs": 3,
        "training.batch_size": 8,
        "training.workers": 2,
    }
    states = []
    for store in ("auto", "none"):
        run = pretrain("demo", out=tmp_path / store, overrides=changes | {"data.store": store})
        states.append(load_backbone(run.folder).state_dict())
        assert ("each once" in (run.folder / "train.log").read_text()) == (store == "auto")
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
