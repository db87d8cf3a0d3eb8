"""The curves of a run: loss, accuracy, spread of the embeddings, and where the time went."""

import itertools
from typing import Any, Literal

import numpy as np

from tico_ssl.report.charts import Chart, Series, over_time
from tico_ssl.report.findings import WAITING
from tico_ssl.report.html import Html, tag
from tico_ssl.report.names import elsewhere
from tico_ssl.report.page import Section, figure, paragraph
from tico_ssl.results.record import KNN, Line, Record
from tico_ssl.results.verdict import POINTS

MOST_POINTS = 2_000  # of a curve: a screen shows no more
MOMENTS = 10  # spectra in one figure
NO_TERMS = {"embedding_std", "mean_cosine", "participation_ratio", "largest_eigenvalue", "ema_decay", "lr", "fixed_lr"}
ENDS = 0.1  # of a curve, over which its first and last values are averaged
SCHEDULES = (
    ("lr", "Learning rate", "By the recipe's schedule."),
    ("ema_decay", "EMA decay of the target network", "Near 1 the target hardly changes."),
)
SPREADS = (
    ("participation_ratio", "Participation ratio", "Effective number of dimensions of the covariance; 1 is collapse."),
    ("largest_eigenvalue", "Largest eigenvalue", "As a share of the sum of all; above 0.5 is a sign of collapse."),
    ("mean_cosine", "Cosine similarity of different images", "The mean; near 0 they are spread out, near 1 collapsed."),
    ("embedding_std", "Standard deviation per dimension", "Falls to 0 when embeddings collapse."),
)


def training(record: Record) -> Section:
    """Loss, accuracy and schedules."""
    if not record.logged:
        return Section("training", "Training", [paragraph("No step has been logged yet.", class_="missing")])
    terms = loss_terms(record.logged[-1])
    alone, beside = (
        "Should fall and then level off.",
        "The loss should fall and then level off; one of its terms may rise.",
    )
    caption = alone if len(terms) == 1 else beside
    charts = [
        Chart(
            "loss",
            "Loss" if len(terms) == 1 else "Loss and its terms",
            caption + (" A contrast near rho means collapse." if "contrast" in terms else ""),
            [curve(record.logged, name, name) for name in terms],
            "epoch",
            "loss",
            flag=moved([line["loss"] for line in record.logged], "rose"),
        )
    ]
    charts += [*_accuracy(record), *_small(record, SCHEDULES)]
    return Section("training", "Training", [_pair(charts)], charts)


def _accuracy(record: Record) -> list[Chart]:
    """kNN during training, beside the untrained network."""
    if not (knn := _knn_names(record)):
        return []
    lines = [curve(record.between_epochs, name, words) for name, words in knn.items()]
    caption = "On some of the images. The most reliable sign of progress."
    epochs = [epoch for line in lines for epoch in line.x if epoch is not None]
    if (untrained := _untrained(record)) is not None and epochs:
        x = [0, max(epochs)]
        lines.append(Series("untrained, k = 20", x, [_rounded(untrained)] * 2, "#8a8f98", dashed=True))
        caption += " Dashed: the untrained network, as evaluated on all images."
    flag = moved([value for _, value in record.knn_on_the_way], "fell", POINTS)
    return [Chart("knn", "kNN accuracy during training", caption, lines, "epoch", "per cent", flag=flag)]


def _untrained(record: Record) -> float | None:
    """kNN accuracy of the untrained network, where it has been evaluated on the data of the run."""
    result = record.current_results.get("knn", {})
    value: float | None = result.get("numbers", {}).get("untrained", {}).get(KNN.removeprefix("knn_"))
    return None if elsewhere(record, result) else value


def moved(values: list[float], word: Literal["rose", "fell"], least: float = 0.0) -> str:
    """Says so if a curve that should not rise, or not fall, did by more than `least`, from its first tenth to its
    last."""
    few = max(1, int(ENDS * len(values)))
    if len(values) < 2:
        return ""
    first, last = float(np.mean(values[:few])), float(np.mean(values[-few:]))
    did = last - first > least if word == "rose" else first - last > least
    return f"Here it {word}, from {first:.3g} to {last:.3g}." if did else ""


def _small(record: Record, wanted: tuple[tuple[str, str, str], ...]) -> list[Chart]:
    """A chart for each logged metric among some."""
    return [
        Chart(key.replace("_", "-"), title, caption, [curve(record.logged, key, title.lower())], "epoch", height=260)
        for key, title, caption in wanted
        if record.logged and key in record.logged[-1]
    ]


