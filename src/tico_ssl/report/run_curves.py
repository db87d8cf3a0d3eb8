"""The curves of a run: how it learned, how far apart its embeddings stayed, and where the time went."""

import itertools
from typing import Any

import numpy as np

from tico_ssl.report.charts import Chart, Series, over_time
from tico_ssl.report.html import Html, tag
from tico_ssl.report.page import Section, figure, paragraph
from tico_ssl.results.record import Line, Record

MOST_POINTS = 2_000  # of a curve: more than the screen has pixels is waste
MOMENTS = 10  # spectra that are drawn over one another
NO_TERMS = {"embedding_std", "mean_cosine", "participation_ratio", "largest_eigenvalue", "ema_decay", "lr"}
SCHEDULES = (
    ("lr", "Learning rate", "A warm-up, then half a cosine."),
    ("ema_decay", "Decay of the target network", "Near 1 the target hardly moves any more."),
)
SPREADS = (
    ("participation_ratio", "Participation ratio", "How many directions the covariance fills; 1 is collapse."),
    ("largest_eigenvalue", "Largest eigenvalue", "Share of all variation in one direction; above 0.5 is a warning."),
    ("mean_cosine", "Cosine of different images", "Near 0 they are apart, near 1 they are all the same."),
    ("embedding_std", "Standard deviation of each dimension", "It falls to 0 when embeddings collapse."),
)


def training(record: Record) -> Section:
    """The curves."""
    if not record.logged:
        return Section("training", "Training", [paragraph("No step has been logged yet.", class_="missing")])
    terms = loss_terms(record.logged[-1])
    charts = [
        Chart(
            "loss",
            "Loss" if len(terms) == 1 else "Loss and its terms",
            "It should fall and then level off. A loss that jumps up to the weight of the contrast means collapse.",
            [curve(record.logged, name, name) for name in terms],
            "epoch",
            "loss",
        )
    ]
    if knn := _knn_names(record):
        charts.append(
            Chart(
                "knn",
                "kNN between epochs",
                "Accuracy of votes of the nearest training images, on a part of the data: the curve to trust.",
                [curve(record.between_epochs, name, words) for name, words in knn.items()],
                "epoch",
                "per cent",
            )
        )
    charts += _small(record, SCHEDULES)
    return Section("training", "Training", [_pair(charts)], charts)


def _small(record: Record, wanted: tuple[tuple[str, str, str], ...]) -> list[Chart]:
    """A chart for each of some metrics, as far as they have been logged."""
    return [
        Chart(key.replace("_", "-"), title, caption, [curve(record.logged, key, title.lower())], "epoch", height=260)
        for key, title, caption in wanted
        if record.logged and key in record.logged[-1]
    ]


def _pair(charts: list[Chart]) -> Html:
    """Charts side by side, where the window is wide enough."""
    return tag("div", [figure(chart) for chart in charts], class_="pair")


def loss_terms(line: Line) -> list[str]:
    """The loss and, as training writes them right after it, its terms."""
    after = list(line)[list(line).index("loss") + 1 :]
    return ["loss", *itertools.takewhile(lambda name: name not in NO_TERMS, after)]


def _knn_names(record: Record) -> dict[str, str]:
    found = dict.fromkeys(key for line in record.between_epochs for key in line if key.startswith(("knn_", "linear_")))
    return {key: key.replace("knn_top1_k", "k = ").replace("linear_", "linear ") for key in found if "top5" not in key}


def curve(lines: list[Line], key: str, name: str) -> Series:
    """A metric by epoch, thinned out to what a screen can show."""
    kept = [line for line in lines if key in line]
    kept = [kept[i] for i in np.unique(np.linspace(0, len(kept) - 1, min(MOST_POINTS, len(kept))).round().astype(int))]
    return Series(name, [line.get("epoch") for line in kept], [_rounded(line[key]) for line in kept])


def _rounded(value: Any) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, int | float) else None


def covariance(record: Record) -> Section:
    """The life of the covariance, or of what is known of the spread of embeddings."""
    large, small = [_spectrum(record.spectrum)] if record.spectrum else [], _small(record, SPREADS)
    charts = [*large, *small]
    if not charts:
        text = "Nothing has been logged about the spread of embeddings."
        return Section("covariance", "Spread", [paragraph(text, class_="missing")])
    known = any(chart.key in ("spectrum", "participation-ratio") for chart in charts)
    content = [figure(chart) for chart in large]
    if known and not large:
        content = [paragraph("The run is from before spectra were kept (spectrum.jsonl).", class_="missing")]
    return Section("covariance", "Covariance" if known else "Spread", [*content, _pair(small)], charts)


def _spectrum(spectrum: list[Line]) -> Chart:
    """Some moments of a run over one another, from its first to its last."""
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
        "Shares of all variation by direction, largest first. The flatter, the more dimensions are in use; "
        "directions behind a cliff are dead.",
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
            "Waiting for images should be next to nothing; if not, pack them: tico data pack.",
            [Series("seconds", list(parts), [_rounded(value) for value in parts.values()])],
            "seconds",
            kind="bars",
            height=240,
        ),
        Chart(
            "speed",
            "Speed",
            "Images per second between two lines of the log. Dips mean that something else was at work.",
            [curve(record.logged, "images_per_second", "images/s")],
            "epoch",
            from_zero=True,
            height=240,
        ),
    ]
    return Section("time", "Time", [_pair(charts)], charts)
