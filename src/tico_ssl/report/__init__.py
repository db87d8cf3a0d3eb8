"""What came of runs, as one HTML file that opens from disk, and as figures for papers. See docs/report.md.

What a run says is read in `results`, what its backbone makes of images in `features`; here it is drawn:
    findings                the run in sentences
    published               the paper's numbers beside ours
    charts, static, atlas   figures for the browser, for papers, and thousands of thumbnails in a few files
    html, page              the document
    one_run, run_curves, image_sections, several_runs   its sections
Nothing here imports torch, except to embed images where a map of them is asked for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.config.recipe import parse_yaml
from tico_ssl.features.picture import Picture
from tico_ssl.report import one_run, several_runs, static
from tico_ssl.report.page import Section, page
from tico_ssl.report.published import beside_the_paper
from tico_ssl.results.comparison import read_comparison
from tico_ssl.results.reading import is_study, read_record
from tico_ssl.results.record import Record
from tico_ssl.results.study_state import study_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.progress import say

if TYPE_CHECKING:
    from tico_ssl.data.given import Given

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
    from tico_ssl.features.exploration import picture_of

    evaluated = [str(result.get("checkpoint")) for result in record.results]
    try:
        return picture_of(record.run.folder, data, points, GALLERIES, evaluated)
    except (UserError, OSError) as error:  # data that have been moved must not cost the rest of the report
        if data is not None:
            raise
        say(f"without map and gallery: {error}")
        return f"No map and no gallery, since the images cannot be read: {error}. Others can be given with --data."


def _description(study: str | Path) -> str:
    file = study_file(Path(study).expanduser())
    found = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    return str(found.get("description", "")) if isinstance(found, dict) else ""
