"""SwAV: Swapping Assignments between Views (Caron et al., 2020).

    z_v = normalize(f(x_v));  s_v = z_v . C'                 embeddings of every crop; scores by K prototypes C
    q_a = sinkhorn(s_a)                                       for the first two crops, without gradient
    loss = mean_a mean_{v != a} - mean_i sum_k q_a[i, k] log softmax(s_v[i] / temperature)[k]
    ... backward, optimiser step ...
    C = normalize(C)                                          every prototype has unit length

Sinkhorn's assignments use all prototypes equally over the global batch: Q = exp(s / epsilon) is divided by the sum over
images, then by the sum over prototypes, three times. Over several processes only the K sums over images are reduced. A
queue of earlier embeddings adds images to the assignments of small batches. It must not be used while the network
changes fast: when all embeddings have drifted since the queue was filled, a batch differs from the queue by that drift,
so all its images are assigned to prototypes in its direction and driven further.

Crops of one size go through the backbone together, then all crops through the projector: its BatchNorm has the
statistics of small and large crops alike, the backbone's those of one size at a time.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig, ViewShape
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput, width_of
from tico_ssl.methods._embeddings import at_least_float32
from tico_ssl.methods._queue import mean_cosine
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

ASSIGNED = 2  # views whose assignments the others predict


@torch.no_grad()
def sinkhorn(
    scores: Tensor,
    epsilon: float = 0.05,
    iterations: int = 3,
    earlier: Tensor | None = None,
    weight: Tensor | float = 1.0,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Assignments (n, K) of scores (n, K): each row sums to one, each column nearly to n / K.

    `earlier` are scores (m, K) of further images, the same in all processes, counted with `weight` 0 or 1; their
    assignments are not returned. `total` sums a vector over processes.
    """
    with torch.autocast(scores.device.type, enabled=False):
        Q = torch.exp(at_least_float32(scores) / epsilon)
        E = Q[:0] if earlier is None else torch.exp(earlier.to(Q.dtype) / epsilon)
        for _ in range(iterations):
            sums = total(Q.sum(dim=0)) + weight * E.sum(dim=0)
            Q, E = Q / sums, E / sums
            Q, E = Q / Q.sum(dim=1, keepdim=True), E / E.sum(dim=1, keepdim=True)
    return Q


def swav_loss(scores: Sequence[Tensor], assignments: Sequence[Tensor], temperature: float = 0.1) -> Tensor:
    """mean_a mean_{v != a} -mean_i sum_k q_a[i, k] log softmax(s_v[i] / temperature)[k].

    Scores (n, K) of all views, and assignments (n, K) of the first of them, without gradient.
    """
    if not 1 <= len(assignments) <= len(scores) or len(scores) < 2:
        raise ValueError(f"SwAV: {len(assignments)} assignments do not fit the scores of {len(scores)} views")
    if len({tuple(one.shape) for one in (*scores, *assignments)}) > 1 or scores[0].ndim != 2:
        raise ValueError("SwAV: scores and assignments must all be (batch, prototypes)")
    with torch.autocast(scores[0].device.type, enabled=False):
        predictions = [F.log_softmax(at_least_float32(score) / temperature, dim=1) for score in scores]
        losses = [
            -(assignment.detach().to(prediction.dtype) * prediction).sum(dim=1).mean()
            for a, assignment in enumerate(assignments)
            for v, prediction in enumerate(predictions)
            if v != a
        ]
        return torch.stack(losses).mean()


@torch.no_grad()
def view_correlation(scores: Sequence[Tensor]) -> Tensor:
    """Correlation of the first view's scores (n, K) with those of the others, after subtracting each prototype's mean.

    Predictions are s / temperature, assignments about s / epsilon. If views have correlation r, the best prediction of
    a small assignment is r s / epsilon: scores grow if r > epsilon / temperature, and vanish otherwise.
    """
    first, *others = (score - distributed.all_mean(score.mean(dim=0)) for score in scores)
    products = [torch.stack([(first * other).sum(), first.square().sum(), other.square().sum()]) for other in others]
    both, ours, theirs = distributed.all_sum(torch.stack(products)).unbind(dim=1)
    return (both / (ours * theirs).sqrt().clamp_min(1e-30)).mean()


class Config(MethodConfig):
    """SwAV's settings; the defaults are the paper's for large batches."""

    name: str = "swav"
    """SwAV: online clustering."""
    hidden: Annotated[int, Field(ge=1)] = 2048
    """Width of the projector's hidden layer."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding."""
    last_bias: bool = True
    """Bias in the projector's last layer."""
    joint_pass: bool = True
    """One forward pass for all crops of a size, with common BatchNorm statistics, and one of the projector for all
    crops, as in the authors' code; off: one per crop."""
    prototypes: Annotated[int, Field(ge=2)] = 3000
    """Number of clusters."""
    freeze_steps: Annotated[int, Field(ge=0)] = 313
    """Initial steps with frozen prototypes; the default is one ImageNet epoch at batch size 4096."""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """Temperature of the predictions."""
    epsilon: Annotated[float, Field(ge=0.025)] = 0.05
    """Temperature of the assignments: smaller is harder. exp(1 / epsilon) must fit into float32."""
    iterations: Annotated[int, Field(ge=1)] = 3
    """Iterations of Sinkhorn's algorithm."""
    queue: Annotated[int, Field(ge=0)] = 0
    """Number of earlier images in the assignments, for small batches (3840 for a batch of 256); 0: none."""
    queue_start: Annotated[int, Field(ge=0)] = 0
    """Steps before the queue is used, once it is full. During warm-up it can make training collapse."""

    def check_views(self, views: Sequence[ViewShape]) -> None:
        """Images only: all of them predict."""
        super().check_views(views)
        self.check_images(views)

    def check_batch(self, batch: int, together: int) -> None:
        """A queue, if there is one, that has room for a batch."""
        if 0 < self.queue < batch:
            raise UserError(f"method.queue {self.queue} is shorter than a batch of {counted(batch, 'image')}")


