"""The losses of benchmarks/tico_to_vicreg.py end where they say: at TiCo and at VICReg."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.config.study import expand, load_study
from tico_ssl.methods._base import Encoded
from tico_ssl.methods.tico import tico_loss
from tico_ssl.methods.vicreg import vicreg_loss
from tico_ssl.networks.backbones import build_backbone

ROOT = Path(__file__).parents[1]
N, D = 12, 6


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import tico_to_vicreg

    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16)
    return lambda **settings: tico_to_vicreg.build(
        tico_to_vicreg.Config(hidden=8, dim=D, **settings), backbone
    ).double()


def embeddings():
    random = torch.Generator().manual_seed(0)
    return [torch.randn(N, D, dtype=torch.float64, generator=random, requires_grad=True) for _ in range(2)]


def gradients(loss, *inputs):
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def test_by_default_it_is_tico(build):
    z_1, z_2 = embeddings()
    method, covariance = build(rho=3.0, beta=0.7), torch.zeros(D, D, dtype=torch.float64)
    for _ in range(3):  # the moving average too
        terms = tico_loss(z_1, z_2, covariance, rho=3.0, beta=0.7)
        covariance = terms.covariance
        ours = method.loss(Encoded((z_1,), (z_2.detach(),)))
        torch.testing.assert_close(gradients(ours.loss, z_1), gradients(terms.loss, z_1), rtol=1e-12, atol=1e-12)


def test_at_the_other_end_it_is_vicreg(build):
    z_1, z_2 = embeddings()
    weights = {"invariance_weight": 5.0, "variance_weight": 7.0, "covariance_weight": 2.0}
    method = build(lengths="free", spread="hinge", centred=True, partner="online", **weights)
    ours = method.loss(Encoded((z_1, z_2))).loss
    theirs = vicreg_loss(z_1, z_2, **weights).loss
    torch.testing.assert_close(gradients(ours, z_1, z_2), gradients(theirs, z_1, z_2), rtol=1e-12, atol=1e-12)


def test_unit_embeddings_suit_the_hinge(build):
    """Uncorrelated embeddings on the sphere have the standard deviation that the hinge asks for."""
    method = build(spread="hinge", partner="online")
    rows = torch.eye(D, dtype=torch.float64).repeat(50, 1)
    rows = torch.cat([rows, -rows])
    assert method.loss(Encoded((rows, rows))).loss < 1e-6


def test_lengths_that_could_shrink_are_refused(build):
    with pytest.raises(ValueError, match="everything shrinks"):
        build(lengths="free")


def test_every_step_of_the_study_is_another_recipe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    study = load_study(ROOT / "benchmarks" / "studies" / "tico-to-vicreg.yaml")
    recipes = [variant.load() for variant in expand(study)]
    assert len(recipes) == len(study.runs)
    assert all(one != other for one, other in pairwise(recipes))
