"""Classifiers on labelled images: schedules at their steps, frozen to the bit, heads that do not touch each other,
resumed as if never stopped."""

import copy
import math
import os
import socket

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from tico_ssl import evaluate, load_backbone
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.evaluations import fine_tune, inaturalist2018, linear_augmented, places205, semi_supervised
from tico_ssl.evaluations._classification import fine_tuning
from tico_ssl.evaluations._classification import training as loop
from tico_ssl.evaluations._classification.settings import Settings
from tico_ssl.evaluations._classification.training import Classifier, Job, classes_of, make_optimizer, train_classifier
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._session import Asked, Session
from tico_ssl.features.scores import top_accuracies
from tico_ssl.methods._base import Batch
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.results.statistics import mean_and_deviation
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.training.checkpoint import StopRequest

CPU = torch.device("cpu")
QUICK = {"epochs": 2, "least_steps": 0, "batch_size": 8, "precision": "fp32"}


def small_backbone(seed=0):
    torch.manual_seed(seed)
    return build_backbone(BackboneConfig(name="tico/resnet10-w2", zero_gamma=False), 8)


def images_of(count=40, classes=4, seed=0):
    """Noise around a grey value that tells the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    noise = torch.randint(0, 40, (count, 3, 8, 8), generator=generator)
    return from_arrays("greys", (noise + 50 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)


@pytest.fixture
def greys(tmp_path):
    """The same as a file with splits, and a backbone file."""
    train, test = images_of(), images_of(16, seed=1)
    np.savez(
        tmp_path / "greys.npz",
        x_train=train.images.permute(0, 2, 3, 1).numpy(),
        y_train=train.labels.numpy(),
        x_test=test.images.permute(0, 2, 3, 1).numpy(),
        y_test=test.labels.numpy(),
    )
    save_backbone(small_backbone(), tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors", str(tmp_path / "greys.npz")


# ---------------------------------------------------------------------------------------------------- settings


def rates(settings, steps_per_epoch, base):
    """The rate in the first step of every epoch."""
    steps = settings.epochs * steps_per_epoch
    return [base * settings.share_of_rate(epoch * steps_per_epoch, steps) for epoch in range(settings.epochs)]


def test_linear_evaluation_has_the_papers_values():
    config = linear_augmented.Config()
    assert (config.epochs, config.batch_size, config.lrs, config.schedule) == (80, 1024, (0.4,), "cosine")
    assert (config.momentum, config.nesterov, config.weight_decay, config.crop_scale) == (0.9, True, 0.0, (0.08, 1.0))
    found = rates(config, 1251, 0.4)
    assert found[0] == pytest.approx(0.4)
    assert found[40] == pytest.approx(0.2)
    assert config.share_of_rate(80 * 1251, 80 * 1251) == 0


@pytest.mark.parametrize("steps_per_epoch", [1, 50, 500])
def test_semi_supervised_rates_fall_to_a_fifth_after_epochs_12_and_16(steps_per_epoch):
    config = semi_supervised.Config()
    assert (config.epochs, config.batch_size, config.lr_backbone, config.lr_head) == (20, 256, 0.002, 0.5)
    assert (config.momentum, config.nesterov, config.weight_decay, config.shares) == (0.9, True, 0.0, (0.01, 0.1))
    expected = [0.5] * 12 + [0.1] * 4 + [0.02] * 4
    assert rates(config, steps_per_epoch, 0.5) == pytest.approx(expected)
    before = config.share_of_rate(12 * steps_per_epoch - 1, 20 * steps_per_epoch)
    assert before == 1


@pytest.mark.parametrize(
    "protocols, sampling, interpolation",
    [
        ([linear_augmented], "clipped", "bicubic"),
        ([semi_supervised, fine_tune, places205, inaturalist2018], "rejection", "bilinear"),
    ],
)
def test_training_crops_are_those_of_the_program_that_a_protocol_comes_from(protocols, sampling, interpolation):
    for protocol in protocols:
        policy = protocol.Config().policy()
        assert (policy.crop_sampling, policy.interpolation) == (sampling, interpolation)
        assert protocol.Config(crop_sampling="distorted").policy().crop_sampling == "distorted"


def test_places_and_inaturalist_have_the_papers_schedules():
    places = places205.Config()
    assert (places.epochs, places.batch_size, places.weight_decay, places.nesterov) == (14, 256, 0.0, False)
    expected = [0.05] * 4 + [0.025] * 4 + [0.0125] * 4 + [0.00625] * 2
    assert rates(places, 9571, places.lrs[0]) == pytest.approx(expected)
    nature = inaturalist2018.Config()
    assert (nature.epochs, nature.batch_size, nature.weight_decay) == (84, 256, 0.0)
    expected = [4.0] * 24 + [0.4] * 24 + [0.04] * 24 + [0.004] * 12
    assert rates(nature, 1709, nature.lrs[0]) == pytest.approx(expected)


def schedule(config, images, processes=1):
    """Epochs, steps per epoch and images per step."""
    batch = config.batch_of(images, processes)
    return config.epochs_of(images // batch), images // batch, batch


@pytest.mark.parametrize(
    "config, images",
    [
        (linear_augmented.Config(), 1_281_167),
        (semi_supervised.Config(), 128_116),  # 10 % of ImageNet
        (semi_supervised.Config(), 12_811),  # 1 %
        (places205.Config(), 2_448_873),
        (inaturalist2018.Config(), 437_513),
        (fine_tune.Config(), 50_000),
    ],
)
def test_published_schedules_are_kept_at_the_size_of_their_data(config, images):
    assert schedule(config, images) == (config.epochs, images // config.batch_size, config.batch_size)


def test_small_data_get_smaller_batches_and_then_more_epochs():
    assert schedule(fine_tune.Config(), 1_000) == (30, 33, 30)
    assert schedule(linear_augmented.Config(), 1_000) == (82, 12, 80)
    for kind in (fine_tune, semi_supervised, linear_augmented, places205, inaturalist2018):
        config = kind.Config()
        for images in (2, 9, 16, 40, 100, 333, 1_000, 3_000, 8_000, 12_000, 30_000, 200_000):
            epochs, per_epoch, batch = schedule(config, images)
            assert batch == min(config.batch_size, images, max(16, config.epochs * images // 1_000))
            assert epochs == max(config.epochs, round(math.sqrt(config.epochs * 1_000 / per_epoch)))
            assert config.images_seen(images) == epochs * per_epoch * batch
            if 16 < batch < config.batch_size:  # about 1,000 steps, in the published number of epochs
                assert epochs * per_epoch == pytest.approx(1_000, rel=0.1)
                assert epochs == pytest.approx(config.epochs, rel=0.1)
    seen = [fine_tune.Config().images_seen(images) for images in (10, 100, 1_000, 10_000, 100_000)]
    assert seen == sorted(seen)  # less data are less work


def test_schedules_that_are_given_are_exact():
    assert schedule(fine_tune.Config(epochs=5), 1_000) == (5, 3, 256)
    assert schedule(fine_tune.Config(epochs=30), 1_000) == (30, 3, 256)  # also where it is the default
    assert schedule(fine_tune.Config(batch_size=64), 1_000) == (30, 15, 64)
    assert schedule(fine_tune.Config(least_steps=1_000), 1_000) == (334, 3, 256)
    assert schedule(fine_tune.Config(epochs=5, least_steps=10), 1_000) == (5, 3, 256)
    config = fine_tune.Config()
    assert schedule(fine_tune.Config.model_validate(config.model_dump()), 1_000) == schedule(config, 1_000)


def test_small_batches_suit_several_processes():
    assert fine_tune.Config().batch_of(1_000, 4) == 28
    assert fine_tune.Config().batch_of(100, 16) == 32  # two images each


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"decay_at": [0.0]}, {"momentum": 0.0}, {"crop_scale": [0.5, 0.2]}, {"lr": 3.0}]
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(ValidationError):
        Settings.model_validate(wrong)


# ---------------------------------------------------------------------------------------------------- the classifier


def test_heads_are_linear_and_begin_alike():
    classifier = Classifier(small_backbone(), 5, 3, frozen=True, batch_norm=False, seed=0)
    weights = [head.weight for head in classifier.heads]
    assert torch.equal(weights[0], weights[1])
    assert weights[0].std().item() == pytest.approx(0.01, rel=0.3)
    assert all((head.bias == 0).all() for head in classifier.heads)


def test_batch_norm_before_a_head_is_vissls():
    """vissl/models/heads/linear_eval_mlp.py: affine, eps 1e-5, momentum 0.1; no weight decay of its parameters."""
    classifier = Classifier(small_backbone(), 5, 1, frozen=True, batch_norm=True, seed=0)
    norm, linear = classifier.heads[0]
    plain = Classifier(small_backbone(), 5, 1, frozen=True, batch_norm=False, seed=0).heads[0]
    assert torch.equal(linear.weight, plain.weight)
    assert (norm.eps, norm.momentum, norm.affine) == (1e-5, 0.1, True)
    features = torch.randn(64, norm.num_features, generator=torch.Generator().manual_seed(0)) * 3 + 1
    expected = linear((features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt())
    assert torch.allclose(classifier.heads[0](features), expected, atol=1e-5)  # scale 1 and shift 0 at the beginning
    optimizer = make_optimizer(classifier, [0.01], None, Settings(weight_decay=5e-4))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(linear.weight)}
    job = Job("test", images_of(), 4, Settings(**QUICK), CPU)
    scale, shift = train_classifier(job, small_backbone(), (0.1,), None, batch_norm=True).heads[0][0].parameters()
    assert (scale != 1).any() and (shift != 0).any()


def test_each_head_learns_as_if_it_were_alone():
    """Nesterov's SGD at its own rate, on the same crops."""
    source, settings = images_of(), Settings(**QUICK)

    def trained(*lrs):
        job = Job("test", source, 4, settings, CPU)
        return train_classifier(job, small_backbone(), lrs, None)

    both, slow, fast = trained(0.1, 1.0), trained(0.1), trained(1.0)
    assert torch.equal(both.heads[0].weight, slow.heads[0].weight)
    assert torch.equal(both.heads[1].weight, fast.heads[0].weight)
    assert not torch.equal(slow.heads[0].weight, fast.heads[0].weight)


