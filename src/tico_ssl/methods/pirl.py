"""PIRL: Pretext-Invariant Representation Learning, with jigsaws (Misra and van der Maaten, 2020).

    f = normalize(W_f v(x))                                   an image
    g = normalize(W_g [W_p v(piece_1), ..., W_p v(piece_9)])  the pieces of a jigsaw of it, in random order
    s(m) = m . a / temperature                                for a = f or g and an entry m of the memory bank
    nce(a) = - log h(s(m_own)) - sum over k negatives of log(1 - h(s(m')))
    loss = weight mean nce(g) + (1 - weight) mean nce(f)
    ... backward, optimiser step ...
    m_own = normalize(decay m_own + (1 - decay) f)

m is a memory bank with one entry per training image, without gradient. h is the probability that an entry is the
image's own:

    nce            h(s) = e^s / (e^s + k c)                   c: mean of e^s in the first step, constant afterwards
    softmax        h(s) = e^s / (e^s_own + sum of e^s over the negatives)
    cross-entropy  the same, and - log h(s_own) alone

The authors' code (VISSL) has the first, which is noise-contrastive estimation: with N images, e^s / (N c) is the
model's probability of an entry and 1 / N that of the noise. The paper's formula is the second. The third is InfoNCE.

Negatives are drawn with replacement from the whole bank, once for all images of a process and both terms: a draw per
image would take a thousand times the memory. An image's own entry, if drawn, is masked.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig, ViewShape
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput, width_of
from tico_ssl.methods._embeddings import unit
from tico_ssl.methods._queue import mean_cosine
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted


def similarities(
    embedding: Tensor, own: Tensor, negatives: Tensor, left_out: Tensor | None = None, temperature: float = 0.07
) -> Tensor:
    """Cosines over temperature (n, 1 + m) with an image's own entry, first, and with m others.

    Raw embeddings (n, d); their entries of the memory bank (n, d) and the others (m, d), all of unit length and without
    gradient. `left_out` (n, m) masks negatives of an image: they are minus infinity.
    """
    if embedding.ndim != 2 or own.shape != embedding.shape or negatives.shape[1:] != embedding.shape[1:]:
        raise ValueError(
            "PIRL: embeddings and their memories must be (batch, dim), negatives (many, dim), "
            f"got {tuple(embedding.shape)}, {tuple(own.shape)} and {tuple(negatives.shape)}"
        )
    with torch.autocast(embedding.device.type, enabled=False):
        a = unit(embedding)
        own, negatives = own.detach().to(a.dtype), negatives.detach().to(a.dtype)
        others = a @ negatives.T
        if left_out is not None:
            others = others.masked_fill(left_out, -torch.inf)
        return torch.cat([(a * own).sum(dim=1, keepdim=True), others], dim=1) / temperature


def nce_loss(scores: Tensor, constant: Tensor | float) -> Tensor:
    """mean of -log h(own) - sum_j log(1 - h(negative_j)) with h(s) = e^s / (e^s + m constant), of scores (n, 1 + m)."""
    log_constant = torch.as_tensor(constant, dtype=scores.dtype, device=scores.device).log()
    odds = scores - log_constant - math.log(scores.shape[1] - 1)  # log(h / (1 - h))
    return (F.softplus(-odds[:, 0]) + F.softplus(odds[:, 1:]).sum(dim=1)).mean()


def softmax_loss(scores: Tensor) -> Tensor:
    """The same with h the softmax of scores (n, 1 + m): the paper's formula."""
    log_h = F.log_softmax(scores, dim=1)
    h = log_h[:, 1:].exp().clamp_max(1 - 1e-6)  # a single dominant negative must not make the loss infinite
    return -log_h[:, 0].mean() - torch.log1p(-h).sum(dim=1).mean()


def cross_entropy_loss(scores: Tensor) -> Tensor:
    """mean of -log softmax(own) of scores (n, 1 + m): InfoNCE."""
    return -F.log_softmax(scores, dim=1)[:, 0].mean()


class Config(MethodConfig):
    """PIRL's settings; the defaults are those of the authors' code."""

    name: str = "pirl"
    """PIRL with jigsaws."""
    images: Annotated[int, Field(ge=2)] = 1_281_167
    """Size of the memory bank: at least the number of training images."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding, and of each piece's projection."""
    pieces: Annotated[int, Field(ge=1)] = 9
    """Pieces per jigsaw: the square of the second view's `jigsaw`."""
    negatives: Annotated[int, Field(ge=1)] = 32_000
    """Number of negatives drawn from the memory bank."""
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Temperature of the softmax."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the jigsaw's term; the image's term has the rest."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Decay of the memory bank's moving average."""
    loss: Literal["nce", "softmax", "cross-entropy"] = "nce"
    """Noise-contrastive estimation with a constant normalisation (the authors' code), with a softmax (the paper's
    formula), or cross entropy of the softmax alone (InfoNCE)."""

    def check_views(self, views: Sequence[ViewShape]) -> None:
        """An image, and a jigsaw of as many pieces as its head takes."""
        if [view.pieces for view in views[:2]] != [0, self.pieces]:
            pieces = counted(self.pieces, "piece")
            raise UserError(f"PIRL's first view must be an image, its second a jigsaw of {pieces}: views=pirl")


