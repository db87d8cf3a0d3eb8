"""The latest keys of a target network, in a ring buffer of fixed length.

The write position is a tensor, so a captured step advances it in every replay.
"""

import torch
from torch import Tensor, nn

from tico_ssl.runtime.errors import UserError


class KeyQueue(nn.Module):
    """`keys` (length, dim) and the number ever `written`: buffers, saved, moved and resumed with the module."""

    keys: Tensor
    written: Tensor

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))
        self._keys_of_a_step = 1  # the same in every step

    def places(self, count: int) -> Tensor:
        """The rows of the next keys, which replace the oldest."""
        length = len(self.keys)
        if length % count:
            raise UserError(f"a queue of {length} keys is not a multiple of the {count} that a step adds to it")
        return (self.written + torch.arange(count, device=self.keys.device)) % length

    def with_keys(self, keys: Tensor) -> Tensor:
        """A copy of the queue with these keys added."""
        return self.keys.index_copy(0, self.places(len(keys)), keys.to(self.keys.dtype))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Replace the oldest keys by these."""
        self.keys.index_copy_(0, self.places(len(keys)), keys.to(self.keys.dtype))
        self.written += len(keys)
        self._keys_of_a_step = len(keys)

    def filled(self) -> Tensor:
        """The filled fraction of the queue."""
        return (self.written / len(self.keys)).clamp(max=1)

    def diagnostics(self, name: str) -> dict[str, Tensor]:
        """Filled fraction, age of the oldest key in steps, and mean cosine of different keys: 1 if the target has
        collapsed."""
        places = torch.arange(len(self.keys), device=self.keys.device)
        return {
            f"{name}_filled": self.filled(),
            f"{name}_age": self.written.clamp(max=len(self.keys)) / self._keys_of_a_step,
            f"{name}_cosine": mean_cosine(self.keys, places < self.written),
        }

    def extra_repr(self) -> str:
        return f"length={self.keys.shape[0]}, dim={self.keys.shape[1]}"


def mean_cosine(vectors: Tensor, counted: Tensor) -> Tensor:
    """Mean cosine of different unit vectors (m, d) among those that are counted (m,): 1 if all are equal, 0 for fewer
    than two."""
    number = counted.sum()
    total = torch.mv(vectors.T, counted.to(vectors.dtype))
    return (total.square().sum() - number) / (number * (number - 1)).clamp(min=1)
