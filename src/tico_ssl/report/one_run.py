"""The report of one run, section by section."""

import shlex
from collections.abc import Sequence

import numpy as np
import yaml

from tico_ssl.data.opening import open_picture
from tico_ssl.features.picture import Picture
from tico_ssl.report.atlas import image_url
from tico_ssl.report.evaluation_section import Rows, evaluations
from tico_ssl.report.html import Html, tag
from tico_ssl.report.image_sections import classes, gallery, map_section
from tico_ssl.report.page import Section, Thumbnails, bulleted, command, folded, paragraph, table
from tico_ssl.report.published import PublishedTable, published_sections
from tico_ssl.report.run_curves import covariance, time_section, training
from tico_ssl.results.record import Record
from tico_ssl.runtime.wording import counted

PITCH, GAP = 132, 4  # pixels from one image of a contact sheet to the next, and of the space between them


def sections(
    record: Record, picture: Picture | str, tables: Sequence[PublishedTable] = ()
) -> tuple[list[Section], Thumbnails | None]:
    """All sections. `picture` are the embedded images, or why there are none; `tables` are published ones with results
    of this run."""
    found = [training(record), covariance(record), views(record)]
    thumbnails = None
    if isinstance(picture, str):
        found.append(Section("images", "Images", [paragraph(picture, class_="missing")]))
    else:
        mapped, thumbnails = map_section(picture)
        found += [mapped, gallery(picture), classes(picture)]
    found += [evaluations(record), *published_sections(tables)]
    found += [time_section(record), recipe_section(record), trouble(record)]
    return found, thumbnails


def views(record: Record) -> Section:
    """The contact sheet."""
    sheet = record.run.views_file
    if not sheet.is_file():
        return Section("views", "Views", [paragraph("The run has no contact sheet (views.png).", class_="missing")])
    text = "Top row: images of the first batch. Below: their augmented views. The images should still be recognisable."
    try:
        pixels = np.asarray(open_picture(sheet).convert("RGB"))
    except Exception as error:  # decoders fail in many ways
        return Section("views", "Views", [paragraph(f"The contact sheet cannot be read: {error}.", class_="missing")])
    halves = [tag("img", src=image_url(half), alt="Contact sheet: originals and views") for half in _halves(pixels)]
    return Section("views", "Views", [tag("figure", tag("figcaption", text), tag("div", halves), class_="sheet")])


def _halves(sheet: np.ndarray) -> list[np.ndarray]:
    """The left and the right half of the columns, one below the other on a phone; whole if there are few."""
    columns = (sheet.shape[1] + GAP) // PITCH
    middle = -(-columns // 2) * PITCH
    return [sheet] if columns < 2 else [sheet[:, : middle - GAP], sheet[:, middle:]]


def recipe_section(record: Record) -> Section:
    """The recipe and the environment."""
    recipe = yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True)
    known = {key: value for key, value in record.environment.items() if key != "packages"}
    known |= record.environment.get("packages") or {}
    rows: Rows = [[str(key), str(value)] for key, value in known.items()]
    content = [
        paragraph(
            "The recipe can be run again: ", command(f"tico pretrain {shlex.quote(str(record.run.recipe_file))}")
        ),
        folded("Recipe", tag("pre", recipe, tabindex=0)),
        folded("Environment", table(["what", "value"], rows)),
    ]
    return Section("recipe", "Recipe", content)


def trouble(record: Record) -> Section:
    """Warnings and unreadable files."""
    content: list[Html] = []
    if said := [*record.damage, *record.warnings]:
        content.append(bulleted(said))
    if record.bad_files:
        shown = record.bad_files[:200]
        rows: Rows = [[str(b.get("file", "?")), str(b.get("reason", "?"))] for b in shown]
        more = "" if len(shown) == len(record.bad_files) else f" (the first {len(shown)})"
        content.append(
            folded(f"{counted(len(record.bad_files), 'file')} could not be read{more}", table(["file", "reason"], rows))
        )
    if not content:
        content.append(paragraph("No warnings, no bad files."))
    return Section("warnings", "Warnings", content)
