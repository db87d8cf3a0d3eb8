"""The sections of a report that show images: the map, the nearest neighbours, and the classes."""

from typing import NamedTuple

import numpy as np

from tico_ssl.features.picture import MOST_COLOURS, NEIGHBOURS, VOTERS, Images, Picture
from tico_ssl.report.atlas import build_atlas, image_url
from tico_ssl.report.charts import HUES, OTHER, Chart, Series
from tico_ssl.report.html import Html, tag
from tico_ssl.report.page import Section, Thumbnails, figure, folded, paragraph, table
from tico_ssl.results.table import Cell
from tico_ssl.runtime.wording import counted

MOST_CLASSES, CONFUSED_CLASSES = 50, 25  # in a confusion matrix; of more, those that are confused most
MOST_BARS = 40  # classes whose accuracy is drawn
SHORT_GALLERY = 12  # rows shown at first, as in the style sheet


def map_section(picture: Picture) -> tuple[Section, Thumbnails]:
    """A map of the embedding with the image on hover."""
    groups, colours = _groups(picture)
    series: list[Series] = []
    for group in groups:
        x, y = (picture.positions[group.places, axis].round(2).tolist() for axis in (0, 1))
        rank = sum(one.colour is None for one in series)  # a group that has its colour takes none of the palette
        series.append(Series(group.name, x, y, group.colour, places=group.places.tolist(), rank=rank))
    chart = Chart(
        "map",
        "Map of the embedding",
        f"{picture.how}; coloured by {colours}. Images with similar features lie close together. Point at one to "
        "see it, or move between images with the arrow keys; point at a name below to see where its images are.",
        series,
        kind="points",
        height=620,
    )
    known, notes = picture.points.labels, [""] * len(picture.positions)
    for group in groups:
        for place in group.places.tolist():
            notes[place] = group.name if known is None else picture.classes[known[place]]
    thumbnails = Thumbnails(build_atlas(picture.points.thumbnails), picture.points.names, notes)
    hint = tag("div", tag("canvas", width=96, height=96), tag("p", ""), tag("p", ""), class_="card", hidden=True)
    return Section("embedding", "Embedding", [figure(chart, hint)], [chart]), thumbnails


class Group(NamedTuple):
    """Points of a map with one colour and shape: a class, a cluster, or all that have none of their own."""

    name: str
    places: np.ndarray
    colour: str | None = None


def _groups(picture: Picture) -> tuple[list[Group], str]:
    """The groups of a map, and what they are: classes, of many the most frequent; clusters where there are none."""
    if picture.points.labels is None:
        assert picture.clusters is not None
        count = int(picture.clusters.max()) + 1
        return _named(picture.clusters, [f"cluster {i + 1}" for i in range(count)]), "cluster (k-means)"
    groups = _named(picture.points.labels, picture.classes)
    if len(groups) <= MOST_COLOURS:
        return groups, "class"
    frequent = sorted(groups, key=lambda group: -len(group.places))[: len(HUES)]
    names = {group.name for group in frequent}
    rest = [group for group in groups if group.name not in names]
    others = Group(counted(len(rest), "other class"), np.sort(np.concatenate([group.places for group in rest])), OTHER)
    shown = [group for group in groups if group.name in names]
    return [others, *shown], f"class, the {len(shown)} most frequent of {len(groups):,}"


def _named(labels: np.ndarray, names: list[str]) -> list[Group]:
    found = [Group(name, np.flatnonzero(labels == number)) for number, name in enumerate(names)]
    return [group for group in found if len(group.places)]


def gallery(picture: Picture) -> Section:
    """Test images with their nearest training images."""
    per = _per_query(picture)
    rows = [gallery_row(picture, number) for number in range(len(picture.queries.names))]
    text = f"Test images (left) and the {counted(per, 'training image')} nearest to them by cosine similarity."
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


def _per_query(picture: Picture) -> int:
    return len(picture.similarity[0]) if len(picture.similarity) else NEIGHBOURS


def gallery_row(picture: Picture, number: int) -> Html:
    """A test image and its neighbours."""
    per = _per_query(picture)
    at = slice(number * per, (number + 1) * per)
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
    charts = [_class_accuracy(picture.classes, picture.confusion, share), confusion_chart(picture.classes, share)]
    content = [figure(chart) for chart in charts]
    if rows := common_mistakes(picture.classes, share):
        content.append(folded("The ten most common mistakes", table(["class", "predicted as", "share"], rows)))
    return Section("classes", "Classes", content, charts)


def _class_accuracy(names: list[str], confusion: np.ndarray, share: np.ndarray) -> Chart:
    """Accuracy of the classes with test images, the hardest first."""
    counts, right = confusion.sum(1), np.diag(share)
    seen = np.flatnonzero(counts)
    order = seen[np.argsort(right[seen], kind="stable")]
    if many := len(seen) > MOST_BARS:
        order = np.concatenate([order[: MOST_BARS // 2], order[-MOST_BARS // 2 :]])
    total = 100 * np.trace(confusion) / max(1, counts.sum())
    vote = f"kNN with k = {VOTERS} on {counted(int(counts.sum()), 'test image')}: {total:.1f} % accuracy."
    some = f"The {MOST_BARS // 2} hardest and the {MOST_BARS // 2} easiest of {counted(len(seen), 'class')}."
    first = some if many else "Hardest classes first."
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
    """The confusion matrix, in per cent of every true class; of many classes, those that are confused most."""
    text = "Per cent of the images of each true class (row) by predicted class (column)."
    if len(names) > MOST_CLASSES:
        shown = most_confused(share, CONFUSED_CLASSES)
        text = f"The {counted(len(shown), 'class')} of {len(names):,} that are confused most with each other. {text}"
        names, share = [names[place] for place in shown], share[np.ix_(shown, shown)]
    return Chart(
        "confusion",
        "Confusion matrix",
        text,
        [],
        "predicted class",
        "true class",
        kind="heat",
        cells=share.round(1).tolist(),
        names=names,
        height=min(680, 300 + 16 * len(names)),
    )


def most_confused(share: np.ndarray, count: int) -> list[int]:
    """The classes of the largest shares of confusions, in their order; the rest are the first classes."""
    wrong = share * (1 - np.eye(len(share)))
    worst = np.argsort(-wrong, axis=None, kind="stable")[: count**2]  # so many pairs have enough classes
    pairs = np.dstack(np.unravel_index(worst, wrong.shape))[0]
    found = dict.fromkeys(int(place) for pair in pairs if wrong[tuple(pair)] > 0 for place in pair)
    return sorted([*dict.fromkeys([*found, *range(len(share))])][:count])


def common_mistakes(names: list[str], share: np.ndarray) -> list[list[Cell | Html | str]]:
    """The ten pairs of classes with the largest share of confusions."""
    wrong = share * (1 - np.eye(len(share)))
    pairs = [(int(i), int(j)) for i, j in zip(*np.nonzero(wrong))]
    worst = sorted(pairs, key=lambda pair: -wrong[pair])[:10]
    return [[names[i], names[j], Cell(f"{wrong[i, j]:.1f} %", float(wrong[i, j]))] for i, j in worst]
