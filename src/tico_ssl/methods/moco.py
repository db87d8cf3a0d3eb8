"""MoCo: Momentum Contrast with a queue of keys (He et al., 2020; version 2: Chen et al., 2020).

    q = normalize(f(x1));  k = normalize(f_target(x2))          two views, two networks, n embeddings of d numbers
    loss = mean( -log( e^{q.k / T} / (e^{q.k / T} + sum over the queue of e^{q.k- / T}) ) )
    ... the keys replace the oldest in the queue; backward, optimiser step ...
    target = ema_decay target + (1 - ema_decay) online

The loss uses the queue without this step's keys; it has the keys of all processes, in the same order in each. The
original updates the target before it computes keys. Its first update does nothing, since both networks start equal, so
updating after the step gives the same sequence.

A query's own key is computed in its own batch, the keys in the queue in others. So a query shares the batch's BatchNorm
statistics only with its own key, and a network could recognise the key by them, without looking at the image. The
original's remedy is ShuffleBN: statistics are those of one GPU's images, and keys are computed on other GPUs than their
queries. With `bn_splits` k, queries and keys are computed in k groups each, with separate statistics: image i is in
query group i mod k and in key group (i / k) mod k, so that the groups of a query and of its key have only 1 / k of
their images in common. The order of images is random already, so no shuffling is needed. Groups span all processes.

Version 1 has a linear head and T = 0.07, version 2 two layers and T = 0.2.
"""

from collections.abc import Sequence
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
from tico_ssl.networks.batch_norm import divided_statistics
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import Target, encode_both
from tico_ssl.optim.schedules import cosine_ema_decay
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted


class MoCoTerms(NamedTuple):
    """The loss, its two terms, and the share of queries that are closer to their key than to the whole queue."""

    loss: Tensor
    alignment: Tensor
    contrast: Tensor
    accuracy: Tensor


