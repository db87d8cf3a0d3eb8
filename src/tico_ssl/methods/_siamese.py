"""Siamese methods: one network for two views."""

from tico_ssl.methods._base import Batch, Encoded, Method
from tico_ssl.networks.projector import head

__all__ = ["Siamese", "head"]


class Siamese(Method):
    """Backbone and projector. Each view has its own forward pass: in one batch the views would share BatchNorm
    statistics. There is no other state."""

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of the first two views, both with gradient."""
        view_1, view_2 = batch.images(2)
        return Encoded((self.embed(view_1), self.embed(view_2)))