def test_a_head_that_diverges_leaves_the_others_alone_and_all_of_them_are_an_error():
    source = images_of()
    job = Job("probe", source, 4, Settings(**QUICK), CPU)
    both = train_classifier(job, small_backbone(), (0.1, 1e38), None)
    alone = train_classifier(job, small_backbone(), (0.1,), None)
    assert torch.equal(both.heads[0].weight, alone.heads[0].weight)
    message = r"^probe: the loss became (nan|inf) at or before step 5: lower the learning rate$"
    with pytest.raises(UserError, match=message):
        train_classifier(job, small_backbone(), (1e38,), None)


def test_two_steps_by_hand():
    """Full batches without crops: the loop is Nesterov's SGD on softmax regression, in float64 beside it."""
    source = images_of(8)
    settings = Settings(
        **QUICK | {"schedule": "steps", "decay_at": (0.5,), "decay": 0.1},
        crop_scale=(1.0, 1.0),
        crop_ratio=(1.0, 1.0),
        flip=0.0,
    )
    backbone = small_backbone().eval()
    start = Classifier(backbone, 4, 1, True, False, seed=0).heads[0].weight.double()
    found = train_classifier(Job("test", source, 4, settings, CPU), copy.deepcopy(backbone), (0.3,), None).heads[0]
    with torch.no_grad():
        features = backbone(backbone.preprocess(source.images)).double()
    weight = start.detach().clone().requires_grad_()
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for lr in (0.3, 0.03):
        loss = F.cross_entropy(features @ weight.T + bias, source.labels)
        gradients = torch.autograd.grad(loss, (weight, bias))
        for parameter, gradient, momentum in zip((weight, bias), gradients, momenta):
            momentum.mul_(0.9).add_(gradient)
            parameter.data -= lr * (gradient + 0.9 * momentum)
    assert torch.allclose(found.weight.double(), weight, atol=1e-6)
    assert torch.allclose(found.bias.double(), bias, atol=1e-6)


