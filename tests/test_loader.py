"""Batches: every image once per epoch, in an order that depends on the seed and the epoch alone."""

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl.config.sections import DataConfig
from tico_ssl.config.views import ViewPolicy
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.formats.packed import open_packed
from tico_ssl.data.source import Source, spread_evenly
from tico_ssl.data.sources import open_source
from tico_ssl.pipeline import workers as workers_module
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.packing import pack
from tico_ssl.pipeline.streaming import Stream, Task
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.runtime.device import sent
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator
from tico_ssl.runtime.wording import counted
from tico_ssl.views.executor import Views

CPU = torch.device("cpu")
VIEWS = Views([ViewPolicy(), ViewPolicy(solarise=0.5)], 8, (0.0,) * 3, (1.0,) * 3)
RETRIED = Views(
    [ViewPolicy(crop_sampling="rejection", interpolation="bilinear"), ViewPolicy(crop_sampling="distorted")],
    8,
    (0.0,) * 3,
    (1.0,) * 3,
)


def numbered(count: int) -> Source:
    """Images of one pixel that hold their own number."""
    return from_arrays("numbers", torch.arange(count, dtype=torch.uint8).view(count, 1, 1, 1), None)


def loader(count: int = 23, batch_size: int = 5, seed: int = 0) -> Loader:
    return Loader(numbered(count), VIEWS, batch_size, seed, CPU)


def order(loader: Loader, start: int, stop: int) -> list[list[int]]:
    return [raw.index.tolist() for raw in loader.iterate(start, stop)]


@pytest.mark.parametrize(("count", "batch_size"), [(23, 5), (20, 5), (7, 7), (9, 2)])
def test_every_image_at_most_once_per_epoch(count, batch_size):
    it = loader(count, batch_size)
    assert it.steps_per_epoch == count // batch_size
    for epoch in range(3):
        batches = order(it, epoch * it.steps_per_epoch, (epoch + 1) * it.steps_per_epoch)
        seen = [number for batch in batches for number in batch]
        assert all(len(batch) == batch_size for batch in batches)
        assert len(seen) == len(set(seen)) == count // batch_size * batch_size
        assert set(seen) <= set(range(count))


def test_a_whole_number_of_batches_shows_every_image():
    it = loader(20, 5)
    assert sorted(number for batch in order(it, 0, 4) for number in batch) == list(range(20))


def test_what_is_left_out_changes_from_epoch_to_epoch():
    it = loader(23, 5)
    left_out = [set(range(23)) - {n for batch in order(it, 4 * e, 4 * e + 4) for n in batch} for e in range(20)]
    assert len(set().union(*left_out)) > 15


def test_images_belong_to_their_indices():
    for raw in loader().iterate(0, 9):
        assert raw.pixels.flatten().tolist() == raw.index.tolist()
        assert raw.pixels.dtype == torch.uint8


def test_decisions_are_those_of_the_step_whoever_asks():
    it = loader()
    for step, raw in enumerate(it.iterate(2, 5), 2):
        uniforms = VIEWS.draw(5, generator(0, "views", step))
        assert torch.equal(raw.decisions, VIEWS.decide(uniforms, torch.ones(5, 2)))


def test_the_order_is_a_function_of_seed_and_epoch():
    first = order(loader(seed=1), 0, 12)
    torch.manual_seed(5)
    np.random.default_rng(5).random()
    assert order(loader(seed=1), 0, 12) == first
    assert order(loader(seed=2), 0, 12) != first
    epochs = [tuple(map(tuple, first[4 * epoch : 4 * epoch + 4])) for epoch in range(3)]
    assert len(set(epochs)) == 3


def test_the_order_does_not_depend_on_the_batch_size():
    """The same permutation is cut into other pieces."""
    one, two = order(loader(20, 5), 0, 4), order(loader(20, 10), 0, 2)
    assert sum(one, []) == sum(two, [])  # noqa: RUF017 - short lists


def test_the_order_is_a_true_shuffle():
    """The first place of an epoch is any image alike: a chi-square of 20 cells stays below the 1e-5 quantile."""
    first = torch.tensor([loader(20, 5, seed).indices(0)[0].item() for seed in range(1000)])
    counts = torch.bincount(first, minlength=20).double()
    assert ((counts - 50).square() / 50).sum() < 56


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 11])
def test_starting_at_a_step_is_skipping_the_steps_before(start):
    assert order(loader(), start, 12) == order(loader(), 0, 12)[start:]


def test_nothing_to_do():
    assert order(loader(), 5, 5) == []


def test_a_batch_larger_than_the_data_is_one_line():
    with pytest.raises(UserError, match=r"training\.batch_size 24 .* 23 images of numbers"):
        loader(23, 24)


def folder_and_archive(tmp_path, ragged: bool = True) -> tuple[Source, list[torch.Tensor]]:
    """Image files, and the pixels that went into them."""
    draw = np.random.default_rng(0)
    pixels = [
        draw.integers(0, 256, (9 + i % 3, 8 + i % 2, 3) if ragged else (9, 8, 3), dtype=np.uint8) for i in range(14)
    ]
    for number, array in enumerate(pixels):
        Image.fromarray(array).save(tmp_path / f"{number:02d}.png")
    return open_source(DataConfig(source=str(tmp_path))), [torch.from_numpy(p).permute(2, 0, 1) for p in pixels]


def stream(source: Source, batch_size: int, workers: int, processes: bool) -> Stream:
    """Whole images, one of which is known to have 9 x 8 pixels."""
    made = Stream(source, lambda image, _: (image[:, :9, :8],), 216, batch_size, workers, CPU, BadFiles())
    made.processes = processes
    return made


