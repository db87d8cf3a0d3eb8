"""Learning rate and decay of the target at the corners of their schedules, and the plan of the packaged recipe."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.optim.schedules import cosine_ema_decay, scaled_lr, warmup_cosine, warmup_steps
from tico_ssl.training.plan import Plan

PHOTOS = load_recipe("photos")
some_examples = hypothesis_settings(max_examples=50, deadline=None)
near = {"rel": 1e-13, "abs": 1e-15}


# Learning rate


def test_corners_of_warmup_and_cosine():
    def rate(step: int) -> float:
        return warmup_cosine(step, total=110, warmup=10, peak=4.0, end=0.5)

    assert rate(0) == 0.0
    assert rate(1) == pytest.approx(0.4, **near)
    assert rate(5) == pytest.approx(2.0, **near)
    assert rate(9) == pytest.approx(3.6, **near)
    assert rate(10) == 4.0
    assert rate(35) == pytest.approx(0.5 + 3.5 * (1 + math.sqrt(0.5)) / 2, **near)  # a quarter of the cosine
    assert rate(60) == pytest.approx(2.25, **near)  # half of it
    assert rate(85) == pytest.approx(0.5 + 3.5 * (1 - math.sqrt(0.5)) / 2, **near)
    assert rate(110) == pytest.approx(0.5, **near)
    assert rate(111) == rate(10_000) == pytest.approx(0.5, **near)


def test_without_warmup_the_first_step_has_the_peak():
    assert warmup_cosine(0, total=100, warmup=0, peak=3.0, end=1.0) == 3.0
    assert warmup_cosine(50, total=100, warmup=0, peak=3.0, end=1.0) == pytest.approx(2.0, **near)
    assert warmup_cosine(100, total=100, warmup=0, peak=3.0, end=1.0) == pytest.approx(1.0, **near)


def test_a_run_of_one_step_has_the_peak():
    assert warmup_cosine(0, total=1, warmup=0, peak=3.0, end=0.0) == 3.0


@given(
    total=st.integers(2, 60),
    share=st.floats(0, 1),
    peak=st.floats(1e-3, 10),
    ratio=st.floats(0, 1),
)
@some_examples
def test_the_rate_rises_then_falls_by_the_formula(total, share, peak, ratio):
    warmup, end = min(int(share * total), total - 1), ratio * peak
    rates = [warmup_cosine(step, total, warmup, peak, end) for step in range(total + 1)]
    rising, falling = rates[: warmup + 1], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert rates[warmup] == pytest.approx(peak, **near)
    assert rates[total] == pytest.approx(end, **near)
    for step, rate in enumerate(rates):
        if step < warmup:
            expected = peak * step / warmup
        else:
            expected = end + (peak - end) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        assert rate == pytest.approx(expected, **near)


def test_a_warmup_may_start_above_zero():
    rates = [warmup_cosine(step, total=20, warmup=10, peak=4.8, end=0.0, start=0.3) for step in range(11)]
    assert rates == pytest.approx([0.3 + 0.45 * step for step in range(11)], **near)


@pytest.mark.parametrize("total", [10, 200, 1234])
def test_steps_fall_at_their_fractions(total):
    def rate(step: int) -> float:
        return warmup_steps(step, total, warmup=2, peak=3.0, decay_at=(0.5, 0.8), decay=0.1)

    assert [rate(0), rate(1), rate(2)] == [0.0, 1.5, 3.0]
    first, second = total // 2, round(0.8 * total)
    assert rate(first - 1) == 3.0
    assert rate(first) == rate(second - 1) == pytest.approx(0.3, **near)
    assert rate(second) == rate(total - 1) == rate(total) == pytest.approx(0.03, **near)


def test_without_falls_the_rate_is_constant():
    assert {warmup_steps(step, 50, 0, 0.7, decay_at=(), decay=0.1) for step in range(50)} == {0.7}


def test_the_rate_scales_linearly_with_the_batch():
    assert scaled_lr(0.2, 256) == 0.2
    assert scaled_lr(0.2, 4096) == pytest.approx(3.2, **near)
    assert scaled_lr(0.3, 64) == pytest.approx(0.075, **near)


# Plan


def test_plan_of_the_paper_s_recipe():
    recipe = load_recipe("imagenet/tico")
    plan = Plan.of(recipe, 312)  # 1,281,167 images // 4096
    assert 1_281_167 // recipe.training.batch_size == 312
    assert plan.steps_per_epoch == 312
    assert plan.steps == 312_000
    assert plan.warmup == 3_120
    assert plan.peak_lr == pytest.approx(3.2, **near)
    assert plan.end_lr == pytest.approx(0.032, **near)
    assert plan.lr(0) == 0.0
    assert plan.lr(1_560) == pytest.approx(1.6, **near)
    assert plan.lr(3_120) == pytest.approx(3.2, **near)
    assert plan.lr(157_560) == pytest.approx(1.616, **near)
    assert plan.lr(312_000) == pytest.approx(0.032, **near)


def test_the_paper_s_recipe_has_the_paper_s_constants():
    recipe = load_recipe("imagenet/tico")
    method, optimizer = recipe.method, recipe.optimizer
    assert (method.rho, method.beta, method.hidden, method.dim) == (8.0, 0.9, 4096, 256)
    assert (method.ema_start, method.ema_end, method.symmetric, method.view_order) == (0.99, 1.0, False, "fixed")
    assert (optimizer.name, optimizer.momentum, optimizer.trust_coefficient) == ("lars", 0.9, 1e-3)
    assert (optimizer.weight_decay, optimizer.one_dimensional_lr_ratio) == (1.5e-6, 1.0)
    assert (recipe.training.epochs, recipe.training.batch_size) == (1000, 4096)
    assert recipe.backbone.weight_standardisation


def test_plan_with_an_unscaled_rate_and_part_of_an_epoch_of_warmup():
    overrides = {"optimizer.scale_lr": False, "optimizer.lr": 0.6, "optimizer.warmup_epochs": 0.5, "training.epochs": 4}
    plan = Plan.of(load_recipe("imagenet/tico", overrides), 10)
    assert (plan.steps, plan.warmup) == (40, 5)
    assert plan.peak_lr == 0.6
    assert plan.end_lr == pytest.approx(0.006, **near)
    assert plan.lr(5) == pytest.approx(0.6, **near)


@pytest.mark.parametrize("epochs", [200, 20])
def test_moco_falls_at_three_and_four_fifths_of_any_length(epochs):
    """Epochs 120 and 160 of 200, as its code has them."""
    plan = Plan.of(load_recipe("imagenet/moco", {"training.epochs": epochs}), 5004)
    first, second = 5004 * epochs * 3 // 5, 5004 * epochs * 4 // 5
    steps = [0, first - 1, first, second - 1, second, plan.steps - 1]
    assert [plan.lr(step) for step in steps] == pytest.approx([0.03, 0.03, 0.003, 0.003, 3e-4, 3e-4], **near)


def test_supervised_training_falls_every_thirty_epochs():
    plan = Plan.of(load_recipe("imagenet/supervised"), 5004)
    epochs = [plan.lr(epoch * 5004) for epoch in range(90)]
    assert epochs == pytest.approx([0.1] * 30 + [0.01] * 30 + [0.001] * 30, **near)


def test_swav_warms_up_from_its_own_rate():
    plan = Plan.of(load_recipe("imagenet/swav"), 312)
    assert [plan.lr(0), plan.lr(3120), plan.lr(plan.steps)] == pytest.approx([0.3, 4.8, 0.0048], **near)


def test_warmup_ends_before_a_short_run_does():
    plan = Plan.of(load_recipe("imagenet/tico", {"training.epochs": 2}), 10)
    assert plan.steps == 20
    assert plan.warmup < 20
    assert plan.lr(plan.warmup) == pytest.approx(3.2, **near)
    assert plan.lr(20) == pytest.approx(0.032, **near)


# Decay of the target


def test_corners_of_the_decay():
    assert cosine_ema_decay(0.0, 0.99, 1.0) == pytest.approx(0.99, **near)
    assert cosine_ema_decay(0.25, 0.99, 1.0) == pytest.approx(1 - 0.005 * (1 + math.sqrt(0.5)), **near)
    assert cosine_ema_decay(0.5, 0.99, 1.0) == pytest.approx(0.995, **near)
    assert cosine_ema_decay(1.0, 0.99, 1.0) == 1.0
    assert cosine_ema_decay(0.0, 0.99) == pytest.approx(0.99, **near)
    assert cosine_ema_decay(1.0, 0.99) == 1.0
    assert cosine_ema_decay(0.5, 0.9, 0.98) == pytest.approx(0.94, **near)
    assert cosine_ema_decay(1.0, 0.9, 0.98) == pytest.approx(0.98, **near)


@given(start=st.floats(0, 1), end=st.floats(0, 1))
@some_examples
def test_the_decay_is_monotone_between_its_ends(start, end):
    values = [cosine_ema_decay(step / 40, start, end) for step in range(41)]
    steps = [b - a for a, b in pairwise(values)]
    sign = 1 if end >= start else -1
    assert all(sign * step >= -1e-15 for step in steps)
    assert values[0] == pytest.approx(start, **near)
    assert values[-1] == pytest.approx(end, **near)
    for step, value in enumerate(values):
        assert value == pytest.approx(end - (end - start) * (math.cos(math.pi * step / 40) + 1) / 2, **near)


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_decay_of_a_tensor_is_a_tensor(progress):
    decay = cosine_ema_decay(torch.tensor(progress, dtype=torch.float64), 0.99)
    assert isinstance(decay, torch.Tensor)
    assert decay.item() == pytest.approx(cosine_ema_decay(progress, 0.99), **near)


@pytest.mark.parametrize(
    ("warmup", "epochs", "steps", "said"),
    [
        (10.0, 100, 70, ""),
        (10.0, 20, 70, ""),
        (10.0, 19, 13, "a warm-up of 10 epochs is too long for a run of 19: shortened to 1.9"),
        (10.0, 1, 1, "a warm-up of 10 epochs is too long for a run of 1: shortened to 0.14"),
        (0.0, 1, 0, ""),
    ],
)
def test_a_warmup_that_is_longer_than_half_of_a_run_is_shortened(warmup, epochs, steps, said):
    plan = Plan.of(load_recipe("demo", {"optimizer.warmup_epochs": warmup, "training.epochs": epochs}), 7)
    assert (plan.warmup, plan.shortened) == (steps, said)


# Weight decay


@given(lr=st.floats(1e-3, 1.0), decay=st.floats(0, 0.1), batch=st.integers(2, 4096))
@some_examples
def test_rate_times_decay_is_the_same_for_all_batches(lr, decay, batch):
    optimizer = PHOTOS.optimizer.model_copy(update={"lr": lr, "weight_decay": decay})
    recipe = PHOTOS.model_copy(
        update={"optimizer": optimizer, "training": PHOTOS.training.model_copy(update={"batch_size": batch})}
    )
    plan = Plan.of(recipe, 10)
    assert plan.peak_lr * plan.optimizer.weight_decay == pytest.approx(lr * decay, rel=1e-12)
    fixed = recipe.model_copy(update={"optimizer": optimizer.model_copy(update={"scale_lr": False})})
    assert Plan.of(fixed, 10).optimizer.weight_decay == decay
    asked = recipe.model_copy(update={"optimizer": optimizer.model_copy(update={"scale_decay": False})})
    assert Plan.of(asked, 10).optimizer.weight_decay == decay


def test_recipes_after_published_settings_keep_their_decay_for_every_batch():
    for name in packaged_recipes():
        scaled = load_recipe(name).optimizer.scale_decay
        assert scaled == name.startswith("photos"), name
