"""Four processes are one with the same global batch, and send what the model of scaling says."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import nn

from test_distributed import Tiny, in_processes, one_step
from tico_ssl import pretrain
from tico_ssl.bench.scaling import bytes_sent
from tico_ssl.config import catalogue
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import BadImage
from tico_ssl.evaluations import corruptions
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.augmented import views_of_images
from tico_ssl.evaluations._representation.settings import ViewSettings
from tico_ssl.features import batches, feature_store
from tico_ssl.features.album import Album, Part
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.extraction import extract
from tico_ssl.features.lazy import LazyBackbones
from tico_ssl.methods._base import Batch
from tico_ssl.networks import fused
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import SharedBatchNorm, share_statistics
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tiny import TINY

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
WORLD, BATCH, DIM = 4, 8, 5
METHODS = {
    "tico": {},
    "simclr": {},
    "moco": {"queue": 16},
    "swav": {"prototypes": 6, "queue": 16},
    "vicreg": {},
}
STEPS = {"vicreg": 1}  # of 3: its loss is large, and at this rate every step carries rounding on
CPU = torch.device("cpu")


def method_of(name):
    torch.manual_seed(0)
    module = catalogue.load("methods", name)
    return module.build(module.Config(hidden=8, dim=DIM, **METHODS[name]), Tiny()).double().train()


def views_of(share=slice(None)):
    generator = torch.Generator().manual_seed(1)
    views = (torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return tuple(view[share] for view in views)


# ---------------------------------------------------------------------------------- what every process computes


def stepped(method, name, share=slice(None)):
    return one_step(method, views_of(share), STEPS.get(name, 3))


def gradients_of(rank):
    """Parameters of several layouts, one without a gradient; their gradients differ between processes."""
    torch.manual_seed(0)
    wide = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(value) for value in (wide, torch.randn(7), torch.randn(5, 2).T, torch.randn(()))]
    for parameter in parameters[1:]:
        parameter.grad = torch.full_like(parameter, rank)
    parameters[0].grad = wide * (rank + 1)
    return [*parameters, nn.Parameter(torch.randn(3))]


def averaged(rank, bucket):
    parameters, before = gradients_of(rank), distributed.BUCKET
    distributed.BUCKET = bucket
    try:
        distributed.average_gradients(parameters)
    finally:
        distributed.BUCKET = before
    return [parameter.grad for parameter in parameters[:-1]]


SIDE, COUNT = 8, 45


def images(unreadable=()):
    """So many images; with unreadable ones, as files would be."""
    pixels = torch.randint(
        0, 256, (COUNT, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    source = from_arrays("noise", pixels, None)
    if not unreadable:
        return source

    def fetch(place):
        if place in unreadable:
            raise BadImage(str(place), "torn")
        return pixels[place]

    return replace(source, images=None, fetch=fetch)


SOURCES = {"arrays": (), "files": (*range(8, 16), 44)}  # of which a whole batch cannot be read


def extracted(folder, rank):
    """Features of few images in small batches, in memory and on disk."""
    torch.manual_seed(0)
    backbone, found = build_backbone(BackboneConfig(name="tico/resnet10-w4"), SIDE).eval(), {}
    given = batches.BATCH, feature_store.BLOCK
    batches.BATCH, feature_store.BLOCK = 8, 8
    try:
        for name, unreadable in SOURCES.items():
            source = images(unreadable)
            found[name] = tuple(extract(backbone, source, CPU, together=True))
            (folder / name).mkdir()
            store = feature_store.FeatureStore(folder / name, "key", backbone.width) if rank == 0 else None
            feature_store.fill(store, Album((Part("train", source),)), backbone, CPU, label=None)
            found[f"stored {name}"] = store and (store.matrix().clone(), store.places(), store.done)
    finally:
        batches.BATCH, feature_store.BLOCK = given
    return found


def looked_at():
    """Features of augmented views, and what corruptions cost, of images of which some cannot be read."""
    torch.manual_seed(1)
    networks = {name: build_backbone(BackboneConfig(name="tico/resnet10-w4"), SIDE).eval() for name in ("one", "two")}
    seen = []
    networks["one"].register_forward_hook(lambda network, given, found: seen.append(len(found)))
    source = replace(images(SOURCES["files"]), labels=torch.arange(COUNT) % 3)
    context = Context(LazyBackbones(networks), source, source, {}, "0", 0, CPU, FeatureCache(None, together=True))
    given = batches.BATCH, corruptions.BATCH
    batches.BATCH, corruptions.BATCH = 8, 8
    try:
        views = views_of_images(context, ViewSettings(policy="byol-small", images=COUNT), 2)
        settings = corruptions.Config(kinds=("shot-noise", "contrast"), images=COUNT, k=3, iterations=5)
        result = corruptions.run(context, settings)
    finally:
        batches.BATCH, corruptions.BATCH = given
    return sum(seen), views, result.numbers, result.data["severities"]


def fused_norm(rank):
    """A share of a batch of two views through the kernels, which Triton's interpreter runs on a CPU."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, BATCH, 6, 3, 3, generator=generator) * 2 + 30
    weight = torch.randn(2, BATCH, 6, 3, 3, generator=generator)
    share = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    x = whole[:, share].flatten(0, 1).contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(6)
    nn.init.normal_(norm.weight, generator=generator)
    if rank is not None:
        norm = share_statistics(nn.Sequential(norm))[0]
    y = fused.norm_act(norm, x, views=2)
    (y * weight[:, share].flatten(0, 1)).sum().backward()
    output, gradient = (tensor.detach().unflatten(0, (2, -1)) for tensor in (y, x.grad))
    state = {name: value.detach() for name, value in norm.state_dict().items()}
    return {"output": output, "gradient": gradient, "of_weight": norm.weight.grad, **state}


