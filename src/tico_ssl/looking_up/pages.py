"""Pages to look at: what a search has found, and what is unusual in a set of images. Names are text, whatever is in
them."""

from collections.abc import Mapping, Sequence

import numpy as np

from tico_ssl.looking_up.findings import Curation, Found, Scored
from tico_ssl.report.atlas import image_url
from tico_ssl.report.charts import Chart, Series
from tico_ssl.report.html import Html, tag
from tico_ssl.report.page import Section, figure, page, paragraph
from tico_ssl.runtime.wording import counted

SIDE = 112  # pixels of a thumbnail
MOST_GROUPS, MOST_MEMBERS, MOST_TILES = 100, 12, 60
PAIR = 2  # images of a group up to which groups are side by side
BINS = 60
CLOSEST = 1e-6  # distance that is drawn for equal images


def search_page(found: Sequence[Found], queries: Sequence[np.ndarray], near: Sequence[np.ndarray]) -> str:
    """Each query with the images that were found for it."""
    sections = []
    for number, (one, query, pictures) in enumerate(zip(found, queries, near, strict=True), 1):
        tiles = [
            _tile(picture, match.path, match.name, f"{match.score:.4f}")
            for match, picture in zip(one.matches, pictures, strict=True)
        ]
        asked = tag("div", _tile(query, one.query, "", "query"), class_="tiles")
        content = [asked, tag("h3", f"The {len(tiles)} nearest"), tag("div", tiles, class_="tiles")]
        sections.append(Section(f"query-{number}", f"Query {number}", content))
    header = [
        tag("p", "tico search", class_="kicker"),
        tag("h1", "Nearest images"),
        paragraph("By cosine similarity of their features, nearest first.", class_="lead"),
    ]
    return page("Nearest images · tico search", header, sections)


def curation_page(found: Curation, pictures: Mapping[int, np.ndarray]) -> str:
    """The findings with thumbnails of the images."""
    header = [
        tag("p", "tico curate", class_="kicker"),
        tag("h1", found.data),
        paragraph(f"{counted(found.images, 'image')}. Nothing has been deleted or moved.", class_="lead"),
        _facts(found),
    ]
    sections = [_duplicates(found, pictures), _outliers(found, pictures)]
    if found.subset is not None:
        sections.append(_subset(found.subset, pictures))
    return page(f"{found.data} · tico curate", header, sections)


def shown_members(found: Curation) -> list[Scored]:
    """The images whose thumbnails are on the page."""
    alike = [member for group in found.groups[:MOST_GROUPS] for member in group[:MOST_MEMBERS]]
    return [*alike, *found.outliers[:MOST_TILES], *(found.subset or [])[:MOST_TILES]]


def curation_charts(found: Curation) -> list[Chart]:
    """How far images are from their nearest neighbours, and the threshold."""
    distances = np.log10(np.maximum(1 - np.array(found.nearest), CLOSEST))
    counts, edges = np.histogram(distances, BINS)
    x = np.repeat(edges, 2)[1:-1].tolist()
    y = np.repeat(counts, 2).astype(float).tolist()
    cut = float(np.log10(max(1 - found.threshold.cosine, CLOSEST)))
    chart = Chart(
        "nearest-neighbours",
        "Distance to the nearest neighbour",
        f"Images by 1 - cosine to their nearest neighbour. Left of the dashed line, at a cosine of "
        f"{found.threshold.cosine:.6f}, are near-duplicates.",
        [Series("images", x, y), Series("threshold", [cut, cut], [0.0, float(counts.max())], dashed=True)],
        "logarithm (base 10) of 1 - cosine",
        "images",
        from_zero=True,
    )
    return [chart]


def _facts(found: Curation) -> Html:
    values = {
        "Images in groups of near-duplicates": f"{found.copies:,} in {len(found.groups):,}",
        "Groups in more than one split": f"{found.across_splits:,}",
        "Groups in more than one class": f"{found.across_classes:,}",
        "Outliers": f"{found.unusual:,}",
    }
    if found.subset is not None:
        values["Diverse subset"] = f"{len(found.subset):,}"
    return tag("dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in values.items()], class_="facts")


def _duplicates(found: Curation, pictures: Mapping[int, np.ndarray]) -> Section:
    charts = curation_charts(found)
    text = f"Images with a cosine of {found.threshold.cosine:.6f} or more are in one group ({found.threshold.rule}); "
    text += "with each is its cosine to its nearest image. "
    shown = min(MOST_GROUPS, len(found.groups))
    text += f"The first {shown} of {counted(len(found.groups), 'group')}" if shown < len(found.groups) else "All groups"
    text += ", most alike first; all of them are in duplicates.csv."
    groups = [_group(number, group, pictures) for number, group in enumerate(found.groups[:MOST_GROUPS], 1)]
    nothing = [paragraph("There are none.", class_="missing")]
    shown_groups = [tag("div", groups, class_="groups")] if groups else nothing
    return Section("duplicates", "Near-duplicates", [figure(charts[0]), paragraph(text), *shown_groups], charts)


def _group(number: int, group: list[Scored], pictures: Mapping[int, np.ndarray]) -> Html:
    title = f"{number}: {counted(len(group), 'image')}"
    if len(group) > MOST_MEMBERS:
        title += f", of which {MOST_MEMBERS} are shown"
    for what, values in (("splits", {m.split for m in group}), ("classes", {m.name for m in group})):
        if len(values) > 1:
            title += f", {len(values)} {what}"
    tiles = [_member(member, pictures, digits=6) for member in group[:MOST_MEMBERS]]
    wide = "wide" if len(tiles) > PAIR else None
    return tag("div", tag("h3", title), tag("div", tiles, class_="tiles"), class_=wide)


def _outliers(found: Curation, pictures: Mapping[int, np.ndarray]) -> Section:
    text = (
        f"The score is the mean distance (1 - cosine) to the {found.neighbours} nearest images. {found.unusual:,} "
        "are outliers: the logarithm of their score is above the upper quartile by more than 1.5 times the distance of "
        f"the quartiles. The first {min(MOST_TILES, found.images)} are shown; the scores of all are in outliers.csv."
    )
    tiles = [_member(member, pictures) for member in found.outliers[:MOST_TILES]]
    return Section("outliers", "Outliers", [paragraph(text), tag("div", tiles, class_="tiles")])


def _subset(chosen: list[Scored], pictures: Mapping[int, np.ndarray]) -> Section:
    text = (
        "From the image that is nearest to all others on, each is the one that is furthest from those before it "
        f"(k-centre greedy); with each is that distance. The first {min(MOST_TILES, len(chosen))} of {len(chosen):,}; "
        "all are in subset.csv."
    )
    tiles = [_member(member, pictures) for member in chosen[:MOST_TILES]]
    return Section("subset", "Diverse subset", [paragraph(text), tag("div", tiles, class_="tiles")])


def _member(member: Scored, pictures: Mapping[int, np.ndarray], digits: int = 4) -> Html:
    return _tile(pictures[member.place], member.path, member.name, f"{member.score:.{digits}f}")


def _tile(picture: np.ndarray, path: str, name: str, note: str) -> Html:
    image = tag("img", src=image_url(picture), alt=path, width=SIDE, height=SIDE, loading="lazy")
    caption = tag("figcaption", tag("strong", note), path, f" ({name})" if name and name not in path else "")
    return tag("figure", image, caption)
