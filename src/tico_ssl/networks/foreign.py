"""Weights from elsewhere: a checkpoint of another library or program, found by names, and adapted by stated rules.

A checkpoint may hold the network under a prefix (`module.encoder_q.`, `backbone.`), several networks, heads, or a
network that was taken apart into a sequence, whose parts are numbered. The names that match most of the network count.
Nothing is unpickled: files are safetensors, or what `torch.load` reads with `weights_only`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

Tensors = dict[str, Tensor]
INSIDE = ("state_dict", "model", "teacher", "classy_state_dict", "base_model", "trunk")  # entries that hold the network
DEPTH = 8  # of such entries in each other
FOLLOWERS = re.compile(r"momentum|encoder_k|key|target|ema|teacher")  # names of averaged copies, taken if alone
POSITIONS = re.compile(r"(^|\.)pos_embed(ding)?$")  # of timm's and torchvision's transformers
TOKENS = (1, 0, 5, 2)  # before those of the patches: class, none, class and registers, class and distillation
UNIMPORTANT = "num_batches_tracked"  # a counter that only BatchNorm without momentum reads
MOST_SHOWN = 4  # names in a line


def read_tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file or a PyTorch checkpoint, by name."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or not a safetensors file ({error})") from error
    except Exception as error:  # a damaged or unsafe file fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: not a weights file that is safe to load ({reason})") from error
    for _ in range(DEPTH):  # a file may contain itself
        inner = [found[key] for key in INSIDE if isinstance(found.get(key), dict)] if isinstance(found, dict) else []
        found = inner[0] if inner else found
    named = found.items() if isinstance(found, dict) else ()
    tensors = {name: value for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{path}: contains no named tensors")
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex():
            raise UserError(
                f"{path}: {name} is sparse, quantised, complex or without values; weights are plain numbers"
            )
    return tensors


@dataclass(frozen=True)
class Match:
    """Which tensors of a network are in a checkpoint: `found` by the network's names, `adapted` with the rule, `unfit`
    with both shapes, `missing`, and those of the checkpoint that were `ignored`."""

    prefix: str
    found: Tensors
    adapted: dict[str, str]
    unfit: dict[str, tuple[str, str]]
    missing: list[str]
    ignored: list[str]

    @property
    def whole(self) -> bool:
        """Whether every tensor of the network is there."""
        return not self.unfit and not self.missing

    def lines(self) -> list[str]:
        """A table in words."""
        total = len(self.found) + len(self.unfit) + len(self.missing)
        under = f" under '{self.prefix}'" if self.prefix else ""
        lines = [f"loaded    {len(self.found)} of {counted(total, 'tensor')}{under}"]
        lines += [f"adapted   {name} {how}" for name, how in self.adapted.items()]
        lines += [f"unfit     {name} {' -> '.join(shapes)}; at random" for name, shapes in self.unfit.items()]
        if self.missing:
            lines.append(f"missing   {_shown(self.missing)}; at random")
        if self.ignored:
            names = [name.removeprefix(self.prefix) for name in self.ignored]
            lines.append(f"ignored   {_shown(_groups(names))} ({counted(len(names), 'tensor')})")
        return lines


def match(network: nn.Module, tensors: Tensors, adapt: bool = True) -> Match:
    """Find the tensors of a network in a checkpoint. With `adapt`, kernels of the first convolution are changed to its
    size and number of channels, and position embeddings to its number of patches."""
    wanted = network.state_dict()
    names, prefix = _naming(network, wanted, tensors)
    first = next((f"{name}.weight" for name, part in network.named_modules() if isinstance(part, nn.Conv2d)), None)
    found: Tensors = {}
    adapted, unfit, missing, used = dict[str, str](), dict[str, tuple[str, str]](), list[str](), set[str]()
    for name, value in wanted.items():
        theirs = tensors.get(prefix + names[name])
        if theirs is None:
            missing += [] if name.endswith(UNIMPORTANT) else [name]
            continue
        used.add(prefix + names[name])
        shapes = _shape(theirs), _shape(value)
        change = " -> ".join(shapes)
        if theirs.shape == value.shape:
            found[name] = theirs
        elif adapt and name == first and theirs.ndim == 4 and len(theirs) == len(value):
            found[name] = fitted_kernel(theirs, value.shape[1], value.shape[2], value.shape[3])
            adapted[name] = f"{change} ({' and '.join(_rules(theirs, value))})"
        elif adapt and POSITIONS.search(name) and (positions := fitted_positions(theirs, value.shape)) is not None:
            found[name], adapted[name] = positions, f"{change} (position embeddings interpolated)"
        else:
            unfit[name] = shapes
    return Match(prefix, found, adapted, unfit, missing, sorted(set(tensors) - used))


def start_from(backbone: Backbone, tensors: Tensors, origin: str, strict: bool = True) -> Match:
    """Load a checkpoint into a backbone. Unless `strict`, what is not in it stays as it is."""
    result = match(backbone.network, tensors)
    name = backbone.config.name
    if not result.found:
        raise UserError(f"{origin}: has no weights of {name}; its tensors are {_shown(_groups(tensors))}")
    if strict and not result.whole:
        unfit = (f"'{key}' is {theirs} and must be {ours}" for key, (theirs, ours) in result.unfit.items())
        lacking = [*unfit, *(f"no '{key}'" for key in result.missing)]
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        hint = "training.init_strict=false starts such tensors at random"
        raise UserError(f"{origin}: does not match {name}: {lacking[0]}{more}; {hint}")
    backbone.network.load_state_dict(result.found, strict=False)
    return result


def fitted_kernel(kernel: Tensor, channels: int, height: int, width: int) -> Tensor:
    """A kernel (out, in, h, w) for another number of channels or another size.

    One channel: the sum over the channels, as for a grey image. More: the channels repeated in order, each divided by
    how often it is there. Fewer: what the missing ones had is spread over the others. So an image whose channels are
    equal gives what it gave. Size: each tap is the sum of those that it covers, so that an image whose
    details are larger or smaller in the same proportion gives what it gave.
    """
    old = kernel.shape[1]
    if channels == 1:
        kernel = kernel.sum(dim=1, keepdim=True)
    elif channels != old:
        sources = torch.arange(channels) % old
        copies = torch.bincount(sources)[sources].view(1, -1, 1, 1).to(kernel)
        lost = kernel[:, channels:].sum(dim=1, keepdim=True)
        kernel = kernel[:, sources] / copies + lost / channels
    rows, columns = (_covering(a, b).to(kernel) for a, b in zip(kernel.shape[2:], (height, width), strict=True))
    return rows @ kernel @ columns.T


def fitted_positions(embeddings: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Position embeddings (1, tokens, width) for another square of patches, by bicubic interpolation; those of other
    tokens stay. None if the tokens do not make squares."""
    if embeddings.ndim != 3 or len(shape) != 3 or embeddings.shape[2] != shape[2]:
        return None
    for extra in TOKENS:
        before, after = math.isqrt(max(0, embeddings.shape[1] - extra)), math.isqrt(max(0, shape[1] - extra))
        if before > 0 and after > 0 and (before**2 + extra, after**2 + extra) == (embeddings.shape[1], shape[1]):
            grid = embeddings[:, extra:].float().unflatten(1, (before, before)).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, (after, after), mode="bicubic", antialias=True, align_corners=False)
            fitted = grid.permute(0, 2, 3, 1).flatten(1, 2).to(embeddings.dtype)
            return torch.cat([embeddings[:, :extra], fitted], dim=1)
    return None


