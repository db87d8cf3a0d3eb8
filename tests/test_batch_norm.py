"""Calibration of BatchNorm: running statistics become plain averages over the batches that were shown."""

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from test_distributed import in_two_processes
from tico_ssl.networks import batch_norm
from tico_ssl.networks.batch_norm import SharedBatchNorm, calibrate, share_statistics
from tico_ssl.runtime.errors import UserError


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = (0.5, 2.0, 5.0)
    return [torch.randn(6, 3, 4, 4, generator=generator) * scale + scale for scale in scales]


def test_running_statistics_are_averages_over_batches():
    batches = make_batches()
    model = nn.Sequential(nn.BatchNorm2d(3))
    calibrate(model, batches)
    means = torch.stack([batch.mean(dim=(0, 2, 3)) for batch in batches])
    variances = torch.stack([batch.var(dim=(0, 2, 3)) for batch in batches])  # unbiased, as torch tracks them
    torch.testing.assert_close(model[0].running_mean, means.mean(dim=0))
    torch.testing.assert_close(model[0].running_var, variances.mean(dim=0))
    assert int(model[0].num_batches_tracked) == len(batches)


def test_deeper_layers_see_normalised_inputs():
    """The second layer's statistics are those behind a first layer that normalises by batch, as in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(16))
    batches = make_batches()
    with torch.no_grad():
        hidden = [model[:4].train()(batch) for batch in batches]
    calibrate(model, iter(batches))
    torch.testing.assert_close(model[4].running_mean, torch.stack([h.mean(dim=0) for h in hidden]).mean(dim=0))
    torch.testing.assert_close(model[4].running_var, torch.stack([h.var(dim=0) for h in hidden]).mean(dim=0))


def test_what_was_tracked_before_is_forgotten():
    batches = make_batches()
    fresh, used = nn.Sequential(nn.BatchNorm2d(3)), nn.Sequential(nn.BatchNorm2d(3))
    for _ in range(5):
        used(torch.randn(4, 3, 2, 2) * 100)
    calibrate(fresh, batches)
    calibrate(used, batches)
    torch.testing.assert_close(used.state_dict(), fresh.state_dict())


def test_momenta_come_back_and_the_model_is_in_evaluation_mode():
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=0.03), nn.BatchNorm2d(3, momentum=None), nn.Dropout(0.5))
    assert calibrate(model.train(), make_batches()) is model
    assert [model[0].momentum, model[1].momentum] == [0.03, None]
    assert not any(module.training for module in model.modules())


def test_weights_and_gradients_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    before = [parameter.clone() for parameter in model.parameters()]
    calibrate(model, make_batches())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_calibrated_model_normalises_what_it_was_calibrated_on():
    batch = make_batches()[2]
    model = calibrate(nn.Sequential(nn.BatchNorm2d(3)), [batch])
    output = model(batch)
    torch.testing.assert_close(output.mean(dim=(0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.std(dim=(0, 2, 3)), torch.ones(3), rtol=0, atol=1e-2)


def test_a_model_without_batch_norm_is_no_problem():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.GroupNorm(1, 2))
    assert not calibrate(model, make_batches()).training


def test_alone_nothing_is_shared():
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert share_statistics(model) is model
    assert type(model[0]) is nn.BatchNorm2d


def test_shared_batch_norm_alone_is_batch_norm():
    ours, theirs = SharedBatchNorm(3), nn.BatchNorm2d(3)
    for batch in make_batches():
        torch.testing.assert_close(ours(batch), theirs(batch))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def with_activations():
    """As many of timm's networks have it: activation and dropout inside of BatchNorm."""
    torch.manual_seed(0)
    acted = BatchNormAct2d(4, act_layer=nn.SiLU, drop_layer=lambda: nn.Hardtanh(-0.5, 0.5))
    return nn.Sequential(nn.Conv2d(3, 4, 3), acted, nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)).double()


def halves(rank):
    """Outputs, gradients and statistics of a step on half of a batch, and the outputs in evaluation mode."""
    model = share_statistics(with_activations()) if rank is not None else with_activations()
    images = make_batches()[1].double()
    mine = images if rank is None else images[3 * rank : 3 * rank + 3]
    output = model(mine)
    (output.cos().sum() * (1 if rank is None else 2)).backward()
    found = {"output": output.detach(), "evaluated": model.eval()(mine).detach()}
    return found | {name: weight.grad for name, weight in model.named_parameters()} | dict(model.named_buffers())


def test_activations_inside_batch_norm_stay_with_several_processes(tmp_path):
    parts, whole = in_two_processes(halves, tmp_path), halves(None)
    for name, value in whole.items():
        if name in ("output", "evaluated"):
            found = torch.cat([part[name] for part in parts])
        else:  # gradients are averaged over processes
            found = torch.stack([part[name].double() for part in parts]).mean(0).to(value.dtype)
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12, msg=name)


def test_activations_inside_batch_norm_stay_on_gpus():
    """There the conversion is timm's own; in evaluation mode it runs on a CPU, too."""
    model = calibrate(with_activations(), [batch.double() for batch in make_batches()])
    converted = copy.deepcopy(model)
    batch_norm._convert_on_gpu(converted, has_activations=True)
    assert {type(converted[1]).__name__, type(converted[3]).__name__} == {"SyncBatchNormAct", "SyncBatchNorm"}
    images = make_batches()[0].double()
    torch.testing.assert_close(converted(images), model(images))
    assert converted.state_dict().keys() == model.state_dict().keys()


class Odd(nn.BatchNorm2d):
    def forward(self, input):
        return -super().forward(input)


def test_a_batch_norm_with_a_forward_pass_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(batch_norm.distributed, "active", lambda: True)
    with pytest.raises(UserError, match="several processes cannot share the statistics of Odd"):
        share_statistics(nn.Sequential(Odd(3)))
