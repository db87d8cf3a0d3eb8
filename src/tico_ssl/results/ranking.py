"""Which of several recipes is better, and whether anybody can tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tico_ssl.results.confidence import Interval, unpaired_interval
from tico_ssl.results.metrics import Quantity
from tico_ssl.results.statistics import difference_of
from tico_ssl.results.verdict import between, signed
from tico_ssl.runtime.wording import counted


@dataclass(frozen=True)
class Contender:
    """A recipe: the metric by seed, and the number of test images if it is known."""

    name: str
    by_seed: Mapping[int, float]
    images: int | None = None

    @property
    def mean(self) -> float:
        """Over its seeds."""
        return fmean(self.by_seed.values())


def lead(by: Quantity, contenders: Sequence[Contender]) -> str | None:
    """The best and the next in a sentence, with the interval of their difference: over seeds, or else over test images;
    None of a single one."""
    if len(contenders) < 2:
        return None
    best, second = sorted(contenders, key=lambda one: -by.metric.sign * one.mean)[:2]
    difference, interval, basis = _difference(by, best, second)
    shown = f"{signed(difference, by.metric.digits)} {by.metric.points}".rstrip()
    ahead = f"By {by}, {best.name} is ahead of {second.name}: {shown}"
    if interval is None:
        return f"{ahead} (interval not known: run several seeds of both)."
    known = f"{ahead} (95 % interval {between(*interval, by.metric.digits)}, {basis})"
    if min(by.metric.sign * end for end in interval) > 0:
        return f"{known}."
    pair = " or evaluate one `--against` the other, image by image" if len(best.by_seed) < 2 else ""
    return f"{known}, so nobody can tell which is better: run more seeds of both{pair}."


def _difference(by: Quantity, best: Contender, second: Contender) -> tuple[float, Interval | None, str]:
    """Of two recipes, with its interval and what that is over."""
    difference, interval = difference_of(best.by_seed, second.by_seed)
    if interval is not None:
        paired = best.by_seed.keys() == second.by_seed.keys()
        return difference, interval, counted(len(best.by_seed), "seed") if paired else "seeds that are not the same"
    sizes, shares = (best.images, second.images), (best.mean / 100, second.mean / 100)
    if not by.metric.share or None in sizes or not all(0 <= share <= 1 for share in shares):
        return difference, None, ""
    low, high = unpaired_interval(shares[0], sizes[0] or 1, shares[1], sizes[1] or 1)
    return difference, (100 * low, 100 * high), counted(sizes[0] or 1, "test image")
