"""The evaluations of a run: the newest result of each protocol, trained beside untrained, with the difference."""

import shlex
from collections.abc import Callable

from tico_ssl.config import catalogue
from tico_ssl.report.html import Html, tag
from tico_ssl.report.names import column_name, elsewhere, protocol_name, with_way
from tico_ssl.report.page import Noted, Section, bulleted, command, folded, paragraph, table
from tico_ssl.results.intervals import difference_interval, interval
from tico_ssl.results.metrics import USUAL, Measurement, measurements
from tico_ssl.results.record import SEEN, Line, Record, duration
from tico_ssl.results.table import OWN, Cell, legend
from tico_ssl.results.verdict import between, in_order, signed, unsigned

Rows = list[list[Cell | Html | str]]
DATA_WORDS = {"source": "data", "train": "training images", "test": "test images"}
DATA_WORDS |= {SEEN: "test images seen in pretraining, without labels"}
DATA_WORDS |= {"packed": "shorter sides in pixels, as packed and before"}
MOST_ROWS = 8  # metrics of a protocol that are shown at first
SUMMARY = ("_clean", "_corrupted", "_lost")  # what corruptions come to; each by itself is folded away


def evaluations(record: Record) -> Section:
    """The newest result of each protocol, those first that may decide, earlier ones folded away, and the commands for
    missing ones."""
    newest = sorted(record.current_results.values(), key=lambda result: in_order(result["protocol"]))
    content = [paragraph(_beside(record))] if newest else []
    content += [part for result in newest for part in protocol_group(record, result)]
    if earlier := [result for result in record.results if not any(result is one for one in newest)]:
        of_others = any(result.get("checkpoint") != record.checkpoint for result in earlier)
        title = "Results of earlier checkpoints" if of_others else "Earlier results"
        content.append(folded(title, [part for result in reversed(earlier) for part in protocol_group(record, result)]))
    return Section("evaluations", "Evaluations", content + _missing(record))


def protocol_group(record: Record, result: Line) -> list[Html]:
    """A protocol: what it measures, its numbers, and how they were measured."""
    found = _measured(result)
    columns = _columns(result)
    main = [one for one in found if one.name.endswith(SUMMARY)] if result["protocol"] == "corruptions" else found
    main = main[:MOST_ROWS] or found[:MOST_ROWS]
    more = [one for one in found if one not in main]
    content = [
        tag("h3", protocol_name(result["protocol"]) + elsewhere(record, result)),
        *_summary(result["protocol"]),
        _numbers(result, main, columns),
    ]
    if more:
        content.append(folded(f"{len(more)} more metrics", _numbers(result, more, columns)))
    return [*content, _settings(result)]


def _measured(result: Line) -> list[Measurement]:
    return measurements(result["protocol"], result["numbers"])


def _columns(result: Line) -> list[str]:
    """Representations, those first that decide: a phone shows the first few."""
    found = result["numbers"]
    return [*(name for name in OWN if name in found), *(name for name in found if name not in OWN)]


def _numbers(result: Line, found: list[Measurement], columns: list[str]) -> Html:
    late = [name for name in columns if name not in ("trained", "initial", "untrained")]
    early = [name for name in columns if name not in late]
    compared = any(one.reference and one.gain_over(one.reference) is not None for one in found)
    rows: Rows = []
    for one in found:
        values = {name: _value(result, one, name) for name in columns}
        difference = [_difference(result, one)] if compared else []
        rows.append([with_way(one), *(values[name] for name in early), *difference, *(values[name] for name in late)])
    over = "over initial" if "initial" in columns else "difference"
    head = [*map(column_name, early), *([over] if compared else []), *map(column_name, late)]
    return table(["metric", *head], rows)


def _value(result: Line, found: Measurement, column: str) -> Noted:
    text = found.text(column).replace(" ", "\u00a0")
    return Noted(text, found.values.get(column), note=ends(interval(result, column, found.name), found))


def _difference(result: Line, found: Measurement) -> Noted:
    """Trained minus the reference."""
    gain = None if found.reference is None else found.gain_over(found.reference)
    if gain is None or found.reference is None:
        return Noted("")
    pair = difference_interval(result, found.reference, found.name)
    return Noted(signed(gain, found.metric.digits), gain, note=ends(pair, found, signed))


def ends(pair: tuple[float, float] | None, found: Measurement, write: Callable[[float, int], str] = unsigned) -> str:
    """The ends of an interval in the digits of its metric; nothing without one."""
    return "" if pair is None else between(*pair, found.metric.digits, write)


def _summary(protocol: str) -> list[Html]:
    """What a protocol does; of one that is gone, nothing is known."""
    try:
        return [paragraph(catalogue.summary("evaluations", protocol), class_="how")]
    except Exception:  # results outlive protocols, and one from elsewhere may fail in any way
        return []


def _settings(result: Line) -> Html:
    data, settings = result.get("data", {}), result.get("settings", {})
    lines = [f"{DATA_WORDS.get(key, key)}: {value}" for key, value in data.items() if not isinstance(value, dict)]
    lines += [f"{name}: {', '.join(map(str, one.values()))}" for name, one in _against(result).items()]
    lines += [f"{key}: {value}" for key, value in settings.items()]
    lines += [f"took {duration(float(result.get('seconds', 0)))}", f"checkpoint {result.get('checkpoint', '?')}"]
    return folded("Data and settings", bulleted(lines))


def _beside(record: Record) -> str:
    """What the columns are."""
    text = "The trained backbone beside the same architecture untrained."
    models: dict[str, str] = {}
    for result in record.current_results.values():
        models |= {name: str(one.get("model", "?")) for name, one in _against(result).items()}
    if models.pop("initial", None):
        text += " initial: the weights that it started from, over which it has to gain."
    if any(result.get("intervals") or result.get("differences") for result in record.current_results.values()):
        text += " Small: 95 % intervals."
    shown = [one for result in record.current_results.values() for one in _measured(result)]
    return " ".join([text, *(f"{name}: {model}." for name, model in models.items()), *legend(shown)])


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
        typed = command(f"tico evaluate {shlex.quote(str(record.run.folder))} {' '.join(missing)}")
        content.append(paragraph(f"{text}: ", ", ".join(map(protocol_name, missing)), ". Run ", typed))
    if others := [name for name in catalogue.entries("evaluations") if name not in {*record.current_results, *USUAL}]:
        listing = command("tico list evaluations")
        text = paragraph("Also available: ", ", ".join(others), ". ", listing, " describes them.")
        content.append(folded("Other protocols", text))
    return content
