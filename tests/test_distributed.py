"""Two processes are one process with the same global batch: loss, gradient, covariance, weights (float64)."""

import os
import shutil
import socket
import subprocess
import sys
import time
from multiprocessing import set_forkserver_preload
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from tico_ssl import embed, evaluate, pretrain
from tico_ssl.classifying.finetune import finetune
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.methods._base import Batch
from tico_ssl.methods.tico import Config, TiCo, TiCoLoss
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.networks.storage import save_backbone
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.checkpoint import read_checkpoint
from tico_ssl.training.online_knn import OnlineKnn
from tico_ssl.training.setup import prepare

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def in_two_processes(function, folder):
    """What function(rank) returns in each of two gloo processes."""
    return in_processes(2, function, folder)


def in_processes(world, function, folder):
    """What function(rank) returns in each of several gloo processes. They are forked from a process that has imported
    torch already, which takes a process seconds."""
    set_forkserver_preload(["test_distributed", "tico_ssl.bench.scaling", "torch.distributed.fsdp", "timm"])
    arguments = (world, function, free_port(), str(folder), dict(os.environ))
    mp.start_processes(_worker, arguments, world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _worker(rank, world, function, port, folder, environment):
    torch.set_num_threads(1)
    os.environ |= environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        torch.save(function(rank), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


class Tiny(nn.Module):
    width = 6

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, images):
        return self.layers(images).flatten(1)


def one_step(method: nn.Module, views, steps: int = 3):
    """A few steps of plain gradient descent; everything that should agree."""
    history = []
    for _ in range(steps):
        output = method(Batch(views, torch.arange(len(views[0]))))
        for parameter in method.parameters():
            parameter.grad = None
        output.loss.backward()
        distributed.average_gradients(method.parameters())
        with torch.no_grad():
            for parameter in method.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
        method.after_step(0.3)
        history.append(distributed.all_mean(output.loss.detach()))
    gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    return {"loss": torch.stack(history), "gradient": gradients, "state": method.state_dict()}


def make(detach: bool, symmetric: bool):
    torch.manual_seed(0)
    settings = Config(hidden=8, dim=5, detach=detach, symmetric=symmetric, ema_start=0.9)
    return TiCo(Tiny(), config=settings).double().train()


def the_views():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(2))


FORMS = {"live": (False, False), "detached": (True, False), "symmetric": (False, True)}


