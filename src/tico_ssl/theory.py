"""The paper's theory as functions, so that every claim, and every condition of a claim, can be tested.

Embeddings are rows, so Z is (n, d), the transpose of the paper's, and both matrices carry 1 / n everywhere:

    C = Z' Z / n   (d, d)   second moment, the paper's non-centred covariance      K = Z Z' / n   (n, n)   Gram matrix

The losses are those of training, from `tico_ssl.methods`; nothing here is used in training. Functions keep the
precision of their inputs: check identities in float64. docs/theory.md walks through them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.methods.barlow_twins import off_diagonal
from tico_ssl.methods.vicreg import EPSILON
from tico_ssl.runtime.errors import UserError

# The two matrices of a batch


def second_moment(z: Tensor) -> Tensor:
    """C = Z' Z / n (d, d) of embeddings (n, d). With unit rows its trace is one."""
    return z.T @ z / len(z)


def gram(z: Tensor) -> Tensor:
    """K = Z Z' / n (n, n) of embeddings (n, d): all pairwise similarities, divided by n."""
    return z @ z.T / len(z)


def shared_eigenvalues(z: Tensor) -> Tensor:
    """The min(n, d) eigenvalues that C and K share, in descending order. The others of the larger matrix are zero."""
    singular: Tensor = torch.linalg.svdvals(z)
    return singular.square() / len(z)


def participation_ratio(matrix: Tensor) -> Tensor:
    """(tr C)^2 / |C|^2: effective number of dimensions of a positive semi-definite matrix, from 1 to its rank."""
    return matrix.trace().square() / matrix.square().sum()


def frobenius_bounds(n: int, d: int) -> tuple[float, float]:
    """Lower and upper bound of |C|^2 for n unit rows in d dimensions: 1 / min(n, d) and 1.

    The eigenvalues sum to one and at most min(n, d) of them are non-zero, so Cauchy-Schwarz gives 1 / min(n, d). The
    paper's 1 / d is the same for n >= d and unattainable for n < d. One is full collapse.
    """
    _check_sizes(n, d)
    return 1 / min(n, d), 1.0


