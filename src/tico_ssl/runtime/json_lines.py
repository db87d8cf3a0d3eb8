"""Files with one JSON object per line: a crash can cut off the last line, but not damage the others."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; one that a crash cut off is skipped."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def append_json_line(path: Path, values: dict[str, Any]) -> None:
    """Append one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
