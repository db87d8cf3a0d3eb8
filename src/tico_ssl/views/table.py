"""The operations of a view in one table: their random numbers, the decisions made from these, and their operators.

Random streams, decisions, the sequence of operators and the columns that the Triton kernels read all follow from the
table. An operation draws uniform numbers per image from a random stream of its name, and declares what each becomes
under a policy. Adding an operation does not change the numbers of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tico_ssl.config.views import ViewPolicy
from tico_ssl.views import operations

Rule = tuple[float, float, float]  # for a uniform number u: low + u * span, plus one where u < probability


@dataclass(frozen=True)
class Chance:
    """1 (yes) with the probability in a field of the policy, else 0."""

    field: str
    width: ClassVar[int] = 1

    def rule(self, policy: ViewPolicy) -> Rule:
        """0, plus 1 with this probability."""
        return 0.0, 0.0, getattr(policy, self.field)


@dataclass(frozen=True)
class Between:
    """A uniformly distributed value, with bounds from the policy."""

    bounds: Callable[[ViewPolicy], tuple[float, float]]
    width: ClassVar[int] = 1

    def rule(self, policy: ViewPolicy) -> Rule:
        """From the lower bound, with the span up to the upper one."""
        low, high = self.bounds(policy)
        return low, high - low, 0.0


@dataclass(frozen=True)
class Order:
    """A random permutation of 0, 1, ..., width - 1, from `width` uniform numbers."""

    width: int

    def rule(self, policy: ViewPolicy) -> Rule:
        """Uniform numbers, which `Layout.decide` ranks."""
        return 0.0, 1.0, 0.0


Column = Chance | Between | Order
UNIFORM = Between(lambda policy: (0.0, 1.0))  # kept as drawn, for decisions from several numbers together


@dataclass(frozen=True)
class Draw:
    """Uniform numbers per image from a named random stream, and what each becomes."""

    name: str
    columns: Mapping[str, Column]

    @property
    def width(self) -> int:
        """Number of columns."""
        return sum(column.width for column in self.columns.values())

    def at_work(self, policy: ViewPolicy) -> bool:
        """Whether it can apply to any image under a policy."""
        return all(getattr(policy, column.field) > 0 for column in self.columns.values() if isinstance(column, Chance))


@dataclass(frozen=True)
class Operation(Draw):
    """One operation of the table.

    Its operator is called with images (N, C, H, W) in [0, 1] and, as keyword arguments, the decided columns: (N,) each,
    (N, width) for an order. `settings` are further arguments, alike for all images: functions of the policy and the
    side of the view. It returns new images, unchanged where it does not apply.
    """

    operator: Callable[..., Tensor]
    needs_colours: bool = False
    settings: Mapping[str, Callable[[ViewPolicy, int], Any]] = field(default_factory=dict)

    def __call__(self, images: Tensor, decided: Mapping[str, Tensor], policy: ViewPolicy) -> Tensor:
        """Apply it with its decided columns and its settings."""
        fixed = {name: setting(policy, images.shape[-1]) for name, setting in self.settings.items()}
        return self.operator(images, **decided, **fixed)


def _factor(strength: str) -> Between:
    """Within 1 ± the strength in a field of the policy, never negative."""
    return Between(lambda policy: (max(0.0, 1 - getattr(policy, strength)), 1 + getattr(policy, strength)))


def blur_taps(policy: ViewPolicy, side: int) -> int:
    """Taps of a policy's blur on a view with this side."""
    if policy.blur_kernel == "tenth":
        return operations.blur_kernel(side)
    return operations.full_blur_kernel(side, policy.blur_sigma[1])


# Position of a view in its image. `geometry` turns the numbers of a crop into a box, and of a jigsaw into a piece.
CROP = Draw("crop", dict.fromkeys(("top", "left", "height", "width"), UNIFORM))
TRIES = 10  # of a crop that is drawn again until it fits; the numbers of the first are those of CROP
RETRIES = Draw("crop retries", {f"{what} {n}": UNIFORM for n in range(1, TRIES) for what in ("area", "ratio")})
FLIP = Draw("flip", {"apply": Chance("flip")})
JIGSAW = Draw("jigsaw", dict.fromkeys(("top", "left", "rank"), UNIFORM))

