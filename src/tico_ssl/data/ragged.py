"""Images of different sizes in one piece of memory, which a device can hold as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tico_ssl.runtime.device import sent


@dataclass(frozen=True)
class Ragged:
    """uint8 images, channels last, anywhere in one `memory`: image i has `sizes[i]` (height, width) and starts at byte
    `begins[i]`. No side is longer than `largest`."""

    memory: Tensor
    begins: Tensor
    sizes: Tensor
    channels: int
    largest: int

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> "Ragged":
        """A copy of images (C, H, W), one after the other."""
        lengths = torch.tensor([image.numel() for image in images])
        memory = torch.cat([image.permute(1, 2, 0).flatten() for image in images])
        sizes = torch.tensor([image.shape[1:] for image in images], dtype=torch.int32)
        return cls(memory, lengths.cumsum(0) - lengths, sizes, len(images[0]), int(sizes.max()))

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.memory.device

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, place: int) -> Tensor:
        """One image (C, H, W), without a copy."""
        (height, width), begin = self.sizes[place].tolist(), int(self.begins[place])
        pixels = self.memory[begin : begin + height * width * self.channels]
        return pixels.view(height, width, self.channels).permute(2, 0, 1)

    def take(self, index: Tensor) -> "Ragged":
        """The images at these indices; the memory stays where it is."""
        return replace(self, begins=self.begins[index], sizes=self.sizes[index])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(len(self)))

    def to(self, device: torch.device) -> "Ragged":
        """The same images on a device."""
        memory, begins, sizes = (sent(part, device) for part in (self.memory, self.begins, self.sizes))
        return replace(self, memory=memory, begins=begins, sizes=sizes)
