"""The report of one run, section by section."""

import itertools
from typing import Any

import numpy as np
import yaml

from tico_ssl.config import catalogue
from tico_ssl.report.atlas import data_url
from tico_ssl.report.charts import Chart, Series, over_time
from tico_ssl.report.html import Html, tag
from tico_ssl.report.image_sections import classes, gallery, map_section
from tico_ssl.report.page import Cell, Section, Thumbnails, bulleted, command, figure, folded, paragraph, table
from tico_ssl.report.picture import Picture
from tico_ssl.report.record import Line, Record, duration, measured
from tico_ssl.report.verdict import verdict
from tico_ssl.runtime.fallbacks import sentence

MOST_POINTS = 2_000  # of a curve: more than the screen has pixels is waste
MOMENTS = 10  # spectra that are drawn over one another
DATA_WORDS = {"source": "data", "train": "training images", "test": "test images"}
NO_TERMS = {"embedding_std", "mean_cosine", "participation_ratio", "largest_eigenvalue", "ema_decay", "lr"}
USUAL = ("knn", "linear", "rankme")


def header(record: Record) -> list[Html]:
    """What was trained on what, for how long, how fast, and the verdict."""
    facts = {
        "method": record.setting("method.name", "?"),
        "data": _source(record),
        "backbone": record.setting("backbone.name", "?"),
        "epochs": f"{record.epoch:.4g} of {record.epochs}",
        "batch": f"{record.setting('training.batch_size', '?')} images",
        "training": duration(record.seconds) if record.logged else "not begun",
        "speed": f"{record.images_per_second:,.0f} images/s" if record.images_per_second else "unknown",
        "machine": str(record.environment.get("gpu") or record.environment.get("processor") or "unknown"),
        **_fallbacks(record),
    }
    return [
        tag("p", "tico report", class_="kicker"),
        tag("h1", record.name),
        paragraph(record.setting("description") or "", class_="lead") if record.setting("description") else Html(""),
        tag(
            "ul",
            [tag("li", s.text.replace(" %", "\u00a0%"), class_=s.tone) for s in verdict(record)],
            class_="verdict",
            aria_label="Verdict",
        ),
        tag(
            "dl", [tag("div", tag("dt", name), tag("dd", str(value))) for name, value in facts.items()], class_="facts"
        ),
    ]


def _fallbacks(record: Record) -> dict[str, str]:
    """How steps were carried out, if not as they were meant to be; and why."""
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


def sections(record: Record, picture: Picture | str) -> tuple[list[Section], Thumbnails | None]:
    """All sections. `picture` is what was embedded, or why nothing was."""
    found = [training(record), covariance(record), views(record)]
    thumbnails = None
    if isinstance(picture, str):
        found.append(Section("images", "Images", [paragraph(picture, class_="missing")]))
    else:
        mapped, thumbnails = map_section(picture)
        found += [mapped, gallery(picture), classes(picture)]
    found += [evaluations(record), time_section(record), recipe_section(record), trouble(record)]
    return found, thumbnails


def training(record: Record) -> Section:
    """The curves."""
    if not record.logged:
        return Section("training", "Training", [paragraph("No step has been logged yet.", class_="missing")])
    terms = loss_terms(record.logged[-1])
    charts = [
        Chart(
            "loss",
            "Loss" if len(terms) == 1 else "Loss and its terms",
            "It should fall and then level off. A loss that jumps up to the weight of the contrast means collapse.",
            [curve(record.logged, name, name) for name in terms],
            "epoch",
            "loss",
        )
    ]
    if knn := _knn_names(record):
        charts.append(
            Chart(
                "knn",
                "kNN between epochs",
                "Accuracy of votes of the nearest training images, on a part of the data: the curve to trust.",
                [curve(record.judged_on_the_way, name, words) for name, words in knn.items()],
                "epoch",
                "per cent",
            )
        )
    for key, title, caption in (
        ("lr", "Learning rate", "A warm-up, then half a cosine."),
        ("ema_decay", "Decay of the target network", "Near 1 the target hardly moves any more."),
    ):
        if key in record.logged[-1]:
            series = [curve(record.logged, key, title.lower())]
            charts.append(Chart(key.replace("_", "-"), title, caption, series, "epoch", height=260))
    return Section("training", "Training", [tag("div", [figure(chart) for chart in charts], class_="pair")], charts)


