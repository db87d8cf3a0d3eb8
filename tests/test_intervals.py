"""Intervals: closed forms, symmetry, coverage by simulation, and what a result keeps of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._evaluate import evaluate_all
from tico_ssl.evaluations.clustering import agreement
from tico_ssl.evaluations.few_shot import Config as FewShot
from tico_ssl.evaluations.svm import mean_precision
from tico_ssl.features.evidence import (
    Right,
    accuracies,
    as_line,
    from_line,
    intervals_of,
    means,
    over_draws,
)
from tico_ssl.features.scores import average_precision, average_precisions
from tico_ssl.results.confidence import Z, paired_interval, share_interval, student, unpaired_interval
from tico_ssl.results.finished import finished
from tico_ssl.results.intervals import difference_interval, interval
from tico_ssl.results.reading import read_record
from tico_ssl.results.statistics import Spread, difference_of

# ---------------------------------------------------------------------------------------------------- shares


def test_wilsons_interval_inverts_the_score_test():
    """At both ends the share that was seen is Z standard deviations away."""
    for right, images in ((3, 10), (81, 263), (0, 20), (20, 20)):
        for end in share_interval(right, images):
            if 0 < end < 1:
                away = (right / images - end) / math.sqrt(end * (1 - end) / images)
                assert abs(away) == pytest.approx(Z, abs=1e-6)
    assert share_interval(0, 20)[0] == 0
    assert share_interval(20, 20)[1] == 1


counts = st.integers(0, 40)


@given(counts, counts, counts)
def test_the_paired_interval_holds_the_difference_and_turns_with_it(gained, lost, same):
    images = gained + lost + same + 1
    low, high = paired_interval(gained, lost, images)
    assert -1 <= low <= (gained - lost) / images <= high <= 1
    assert low < high
    assert paired_interval(lost, gained, images) == pytest.approx((-high, -low), abs=1e-9)


@given(counts, counts, counts)
def test_zero_is_outside_exactly_where_mcnemars_test_rejects(gained, lost, same):
    low, high = paired_interval(gained, lost, gained + lost + same + 1)
    score = (gained - lost) / math.sqrt(gained + lost) if gained + lost else 0.0
    assert (low > 0 or high < 0) == (abs(score) > Z)


def test_where_no_image_differs_the_interval_is_around_zero_and_shrinks():
    """Its reach is then z^2 / (n + z^2)."""
    for images in (10, 100, 10_000):
        assert paired_interval(0, 0, images) == pytest.approx((-(Z**2) / (images + Z**2), Z**2 / (images + Z**2)))


def test_more_images_of_the_same_kind_narrow_it_as_the_square_root():
    few, many = (np.diff(paired_interval(0.2 * n, 0.1 * n, n))[0] for n in (1_000, 16_000))
    assert few / many == pytest.approx(4, rel=0.01)


def test_pairing_pays_and_the_unpaired_interval_is_that_of_independent_errors():
    (paired,) = np.diff(paired_interval(60, 40, 1_000))
    (unpaired,) = np.diff(unpaired_interval(0.52, 1_000, 0.5, 1_000))
    assert unpaired / paired > 2
    wald = 2 * Z * math.sqrt(0.52 * 0.48 / 1_000 + 0.5 * 0.5 / 1_000)
    assert unpaired == pytest.approx(wald, rel=0.01)


def covered(pairs: list[tuple[float, float]], truth: float) -> float:
    return sum(low <= truth <= high for low, high in pairs) / len(pairs)


@pytest.mark.parametrize("images", [30, 300])
@pytest.mark.parametrize("cells", [(0.05, 0.02), (0.2, 0.2), (0.3, 0.05)])
def test_the_paired_interval_covers_as_often_as_it_says(images, cells):
    """Over 1,000 draws of test images; the standard error of that share is 0.7 points. Where about two images differ,
    an interval cannot be so fine, and covers more often."""
    drawn = np.random.default_rng(1).multinomial(images, [*cells, 1 - sum(cells)], 1_000)
    found = [(gained, lost) for gained, lost, _ in drawn.tolist()]
    known = {pair: paired_interval(*pair, images) for pair in found}
    share = covered([known[pair] for pair in found], cells[0] - cells[1])
    assert 0.925 <= share <= (0.985 if images * sum(cells) > 10 else 1)


def test_students_quantiles_are_those_of_scipy():
    for freedom in (*range(1, 12), 29, 30, 200, 1_000, 5_000):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3 if freedom > 1_000 else 1e-9)


def test_seeds_have_students_interval_paired_where_they_are_the_same():
    values = [50.0, 52.0, 51.5, 49.0]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert Spread.of(values).interval == pytest.approx(expected)
    assert Spread.of([50.0]).interval is None
    other = [49.0, 51.2, 50.3, 48.1]
    difference, pair = difference_of(dict(enumerate(values)), dict(enumerate(other)))
    assert pair == pytest.approx(tuple(stats.ttest_rel(values, other).confidence_interval()))
    assert difference == pytest.approx(np.mean(values) - np.mean(other))
    _, welch = difference_of(dict(enumerate(values)), dict(enumerate(other[:3], start=7)))
    exact = stats.ttest_ind(values, other[:3], equal_var=False).confidence_interval()
    assert welch[0] <= exact.low and exact.high <= welch[1]  # degrees of freedom are rounded down
    assert difference_of({0: 1.0, 1: 2.0}, {5: 1.0})[1] is None


# ---------------------------------------------------------------------------------------------------- evidence


def test_accuracies_know_their_intervals_and_plain_numbers_have_none():
    right = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.7
    found = accuracies({"top1": right}) | {"weight_decay": 0.1}
    assert found == {"top1": 100 * float(right.double().mean()), "weight_decay": 0.1}
    worse = accuracies({"top1": right & (torch.arange(400) % 10 > 0)}) | {"weight_decay": 1.0}
    intervals, differences = intervals_of({"trained": found, "untrained": worse, "pixels": {"top1": 3.0}})
    ends = share_interval(int(right.sum()), 400)
    assert intervals["trained"] == {"top1": pytest.approx([100 * end for end in ends], abs=1e-4)}
    assert list(differences) == ["untrained"]
    lost = int(right[::10].sum())
    ends = paired_interval(lost, 0, 400)
    assert differences["untrained"]["top1"] == pytest.approx([100 * end for end in ends], abs=1e-4)
    assert intervals_of({"untrained": found})[1] == {}  # nothing trained
    fewer = accuracies({"top1": right[:300]})
    assert intervals_of({"trained": found, "b": fewer})[1] == {}  # not the same images


def simulated(draws: int, images: int, seed: int, of_draw: float) -> tuple[Right, Right]:
    """Two representations: images and draws differ in how hard they are, and draws move the difference."""
    drawn = np.random.default_rng(seed)
    hard, luck = drawn.normal(0, 1, (1, images)), drawn.normal(0, of_draw, (2, draws, 1))
    noise = drawn.normal(0, 1, (2, draws, images))
    return Right(hard + luck[0] + noise[0] > 0), Right(hard + luck[1] + noise[1] > 0)


def test_the_interval_over_draws_covers_that_of_other_images_and_other_draws():
    pairs = [simulated(5, 60, seed, 0.3) for seed in range(300)]
    differences = covered([ours.difference(theirs) for ours, theirs in pairs], 0.0)
    accuracy = covered([ours.interval() for ours, _ in pairs], 50.0)
    assert 0.92 <= differences <= 0.995
    assert 0.92 <= accuracy <= 0.995


def test_draws_that_agree_are_worth_a_single_one_and_others_more():
    once = Right(np.random.default_rng(0).random((1, 500)) < 0.4)
    again = Right(np.repeat(once.values, 5, axis=0))
    apart = Right(np.random.default_rng(1).random((5, 500)) < 0.4)
    width = {name: np.diff(one.interval())[0] for name, one in (("once", once), ("again", again), ("apart", apart))}
    assert width["again"] == pytest.approx(width["once"], rel=0.01)
    assert width["apart"] < 0.8 * width["once"]
    assert all(once.difference(once)[i] * (-1) ** i < 0 for i in range(2))
    assert again.difference(again) == pytest.approx(once.difference(once))


def test_several_draws_are_put_together_with_their_deviation():
    runs = [accuracies({"top1": torch.arange(10) < number}) for number in (4, 6)]
    found = over_draws(runs)
    assert found == {"top1": 50.0, "top1_std": pytest.approx(200**0.5)}
    assert found.evidence["top1"].values.shape == (2, 10)
    assert over_draws([runs[0], {"top1": 60.0}]).evidence == {}  # of an older version, which kept none
    renamed = found.renamed(lambda name: f"{name}_x")
    assert list(renamed.evidence) == ["top1_x"]


def test_a_mean_over_classes_is_resampled_and_covers():
    """Mean average precision of scores whose class is one of three, on other test images again and again."""

    def drawn(seed: int, noise: float, images: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(seed)
        truth = np.where(draw.integers(0, 3, images)[:, None] == np.arange(3), 1, -1)
        return truth + noise * draw.standard_normal((images, 3)), truth

    def precisions(scores: np.ndarray, truth: np.ndarray) -> list[float]:
        return [average_precision(of, is_it == 1) for of, is_it in zip(scores.T, truth.T)]

    many = drawn(0, 2.0, 200_000)
    expected = 100 * float(np.mean(precisions(*many)))
    samples = [drawn(seed, 2.0, 150) for seed in range(1, 61)]
    found = [mean_precision(precisions(*one), *one) for one in samples]
    bias = np.mean([one["map"] for one in found]) - expected  # of average precision on few images
    assert 0.87 <= covered([one.evidence["map"].interval() for one in found], expected + bias) <= 1
    again = mean_precision(precisions(*samples[0]), *samples[0])
    assert again.evidence["map"].difference(found[0].evidence["map"]) == (0, 0)


def test_a_metric_that_rises_when_images_are_repeated_is_within_its_interval_and_not_at_its_end():
    """As the mutual information of classes and clusters does."""
    draw = np.random.default_rng(0)
    truth, clusters = draw.integers(0, 10, (2, 150))
    found = agreement(clusters, truth)
    low, high = found.evidence["nmi"].interval()
    assert low < found["nmi"] - 1 and found["nmi"] + 1 < high
    same = agreement(truth, truth)
    assert all(same.evidence[name].interval() == (100, 100) for name in same)


def test_average_precision_of_repeated_images_is_that_of_the_longer_list():
    draw = np.random.default_rng(0)
    for _ in range(50):
        scores, present = draw.integers(0, 6, 20).astype(float), draw.random(20) < 0.4
        often = draw.integers(0, 4, (3, 20))
        for found, each in zip(average_precisions(scores, present, often.astype(np.float32)), often):
            longer = average_precision(np.repeat(scores, each), np.repeat(present, each))
            assert found == pytest.approx(longer, nan_ok=True)


def test_means_of_values_by_image_have_the_interval_of_a_mean():
    values = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = means({"precision": values, "recall": values > 0.5})
    low, high = found.evidence["precision"].interval()
    expected = 2 * Z * 100 * float(values.std()) / math.sqrt(500)
    assert high - low == pytest.approx(expected, rel=0.1)
    assert isinstance(found.evidence["recall"], Right)
    assert found["precision"] == pytest.approx(100 * float(values.mean()))


def test_evidence_survives_a_file():
    numbers = accuracies({"top1": torch.arange(13) % 3 > 0, "top5": torch.arange(13) > 0})
    numbers = numbers | means({"map": torch.linspace(0, 1, 13, dtype=torch.float64)})
    back = from_line(json.loads(json.dumps(as_line(numbers))))
    assert back == numbers
    assert intervals_of({"trained": back}) == intervals_of({"trained": numbers})
    assert from_line({"top1": 3.0}) == {"top1": 3.0}  # of an older version
    assert as_line({"top1": 3.0}) == {"top1": 3.0}


# ---------------------------------------------------------------------------------------------------- results


@pytest.fixture(scope="module")
def results(run):
    """Two protocols on a tiny run, the second with draws."""
    return evaluate_all(run.folder, ["knn", "few-shot"], overrides={"few-shot.draws": 2, "few-shot.shots": [1]})


def test_a_result_has_intervals_around_its_numbers_and_no_vectors(results, run):
    for result in results:
        line = result.line
        assert len(json.dumps([line["intervals"], line["differences"]])) < 2_000
        for name, by_metric in line["intervals"].items():
            for metric in by_metric:
                low, high = interval(line, name, metric)
                assert low <= line["numbers"][name][metric] <= high
        for name, by_metric in line["differences"].items():
            for metric in by_metric:
                low, high = difference_interval(line, name, metric)
                assert low <= line["numbers"]["trained"][metric] - line["numbers"][name][metric] <= high
        assert {*line["differences"]} == {*line["numbers"]} - {"trained"}
    stored = [line for line in read_record(run.folder).results if line.get("differences")]
    assert [line["protocol"] for line in stored[-2:]] == ["knn", "few-shot"]
    assert stored[-1] == results[-1].line


def test_lines_without_intervals_or_with_damaged_ones_have_none():
    assert interval({"protocol": "knn", "numbers": {}}, "trained", "top1") is None
    for damaged in (None, 3, {"trained": 1}, {"trained": {"top1": [1]}}, {"trained": {"top1": [2.0, 1.0]}}):
        assert interval({"intervals": damaged}, "trained", "top1") is None
    assert difference_interval({"differences": {"b": {"top1": [math.nan, 1.0]}}}, "b", "top1") is None
    assert difference_interval({"differences": {"b": {"top1": [-1, 1.0]}}}, "b", "top1") == (-1.0, 1.0)


def test_a_finished_part_keeps_its_evidence(run):
    context = open_context(run.folder, cache=True)
    context.protocol = "few-shot"
    made = accuracies({"top1": torch.arange(7) > 2})
    first = context.part(FewShot(), "intervals", lambda place: made)
    again = context.part(FewShot(), "intervals", lambda place: pytest.fail("computed again"))
    assert intervals_of({"trained": again}) == intervals_of({"trained": first}) != ({}, {})


def test_a_result_of_an_older_version_is_taken_and_a_repeated_one_replaces_the_one_before(results, run):
    """The report shows the newest of the same protocol, settings and data."""
    result = replace(results[0], images="digest")
    older = {key: value for key, value in result.line.items() if key not in ("intervals", "differences")}
    assert finished([older], result) == replace(result, intervals={}, differences={})
    assert finished([result.line], result) == result
    record = read_record(run.folder)
    other = result.line | {"settings": {"k": 3}}
    lines = [result.line, other, result.line | {"seconds": 9.0, "data": result.data | {"against": {}}}]
    assert [line["seconds"] for line in replace(record, results=lines).newest_results] == [result.seconds, 9.0]