def tasks(*batches: list[int]) -> list[Task]:
    return [Task(np.array(places), np.zeros((len(places), 2, 5), np.float32)) for places in batches]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(("workers", "batch_size"), [(1, 4), (3, 4), (4, 1), (2, 14)])
def test_streamed_images_are_those_of_the_files(tmp_path, workers, batch_size, processes):
    source, pixels = folder_and_archive(tmp_path)
    order = torch.randperm(14).tolist()
    batches = [order[begin : begin + batch_size] for begin in range(0, 14 - batch_size + 1, batch_size)]
    handed = [(x.clone(),) for (x,) in stream(source, batch_size, workers, processes).batches(tasks(*batches))]
    assert len(handed) == len(batches)
    for (images,), places in zip(handed, batches, strict=True):
        assert all(torch.equal(image, pixels[place][:, :9, :8]) for image, place in zip(images, places, strict=True))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("views", [VIEWS, RETRIED], ids=["clipped", "retried"])
def test_streamed_views_do_not_depend_on_the_workers_and_are_those_of_whole_images(tmp_path, workers, views):
    source, pixels = folder_and_archive(tmp_path)
    streamed = Loader(source, views, 4, 7, CPU, workers)
    assert streamed.storage == f"decoded by {counted(workers, 'process')}"
    for step, raw in enumerate(streamed.iterate(1, 9), 1):
        images = [pixels[place] for place in raw.index.tolist()]
        expected = views(images, views.draw(4, generator(7, "views", step)))
        for view, other in zip(views.make(raw.pixels, raw.decisions), expected, strict=True):
            close = (view - other).abs() < 6 / 255  # crops are rounded to eight bits, and jitter magnifies that
            solarised_elsewhere = ((view + other) - 1).abs() < 6 / 255
            assert (close | solarised_elsewhere).all()


def test_streamed_and_resident_images_come_in_the_same_order(tmp_path):
    source, pixels = folder_and_archive(tmp_path, ragged=False)
    resident = Loader(from_arrays("x", torch.stack(pixels), None), VIEWS, 4, 7, CPU)
    assert resident.storage == "in memory"
    for one, other in zip(Loader(source, VIEWS, 4, 7, CPU).iterate(0, 6), resident.iterate(0, 6), strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.decisions[..., 5:], other.decisions[..., 5:])


def test_batches_of_a_part_of_a_packed_file(tmp_path):
    source, _ = folder_and_archive(tmp_path)
    pack(source, tmp_path / "x.tico", 8, jpeg=False)
    part = open_packed(tmp_path / "x.tico").limited(7)
    it = Loader(part, VIEWS, 7, 0, CPU)
    assert it.storage == "memory-mapped"
    (raw,) = it.iterate(0, 1)
    whole = open_packed(tmp_path / "x.tico")
    assert torch.equal(raw.pixels, whole.take(spread_evenly(14, 7)[raw.index]))


@pytest.mark.parametrize("processes", [False, True])
def test_a_corrupt_file_is_noted_and_its_batch_stays_whole(tmp_path, processes):
    source, _ = folder_and_archive(tmp_path)
    (tmp_path / "05.png").write_bytes(b"no image")
    streamed = stream(source, 7, 2, processes)
    assert all(len(images) == 7 for (images,) in streamed.batches(tasks(list(range(7)), list(range(7, 14)))))
    assert list(streamed.bad.reasons) == ["05.png"]


@pytest.mark.parametrize("processes", [False, True])
def test_stopping_early_leaves_nothing_behind(tmp_path, processes):
    import multiprocessing
    import threading

    source, _ = folder_and_archive(tmp_path)
    before = threading.active_count()
    batches = stream(source, 4, 2, processes).batches(tasks([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]))
    next(batches)
    batches.close()
    assert processes or threading.active_count() == before  # a queue's own thread ends a little later
    assert not multiprocessing.active_children()


def test_a_worker_does_not_keep_the_signal_handlers_of_the_run(tmp_path):
    """Launchers signal whole groups of processes: the run stops, and its workers serve it until then."""
    import os
    import signal

    def process_number() -> torch.Tensor:
        return torch.tensor(list(os.getpid().to_bytes(8, "little")), dtype=torch.uint8).view(8, 1, 1)

    source, _ = folder_and_archive(tmp_path)
    asked = []
    old = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        made = Stream(source, lambda *_: (process_number(),), 8, 2, 1, CPU, BadFiles())
        batches = made.batches(tasks(*[[0, 1]] * 40))
        worker = int.from_bytes(bytes(next(batches)[0][0].flatten().tolist()), "little")
        os.kill(worker, signal.SIGTERM)
        assert len(list(batches)) == 39
    finally:
        signal.signal(signal.SIGTERM, old)
    assert not asked


def test_an_error_in_a_worker_is_its_own(tmp_path):
    source, _ = folder_and_archive(tmp_path)

    def fail(image: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        list(Stream(source, fail, 8, 2, 1, CPU, BadFiles()).batches(tasks([0, 1])))


def test_processors_are_shared_by_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda _: set(range(24)))
    assert default_workers() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "48")
    assert default_workers() == 1


def test_only_copies_to_a_gpu_are_asynchronous():
    class OnGpu:
        device = torch.device("cuda")

        def to(self, device, non_blocking):
            return device.type, non_blocking

    assert sent(OnGpu(), CPU) == ("cpu", False)
    assert sent(OnGpu(), OnGpu.device) == ("cuda", True)
