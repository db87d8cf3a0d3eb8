"""Softmax regression with several decays at once, by L-BFGS from zero.

    f(W, b) = (1/n) sum_i [logsumexp_k (w_k.x_i + b_k) - (w_y.x_i + b_y)] + (decay / 2) |W|^2        y: the class of x_i

Two things make it quick. Logits are linear in the weights: along a direction they are those of here plus a multiple of
the direction's own, so that a search takes softmaxes and no further product with the features. And all regressions are
columns of the same products where that pays. A GPU is asked for an answer twice in most iterations, which matters where
several processes share it and each answer has to wait for its turn.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEMORY = 50  # steps that the direction remembers
FLAT_ENOUGH = 0.5  # a step is taken where the slope along it has fallen to this share
SEARCHES = 6  # for it, at most
CONVERGED = 0.1  # times a number's precision: a slope that counts as none. A regression stays where it has arrived
MOST_LOGITS = 2**28  # held at once for several regressions; one alone may have more

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]  # of a step: the slope there, and the probabilities


class Line(NamedTuple):
    """Where a direction leads: its slope at a step is that of the softmax's part plus constant plus step times rise."""

    logits: Tensor
    change: Tensor
    constant: Tensor
    rise: Tensor


class Seen(NamedTuple):
    """A step that was made, how the gradient changed by it, and the product of both."""

    moved: Tensor
    change: Tensor
    curvature: Tensor


def fit_linear(
    features: Tensor, labels: Tensor, weight_decay: float, iterations: int, classes: int | None = None
) -> nn.Linear:
    """The classifier that minimises cross-entropy plus half the decay times the squared weights."""
    return fit_linears(features, labels, [weight_decay], iterations, classes)[0]


def fit_linears(
    features: Tensor, labels: Tensor, weight_decays: Sequence[float], iterations: int, classes: int | None = None
) -> list[nn.Linear]:
    """One classifier for every decay."""
    classes = classes or int(labels.max()) + 1
    # A GPU has room for all. A CPU takes one after the other, for each of them may end early.
    at_once = max(1, MOST_LOGITS // (len(features) * classes)) if features.is_cuda else 1
    return [
        linear
        for decays in features.new_tensor(weight_decays).split(at_once)
        for linear in _as_modules(minimise(features, labels, decays, iterations, classes))
    ]


def _as_modules(weights: Tensor) -> list[nn.Linear]:
    linears = []
    for weight in weights:
        linear = nn.Linear(weight.shape[1] - 1, len(weight)).to(weight).requires_grad_(False)
        linear.weight.copy_(weight[:, :-1])
        linear.bias.copy_(weight[:, -1])
        linears.append(linear)
    return linears


@torch.no_grad()
def minimise(features: Tensor, labels: Tensor, decays: Tensor, iterations: int, classes: int) -> Tensor:
    """Weights (decays, classes, features + 1), the bias in the last place."""
    regressions, (images, width) = len(decays), features.shape
    decay = decays.view(-1, 1, 1).repeat(1, 1, width + 1)
    decay[..., -1] = 0  # none on the bias

    def sums(shares: Tensor) -> Tensor:
        """The mean image, and a one for the bias, of each column of shares (images, columns)."""
        return torch.cat([shares.T @ features, shares.sum(0).unsqueeze(1)], dim=1) / images

    def logits_of(weights: Tensor) -> Tensor:
        product = features @ weights[..., :-1].reshape(-1, width).T
        return product.view(images, regressions, classes) + weights[..., -1]

    def gradient_of(probabilities: Tensor, weights: Tensor) -> Tensor:
        return sums(probabilities.view(images, -1)).view_as(weights) - of_class + decay * weights

    def slope_at(line: Line, step: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.addcmul(line.logits, line.change, step.view(1, -1, 1)).softmax(dim=2)
        return (probabilities * line.change).sum((0, 2)) / images + line.constant + step * line.rise, probabilities

    of_class = sums(F.one_hot(labels, classes).to(features))
    weights = features.new_zeros(regressions, classes, width + 1)
    logits = features.new_zeros(images, regressions, classes)
    gradient = gradient_of(logits + 1 / classes, weights)
    history: deque[Seen] = deque(maxlen=MEMORY)
    for iteration in range(iterations):
        direction = _direction(gradient, history)
        falls = _dot(gradient, direction)
        falls = torch.where(falls < -CONVERGED * torch.finfo(falls.dtype).eps, falls, 0)
        if bool((falls == 0).all()):
            break
        constant = _dot(decay * weights - of_class, direction)
        line = Line(logits, logits_of(direction), constant, _dot(decay * direction, direction))
        first = 1 / gradient.abs().sum((1, 2)).clamp_min(1) if iteration == 0 else torch.ones_like(decays)
        step, probabilities = _step(partial(slope_at, line), falls, first)
        moved = step.view(-1, 1, 1) * direction
        weights, logits = weights + moved, logits.addcmul_(line.change, step.view(1, -1, 1))
        before, gradient = gradient, gradient_of(probabilities, weights)
        history.append(Seen(moved, gradient - before, _dot(moved, gradient - before)))
    return weights


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each regression."""
    return (a * b).sum((1, 2))


def _direction(gradient: Tensor, history: deque[Seen]) -> Tensor:
    """Minus the gradient times the inverse curvature that the last steps have seen (Nocedal's two loops)."""
    direction, shares = -gradient, []
    for moved, change, curvature in reversed(history):
        share = _quotient(_dot(moved, direction), curvature)
        direction = direction - share.view(-1, 1, 1) * change
        shares.append(share)
    if history:
        last = history[-1]
        scale = _quotient(last.curvature, _dot(last.change, last.change))
        direction = direction * torch.where(scale > 0, scale, 1).view(-1, 1, 1)
    for (moved, change, curvature), share in zip(history, reversed(shares)):
        rest = share - _quotient(_dot(change, direction), curvature)
        direction = direction + rest.view(-1, 1, 1) * moved
    return direction


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Zero where there is nothing to divide by: a regression that has arrived no longer moves."""
    return torch.where(b > 0, a / b, 0)


def _step(slope: Slope, at_zero: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """How far to go: where the slope, which only rises, is near enough to zero. And what is there."""
    low, slope_low = torch.zeros_like(first), at_zero
    high = torch.full_like(first, torch.inf)
    step = torch.where(at_zero < 0, first, 0)
    for search in range(SEARCHES):
        found, there = slope(step)
        done = (found.abs() <= FLAT_ENOUGH * at_zero.abs()) | (step == 0)
        if bool(done.all()) or search == SEARCHES - 1:
            break
        falls = found < 0
        secant = low + (step - low) * _quotient(-slope_low, found - slope_low)
        guess = torch.where(falls, secant.clamp(1.5 * step, 10 * step), secant)
        high = torch.where(falls, high, step)
        low, slope_low = torch.where(falls, step, low), torch.where(falls, found, slope_low)
        middle = (low + high.clamp_max(10 * step)) / 2
        step = torch.where(done, step, torch.where((guess > low) & (guess < high), guess, middle))
    return step, there
