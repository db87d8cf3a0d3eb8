"""Random numbers as a function of (seed, purpose, number): no state to save for a resume.

The order of an epoch, the views of a step and the dropout of a step each have a generator of their own.
"""

import zlib

import numpy as np
import torch

PURPOSES = ("weights", "order", "views", "network", "split", "probe")


def derived_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed, practically independent for every combination of arguments."""
    state = np.random.SeedSequence([seed, PURPOSES.index(purpose), *numbers]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A generator for one purpose, on the CPU so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose, *numbers))


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one of several streams of a seed, identified by name, not by position in a list."""
    state = np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


def random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of the generators from which a network on a device draws: the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Go back to a state, to draw the same numbers again."""
    of_cpu, of_device = state
    torch.set_rng_state(of_cpu)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, device)