def most_spread(n: int, d: int) -> Tensor:
    """Unit rows (n, d) that attain the lower bound of |C|^2.

    Up to n = d they are orthonormal, K = I / n. Beyond, they are a tight frame, C = I / d: cosines and sines of integer
    frequencies, which are orthogonal over the n rows.
    """
    _check_sizes(n, d)
    if n <= d:
        return torch.eye(n, d, dtype=torch.float64)
    angles = 2 * math.pi / n * torch.outer(torch.arange(n), torch.arange(1, d // 2 + 1)).double()
    constant = torch.full((n, d % 2), math.sqrt(1 / d), dtype=torch.float64)  # one column where d is odd
    return torch.cat([math.sqrt(2 / d) * angles.cos(), math.sqrt(2 / d) * angles.sin(), constant], dim=1)


class Duality(NamedTuple):
    """Sums of squares on and off the diagonals of K and of C. K and C have the same total."""

    gram_off: Tensor
    gram_diagonal: Tensor
    covariance_off: Tensor
    covariance_diagonal: Tensor


def duality(z: Tensor) -> Duality:
    """Similarity of images (off-diagonal K) against redundancy of dimensions (off-diagonal C), at equal totals."""
    off_and_on = ((off_diagonal(m).square().sum(), m.diagonal().square().sum()) for m in (gram(z), second_moment(z)))
    return Duality(*(total for pair in off_and_on for total in pair))


# The moving average as a memory


def exponential_weights(beta: float, steps: int) -> Tensor:
    """Weights (1 - beta) beta^age of the batches in C_t, oldest first. Their sum is tr C_t = 1 - beta^steps."""
    _check_beta(beta)
    ages = torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    return (1 - beta) * beta**ages


def exponential_bank(history: Tensor, beta: float) -> Tensor:
    """Keys (t n, d) whose plain second moment is C_t after t batches of unit embeddings (t, n, d), oldest first.

    Every key is its embedding, scaled down with age. With this bank, own keys included, the squared contrastive loss
    is TiCo's, up to TiCo's constant 1.
    """
    steps = len(history)
    scale = (steps * exponential_weights(beta, steps)).sqrt().to(history)
    return (scale[:, None, None] * history).flatten(0, 1)


def memory_length(beta: float, steps: int | None = None) -> float:
    """Effective number of batches in C, (sum w)^2 / sum w^2: a plain mean over as many has the same variance.

    (1 + beta) / (1 - beta) in the limit, less after finitely many steps. Times n, it is the size of the bank.
    """
    _check_beta(beta)
    left = 0.0 if steps is None else beta**steps
    return (1 + beta) / (1 - beta) * (1 - left) / (1 + left)


def mean_age(beta: float) -> float:
    """Mean age of the embeddings in C in the limit, in steps; the current batch has age 0."""
    _check_beta(beta)
    return beta / (1 - beta)


def memory_saving(n: int, d: int, beta: float) -> float:
    """Memory of a bank of equal length relative to C's: n * memory_length * d over d^2."""
    _check_sizes(n, d)
    return n * memory_length(beta) / d


# Values, including at collapse


def half_squared_distance(z_1: Tensor, z_2: Tensor) -> Tensor:
    """(1 / 2n) sum_i |z1_i - z2_i|^2 without normalisation. For unit rows it is 1 - mean(z1 . z2)."""
    return (z_1 - z_2).square().sum(dim=1).mean() / 2


def contrast_bounds(n: int, d: int, rho: float, beta: float, steps: int) -> tuple[float, float]:
    """Bounds of TiCo's contrast at a step (from 1): rho (1 - beta) / min(n, d), and rho (1 - beta^steps) at collapse.

    The first is attained at step one by the most spread batch, the second if the network was collapsed all along.
    """
    _check_beta(beta)
    return rho * (1 - beta) * frobenius_bounds(n, d)[0], rho * (1 - beta**steps)


def expected_contrast(spread: float, n: int, rho: float, beta: float, steps: int | None = None) -> float:
    """Mean of TiCo's contrast over batches from a fixed distribution on the sphere with |E zz'|^2 = spread.

    An image is also compared with its own batch and itself: E |B|^2 = 1 / n + (1 - 1 / n) spread.
    """
    _check_beta(beta)
    before = 1.0 if steps is None else 1 - beta ** (steps - 1)
    return rho * (beta * before * spread + (1 - beta) * (1 / n + (1 - 1 / n) * spread))


# The gradient


def tico_gradient(
    online: Tensor, target: Tensor, covariance: Tensor, rho: float = 8.0, beta: float = 0.9, detach: bool = False
) -> Tensor:
    """Gradient of `tico_loss` with respect to raw online embeddings u (n, d), z = u / |u|, in closed form.

    G   = beta C + kappa (1 - beta) B                kappa = 2 with the gradient of B, 1 if B is detached
    g_i = (-z''_i + 2 rho G z_i) / n                 for unit embeddings
          (g_i - (g_i . z_i) z_i) / |u_i|            for raw ones: tangential to the sphere, smaller for long vectors
    """
    _check_beta(beta)
    z_1, z_2 = F.normalize(online, dim=1), F.normalize(target, dim=1)
    kappa = 1 if detach else 2
    G = beta * covariance + kappa * (1 - beta) * second_moment(z_1)
    g = (2 * rho * z_1 @ G - z_2) / len(z_1)
    length: Tensor = online.norm(dim=1, keepdim=True)
    return (g - (g * z_1).sum(dim=1, keepdim=True) * z_1) / length


def detached_equivalent(rho: float, beta: float) -> tuple[float, float]:
    """Rho and beta that give the detached loss the gradient of the attached one with these values, at the same C."""
    _check_beta(beta)
    return rho * (2 - beta), beta / (2 - beta)


def contrast_flow(z: Tensor, covariance: Tensor, time: float) -> Tensor:
    """Gradient flow of z' C z / 2 on the sphere for a time, with fixed C: z(t) ~ exp(-t C) z(0).

    Along an eigenvector v of C the component moves by d(v . z) / dt = (z' C z - lambda) (v . z): directions with an
    eigenvalue above the average that z sees decay, the others grow.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    fading = (-time * (eigenvalues - eigenvalues[0])).exp()  # without the common factor, so that nothing underflows
    return F.normalize((z @ eigenvectors * fading) @ eigenvectors.T, dim=1)


def collapse_growth(rho: float, beta: float, detach: bool = False) -> float:
    """Growth rate of embeddings away from full collapse, while memory and target are still collapsed.

    Small perturbations that sum to zero grow by a factor 1 + lr / n times this rate per step of gradient descent on
    unit embeddings: 2 rho (beta + kappa (1 - beta)) from the contrast, minus 1 from the attraction to the target. If
    it is not positive, collapse is stable. At collapse itself the gradient is zero.
    """
    _check_beta(beta)
    kappa = 1 if detach else 2
    return 2 * rho * (beta + kappa * (1 - beta)) - 1


# The other methods


def squared_loss_by_covariance(z_1: Tensor, z_2: Tensor, rho: float = 8.0) -> Tensor:
    """The squared contrastive loss of unit rows, from the second moment of z1 instead of its pairwise similarities.

    -mean(z1 . z2) - rho / n + rho |C|^2. The paper lacks a factor n here, see docs/theory.md.
    """
    return -(z_1 * z_2).sum(dim=1).mean() - rho / len(z_1) + rho * second_moment(z_1).square().sum()


def unit_columns(z: Tensor) -> Tensor:
    """Every dimension centred and scaled to unit length over the batch: Barlow Twins' normalisation, tr Z' Z = d."""
    return F.normalize(z - z.mean(dim=0), dim=0)


def barlow_twins_by_gram(z_1: Tensor, z_2: Tensor, rho: float) -> Tensor:
    """The paper's expansion of Barlow Twins' loss / d, with the redundancy term as similarities of images.

        1 + mean_i c_ii^2 - (2 / d) sum_i c_ii - rho + (rho / d) |K_B|^2      c = Z1_B' Z2_B,  K_B = Z1_B Z1_B' (n, n)

    It replaces the redundancy between views by that within view one, so it equals `barlow_twins_loss(...).loss / d`
    only if both views have the same embeddings (up to the 1e-5 in its BatchNorm).
    """
    b_1, b_2 = unit_columns(z_1), unit_columns(z_2)
    c_ii = (b_1 * b_2).sum(dim=0)
    K = b_1 @ b_1.T
    return 1 + c_ii.square().mean() - 2 * c_ii.mean() - rho + rho / len(c_ii) * K.square().sum()


def info_nce_loss(z_1: Tensor, z_2: Tensor, temperature: float) -> Tensor:
    """InfoNCE as the paper prints it: the usual cross-entropy of raw embeddings (n, d), times the temperature."""
    if not temperature > 0:
        raise UserError(f"InfoNCE: the temperature must be positive, got {temperature}")
    logits = F.normalize(z_1, dim=1) @ F.normalize(z_2, dim=1).T / temperature
    return temperature * F.cross_entropy(logits, torch.arange(len(z_1), device=z_1.device))


def squared_push(cosines: Tensor, rho: float = 8.0) -> Tensor:
    """Derivative of one image's rho mean_j s_j^2 by its similarities s (..., m): zero for an orthogonal key."""
    return 2 * rho * cosines / cosines.shape[-1]


def info_nce_push(cosines: Tensor, temperature: float) -> Tensor:
    """Derivative of one image's tau log sum_j exp(s_j / tau): weights that sum to one, positive even for far keys."""
    return (cosines / temperature).softmax(dim=-1)


def vicreg_least_trace(hinge: float, d: int) -> float:
    """Lower bound of the trace of a centred covariance, given VICReg's mean hinge max(0, 1 - standard deviation).

    The mean standard deviation is at least 1 - hinge, and the mean variance at least its square: so VICReg needs no
    normalisation to keep the spectrum from vanishing.
    """
    return d * max(0.0, max(0.0, 1 - hinge) ** 2 - EPSILON)


# Checks


def _check_beta(beta: float) -> None:
    if not 0 <= beta < 1:
        raise UserError(f"beta must be in [0, 1), got {beta}: with 1 the covariance would stay zero")


def _check_sizes(n: int, d: int) -> None:
    if n < 1 or d < 1:
        raise UserError(f"at least one embedding and one dimension are needed, got n={n} and d={d}")
