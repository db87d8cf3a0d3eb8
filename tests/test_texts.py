"""What texts promise about inputs and settings is so."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tico_ssl
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.integrations._batches import read_batch
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.runtime.device import has_bf16, resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import EXTRAS
from tico_ssl.views.executor import Views, sizes_of

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
random = torch.Generator().manual_seed(0)


def image(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


@pytest.fixture(scope="module")
def backbone():
    return build_backbone(BackboneConfig(name="tico/resnet10-w2"), 16).eval()


def test_preprocess_takes_images_of_any_sizes_in_any_form(backbone):
    wide, high = image(3, 20, 50), image(3, 40, 30)
    arrays = [one.permute(1, 2, 0).numpy() for one in (wide, high)]
    expected = backbone.preprocess([wide, high])
    assert expected.shape == (2, 3, 16, 16)
    for same in (arrays, [Image.fromarray(one) for one in arrays], (wide, arrays[1])):
        assert torch.equal(backbone.preprocess(same), expected)
    for number, one in enumerate((wide, high)):
        assert torch.equal(backbone.preprocess(one)[0], expected[number])


def test_a_batch_is_each_of_its_images_also_if_they_are_grey_or_have_channels_last(backbone):
    for batch in (image(2, 3, 20, 30), image(2, 1, 20, 30), image(2, 20, 30, 3), np.array(image(2, 20, 30, 3))):
        expected = torch.cat([backbone.preprocess(one) for one in batch])
        torch.testing.assert_close(backbone.preprocess(batch), expected)
    with pytest.raises(UserError, match="no images"):
        backbone.preprocess([])


def test_a_list_of_images_of_any_sizes_is_a_batch_for_lightning(tiny):
    recipe = load_recipe("demo", tiny)
    views = Views(recipe.views, 16, recipe.data.mean, recipe.data.std)
    given = read_batch([image(3, 20, 50), image(3, 40, 30), image(3, 16, 16)])
    assert given.count == 3
    decisions = views.decide(views.draw(3, random), sizes_of(given.images))
    made = views.finish(views.crop(given.images, decisions), decisions)
    assert [tuple(view.shape) for view in made] == [(3, 3, 16, 16)] * 2


def test_a_method_is_named_in_either_way():
    short, long = (load_recipe("cifar10/tico", {key: "simclr"}) for key in ("method", "method.name"))
    assert short == long
    assert short.method.name == "simclr"


def test_precision_is_bf16_only_where_it_is_faster(monkeypatch):
    cpu = torch.device("cpu")
    for fast in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert has_bf16(cpu) == fast
        assert resolve_precision("auto", cpu) == (torch.bfloat16 if fast else torch.float32)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_bf16(torch.device("cuda"))  # which emulates it


def test_documents_name_extras_that_there_are():
    named = {name for page in PAGES for name in re.findall(r"pip install '[^']*\[(\w+)\]'", page.read_text("utf-8"))}
    assert named
    assert named <= EXTRAS.keys()


def anchors(page):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}#{anchor}"


def test_every_test_that_a_guarantee_names_is_there():
    written = "\n".join(file.read_text("utf-8") for file in Path(__file__).parent.rglob("*.py"))
    for name in re.findall(r"test_\w+", (ROOT / "docs" / "guarantees.md").read_text("utf-8")):
        assert name in written or (Path(__file__).parent / f"{name}.py").is_file(), name


@pytest.mark.parametrize("name", [name for name in tico_ssl.__all__ if name != "__version__"])
def test_help_names_every_argument_and_has_an_example(name):
    public = getattr(tico_ssl, name)
    text = inspect.getdoc(public)
    usual = {"params", "lr", "momentum", "weight_decay"}  # of any optimiser
    unnamed = [one for one in inspect.signature(public).parameters if not re.search(rf"\b{one}\b", text)]
    assert set(unnamed) <= usual
    assert re.search(rf"\n\n    .*\b{name}\(", text)
