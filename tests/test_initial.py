"""Weights that a backbone starts from, of any origin; and runs that are trained longer."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from tico_ssl import load_backbone, pretrain
from tico_ssl.cli import app
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.foreign import fitted_kernel, match, read_tensors, start_from
from tico_ssl.networks.initial import initial_weights
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.initial import Start
from tico_ssl.training.plan import Plan
from tico_ssl.training.setup import build_method

CPU = torch.device("cpu")


def narrow(seed=0, **settings):
    """A narrow ResNet with other weights than any recipe's."""
    torch.manual_seed(seed)
    config = BackboneConfig(name="tico/resnet10-w4", **settings)
    channels = config.channels
    backbone = build_backbone(config, 16, (0.5,) * channels, (0.25,) * channels)
    with torch.no_grad():
        for value in backbone.network.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.rand_like(value))
    return backbone


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


def under(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def numbered(network):
    """As lightly names it: a sequence of the network's parts."""
    return nn.Sequential(*network.children()).state_dict()


HEAD = {"head.0.weight": torch.zeros(3, 3), "queue": torch.zeros(4)}
FORMS = {
    "torchvision or timm": lambda state, network: state | {"fc.weight": torch.zeros(10, 32)},
    "DDP": lambda state, network: {"model": under("module.", state)},
    "MoCo": lambda state, network: {
        "state_dict": under("module.encoder_k.", torch.utils._pytree.tree_map(torch.zeros_like, state))
        | under("module.encoder_q.", state)
        | HEAD,
        "epoch": 200,
    },
    "DINO": lambda state, network: {"student": {}, "teacher": under("module.backbone.", state) | HEAD},
    "solo-learn": lambda state, network: {
        "state_dict": under("momentum_backbone.", torch.utils._pytree.tree_map(torch.zeros_like, state))
        | under("backbone.", state)
        | under("projector.", HEAD)
    },
    "lightly": lambda state, network: {"state_dict": under("backbone.", numbered(network)) | HEAD},
    "VISSL": lambda state, network: {
        "classy_state_dict": {"base_model": {"model": {"trunk": under("_feature_blocks.", state), "heads": HEAD}}}
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_of_other_programs(form, tmp_path):
    theirs, ours = narrow(), narrow(1)
    path = tmp_path / "checkpoint.pth"
    torch.save(FORMS[form](theirs.network.state_dict(), theirs.network), path)
    lines = initial_weights(str(path)).load(ours)
    assert same(theirs.network.state_dict(), ours.network.state_dict())
    total = len(theirs.network.state_dict())
    assert lines[0] == f"initial weights: {path}" and f"loaded    {total} of {total} tensors" in lines[1]
    assert ("ignored" in lines[-1]) == (form != "DDP" and form != "VISSL")


def test_public_weights_of_torchvision_by_name(tmp_path, monkeypatch):
    """From where torch keeps downloads, so without a network."""
    from torchvision import models

    config = BackboneConfig(name="torchvision/shufflenet_v2_x0_5", stem="standard", zero_gamma=False)
    source = models.shufflenet_v2_x0_5()
    url = models.ShuffleNet_V2_X0_5_Weights.DEFAULT.url
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(source.state_dict(), tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    ours = build_backbone(config, 32, (0.5,) * 3, (0.5,) * 3)
    lines = initial_weights("torchvision/shufflenet_v2_x0_5").load(ours)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in ours.network.state_dict().items())
    assert "IMAGENET1K_V1" in lines[0]
    assert "trained with data.mean=[0.485, 0.456, 0.406] data.std=[0.229, 0.224, 0.225]" in lines[-1]
    with pytest.raises(UserError, match=r"the weights of shufflenet_v2_x0_5 are IMAGENET1K_V1, DEFAULT"):
        initial_weights("torchvision/shufflenet_v2_x0_5:V3")


def test_public_weights_of_timm_by_name(monkeypatch):
    import timm

    source = timm.create_model("test_resnet")
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: source if pretrained else None)
    given = initial_weights("timm/test_resnet")
    assert same(given.tensors, source.state_dict()) and given.mean == tuple(source.pretrained_cfg["mean"])

    def fail(name, pretrained):
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(
        UserError,
        match=r"cannot be had from timm \(no route to host\); without a network, give a file of them with init=",
    ):
        initial_weights("timm/test_resnet")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.pth", "neither a file, nor a run folder"),
        ("tico/resnet10-w4", "neither a file, nor a run folder"),
        ("torchvision/resnet19", "torchvision has no model 'resnet19'"),
        ("timm/resnet19", "timm has no model 'resnet19'"),
    ],
)
def test_what_does_not_exist_is_one_line(source, said):
    with pytest.raises(UserError, match=said) as refused:
        initial_weights(source)
    assert "\n" not in str(refused.value)


