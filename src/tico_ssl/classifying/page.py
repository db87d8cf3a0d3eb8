"""The page about a classifier: its accuracy, its classes, and its most confident mistakes."""

from typing import Any, NamedTuple

import numpy as np

from tico_ssl.classifying.scores import Verdicts
from tico_ssl.data.source import Source
from tico_ssl.features.thumbnails import smallest_side, thumbnails
from tico_ssl.report.atlas import image_url
from tico_ssl.report.charts import Chart
from tico_ssl.report.html import Html, tag
from tico_ssl.report.image_sections import MOST_CLASSES, common_mistakes, confusion_chart
from tico_ssl.report.page import Section, figure, page, paragraph, table
from tico_ssl.results.record import duration, split_in_words
from tico_ssl.results.table import Cell
from tico_ssl.runtime.printing import printable

SHOWN = 48  # mistakes
SIDE = 128  # of their pictures, in pixels


class Mistake(NamedTuple):
    """A test image that was named wrongly."""

    name: str
    truth: str
    named: str
    probability: float
    picture: np.ndarray
    """(side, side, 3) bytes."""


def shown_mistakes(verdicts: Verdicts, source: Source, classes: tuple[str, ...]) -> list[Mistake]:
    """The most confident mistakes, with their pictures."""
    wrong = verdicts.mistakes(SHOWN)
    places = verdicts.places[wrong]
    pictures = thumbnails(source, places, smallest_side([source], SIDE))
    truth, named = ([classes[number] for number in of[wrong].tolist()] for of in (verdicts.truth, verdicts.named))
    names = [source.names(place) for place in places.tolist()]
    probabilities = verdicts.probability[wrong].tolist()
    return [Mistake(*found) for found in zip(names, truth, named, probabilities, pictures, strict=True)]


def page_of(title: str, results: dict[str, Any], mistakes: list[Mistake]) -> str:
    """The whole page, from what results.json holds."""
    sections = [_mistakes(mistakes), *_confusions(results), _classes(results)]
    title = printable(title)
    return page(f"{title} · tico classifier", _header(title, results), sections)


def _header(title: str, results: dict[str, Any]) -> list[Html]:
    data, frequent, chosen = results["data"], results["most_frequent_class"], results["chosen"]
    facts = {
        "classes": f"{len(results['classes']):,}",
        "among the five likeliest": f"{results['top5']:.1f} %",
        "mean recall of the classes": f"{results['mean_recall']:.1f} %",
        "data": printable(str(data["source"])),
        "training images": f"{data['train']:,}",
        "test images": f"{results['images']:,} ({split_in_words(data)})",
        "unreadable test images": f"{results['unreadable']:,}",
        "trained": "head on frozen features" if results["settings"]["head"] == "linear" else "whole network",
        "chosen": ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in chosen.items()),
        "backbone": str(results["backbone"]),
        "time": duration(results["seconds"]),
    }
    accuracy = f"{results['accuracy']:.1f} % of the test images are named rightly."
    always = f"Always naming the most frequent class, {printable(frequent['class'])}: {frequent['accuracy']:.1f} %."
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    return [
        tag("p", "tico classifier", class_="kicker"),
        tag("h1", title),
        paragraph(tag("strong", accuracy), " ", always),
        tag("dl", items, class_="facts"),
    ]


def _classes(results: dict[str, Any]) -> Section:
    rows: list[list[Cell | Html | str]] = [
        [
            printable(row["class"]),
            Cell(f"{row['images']:,}", row["images"]),
            _per_cent(row["recall"]),
            Cell(f"{row['named']:,}", row["named"]),
            _per_cent(row["precision"]),
        ]
        for row in sorted(results["classes"], key=lambda row: (row["recall"] is None, row["recall"]))
    ]
    text = (
        "Recall is the share of a class's test images that get its name; precision is the share of the images with "
        "that name that are of the class. The hardest classes come first; a click on a column sorts by it."
    )
    head = ["class", "test images", "recall", "named so", "precision"]
    return Section("classes", "Classes", [paragraph(text), table(head, rows, sortable=True)])


def _per_cent(value: float | None) -> Cell:
    return Cell("none") if value is None else Cell(f"{value:.1f} %", value)


def _confusions(results: dict[str, Any]) -> list[Section]:
    if results["confusion"] is None:
        return []
    names = [printable(row["class"]) for row in results["classes"]]
    counts = np.array(results["confusion"])
    share = 100 * counts / np.maximum(counts.sum(1), 1)[:, None]
    charts: list[Chart] = [confusion_chart(names, share)] if len(names) <= MOST_CLASSES else []
    content = [figure(chart) for chart in charts]
    if rows := common_mistakes(names, share):
        text = "The most common confusions, in per cent of the test images of the class:"
        content += [paragraph(text), table(["class", "named", "share"], rows)]
    else:
        content.append(paragraph("No class is taken for another."))
    return [Section("confusions", "Confusions", content, charts)]


def _mistakes(mistakes: list[Mistake]) -> Section:
    if not mistakes:
        return Section("mistakes", "Mistakes", [paragraph("No test image is named wrongly.")])
    text = "The test images that are named wrongly with the highest probability. Some may have a wrong label."
    rows = [_mistake(mistake) for mistake in mistakes]
    gallery = tag("div", rows, class_="gallery", style="grid-template-columns:repeat(auto-fill,minmax(15rem,1fr))")
    return Section("mistakes", "Mistakes", [paragraph(text), gallery])


def _mistake(mistake: Mistake) -> Html:
    name, truth, named = (printable(text) for text in (mistake.name, mistake.truth, mistake.named))
    image = tag("img", src=image_url(mistake.picture), alt=f"{truth}, named {named}", width=88, height=88)
    words = [
        tag("div", tag("strong", named), f" {100 * mistake.probability:.1f} %"),
        tag("div", f"labelled {truth}"),
        tag("div", tag("small", name)),
    ]
    beside = tag("div", words, style="min-width:0;overflow-wrap:anywhere")
    return tag("div", image, beside, class_="row")