class SwAV(Method):
    """Backbone, projector and prototypes. The first two views are assigned, all views predict.

    At collapse the loss is at least log(prototypes), but healthy runs stay above half of that for long.
    """

    config: Config
    steps: Tensor
    queue: Tensor
    filled: Tensor

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        config = config or Config()
        widths = width_of(backbone, width), config.hidden, config.dim
        super().__init__(backbone, head(*widths, last_bias=config.last_bias))
        self.config = config
        self.prototypes = nn.Parameter(F.normalize(torch.randn(config.prototypes, config.dim), dim=1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(ASSIGNED, config.queue, config.dim))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Scores of every view, and embeddings of the first two."""
        raw = self.embed_views(batch.images(), self.config.joint_pass)
        # Frozen, they get a zero gradient; the effect of weight decay is undone by the normalisation.
        prototypes = torch.where(self.steps < self.config.freeze_steps, self.prototypes.detach(), self.prototypes)
        with torch.autocast(raw[0].device.type, enabled=False):
            embeddings = [F.normalize(one.to(prototypes.dtype), dim=1) for one in raw]
            scores = tuple(embedding @ prototypes.T for embedding in embeddings)
        return Encoded(scores, tuple(one.detach() for one in embeddings[:ASSIGNED]) if fixed else ())

    def loss(self, encoded: Encoded) -> StepOutput:
        """SwAV's loss of a whole batch; in training mode the queue is updated."""
        assignments = [self._assigned(a, encoded.trained[a].detach()) for a in range(ASSIGNED)]
        loss = swav_loss(encoded.trained, assignments, self.config.temperature)
        if self.training and self.config.queue:
            self._enqueue(encoded.fixed)
        entropy = torch.stack([-torch.special.xlogy(q, q).sum(dim=1).mean() for q in assignments]).mean()
        terms = {
            "assignment_entropy": entropy,
            "prototypes_used": self._used(encoded.trained[0].detach()),
            "view_correlation": view_correlation([scores.detach() for scores in encoded.trained]),
        }
        return StepOutput(loss, terms, encoded.fixed[0])

    @torch.no_grad()
    def _used(self, scores: Tensor) -> Tensor:
        """Effective number of prototypes that are nearest to an image of the global batch, exp(entropy): 1 if one is
        nearest to all, though assignments are balanced even then."""
        nearest = scores.argmax(dim=1)
        counts = torch.zeros_like(self.prototypes[:, 0]).index_add_(0, nearest, torch.ones_like(scores[:, 0]))
        share = distributed.all_mean(counts / len(scores))
        return torch.exp(-torch.special.xlogy(share, share).sum())

    @torch.no_grad()
    def _assigned(self, view: int, scores: Tensor) -> Tensor:
        earlier, weight = None, torch.ones_like(scores[0, 0])
        if self.config.queue:
            with torch.autocast(scores.device.type, enabled=False):
                earlier = self.queue[view] @ self.prototypes.T
            used = (self.steps >= self.config.queue_start) & (self.filled >= self.config.queue)
            weight = used.to(scores.dtype)
        return sinkhorn(scores, self.config.epsilon, self.config.iterations, earlier, weight, total=distributed.all_sum)

    @torch.no_grad()
    def _enqueue(self, embeddings: Sequence[Tensor]) -> None:
        newest = torch.stack([distributed.gathered(embedding) for embedding in embeddings])
        self.config.check_batch(newest.shape[1], newest.shape[1])
        self.queue.copy_(torch.cat([newest, self.queue], dim=1)[:, : self.config.queue])
        self.filled += newest.shape[1]

    @torch.no_grad()
    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Normalise the prototypes."""
        self.prototypes.copy_(F.normalize(self.prototypes, dim=1))
        self.steps += 1
        return {}

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """Mean cosine of different prototypes, 1 if all are equal; filled fraction of the queue."""
        everyone = torch.ones_like(self.prototypes[:, 0], dtype=torch.bool)
        values = {"prototype_cosine": mean_cosine(self.prototypes, everyone)}
        if self.config.queue:
            values["queue_filled"] = (self.filled / self.config.queue).clamp(max=1)
        return values


def build(config: Config, backbone: Backbone) -> SwAV:
    """SwAV of a recipe."""
    return SwAV(backbone, config=config)
