"""Random numbers as a function of (seed, purpose, number): nothing to save, nothing that drifts when a run resumes.

Every draw of a run - the order of an epoch, the views of a step, the dropout of a step - has a generator of its own.
"""

import zlib

import numpy as np
import torch

PURPOSES = ("weights", "order", "views", "network", "split", "probe")


def derived_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed that is as good as independent for every combination of its arguments."""
    state = np.random.SeedSequence([seed, PURPOSES.index(purpose), *numbers]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A CPU generator for one purpose; CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose, *numbers))


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one of several streams below a seed, told apart by a name and not by a place in a list."""
    state = np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