class PIRL(Method):
    """Backbone, a head for images and one for jigsaws, and the memory bank. The first view is an image, the second a
    jigsaw.

    At collapse the loss of a softmax is about 1 + log(negatives + 1), but healthy runs stay above half of that for
    long.
    """

    config: Config
    bank: Tensor
    constant: Tensor
    visited: Tensor

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        super().__init__(backbone)
        self.config = config = config or Config()
        width = width_of(backbone, width)
        self.image_head = nn.Linear(width, config.dim)
        self.piece_head = nn.Linear(width, config.dim)
        self.jigsaw_head = nn.Linear(config.pieces * config.dim, config.dim)
        self.register_buffer("bank", F.normalize(torch.randn(config.images, config.dim), dim=1))
        self.register_buffer("constant", torch.zeros(()))  # zero until the first step
        self.register_buffer("visited", torch.zeros(config.images, dtype=torch.bool))
        self._seen: tuple[Tensor, Tensor] | None = None  # only between a step's loss and its end

    def embed(self, images: Tensor) -> Tensor:
        """Raw embeddings of whole images."""
        embeddings: Tensor = self.image_head(self.backbone(images))
        return embeddings

    def check_data(self, images: int, labels: Tensor | None) -> None:
        """The memory bank needs an entry for every image."""
        if images > self.config.images:
            raise UserError(
                f"PIRL's memory bank has {self.config.images} entries for {counted(images, 'image')}: "
                f"set method.images={images}"
            )

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of images and jigsaws, and the images' indices in the memory bank."""
        image, jigsaw = batch.views[:2]
        if image.ndim != 4 or jigsaw.ndim != 5 or jigsaw.shape[1] != self.config.pieces:
            raise UserError(
                f"PIRL's first view must be an image, its second a jigsaw of {self.config.pieces} pieces: views=pirl"
            )
        of_image = self.embed(image)
        pieces = jigsaw.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        of_pieces = self.piece_head(self.backbone(pieces)).unflatten(0, jigsaw.shape[:2])
        return Encoded((of_image, self.jigsaw_head(of_pieces.flatten(1))), (batch.index,) if fixed else ())

    def loss(self, encoded: Encoded) -> StepOutput:
        """PIRL's loss of a whole batch; in training mode, the embeddings are kept for the update of the memory bank."""
        (image, jigsaw), (index,) = encoded.trained, encoded.fixed
        settings, images = self.config, len(self.bank)
        drawn = torch.randint(images, (settings.negatives,), device=index.device)
        own, negatives, left_out = self.bank[index], self.bank[drawn], index[:, None] == drawn
        scores = [
            similarities(embedding, own, negatives, left_out, settings.temperature) for embedding in (jigsaw, image)
        ]
        of_jigsaw, of_image = self._losses(scores)
        if self.training:
            self._seen = index, image.detach()
        loss = settings.weight * of_jigsaw + (1 - settings.weight) * of_image
        return StepOutput(loss, {"jigsaw": of_jigsaw.detach(), "image": of_image.detach()}, image.detach())

    def _losses(self, scores: Sequence[Tensor]) -> list[Tensor]:
        if self.config.loss == "softmax":
            return [softmax_loss(one) for one in scores]
        if self.config.loss == "cross-entropy":
            return [cross_entropy_loss(one) for one in scores]
        first = distributed.all_mean(scores[0].detach().exp().mean())
        constant = torch.where(self.constant > 0, self.constant, first.to(self.constant.dtype))
        if self.training:
            self.constant.copy_(constant)
        return [nce_loss(one, constant) for one in scores]

    @torch.no_grad()
    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update the memory bank with this step's images of all processes."""
        if self._seen is not None:
            index, image = (distributed.gathered(part) for part in self._seen)
            self._seen = None
            new = F.normalize(image.to(self.bank.dtype), dim=1)
            self.bank[index] = F.normalize(self.bank[index].lerp(new, 1 - self.config.decay), dim=1)
            self.visited.index_fill_(0, index, True)
        return {}

    def diagnostics(self) -> dict[str, Tensor]:
        """Fraction of the memory bank that has been written (the rest is random), and the mean cosine of different
        entries among it: 1 if all are equal."""
        return {
            "memory_visited": self.visited.float().mean(),
            "memory_cosine": mean_cosine(self.bank, self.visited),
        }


def build(config: Config, backbone: Backbone) -> PIRL:
    """PIRL of a recipe."""
    return PIRL(backbone, config=config)
