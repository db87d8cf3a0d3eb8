"""The stem of a ResNet: chosen by the size of the images, said, and kept by what was trained with another rule."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tico_ssl import load_backbone, pretrain
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.features.subjects import fresh_twin
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.networks.resizing import resized
from tico_ssl.networks.stems import SMALL_STEM, coarse_stem, has_small_stem
from tico_ssl.networks.storage import EARLY_SMALL_STEM, ENTRY, save_backbone, write_described

NARROW = "tico/resnet10-w4"


def build(image_size: int, stem: str = "auto", name: str = NARROW) -> Backbone:
    return build_backbone(BackboneConfig.model_validate({"name": name, "stem": stem}), image_size)


def leave_to_the_rule(file) -> None:
    """Make a file one of an earlier version: the small stem, and nothing that says so."""
    with safe_open(file, framework="pt") as opened:
        described = json.loads(opened.metadata()[ENTRY])
    described.pop("checksums")
    described["config"]["stem"] = "auto"
    write_described(file, load_file(file), described)


def test_no_packaged_recipe_gets_another_stem():
    """Between the present rule and the earlier one, there is none whose stem is left to it."""
    for name in packaged_recipes():
        recipe = load_recipe(name)
        between = SMALL_STEM < recipe.data.image_size <= EARLY_SMALL_STEM
        assert not between or recipe.backbone.stem != "auto", name


@pytest.mark.parametrize(("image_size", "said"), [(32, False), (48, False), (49, True), (95, True), (96, False)])
def test_between_small_and_large_images_the_other_stem_is_named(image_size, said):
    assert bool(coarse_stem(build(image_size).network, image_size)) == said


def test_what_is_said_of_the_stems_is_true():
    said = coarse_stem(build(64).network, 64)
    assert "the last feature maps are 2 x 2 pixels" in said and "backbone.stem=small would make them 8 x 8," in said
    images = torch.zeros(1, 3, 64, 64)
    for stem, side in (("standard", 2), ("small", 8)):
        network, seen = build(64, stem).network.eval(), []
        network.layer4.register_forward_hook(lambda *call, seen=seen: seen.append(call[2].shape[-1]))
        network(images)
        assert seen == [side]
    assert "the last feature maps are 1 x 1 pixels" in coarse_stem(build(32, "standard").network, 32)
    assert coarse_stem(build(64, "small").network, 64) == ""
    assert coarse_stem(build(64, name="timm/vit_tiny_patch16_224").network, 64) == ""


@pytest.mark.parametrize("image_size", [52, 64])
def test_a_file_of_an_earlier_version_keeps_its_stem(tmp_path, image_size):
    trained, file = build(image_size, "small").eval(), tmp_path / "b.safetensors"
    save_backbone(trained, file)
    leave_to_the_rule(file)
    found, images = load_backbone(file), torch.randn(2, 3, image_size, image_size)
    assert torch.equal(found(images), trained(images))
    assert has_small_stem(fresh_twin(found, 0).network)
    assert resized(found, 128).config.stem == "small"
    save_backbone(found, file)
    assert load_backbone(file).config.stem == "small"


def test_a_run_of_an_earlier_version_is_resumed_with_its_stem(tmp_path, tiny, capsys):
    settings = tiny | {"data.limit": 8, "data.image_size": 52, "training.batch_size": 4, "training.epochs": 1}
    run = pretrain("demo", out=tmp_path / "new", overrides=settings)
    said = capsys.readouterr().out
    assert "the last feature maps are 2 x 2 pixels; backbone.stem=small would make them 7 x 7" in said
    assert "with the standard stem, " in said
    assert not has_small_stem(load_backbone(run.folder).network)
    run = pretrain("demo", out=tmp_path / "run", overrides=settings | {"backbone.stem": "small"})
    assert "with the stem for small images, " in capsys.readouterr().out
    leave_to_the_rule(run.backbone_file)
    run.recipe_file.write_text(run.recipe_file.read_text().replace("stem: small", "stem: auto"))
    pretrain("demo", out=run.folder, overrides=settings | {"training.epochs": 2}, resume=True)
    assert "continuing after step 2 of 4" in capsys.readouterr().out
    assert has_small_stem(load_backbone(run.folder).network)
