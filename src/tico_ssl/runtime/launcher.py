"""The environment variables of torchrun and compatible launchers. Nothing here imports torch."""

import os


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    """The rank of this process among them."""
    return int(os.environ.get("RANK", "0"))
