"""Results as a table in the terminal, and in words: did pretraining help?"""

from collections.abc import Sequence

from rich.table import Table

from tico_ssl.evaluations import Result
from tico_ssl.progress import console


def print_results(results: Sequence[Result]) -> None:
    """A row per number, a column per representation, the difference that training made, and the verdict."""
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    table = Table(title=_title(results[0]), title_justify="left", title_style="")
    table.add_column("protocol")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("difference", justify="right")
    for result in results:
        for metric, trained in result.numbers["trained"].items():
            if metric in ("weight_decay", "width"):
                continue
            row = [result.numbers.get(name, {}).get(metric) for name in names]
            gain = trained - result.numbers["untrained"][metric]
            table.add_row(
                f"{result.protocol} {metric}", *("" if v is None else f"{v:.1f}" for v in row), f"{gain:+.1f}"
            )
    console.print()
    console.print(table)
    if (sentence := verdict(results)) is not None:
        console.print(sentence)


def verdict(results: Sequence[Result]) -> str | None:
    """Whether pretraining helped, by the first accuracy at hand."""
    for result in results:
        for metric, trained in result.numbers["trained"].items():
            if metric.startswith("top1"):
                untrained = result.numbers["untrained"][metric]
                word = "helped" if trained > untrained + 1 else "did not help"
                return f"Pretraining {word}: {result.protocol} {trained:.1f} % against {untrained:.1f} % untrained."
    return None


def _title(result: Result) -> str:
    data = result.data
    return f"{data['source']}: {data['train']:,} training and {data['test']:,} test images ({data['split']})"