def counted(name, rank):
    """The bytes of the collective operations that torch really carries out in a step."""
    found = {"sum": 0, "gather": 0, "scatter": 0}
    calls = dist.all_reduce, distributed._gather(), distributed._scatter()
    real = {call.__name__: call for call in calls}

    def counting(kind, call):
        def carried_out(*tensors, **options):
            found[kind] += tensors[0 if kind in ("sum", "scatter") else 1].nbytes  # a share, or the whole sum
            return call(*tensors, **options)

        return carried_out

    method = share_statistics(method_of(name))
    try:
        for kind, call in zip(found, real, strict=True):
            setattr(dist, call, counting(kind, real[call]))
        step_of(method, views_of(slice(2 * rank, 2 * rank + 2)))
    finally:
        for call, original in real.items():
            setattr(dist, call, original)
    return found


TRANSFORMER = TINY | {
    "data.limit": 32,
    "training.batch_size": 16,
    "training.precision": "fp64",
    "training.checkpoint_seconds": 0.0,
    "training.knn_images": 100,
    "training.loggers": [],
    "backbone.name": "timm/vit_tiny_patch16_224",
    "backbone.arguments": {"patch_size": 8, "embed_dim": 10, "depth": 2, "num_heads": 2},
    "optimizer.name": "sgd",
    "optimizer.lr": 1e-2,
    "optimizer.scale_lr": False,
    "optimizer.warmup_epochs": 0.0,
}


ADAMW = {"optimizer.name": "adamw", "training.knn_every_epochs": 1}


def transformed(folder, epochs, sharded, **changes):
    """A transformer is trained for so many epochs, or on to so many."""
    changes |= {"training.epochs": epochs, "training.sharded": sharded}
    return pretrain("demo", out=folder, overrides=TRANSFORMER | changes, resume=True)