def test_weights_are_not_waited_for(tmp_path):
    """A pipe that nobody writes to is refused, not opened."""
    os.mkfifo(tmp_path / "x.pth")
    with pytest.raises(UserError, match="neither a regular file nor a folder"):
        initial_weights(str(tmp_path / "x.pth"))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({1: torch.zeros(3)}, "no named tensors"),
        ({"a": torch.zeros(3).to_sparse()}, "sparse"),
        ({"a": torch.zeros(3, device="meta")}, "without values"),
        ({"a": torch.zeros(3, dtype=torch.complex64)}, "complex"),
    ],
)
def test_tensors_that_are_no_weights_are_one_line(tmp_path, tensors, said):
    torch.save(tensors, tmp_path / "x.pth")
    with pytest.raises(UserError, match=said):
        read_tensors(tmp_path / "x.pth")


def test_a_mismatch_is_an_error_unless_it_may_be(tmp_path):
    theirs, ours = narrow(), narrow(1)
    state = theirs.network.state_dict()
    del state["bn1.weight"]
    state["layer1.0.conv1.weight"] = torch.zeros(9, 9, 3, 3)
    with pytest.raises(UserError, match=r"w4: 'layer1.0.conv1.weight' is 9x9x3x3 and must be .* 1 more"):
        start_from(ours, state, "x.pth")
    before = copy.deepcopy(ours.network.state_dict())
    result = start_from(ours, state, "x.pth", strict=False)
    assert result.missing == ["bn1.weight"] and list(result.unfit) == ["layer1.0.conv1.weight"]
    for name, value in ours.network.state_dict().items():
        kept = name in ("bn1.weight", "layer1.0.conv1.weight")
        assert torch.equal(value, before[name] if kept else theirs.network.state_dict()[name])
    with pytest.raises(UserError, match=r"has no weights of tico/resnet10-w4; its tensors are head.\*, queue"):
        start_from(ours, HEAD, "x.pth", strict=False)


@pytest.mark.parametrize("channels", [1, 2, 4, 6, 13])
def test_equal_channels_give_what_they_gave(channels):
    torch.manual_seed(0)
    kernel, grey = torch.randn(5, 3, 3, 3, dtype=torch.float64), torch.rand(2, 1, 8, 8, dtype=torch.float64)
    expected = F.conv2d(grey.expand(-1, 3, -1, -1), kernel)
    found = F.conv2d(grey.expand(-1, channels, -1, -1), fitted_kernel(kernel, channels, 3, 3))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("before", "after"), [(3, 6), (3, 9), (4, 8)])
