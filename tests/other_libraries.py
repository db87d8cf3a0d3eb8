"""A program that has never heard of this package: it runs the lines that exports print, each with its own library.

It takes a file of torch.save with the cases, lines and images, writes one of their features, and then runs the lines
of the documentation where the files lie.
"""

import pickle
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def features(snippet: str, images: Tensor, photo: Path) -> tuple[Tensor, Tensor | None]:
    """What a reader gets who pastes the lines: of images, and of a photo as the lines prepare it, if they do."""
    names: dict = {}
    exec(snippet, names)
    if "session" in names:
        session = names["session"]

        def model(given: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {"images": numpy.asarray(given)})[0])

    elif "cfg" in names:
        return of_detectron2(names["cfg"], images), None
    elif "model" not in names:
        return names["state"]["layer4.0.conv2.weight"], None
    else:
        model = names["model"]
    return model(images), model(names["preprocess"](photo)) if "preprocess" in names else None


def without_classifier(model: nn.Module) -> nn.Module:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if linear and model.get_submodule(linear[-1]).out_features == 1000:
        parent, _, child = linear[-1].rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    return model


# ----------------------------------------------------------------------- detectron2, of which only the names are here


class Convolution(nn.Conv2d):
    """A convolution that has its norm as a child."""

    def __init__(self, planes: int, out: int, size: int, stride: int = 1) -> None:
        super().__init__(planes, out, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Block(nn.Module):
    """A basic block, or one with a bottleneck and its stride in the middle."""

    def __init__(self, planes: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.shortcut = Convolution(planes, out, 1, stride) if planes != out else nn.Identity()
        basic = width == out
        self.conv1 = Convolution(planes, width, 3 if basic else 1, stride if basic else 1)
        self.conv2 = Convolution(width, width, 3, 1 if basic else stride)
        self.conv3 = nn.Identity() if basic else Convolution(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        y = y if isinstance(self.conv3, nn.Identity) else self.conv3(F.relu(y))
        return F.relu(y + self.shortcut(x))


def of_detectron2(cfg: SimpleNamespace, images: Tensor) -> Tensor:
    """Pooled features of the network that the config describes. Images are in the unit of pixels, as there."""
    resnets = cfg.MODEL.RESNETS
    assert (resnets.NUM_GROUPS, resnets.STRIDE_IN_1X1) == (1, False)
    counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[resnets.DEPTH]
    width, planes, out = resnets.WIDTH_PER_GROUP, 64, resnets.RES2_OUT_CHANNELS
    model = nn.ModuleDict({"stem": nn.ModuleDict({"conv1": Convolution(len(cfg.MODEL.PIXEL_MEAN), 64, 7, 2)})})
    for stage, count in enumerate(counts):
        blocks = [Block(planes, width, out, 2 if stage else 1), *(Block(out, width, out, 1) for _ in range(count - 1))]
        model[f"res{stage + 2}"] = nn.Sequential(*blocks)
        planes, width, out = out, 2 * width, 2 * out
    with Path(cfg.MODEL.WEIGHTS).open("rb") as file:
        content = pickle.load(file)
    assert content["matching_heuristics"] is True
    assert "__author__" in content
    state = {name: torch.from_numpy(value) for name, value in content["model"].items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD))
    x = F.max_pool2d(F.relu(model.eval()["stem"]["conv1"]((images - mean) / std)), 3, 2, 1)
    for stage in range(2, 6):
        x = model[f"res{stage}"](x)
    return x.mean(dim=(2, 3))


def stand_in_for_detectron2() -> None:
    """`get_cfg`, which gives sections to write into."""
    config = types.ModuleType("detectron2.config")
    resnets = {"RES2_OUT_CHANNELS": 256}
    config.get_cfg = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        MODEL=SimpleNamespace(RESNETS=SimpleNamespace(**resnets)), INPUT=SimpleNamespace()
    )
    sys.modules |= {"detectron2": types.ModuleType("detectron2"), "detectron2.config": config}


if __name__ == "__main__":
    sys.modules["tico_ssl"] = None  # type: ignore[assignment] - importing it is an error
    torch.set_num_threads(1)
    stand_in_for_detectron2()
    with torch.no_grad():
        found = {case: features(*given) for case, given in torch.load(sys.argv[1]).items()}
    torch.save(found, sys.argv[2])
    for block in re.findall(r"```python\n(.*?)```", Path(sys.argv[3]).read_text(encoding="utf-8"), re.DOTALL):
        exec(block, {})
