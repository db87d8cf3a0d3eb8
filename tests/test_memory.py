"""Memory that does not suffice: one line that says what to change, and the largest batch that fits."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from tico_ssl import pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.errors import UserError, memory_advice
from tico_ssl.training import find_batch, start
from tico_ssl.training.step import Step

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 10 GiB of which 1 GiB is free."


@pytest.mark.parametrize(
    "settings",
    [
        {"data.image_size": 10**7},
        {"data.image_size": 10**12},
        {"data.image_size": 10**30},
        {"training.batch_size": 10**11, "data.limit": 10**11},
        {"data.limit": 10**30},
        {"method.dim": 10**7},
        {"method.dim": 10**30},
        {"backbone.name": "tico/resnet10-w1000000"},
    ],
)
def test_sizes_that_no_machine_has_are_one_line(tmp_path, tiny, settings):
    with pytest.raises(UserError, match=r"^out of memory: lower training\.batch_size .*image_size") as refused:
        pretrain("demo", out=tmp_path / "run", overrides=tiny | settings)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_full_gpu_says_what_to_change(tmp_path, tiny, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(Step, "__call__", full)
    with pytest.raises(UserError, match=r"^out of GPU memory: .*--find-batch` .*training\.parts.*training\.recompute"):
        pretrain("demo", out=tmp_path / "run", overrides=tiny)
    with pytest.raises(UserError, match=r"^out of memory: lower it$"), memory_advice("lower it"):
        raise MemoryError


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), ValueError("negative"), TypeError("not callable")])
def test_other_errors_pass(error):
    with pytest.raises(type(error), match=re.escape(str(error))), memory_advice("lower it"):
        raise error


def recipe_in(parts):
    return load_recipe("demo", {"training.parts": parts, "training.batch_size": 64 * parts})


@pytest.mark.parametrize("limit", [2, 5, 8, 63, 64, 65, 100, 511, 512, 700, 1000, 4096, 10**6])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("share", [math.inf, 1.0, 0.4, 1.7])
def test_the_largest_batch_is_found(limit, parts, share):
    """Also where the memory that is said to be there is not what limits a batch."""
    tried = []

    def peak(size):
        tried.append(size)
        return 10 * size if size <= limit else None

    sizes = find_batch.sizes_for(recipe_in(parts), 50_000)
    unit = math.lcm(find_batch.COARSE if limit >= find_batch.LARGE else find_batch.FINE, parts)
    if limit < unit:
        with pytest.raises(UserError, match="not even a batch of"):
            find_batch.search(peak, sizes, share * 10 * limit)
        return
    size, found = find_batch.search(peak, sizes, share * 10 * limit)
    assert found == 10 * size and size % parts == 0
    assert size <= limit < size + unit or size == 50_000 // parts * parts
    assert len(tried) == len(set(tried)) < 22


def test_few_trials_are_needed_where_memory_grows_with_the_batch():
    """The peaks of a ResNet-50 at 224 pixels on a GPU of 140 GiB, which a batch of 3,328 fills."""
    tried = []

    def peak(size):
        tried.append(size)
        return None if size > 3330 else int((1.0 + 0.04 * size + 2.0 * min(1, size / 200)) * 2**30)

    assert find_batch.search(peak, find_batch.sizes_for(recipe_in(1), 6_552), 0.95 * 140 * 2**30)[0] == 3328
    assert len(tried) <= 7, tried


def test_a_batch_is_no_larger_than_the_images():
    assert find_batch.search(lambda size: size, find_batch.sizes_for(recipe_in(1), 100)) == (100, 100)
    assert find_batch.search(lambda size: size, find_batch.sizes_for(recipe_in(2), 33)) == (32, 32)


@pytest.mark.parametrize(
    "recipe, changes, largest",
    [
        ("cifar10/moco-v2", {}, 8192),  # two keys an image, of a queue of 32,768
        ("cifar10/moco", {}, 4096),
        ("cifar10/squared-contrastive", {"method.bank": 1024}, 1024),
        ("cifar10/swav", {"method.queue": 3840}, 3840),
        ("cifar10/tico", {}, 9984),
    ],
)
def test_only_batches_that_the_method_takes_are_tried(recipe, changes, largest):
    tried = []

    def peak(size):
        tried.append(size)
        return size if size < 10_000 else None

    loaded = load_recipe(recipe, changes)
    assert find_batch.search(peak, find_batch.sizes_for(loaded, 50_000), 12_000)[0] == largest
    for size in tried:
        loaded.method.check_batch(size, size)


def test_too_few_images_for_any_batch_of_the_method():
    with pytest.raises(UserError, match=r"method\.bn_splits 8: 45 images at once are no multiple of 64"):
        find_batch.sizes_for(load_recipe("cifar10/moco"), 45)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that holds 200 images: larger batches run out of memory, those above 150 only while a step is captured."""

    def steps(recipe, source, device):
        if recipe.training.batch_size > 200:
            raise torch.OutOfMemoryError(FULL)
        if recipe.training.batch_size > 150:
            fallbacks.note("captured", FULL)

    fake = {"get_device_properties": lambda device: SimpleNamespace(total_memory=80 * 2**30)}
    fake |= {"max_memory_allocated": lambda device: 2**30, "empty_cache": lambda: None}
    fake |= {"set_per_process_memory_fraction": lambda *_: None, "reset_peak_memory_stats": lambda device: None}
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(find_batch, "_make_steps", steps)


def test_the_batch_that_fits_is_said_with_its_learning_rate_and_changes_nothing(gpu, tiny, capsys):
    settings = tiny | {"data.limit": 300, "optimizer.lr": 0.5, "optimizer.scale_lr": True, "training.batch_size": 128}
    lines = find_batch.largest_batch(load_recipe("demo", settings), GPU)
    assert lines == [
        "the largest batch that fits has 144 images: 1.0 of 80.0 GiB",
        "to use it     training.batch_size=144 (this recipe: 128)",
        "learning rate 0.28125 (this recipe: 0.25), scaled with the batch, as optimizer.scale_lr says; results with "
        "another batch are other results",
    ]
    assert "batch 256: does not fit" in capsys.readouterr().out


def test_all_images_may_fit(gpu, tiny):
    lines = find_batch.largest_batch(load_recipe("demo", tiny), GPU)
    assert lines[0].startswith("the largest batch that fits has 96 images, which is all 96 images")


def test_an_error_that_is_no_lack_of_memory_is_not_taken_for_one(gpu, tiny, monkeypatch):
    def steps(*arguments):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(find_batch, "_make_steps", steps)
    with pytest.raises(RuntimeError, match="mat1"):
        find_batch.largest_batch(load_recipe("demo", tiny), GPU)


def test_steps_are_those_of_training(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    recipe = load_recipe("demo", tiny | {"data.limit": 40, "training.batch_size": 16})
    setup = find_batch.prepare(recipe, CPU)
    find_batch._make_steps(recipe, setup.source, CPU)


def test_without_a_gpu_there_is_nothing_to_find(tiny, monkeypatch):
    monkeypatch.setenv("TICO_DEVICE", "cpu")
    (line,) = start.find_batch("demo", overrides=tiny)
    assert "nothing to find" in line
    monkeypatch.setenv("WORLD_SIZE", "2"), monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="needs a single process"):
        start.find_batch("demo", overrides=tiny)
