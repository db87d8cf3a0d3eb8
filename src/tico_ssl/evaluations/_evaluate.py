"""Evaluate a backbone by one protocol or several. User errors are raised before torch is imported."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tico_ssl.config import catalogue
from tico_ssl.config.section import validate
from tico_ssl.data.given import Given, in_words
from tico_ssl.features.homes import home_of, require_subject
from tico_ssl.results.metrics import declared
from tico_ssl.results.record import Result
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError, refusal
from tico_ssl.runtime.json_lines import append_json_line
from tico_ssl.runtime.progress import say

ALL = "all"


def evaluate(
    run: str | Path,
    protocol: str,
    data: Given | None = None,
    overrides: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    cache: bool = True,
    bf16: bool = False,
) -> Result:
    """Evaluate a run, a backbone file or a model by name, and append the result to its results.jsonl. If it cannot be
    written, this is said, and the result returned all the same. With `bf16`, frozen features are computed in bf16."""
    subject = run if weights is None else imported(run, weights, data)
    try:
        return evaluate_all(subject, [protocol], data, overrides, cache, bf16)[0]
    except NotSaved as error:
        say(f"warning: {error}")
        return error.results[0]


def imported(name: str | Path, weights: str | Path, data: Given | None) -> Path:
    """Write a model with weights from another library as a backbone file."""
    from tico_ssl.features.subjects import import_model

    return import_model(name, weights, data)


def evaluate_all(
    run: str | Path,
    protocols: Sequence[str],
    data: Given | None = None,
    overrides: Mapping[str, Any] | None = None,
    cache: bool = True,
    bf16: bool = False,
) -> list[Result]:
    """The same by several protocols; those that need the same context share it. An override `few-shot.draws` is for one
    protocol, `seed` for all that have it. `all` is every protocol that the data allow; the others are named with a
    reason. Results that cannot be written are raised as NotSaved, after the last protocol."""
    everything = ALL in protocols
    chosen = catalogue.entries("evaluations") if everything else list(protocols)
    given = overrides_by_protocol(chosen, overrides or {})
    for protocol in chosen:  # a misspelt name or key is an error before the work begins
        kind = catalogue.declaration("evaluations", protocol, "Config")
        validate(kind, given[protocol], f"evaluation {protocol}")
        declared(protocol)
    require_subject(run, data)

    from tico_ssl.runtime import distributed
    from tico_ssl.runtime.device import choose_device, tune_process

    device = choose_device()
    tune_process(device)
    unsaved: list[str] = []
    with distributed.session(device):  # one for all protocols: a process group is initialised once per launch
        results = list(_results(run, chosen, data, given, cache, bf16, everything, unsaved))
    if not results:
        raise UserError(f"{in_words(data)}: no protocol supports these data")
    if unsaved:
        raise NotSaved("; ".join(unsaved), results)
    return results


def _results(
    run: str | Path,
    protocols: Sequence[str],
    data: Given | None,
    given: Mapping[str, Mapping[str, Any]],
    cache: bool,
    bf16: bool,
    lenient: bool,
    unsaved: list[str],
) -> Iterator[Result]:
    """One protocol after the other; if lenient, protocols that the data do not allow are skipped. Why results could not
    be saved is added to `unsaved`."""
    from tico_ssl.evaluations._context import open_context

    contexts: dict[Callable[..., Any], Any] = {}
    for protocol in protocols:
        module = catalogue.load("evaluations", protocol)
        opener = getattr(module, "open_context", open_context)
        try:
            if lenient and hasattr(module, "NOT_IN_ALL"):
                raise UserError(module.NOT_IN_ALL)
            if opener not in contexts:
                ours = opener is open_context
                contexts[opener] = open_context(run, data, cache, bf16) if ours else opener(run, data)
            result = evaluate_with(contexts[opener], run, protocol, given[protocol])
        except NotSaved as error:
            unsaved.append(str(error))
            (result,) = error.results
        except UserError as reason:
            if not lenient:
                raise
            say(f"left out {protocol}: {reason}")
            continue
        yield result


def overrides_by_protocol(protocols: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of each protocol; a key without a protocol's name is for all that have such a setting."""
    given: dict[str, dict[str, Any]] = {protocol: {} for protocol in protocols}
    fields = {name: catalogue.declaration("evaluations", name, "Config").model_fields for name in protocols}
    for key, value in overrides.items():
        if named := [name for name in protocols if key.startswith(f"{name}.")]:
            name = max(named, key=len)
            given[name][key.removeprefix(f"{name}.")] = value
            continue
        for protocol in [name for name in protocols if key in fields[name]] or protocols:  # unknown: an error for all
            given[protocol][key] = value
    return given


def evaluate_with(context: Any, run: str | Path, protocol: str, overrides: Mapping[str, Any] | None = None) -> Result:
    """Evaluate by one protocol with an open context. Several processes compute one result."""
    from tico_ssl.runtime import distributed

    module = catalogue.load("evaluations", protocol)
    config = validate(module.Config, dict(overrides or {}), f"evaluation {protocol}")
    with distributed.session(context.device):
        if hasattr(context, "protocol"):
            context.protocol = protocol
        result: Result = replace(module.run(context, config), protocol=protocol)
        if distributed.is_main():
            _keep(result, home_of(run))
    return result


def _keep(result: Result, home: Path) -> None:
    """Append a result to results.jsonl."""
    file = Run(home).results_file
    try:
        home.mkdir(parents=True, exist_ok=True)
        append_json_line(file, asdict(result), durable=True)
    except OSError as error:
        raise NotSaved(f"{file}: the result of {result.protocol} was not saved ({refusal(error)})", [result]) from error


class NotSaved(UserError):
    """Results that could not be written to disk: not lost, but `results` of this error."""

    def __init__(self, text: str, results: list[Result]) -> None:
        super().__init__(text)
        self.results = results
