"""Tables, figure and page of a curation, in a folder."""

from pathlib import Path

from tico_ssl.looking_up.findings import Curation, Scored
from tico_ssl.looking_up.index import Index
from tico_ssl.looking_up.pages import SIDE, curation_charts, curation_page, shown_members
from tico_ssl.looking_up.tables import write_csv
from tico_ssl.report import static
from tico_ssl.runtime.files import write_atomically

COMMON = ["path", "split", "class"]


def write(folder: Path, found: Curation, index: Index) -> None:
    """duplicates.csv, outliers.csv, subset.csv if one was asked for (else that of an earlier call is removed),
    curate.html and figures/."""
    folder.mkdir(parents=True, exist_ok=True)
    members = [
        (number, position, *_common(member), member.score)
        for number, group in enumerate(found.groups, 1)
        for position, member in enumerate(group, 1)
    ]
    write_csv(folder / "duplicates.csv", ["group", "member", *COMMON, "nearest_cosine"], members)
    unusual = [
        (rank, *_common(member), member.score, "yes" if rank <= found.unusual else "no")
        for rank, member in enumerate(found.outliers, 1)
    ]
    write_csv(folder / "outliers.csv", ["rank", *COMMON, "mean_distance", "outlier"], unusual)
    if found.subset is None:
        (folder / "subset.csv").unlink(missing_ok=True)
    else:
        chosen = [(rank, *_common(member), member.score) for rank, member in enumerate(found.subset, 1)]
        write_csv(folder / "subset.csv", ["rank", *COMMON, "distance_when_chosen"], chosen)
    static.save(curation_charts(found), folder / "figures")
    places = [*dict.fromkeys(member.place for member in shown_members(found))]
    pictures = dict(zip(places, index.album.thumbnails(places, SIDE), strict=True))
    write_atomically(folder / "curate.html", curation_page(found, pictures))


def _common(member: Scored) -> tuple[str, str, str]:
    return member.path, member.split, member.name