def loss_terms(line: Line) -> list[str]:
    """The loss and, as training writes them right after it, its terms."""
    after = list(line)[list(line).index("loss") + 1 :]
    return ["loss", *itertools.takewhile(lambda name: name not in NO_TERMS, after)]


def _knn_names(record: Record) -> dict[str, str]:
    found = dict.fromkeys(
        key for line in record.judged_on_the_way for key in line if key.startswith(("knn_", "linear_"))
    )
    return {key: key.replace("knn_top1_k", "k = ").replace("linear_", "linear ") for key in found if "top5" not in key}


def curve(lines: list[Line], key: str, name: str) -> Series:
    """A metric by epoch, thinned out to what a screen can show."""
    kept = [line for line in lines if key in line]
    kept = [kept[i] for i in np.unique(np.linspace(0, len(kept) - 1, min(MOST_POINTS, len(kept))).round().astype(int))]
    return Series(name, [line.get("epoch") for line in kept], [_rounded(line[key]) for line in kept])


def _rounded(value: Any) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, int | float) else None


def covariance(record: Record) -> Section:
    """The life of the covariance, or of what is known of the spread of embeddings."""
    charts = []
    if record.spectrum:
        places = np.unique(np.linspace(0, len(record.spectrum) - 1, MOMENTS).round().astype(int))
        moments = [record.spectrum[place] for place in places]
        dim = moments[-1]["ranks"][-1]
        series = [
            Series(
                f"epoch {line['epoch']:g}",
                line["ranks"],
                [max(value, 1e-9) for value in line["shares"]],
                over_time(number / max(1, len(moments) - 1)),
            )
            for number, line in enumerate(moments)
        ]
        series.append(Series("even spread", [1, dim], [1 / dim, 1 / dim], "#8a8f98", dashed=True))
        charts.append(
            Chart(
                "spectrum",
                "Spectrum of the covariance over time",
                "Shares of all variation by direction, largest first. The flatter, the more dimensions are in use; "
                "directions behind a cliff are dead.",
                series,
                "rank of the eigenvalue",
                "share",
                log_x=True,
                log_y=True,
                height=420,
            )
        )
    wanted = (
        ("participation_ratio", "Participation ratio", "How many directions the covariance fills; 1 is collapse."),
        (
            "largest_eigenvalue",
            "Largest eigenvalue",
            "Share of all variation in one direction; above 0.5 is a warning.",
        ),
        ("mean_cosine", "Cosine of different images", "Near 0 they are apart, near 1 they are all the same."),
        ("embedding_std", "Deviation of each dimension", "It falls to 0 when embeddings collapse."),
    )
    for key, title, caption in wanted:
        if record.logged and key in record.logged[-1]:
            series = [curve(record.logged, key, title.lower())]
            charts.append(Chart(key.replace("_", "-"), title, caption, series, "epoch", height=260))
    content: list[Html] = []
    if record.spectrum:
        content.append(figure(charts[0]))
    elif record.logged and "participation_ratio" in record.logged[-1]:
        content.append(paragraph("The run is from before spectra were kept (spectrum.jsonl).", class_="missing"))
    rest = charts[1:] if record.spectrum else charts
    content.append(tag("div", [figure(chart) for chart in rest], class_="pair"))
    if not charts:
        content = [paragraph("Nothing has been logged about the spread of embeddings.", class_="missing")]
    known = any(chart.key in ("spectrum", "participation-ratio") for chart in charts)
    return Section("covariance", "Covariance" if known else "Spread", content, charts)


def views(record: Record) -> Section:
    """The contact sheet."""
    sheet = record.run.folder / "views.png"
    if not sheet.is_file():
        return Section(
            "views", "Views", [paragraph("The run has drawn no contact sheet (views.png).", class_="missing")]
        )
    text = (
        "Images of the first batch on top, and below them what the networks saw. One should still recognise the image."
    )
    picture = tag("img", src=data_url(sheet.read_bytes(), "image/png"), alt="Contact sheet: originals and views")
    return Section("views", "Views", [tag("figure", tag("figcaption", text), picture, class_="sheet")])


