"""Vision transformers: images of other sizes than in training, drop path, and their recipe."""

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from tico_ssl import load_backbone, pretrain
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.formats.textures import draw_textures
from tico_ssl.methods.byol import BYOL
from tico_ssl.networks import resizing
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.networks.resizing import resized
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime.errors import UserError

SMALL = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
TIMM = BackboneConfig(name="timm/vit_tiny_patch16_224", arguments=SMALL)
TORCHVISION = BackboneConfig(name="torchvision/vit_b_16")
NARROW = BackboneConfig(name="tico/resnet10-w4")


@pytest.fixture(scope="module")
def images():
    return draw_textures(4, 32, seed=0)[0]


@pytest.fixture
def narrow_vit(monkeypatch):
    """torchvision's smallest transformer has 86 million weights: another of its kind takes its place."""

    def build(config, size):
        network = VisionTransformer(size, 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)
        network.heads = nn.Identity()
        return network

    monkeypatch.setattr(resizing, "build_network", build)
    torch.manual_seed(0)
    return Backbone(build(TORCHVISION, 32), TORCHVISION, 32).eval()


def stored(tmp_path, config, size=32):
    torch.manual_seed(0)
    file = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone(config, size), file)
    return file


def features(backbone, images):
    with torch.no_grad():
        return backbone(backbone.preprocess(list(images)))


@pytest.mark.parametrize("config", [TIMM, NARROW])
def test_the_size_of_training_changes_nothing(tmp_path, images, config):
    file = stored(tmp_path, config)
    assert torch.equal(features(load_backbone(file), images), features(load_backbone(file, image_size=32), images))


@pytest.mark.parametrize("config", [TIMM, NARROW])
def test_another_size_is_the_same_network_and_can_be_saved_again(tmp_path, images, config):
    file = stored(tmp_path, config)
    here, larger = load_backbone(file), load_backbone(file, image_size=64)
    for name, value in here.network.state_dict().items():
        if "pos_embed" not in name:
            assert torch.equal(value, larger.network.state_dict()[name]), name
    found = features(larger, images)
    assert (found.shape, larger.image_size) == ((4, here.width), 64)
    cosines = torch.cosine_similarity(found, features(here, images))
    assert not torch.equal(found, features(here, images)) and cosines.min() > 0.8
    save_backbone(larger, tmp_path / "larger.safetensors")
    assert torch.equal(features(load_backbone(tmp_path / "larger.safetensors"), images), found)


RAMP = torch.linspace(-1, 1, 4).view(4, 1, 1).expand(4, 4, 16).reshape(1, 16, 16)


def assert_ramp(embedding):
    """A ramp over the rows stays a ramp between the same ends; the class token keeps its own."""
    assert (embedding[:, 0] == 7).all()
    rows = embedding[:, 1:].view(8, 8, 16)
    assert (rows.diff(dim=0) > 0).all() and rows.abs().max() < 1.15  # bicubic, which overshoots at the edges
    assert torch.allclose(rows, rows[:, :1].expand_as(rows), atol=1e-5)


def test_interpolated_positions_are_smooth(narrow_vit):
    theirs = build_backbone(TIMM, 32)
    for backbone, name in ((theirs, "pos_embed"), (narrow_vit, "encoder.pos_embedding")):
        backbone.network.get_parameter(name).data.copy_(torch.cat([torch.full((1, 1, 16), 7.0), RAMP], dim=1))
        assert_ramp(resized(backbone, 64).network.get_parameter(name))


def test_torchvisions_transformers_take_other_sizes(narrow_vit, images):
    assert resized(narrow_vit, 32) is narrow_vit
    here, there = features(narrow_vit, images), features(resized(narrow_vit, 64), images)
    assert torch.cosine_similarity(here, there).min() > 0.8
    with pytest.raises(UserError, match="'torchvision/vit_b_16' does not take images of 36 pixels"):
        resized(narrow_vit, 36)


def test_drop_path_reaches_the_online_network_and_not_its_target():
    dropping = TIMM.model_copy(update={"arguments": SMALL | {"drop_path_rate": 0.5}})
    method = BYOL(build_backbone(dropping, 16)).train()
    rates = [module.drop_prob for module in method.backbone.modules() if type(module).__name__ == "DropPath"]
    assert max(rates) == 0.5
    views = torch.randn(8, 3, 16, 16)
    assert not torch.equal(method.backbone(views), method.backbone(views))
    assert torch.equal(method.target[0](views), method.target[0](views))


def test_the_recipe_trains(tmp_path):
    settings = {
        "data.limit": 16,
        "data.image_size": 16,
        "backbone.arguments.embed_dim": 16,
        "backbone.arguments.depth": 2,
        "backbone.arguments.num_heads": 2,
        "method.hidden": 16,
        "method.dim": 8,
        "training.batch_size": 8,
        "training.epochs": 1,
        "training.log_every_steps": 1,
        "training.knn_every_epochs": 0,
    }
    run = pretrain("photos-vit", data="textures", out=tmp_path / "run", overrides=settings)
    recipe = run.recipe()
    assert (recipe.optimizer.name, recipe.training.clip_gradient) == ("adamw", 3.0)
    assert recipe.backbone.arguments["drop_path_rate"] == 0.1
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert load_backbone(run.folder, image_size=24).width == 16
