"""One protocol on an open context, and its result on disk. Nothing here imports torch before it is used."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tico_ssl.config import catalogue
from tico_ssl.config.section import validate
from tico_ssl.features.homes import home_of
from tico_ssl.results.record import Result
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError, refusal
from tico_ssl.runtime.json_lines import append_json_line


def evaluate_with(
    context: Any,
    run: str | Path,
    protocol: str,
    overrides: Mapping[str, Any] | None = None,
    images: str | None = None,
) -> Result:
    """Evaluate by one protocol with an open context. Several processes compute one result. `images` is their digest, if
    it is known."""
    from tico_ssl.runtime import distributed
    from tico_ssl.runtime.process_group import process_group

    module = catalogue.load("evaluations", protocol)
    config = validate(module.Config, dict(overrides or {}), f"evaluation {protocol}")
    with process_group(context.device):
        if hasattr(context, "protocol"):
            context.protocol = protocol
        result: Result = replace(module.run(context, config), protocol=protocol, images=images)
        if distributed.is_main():
            _keep(result, home_of(run))
    return result


def _keep(result: Result, home: Path) -> None:
    """Append a result to results.jsonl, that of a quick look to a file of its own."""
    file = Run(home).quick_results_file if result.data.get("quick") else Run(home).results_file
    try:
        home.mkdir(parents=True, exist_ok=True)
        append_json_line(file, result.line, durable=True)
    except OSError as error:
        raise NotSaved(f"{file}: the result of {result.protocol} was not saved ({refusal(error)})", [result]) from error


class NotSaved(UserError):
    """Results that could not be written to disk: not lost, but `results` of this error."""

    def __init__(self, text: str, results: list[Result]) -> None:
        super().__init__(text)
        self.results = results