def share(rank):
    mine = slice(4 * rank, 4 * rank + 4)
    views = tuple(view[mine] for view in the_views())
    return {name: one_step(share_statistics(make(*form)), views) for name, form in FORMS.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return in_two_processes(share, tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("form", FORMS)
def test_two_processes_equal_one(both, form):
    alone = one_step(make(*FORMS[form]), the_views())
    for together in (part[form] for part in both):
        torch.testing.assert_close(together["loss"], alone["loss"], rtol=1e-11, atol=1e-12)
        assert together["gradient"].keys() == alone["gradient"].keys()
        for name, gradient in alone["gradient"].items():
            torch.testing.assert_close(together["gradient"][name], gradient, rtol=1e-9, atol=1e-12, msg=name)
        for name, value in alone["state"].items():
            torch.testing.assert_close(together["state"][name], value, rtol=1e-9, atol=1e-12, msg=name)


def local_covariance(rank):
    torch.manual_seed(rank)
    criterion = TiCoLoss(dim=4).double()
    criterion(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64))
    return {"covariance": criterion.covariance}


def test_the_covariance_is_that_of_the_global_batch_on_every_rank(tmp_path):
    one, other = in_two_processes(local_covariance, tmp_path)
    assert torch.equal(one["covariance"], other["covariance"])
    assert float(one["covariance"].trace()) == pytest.approx(0.1, abs=1e-12)


def test_the_same_command_under_torchrun(tmp_path, tiny):
    """The whole path - order, views, SyncBN, covariance, optimiser - in float64, and resumed by one process alone."""
    tiny |= {
        "training.precision": "fp64",
        "optimizer.name": "lars",
        "optimizer.lr": 1.0,
        "optimizer.warmup_epochs": 0.0,
    }
    words = [f"{key}={value}" for key, value in tiny.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command = [*launcher, "-m", "tico_ssl", "pretrain", "demo", *words, "--out", str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("tico on textures") == 1  # one process talks
    assert "2 processes" in finished.stdout
    alone, two = pretrain("demo", out=tmp_path / "one", overrides=tiny), open_run(tmp_path / "two")
    for mine, theirs in zip(alone.metrics(), two.metrics(), strict=True):
        for name in ("loss", "invariance", "contrast", "mean_cosine", "embedding_std", "participation_ratio"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    one, other = (torch.load(run.checkpoint_file, weights_only=True)["method"] for run in (alone, two))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-7, atol=1e-9, msg=name)


def one_image_each(rank):
    with pytest.raises(UserError, match="leaves 1 image per process, BatchNorm needs 2: at least 4"):
        prepare(load_recipe("demo", {"data.limit": 8, "training.batch_size": 2}), torch.device("cpu"))
    return {}


def test_a_batch_of_one_image_per_process_is_refused(tmp_path):
    in_two_processes(one_image_each, tmp_path)


def loaded(rank):
    """The crops of a few steps on a folder of images, as training has them."""
    recipe = load_recipe("demo", {"data.source": os.environ["IMAGES"], "training.batch_size": 4, "training.workers": 1})
    loader = prepare(recipe, torch.device("cpu")).loader
    steps = enumerate(loader.iterate(0, 2 * loader.steps_per_epoch))
    columns = {f"{step} {i}": c.clone() for step, raw in steps for i, c in enumerate((raw.index, *raw.pixels))}
    return {"storage": loader.storage, **columns}


def test_processes_share_decoded_images_on_disk(tmp_path, folder_of_images, monkeypatch):
    monkeypatch.setenv("IMAGES", str(folder_of_images))
    monkeypatch.setenv("TICO_CACHE", str(tmp_path / "cache"))
    parts, alone = in_two_processes(loaded, tmp_path), loaded(0)
    assert ["on disk" in part["storage"] for part in parts] == [True, True]
    assert "12 of 12 there already" in alone["storage"]
    for name in alone.keys() - {"storage"}:
        assert torch.equal(torch.cat([part[name] for part in parts]), alone[name])


def normalised(rank):
    """Half of a batch each, in bf16, as autocast gives it to BatchNorm."""
    norm = share_statistics(nn.Sequential(nn.BatchNorm2d(3)))
    images = the_views()[0][4 * rank : 4 * rank + 4].bfloat16().requires_grad_()
    output = norm(images)
    output.float().square().mul(the_views()[1][4 * rank : 4 * rank + 4].float()).sum().backward()
    return {"output": output.detach(), "gradient": images.grad, **norm.state_dict()}


def test_shared_statistics_of_bf16_are_those_of_one_process(tmp_path):
    norm, images = nn.BatchNorm2d(3), the_views()[0].bfloat16().requires_grad_()
    output = norm(images)
    output.float().square().mul(the_views()[1].float()).sum().backward()
    parts = in_two_processes(normalised, tmp_path)
    assert parts[0]["output"].dtype == torch.bfloat16
    for name, alone in (("output", output.detach()), ("gradient", images.grad)):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), alone, rtol=0.02, atol=0.02)
    for part in parts:
        torch.testing.assert_close(part["0.running_mean"], norm.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(part["0.running_var"], norm.running_var, rtol=1e-4, atol=1e-5)


def test_processes_stop_together_within_seconds(tmp_path, tiny):
    """In bf16, in the middle of a long epoch, without a log step."""
    tiny |= {"training.precision": "bf16", "data.limit": 10_000, "training.batch_size": 4}
    tiny |= {"training.log_every_steps": 100_000}
    words = [f"{key}={value}" for key, value in tiny.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command = [*launcher, "-m", "tico_ssl", "pretrain", "demo", *words, "--out", str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / "two" / "views.png").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()  # torchrun passes it on, and kills after 30 seconds
    asked = time.monotonic()
    out, errors = process.communicate(timeout=60)
    assert "; continue with --resume" in out, errors
    assert time.monotonic() - asked < 25
    step = read_checkpoint(open_run(tmp_path / "two").checkpoint_file)["step"]
    assert 0 < step < 2500
    assert f"stopped after step {step} of 7500" in out


def with_images_of_its_own(rank):
    """What every command that opens images says, of a folder that is another one in the second process."""
    root = Path(os.environ["IMAGES"])
    images, weights = str(root / str(rank)), root / f"{rank}.safetensors"
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16), weights)
    recipe = load_recipe("demo", {"data.source": images, "training.batch_size": 4, "training.workers": 1})
    said = []
    for command in (
        lambda: OnlineKnn.of(recipe, prepare(recipe, torch.device("cpu")).source, torch.device("cpu")),
        lambda: evaluate(weights, "knn", images),
        lambda: embed(weights, images, root / "out.npz"),
        lambda: finetune(weights, images, root / "classifier"),
    ):
        with pytest.raises(UserError) as caught:
            command()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("change", ["fewer", "renamed", "rewritten", "unsplit"])
def test_processes_with_different_images_are_refused(tmp_path, folder_of_images, monkeypatch, change):
    first, second = tmp_path / "0", tmp_path / "1"
    for split in ("train", "test") if change == "unsplit" else ("",):
        shutil.copytree(folder_of_images, first / split, dirs_exist_ok=True)
    shutil.copytree(first, second)
    if change == "fewer":
        (second / "cats" / "1.png").unlink()
    if change == "renamed":
        (second / "cats" / "1.png").rename(second / "cats" / "0.png")
    if change == "rewritten":
        shutil.copy(second / "cats" / "1.png", second / "cats" / "3.png")
    if change == "unsplit":
        shutil.rmtree(second / "test")
    monkeypatch.setenv("IMAGES", str(tmp_path))
    of_one, of_other = in_two_processes(with_images_of_its_own, tmp_path)
    host = socket.gethostname()
    words = f": process 1 (host {host}) does not have the images of process 0 (host {host}): "
    assert all(words in said and "\n" not in said for said in of_one)
    assert [said.partition(words)[2] for said in of_one] == [said.partition(words)[2] for said in of_other]
    wanted = {"fewer": "11 images instead of 12;", "unsplit": "1 split instead of 2;"}
    assert any(wanted.get(change, "other ") in said for said in of_one)


def test_a_batch_that_does_not_divide_is_refused(tmp_path, tiny):
    tiny |= {"training.batch_size": 31}
    words = [f"{key}={value}" for key, value in tiny.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command = [*launcher, "-m", "tico_ssl", "pretrain", "demo", *words, "--out", str(tmp_path / "two")]
    finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert finished.returncode != 0
    assert "training.batch_size 31 is not a multiple of the 2 processes" in finished.stderr
