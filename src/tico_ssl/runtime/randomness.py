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
