"""What came of runs, as one HTML file that opens from disk, and as figures for papers. See docs/report.md.

Reading, with the help of what trains and judges:
    reading -> record       what a run folder says
    embedding -> picture    what a backbone makes of images
    comparison, published   several runs as a table, and the paper's numbers beside it
Drawing, without torch:
    verdict                 the run in sentences
    charts, static, atlas   figures for the browser, for papers, and thousands of thumbnails in a few files
    html, page              the document
    one_run, image_sections, several_runs   its sections
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.report import one_run, several_runs, static
from tico_ssl.report.page import Section, page
from tico_ssl.report.picture import Picture
from tico_ssl.report.record import Record
from tico_ssl.runtime.errors import UserError

if TYPE_CHECKING:
    from tico_ssl.data.sources import Given

POINTS, GALLERIES = 10_000, 60


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    data: "Given | None" = None,
    points: int = POINTS,
) -> Path:
    """Write report.html and figures/ for a run, several runs or a study; returns the path of the page.

    `out` is a folder: by default that of the run or of the study, and `report` for several runs. `data` are other
    images for the map and the gallery of one run, of which `points` are shown; with 0 there are none.
    """
    from tico_ssl.report.comparison import read_comparison
    from tico_ssl.report.published import beside_the_paper
    from tico_ssl.report.reading import is_study, read_record

    places = [runs] if isinstance(runs, str | Path) else list(runs)
    if not places:
        raise UserError("which run? Give the folder of one, of several, or of a study")
    alone = len(places) == 1
    folder = Path(out).expanduser() if out is not None else Path(places[0]).expanduser() if alone else Path("report")
    if out is not None and folder.is_file():
        raise UserError(f"{folder} is a file: --out takes a folder")
    if alone and not is_study(places[0]):
        record = read_record(places[0])
        title, header = record.name, one_run.header(record)
        sections, thumbnails = one_run.sections(record, _picture(record, data, points))
    else:
        comparison = read_comparison(places)
        named = [Path(places[0]).expanduser().resolve().name] if alone else [g.name for g in comparison.groups[:4]]
        title = ", ".join(named)
        header = several_runs.header(title, comparison, _description(places[0]) if alone else "")
        sections, thumbnails = several_runs.sections(comparison, beside_the_paper(comparison)), None
    return _write(folder, page(f"{title} · tico report", header, sections, thumbnails), sections)


def _write(folder: Path, text: str, sections: Sequence[Section]) -> Path:
    from tico_ssl.runtime.files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    static.save([chart for section in sections for chart in section.charts], folder / "figures")
    path = folder / "report.html"
    write_atomically(path, text)
    return path


def _picture(record: Record, data: "Given | None", points: int) -> Picture | str:
    """What the backbone makes of images, or why that is not shown."""
    if points <= 0:
        return "Map and gallery were left out (--points 0)."
    if not record.run.backbone_file.is_file():
        when = "yet" if record.checkpoint is None else "any more"
        return f"There is no backbone {when}, so no map, no neighbours and no classes: they are made from its weights."
    from tico_ssl.report.embedding import picture_of
    from tico_ssl.runtime.progress import say

    judged = [str(result.get("checkpoint")) for result in record.results]
    try:
        return picture_of(record.run.folder, data, points, GALLERIES, judged)
    except (UserError, OSError) as error:  # data that have been moved must not cost the rest of the report
        if data is not None:
            raise
        say(f"without map and gallery: {error}")
        return f"No map and no gallery, since the images cannot be read: {error}. Others can be given with --data."


def _description(study: str | Path) -> str:
    from tico_ssl.config.recipe import parse_yaml
    from tico_ssl.studies.state import study_file

    file = study_file(Path(study).expanduser())
    found = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    return str(found.get("description", "")) if isinstance(found, dict) else ""
