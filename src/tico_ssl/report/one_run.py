"""The report of one run, section by section."""

from collections.abc import Sequence

import yaml

from tico_ssl.config import catalogue
from tico_ssl.features.picture import Picture
from tico_ssl.report.atlas import data_url
from tico_ssl.report.findings import findings
from tico_ssl.report.html import Html, tag
from tico_ssl.report.image_sections import classes, gallery, map_section
from tico_ssl.report.page import Section, Thumbnails, bulleted, command, folded, paragraph, table
from tico_ssl.report.published import PublishedTable, published_section
from tico_ssl.report.run_curves import covariance, time_section, training
from tico_ssl.results.metrics import USUAL, measurements
from tico_ssl.results.record import Line, Record, duration
from tico_ssl.results.table import Cell
from tico_ssl.runtime.fallbacks import sentence

Rows = list[list[Cell | Html | str]]
DATA_WORDS = {"source": "data", "train": "training images", "test": "test images"}


def header(record: Record) -> list[Html]:
    """Method, data, duration, throughput, and the findings."""
    facts = {
        "method": record.setting("method.name", "?"),
        "data": _source(record),
        "backbone": record.setting("backbone.name", "?"),
        "epochs": f"{record.epoch:.4g} of {record.epochs}",
        "batch size": f"{record.setting('training.batch_size', '?')} images",
        "training": duration(record.seconds) if record.logged else "not started",
        "throughput": f"{record.images_per_second:,.0f} images/s" if record.images_per_second else "unknown",
        "machine": str(record.environment.get("gpu") or record.environment.get("processor") or "unknown"),
        **_fallbacks(record),
    }
    return [
        tag("p", "tico report", class_="kicker"),
        tag("h1", record.name),
        paragraph(record.setting("description") or "", class_="lead") if record.setting("description") else Html(""),
        tag(
            "ul",
            [tag("li", s.text.replace(" %", "\u00a0%"), class_=s.tone) for s in findings(record)],
            class_="verdict",
            aria_label="Verdict",
        ),
        tag(
            "dl", [tag("div", tag("dt", name), tag("dd", str(value))) for name, value in facts.items()], class_="facts"
        ),
    ]


def _fallbacks(record: Record) -> dict[str, str]:
    """The execution of steps after a fallback, and the reason."""
    lines = [line for line in record.metrics if isinstance(line.get("fallback"), dict)]
    reasons = {what: reason for line in lines for what, reason in line["fallback"].items()}
    if not reasons:
        return {}
    why = "; ".join(sentence(what, reason) for what, reason in reasons.items())
    return {"steps": f"{lines[-1].get('execution', '?')} ({why})"}


def _source(record: Record) -> str:
    source, limit = record.setting("data.source", "?"), record.setting("data.limit")
    name = " + ".join(map(str, source)) if isinstance(source, list) else str(source)
    return name if limit is None else f"{name}, {limit:,} images"


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
    found += [evaluations(record), *([published_section(tables)] if tables else [])]
    found += [time_section(record), recipe_section(record), trouble(record)]
    return found, thumbnails


def views(record: Record) -> Section:
    """The contact sheet."""
    sheet = record.run.views_file
    if not sheet.is_file():
        return Section("views", "Views", [paragraph("The run has no contact sheet (views.png).", class_="missing")])
    text = "Top row: images of the first batch. Below: their augmented views. The images should still be recognisable."
    picture = tag("img", src=data_url(sheet.read_bytes(), "image/png"), alt="Contact sheet: originals and views")
    return Section("views", "Views", [tag("figure", tag("figcaption", text), picture, class_="sheet")])


def evaluations(record: Record) -> Section:
    """All results with their protocols, and the commands for missing ones."""
    content: list[Html] = []
    representations = list(dict.fromkeys(name for result in record.results for name in result["numbers"]))
    head = ["protocol", "metric", *representations, "how"]
    rows: Rows = []
    earlier: Rows = []
    for result in record.newest_results:
        kept = rows if result.get("checkpoint") == record.checkpoint else earlier
        for found in measurements(result["protocol"], result["numbers"]):
            cells = [Cell(found.text(name), found.values.get(name)) for name in representations]
            kept.append([result["protocol"], found.title, *cells, _protocol(result)])
    if rows:
        content += [paragraph(_beside(record)), table(head, rows, sortable=True)]
    if earlier:
        content.append(folded("Results of earlier checkpoints", table(head, earlier, sortable=True)))
    return Section("evaluations", "Evaluations", content + _missing(record))


def _beside(record: Record) -> str:
    """What the columns are."""
    text = "The trained backbone beside the same architecture untrained."
    models: dict[str, str] = {}
    for result in record.current_results.values():
        models |= {name: str(one.get("model", "?")) for name, one in _against(result).items()}
    if models.pop("initial", None):
        text += " initial: the weights that it started from, over which it has to gain."
    return " ".join([text, *(f"{name}: {model}." for name, model in models.items())])


def _against(result: Line) -> dict[str, Line]:
    """The models that a result compares with, by column."""
    found = result.get("data", {}).get("against", {})
    return {name: one for name, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}


def _missing(record: Record) -> list[Html]:
    """Missing evaluations, with the commands that run them."""
    if not record.run.backbone_file.is_file():
        when = "yet" if record.checkpoint is None else "any more: its weights are gone"
        return [paragraph(f"There is no backbone to evaluate {when}.", class_="missing")]
    content = []
    if missing := [name for name in USUAL if name not in record.current_results]:
        text = "Not measured yet" if not record.results else "Not measured for the current backbone"
        typed = command(f"tico evaluate {record.run.folder} {' '.join(missing)}")
        content.append(paragraph(f"{text}: ", ", ".join(missing), ". Run ", typed))
    if others := [name for name in catalogue.entries("evaluations") if name not in {*record.current_results, *USUAL}]:
        listing = command("tico list evaluations")
        text = paragraph("Also available: ", ", ".join(others), ". ", listing, " describes them.")
        content.append(folded("Other protocols", text))
    return content


def _protocol(result: Line) -> Html:
    data, settings = result.get("data", {}), result.get("settings", {})
    lines = [f"{DATA_WORDS.get(key, key)}: {value}" for key, value in data.items() if key != "against"]
    lines += [f"{name}: {', '.join(map(str, one.values()))}" for name, one in _against(result).items()]
    lines += [f"{key}: {value}" for key, value in settings.items()]
    lines += [f"took {duration(float(result.get('seconds', 0)))}", f"checkpoint {result.get('checkpoint', '?')}"]
    return folded("settings", bulleted(lines))


def recipe_section(record: Record) -> Section:
    """The recipe and the environment."""
    recipe = yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True)
    known = {key: value for key, value in record.environment.items() if key != "packages"}
    known |= record.environment.get("packages") or {}
    rows: Rows = [[str(key), str(value)] for key, value in known.items()]
    content = [
        paragraph("The recipe can be run again: ", command(f"tico pretrain {record.run.recipe_file}")),
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
            folded(f"{len(record.bad_files):,} files could not be read{more}", table(["file", "reason"], rows))
        )
    if not content:
        content.append(paragraph("No warnings, no bad files."))
    return Section("warnings", "Warnings", content)
