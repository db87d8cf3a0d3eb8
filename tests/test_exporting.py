"""Exports: the file and the printed lines give, in the other library alone, the features that were trained."""

import pytest
import torch
import torchvision
from torch import nn

from tico_ssl import export, load_backbone
from tico_ssl.config import catalogue
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.exporting._writing import export_with_snippet
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime.errors import UserError


def saved(folder, name: str, image_size: int = 32, **settings):
    """A backbone on disk whose parameters and statistics have all left their initial values."""
    torch.manual_seed(0)
    channels = settings.get("channels", 3)
    config = BackboneConfig(name=name, **settings)
    backbone = build_backbone(config, image_size, (0.5,) * channels, (0.2,) * channels)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        backbone(torch.randn(4, channels, image_size, image_size))
    path = folder / "backbone.safetensors"
    save_backbone(backbone, path)
    return path


def model_of(snippet: str) -> nn.Module:
    """What a reader gets who pastes the lines."""
    names: dict = {}
    exec(snippet, names)
    return names["model"]


def without_classifier(model: nn.Module) -> nn.Module:
    name, last = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    assert last.out_features == 1000
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())
    return model


def assert_same_features(model: nn.Module, path) -> None:
    backbone = load_backbone(path)
    images = torch.randn(3, backbone.config.channels, backbone.image_size, backbone.image_size)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), backbone(images))


@pytest.mark.parametrize(
    ("name", "image_size", "settings"),
    [
        ("resnet18", 32, {}),
        ("resnet18", 96, {}),
        ("resnet18", 96, {"stem": "small"}),
        ("resnet18", 32, {"stem_padding": 2}),
        ("resnet18", 32, {"weight_standardisation": True}),
        ("resnet18", 32, {"channels": 4}),
        ("resnet18", 96, {"channels": 1}),
        ("mobilenet_v3_small", 32, {}),
        ("mobilenet_v3_small", 32, {"arguments": {"width_mult": 0.5}}),
        ("vit_b_16", 32, {}),
    ],
)
def test_torchvision(tmp_path, name, image_size, settings):
    path = saved(tmp_path, f"torchvision/{name}", image_size, **settings)
    snippet = export_with_snippet(path, "torchvision", tmp_path / "out" / "b.pth")
    assert_same_features(without_classifier(model_of(snippet)), path)


def test_torchvision_by_hand(tmp_path):
    """No line of ours: a plain ResNet takes the file."""
    path = saved(tmp_path, "torchvision/resnet18", 96, weight_standardisation=True)
    assert export(path, "torchvision", tmp_path / "b.pth") == tmp_path / "b.pth"
    model = torchvision.models.resnet18()
    missing, unexpected = model.load_state_dict(torch.load(tmp_path / "b.pth", weights_only=True), strict=False)
    assert sorted(missing) == ["fc.bias", "fc.weight"]
    assert unexpected == []
    assert_same_features(without_classifier(model), path)


@pytest.mark.parametrize(
    ("name", "image_size", "settings"),
    [
        ("resnet18", 32, {}),
        ("resnet18", 96, {"channels": 1}),
        ("resnet18", 32, {"channels": 4, "weight_standardisation": True}),
        ("convnext_atto", 32, {}),
        ("vit_tiny_patch16_224", 224, {"arguments": {"depth": 1}}),
        ("vit_tiny_patch16_224", 32, {"arguments": {"depth": 1, "patch_size": 8}}),
        ("vit_tiny_patch16_224", 32, {"arguments": {"depth": 1, "img_size": 32}}),
    ],
)
def test_timm(tmp_path, name, image_size, settings):
    path = saved(tmp_path, f"timm/{name}", image_size, **settings)
    snippet = export_with_snippet(path, "timm", tmp_path / "out" / "b.pth")
    assert_same_features(model_of(snippet), path)


def test_odd_file_names(tmp_path):
    path = saved(tmp_path, "timm/resnet18")
    snippet = export_with_snippet(path, "timm", tmp_path / 'it\'s a "model" ü' / "b.pth")
    assert_same_features(model_of(snippet), path)


@pytest.mark.parametrize(
    ("name", "format"),
    [("timm/resnet18", "torchvision"), ("torchvision/resnet18", "timm"), ("tico/resnet10-w4", "torchvision")],
)
def test_the_wrong_library_is_refused(tmp_path, name, format):
    path = saved(tmp_path, name)
    with pytest.raises(UserError) as caught:
        export(path, format, tmp_path / "b.pth")
    assert name in str(caught.value)
    assert format in str(caught.value)
    assert not (tmp_path / "b.pth").exists()


def test_an_unknown_format_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"'torchvison'.*did you mean 'torchvision'"):
        export(tmp_path, "torchvison", tmp_path / "b.pth")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["os.path", ".onnx", "nowhere.onnx"])
def test_a_format_elsewhere_that_is_none_is_one_line(tmp_path, format):
    path = saved(tmp_path, "tico/resnet10-w4")
    with pytest.raises(UserError) as caught:
        export(path, format, tmp_path / "b.pth")
    assert format in str(caught.value)


def test_every_format_says_what_it_is():
    assert {"timm", "torchvision"} <= set(catalogue.entries("exporting"))
    for name in catalogue.entries("exporting"):
        module = catalogue.load("exporting", name)
        assert catalogue.summary("exporting", name)
        assert callable(module.write)
