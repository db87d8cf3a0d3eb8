"""Backbones by name, and a backbone on disk: what comes back is what was trained."""

import json

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tico_ssl.config.sections import IMAGENET_MEAN, IMAGENET_STD, BackboneConfig
from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.backbones import LIBRARIES, Backbone, build_backbone, catalogue
from tico_ssl.networks.storage import load_backbone, plain_state, save_backbone
from tico_ssl.results.run_folder import backbone_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest

SMALL = "tico/resnet10-w4"
RESNETS = ["torchvision/resnet18", "timm/resnet18", "tico/resnet18-w4"]


def build(name: str = SMALL, image_size: int = 32, seed: int = 0, **settings) -> Backbone:
    torch.manual_seed(seed)
    return build_backbone(BackboneConfig(name=name, **settings), image_size)


def noise(count: int, size: int, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def last_gammas(backbone: Backbone) -> list[Tensor]:
    """The scale of the last BatchNorm of every residual block of a ResNet."""
    blocks = [module for module in backbone.modules() if hasattr(module, "bn2") and hasattr(module, "conv2")]
    return [(block.bn3 if hasattr(block, "bn3") else block.bn2).weight for block in blocks]


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


@pytest.mark.parametrize(
    ("name", "image_size", "width"),
    [
        ("torchvision/resnet18", 32, 512),
        ("torchvision/resnet50", 32, 2048),
        ("torchvision/convnext_tiny", 32, 768),
        ("torchvision/vit_b_16", 32, 768),
        ("timm/resnet18", 32, 512),
        ("timm/vit_tiny_patch16_224", 32, 192),
        ("timm/convnext_atto", 32, 320),
        ("tico/resnet18-w16", 32, 128),
        ("tico/resnet34-w3", 40, 24),
    ],
)
def test_the_width_is_that_of_the_features(name, image_size, width):
    with torch.device("meta"):  # shapes alone, which is quick
        backbone = build(name, image_size)
        features = backbone(torch.zeros(2, 3, image_size, image_size))
    assert backbone.width == width
    assert features.shape == (2, width)


@pytest.mark.parametrize(("image_size", "small"), [(32, True), (48, True), (49, False), (224, False)])
@pytest.mark.parametrize("name", RESNETS)
def test_the_stem_follows_the_image_size(name, image_size, small):
    with torch.device("meta"):
        network = build(name, image_size).network
    assert network.conv1.stride == ((1, 1) if small else (2, 2))
    assert network.conv1.kernel_size == ((3, 3) if small else (7, 7))
    assert isinstance(network.maxpool, nn.Identity if small else nn.MaxPool2d)


@pytest.mark.parametrize("name", RESNETS)
def test_the_stem_can_be_chosen(name):
    with torch.device("meta"):
        standard, small = build(name, 32, stem="standard").network, build(name, 128, stem="small").network
    assert standard.conv1.kernel_size == (7, 7)
    assert isinstance(standard.maxpool, nn.MaxPool2d)
    assert small.conv1.kernel_size == (3, 3)
    assert isinstance(small.maxpool, nn.Identity)


def test_a_small_stem_keeps_the_resolution():
    network = build("tico/resnet18-w4", 32).network
    assert network.maxpool(network.conv1(noise(1, 32))).shape[-2:] == (32, 32)


def test_a_small_stem_with_solo_learns_padding_widens_every_stage():
    network = build("tico/resnet18-w4", 32, stem_padding=2).network
    x, sides = network.conv1(noise(1, 32)), []
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        x = stage(x)
        sides.append(x.shape[-1])
    assert sides == [34, 17, 9, 5]


@pytest.mark.parametrize("name", ["timm/vit_tiny_patch16_224", "timm/convnext_atto"])
def test_a_small_stem_on_something_else_is_refused(name):
    with pytest.raises(UserError, match=rf"backbone\.stem=small.*{name}"):
        build(name, 32, stem="small")


def test_an_automatic_stem_leaves_other_networks_alone():
    assert build("timm/vit_tiny_patch16_224", 32, stem="standard").width == 192


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("name", [*RESNETS, "timm/vit_tiny_patch16_224", "timm/convnext_atto"])
@pytest.mark.parametrize("image_size", [32, 96])
def test_input_channels(name, channels, image_size):
    with torch.device("meta"):
        backbone = build(name, image_size, channels=channels)
        first = next(module for module in backbone.modules() if isinstance(module, nn.Conv2d))
        assert first.in_channels == channels
        assert backbone(torch.zeros(2, channels, image_size, image_size)).shape == (2, backbone.width)


@pytest.mark.parametrize("name", ["torchvision/vit_b_16", "torchvision/convnext_tiny"])
def test_input_channels_of_torchvision_networks_that_are_not_resnets(name):
    with torch.device("meta"):
        backbone = build(name, 32, channels=4)
        assert backbone(torch.zeros(2, 4, 32, 32)).shape == (2, 768)


@pytest.mark.parametrize("name", [*RESNETS, "torchvision/resnet50", "timm/resnet26"])
def test_zero_gamma_silences_every_block(name):
    gammas = last_gammas(build(name, zero_gamma=True))
    assert len(gammas) >= 8
    assert all(torch.equal(gamma, torch.zeros_like(gamma)) for gamma in gammas)


@pytest.mark.parametrize("name", [*RESNETS, "torchvision/resnet50", "timm/resnet26"])
def test_without_zero_gamma_no_block_is_silent(name):
    gammas = last_gammas(build(name, zero_gamma=False))
    assert len(gammas) >= 8
    assert all(torch.equal(gamma, torch.ones_like(gamma)) for gamma in gammas)


def test_zero_gamma_touches_nothing_but_the_last_batch_norms():
    on, off = (build("torchvision/resnet18", zero_gamma=choice).state_dict() for choice in (True, False))
    different = {name for name in on if not torch.equal(on[name], off[name])}
    assert different == {f"network.layer{stage}.{block}.bn2.weight" for stage in (1, 2, 3, 4) for block in (0, 1)}


@pytest.mark.parametrize("image_size", [32, 224])
def test_names_are_those_of_torchvision(image_size):
    with torch.device("meta"):
        ours = shapes(plain_state_names(build("torchvision/resnet18", image_size)))
        theirs = shapes(torchvision.models.resnet18().state_dict())
    small = {"conv1.weight": (64, 3, 3, 3)} if image_size == 32 else {}
    assert ours == {name: shape for name, shape in theirs.items() if not name.startswith("fc.")} | small


def test_names_are_those_of_timm():
    with torch.device("meta"):
        ours = shapes(plain_state_names(build("timm/vit_tiny_patch16_224", 224)))
        assert ours == shapes(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict())


def test_narrow_resnets_have_the_names_of_torchvision():
    with torch.device("meta"):
        ours = shapes(plain_state_names(build("tico/resnet18-w64", 224)))
        theirs = shapes(torchvision.models.resnet18().state_dict())
    assert ours == {name: shape for name, shape in theirs.items() if not name.startswith("fc.")}


@pytest.mark.parametrize("size", [(64, 64), (41, 64), (7, 9)])
def test_the_shortcut_of_a_very_narrow_resnet_is_a_convolution_in_steps(size):
    shortcut = build_backbone(BackboneConfig(name="tico/resnet10-w8"), 64).network.layer2[0].downsample[0]
    images = torch.randn(2, 8, *size).contiguous(memory_format=torch.channels_last)
    found = shortcut.to(memory_format=torch.channels_last)(images)
    found.square().sum().backward()  # a plain one in steps dies here, on some processors
    weight = shortcut.weight.detach().double().requires_grad_()
    expected = torch.nn.functional.conv2d(images.double(), weight, stride=2)
    expected.square().sum().backward()
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(shortcut.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-3)


def test_a_narrow_resnet_of_full_width_computes_what_torchvision_does():
    backbone = build("tico/resnet18-w64", 96, zero_gamma=False).eval()
    reference = torchvision.models.resnet18()
    reference.fc = nn.Identity()
    reference.load_state_dict(backbone.network.state_dict())
    images = noise(2, 96)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), reference.eval()(images))