def _pair(charts: list[Chart]) -> Html:
    """Charts side by side in a wide window."""
    return tag("div", [figure(chart) for chart in charts], class_="pair")


def loss_terms(line: Line) -> list[str]:
    """The loss and its terms, which training writes right after it."""
    after = list(line)[list(line).index("loss") + 1 :]
    return ["loss", *itertools.takewhile(lambda name: name not in NO_TERMS, after)]


def _knn_names(record: Record) -> dict[str, str]:
    found = dict.fromkeys(key for line in record.between_epochs for key in line if key.startswith(("knn_", "linear_")))
    return {key: key.replace("knn_top1_k", "k = ").replace("linear_", "linear ") for key in found if "top5" not in key}


def curve(lines: list[Line], key: str, name: str) -> Series:
    """A metric by epoch, thinned out for the screen."""
    kept = [line for line in lines if key in line]
    kept = [kept[i] for i in np.unique(np.linspace(0, len(kept) - 1, min(MOST_POINTS, len(kept))).round().astype(int))]
    return Series(name, [line.get("epoch") for line in kept], [_rounded(line[key]) for line in kept])


def _rounded(value: Any) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, int | float) else None


def covariance(record: Record) -> Section:
    """Development of the covariance, or of the spread of embeddings."""
    large, small = [_spectrum(record.spectrum)] if record.spectrum else [], _small(record, SPREADS)
    charts = [*large, *small]
    if not charts:
        text = "Nothing has been logged about the spread of embeddings."
        return Section("covariance", "Spread", [paragraph(text, class_="missing")])
    known = any(chart.key in ("spectrum", "participation-ratio") for chart in charts)
    content = [figure(chart) for chart in large]
    if known and not large:
        content = [paragraph("The run has no spectra (spectrum.jsonl): it is of an older version.", class_="missing")]
    return Section("covariance", "Covariance" if known else "Spread", [*content, _pair(small)], charts)


def _spectrum(spectrum: list[Line]) -> Chart:
    """Spectra of several epochs, from the first to the last."""
    places = np.unique(np.linspace(0, len(spectrum) - 1, MOMENTS).round().astype(int))
    moments = [spectrum[place] for place in places]
    dim = moments[-1]["ranks"][-1]
    series = [
        Series(
            f"epoch {line['epoch']:g}",
            line["ranks"],
            [max(value, 1e-9) for value in line["shares"]],  # the axis is logarithmic
            over_time(number / max(1, len(moments) - 1)),
        )
        for number, line in enumerate(moments)
    ]
    series.append(Series("even spread", [1, dim], [1 / dim, 1 / dim], "#8a8f98", dashed=True))
    return Chart(
        "spectrum",
        "Spectrum of the covariance over time",
        "Eigenvalues as shares of their sum, largest first. The flatter, the more dimensions are in use; "
        "a steep drop means that the dimensions after it are unused.",
        series,
        "rank of the eigenvalue",
        "share",
        log_x=True,
        log_y=True,
        height=420,
    )


def time_section(record: Record) -> Section:
    """Where the time went."""
    if not record.logged:
        return Section("time", "Time", [paragraph("No step has been logged yet.", class_="missing")])
    steps, waiting = record.training_seconds, record.waiting_seconds
    evaluating = sum(float(result.get("seconds", 0)) for result in record.results)
    parts = {
        "training steps": steps - waiting,
        "waiting for images": waiting,
        "kNN, checkpoints, start": max(0.0, record.seconds - steps),
        "evaluations afterwards": evaluating,
    }
    charts = [
        Chart(
            "time",
            "Where the time went",
            "Waiting for images should be close to zero; if not, pack them: tico data pack.",
            [Series("seconds", list(parts), [_rounded(value) for value in parts.values()])],
            "seconds",
            kind="bars",
            height=240,
            flag=f"Here it is {waiting / steps:.0%}." if waiting > WAITING * steps else "",
        ),
        Chart(
            "speed",
            "Speed",
            "Images per second between log lines. Dips mean that the machine was busy otherwise.",
            [curve(record.logged, "images_per_second", "images/s")],
            "epoch",
            from_zero=True,
            height=240,
        ),
    ]
    return Section("time", "Time", [_pair(charts)], charts)
