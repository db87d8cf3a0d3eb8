"""Exports: the file and the printed lines give, in the other library alone, the features that were trained."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.models.convnext import CNBlockConfig

import other_libraries
from tico_ssl import export, load_backbone
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import dump_recipe, load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.exporting import _agreement, _writing
from tico_ssl.exporting._counterparts import timm_names
from tico_ssl.exporting._writing import export_with_snippet
from tico_ssl.exporting.detectron2 import detectron2_name
from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.results.run_folder import Run, create_run
from tico_ssl.runtime.errors import UserError, one_line
from tico_ssl.runtime.extras import install_command
from tico_ssl.runtime.json_lines import append_json_line
from tico_ssl.training.checkpoint import save_checkpoint
from tico_ssl.training.setup import build_method
from tiny import TINY

FORMATS = {"detectron2", "huggingface", "onnx", "safetensors", "timm", "torch-export", "torchvision"}


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


def model_names(snippet: str) -> dict:
    """What a reader gets who pastes the lines."""
    names: dict = {}
    exec(snippet, names)
    return names


def model_of(snippet: str) -> nn.Module:
    return model_names(snippet)["model"]


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
    ],
)
def test_torchvision(tmp_path, name, image_size, settings):
    path = saved(tmp_path, f"torchvision/{name}", image_size, **settings)
    snippet = export_with_snippet(path, "torchvision", tmp_path / "out" / "b.pth")
    assert_same_features(model_of(snippet), path)


def test_torchvision_by_hand(tmp_path):
    """No line of ours: a plain ResNet takes the file."""
    path = saved(tmp_path, "torchvision/resnet18", 96, weight_standardisation=True)
    assert export(path, "torchvision", tmp_path / "b.pth") == tmp_path / "b.pth"
    model = torchvision.models.resnet18()
    missing, unexpected = model.load_state_dict(torch.load(tmp_path / "b.pth", weights_only=True), strict=False)
    assert sorted(missing) == ["fc.bias", "fc.weight"]
    assert unexpected == []
    assert_same_features(other_libraries.without_classifier(model), path)


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
    [
        ("timm/test_vit", "torchvision"),
        ("torchvision/mobilenet_v3_small", "timm"),
        ("torchvision/mobilenet_v3_small", "huggingface"),
        ("tico/resnet10-w4", "torchvision"),
        ("timm/test_vit", "detectron2"),
    ],
)
def test_a_network_that_the_library_does_not_have_is_refused(tmp_path, name, format):
    path = saved(tmp_path, name)
    with pytest.raises(UserError) as caught:
        export(path, format, tmp_path / "b.pth")
    assert name in str(caught.value)
    assert format in str(caught.value) or format == "huggingface"
    assert "torch-export can take it" in str(caught.value)
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
    assert set(catalogue.entries("exporting")) == FORMATS
    for name in catalogue.entries("exporting"):
        module = catalogue.load("exporting", name)
        assert catalogue.summary("exporting", name)
        assert callable(module.write)


# ----------------------------------------------------------------------------------- in a program without this package

RESNET18 = ("torchvision/resnet18", {"stem": "standard"})  # that of the documentation's lines
OF_FOUR = ("torchvision/resnet18", {"stem": "standard", "channels": 4})
RESNET50 = ("torchvision/resnet50", {"stem": "standard"})
VIT = ("timm/test_vit", {"channels": 1, "arguments": {"depth": 1}})
CONVNEXT = ("timm/test_convnext", {"arguments": {"depths": [1, 1, 1, 1]}})
NARROW = ("tico/resnet10-w4", {"channels": 4, "weight_standardisation": True})
CASES = [
    ("timm", RESNET18, "outside"),
    ("timm", RESNET50, "outside"),
    ("detectron2", OF_FOUR, "outside"),
    ("huggingface", OF_FOUR, "outside"),
    ("safetensors", RESNET50, "outside"),
    ("torchvision", ("timm/resnet18", {"stem": "standard"}), "outside"),
    ("torch-export", CONVNEXT, "inside-float"),
    ("onnx", VIT, "inside"),
    ("huggingface", VIT, "outside"),
    ("timm", CONVNEXT, "outside"),
    ("onnx", NARROW, "outside"),
    ("safetensors", NARROW, "outside"),
]
FILES = {  # as the lines in the documentation name them
    "detectron2": "backbone.pkl",
    "huggingface": "backbone-huggingface",
    "onnx": "backbone.onnx",
    "safetensors": "backbone.safetensors",
    "timm": "backbone-timm.pth",
    "torch-export": "backbone.pt2",
    "torchvision": "backbone-torchvision.pth",
}
DOCUMENTATION = Path(__file__).parents[1] / "docs" / "exporting.md"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Expected features, and those of one program that runs the lines of every export, by case."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("exports")
    given, expected, files = {}, {}, {}
    photo, smooth = folder / "photo.png", torch.randint(0, 256, (6, 8, 3), dtype=torch.uint8)
    Image.fromarray(smooth.numpy()).resize((90, 70), Image.Resampling.BICUBIC).save(photo)
    for number, (format, (name, settings), preprocessing) in enumerate(CASES):
        network = f"{name} {settings}"
        if network not in files:
            files[network] = saved(folder / f"network-{number}", name, **settings)
        first = all(format != earlier for earlier, *_ in CASES[:number])
        out = folder / ("documented" if first else str(number)) / FILES[format]
        snippet = export_with_snippet(files[network], format, out, preprocessing=preprocessing)
        backbone = load_backbone(files[network])
        pixels = torch.randint(0, 256, (3, backbone.config.channels, 32, 32), dtype=torch.uint8)
        normalised = (pixels / 255 - 0.5) / 0.2
        taken = {"inside": pixels, "inside-float": pixels / 255, "outside": normalised}[preprocessing]
        given[number] = (snippet, pixels.float() if format == "detectron2" else taken, str(photo))
        with torch.no_grad():
            channels = backbone.config.channels
            expected[number] = backbone(normalised), backbone(backbone.preprocess(photo)) if channels < 4 else None
        if (format, name) == ("safetensors", NARROW[0]):  # a network that no other library has
            expected[number] = backbone.network.state_dict()["layer4.0.conv2.weight"], None
    torch.save(given, folder / "given")
    program = [sys.executable, other_libraries.__file__, folder / "given", folder / "found", DOCUMENTATION]
    alone = {"env": os.environ | {"PYTHONPATH": ""}, "cwd": folder / "documented"}
    done = subprocess.run(program, capture_output=True, text=True, **alone)
    assert done.returncode == 0, done.stderr
    return expected, torch.load(folder / "found")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{format} {network[0]}" for format, network, _ in CASES])
def test_the_library_alone_gives_the_same_features(elsewhere, number):
    expected, found = elsewhere
    torch.testing.assert_close(found[number][0], expected[number][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{format} {network[0]}" for format, network, _ in CASES])
def test_the_printed_lines_prepare_a_photo_as_evaluations_do(elsewhere, number):
    (_, expected), (_, found) = (some[number] for some in elsewhere)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert nn.functional.cosine_similarity(expected, found).item() > 0.9999


def test_where_pillow_cannot_open_images_a_comment_says_what_to_do(tmp_path):
    deep = build_backbone(BackboneConfig(name="torchvision/resnet18"), 32, limits=(0.0, 4095.0))
    save_backbone(deep, tmp_path / "deep.safetensors")
    for format in ("timm", "safetensors"):
        snippet = export_with_snippet(tmp_path / "deep.safetensors", format, tmp_path / f"b.{format}")
        assert "preprocess" not in model_names(snippet)
        assert "values mapped from [0.0, 4095.0] to 0 to 255" in snippet


# ------------------------------------------------------------------------------------------- what travels with a file


def test_a_safetensors_export_is_a_backbone_file(tmp_path):
    path = saved(tmp_path, "tico/resnet10-w4", channels=4)
    export(path, "safetensors", tmp_path / "b.safetensors")
    assert_same_features(load_backbone(tmp_path / "b.safetensors"), path)


def test_a_graph_says_what_it_takes(tmp_path):
    path = saved(tmp_path, "tico/resnet10-w4", 16)
    snippet = export_with_snippet(path, "torch-export", tmp_path / "b.pt2")
    names: dict = {}
    exec(snippet, names)
    assert names["features"].shape == (1, 32)
    about = {key: json.loads(value) for key, value in names["about"].items()}
    assert about["input_size"] == [3, 16, 16]
    assert (about["mean"], about["std"]) == ([0.5] * 3, [0.2] * 3)
    assert (about["architecture"], about["preprocessing"]) == ("tico/resnet10-w4", "outside")


def test_lines_name_the_normalisation_where_the_file_cannot(tmp_path):
    path = saved(tmp_path, "torchvision/resnet18", stem="standard")
    for format, unit in (("torchvision", 1), ("timm", 1), ("detectron2", 255)):
        snippet = export_with_snippet(path, format, tmp_path / format)
        assert str([0.5 * unit] * 3) in snippet
        assert str([0.2 * unit] * 3) in snippet


def test_a_graph_with_other_features_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(_agreement, "TOLERANCE", -1.0)
    path = saved(tmp_path, "tico/resnet10-w4", 16)
    with pytest.raises(UserError, match=r"other features.*largest difference.*tolerance"):
        export(path, "torch-export", tmp_path / "b.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["backbone.safetensors"]


def test_a_graph_that_finds_no_room_is_an_error_of_the_system(tmp_path, full_disk):
    path = saved(tmp_path, "tico/resnet10-w4", 16)
    with full_disk(1000), pytest.raises(OSError) as caught:  # torch, given the file, ends the process
        export(path, "torch-export", tmp_path / "b.pt2")
    assert one_line(caught.value) == f"{tmp_path / 'b.pt2'}: File too large"
    assert [file.name for file in tmp_path.iterdir()] == ["backbone.safetensors"]


# -------------------------------------------------------------------------------------------------- names of parameters


def test_names_of_a_bottleneck_in_detectron2():
    renamed = {
        "conv1.weight": "stem.conv1.weight",
        "bn1.running_mean": "stem.conv1.norm.running_mean",
        "layer1.0.conv3.weight": "res2.0.conv3.weight",
        "layer3.10.bn2.bias": "res4.10.conv2.norm.bias",
        "layer4.0.downsample.0.weight": "res5.0.shortcut.weight",
        "layer4.0.downsample.1.running_var": "res5.0.shortcut.norm.running_var",
    }
    assert {name: detectron2_name(name) for name in renamed} == renamed


def assert_timm_takes(theirs: nn.Module, ours: nn.Module, model: str) -> None:
    """Weights of torchvision's network, renamed, make timm's the same function."""
    state = ours.state_dict()
    with torch.no_grad():
        for value in state.values():
            value.add_(torch.randn_like(value) * 0.1)
    names, wanted = timm_names(model, state), theirs.state_dict()
    theirs.load_state_dict({names[name]: value.view(wanted[names[name]].shape) for name, value in state.items()})
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(images), ours.eval()(images), rtol=1e-4, atol=1e-4)


def test_transformers_have_other_names_and_the_same_function():
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 64}
    ours = torchvision.models.VisionTransformer(32, 8, **sizes)
    ours.heads = nn.Identity()
    same = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 0, "img_size": 32, "patch_size": 8}
    assert_timm_takes(timm.models.VisionTransformer(**same), ours, "vit_b_16")


def test_convnexts_have_other_names_and_the_same_function():
    widths, depths = (8, 16, 24, 32), (1, 1, 2, 1)
    stages = [CNBlockConfig(*sizes) for sizes in zip(widths, (*widths[1:], None), depths)]
    ours = torchvision.models.ConvNeXt(stages)
    ours.classifier[2] = nn.Identity()
    assert_timm_takes(timm.models.ConvNeXt(depths=depths, dims=widths, num_classes=0), ours, "convnext_tiny")


# -------------------------------------------------------------------------------- a run: its target, and its model card


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder as training leaves it, and the backbone of its target, which differs from the online one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = {"backbone.name": "timm/test_resnet", "backbone.stem": "standard", "data.image_size": 32}
    recipe = load_recipe("demo", TINY | settings | {"backbone.weight_standardisation": True})
    create_run(folder, recipe, overwrite=False)
    method = build_method(recipe, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for value in method.target.parameters():
            value.add_(torch.randn_like(value) * 0.1)
        for module in method.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        for backbone in (method.backbone, method.target[0]):
            backbone(torch.randn(4, 3, 32, 32))
    run, optimizer = Run(folder), build_optimizer(method, recipe.optimizer)
    save_backbone(method.backbone, run.backbone_file)
    save_checkpoint(run.checkpoint_file, 1, method, optimizer, 0.0)
    data = {"source": "/home/anna/cats|dogs/train", "train": 80, "test": 16}
    numbers = {"trained": {"top1_k20": 61.25}, "untrained": {"top1_k20": 40.0}}
    line = {"protocol": "knn", "settings": {"k": 20}, "data": data, "checkpoint": run.checkpoint(), "numbers": numbers}
    append_json_line(run.results_file, line)
    target = method.target[0].eval()
    weight_standardisation.bake(target.network)
    return folder, target


def test_the_target_is_exported_by_choice(trained, tmp_path):
    folder, target = trained
    export(folder, "safetensors", tmp_path / "target.safetensors", network="target")
    export(folder, "safetensors", tmp_path / "online.safetensors")
    images = torch.randn(2, 3, 32, 32)
    found, online = (load_backbone(tmp_path / f"{name}.safetensors")(images) for name in ("target", "online"))
    torch.testing.assert_close(found, target(images), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(online, load_backbone(folder)(images))
    assert not torch.allclose(found, online)


def test_a_target_that_is_not_there_is_refused(tmp_path):
    file = saved(tmp_path, "tico/resnet10-w4")
    with pytest.raises(UserError, match="online network only"):
        export(file, "safetensors", tmp_path / "b", network="target")
    with pytest.raises(UserError, match=r"checkpoint.*last\.pt does not exist"):
        bare = tmp_path / "run"
        (bare / "checkpoints").mkdir(parents=True)
        (bare / "checkpoints" / "backbone.safetensors").write_bytes(file.read_bytes())
        export(bare, "safetensors", tmp_path / "b", network="target")
    recipe = load_recipe("demo", TINY | {"method.name": "simclr"})
    (bare / "recipe.yaml").write_text(dump_recipe(recipe))
    (bare / "checkpoints" / "last.pt").write_bytes(b"")
    with pytest.raises(UserError, match="method 'simclr' has no target"):
        export(bare, "safetensors", tmp_path / "b", network="target")
    (bare / "recipe.yaml").write_text(dump_recipe(load_recipe("demo", TINY)))
    with pytest.raises(UserError, match=r"last\.pt: damaged"):
        export(bare, "safetensors", tmp_path / "b", network="target")
    assert not (tmp_path / "b").exists()


def test_a_model_card_says_what_the_run_says(trained, tmp_path):
    folder, _ = trained
    export(folder, "huggingface", tmp_path / "hub")
    assert sorted(file.name for file in (tmp_path / "hub").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    card = (tmp_path / "hub" / "README.md").read_text()
    header = card.split("---\n")[1]
    assert not re.search(r"^license:", header, re.MULTILINE)  # which is the user's to choose
    for words in ("method: tico", "data: textures, 96 images", "epochs: 0 of 3", "batch: 32 images"):
        assert words in card
    assert re.search(
        r"knn .*top1_k20 \(%\).* 61\.2 .* 40\.0 .*cats\\\|dogs/train: 80 training, 16 test images.*k 20", card
    )
    assert "Cannot tell whether pretraining helped: knn top1_k20 61.2 % against 40.0 % untrained: +21.2 points" in card
    assert "anna" not in card  # folders of the user's machine are nobody's business
    export(folder, "huggingface", tmp_path / "target", network="target")
    assert "not been evaluated" in (tmp_path / "target" / "README.md").read_text()


def test_a_folder_for_the_hub_takes_a_classifier_and_is_not_overwritten(trained, tmp_path):
    folder, _ = trained
    snippet = export_with_snippet(folder, "huggingface", tmp_path / "hub")
    assert snippet.endswith(f"then hf upload USER/NAME {tmp_path / 'hub'}")
    names: dict = {}
    exec(snippet, names)
    assert names["config"]["input_size"] == [3, 32, 32]
    model = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True, num_classes=7)
    torch.testing.assert_close(model.conv1[0].weight, names["model"].conv1[0].weight)
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(UserError, match="is not empty"):
        export(folder, "huggingface", tmp_path / "hub")


# --------------------------------------------------------------------------------------------------------- bad inputs


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A ResNet with the stem for small images."""
    return saved(tmp_path_factory.mktemp("small"), "torchvision/resnet18")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("timm", "b", "offline"), r"network 'offline'.*'online'"),
        (("onnx", "b", "online", "insid"), r"preprocessing 'insid'.*'inside'"),
        (("timm", "b", "online", "inside"), "'timm' holds weights only.*onnx"),
        (("torch-export", "b.onnx"), r"\.pt2"),
        (("huggingface", "b"), "stem for small images"),
        (("detectron2", "b"), "this one has that for small images"),
    ],
)
def test_what_cannot_be_is_one_line(small, tmp_path, words, reason):
    format, out, *rest = words
    with pytest.raises(UserError, match=reason):
        export(small, format, tmp_path / out, *rest)
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_where_python_is_told(small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export(small, "safetensors", "~/b.safetensors") == tmp_path / "b.safetensors"
    assert (tmp_path / "b.safetensors").is_file()


@pytest.mark.parametrize("out", ["", "folder"])
def test_a_folder_in_place_of_a_file_is_one_line(small, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    usual = tmp_path.joinpath(out, "backbone.onnx").relative_to(tmp_path)
    with pytest.raises(UserError, match=f"^'{out}' is a folder: out= takes a file, such as {usual}$"):
        export(small, "onnx", out)


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    path = saved(tmp_path, "tico/resnet10-w4")
    monkeypatch.setattr(_writing, "installed", lambda name: name != "onnxruntime")
    with pytest.raises(UserError, match=re.escape(f"'onnx' needs onnxruntime: {install_command('onnx')}")):
        export(path, "onnx", tmp_path / "b.onnx")


@pytest.mark.parametrize("format", ["timm", "safetensors", "torch-export", "huggingface"])
def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path, format):
    path = saved(tmp_path, VIT[0], **VIT[1])
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        export(path, format, tmp_path / "file" / "b.pt2")
    assert str(tmp_path / "file") in one_line(caught.value)
