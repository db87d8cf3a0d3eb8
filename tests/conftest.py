"""What many tests need: small recipes, small folders of images."""

import os
from contextlib import contextmanager

os.environ["OMP_NUM_THREADS"] = "1"  # small tensors gain nothing from threads, and subprocesses inherit this

import pytest
import torch
from hypothesis import settings
from PIL import Image

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are then run by an interpreter; read when they are imported

from tico_ssl import pretrain
from tiny import TINY

# Where a failure stops others' work, the same inputs every time; elsewhere new ones, which may find something.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    """Decoded images of tests stay out of the user's cache."""
    os.environ["TICO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tiny() -> dict:
    """Overrides that make the demo recipe a matter of seconds, and its arithmetic exact to compare."""
    return dict(TINY)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run, trained for an epoch, of a module's own: evaluations write into its folder."""
    settings = {
        "data.limit": 300,
        "data.image_size": 16,
        "backbone.name": "tico/resnet10-w4",
        "method.hidden": 32,
        "method.dim": 16,
        "training.batch_size": 50,
        "training.epochs": 1,
        "training.knn_every_epochs": 0,
    }
    return pretrain("demo", out=tmp_path_factory.mktemp("runs") / "run", overrides=settings)


@pytest.fixture
def folder_of_images(tmp_path):
    """Twelve images of different sizes in two class folders."""
    root = tmp_path / "images"
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        height, width = (int(side) for side in torch.randint(20, 50, (2,), generator=generator))
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
        path = root / ("cats" if number % 2 else "dogs") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(path)
    return root


@pytest.fixture
def full_disk():
    """`with full_disk(room)`: a file grows to so many bytes and no further. The system's answer is that of a full disk
    but for its words (Python ignores the signal)."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(room: int = 0):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
