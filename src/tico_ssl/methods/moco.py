"""MoCo: Momentum Contrast with a queue of keys (He et al., 2020; version 2: Chen et al., 2020).

    q = normalize(f(x1));  k = normalize(f_target(x2))          two views, two networks, n embeddings of d numbers
    loss = mean( -log( e^{q.k / T} / (e^{q.k / T} + sum over the queue of e^{q.k- / T}) ) )
    ... the keys take the place of the oldest in the queue; backward, optimiser step ...
    target = ema_decay target + (1 - ema_decay) online

The queue of the loss is the one before this step's keys; it holds the keys of all processes, in the same order in each.
The original moves the target before it computes keys. Its first move does nothing, since both networks begin equal, so
moving after the step is the same sequence.

ShuffleBN is not here; synchronised BatchNorm takes its place: statistics are those of the global batch, so they tell a
query nothing about its own key that they do not tell about all keys of the step.

Version 1 has a linear head and T = 0.07, version 2 two layers and T = 0.2.
"""

from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
from tico_ssl.methods._embeddings import check_embeddings, unit
from tico_ssl.methods._queue import KeyQueue
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import Target, encode_both
from tico_ssl.optim.schedules import cosine_ema_decay
from tico_ssl.runtime import distributed


class MoCoTerms(NamedTuple):
    """The loss and the two terms it is the sum of."""

    loss: Tensor
    alignment: Tensor
    contrast: Tensor


def moco_loss(query: Tensor, key: Tensor, queue: Tensor, temperature: float = 0.2) -> MoCoTerms:
    """Contrast of raw queries and keys (n, d) with a queue (m, d) of unit vectors; the gradient is the queries' alone.

    -mean(q.k) / T + mean(log(e^{q.k / T} + sum_j e^{q.queue_j / T}))
    """
    if temperature <= 0:
        raise ValueError(f"MoCo: the temperature must be positive, got {temperature}")
    check_embeddings("MoCo", query, key, least=1)
    if queue.ndim != 2 or queue.shape[1] != query.shape[1]:
        raise ValueError(f"MoCo: embeddings have {query.shape[1]} dimensions, the queue is {tuple(queue.shape)}")
    with torch.autocast(query.device.type, enabled=False):
        q, k = unit(query), unit(key.detach())
        positive = (q * k).sum(dim=1, keepdim=True) / temperature
        negative = q @ queue.detach().to(q.dtype).T / temperature
        alignment = -positive.mean()
        contrast = torch.cat([positive, negative], dim=1).logsumexp(dim=1).mean()
    return MoCoTerms(alignment + contrast, alignment, contrast)


class Config(MethodConfig):
    """MoCo's settings; the defaults are those of version 2 on ImageNet."""

    name: str = "moco"
    """MoCo, contrast with a queue of keys."""
    head: Literal["linear", "mlp"] = "mlp"
    """One linear layer (version 1), or two with a ReLU between them (version 2). Neither has BatchNorm."""
    hidden: Annotated[int, Field(ge=1)] = 2048
    """Width of the hidden layer of an mlp head."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """Divides the cosines: 0.07 in version 1."""
    queue: Annotated[int, Field(ge=1)] = 65536
    """Keys to contrast with; a multiple of the keys of a step."""
    ema_start: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Decay of the target encoder at the first step."""
    ema_end: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Decay of the target encoder at the last step, reached along a cosine; the same as at the first in the papers."""
    symmetric: bool = False
    """Also make queries of view two and keys of view one: the mean of both directions, and both keys in the queue."""


class MoCo(Method):
    """Backbone and head, their slowly moving target, and the queue of its keys.

    Its loss at collapse is log(1 + queue), and that of a network that learns is not far below: no sign to go by.
    """

    config: Config

    def __init__(self, backbone: Backbone, config: Config | None = None) -> None:
        config = config or Config()
        hidden = () if config.head == "linear" else (config.hidden,)
        super().__init__(backbone, head(backbone.width, *hidden, config.dim, norm=False))
        self.config = config
        self.target = Target(self.online())
        self.queue = KeyQueue(F.normalize(torch.randn(config.queue, config.dim), dim=1))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Queries of the online network and, if they are asked for, keys of the target, of the first two views."""
        view_1, view_2 = batch.images(2)
        views, others = ((view_1, view_2), (view_2, view_1)) if self.config.symmetric else ((view_1,), (view_2,))
        return Encoded(*encode_both(self.embed, views, self.target, others if fixed else ()))

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of a whole batch with the queue as it is; in training mode the keys then enter the queue."""
        queue = self.queue.keys
        if self.training:
            queue = queue.clone()  # the backward pass needs it as it was
        terms = moco_loss(torch.cat(encoded.trained), torch.cat(encoded.fixed), queue, self.config.temperature)
        if self.training:
            self.queue.enqueue(torch.cat([distributed.gathered(unit(keys)) for keys in encoded.fixed]))
        parts = {"alignment": terms.alignment, "contrast": terms.contrast}
        return StepOutput(terms.loss, parts, encoded.trained[0].detach())

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Move the target towards the online network."""
        decay = cosine_ema_decay(progress, self.config.ema_start, self.config.ema_end)
        self.target.follow(self.online(), decay)
        return {"ema_decay": decay}

    def diagnostics(self) -> dict[str, Tensor]:
        """Of the queue. What no key has taken yet are random vectors."""
        return self.queue.diagnostics("queue")


def build(config: Config, backbone: Backbone) -> MoCo:
    """MoCo of a recipe."""
    return MoCo(backbone, config)
