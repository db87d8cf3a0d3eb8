"""Siamese methods: one network for two views."""

from tico_ssl.methods._base import Batch, Encoded, Method
from tico_ssl.networks.projector import head

__all__ = ["Siamese", "head"]


class Siamese(Method):
    """Backbone and projector. There is no other state."""

    joint_pass = False
    """Whether both views share one forward pass, and so BatchNorm statistics."""

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of the first two views, both with gradient."""
        return Encoded(self.embed_views(batch.images(2), self.joint_pass))
