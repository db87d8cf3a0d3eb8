"""95 % intervals of shares, of their differences, and of means. Nothing here needs numpy, so tables stay fast.

Counts may be fractions: a mean over several draws counts as many images as it is worth.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
HALVINGS = 60  # of an interval that holds a root, down to rounding error
MANY = 1_000  # degrees of freedom, with which Student's t is the normal distribution to two decimals

Interval = tuple[float, float]


def share_interval(right: float, images: float, z: float = Z) -> Interval:
    """Wilson's score interval of a share: within 0 and 1, and wider than a point even where all or none are right."""
    share, worth = right / images, z * z / images
    middle = (share + worth / 2) / (1 + worth)
    reach = z / (1 + worth) * math.sqrt(share * (1 - share) / images + worth / (4 * images))
    return max(0.0, min(middle - reach, share)), min(1.0, max(middle + reach, share))


def paired_interval(gained: float, lost: float, images: float, z: float = Z) -> Interval:
    """Tango's score interval (1998) of the difference of two shares of the same images, of which `gained` are right
    under the first only and `lost` under the second only.

    Both are scored on the same images, and what they have in common cancels, so this is much narrower than the
    difference of two intervals. Of the intervals for paired shares it is the one that belongs to McNemar's test (0 is
    outside where that rejects), and it keeps its level where few images differ, as a Wald interval does not.
    """

    def score(difference: float) -> float:
        """Standard deviations between what was seen and this difference."""
        b = (2 * images - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        lost_share = (math.sqrt(max(b * b - 8 * images * c, 0.0)) - b) / (4 * images)  # the likeliest, given it
        variance = images * (2 * lost_share + difference * (1 - difference))
        seen = gained - lost - images * difference
        return seen / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, seen) if seen else 0.0

    seen = (gained - lost) / images
    return _falls_to(score, z, -1.0, seen), _falls_to(score, -z, seen, 1.0)


def _falls_to(score: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a falling function reaches a level."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > level else (low, middle)
    return (low + high) / 2


def unpaired_interval(first: float, first_images: float, second: float, second_images: float) -> Interval:
    """Newcombe's interval (1998) of the difference of two shares of images that are not known one by one: the reaches
    of Wilson's intervals, added as independent errors."""
    (low, high), (other_low, other_high) = (
        share_interval(share * images, images) for share, images in ((first, first_images), (second, second_images))
    )
    difference = first - second
    return (
        difference - math.hypot(first - low, other_high - second),
        difference + math.hypot(high - first, second - other_low),
    )


def student(freedom: int) -> float:
    """Student's t within which 95 % lie, for a whole number of degrees of freedom."""
    if freedom > MANY:
        return Z
    angle = _falls_to(lambda angle: -_within(angle, freedom), -LEVEL, 0.0, math.pi / 2)
    return math.tan(angle) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """Probability that |t| is below tan(angle) * sqrt(freedom), by the finite sums for whole degrees of freedom
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * number / (number + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
