"""What a reader sees first: the number that decides, what it is against, some neighbours, and the facts of the run."""

from tico_ssl.features.picture import Picture
from tico_ssl.report.evaluation_section import ends
from tico_ssl.report.findings import decided, findings
from tico_ssl.report.html import Html, tag
from tico_ssl.report.image_sections import gallery_row
from tico_ssl.report.names import column_name, data_name, elsewhere, full_name
from tico_ssl.report.page import command, paragraph
from tico_ssl.results.confidence import share_interval
from tico_ssl.results.intervals import difference_interval, interval
from tico_ssl.results.record import Line, Record, duration
from tico_ssl.results.verdict import Verdict, between, signed, unsigned
from tico_ssl.runtime.fallbacks import sentence
from tico_ssl.runtime.wording import counted

GLIMPSES = 4  # rows of neighbours


def header(record: Record, picture: Picture | str) -> list[Html]:
    """The number, the findings, some neighbours, and the facts."""
    said = [
        tag("li", one.text.replace(" %", "\u00a0%"), *_typed(one.command), class_=one.tone) for one in findings(record)
    ]
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts_of(record).items()]
    verdict = tag("ul", said, class_="verdict", aria_label="Verdict")
    return [
        tag("p", "tico report", class_="kicker"),
        tag("h1", record.name),
        tag("div", tag("div", *_number(record), verdict), _glimpse(picture), class_="first"),
        tag("dl", facts, class_="facts"),
    ]


def _typed(text: str) -> list[str]:
    return [" ", command(text)] if text else []


def _number(record: Record) -> list[Html]:
    """The number that decides, large; before any evaluation, that of training."""
    if (verdict := decided(record)) is not None:
        return [_measured(record, verdict, record.current_results[verdict.by.protocol])]
    if not record.knn_on_the_way:
        return []
    epoch, value = record.knn_on_the_way[-1]
    images = record.knn_images
    tested = "on some of the images" if images is None else counted(images, "test image")
    big = paragraph(f"{value:.1f}\u00a0%", class_="big")
    label = paragraph(f"kNN accuracy during training, epoch {epoch:g}, {tested}", class_="label")
    return [tag("div", label, big, _within(value, images), class_="headline")]


def _within(value: float, images: int | None) -> Html | None:
    """The interval of a share of so many images."""
    if images is None:
        return None
    low, high = (100 * end for end in share_interval(value / 100 * images, images))
    return paragraph(f"95\u00a0% interval {between(low, high, 1, unsigned)}\u00a0%", class_="interval")


def _measured(record: Record, verdict: Verdict, line: Line) -> Html:
    by, images = verdict.by, line.get("data", {}).get("test")
    unit = f"\u00a0{by.metric.unit}" if by.metric.unit else ""
    label = full_name(by) + (f", {counted(images, 'test image')}" if isinstance(images, int) else "")
    label += elsewhere(record, line)
    known = ends(interval(line, "trained", by.name), by)
    columns = [name for name in dict.fromkeys([verdict.reference, "untrained", *by.values]) if name in by.values]
    return tag(
        "div",
        paragraph(label, class_="label"),
        paragraph(f"{by.text('trained')}{unit}", class_="big"),
        paragraph(f"95\u00a0% interval {known}{unit}", class_="interval") if known else None,
        tag("dl", [_against(verdict, line, name, unit) for name in columns if name != "trained"]),
        class_="headline",
    )


def _against(verdict: Verdict, line: Line, column: str, unit: str) -> Html:
    """Another column: its value, and how far it is from trained."""
    by, gain = verdict.by, verdict.by.gain_over(column)
    points = " points" if by.metric.unit == "%" else unit
    note = "" if gain is None else f"{signed(gain, by.metric.digits)}{points}"
    if known := ends(difference_interval(line, column, by.name), by, signed):
        note += f" (95\u00a0% interval {known})"
    return tag("div", tag("dt", column_name(column)), tag("dd", f"{by.text(column)}{unit}", tag("small", note)))


def _glimpse(picture: Picture | str) -> Html | None:
    if isinstance(picture, str):
        return None
    text = f"Test images (left) and their nearest training images.{' × is another class.' if picture.classes else ''}"
    rows = [gallery_row(picture, number) for number in range(min(GLIMPSES, len(picture.queries.names)))]
    return tag("div", paragraph(text, class_="label"), rows, class_="glimpse")


def facts_of(record: Record) -> dict[str, str]:
    """What was trained, on what, how long."""
    size, speed = record.setting("data.image_size"), record.images_per_second
    time = duration(record.seconds) if record.logged else "no step logged"
    return {
        "data": data_name(record) + ("" if record.images is None else f", {counted(record.images, 'image')}"),
        "method": str(record.setting("method.name", "?")),
        "network": str(record.setting("backbone.name", "?")),
        "image size": "?" if size is None else f"{size} px",
        "epochs": f"{record.epoch:.4g} of {record.epochs}",
        "batch": counted(record.setting("training.batch_size", "?"), "image"),
        "time": time + (f", {speed:,.0f} images/s" if speed else ""),
        "machine": str(record.environment.get("gpu") or record.environment.get("processor") or "unknown"),
        **_fallbacks(record),
    }


def _fallbacks(record: Record) -> dict[str, str]:
    """The execution of steps after a fallback, and the reason."""
    lines = [line for line in record.metrics if isinstance(line.get("fallback"), dict)]
    reasons = {what: reason for line in lines for what, reason in line["fallback"].items()}
    if not reasons:
        return {}
    why = "; ".join(sentence(what, reason) for what, reason in reasons.items())
    return {"steps": f"{lines[-1].get('execution', '?')} ({why})"}
