"""The table of view operations: an operation of someone's own takes part like those of the package, and changes no
number of theirs."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from tico_ssl.config.section import validate
from tico_ssl.config.views import Probability, Range, ViewPolicy
from tico_ssl.runtime.errors import UserError
from tico_ssl.views import executor
from tico_ssl.views.executor import Views, sizes_of
from tico_ssl.views.table import JIGSAW, OPERATIONS, PLACE, Between, Chance, Layout, Operation, Order, at_work

PLAIN = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter": 0.0, "greyscale": 0.0}
BUSY = {"jitter": 0.8, "greyscale": 0.3, "blur": 0.5, "solarise": 0.4}


class Posterising(ViewPolicy):
    """A view that may be posterised."""

    posterise: Probability = 0.0
    posterise_levels: Range = (2.0, 8.0)


def posterise(images: Tensor, apply: Tensor, levels: Tensor) -> Tensor:
    """Round all values to a few levels where ``apply``."""
    steps = levels.floor().view(-1, 1, 1, 1) - 1
    return torch.where(apply.bool().view(-1, 1, 1, 1), (images * steps).round() / steps, images)


POSTERISE = Operation(
    "posterise",
    {"apply": Chance("posterise"), "levels": Between(lambda policy: policy.posterise_levels)},
    posterise,
)
TABLES = {
    "first": (POSTERISE, *OPERATIONS),
    "between": (*OPERATIONS[:2], POSTERISE, *OPERATIONS[2:]),
    "last": (*OPERATIONS, POSTERISE),
}
everywhere = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 6, size: int = 24) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator(1))


def views_of(*policies: dict, table=TABLES["last"], size: int = 24) -> Views:
    return Views([Posterising(**policy) for policy in policies], size, (0.0,) * 3, (1.0,) * 3, table=table)


@everywhere
def test_an_operation_of_ones_own_has_its_effect_where_it_is_decided(table):
    count = 400
    views, images = views_of(PLAIN | {"posterise": 0.3}, table=table), pictures(count)
    uniforms = views.draw(count, generator(2))
    layout = Layout((*PLACE.draws, *table))
    decided = layout.named(views.decide(uniforms)[:, 0], POSTERISE)
    (view,) = views(images, uniforms)
    chosen = decided["apply"] > 0
    assert abs(int(chosen.sum()) - 0.3 * count) < 4 * math.sqrt(count * 0.3 * 0.7)
    torch.testing.assert_close(view[~chosen], images[~chosen] / 255, rtol=0, atol=1e-5)
    levels = torch.tensor([len(image.unique()) for image in view])
    assert torch.equal(levels[chosen], decided["levels"][chosen].floor().long())
    assert levels[chosen].unique().tolist() == [2, 3, 4, 5, 6, 7]


@everywhere
def test_it_changes_no_number_of_the_others(table):
    """Neither those of whole views nor those of the pieces of a jigsaw."""
    policies = [BUSY | {"posterise": 0.5}, BUSY | {"posterise": 0.5, "jigsaw": 2}]
    numbers = []
    for chosen in (OPERATIONS, table):
        views = views_of(*policies, table=chosen)
        uniforms = views.draw(6, generator(3))
        whole, piece = Layout((*PLACE.draws, *chosen)), Layout((JIGSAW, *chosen))
        named = {}
        for what, tensor in (("drawn", uniforms), ("decided", views.decide(uniforms, sizes_of(pictures())))):
            pieces = tensor[:, 1, whole.width :].unflatten(1, (-1, piece.width)).flatten(0, 1)
            for layout, rows in ((whole, tensor.flatten(0, 1)[:, : whole.width]), (piece, pieces)):
                for draw in layout.draws:
                    for column, values in layout.named(rows, draw).items():
                        named[what, layout is piece, draw.name, column] = values
        numbers.append(named)
    without, with_it = numbers
    assert len(with_it) == len(without) + 8
    assert all(torch.equal(values, with_it[key]) for key, values in without.items())


@everywhere
def test_a_policy_that_does_not_use_it_gives_the_views_that_it_gave_before(table):
    policies = [BUSY, BUSY | {"jigsaw": 2, "greyscale_first": True}]
    before, after = views_of(*policies, table=OPERATIONS), views_of(*policies, table=table)
    made = (views(pictures(), views.draw(6, generator(4))) for views in (before, after))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_every_piece_of_a_jigsaw_is_decided_on_its_own():
    views = views_of(PLAIN | {"posterise": 0.5, "posterise_levels": (2.0, 2.0), "jigsaw": 2})
    (pieces,) = views(pictures(200), views.draw(200, generator(5)))
    chosen = ((pieces == 0) | (pieces == 1)).flatten(2).all(dim=2).double()
    correlation = torch.corrcoef(chosen.T) - torch.eye(4)
    assert correlation.abs().max() < 4.5 / math.sqrt(200)
    assert abs(chosen.mean() - 0.5) < 4 * 0.5 / math.sqrt(800)


@everywhere
def test_kernels_that_do_not_know_it_leave_the_view_to_the_operators(table, monkeypatch):
    """The crop may still be theirs."""
    kernels = pytest.importorskip("tico_ssl.views.kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finish, finished = kernels.finish, []
    monkeypatch.setattr(kernels, "finish", lambda crops, *rest: finished.append(len(crops)) or finish(crops, *rest))
    busy = {"flip": 0.5, "greyscale": 0.5}  # and levels so close that none is a jump
    views = views_of(busy, busy | {"posterise": 1.0, "posterise_levels": (300.0, 300.0)}, table=table, size=16)
    images, uniforms = pictures(4).to(device), views.draw(4, generator(6)).to(device)
    monkeypatch.setattr(executor, "by_kernels", lambda device: False)
    expected = views(images, uniforms)
    assert not finished
    monkeypatch.setattr(executor, "by_kernels", lambda device: True)
    made = views(images, uniforms)
    assert finished == ([4] if table[: len(OPERATIONS)] == OPERATIONS else [])  # the first view is theirs
    for actual, slow in zip(made, expected, strict=True):
        assert (actual - slow).abs().max() < 2 / 255


def test_two_operations_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two view operations are called 'posterise'"):
        views_of({}, table=(POSTERISE, *OPERATIONS, POSTERISE))


def test_fields_of_ones_own_are_checked_like_the_others():
    with pytest.raises(UserError, match="posterise"):
        validate(Posterising, {"posterise": 1.5}, "here")
    with pytest.raises(UserError, match="posterise"):
        validate(ViewPolicy, {"posterise": 0.5}, "here")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_of_the_package_is_complete(operation):
    """Its operator takes its columns by name, its probability bears its name, and zero puts it out of work."""
    inspect.signature(operation.operator).bind(None, **operation.columns)
    assert operation.columns["apply"] == Chance(operation.name)
    assert operation.at_work(ViewPolicy(**{operation.name: 0.01}))
    assert operation not in at_work(ViewPolicy(**{operation.name: 0.0}), 3)


def test_an_order_is_a_permutation_and_each_as_likely():
    layout, policy = Layout([Operation("shuffled", {"order": Order(3)}, lambda images, order: images)]), ViewPolicy()
    decided = layout.decide(torch.rand(6000, 3, generator=generator(7)), layout.rules([policy])[:, 0])
    assert torch.equal(decided.sort(dim=1).values, torch.arange(3.0).expand(6000, 3))
    counts = torch.bincount((decided @ torch.tensor([9.0, 3.0, 1.0])).long())
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert (counts - 1000).abs().max() < 4.5 * math.sqrt(6000 * 5 / 36)
