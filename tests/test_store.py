"""Images are decoded once, and everything computed from them is the same to the bit."""

import io
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tico_ssl import embed, evaluate, pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import DataConfig
from tico_ssl.data import backing as backings
from tico_ssl.data import store as storing
from tico_ssl.data import stored as choosing
from tico_ssl.data.backing import RECORD, InMemory, OnDisk
from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.decoding import BadImage, decode
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source
from tico_ssl.data.store import Store
from tico_ssl.data.stored import SPARE, open_stored, store_for
from tico_ssl.features.exploration import picture_of
from tico_ssl.networks.storage import load_backbone
from tico_ssl.pipeline import loader as loading
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.workers import CAN_FORK, ahead
from tico_ssl.runtime import cache_folder
from tico_ssl.views.executor import Views

CPU = torch.device("cpu")
BAD = 5
needs_fork = pytest.mark.skipif(not CAN_FORK, reason="processes share memory by fork")


def pictures(count=23):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(30, 90, (count, 2), generator=generator).tolist()
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


class Counted:
    """A source whose image number 5 is bad, and how often each was decoded by this process."""

    def __init__(self):
        self.images, self.calls = pictures(), []
        self.bytes = sum(image.numel() for image in self.images)

    def fetch(self, place):
        self.calls.append(place)
        if place == BAD:
            raise BadImage(str(place), "cut off")
        return self.images[place]

    def source(self):
        return Source("counted", len(self.images), self.fetch, identity=lambda i: b"%d" % i, content=lambda _: b"")

    def good(self):
        return [(place, image) for place, image in enumerate(self.images) if place != BAD]


def on_disk(folder):
    """A backing in a folder of the cache of this name."""
    return OnDisk(cache_folder.opened(f"{folder}-{os.getpid()}", "a test"))


@pytest.fixture(params=["memory", "disk"])
def backing(request, tmp_path):
    return InMemory(10**6) if request.param == "memory" else on_disk(tmp_path.name)


def store_of(counted, backing=None):
    where = InMemory(counted.bytes) if backing is None else backing
    return Store(counted.source(), 3, where, expected=counted.bytes)


def right(store, counted):
    return all(torch.equal(store.fetch(place), image) for place, image in counted.good())


def test_each_image_is_decoded_once_and_is_what_it_was(backing):
    counted = Counted()
    source = store_of(counted, backing).stored()
    for _ in range(3):
        assert all(torch.equal(source.fetch(place), image) for place, image in counted.good())
    assert sorted(counted.calls) == [place for place, _ in counted.good()]


def test_a_bad_image_stays_bad(backing):
    source = store_of(Counted(), backing).stored()
    for _ in range(2):
        with pytest.raises(BadImage, match="cut off"):
            source.fetch(BAD)


@needs_fork
def test_what_a_worker_decodes_is_there_for_all(backing):
    counted = Counted()
    store = store_of(counted, backing)
    assert list(ahead(store.ensure, store.missing(), 2)) == [None] * len(counted.images)
    assert (store.missing(), counted.calls) == ([], [])
    assert right(store, counted)
    assert (counted.calls, store.refused) == ([], 0)