def divided(rank):
    """An epoch in shares; and one in shares after one that was not."""
    folder = Path(os.environ["TOGETHER"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}  # as a launcher would
    transformed(folder / "shares", 1, sharded=True, **ADAMW)
    transformed(folder / "both", 1, sharded=False)
    transformed(folder / "both", 2, sharded=True)


def step_of(method, views):
    method.zero_grad()
    method(Batch(views, torch.arange(len(views[0])))).loss.backward()
    distributed.average_gradients(method.parameters())
    method.after_step(0.5)


def work(rank):
    """All that is asked of each of four processes, in one: processes take seconds to start."""
    fused.DEVICES = ("cuda", "cpu")
    share = slice(2 * rank, 2 * rank + 2)
    rows = torch.arange(3 * rank, dtype=torch.float32).view(-1, 3)[: max(0, rank)]
    divided(rank)
    with TemporaryDirectory() as folder:
        features = extracted(Path(folder), rank)
    return {
        "steps": {name: stepped(share_statistics(method_of(name)), name, share) for name in METHODS},
        "averaged": {str(bucket): averaged(rank, bucket) for bucket in (1, 100, 2**20)},
        "rows": distributed.rows_of_all(rows),
        "extracted": features,
        "looked at": looked_at(),
        "fused": fused_norm(rank) if fused.fused_kernels is not None else None,
        "sent": {name: counted(name, rank) for name in METHODS},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def four(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOGETHER", str(folder))
        return in_processes(WORLD, work, folder)


# ------------------------------------------------------------------------------------------------ what must hold


@pytest.mark.parametrize("name", METHODS)
def test_four_processes_are_one_with_the_global_batch(four, name):
    """In float64: loss, gradients, weights, target, queue, prototypes, covariance and running statistics."""
    alone = stepped(method_of(name), name)
    for together in (part["steps"][name] for part in four):
        torch.testing.assert_close(together["loss"], alone["loss"], rtol=1e-10, atol=1e-11)
        for kind in ("gradient", "state"):
            assert together[kind].keys() == alone[kind].keys()
            for key, value in alone[kind].items():
                torch.testing.assert_close(together[kind][key], value, rtol=1e-6, atol=1e-8, msg=f"{name}: {key}")


def test_gradients_are_means_whatever_their_layout_and_bucket(four):
    expected = [torch.full_like(parameter, 1.5) for parameter in gradients_of(0)[1:-1]]
    expected.insert(0, gradients_of(0)[0].detach() * 2.5)
    for part in four:
        for found in part["averaged"].values():
            for gradient, mean in zip(found, expected, strict=True):
                torch.testing.assert_close(gradient, mean)


def test_gradients_keep_their_memory_and_are_averaged_from_the_last_to_the_first():
    parameters = gradients_of(1)
    places = [parameter.grad.data_ptr() for parameter in parameters[:-1]]
    with distributed.pretended(3) as sent:
        distributed.average_gradients(parameters)
    assert [parameter.grad.data_ptr() for parameter in parameters[:-1]] == places
    assert [one.bytes for one in sent] == [4 * (1 + 10 + 7 + 6 * 36)]
    before, distributed.BUCKET = distributed.BUCKET, 40
    with distributed.pretended(3) as sent:
        distributed.average_gradients(parameters)
    distributed.BUCKET = before
    assert [one.bytes for one in sent] == [4 * 11, 4 * (7 + 6 * 36)]


def test_a_gradient_with_gaps_is_refused():
    parameter = nn.Parameter(torch.zeros(4, 2))
    parameter.grad = torch.zeros(4, 4)[:, :2]
    with distributed.pretended(2), pytest.raises(ValueError, match="gaps in memory"):
        distributed.average_gradients([parameter])


def test_alone_nothing_is_averaged_and_nothing_changes():
    parameters = gradients_of(1)
    before = [copy.deepcopy(parameter.grad) for parameter in parameters]
    distributed.average_gradients(parameters)
    assert all(one is None or torch.equal(one, p.grad) for one, p in zip(before, parameters, strict=True))
    assert torch.equal(distributed.stacked(torch.ones(2)), torch.ones(1, 2))
    assert torch.equal(distributed.rows_of_all(torch.ones(2, 2)), torch.ones(2, 2))


def test_rows_of_all_processes_come_in_order_however_many_each_has(four):
    expected = torch.cat([torch.arange(3 * rank, dtype=torch.float32).view(-1, 3)[:rank] for rank in range(WORLD)])
    for part in four:
        assert torch.equal(part["rows"], expected)


@pytest.mark.parametrize("name", SOURCES)
def test_features_are_those_of_one_process_to_the_bit_and_written_once(four, name, tmp_path):
    """In memory and on disk, with fewer images than fill the batches of all, and with a batch that cannot be read."""
    alone = extracted(tmp_path, 0)
    for part in four:
        for mine, theirs in zip(part["extracted"][name], alone[name], strict=True):
            assert torch.equal(mine, theirs)
    stored = [part["extracted"][f"stored {name}"] for part in four]
    assert stored[1:] == [None] * 3
    for mine, theirs in zip(stored[0], alone[f"stored {name}"], strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
    assert torch.equal(alone[name][0], alone[f"stored {name}"][0])


def test_augmented_and_corrupted_images_are_shared_out_and_what_is_found_is_that_of_one_process(four):
    seen, views, *results = looked_at()
    readable = COUNT - len(SOURCES["files"])
    assert {name: tuple(each.shape[:2]) for name, each in views.items()} == dict.fromkeys(("one", "two"), (readable, 2))
    assert sum(part["looked at"][0] for part in four) == seen
    assert max(part["looked at"][0] for part in four) < seen / 2
    for part in four:
        _, mine, *found = part["looked at"]
        assert all(torch.equal(mine[name], each) for name, each in views.items())
        assert found == results


def test_fused_kernels_have_the_statistics_of_all_processes(four):
    if fused.fused_kernels is None:
        pytest.skip("without Triton")
    alone = fused_norm(None)
    for key in ("output", "gradient"):
        joined = torch.cat([part["fused"][key] for part in four], dim=1)
        torch.testing.assert_close(joined, alone[key], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        sum(part["fused"]["of_weight"] for part in four), alone["of_weight"], rtol=1e-4, atol=1e-3
    )
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        for part in four:
            torch.testing.assert_close(part["fused"][key], alone[key], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_sends_what_a_process_that_stands_for_four_lists(four, name):
    with distributed.pretended(WORLD) as sent:
        step_of(share_statistics(method_of(name)), views_of(slice(0, 2)))
    for part in four:
        assert part["sent"][name] == {
            "sum": sum(one.bytes for one in sent if one.kind == "sum"),
            "gather": sum(one.bytes for one in sent if one.kind == "gather"),
            "scatter": sum(one.bytes for one in sent if one.kind == "scatter"),
        }


@pytest.mark.parametrize("name", ["tico", "simclr", "moco"])
def test_what_a_loss_sends_is_what_its_formula_says(name):
    """TiCo a matrix of d x d whatever the batch, SimCLR two views of it and their gradients, MoCo its keys."""
    for local in (2, 4):
        with distributed.pretended(WORLD) as sent:
            step_of(share_statistics(method_of(name)), views_of(slice(0, local)))
        mine = sum(bytes_sent(one, WORLD) for one in sent if one.purpose == distributed.LOSS)
        rows = local * DIM * 8 * (WORLD - 1)
        formula = {"tico": 2 * DIM**2 * 8 * (WORLD - 1) / WORLD, "simclr": 4 * rows, "moco": rows}
        assert mine == formula[name]


def test_statistics_and_gradients_are_sent_as_the_formulas_say():
    method = method_of("tico")
    trained = sum(parameter.nbytes for parameter in method.parameters() if parameter.requires_grad)
    channels = [
        module.num_features for module in method.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    ]
    with distributed.pretended(2) as sent:
        step_of(share_statistics(method), views_of())
    assert sum(one.bytes for one in sent if one.purpose == distributed.GRADIENTS) == trained
    of_norms = [one for one in sent if one.purpose == distributed.STATISTICS]
    assert sum(one.bytes for one in of_norms if one.kind == "gather") == 2 * 8 * sum(channels)  # both networks
    assert sum(one.bytes for one in of_norms if one.kind == "sum") == 2 * 8 * sum(channels) / 2  # the online one
    assert all(type(module) is SharedBatchNorm for module in method.modules() if hasattr(module, "num_features"))


# --------------------------------------------------------------------------------------------------- in shares


def metrics_of(run):
    clock = {"seconds", "images_per_second", "data_wait"}
    return [{name: value for name, value in line.items() if name not in clock} for line in run.metrics()]


def assert_alike(one, other):
    """Two runs of the same steps, in float64: what they log, their weights, target and optimiser."""
    for line, same in zip(metrics_of(one), metrics_of(other), strict=True):
        assert line == pytest.approx(same, rel=1e-5)
    mine, theirs = (torch.load(run.checkpoint_file, weights_only=True) for run in (one, other))
    for name, value in theirs["method"].items():
        torch.testing.assert_close(mine["method"][name], value, rtol=1e-6, atol=1e-9, msg=name)
    assert mine["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for number, kept in theirs["optimizer"]["state"].items():
        torch.testing.assert_close(mine["optimizer"]["state"][number], kept, rtol=1e-6, atol=1e-9)


def test_a_network_in_shares_learns_what_a_whole_one_does_and_goes_on_either_way(four, folder, tmp_path):
    """An epoch of four processes in shares; one in shares after one that was whole; and then one of a process alone."""
    for epochs in (1, 2):
        alone = transformed(tmp_path / "alone", epochs, sharded=True)  # which has nothing to divide
    assert_alike(open_run(folder / "both"), alone)
    alone = transformed(tmp_path / "alone", 3, sharded=False)
    assert_alike(transformed(folder / "both", 3, sharded=False), alone)


def test_adamw_and_the_online_knn_go_with_shares(four, folder, tmp_path):
    """What is logged; a bias before BatchNorm has no gradient, and AdamW makes a step of its rounding."""
    alone = transformed(tmp_path / "alone", 1, sharded=True, **ADAMW)
    for line, same in zip(metrics_of(open_run(folder / "shares")), metrics_of(alone), strict=True):
        assert line == pytest.approx(same, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer.name": "lars"}, "LARS needs the norms of whole weights"),
        ({"backbone.name": "tico/resnet10-w4", "backbone.arguments": {}}, "needs a vision transformer"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        pretrain("demo", out=tmp_path / "run", overrides=TRANSFORMER | changes | {"training.sharded": True})
