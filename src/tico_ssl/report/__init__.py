"""Runs as one HTML file that opens from disk, and as figures for papers. See docs/report.md.

Runs are read by `results` and images embedded by `features`; here both are drawn:
    findings, names         the main findings in sentences; names for people
    published               published results beside ours
    charts, static, atlas   figures for the browser, for papers, and sheets of thumbnails
    html, page              the document
    headline, one_run, run_curves, image_sections, evaluation_section, several_runs   its sections
Nothing here imports torch, except to embed images for the map.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.config.yaml_text import parse_yaml
from tico_ssl.features.picture import Picture
from tico_ssl.report import headline, one_run, several_runs, static
from tico_ssl.report.page import Section, page
from tico_ssl.report.published import beside_published
from tico_ssl.results.comparison import grouped, read_comparison
from tico_ssl.results.reading import is_study, read_record, runs_among
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

    `out` is a folder: by default that of the run or study, and `report` for several runs. `data` replaces the images of
    the map and the gallery of one run; `points` is their number, 0 leaves both out.
    """
    places = [runs] if isinstance(runs, str | Path) else list(runs)
    if not places:
        raise UserError("which run? Give one or several run folders, or the folder of a study")
    places = runs_among(places)
    alone = len(places) == 1
    folder = Path(out).expanduser() if out is not None else Path(places[0]).expanduser() if alone else Path("report")
    if out is not None and folder.is_file():
        raise UserError(f"{folder} is a file: --out takes a folder")
    if out is not None and folder.suffix == ".html":
        raise UserError(f"{folder}: --out takes a folder, in which the page is report.html")
    if alone and not is_study(places[0]):
        record = read_record(places[0])
        for what in record.damage:
            say(f"warning: {record.name}: {what}")
        picture, tables = _picture(record, data, points), beside_published(grouped([record]))
        title, header = record.name, headline.header(record, picture)
        sections, thumbnails = one_run.sections(record, picture, tables)
    else:
        comparison = read_comparison(places)
        named = [Path(places[0]).expanduser().resolve().name] if alone else [g.name for g in comparison.groups[:4]]
        title = ", ".join(named)
        parts, tables = several_runs.by_data(comparison), beside_published(comparison.groups)
        header = several_runs.header(title, parts, _description(places[0]) if alone else "")
        sections, thumbnails = several_runs.sections(comparison, parts, tables), None
    return _write(folder, page(f"{title} · tico report", header, sections, thumbnails), sections)


def _write(folder: Path, text: str, sections: Sequence[Section]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    static.save([chart for section in sections for chart in section.charts], folder / "figures")
    path = folder / "report.html"
    write_atomically(path, text)
    return path


def _picture(record: Record, data: "Given | None", points: int) -> Picture | str:
    """The embedded images, or why they are not shown."""
    if points <= 0:
        return "The map and the gallery were left out (--points 0)."
    if not record.run.backbone_file.is_file():
        when = "yet" if record.checkpoint is None else "any more"
        return f"There is no backbone {when}, so no map, neighbours or classes, which need its weights."
    from tico_ssl.features.exploration import picture_of

    evaluated = [str(result.get("checkpoint")) for result in record.results]
    try:
        return picture_of(record.run.folder, data, points, GALLERIES, evaluated)
    except (UserError, OSError) as error:  # moved data must not cost the rest of the report
        if data is not None:
            raise
        say(f"without map and gallery: {error}")
        return f"No map and no gallery, since the images cannot be read: {error}. Give other images with --data."


def _description(study: str | Path) -> str:
    file = study_file(Path(study).expanduser())
    try:
        found = parse_yaml(file.read_text(encoding="utf-8", errors="replace"), str(file))
    except UserError as error:  # a damaged description must not cost the report
        say(f"warning: {error}")
        return ""
    return str(found.get("description", "")) if isinstance(found, dict) else ""
