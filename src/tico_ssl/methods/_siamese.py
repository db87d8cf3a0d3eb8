"""One network for two views: what methods have in common that compare the views of a batch."""

from tico_ssl.methods._base import Batch, Encoded, Method
from tico_ssl.networks.projector import head

__all__ = ["Siamese", "head"]


class Siamese(Method):
    """Backbone and projector. Each view goes through them in a forward of its own: in one batch the views would share
    BatchNorm statistics. Nothing moves after a step, and there is no state but theirs."""

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of the first two views; both take a gradient."""
        view_1, view_2 = batch.images(2)
        return Encoded((self.embed(view_1), self.embed(view_2)))
