"""SwAV: Swapping Assignments between Views (Caron et al., 2020).

    z_v = normalize(f(x_v));  s_v = z_v . C'                 embeddings of every crop, and their scores: K prototypes C
    q_a = sinkhorn(s_a)                                       for the first two crops, without gradient
    loss = mean_a mean_{v != a} - mean_i sum_k q_a[i, k] log softmax(s_v[i] / temperature)[k]
    ... backward, optimiser step ...
    C = normalize(C)                                          every prototype has length one

Sinkhorn makes assignments in which all prototypes are used equally by the global batch: of Q = exp(s / epsilon), it
divides by the sum over images, then by the sum over prototypes, three times. Under several processes only the K sums
over images are added up. A queue of earlier embeddings lets small batches be compared with more images. It must not be
used while the network changes fast: where all embeddings have moved on since the queue was filled, what sets a batch
apart from the queue is that movement, all images are assigned to prototypes that lie ahead, and are driven on there.

All crops go through the networks one by one, so that BatchNorm sees crops of one kind at a time.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput, width_of
from tico_ssl.methods._embeddings import at_least_float32
from tico_ssl.methods._queue import mean_cosine
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError

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

    `earlier` are scores (m, K) of more images, the same in all processes; they are counted with their `weight`, 0 or 1,
    and their own assignments are not returned. `total` sums a vector over processes.
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

    Scores (n, K) of all views, and assignments (n, K) of the first of them, which are held constant.
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
    """How the first view's scores (n, K) correlate with those of the others, the mean of each prototype taken out.

    Predictions are s / temperature, assignments about s / epsilon. Where views correlate by r, the best prediction of a
    small assignment is r s / epsilon: scores grow if r > epsilon / temperature, and shrink to nothing otherwise.
    """
    first, *others = (score - distributed.all_mean(score.mean(dim=0)) for score in scores)
    products = [torch.stack([(first * other).sum(), first.square().sum(), other.square().sum()]) for other in others]
    both, ours, theirs = distributed.all_sum(torch.stack(products)).unbind(dim=1)
    return (both / (ours * theirs).sqrt().clamp_min(1e-30)).mean()


class Config(MethodConfig):
    """SwAV's settings; the defaults are the paper's for large batches."""

    name: str = "swav"
    """SwAV, online clustering."""
    hidden: Annotated[int, Field(ge=1)] = 2048
    """Width of the projector's hidden layer."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding."""
    last_bias: bool = True
    """Bias in the projector's last layer."""
    prototypes: Annotated[int, Field(ge=2)] = 3000
    """Number of clusters."""
    freeze_steps: Annotated[int, Field(ge=0)] = 313
    """Steps at the beginning in which prototypes stay as they are; the default is an epoch of 4096 images a step."""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """Of the predictions."""
    epsilon: Annotated[float, Field(ge=0.025)] = 0.05
    """Of the assignments: the smaller, the harder. Exponentials of 1 / epsilon must fit into float32."""
    iterations: Annotated[int, Field(ge=1)] = 3
    """Of Sinkhorn's algorithm."""
    queue: Annotated[int, Field(ge=0)] = 0
    """Earlier images that take part in assignments, for small batches (3840 for a batch of 256); 0: none."""
    queue_start: Annotated[int, Field(ge=0)] = 0
    """Steps after which the queue is used, if it is full. While the rate still rises it can make training collapse."""


class SwAV(Method):
    """Backbone, projector and prototypes. The first two views are assigned, all views predict.

    Its loss at collapse is log(prototypes) at least, but healthy runs stay above half of that for long.
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
        """Scores of every view, and embeddings of the first two beside them."""
        raw = [self.embed(view) for view in batch.images()]
        # Frozen, they take a gradient of zero; all that a decay of weights does then is undone by the normalisation.
        prototypes = torch.where(self.steps < self.config.freeze_steps, self.prototypes.detach(), self.prototypes)
        with torch.autocast(raw[0].device.type, enabled=False):
            embeddings = [F.normalize(one.to(prototypes.dtype), dim=1) for one in raw]
            scores = tuple(embedding @ prototypes.T for embedding in embeddings)
        return Encoded(scores, tuple(one.detach() for one in embeddings[:ASSIGNED]) if fixed else ())

    def loss(self, encoded: Encoded) -> StepOutput:
        """SwAV's loss of a whole batch; in training mode the queue moves on."""
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
        """How many prototypes are the nearest of an image of the global batch, as exp(entropy): 1 if one takes all,
        though assignments share images out evenly even then."""
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
        if newest.shape[1] > self.config.queue:
            raise UserError(f"method.queue {self.config.queue} is shorter than a batch of {newest.shape[1]} images")
        self.queue.copy_(torch.cat([newest, self.queue], dim=1)[:, : self.config.queue])
        self.filled += newest.shape[1]

    @torch.no_grad()
    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Bring prototypes back to length one."""
        self.prototypes.copy_(F.normalize(self.prototypes, dim=1))
        self.steps += 1
        return {}

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """The mean cosine of different prototypes, 1 if they are all the same; and how full the queue is."""
        everyone = torch.ones_like(self.prototypes[:, 0], dtype=torch.bool)
        values = {"prototype_cosine": mean_cosine(self.prototypes, everyone)}
        if self.config.queue:
            values["queue_filled"] = (self.filled / self.config.queue).clamp(max=1)
        return values


def build(config: Config, backbone: Backbone) -> SwAV:
    """SwAV of a recipe."""
    return SwAV(backbone, config=config)