def evaluations(record: Record) -> Section:
    """Every result with its protocol; and how to get those that are missing."""
    content: list[Html] = []
    representations = list(dict.fromkeys(name for result in record.results for name in result["numbers"]))
    rows: list[list[Cell | Html | str]] = []
    earlier: list[list[Cell | Html | str]] = []
    for result in record.results:
        for metric, values, deviations in measured(result):
            cells = [_value(values.get(name), deviations.get(name)) for name in representations]
            kept = rows if result.get("checkpoint") == record.checkpoint else earlier
            kept.append([result["protocol"], metric, *cells, _protocol(result)])
    head = ["protocol", "metric", *representations, "how"]
    if rows:
        text = "The trained backbone beside the same network without training; accuracies in per cent."
        content += [paragraph(text), table(head, rows, sortable=True)]
    if earlier:
        content.append(folded("Results of earlier checkpoints", table(head, earlier, sortable=True)))
    run = record.run.folder
    missing = [name for name in USUAL if name not in record.current_results]
    there = record.run.backbone_file.is_file()
    if not there:
        when = "yet" if record.checkpoint is None else "any more: its weights are gone"
        content.append(paragraph(f"There is no backbone to evaluate {when}.", class_="missing"))
    elif missing:
        text = "Not measured yet" if not record.results else "Not measured for the backbone as it is now"
        content.append(
            paragraph(
                f"{text}: ", ", ".join(missing), ". To do so: ", command(f"tico evaluate {run} {' '.join(missing)}")
            )
        )
    others = [name for name in catalogue.entries("evaluations") if name not in {*record.current_results, *USUAL}]
    if there and others:
        content.append(
            folded(
                "Other protocols",
                paragraph(
                    "There are also ", ", ".join(others), ". ", command("tico list evaluations"), " says what each is."
                ),
            )
        )
    return Section("evaluations", "Evaluations", content)


def _value(value: float | None, deviation: float | None) -> Cell:
    if value is None:
        return Cell("")
    return Cell(f"{value:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}"), value)


def _protocol(result: Line) -> Html:
    data, settings = result.get("data", {}), result.get("settings", {})
    lines = [f"{DATA_WORDS.get(key, key)}: {value}" for key, value in data.items()]
    lines += [f"{key}: {value}" for key, value in settings.items()]
    lines += [f"took {duration(float(result.get('seconds', 0)))}", f"checkpoint {result.get('checkpoint', '?')}"]
    return folded("settings", bulleted(lines))


def time_section(record: Record) -> Section:
    """Where the time went."""
    if not record.logged:
        return Section("time", "Time", [paragraph("No step has been logged yet.", class_="missing")])
    steps, waiting = record.training_seconds, record.waiting_seconds
    judging = sum(float(result.get("seconds", 0)) for result in record.results)
    parts = {
        "training steps": steps - waiting,
        "waiting for images": waiting,
        "kNN, checkpoints, start": max(0.0, record.seconds - steps),
        "evaluations afterwards": judging,
    }
    charts = [
        Chart(
            "time",
            "Where the time went",
            "Waiting for images should be next to nothing; if not, pack them: tico data pack.",
            [Series("seconds", list(parts), [_rounded(value) for value in parts.values()])],
            "seconds",
            kind="bars",
            height=240,
        ),
        Chart(
            "speed",
            "Speed",
            "Images per second between two lines of the log. Dips mean that something else was at work.",
            [curve(record.logged, "images_per_second", "images/s")],
            "epoch",
            from_zero=True,
            height=240,
        ),
    ]
    return Section("time", "Time", [tag("div", [figure(chart) for chart in charts], class_="pair")], charts)


def recipe_section(record: Record) -> Section:
    """Everything that the numbers depend on."""
    recipe = yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True)
    known = {key: value for key, value in record.environment.items() if key != "packages"}
    known |= record.environment.get("packages") or {}
    rows: list[list[Cell | Html | str]] = [[str(key), str(value)] for key, value in known.items()]
    content = [
        paragraph("The recipe runs again as it is: ", command(f"tico pretrain {record.run.recipe_file}")),
        folded("Recipe", tag("pre", recipe, tabindex=0)),
        folded("Environment", table(["what", "value"], rows)),
    ]
    return Section("recipe", "Recipe", content)


def trouble(record: Record) -> Section:
    """Warnings and files that could not be read."""
    content: list[Html] = []
    if record.warnings:
        content.append(bulleted(record.warnings))
    if record.bad_files:
        shown = record.bad_files[:200]
        rows: list[list[Cell | Html | str]] = [[str(b.get("file", "?")), str(b.get("reason", "?"))] for b in shown]
        more = "" if len(shown) == len(record.bad_files) else f" (the first {len(shown)})"
        content.append(
            folded(f"{len(record.bad_files):,} files could not be read{more}", table(["file", "reason"], rows))
        )
    if not content:
        content.append(paragraph("No warnings, no bad files."))
    return Section("warnings", "Warnings", content)