def test_a_frozen_backbone_is_the_same_bits_and_the_other_is_not():
    source, settings = images_of(), Settings(**QUICK)
    frozen, tuned = small_backbone(), small_backbone()
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    job = Job("test", source, 4, settings, CPU)
    classifier = train_classifier(job, frozen, (0.1,), None, batch_norm=True)
    assert all(torch.equal(value, before[name]) for name, value in classifier.backbone.state_dict().items())
    assert not classifier.backbone.training
    assert classifier.heads[0][0].num_batches_tracked == 10
    changed = train_classifier(job, tuned, (0.1,), 0.01).backbone.state_dict()
    kinds = ("conv1.weight", "bn1.weight", "bn1.running_mean")
    assert not any(torch.equal(changed[f"network.{name}"], before[f"network.{name}"]) for name in kinds)


def test_a_frozen_backbone_that_changes_is_found_out(monkeypatch):
    monkeypatch.setattr(Classifier, "train", lambda self, mode=True: torch.nn.Module.train(self, mode))
    with pytest.raises(AssertionError, match="frozen backbone has changed"):
        train_classifier(Job("test", images_of(), 4, Settings(**QUICK), CPU), small_backbone(), (0.1,), None)


def test_rates_of_parts_and_no_decay_for_what_has_one_dimension():
    classifier = Classifier(small_backbone(), 4, 1, frozen=False, batch_norm=False, seed=0)
    optimizer = make_optimizer(classifier, [0.5], 0.002, Settings(weight_decay=1e-4))
    groups = [(group["lr_ratio"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    backbone = list(classifier.backbone.parameters())
    flat = sum(parameter.ndim == 1 for parameter in backbone)
    assert groups == [(0.5, 1e-4, 1), (0.5, 0.0, 1), (0.002, 1e-4, len(backbone) - flat), (0.002, 0.0, flat)]


def test_the_loss_is_cross_entropy_of_the_label():
    classifier = Classifier(small_backbone(), 4, 2, frozen=True, batch_norm=False, seed=0)
    label = torch.tensor([1, 3])
    output = classifier(Batch((torch.zeros(2, 3, 8, 8),), torch.arange(2), label))
    logits = classifier.heads[0](classifier.backbone(torch.zeros(2, 3, 8, 8)))
    assert output.loss.item() == pytest.approx(2 * F.cross_entropy(logits, label).item())


def test_scores():
    scores = torch.tensor([[0.9, 0.1, 0, 0, 0, 0], [0.5, 0.4, 0.3, 0.2, 0.1, 0.0], [0, 1, 2, 3, 4, 5.0]])
    assert top_accuracies(scores, torch.tensor([0, 4, 0])) == {
        "top1": pytest.approx(100 / 3),
        "top5": pytest.approx(200 / 3),
    }
    assert top_accuracies(scores[:, :2], torch.tensor([1, 1, 0]))["top5"] == 100
    assert mean_and_deviation([{"a": 1.0}, {"a": 3.0}]) == {"a": 2.0, "a_std": pytest.approx(math.sqrt(2))}
    assert mean_and_deviation([{"a": 1.0}]) == {"a": 1.0}


def test_classes_count_those_of_both_splits():
    train, test = images_of(8, classes=2), images_of(8, classes=4)
    assert classes_of(train, test) == 4


def test_too_few_images_are_refused_in_a_line():
    with pytest.raises(UserError, match=r"^test: too few training images \(1\)$"):
        train_classifier(Job("test", images_of(1), 4, Settings(**QUICK), CPU), small_backbone(), (0.1,), None)


# ---------------------------------------------------------------------------------------------------- resume


class Crash(Exception):
    pass


def crash_after(monkeypatch, steps):
    """The loop dies at its so many-th step, over all trainings."""
    real, calls = loop.Step.__call__, []

    def step(self, *arguments):
        if len(calls) == steps:
            raise Crash
        calls.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(loop.Step, "__call__", step)


@pytest.mark.parametrize("backbone_rate", [None, 0.01])
def test_a_resumed_training_is_an_uninterrupted_one_to_the_bit(tmp_path, monkeypatch, backbone_rate):
    settings = Settings(**QUICK | {"epochs": 4})

    def training(folder):
        job = Job("test", images_of(), 4, settings, CPU, tmp_path / folder / "last.pt")
        return train_classifier(job, small_backbone(), (0.1, 0.5), backbone_rate)

    whole = training("whole").state_dict()
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    with monkeypatch.context() as patch:
        crash_after(patch, 13)  # in the third epoch of five steps
        with pytest.raises(Crash):
            training("cut")
    assert torch.load(tmp_path / "cut" / "last.pt", weights_only=True)["step"] == 10
    resumed = training("cut").state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("protocol", ["semi-supervised", "linear-augmented", "fine-tune"])
def test_the_same_command_goes_on_where_it_was(greys, monkeypatch, tmp_path, protocol):
    file, data = greys
    overrides = QUICK | ({"shares": [0.2, 0.5]} if protocol == "semi-supervised" else {})
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    whole = evaluate(file, protocol, data, overrides, cache=False)
    steps = []
    monkeypatch.setattr(
        loop.Step, "__call__", lambda self, *a, real=loop.Step.__call__: steps.append(1) or real(self, *a)
    )
    with monkeypatch.context() as patch:
        crash_after(patch, 7)
        with pytest.raises(Crash):
            evaluate(file, protocol, data, overrides)
    done = len(steps)
    assert evaluate(file, protocol, data, overrides).numbers == whole.numbers
    again = len(steps)
    assert evaluate(file, protocol, data, overrides).numbers == whole.numbers  # all is made already
    assert len(steps) == again > done
    assert not list(file.with_suffix("").rglob("*.pt"))


def test_ctrl_c_writes_a_checkpoint(greys, monkeypatch):
    file, data = greys
    monkeypatch.setattr(StopRequest, "agreed", lambda self, ended: True)
    with pytest.raises(Interrupted, match="fine-tune trained: stopped after step 1 of 10; the same command continues"):
        evaluate(file, "fine-tune", data, QUICK)
    assert [path.name for path in file.with_suffix("").rglob("*.pt")] == ["trained.pt"]


# ---------------------------------------------------------------------------------------------------- protocols


def test_linear_evaluation_learns_what_there_is_and_chooses_the_rate_on_held_out_images(greys):
    file, data = greys
    overrides = QUICK | {"epochs": 40, "lrs": [1e-6, 0.3], "held_out": 5, "batch_norm": True}
    result = evaluate(file, "linear-augmented", data, overrides)
    assert result.numbers["trained"]["lr"] == 0.3
    assert result.numbers["trained"]["top1"] > 60
    assert result.numbers["trained"].keys() == {"top1", "top5", "lr"}
    assert result.settings["held_out"] == 5


def test_held_out_images_are_not_trained_on(greys, monkeypatch):
    file, data = greys
    seen = []

    def spy(job, *arguments):
        seen.append(len(job.train))
        return train_classifier(job, *arguments)

    monkeypatch.setattr(linear_augmented, "train_classifier", spy)
    evaluate(file, "linear-augmented", data, QUICK | {"lrs": [0.1, 0.2]})
    evaluate(file, "linear-augmented", data, QUICK | {"lrs": [0.1]})
    assert seen == [36, 36, 40, 40]


def test_semi_supervised_uses_shares_draws_and_lists(greys, monkeypatch):
    file, data = greys
    seen = []

    def spy(job, *arguments):
        seen.append(job.train.labels.tolist())
        return train_classifier(job, *arguments)

    monkeypatch.setattr(fine_tuning, "train_classifier", spy)
    overrides = QUICK | {"shares": [0.2, 0.5], "draws": 2}
    result = evaluate(file, "semi-supervised", data, overrides)
    assert [len(labels) for labels in seen] == [8, 8, 20, 20] * 2  # for both backbones
    assert all(np.bincount(labels).tolist() == [len(labels) // 4] * 4 for labels in seen)
    assert result.data["labelled"] == {"20%": 8, "50%": 20}
    expected = {f"top{k}_{share}%{end}" for k in (1, 5) for share in (20, 50) for end in ("", "_std")}
    assert result.numbers["untrained"].keys() == expected
    with pytest.raises(UserError, match="names are not among the 40 training images"):
        file.with_name("list.txt").write_text("a.png\n")
        evaluate(file, "semi-supervised", data, QUICK | {"list": str(file.with_name("list.txt"))})


def counted_trainings(monkeypatch, *modules):
    """What is trained on, by the labels."""
    seen = []
    real = train_classifier
    for module in modules:
        monkeypatch.setattr(module, "train_classifier", lambda job, *a: seen.append(job.train.labels) or real(job, *a))
    return seen


def test_other_labels_of_the_same_images_are_other_data(greys, monkeypatch):
    file, data = greys
    seen = counted_trainings(monkeypatch, fine_tuning, linear_augmented)
    protocols = ("svm", "linear-augmented", "fine-tune", "semi-supervised")
    short = {"svm": {"costs": [1.0], "folds": 2}, "semi-supervised": QUICK | {"shares": [0.5]}}

    def numbers():
        return [evaluate(file, name, data, short.get(name, QUICK)).numbers["trained"] for name in protocols]

    before = numbers()
    assert (len(seen), numbers()) == (6, before)
    assert len(seen) == 6
    arrays = dict(np.load(data))
    for name in ("y_train", "y_test"):
        arrays[name] = arrays[name] // 2
    np.savez(data, **arrays)
    assert numbers()[0] != before[0]
    assert len(seen) == 12
    np.savez(data, **arrays, classes=np.array(["dark", "bright"]))
    numbers()
    assert len(seen) == 18


def test_another_list_in_the_same_file_is_trained_on_anew(greys, monkeypatch, tmp_path):
    file, data = greys
    seen = counted_trainings(monkeypatch, fine_tuning)
    images = tmp_path / "list.txt"
    for chosen, trainings in ((range(8), 2), (range(8), 2), (range(4, 12), 4)):
        images.write_text("\n".join(map(str, chosen)))
        evaluate(file, "semi-supervised", data, QUICK | {"list": str(images)})
        assert len(seen) == trainings
    some = Asked(file, data, {"semi-supervised": {"list": str(images)}}, True, False, True, False, False)
    assert Session(some)._known("semi-supervised") is None


def test_a_list_of_files_is_what_is_trained_on(folder_of_images, tmp_path, monkeypatch):
    save_backbone(small_backbone(), tmp_path / "b.safetensors")
    (tmp_path / "list.txt").write_text("0.png\n1.png\n2.png\n5.png\n")
    context = open_context(tmp_path / "b.safetensors", str(folder_of_images))
    names = {context.train.names(place).split("/")[-1] for place in range(len(context.train))}
    wanted = sorted(names)[:4]
    (tmp_path / "list.txt").write_text("\n".join(wanted))
    overrides = QUICK | {"list": str(tmp_path / "list.txt"), "batch_size": 2, "epochs": 1}
    result = evaluate(tmp_path / "b.safetensors", "semi-supervised", str(folder_of_images), overrides)
    assert result.data["labelled"] == {"listed": 4}
    assert result.numbers["trained"].keys() == {"top1_listed", "top5_listed"}


def test_fine_tuning_learns_and_keeps_what_it_made(greys):
    file, data = greys
    result = evaluate(file, "fine-tune", data, QUICK | {"epochs": 25, "crop_scale": [0.5, 1.0]})
    assert result.numbers.keys() == {"trained", "untrained"}
    assert result.numbers["trained"]["top1"] > 60
    (folder,) = {path.parent for path in file.with_suffix("").rglob("head.safetensors")}
    backbone = load_backbone(folder / "backbone.safetensors")
    from safetensors.torch import load_file

    head = load_file(folder / "head.safetensors")
    test = images_of(16, seed=1)
    with torch.no_grad():
        scores = backbone(backbone.preprocess(test.images)) @ head["weight"].T + head["bias"]
    assert top_accuracies(scores, test.labels)["top1"] == pytest.approx(result.numbers["trained"]["top1"])


def test_the_backbone_of_a_run_is_not_touched_by_fine_tuning(greys):
    file, data = greys
    before = file.read_bytes()
    context = open_context(file, data)
    states = {name: copy.deepcopy(backbone.state_dict()) for name, backbone in context.backbones.items()}
    fine_tune.run(context, fine_tune.Config(**QUICK))
    linear_augmented.run(context, linear_augmented.Config(**QUICK))
    for name, backbone in context.backbones.items():
        assert all(torch.equal(value, states[name][key]) for key, value in backbone.state_dict().items())
    assert file.read_bytes() == before


def test_crops_of_files_are_cut_from_enough_pixels(tmp_path):
    """Large JPEGs are reduced for their centre, but less for crops of 8 % of their area."""
    from PIL import Image

    for number in range(8):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((200, 200, 3), 20 * number, dtype=np.uint8)).save(folder / f"{number}.jpg")
    save_backbone(small_backbone(), tmp_path / "b.safetensors")
    context = open_context(tmp_path / "b.safetensors", str(tmp_path / "photos"))
    assert context.train.fetch(0).shape[-1] == 25
    crops = context.training_images(29)
    assert crops.fetch(0).shape[-1] == 50
    assert [crops.names(i) for i in range(len(crops))] == [context.train.names(i) for i in range(len(crops))]


# ---------------------------------------------------------------------------------------------------- two processes


def train_in(rank, world, port, folder):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        job = Job("test", images_of(), 4, Settings(**QUICK), CPU)
        for name, rate in (("frozen", None), ("tuned", 0.01)):
            torch.save(train_classifier(job, small_backbone(), (0.1,), rate).state_dict(), f"{folder}/{name}{rank}.pt")
    finally:
        if world > 1:
            torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_what_one_trains(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (tmp_path / "one").mkdir()
    train_in(0, 1, port, tmp_path / "one")
    torch.multiprocessing.spawn(train_in, args=(2, port, str(tmp_path)), nprocs=2)
    for name in ("frozen", "tuned"):
        expected = torch.load(tmp_path / "one" / f"{name}0.pt", weights_only=True)
        found = [torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]
        for key, value in expected.items():
            assert torch.allclose(found[0][key].double(), value.double(), atol=2e-5), key
            assert torch.equal(found[0][key], found[1][key]), key
