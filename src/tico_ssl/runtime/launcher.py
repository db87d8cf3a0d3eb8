"""What torchrun, or a launcher that sets the same variables, says about this process. Nothing here imports torch."""

import os


def launched() -> bool:
    """Whether a launcher started several processes, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", "0"))
