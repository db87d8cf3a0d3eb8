"""A backbone as a state dict of another library."""

from pathlib import Path

import torch
from torch import nn

from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.storage import plain_state
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically


def write_state_dict(backbone: Backbone, out: Path, library: str, setup: list[str], strict: bool) -> str:
    """Write a state dict under a library's names; return the lines that build the same network and load it."""
    if backbone.config.name.partition("/")[0] != library:
        raise UserError(f"the backbone is '{backbone.config.name}', which is not a {library} model")
    with written_atomically(out) as temporary, temporary.open("wb") as file:
        torch.save(plain_state(backbone), file)
    lines = list(setup)
    small = isinstance(getattr(backbone.network, "maxpool", None), nn.Identity)
    if small or (library == "torchvision" and backbone.config.channels != 3):
        name, first = next((n, m) for n, m in backbone.network.named_modules() if isinstance(m, nn.Conv2d))
        sizes = (first.in_channels, first.out_channels, first.kernel_size, first.stride, first.padding)
        place = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
        written = f"{', '.join(map(str, sizes))}, bias={first.bias is not None}"
        lines.append(f"model{place} = torch.nn.Conv2d({written})  # the stem as trained")
    if small:
        lines.append("model.maxpool = torch.nn.Identity()")
    loose = "" if strict else ", strict=False)  # all but the classifier"
    return "\n".join([*lines, f"model.load_state_dict(torch.load({str(out)!r}){loose or ')'}"])