def moco_loss(query: Tensor, key: Tensor, queue: Tensor, temperature: float = 0.2) -> MoCoTerms:
    """InfoNCE of raw queries and keys (n, d) with a queue (m, d) of unit vectors; only queries get a gradient.

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
        accuracy = (positive.detach() > negative.detach()).all(dim=1).to(q.dtype).mean()
    return MoCoTerms(alignment + contrast, alignment, contrast, accuracy)


KEYS, QUERIES = 1, 2  # the digit of an image's number, in base k, that is the number of its group


def grouped(images: Tensor, splits: int, digit: int) -> list[Tensor]:
    """Images (n, ...) in as many groups as `splits`: image i is in group i mod splits (QUERIES) or (i / splits) mod
    splits (KEYS)."""
    groups = images.unflatten(0, (-1, splits, splits)).unbind(dim=digit)
    return [group.flatten(0, 1).contiguous(memory_format=torch.channels_last) for group in groups]


def joined(groups: Sequence[Tensor], digit: int) -> Tensor:
    """Embeddings of groups in the order of the images."""
    return torch.stack([group.unflatten(0, (-1, len(groups))) for group in groups], dim=digit).flatten(0, 2)


class Config(MethodConfig):
    """MoCo's settings; the defaults are those of version 2 on ImageNet."""

    name: str = "moco"
    """MoCo: contrast with a queue of keys."""
    head: Literal["linear", "mlp"] = "mlp"
    """One linear layer (version 1), or two with a ReLU between them (version 2). Neither has BatchNorm."""
    hidden: Annotated[int, Field(ge=1)] = 2048
    """Width of the hidden layer of an mlp head."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """Temperature of the softmax: 0.07 in version 1."""
    queue: Annotated[int, Field(ge=1)] = 65536
    """Length of the queue; a multiple of the keys per step."""
    ema_start: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Decay of the target encoder at the first step."""
    ema_end: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Decay of the target encoder at the last step, reached along a cosine; the same as at the first in the papers."""
    symmetric: bool = False
    """Also use view two as query and view one as key: mean of both directions, both keys enter the queue."""
    queue_per_view: bool = False
    """symmetric: each direction has a queue of its own, with the keys of one view (solo-learn)."""
    bn_splits: Annotated[int, Field(ge=1)] = 1
    """Number of groups of the batch with separate BatchNorm statistics, different groups for queries and keys, so that
    the statistics do not reveal the key (ShuffleBN); 1: statistics of the whole batch. Its square must divide the batch
    of a process."""

    def check_batch(self, batch: int, together: int) -> None:
        """Groups of one size, and a queue that a whole number of steps fills."""
        self.check_groups(together)
        keys = batch * (2 if self.symmetric and not self.queue_per_view else 1)
        if self.queue % keys:
            raise UserError(f"method.queue {self.queue} is not a multiple of the {keys} keys that a step adds to it")

    def check_groups(self, images: int) -> None:
        """Every query group has the same number of images in common with every key group."""
        splits = self.bn_splits
        if images % splits**2:
            raise UserError(
                f"method.bn_splits {splits}: {counted(images, 'image')} at once are no multiple of {splits**2}"
            )


class MoCo(Method):
    """Backbone and head, their slowly moving target, and the queue of its keys.

    At collapse the loss is log(1 + queue), not far above that of a healthy run: not indicative.
    """

    config: Config

    def __init__(self, backbone: Backbone, config: Config | None = None) -> None:
        config = config or Config()
        hidden = () if config.head == "linear" else (config.hidden,)
        super().__init__(backbone, head(backbone.width, *hidden, config.dim, norm=False))
        self.config = config
        self.target = Target(self.online())
        self.queue = _random_queue(config)
        self.other_queue = _random_queue(config) if config.symmetric and config.queue_per_view else None

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Queries of the online network and, with `fixed`, keys of the target, of the first two views."""
        view_1, view_2 = batch.images(2)
        views, others = ((view_1, view_2), (view_2, view_1)) if self.config.symmetric else ((view_1,), (view_2,))
        target_views = others if fixed else ()
        if self.config.bn_splits == 1:
            return Encoded(*encode_both(self.embed_views, views, self.target, target_views))
        return self._encode_in_groups(views, target_views)

    def _encode_in_groups(self, views: Sequence[Tensor], target_views: Sequence[Tensor]) -> Encoded:
        splits = self.config.bn_splits
        self.config.check_groups(len(views[0]))
        with divided_statistics(self, splits):
            queries, keys = encode_both(
                self.embed_views,
                [group for view in views for group in grouped(view, splits, QUERIES)],
                self.target,
                [group for view in target_views for group in grouped(view, splits, KEYS)],
            )
        return Encoded(
            tuple(joined(queries[at : at + splits], QUERIES) for at in range(0, len(queries), splits)),
            tuple(joined(keys[at : at + splits], KEYS) for at in range(0, len(keys), splits)),
        )

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of a whole batch with the current queue; in training mode the keys then enter the queue."""
        queues = [self.queue] if self.other_queue is None else [self.queue, self.other_queue]
        # The backward pass needs a queue unchanged.
        negatives = [queue.keys.clone() if self.training else queue.keys for queue in queues]
        batches = zip(self._by_queue(encoded.trained), self._by_queue(encoded.fixed), negatives, strict=True)
        of_queues = [moco_loss(*batch, self.config.temperature) for batch in batches]
        terms = MoCoTerms(*(torch.stack(values).mean() for values in zip(*of_queues)))
        if self.training:
            new = self._by_queue([distributed.gathered(unit(keys)) for keys in encoded.fixed])
            for queue, keys in zip(queues, new, strict=True):
                queue.enqueue(keys)
        parts = {"alignment": terms.alignment, "contrast": terms.contrast, "pretext_accuracy": terms.accuracy}
        return StepOutput(terms.loss, parts, encoded.trained[0].detach())

    def _by_queue(self, embeddings: Sequence[Tensor]) -> Sequence[Tensor]:
        """The embeddings of each direction, or of all directions if they share a queue."""
        return [torch.cat(list(embeddings))] if self.other_queue is None else embeddings

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update the target."""
        decay = cosine_ema_decay(progress, self.config.ema_start, self.config.ema_end)
        self.target.follow(self.online(), decay)
        return {"ema_decay": decay}

    def diagnostics(self) -> dict[str, Tensor]:
        """Of the queue, which starts with random vectors."""
        return self.queue.diagnostics("queue")


def _random_queue(config: Config) -> KeyQueue:
    return KeyQueue(F.normalize(torch.randn(config.queue, config.dim), dim=1))


def build(config: Config, backbone: Backbone) -> MoCo:
    """MoCo of a recipe."""
    return MoCo(backbone, config)
