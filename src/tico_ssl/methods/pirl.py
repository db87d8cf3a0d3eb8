"""PIRL: Pretext-Invariant Representation Learning, with jigsaws (Misra and van der Maaten, 2020).

    f = normalize(W_f v(x))                                   an image
    g = normalize(W_g [W_p v(piece_1), ..., W_p v(piece_9)])  the pieces of a jigsaw of it, in random order
    h(m, a) = exp(m . a / temperature) / (exp(m_own . a / temperature) + sum_negatives exp(m' . a / temperature))
    nce(a)  = - log h(m_own, a) - sum_negatives log(1 - h(m', a))
    loss = weight mean nce(g) + (1 - weight) mean nce(f)
    ... backward, optimiser step ...
    m_own = normalize(decay m_own + (1 - decay) f)

m is a memory bank with one entry for every training image. It takes no gradient.

Negatives are drawn with replacement from the whole bank, one draw for all images of a process and both terms: a draw
for each image would take a thousand times the memory. The image itself, where it is drawn, is left out.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput, width_of
from tico_ssl.methods._embeddings import unit
from tico_ssl.methods._queue import mean_cosine
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError


def pirl_loss(
    embedding: Tensor,
    own: Tensor,
    negatives: Tensor,
    left_out: Tensor | None = None,
    temperature: float = 0.07,
    push: bool = True,
) -> Tensor:
    """mean of -log h(own) - sum_j log(1 - h(negative_j)), where h is the softmax of cosines over temperature.

    Raw embeddings (n, d); their entries of the memory bank (n, d) and m others (m, d), which have length one.
    `left_out` (n, m) marks negatives that are none for an image. Without `push`, -log h(own) alone: cross entropy.
    """
    if embedding.ndim != 2 or own.shape != embedding.shape or negatives.shape[1:] != embedding.shape[1:]:
        raise ValueError(
            "PIRL: embeddings and their memories must be (batch, dim), negatives (many, dim), "
            f"got {tuple(embedding.shape)}, {tuple(own.shape)} and {tuple(negatives.shape)}"
        )
    with torch.autocast(embedding.device.type, enabled=False):
        a = unit(embedding)
        own, negatives = own.detach().to(a.dtype), negatives.detach().to(a.dtype)
        others = a @ negatives.T / temperature
        if left_out is not None:
            others = others.masked_fill(left_out, -torch.inf)
        logits = torch.cat([(a * own).sum(dim=1, keepdim=True) / temperature, others], dim=1)
        log_h = F.log_softmax(logits, dim=1)
        loss = -log_h[:, 0].mean()
        if push:
            h = log_h[:, 1:].exp().clamp_max(1 - 1e-6)  # one negative that takes all must not make the loss infinite
            loss = loss - torch.log1p(-h).sum(dim=1).mean()
    return loss


class Config(MethodConfig):
    """PIRL's settings; the defaults are the paper's."""

    name: str = "pirl"
    """PIRL with jigsaws."""
    images: Annotated[int, Field(ge=2)] = 1_281_167
    """Training images at most: the memory bank has an entry for each."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding, and of what is made of each piece."""
    pieces: Annotated[int, Field(ge=1)] = 9
    """Pieces of a jigsaw: the square of the second view's `jigsaw`."""
    negatives: Annotated[int, Field(ge=1)] = 32_000
    """Entries of the memory bank that are drawn to compare with."""
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Of the comparison."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the jigsaw in the loss; the rest is the image's own."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Of the moving average in the memory bank."""
    push: bool = True
    """Have the term of negatives in the loss (the paper's formula), or cross entropy alone."""


class PIRL(Method):
    """Backbone, a head for images and one for jigsaws, and the memory bank. The first view is an image, the second a
    jigsaw.

    Its loss at collapse is 1 + log(negatives + 1) or nearly so, but healthy runs stay above half of that for long.
    """

    config: Config
    bank: Tensor
    visited: Tensor

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        super().__init__(backbone)
        self.config = config = config or Config()
        width = width_of(backbone, width)
        self.image_head = nn.Linear(width, config.dim)
        self.piece_head = nn.Linear(width, config.dim)
        self.jigsaw_head = nn.Linear(config.pieces * config.dim, config.dim)
        self.register_buffer("bank", F.normalize(torch.randn(config.images, config.dim), dim=1))
        self.register_buffer("visited", torch.zeros(config.images, dtype=torch.bool))
        self._seen: tuple[Tensor, Tensor] | None = None  # from a step's loss to its end, never longer

    def embed(self, images: Tensor) -> Tensor:
        """Raw embeddings of whole images."""
        embeddings: Tensor = self.image_head(self.backbone(images))
        return embeddings

    def check_data(self, images: int, labels: Tensor | None) -> None:
        """An entry of the memory bank for every image."""
        if images > self.config.images:
            raise UserError(
                f"PIRL's memory is for {self.config.images} images, there are {images}: method.images={images}"
            )

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of images and of jigsaws, and the images' places in the memory bank beside them."""
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
        """PIRL's loss of a whole batch; in training mode, what the memory bank will take up is kept until the step's
        end."""
        (image, jigsaw), (index,) = encoded.trained, encoded.fixed
        settings, images = self.config, len(self.bank)
        drawn = torch.randint(images, (settings.negatives,), device=index.device)
        own, negatives, left_out = self.bank[index], self.bank[drawn], index[:, None] == drawn
        of_jigsaw, of_image = (
            pirl_loss(embedding, own, negatives, left_out, settings.temperature, settings.push)
            for embedding in (jigsaw, image)
        )
        if self.training:
            self._seen = index, image.detach()
        loss = settings.weight * of_jigsaw + (1 - settings.weight) * of_image
        return StepOutput(loss, {"jigsaw": of_jigsaw.detach(), "image": of_image.detach()}, image.detach())

    @torch.no_grad()
    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Let the memory bank follow the images of this step, of all processes."""
        if self._seen is not None:
            index, image = (distributed.gathered(part) for part in self._seen)
            self._seen = None
            new = F.normalize(image.to(self.bank.dtype), dim=1)
            self.bank[index] = F.normalize(self.bank[index].lerp(new, 1 - self.config.decay), dim=1)
            self.visited.index_fill_(0, index, True)
        return {}

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of memories that an image has been written to (the others are random), and the mean cosine of
        different ones among those: 1 if they are all the same."""
        return {
            "memory_visited": self.visited.float().mean(),
            "memory_cosine": mean_cosine(self.bank, self.visited),
        }


def build(config: Config, backbone: Backbone) -> PIRL:
    """PIRL of a recipe."""
    return PIRL(backbone, config=config)