def test_an_enlarged_image_gives_what_it_gave_to_an_enlarged_kernel(before, after):
    torch.manual_seed(0)
    factor = after // before
    kernel, image = torch.randn(2, 3, before, before).double(), torch.rand(1, 3, 9, 9).double()
    large = image.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    enlarged = fitted_kernel(kernel, 3, after, after)
    torch.testing.assert_close(F.conv2d(large, enlarged, stride=factor), F.conv2d(image, kernel))
    torch.testing.assert_close(fitted_kernel(enlarged, 3, before, before), kernel)


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_the_sum_of_a_kernel_stays(size):
    kernel = torch.randn(4, 3, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(fitted_kernel(kernel, 3, size, size).sum((2, 3)), kernel.sum((2, 3)))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_small_stems_and_other_channels_are_adapted(channels):
    large = build_backbone(BackboneConfig(name="torchvision/resnet18", stem="standard"), 64)
    ours = build_backbone(
        BackboneConfig(name="torchvision/resnet18", stem="small", channels=channels),
        32,
        (0.5,) * channels,
        (0.5,) * channels,
    )
    result = match(ours.network, large.network.state_dict())
    shape = ours.network.conv1.weight.shape
    assert result.whole and list(result.adapted) == ["conv1.weight"]
    assert result.found["conv1.weight"].shape == shape
    assert ("taps summed" in result.adapted["conv1.weight"]) and ("channels" in result.adapted["conv1.weight"]) == (
        channels != 3
    )
    strict = match(ours.network, large.network.state_dict(), adapt=False)
    assert list(strict.unfit) == ["conv1.weight"]


def transformer(library, size):
    if library == "timm":
        return build_backbone(BackboneConfig(name="timm/test_vit"), size).network
    from torchvision.models import VisionTransformer

    return VisionTransformer(size, 16, num_layers=1, num_heads=2, hidden_dim=12, mlp_dim=8)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_position_embeddings_fit_other_image_sizes(library, extra=1):
    """Those of a plane stay a plane away from its edges, and those of other tokens stay what they are."""
    theirs, ours = (transformer(library, size) for size in (64, 128))
    state = theirs.state_dict()
    key = next(key for key in state if "pos_embed" in key)
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    state[key][0, extra:, 0], state[key][0, extra:, 1] = rows.flatten(), columns.flatten()
    result = match(ours, state)
    assert result.whole and "position embeddings interpolated" in result.adapted[key]
    found = result.found[key]
    assert torch.equal(found[0, :extra], state[key][0, :extra])
    grid = found[0, extra:].unflatten(0, (8, 8))
    inner = (torch.arange(8) + 0.5) / 2 - 0.5
    torch.testing.assert_close(grid[4, 3:5, 1], inner[3:5])
    torch.testing.assert_close(grid[3:5, 4, 0], inner[3:5])
    assert not match(theirs, state).adapted


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "theirs.pth"
    torch.save(narrow().network.state_dict(), path)
    return path


class TestRuns:
    def test_online_and_target_start_from_them(self, weights, tiny, tmp_path):
        recipe = load_recipe("demo", tiny | {"training.init": str(weights)})
        method = build_method(recipe, CPU, torch.float32, start=Start.of(recipe, Run(tmp_path)))
        expected = narrow().network.state_dict()
        assert same(method.backbone.network.state_dict(), expected)
        assert same(method.target[0].network.state_dict(), expected)

    def test_a_resumed_state_wins(self, weights, tiny, tmp_path):
        """Also where what it started from is gone; and a run that is stopped at once starts from the same."""
        once = pretrain("demo", out=tmp_path / "once", overrides=tiny, init=weights)
        assert same(load_backbone(once.initial_file).network.state_dict(), narrow().network.state_dict())
        assert "initial weights: " in (once.folder / "train.log").read_text()
        moved = tmp_path / "moved.pth"
        torch.save(torch.load(weights), moved)
        settings = tiny | {"training.init": str(moved)}
        twice = tmp_path / "twice"
        pretrain("demo", out=twice, overrides=settings | {"training.epochs": 3})
        (twice / "checkpoints" / "last.pt").unlink()  # as if it had been killed before the first
        moved.unlink()
        pretrain("demo", out=twice, overrides=settings, resume=True)
        assert same(load_backbone(twice).network.state_dict(), load_backbone(once.folder).network.state_dict())
        Run(twice).initial_file.write_bytes(b"damaged")
        pretrain("demo", out=twice, overrides=settings, resume=True)  # complete: nothing to train, and nothing read
        with pytest.raises(UserError, match=r"cannot be resumed with another recipe: training\.init was"):
            pretrain("demo", out=twice, overrides=tiny, resume=True)

    def test_from_a_run_and_by_the_command_line(self, tiny, tmp_path):
        first = pretrain("demo", out=tmp_path / "first", overrides=tiny | {"training.epochs": 1})
        words = [f"{key}={value}" for key, value in (tiny | {"training.epochs": 1, "backbone.channels": 3}).items()]
        second = tmp_path / "second"
        options = ["--init", str(first.folder), "--init-strict=false", "--out", str(second)]
        done = CliRunner().invoke(app, ["pretrain", "demo", *words, *options])
        assert done.exit_code == 0, done.output
        started = load_backbone(Run(second).initial_file).network.state_dict()
        assert same(started, load_backbone(first.folder).network.state_dict())
        assert Run(second).recipe().training.init_strict is False
        assert "loaded" in done.output

    def test_replacing_a_run_forgets_what_it_started_from(self, weights, tiny, tmp_path):
        other = tmp_path / "other.pth"
        torch.save(narrow(5).network.state_dict(), other)
        settings = tiny | {"training.epochs": 1}
        pretrain("demo", out=tmp_path / "run", overrides=settings, init=weights)
        run = pretrain("demo", out=tmp_path / "run", overrides=settings, init=other, overwrite=True)
        assert same(load_backbone(run.initial_file).network.state_dict(), narrow(5).network.state_dict())
        run = pretrain("demo", out=tmp_path / "run", overrides=settings, overwrite=True)
        assert not run.initial_file.exists()


def test_a_finished_run_is_trained_longer(tiny, tmp_path):
    """By the schedule of the longer run from where it is."""
    longer = tiny | {"training.epochs": 5}
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny)
    before = len(run.metrics())
    pretrain("demo", out=run.folder, overrides=longer, resume=True)
    assert run.recipe().training.epochs == 5
    assert "5 epochs instead of 3: from here on with their learning rates" in (run.folder / "train.log").read_text()
    new, plan = [line for line in run.metrics()[before:] if "lr" in line], Plan.of(load_recipe("demo", longer), 3)
    assert [line["lr"] for line in new] == [plan.lr(step) for step in range(9, 15)]
    assert [line["step"] for line in new] == list(range(10, 16))
    with pytest.raises(UserError, match=r"training\.epochs was 5, is 3"):
        pretrain("demo", out=run.folder, overrides=tiny, resume=True)


def test_a_checkpoint_that_contains_itself_is_read_in_finite_time(tmp_path):
    state = {"conv1.weight": torch.zeros(1)}
    state["state_dict"] = state
    torch.save(state, tmp_path / "loop.pth")
    assert list(read_tensors(tmp_path / "loop.pth")) == ["conv1.weight"]