def _covering(before: int, after: int) -> Tensor:
    """How much of each of `before` taps each of `after` taps of another length covers (after, before)."""
    edges = torch.arange(after + 1, dtype=torch.float64) * before / after
    taps = torch.arange(before, dtype=torch.float64)
    ends = torch.minimum(edges[1:, None], taps + 1)
    return (ends - torch.maximum(edges[:-1, None], taps)).clamp(min=0)


def _rules(theirs: Tensor, ours: Tensor) -> Iterator[str]:
    if theirs.shape[1] != ours.shape[1]:
        yield "channels repeated" if ours.shape[1] > theirs.shape[1] else "channels summed"
    if theirs.shape[2:] != ours.shape[2:]:
        yield "taps summed"


def _naming(network: nn.Module, wanted: Iterable[str], tensors: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The names of a network's tensors in a checkpoint and their prefix: its own, or those of its children as a
    sequence, whichever finds more."""
    numbers = {name: str(number) for number, (name, _) in enumerate(network.named_children())}
    numbered = {}
    for name in wanted:
        first, _, rest = name.partition(".")
        numbered[name] = f"{numbers.get(first, first)}.{rest}" if rest else name
    tries = [(names, _prefix(names.values(), tensors)) for names in ({name: name for name in wanted}, numbered)]
    return max(tries, key=lambda one: sum(one[1] + name in tensors for name in one[0].values()))


def _prefix(names: Iterable[str], tensors: Mapping[str, Any]) -> str:
    """What stands before the network's names, such as `module.encoder_q.`; a trained network rather than an average of
    it, if both are there."""
    wanted = list(names)
    first = wanted[0]
    prefixes = [key.removesuffix(first) for key in tensors if key == first or key.endswith(f".{first}")]

    def worth(prefix: str) -> tuple[int, bool]:
        return sum(prefix + name in tensors for name in wanted), FOLLOWERS.search(prefix) is None

    return max(prefixes, key=worth, default="")


def _groups(names: Iterable[str]) -> list[str]:
    """Names by their beginnings, the most frequent first."""
    parts = (name.removeprefix("module.").partition(".") for name in names)
    return [head + (".*" if dot else "") for (head, dot), _ in Counter(part[:2] for part in parts).most_common()]


def _shown(names: list[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (", ..." if len(names) > MOST_SHOWN else "")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
