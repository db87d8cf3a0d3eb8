"""Results as a table in the terminal, and in words: did pretraining help?"""

from collections.abc import Sequence

from rich.table import Table

from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.progress import console

CHOSEN = ("weight_decay", "width", "lr")  # numbers that belong to a result, but measure nothing
FINE = ("alpha", "alpha_r2", "alignment", "uniformity")  # numbers near one, of which more digits are shown


def print_results(results: Sequence[Result]) -> None:
    """A row per number, a column per representation, the difference that training made, and the verdict."""
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    table = Table(title=_title(results[0]), title_justify="left", title_style="")
    table.add_column("protocol")
    for name in names:
        table.add_column(name, justify="right")
    compared = {"trained", "untrained"} <= set(names)
    if compared:
        table.add_column("difference", justify="right")
    for result in results:
        for metric in next(iter(result.numbers.values())):
            if metric in CHOSEN or metric.endswith("_std"):
                continue
            row = [_cell(result.numbers.get(name, {}), metric) for name in names]
            if compared:
                gain = result.numbers["trained"][metric] - result.numbers["untrained"][metric]
                row.append(f"{gain:+.{_digits(metric)}f}")
            table.add_row(f"{result.protocol} {metric}", *row)
    console.print()
    console.print(table)
    if (sentence := verdict(results)) is not None:
        console.print(sentence)


def verdict(results: Sequence[Result]) -> str | None:
    """Whether pretraining helped, by the first accuracy or precision at hand."""
    for result in results:
        for metric, trained in result.numbers.get("trained", {}).items():
            if metric.startswith(("top1", "map", "box_ap")):
                untrained = result.numbers["untrained"][metric]
                word = "helped" if trained > untrained + 1 else "did not help"
                return f"Pretraining {word}: {result.protocol} {trained:.1f} % against {untrained:.1f} % untrained."
    return None


def _cell(numbers: Numbers, metric: str) -> str:
    """A number, with the deviation of repetitions where there were some."""
    if metric not in numbers:
        return ""
    digits, deviation = _digits(metric), numbers.get(f"{metric}_std")
    return f"{numbers[metric]:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _digits(metric: str) -> int:
    """After the point."""
    return 3 if metric.removeprefix("embedding_") in FINE else 1


def _title(result: Result) -> str:
    data = result.data
    return f"{data['source']}: {data['train']:,} training and {data['test']:,} test images ({data['split']})"
