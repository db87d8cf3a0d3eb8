"""The sections of a report that show images: the map, the nearest neighbours, and the classes."""

import numpy as np

from tico_ssl.features.picture import NEIGHBOURS, VOTERS, Images, Picture
from tico_ssl.report.atlas import build_atlas, image_url
from tico_ssl.report.charts import Chart, Series
from tico_ssl.report.html import Html, tag
from tico_ssl.report.page import Section, Thumbnails, figure, folded, paragraph, table
from tico_ssl.results.table import Cell

MOST_CLASSES = 50  # in a confusion matrix; with more, the table of mistakes is clearer
MOST_BARS = 40  # classes whose accuracy is drawn
SHORT_GALLERY = 12  # rows shown at first, as in the style sheet


def map_section(picture: Picture) -> tuple[Section, Thumbnails]:
    """A map of the embedding with the image on hover."""
    labels = picture.points.labels if picture.clusters is None else picture.clusters
    assert labels is not None
    names = picture.classes if picture.clusters is None else [f"cluster {i + 1}" for i in range(int(labels.max()) + 1)]
    series = []
    for number, name in enumerate(names):
        places = np.flatnonzero(labels == number)
        if len(places):
            x, y = (picture.positions[places, axis].round(2).tolist() for axis in (0, 1))
            series.append(Series(name, x, y, places=places.tolist(), rank=number))
    colours = "class" if picture.clusters is None else "cluster (k-means)"
    if picture.clusters is not None and picture.classes:
        colours += f", since {len(picture.classes):,} classes are too many for colours"
    chart = Chart(
        "map",
        "Map of the embedding",
        f"{picture.how}; coloured by {colours}. Images with similar features lie close together. Point at one to "
        "see it, or move between images with the arrow keys.",
        series,
        kind="points",
        height=620,
    )
    shown = [names[label] for label in labels]
    known = picture.points.labels
    notes = shown if known is None else [picture.classes[label] for label in known]
    thumbnails = Thumbnails(build_atlas(picture.points.thumbnails), picture.points.names, notes)
    hint = tag("div", tag("canvas", width=96, height=96), tag("p", ""), tag("p", ""), class_="card", hidden=True)
    return Section("embedding", "Embedding", [figure(chart, hint)], [chart]), thumbnails


def gallery(picture: Picture) -> Section:
    """Test images with their nearest training images."""
    per = len(picture.similarity[0]) if len(picture.similarity) else NEIGHBOURS
    rows = [
        _gallery_row(picture, number, slice(number * per, (number + 1) * per))
        for number in range(len(picture.queries.names))
    ]
    text = f"Test images (left) and the {per} training images nearest to them by cosine similarity."
    controls = Html("")
    if picture.classes:
        text += " Neighbours of another class are marked ×. Queries are a random sample, class by class."
        options = [tag("option", "all classes", value="")]
        options += [tag("option", name, value=i) for i, name in enumerate(picture.classes)]
        controls = tag(
            "p",
            tag("label", "Show ", tag("select", options, id="gallery-class")),
            tag("label", tag("input", type="checkbox", id="gallery-wrong"), " only queries with a wrong neighbour"),
            class_="controls",
        )
    more = tag("button", f"Show all {len(rows)}", type="button", class_="more", id="gallery-all")
    content = [paragraph(text), controls, tag("div", rows, class_="gallery short"), more]
    return Section("neighbours", "Neighbours", content[: 4 if len(rows) > SHORT_GALLERY else 3])


def _gallery_row(picture: Picture, number: int, at: slice) -> Html:
    label = None if picture.queries.labels is None else int(picture.queries.labels[number])
    near = [_neighbour(picture, place, label, number) for place in range(at.start, at.stop)]
    wrong = label is not None and any(int(other) != label for other in _labels(picture.neighbours, at))
    title = picture.classes[label] if label is not None else picture.queries.names[number]
    image = _image(picture.queries, number, f"Query: {title}")
    return tag(
        "div",
        tag("figure", image, tag("figcaption", title), class_="query"),
        tag("div", near, class_="near"),
        class_="row",
        data_class=label,
        data_wrong=wrong or None,
    )


def _labels(images: Images, at: slice) -> list[int]:
    return [] if images.labels is None else images.labels[at].tolist()


def _neighbour(picture: Picture, place: int, label: int | None, number: int) -> Html:
    images = picture.neighbours
    cosine = picture.similarity[number, place % len(picture.similarity[number])]
    other = None if images.labels is None else int(images.labels[place])
    words = images.names[place] if other is None else picture.classes[other]
    state = None if label is None else "right" if other == label else "wrong"
    mark = {"right": ", the same class", "wrong": ", another class"}.get(state or "", "")
    image = _image(images, place, f"{words}{mark}, cosine {cosine:.2f}")
    return tag("span", image, class_=state, title=f"{words} · cosine {cosine:.2f}")


def _image(images: Images, place: int, alt: str) -> Html:
    return tag("img", src=image_url(images.thumbnails[place]), alt=alt, width=72, height=72)


def classes(picture: Picture) -> Section:
    """Accuracy per class, and the confusion matrix."""
    if picture.confusion is None:
        text = "Class accuracy needs one class per image, for example from class folders."
        return Section("classes", "Classes", [paragraph(text, class_="missing")])
    share = 100 * picture.confusion / np.maximum(picture.confusion.sum(1), 1)[:, None]
    charts = [_class_accuracy(picture.classes, picture.confusion, share)]
    if len(picture.classes) <= MOST_CLASSES:
        charts.append(confusion_chart(picture.classes, share))
    content = [figure(chart) for chart in charts]
    if rows := common_mistakes(picture.classes, share):
        content.append(folded("The ten most common mistakes", table(["class", "predicted as", "share"], rows)))
    return Section("classes", "Classes", content, charts)


def _class_accuracy(names: list[str], confusion: np.ndarray, share: np.ndarray) -> Chart:
    """Accuracy of the classes with test images, the hardest first."""
    counts, right = confusion.sum(1), np.diag(share)
    seen = np.flatnonzero(counts)
    order = seen[np.argsort(right[seen], kind="stable")][:MOST_BARS]
    total = 100 * np.trace(confusion) / max(1, counts.sum())
    vote = f"kNN with k = {VOTERS} on {int(counts.sum()):,} test images: {total:.1f} % accuracy."
    first = "Hardest classes first." if len(order) == len(seen) else f"The {len(order)} hardest of {len(seen):,}."
    return Chart(
        "class-accuracy",
        "Accuracy per class",
        f"{vote} {first}",
        [Series("accuracy", [names[i] for i in order], right[order].round(1).tolist())],
        "per cent",
        kind="bars",
        height=max(240, 60 + 22 * len(order)),
    )


def confusion_chart(names: list[str], share: np.ndarray) -> Chart:
    """The confusion matrix, in per cent of every true class."""
    return Chart(
        "confusion",
        "Confusion matrix",
        "Per cent of the images of each true class (row) by predicted class (column).",
        [],
        "predicted class",
        "true class",
        kind="heat",
        cells=share.round(1).tolist(),
        names=names,
        height=560,
    )


def common_mistakes(names: list[str], share: np.ndarray) -> list[list[Cell | Html | str]]:
    """The ten pairs of classes with the largest share of confusions."""
    wrong = share * (1 - np.eye(len(share)))
    pairs = [(int(i), int(j)) for i, j in zip(*np.nonzero(wrong))]
    worst = sorted(pairs, key=lambda pair: -wrong[pair])[:10]
    return [[names[i], names[j], Cell(f"{wrong[i, j]:.1f} %", float(wrong[i, j]))] for i, j in worst]