def plain_state_names(backbone: Backbone) -> dict[str, Tensor]:
    return backbone.network.state_dict()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchvision/resnet19", "did you mean 'resnet18'"),
        ("timm/resnet_18", "did you mean 'resnet18'"),
        ("timm/vit_tiny_patch16_225", "did you mean 'vit_tiny_patch16_224'"),
        ("torchvison/resnet18", "tico, timm, torchvision"),
        ("resnet18", "tico, timm, torchvision"),
        ("torchvision/", "tico, timm, torchvision"),
        ("torchvision/zzzzzz", "tico list backbones"),
        ("tico/resnet19-w3", "tico/resnet18-w16"),
        ("tico/resnet18-w0", "tico/resnet18-w16"),
    ],
)
def test_an_unknown_backbone_is_one_line_with_help(name, expected):
    with pytest.raises(UserError) as caught:
        build(name)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "image_size", "settings", "expected"),
    [
        ("torchvision/resnet18", 32, {"arguments": {"foo": 1}}, "foo"),
        ("timm/resnet18", 32, {"arguments": {"foo": 1}}, "foo"),
        ("torchvision/vit_b_16", 31, {}, "vit_b_16"),
        ("timm/vit_tiny_patch16_224", 8, {}, "vit_tiny_patch16_224"),
        ("torchvision/squeezenet1_1", 64, {}, "SqueezeNet"),
        ("torchvision/vgg11", 16, {}, "16 pixels"),
    ],
)
def test_a_backbone_that_cannot_be_built_is_one_line(name, image_size, settings, expected):
    with torch.device("meta"), pytest.raises(UserError) as caught:
        build(name, image_size, **settings)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["torchvision/googlenet", "torchvision/inception_v3"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_networks_with_side_classifiers_give_features_in_training_or_are_refused(name):
    with torch.device("meta"):
        try:
            backbone = build(name, 299)
        except UserError:
            return
        assert isinstance(backbone.train()(torch.zeros(2, 3, 299, 299)), Tensor)


def test_arguments_reach_the_library():
    backbone = build("timm/vit_tiny_patch16_224", 32, arguments={"patch_size": 8, "depth": 1})
    assert backbone.network.patch_embed.patch_size == (8, 8)
    assert len(backbone.network.blocks) == 1


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/vit_tiny_patch16_224", "tico/resnet18-w4"])
def test_weights_are_a_function_of_the_seed(name):
    torch.manual_seed(99)
    torch.rand(17)  # whatever was drawn before does not matter
    first, again, other = (build(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet18", "tico/resnet18-w4"])
def test_finding_the_width_leaves_no_trace(name):
    backbone = build(name)
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert torch.equal(norm.running_mean, torch.zeros_like(norm.running_mean))
        assert torch.equal(norm.running_var, torch.ones_like(norm.running_var))
        assert int(norm.num_batches_tracked) == 0
    assert backbone.training
    assert all(module.training for module in backbone.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in backbone.parameters())


def test_preprocess_normalises_images_of_the_right_size():
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(build().preprocess(images), (images / 255 - mean) / std)


def test_preprocess_uses_the_normalisation_of_the_data():
    torch.manual_seed(0)
    backbone = build_backbone(BackboneConfig(name=SMALL, channels=1), 32, mean=(0.25,), std=(0.5,))
    images = torch.full((2, 1, 32, 32), 255, dtype=torch.uint8)
    torch.testing.assert_close(backbone.preprocess(images), torch.full((2, 1, 32, 32), 1.5))


def test_preprocess_takes_images_of_any_sizes():
    sizes = [(40, 30), (20, 64), (200, 100)]
    images = [torch.full((3, *size), value, dtype=torch.uint8) for size, value in zip(sizes, (0, 128, 255))]
    ready = build().preprocess(images)
    assert ready.shape == (3, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    for image, value in zip(ready, (0, 128, 255)):
        torch.testing.assert_close(image, ((value / 255 - mean) / std).expand(3, 32, 32), rtol=0, atol=1e-5)


def test_preprocess_does_not_depend_on_how_images_are_held():
    """Files are streamed as a list, an archive is one tensor: the same pixels must become the same features."""
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    backbone = build()
    torch.testing.assert_close(backbone.preprocess(list(images)), backbone.preprocess(images), rtol=0, atol=1e-5)


def test_preprocess_is_the_usual_centre_crop():
    """Seven eighths of the shorter side from the centre, resized: Pillow's picture to about one grey value."""
    ramp = np.add.outer(np.linspace(0, 120, 96), np.linspace(0, 130, 128))
    image = Image.fromarray(ramp.astype(np.uint8)).convert("RGB")
    box = (22, 6, 106, 90)  # 7/8 of 96 is 84
    expected = np.asarray(image.crop(box).resize((48, 48), Image.Resampling.BICUBIC), dtype=np.float32) / 255
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    torch.manual_seed(0)
    ready = build_backbone(BackboneConfig(name=SMALL), 48, mean=(0.0,) * 3, std=(1.0,) * 3).preprocess([pixels])
    assert (ready[0].permute(1, 2, 0).numpy() - expected).__abs__().max() < 2 / 255


def test_weight_standardisation_changes_the_convolutions_and_nothing_else():
    plain, standardised = (build("torchvision/resnet18", weight_standardisation=choice) for choice in (False, True))
    convolutions = [module for module in standardised.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20
    assert all(isinstance(module, weight_standardisation.StandardisedConv2d) for module in convolutions)
    first, second = plain.state_dict(), standardised.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_standardised_kernels_have_mean_zero_and_deviation_one():
    weight = weight_standardisation.standardise(torch.randn(6, 4, 3, 3) * 7 + 2)
    torch.testing.assert_close(weight.mean(dim=(1, 2, 3)), torch.zeros(6), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight.flatten(1).std(dim=1), torch.ones(6), rtol=1e-4, atol=0)


def test_weight_standardisation_ignores_shift_and_scale_of_the_kernel():
    backbone = build(weight_standardisation=True, zero_gamma=False).train()
    images = noise(4, 32)
    before = backbone(images)
    with torch.no_grad():
        backbone.network.layer2[0].conv1.weight.mul_(3).add_(0.5)
    torch.testing.assert_close(backbone(images), before, rtol=1e-3, atol=1e-4)


def test_gradient_flows_through_weight_standardisation():
    backbone = build(weight_standardisation=True, zero_gamma=False)
    backbone(noise(4, 32)).square().sum().backward()
    gradient = backbone.network.layer1[0].conv1.weight.grad
    assert gradient.abs().sum() > 0
    # Shifting a kernel changes nothing, so the gradient has no such component.
    assert gradient.mean(dim=(1, 2, 3)).abs().max() < 1e-4 * gradient.abs().max()


def test_a_backbone_can_be_exported_for_batches_of_any_size():
    backbone, images = build(image_size=16).eval(), noise(3, 16)
    program = torch.export.export(backbone, (images[:2],), dynamic_shapes=({0: torch.export.Dim("images")},))
    assert torch.allclose(program.module()(images), backbone(images), atol=1e-6)


def test_catalogues_hold_names_that_can_be_built():
    for library in LIBRARIES:
        names = catalogue(library)
        assert names
        assert all(name.startswith(f"{library}/") for name in names)
    assert {"torchvision/resnet18", "torchvision/resnet50", "torchvision/vit_b_16"} <= set(catalogue("torchvision"))
    assert {"timm/resnet18", "timm/vit_tiny_patch16_224"} <= set(catalogue("timm"))
    for name in catalogue("tico"):
        assert build(name).width > 0


# ---------------------------------------------------------------------------------------------------- on disk


def trained(name: str = SMALL, image_size: int = 32, **settings) -> Backbone:
    """A backbone whose every parameter and statistic has left its initial value."""
    torch.manual_seed(0)
    mean, std = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    backbone = build_backbone(BackboneConfig(name=name, **settings), image_size, mean, std)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for _ in range(3):
            backbone(torch.randn(4, settings.get("channels", 3), image_size, image_size))
    return backbone


@pytest.mark.parametrize(
    ("name", "image_size", "settings"),
    [
        (SMALL, 32, {}),
        (SMALL, 96, {}),
        (SMALL, 32, {"weight_standardisation": True}),
        (SMALL, 32, {"stem": "standard"}),
        ("torchvision/resnet18", 32, {}),
        ("timm/vit_tiny_patch16_224", 32, {"arguments": {"patch_size": 8, "depth": 2}}),
        ("timm/convnext_atto", 32, {"weight_standardisation": True}),
    ],
)
def test_a_saved_backbone_gives_the_same_features(tmp_path, name, image_size, settings):
    backbone = trained(name, image_size, **settings)
    save_backbone(backbone, tmp_path / "deep" / "b.safetensors")
    loaded = load_backbone(tmp_path / "deep" / "b.safetensors")
    images = noise(4, image_size)
    with torch.no_grad():
        assert torch.equal(loaded(images), backbone.eval()(images))
    assert not any(module.training for module in loaded.modules())
    assert (loaded.image_size, loaded.mean, loaded.std) == (image_size, backbone.mean, backbone.std)
    assert loaded.width == backbone.width
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["b.safetensors"]  # no temporary file stays


def test_saving_leaves_the_backbone_as_it_was(tmp_path):
    backbone = trained(weight_standardisation=True)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    save_backbone(backbone, tmp_path / "b.safetensors")
    assert backbone.training
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert isinstance(backbone.network.conv1, weight_standardisation.StandardisedConv2d)


def test_baked_weights_are_plain():
    backbone = trained(weight_standardisation=True)
    state = plain_state(backbone)
    expected = weight_standardisation.standardise(backbone.network.conv1.weight.detach())
    assert torch.equal(state["conv1.weight"], expected)
    assert state.keys() == backbone.network.state_dict().keys()


def test_a_run_folder_is_as_good_as_its_file(tmp_path):
    file = tmp_path / "checkpoints" / "backbone.safetensors"
    backbone = trained()
    save_backbone(backbone, file)
    assert backbone_file(tmp_path) == file
    images = noise(2, 32)
    with torch.no_grad():
        assert torch.equal(load_backbone(str(tmp_path))(images), load_backbone(file)(images))


def test_a_missing_backbone_is_one_line(tmp_path):
    for source in (tmp_path, tmp_path / "none.safetensors", str(tmp_path / "nowhere")):
        with pytest.raises(UserError) as caught:
            load_backbone(source)
        assert str(source) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "text"])
def test_a_damaged_file_is_one_line(tmp_path, damage):
    file = tmp_path / "b.safetensors"
    save_backbone(trained(), file)
    whole = file.read_bytes()
    contents = {"cut": whole[: len(whole) // 2], "header": b"\xff" * 64 + whole[64:], "empty": b"", "text": b"hello\n"}
    file.write_bytes(contents[damage])
    with pytest.raises(UserError, match=": damaged or not a safetensors file") as caught:
        load_backbone(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_foreign_safetensors_file_is_one_line(tmp_path):
    for number, metadata in enumerate([None, {"format": "pt"}]):
        file = tmp_path / f"{number}.safetensors"
        save_file({"weight": torch.zeros(2)}, file, metadata=metadata)
        with pytest.raises(UserError, match="not written by tico"):
            load_backbone(file)


def test_weights_that_do_not_fit_their_description_are_one_line(tmp_path):
    file = tmp_path / "b.safetensors"
    description = {
        "config": BackboneConfig(name=SMALL).model_dump(mode="json"),
        "image_size": 32,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
    }
    save_file({"conv1.weight": torch.zeros(2)}, file, metadata={"tico_ssl": json.dumps(description)})
    with pytest.raises(UserError) as caught:
        load_backbone(file)
    assert "\n" not in str(caught.value)


def test_the_digest_follows_the_contents(tmp_path):
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path in paths[:2]:
        save_backbone(trained(), path)
    other = trained()
    with torch.no_grad():
        other.network.conv1.weight[0, 0, 0, 0] += 1
    save_backbone(other, paths[2])
    first, again, changed = (digest(path) for path in paths)
    assert first == again
    assert first != changed
    assert len(first) == 16
    assert int(first, 16) >= 0