JITTER = Operation(
    "jitter",
    {
        "apply": Chance("jitter"),
        "brightness": _factor("brightness"),
        "contrast": _factor("contrast"),
        "saturation": _factor("saturation"),
        "hue": Between(lambda policy: (-policy.hue, policy.hue)),
        "order": Order(4),
    },
    operations.colour_jitter,
    needs_colours=True,
)
GREYSCALE = Operation("greyscale", {"apply": Chance("greyscale")}, operations.greyscale, needs_colours=True)
BLUR = Operation(
    "blur",
    {"apply": Chance("blur"), "sigma": Between(lambda policy: policy.blur_sigma)},
    operations.gaussian_blur,
    settings={"kernel_size": blur_taps},
)
SOLARISE = Operation("solarise", {"apply": Chance("solarise")}, operations.solarise)

OPERATIONS = (JITTER, GREYSCALE, BLUR, SOLARISE)  # for every view and every jigsaw piece, in this order


def at_work(policy: ViewPolicy, channels: int, table: Sequence[Operation] = OPERATIONS) -> list[Operation]:
    """The active operations of a policy for images with this number of channels, in order."""
    without = left_out(policy, channels, table)
    chosen = [operation for operation in table if operation.at_work(policy) and operation.name not in without]
    return sorted(chosen, key=lambda operation: operation is not GREYSCALE) if policy.greyscale_first else chosen


def left_out(policy: ViewPolicy, channels: int, table: Sequence[Operation] = OPERATIONS) -> list[str]:
    """The operations of a policy that are skipped for this number of channels, since they need colours."""
    if channels == operations.COLOURS:
        return []
    return [operation.name for operation in table if operation.needs_colours and operation.at_work(policy)]


class Layout:
    """Concatenated draws: the common column layout of uniform numbers, rules and decisions."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        self.draws = tuple(draws)
        self.width = 0
        self._starts: dict[str, dict[str, int]] = {}
        self._orders: list[slice] = []
        for draw in draws:
            if draw.name in self._starts:
                raise ValueError(f"two view operations are called '{draw.name}'")
            starts = self._starts[draw.name] = {}
            for name, column in draw.columns.items():
                starts[name] = self.width
                self.width += column.width
                if isinstance(column, Order):
                    self._orders.append(slice(starts[name], self.width))

    def place(self, draw: Draw, column: str) -> int:
        """Index of a column, or of the first column of an order."""
        return self._starts[draw.name][column]

    def columns(self, *draws: Draw) -> slice:
        """The columns of one draw, or of several adjacent ones."""
        start = min(self._starts[draws[0].name].values())
        return slice(start, start + sum(draw.width for draw in draws))

    def named(self, decisions: Tensor, draw: Draw) -> dict[str, Tensor]:
        """The columns of a draw in decisions (N, width), by name."""
        starts = self._starts[draw.name]
        return {
            name: decisions[:, starts[name] : starts[name] + column.width]
            if isinstance(column, Order)
            else decisions[:, starts[name]]
            for name, column in draw.columns.items()
        }

    def rules(self, policies: Sequence[ViewPolicy]) -> Tensor:
        """Rules of the columns under each policy: lows, spans and probabilities, (3, policies, width)."""
        columns = [column for draw in self.draws for column in draw.columns.values() for _ in range(column.width)]
        rules = [[column.rule(policy) for column in columns] for policy in policies]
        return torch.tensor(rules).permute(2, 0, 1).contiguous()

    def decide(self, uniforms: Tensor, rules: Tensor) -> Tensor:
        """Uniform numbers (N, ..., width) to decisions, by rules (3, ..., width)."""
        low, span, probability = rules.to(uniforms).unbind()
        decisions = (uniforms * span).add_(low).add_((uniforms < probability).to(uniforms.dtype))
        for order in self._orders:
            decisions[..., order] = uniforms[..., order].argsort(dim=-1).to(uniforms.dtype)
        return decisions


PLACE = Layout((CROP, FLIP))  # the first columns of every view
