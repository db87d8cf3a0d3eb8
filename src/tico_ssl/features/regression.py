"""Softmax regression for several weight decays at once, by L-BFGS from zero.

    f(W, b) = (1/n) sum_i [logsumexp_k (w_k.x_i + b_k) - (w_y.x_i + b_y)] + (decay / 2) |W|^2        y: the class of x_i

Two things make it fast. Logits are linear in the weights: along a search direction they are the current logits plus a
multiple of the direction's own, so a line search needs softmaxes and no further matmul with the features. And all
regressions share the same matmuls where that pays. Most iterations synchronise with the GPU twice, which matters where
several processes share it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEMORY = 50  # steps in the L-BFGS history
FLAT_ENOUGH = 0.5  # a step is accepted where the slope has fallen to this fraction of its initial value
SEARCHES = 6  # evaluations in a line search, at most
CONVERGED = 0.1  # times the machine epsilon: the slope below which a regression has converged
MOST_LOGITS = 2**28  # in memory for several regressions; a single one may have more

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]  # step size -> slope and probabilities there


class Line(NamedTuple):
    """The slope along a search direction at a step size: the softmax's part plus constant plus step times rise."""

    logits: Tensor
    change: Tensor
    constant: Tensor
    rise: Tensor


class Seen(NamedTuple):
    """A past step, the change of the gradient along it, and their dot product."""

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
    """One classifier for each weight decay."""
    classes = classes or int(labels.max()) + 1
    # On a GPU all at once. On a CPU one after the other, since each may converge early.
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
    """Weights (decays, classes, features + 1), the bias in the last column."""
    regressions, (images, width) = len(decays), features.shape
    decay = decays.view(-1, 1, 1).repeat(1, 1, width + 1)
    decay[..., -1] = 0  # none on the bias

    def sums(shares: Tensor) -> Tensor:
        """Features, and a one for the bias, summed with the weights of each column of shares (images, columns)."""
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
    """Dot product for each regression."""
    return (a * b).sum((1, 2))


def _direction(gradient: Tensor, history: deque[Seen]) -> Tensor:
    """Minus the inverse Hessian approximation times the gradient (L-BFGS two-loop recursion)."""
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
    """a / b, zero where b is zero: a regression that has converged no longer moves."""
    return torch.where(b > 0, a / b, 0)


def _step(slope: Slope, at_zero: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Line search: a step size at which the slope, which only rises, is near zero; and the probabilities there."""
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
