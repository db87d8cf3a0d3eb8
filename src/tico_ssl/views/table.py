"""The operations of a view in one table: what each draws, what its numbers become, and what it does to images.

Random streams, decisions, the way of an image through the operators and the columns that the Triton kernels read all
follow from the table. An operation draws uniform numbers for every image from a random stream that bears its name, and
says what each becomes under a policy: an operation that is added changes no number of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tico_ssl.config.views import ViewPolicy
from tico_ssl.views import operations

Rule = tuple[float, float, float]  # of a uniform number u: low + u * span, and one more where u < probability


@dataclass(frozen=True)
class Chance:
    """One (yes) with the probability that a field of the policy gives, else zero."""

    field: str
    width: ClassVar[int] = 1

    def rule(self, policy: ViewPolicy) -> Rule:
        """Nothing, and one more with this probability."""
        return 0.0, 0.0, getattr(policy, self.field)


@dataclass(frozen=True)
class Between:
    """A value from a uniform distribution, whose bounds follow from the policy."""

    bounds: Callable[[ViewPolicy], tuple[float, float]]
    width: ClassVar[int] = 1

    def rule(self, policy: ViewPolicy) -> Rule:
        """From the lower bound up."""
        low, high = self.bounds(policy)
        return low, high - low, 0.0


@dataclass(frozen=True)
class Order:
    """A random permutation of 0, 1, ..., width - 1, from as many uniform numbers."""

    width: int

    def rule(self, policy: ViewPolicy) -> Rule:
        """Uniform numbers, which `Layout.decide` ranks."""
        return 0.0, 1.0, 0.0


Column = Chance | Between | Order
UNIFORM = Between(lambda policy: (0.0, 1.0))  # stays as drawn, for what is decided from several numbers together


@dataclass(frozen=True)
class Draw:
    """Uniform numbers for every image, from the random stream of a name, and what each becomes."""

    name: str
    columns: Mapping[str, Column]

    @property
    def width(self) -> int:
        """How many numbers."""
        return sum(column.width for column in self.columns.values())

    def at_work(self, policy: ViewPolicy) -> bool:
        """Whether it can say yes to any image under a policy."""
        return all(getattr(policy, column.field) > 0 for column in self.columns.values() if isinstance(column, Chance))


@dataclass(frozen=True)
class Operation(Draw):
    """One operation of the table.

    Its operator is called with images (N, C, H, W) in [0, 1] and, by their names, what the columns became: (N,) each,
    (N, width) for an order. It returns new images, unchanged where the chance said no.
    """

    operator: Callable[..., Tensor]
    needs_colours: bool = False


def _factor(strength: str) -> Between:
    """Within one plus or minus the strength in a field of the policy, never negative."""
    return Between(lambda policy: (max(0.0, 1 - getattr(policy, strength)), 1 + getattr(policy, strength)))


# Where a view lies in its image. `geometry` makes a box of the numbers of a crop, and a piece of those of a jigsaw.
CROP = Draw("crop", dict.fromkeys(("top", "left", "height", "width"), UNIFORM))
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
    "blur", {"apply": Chance("blur"), "sigma": Between(lambda policy: policy.blur_sigma)}, operations.gaussian_blur
)
SOLARISE = Operation("solarise", {"apply": Chance("solarise")}, operations.solarise)

OPERATIONS = (JITTER, GREYSCALE, BLUR, SOLARISE)  # of every view, and of every piece of a jigsaw, in this order


def at_work(policy: ViewPolicy, channels: int, table: Sequence[Operation] = OPERATIONS) -> list[Operation]:
    """What happens under a policy to images of so many channels, in its order."""
    without = left_out(policy, channels, table)
    chosen = [operation for operation in table if operation.at_work(policy) and operation.name not in without]
    return sorted(chosen, key=lambda operation: operation is not GREYSCALE) if policy.greyscale_first else chosen


def left_out(policy: ViewPolicy, channels: int, table: Sequence[Operation] = OPERATIONS) -> list[str]:
    """The operations of a policy that images with so many channels do not get, since they have no colours."""
    if channels == operations.COLOURS:
        return []
    return [operation.name for operation in table if operation.needs_colours and operation.at_work(policy)]


class Layout:
    """Draws side by side: the columns of uniform numbers, of rules and of decisions alike."""

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
        """Where a column is, or the first of an order."""
        return self._starts[draw.name][column]

    def columns(self, *draws: Draw) -> slice:
        """Those of one draw, or of several that lie side by side."""
        start = min(self._starts[draws[0].name].values())
        return slice(start, start + sum(draw.width for draw in draws))

    def named(self, decisions: Tensor, draw: Draw) -> dict[str, Tensor]:
        """The columns of a draw by their names, of decisions (N, width)."""
        starts = self._starts[draw.name]
        return {
            name: decisions[:, starts[name] : starts[name] + column.width]
            if isinstance(column, Order)
            else decisions[:, starts[name]]
            for name, column in draw.columns.items()
        }

    def rules(self, policies: Sequence[ViewPolicy]) -> Tensor:
        """What the columns become under each policy: lows, spans and probabilities, (3, policies, width)."""
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
