"""The last keys that a target network made, as a ring of fixed length: newest over oldest, step by step.

Where the next keys go is a tensor, so a recorded step writes to another place each time it is replayed.
"""

import torch
from torch import Tensor, nn

from tico_ssl.runtime.errors import UserError


class KeyQueue(nn.Module):
    """`keys` (length, dim) and how many were ever `written`: buffers, saved, moved and resumed with the module."""

    keys: Tensor
    written: Tensor

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))
        self._keys_of_a_step = 1  # the same in every step

    def places(self, count: int) -> Tensor:
        """The rows that the next keys take, those of the oldest."""
        length = len(self.keys)
        if length % count:
            raise UserError(f"a queue of {length} keys is not a multiple of the {count} that a step adds to it")
        return (self.written + torch.arange(count, device=self.keys.device)) % length

    def with_keys(self, keys: Tensor) -> Tensor:
        """A copy of the queue as it would be after these keys."""
        return self.keys.index_copy(0, self.places(len(keys)), keys.to(self.keys.dtype))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Put these keys in the place of the oldest."""
        self.keys.index_copy_(0, self.places(len(keys)), keys.to(self.keys.dtype))
        self.written += len(keys)
        self._keys_of_a_step = len(keys)

    def filled(self) -> Tensor:
        """The share of the queue that holds keys, from 0 to 1."""
        return (self.written / len(self.keys)).clamp(max=1)

    def diagnostics(self, name: str) -> dict[str, Tensor]:
        """How full it is, how many steps ago its oldest key was made, and the mean cosine of different keys: 1 if the
        network that makes them has collapsed."""
        places = torch.arange(len(self.keys), device=self.keys.device)
        return {
            f"{name}_filled": self.filled(),
            f"{name}_age": self.written.clamp(max=len(self.keys)) / self._keys_of_a_step,
            f"{name}_cosine": mean_cosine(self.keys, places < self.written),
        }

    def extra_repr(self) -> str:
        return f"length={self.keys.shape[0]}, dim={self.keys.shape[1]}"


def mean_cosine(vectors: Tensor, counted: Tensor) -> Tensor:
    """Of different unit vectors (m, d), those of them that are counted (m,): 1 if all are the same, and 0 of fewer than
    two."""
    number = counted.sum()
    total = torch.mv(vectors.T, counted.to(vectors.dtype))
    return (total.square().sum() - number) / (number * (number - 1)).clamp(min=1)