def test_images_that_do_not_fit_are_decoded_each_time():
    counted = Counted()
    store = store_of(counted, InMemory(counted.bytes // 2))
    assert right(store, counted)
    first = len(counted.calls)
    assert right(store, counted)
    assert set(counted.calls[first:]) == set(store.missing()) - {BAD} != set()
    assert store.bytes <= counted.bytes // 2
    assert store.refused > 0


def test_ragged_images_are_those_that_a_batch_would_have(backing, monkeypatch):
    monkeypatch.setattr(storing, "PIECE", 20_000)  # moved in several pieces
    counted = Counted()
    store = store_of(counted, backing)
    for place in store.missing():
        store.ensure(place)
    ragged, source = store.ragged(CPU), counted.source()
    assert isinstance(ragged, Ragged)
    assert all(torch.equal(ragged[p], readable(source, p, BadFiles())) for p in range(len(source)))


@pytest.mark.parametrize("threads_from", [1, 2**22])
def test_images_are_read_together_if_all_are_kept(backing, threads_from, monkeypatch):
    monkeypatch.setattr(backings, "SEVERAL", threads_from)
    counted, places = Counted(), [7, 8, 9, 2, 7, 20]
    store = store_of(counted, backing)
    store.ensure_all(places[:-1])
    assert store.together(places) is None
    store.ensure_all(places)
    together = store.together(places)
    assert together is not None
    assert all(torch.equal(together[i], counted.images[place]) for i, place in enumerate(places))
    assert store.together([7, BAD]) is None


def test_a_worker_that_was_killed_with_the_lock_stops_nobody(monkeypatch):
    monkeypatch.setattr("tico_ssl.data.backing.PATIENCE", 0.01)
    counted = Counted()
    store = store_of(counted)
    store.backing._lock.acquire()
    assert torch.equal(store.fetch(0), counted.images[0])
    assert 0 in store.missing()


class TestOnDisk:
    def test_another_command_decodes_nothing(self, tmp_path):
        assert right(store_of(Counted(), on_disk(tmp_path.name)), Counted())
        counted = Counted()
        later = store_of(counted, on_disk(tmp_path.name))
        assert later.count == len(counted.images) - 1
        assert right(later, counted)
        assert counted.calls == []

    def test_a_command_finds_what_another_keeps_meanwhile(self, tmp_path, monkeypatch):
        monkeypatch.setattr(storing, "PATIENCE", 0.0)
        counted = Counted()
        early = store_of(counted, on_disk(tmp_path.name))
        assert right(store_of(Counted(), on_disk(tmp_path.name)), Counted())
        assert right(early, counted)
        assert counted.calls == []

    def test_a_source_of_some_of_the_images_finds_them(self, tmp_path):
        assert right(store_of(Counted(), on_disk(tmp_path.name)), Counted())
        counted = Counted()
        some = counted.source().subset(torch.tensor([17, 3, 11]))
        store = Store(some, 3, on_disk(tmp_path.name))
        assert [torch.equal(store.fetch(i), counted.images[p]) for i, p in enumerate([17, 3, 11])] == [True] * 3
        assert counted.calls == []

    def test_a_store_that_is_only_read_keeps_nothing(self, tmp_path):
        counted = Counted()
        reading = Store(counted.source(), 3, on_disk(tmp_path.name), fill=False)
        assert right(reading, counted)
        assert reading.count == store_of(Counted(), on_disk(tmp_path.name)).count == 0

    @pytest.mark.parametrize("name", ["pixels-0", "records"])
    def test_no_flipped_bit_is_used(self, name, tmp_path):
        """Wherever one is, images are right, and the damaged one is decoded again and kept."""
        backing = on_disk(tmp_path.name)
        assert right(store_of(Counted(), backing), Counted())
        file, chance = backing.folder / name, random.Random(0)
        for _ in range(60):
            content = bytearray(file.read_bytes())
            content[chance.randrange(64 if name == "pixels-0" else 0, len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
            counted, after = Counted(), Counted()
            assert right(store_of(counted, on_disk(tmp_path.name)), counted)
            assert len(counted.calls) <= 1
            assert right(store_of(after, on_disk(tmp_path.name)), after)
            assert after.calls == []

    @pytest.mark.parametrize("name", ["pixels-0", "records"])
    def test_a_file_that_is_cut_costs_time_alone(self, name, tmp_path):
        backing = on_disk(tmp_path.name)
        assert right(store_of(Counted(), backing), Counted())
        file = backing.folder / name
        for share in (0.99, 0.5, 0.001):
            os.truncate(file, round(share * file.stat().st_size))
            assert right(store_of(Counted(), on_disk(tmp_path.name)), Counted())
            assert store_of(Counted(), on_disk(tmp_path.name)).count == len(Counted().images) - 1

    @pytest.mark.parametrize("together", [False, True])
    def test_on_a_full_disk_what_does_not_fit_is_decoded(self, together, tmp_path, full_disk):
        counted = Counted()
        backing = on_disk(tmp_path.name)
        store = store_of(counted, backing)
        with full_disk(counted.bytes // 2):
            if together:
                store.ensure_all(range(len(counted.images)))
            assert right(store, counted)
            assert right(store, counted)
        assert 0 < store.count < len(counted.images) - 1
        assert right(store_of(Counted(), on_disk(tmp_path.name)), Counted())

    def test_what_is_unverified_or_damaged_is_not_read_together(self, tmp_path):
        first = on_disk(tmp_path.name)
        store_of(Counted(), first).ensure_all(range(8))
        counted, places = Counted(), [0, 1, 2]
        store = store_of(counted, on_disk(tmp_path.name))
        assert store.together(places) is None
        store.ensure_all(places)
        assert (counted.calls, store.together(places) is None) == ([], False)
        for file in first.folder.glob("pixels-*"):
            os.truncate(file, 100)
        assert store.together(places) is None

    @needs_fork
    @pytest.mark.parametrize("files", [32, 1])
    @pytest.mark.parametrize("together", [False, True])
    def test_commands_that_fill_it_at_once_get_the_right_images(self, together, files, tmp_path, monkeypatch):
        """Four of them, each in an order of its own; some are killed at random moments."""
        monkeypatch.setattr(storing, "PATIENCE", 0.0)
        monkeypatch.setattr(backings, "FILES", files)
        monkeypatch.setattr(backings, "AT_ONCE", 2)
        name = on_disk(tmp_path.name).folder.name.removesuffix(f"-{os.getpid()}")
        fork = multiprocessing.get_context("fork")

        def fill(seed):
            counted = Counted()
            store = Store(counted.source(), 3, OnDisk(cache_folder.cache_folder() / f"{name}-{os.getppid()}"))
            places = random.Random(seed).sample(counted.good(), len(counted.good()))
            if together:
                store.ensure_all([place for place, _ in places])
            os._exit(0 if all(torch.equal(store.fetch(place), image) for place, image in places) else 1)

        for turn in range(5):
            fillers = [fork.Process(target=fill, args=(4 * turn + number,)) for number in range(4)]
            for filler in fillers:
                filler.start()
            time.sleep(0.002 * turn)
            fillers[turn % 4].kill()
            for filler in fillers:
                filler.join()
            killed = fillers.pop(turn % 4)
            assert [filler.exitcode for filler in fillers] == [0, 0, 0]
            assert killed.exitcode in (0, -signal.SIGKILL)
            assert right(store_of(Counted(), on_disk(tmp_path.name)), Counted())

    def test_a_folder_that_is_removed_and_made_again_is_not_written_to(self, tmp_path):
        counted = Counted()
        old = on_disk(tmp_path.name)
        store = store_of(counted, old)
        shutil.rmtree(old.folder)
        new = on_disk(tmp_path.name)
        size = new.bytes
        assert right(store, counted)
        assert new.bytes == size

    def test_a_folder_that_is_removed_and_made_again_is_not_read(self, tmp_path):
        """Where another thread or process has written what this one has not read yet."""
        counted, others = Counted(), Counted()
        others.images.reverse()
        store = store_of(counted, on_disk(tmp_path.name))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store.ensure_all, range(8)).result()
        shutil.rmtree(store.backing.folder)
        store_of(others, on_disk(tmp_path.name)).ensure_all(range(8))
        assert store.together([1, 2]) is None
        assert right(store, counted)


def encoded(height, width, kind):
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


@settings(max_examples=60, deadline=None)
@given(st.integers(16, 400), st.integers(16, 400), *[st.none() | st.integers(4, 300)] * 2, st.booleans())
@example(73, 73, 4, 5, True)
@example(81, 81, 4, 5, True)
def test_an_image_that_was_reduced_is_used_where_it_would_be_the_same(height, width, shorter, other, jpeg):
    content = encoded(height, width, "jpeg" if jpeg else "png")
    kept, wanted = (decode(content, shorter=side) for side in (shorter, other))
    source = Source("one", 1, lambda _: kept, content=lambda _: content)
    how = Store(source, 3, InMemory(10**6), shorter, expected=0)._reduced(0, kept)
    record = np.zeros(1, RECORD)
    record["height"], record["width"], record["shorter"] = *kept.shape[1:], how
    if storing._same_pixels(record, other)[0]:
        assert torch.equal(kept, wanted)
    else:  # it is used wherever it can be, edges of rounding aside, and images that no decoder reduces further
        side, whole = min(kept.shape[1:]), min(height, width)
        assert kept.shape != wanted.shape or side in (other, 2 * (other or 0)) or side == -(-whole // 8)
    assert jpeg or storing._same_pixels(record, other)[0]


def photos(folder, count=40):
    folder.mkdir()
    for number, image in enumerate(pictures(count)):
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(folder / f"{number}.png")
    return folder


def counted_decodes(monkeypatch):
    """The names of files that are decoded in this process from now on."""
    from tico_ssl.data.decoding import Reading

    names, real = [], Reading.decode

    def decoding(reading, file, name=None):
        names.append(name)
        return real(reading, file, name)

    monkeypatch.setattr(Reading, "decode", decoding)
    return names


def test_a_changed_file_is_another_image(tmp_path, monkeypatch):
    folder = photos(tmp_path / "photos", 6)
    config = DataConfig(source=str(folder))
    names = counted_decodes(monkeypatch)
    for _ in range(2):
        source = open_stored(config, "train", 3, 100)
        first = [source.fetch(i) for i in range(6)]
    assert sorted(set(names)) == sorted(file.name for file in folder.iterdir())
    names.clear()
    Image.new("RGB", (50, 40), "red").save(folder / "3.png")
    source = open_stored(config, "train", 3, 100)
    again = [source.fetch(i) for i in range(6)]
    assert set(names) == {"3.png"}
    changed = [not torch.equal(a, b) for a, b in zip(first, again, strict=True)]
    assert changed == [name == "3.png" for name in sorted(file.name for file in folder.iterdir())]


def test_images_that_are_made_anew_each_time_are_not_kept():
    """A data set of the caller's own may augment them."""
    source = Source("given", 10, lambda _: torch.zeros(3, 9, 9, dtype=torch.uint8))
    assert store_for(source, DataConfig(), 3, None) is None


class TestChoice:
    """Where images are kept: 10 images of 30,000 bytes each."""

    def choose(self, how, monkeypatch, memory=10**9, disk=10**9):
        monkeypatch.setattr(choosing, "free_memory", lambda: memory)
        monkeypatch.setattr(cache_folder, "limit", lambda: disk)
        counted = Source(
            "one",
            10,
            lambda _: torch.zeros(3, 100, 100, dtype=torch.uint8),
            identity=lambda i: b"%d" % i,
            content=lambda _: b"",
        )
        notes = []
        store = store_for(counted, DataConfig(source="one", store=how), 3, None, note=notes.append)
        if store is not None:
            assert store.expected == 300_000
        return (None if store is None else store.backing.name), notes

    @pytest.fixture(autouse=True)
    def _empty_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TICO_CACHE", str(tmp_path))

    def test_on_disk_if_there_is_room_for_all(self, monkeypatch):
        assert self.choose("auto", monkeypatch) == ("on disk", [])

    def test_else_in_memory_if_half_of_it_is_enough(self, monkeypatch):
        needed = round(2 * SPARE * 300_000)
        assert self.choose("auto", monkeypatch, needed + 10, 300_000) == ("in memory", [])
        assert cache_folder.entries() == []
        where, (note,) = self.choose("auto", monkeypatch, needed - 10, 300_000)
        assert where is None
        assert "0 GB of decoded images fit neither into the cache" in note

    def test_as_asked_for_even_if_only_a_part_fits(self, monkeypatch):
        assert self.choose("memory", monkeypatch, 100_000)[0] == "in memory"
        assert self.choose("disk", monkeypatch, disk=100_000)[0] == "on disk"
        assert self.choose("none", monkeypatch) == (None, [])

    def test_a_folder_that_cannot_be_made_leaves_memory(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TICO_CACHE", str(tmp_path / "file" / "cache"))
        assert self.choose("auto", monkeypatch) == ("in memory", [])


@pytest.mark.parametrize("policy", ["byol", "symmetric-small"])
@pytest.mark.parametrize("small", [0, math.inf], ids=["crops by workers", "crops on the GPU"])
@pytest.mark.parametrize("room", [math.inf, 60_000], ids=["all fit", "some fit"])
def test_batches_from_decoded_images_are_those_of_the_stream(policy, small, room, monkeypatch, backing):
    """As on a GPU, whose kernel has tests of its own."""
    monkeypatch.setattr(loading, "crops_ragged", lambda device: True)
    monkeypatch.setattr(loading, "_has_room", lambda size, device: True)
    monkeypatch.setattr(loading, "SMALL", small)
    backing.capacity = min(backing.capacity, room)
    views = Views(load_recipe("cifar10/tico", {"views": policy}).views, 24, (0.5,) * 3, (0.25,) * 3)
    store = store_of(Counted(), backing)
    settled = Loader(store.stored(), views, 6, 1, CPU, 2, store=store)
    streamed = Loader(Counted().source(), views, 6, 1, CPU, 2)
    for step, (ours, theirs) in enumerate(zip(settled.iterate(2, 11), streamed.iterate(2, 11), strict=True)):
        assert torch.equal(ours.index, theirs.index)
        for mine, expected in zip(ours.pixels, theirs.pixels, strict=True):
            assert torch.equal(mine, expected), step
        pairs = zip(views.make(ours.pixels, ours.decisions), views.make(theirs.pixels, theirs.decisions), strict=True)
        assert all(torch.equal(mine, expected) for mine, expected in pairs)
    assert (settled._ragged is None) == (store.refused > 0) == (room < math.inf)
    assert settled.bad.reasons == streamed.bad.reasons


def test_with_a_full_store_the_first_epoch_is_like_all_others(monkeypatch, backing):
    monkeypatch.setattr(loading, "crops_ragged", lambda device: True)
    monkeypatch.setattr(loading, "_has_room", lambda size, device: True)
    views = Views(load_recipe("cifar10/tico").views, 24, (0.5,) * 3, (0.25,) * 3)
    counted = Counted()
    good = counted.source().subset(torch.tensor([place for place, _ in counted.good()]))
    store = Store(good, 3, backing, expected=counted.bytes)
    for place in store.missing():
        store.ensure(place)
    settled, streamed = Loader(store.stored(), views, 6, 1, CPU, 2, store=store), Loader(good, views, 6, 1, CPU, 2)
    for ours, theirs in zip(settled.iterate(0, 3), streamed.iterate(0, 3), strict=True):
        assert settled._ragged is not None
        assert all(torch.equal(mine, expected) for mine, expected in zip(ours.pixels, theirs.pixels, strict=True))


def test_a_run_is_the_same_wherever_images_are_kept_also_if_that_changes(tmp_path):
    changes = {
        "data.source": str(photos(tmp_path / "photos")),
        "data.image_size": 16,
        "backbone.name": "tico/resnet10-w4",
        "training.epochs": 3,
        "training.batch_size": 8,
        "training.workers": 2,
    }
    states = []
    for store, said in (("none", ""), ("memory", "GB in memory"), ("auto", "GB on disk"), ("auto", "40 of 40 there")):
        run = pretrain("demo", out=tmp_path / f"run{len(states)}", overrides=changes | {"data.store": store})
        states.append(load_backbone(run.folder).state_dict())
        assert said in (run.folder / "train.log").read_text()
    for other in states[1:]:
        assert all(torch.equal(value, other[name]) for name, value in states[0].items())


def test_a_run_says_that_there_was_no_room(tmp_path, monkeypatch):
    """As on a disk that becomes full, where a store of all images was begun."""
    monkeypatch.setattr(OnDisk, "append", lambda self, images: [None] * len(images))
    changes = {"data.image_size": 16, "backbone.name": "tico/resnet10-w4", "training.epochs": 2}
    changes |= {"training.batch_size": 8, "training.workers": 1}
    run = pretrain("demo", str(photos(tmp_path / "photos", 16)), tmp_path / "run", changes)
    said = (run.folder / "train.log").read_text()
    assert said.count("there was no room for about 16 of 16") == 1


def test_after_training_nothing_is_decoded_again(tmp_path, folder_of_images, monkeypatch):
    """Neither for evaluations, nor for an embedding, nor for the pictures of a report."""
    changes = {
        "data.image_size": 16,
        "backbone.name": "tico/resnet10-w4",
        "training.epochs": 1,
        "training.batch_size": 4,
        "training.workers": 1,
    }
    run = pretrain("demo", str(folder_of_images), tmp_path / "run", changes)
    decoded = counted_decodes(monkeypatch)
    evaluate(run.folder, "knn")
    embed(run.folder, out=tmp_path / "features.npz")
    picture_of(run.folder, None, points=12, galleries=2)
    assert decoded == []
    evaluate(run.folder, "rankme", data=str(photos(tmp_path / "others", 3)), cache=False)
    assert decoded != []
