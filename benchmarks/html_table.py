"""A table of the report by typed functions, as the package builds it, against the same table by a Jinja template.

    python benchmarks/html_table.py [--rows 500] [--out FILE]

Both must give the same text. Lines are those of the functions and of the template, without blank ones.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment

from tico_ssl.report.page import _cell, _is_number, table
from tico_ssl.results.run_folder import environment
from tico_ssl.results.table import Cell

TEMPLATE = """\
<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead><tr>
{%- for name in head -%}
<th scope="col"{% if align[loop.index0] %} class="{{ align[loop.index0] }}"{% endif %}>{{ name }}</th>
{%- endfor -%}
</tr></thead><tbody>
{%- for row in rows -%}
<tr>
{%- for value in row -%}
<td{% if align[loop.index0] %} class="{{ align[loop.index0] }}"{% endif %}
{%- if value.text is defined %} data-value="{{ value.text if value.value is none else value.value }}"
{%- endif %}>{{ value.text if value.text is defined else value }}</td>
{%- endfor -%}
</tr>
{%- endfor -%}
</tbody></table></div>"""


def milliseconds(make: Callable[[], str]) -> float:
    """Median of 15 calls."""
    laps = []
    for _ in range(15):
        begin = time.perf_counter()
        make()
        laps.append(1000 * (time.perf_counter() - begin))
    return round(statistics.median(laps), 1)


def main() -> None:
    """Print one JSON line for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    head = ["run", "a < b", "kNN", "linear", "rank"]
    rows = [
        [f"run {i} & more", "<text>", *(Cell(f"{i + n}.0", float(i + n)) for n in range(3))]
        for i in range(arguments.rows)
    ]
    template = Environment(autoescape=True).from_string(TEMPLATE)

    def by_template() -> str:
        align = ["number" if any(_is_number(row[i]) for row in rows) else None for i in range(len(head))]
        return template.render(head=head, rows=rows, align=align)

    def by_functions() -> str:
        return table(head, rows)

    assert by_functions() == by_template()
    code = "".join(inspect.getsource(part) for part in (table, _cell))
    lines = [
        {"machine": environment(), "rows": arguments.rows},
        {
            "form": "functions",
            "lines": len([1 for line in code.splitlines() if line.strip()]),
            "milliseconds": milliseconds(by_functions),
        },
        {"form": "jinja2", "lines": len(TEMPLATE.splitlines()), "milliseconds": milliseconds(by_template)},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
