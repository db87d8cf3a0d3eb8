"""Evaluate a backbone by one protocol or several. User errors are raised before torch is imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tico_ssl.config import catalogue
from tico_ssl.config.section import validate
from tico_ssl.data.given import Given, in_words
from tico_ssl.evaluations._cost import COSTS, cheap_first, cost_of
from tico_ssl.evaluations._single import NotSaved
from tico_ssl.features.homes import others_beside, require_subject
from tico_ssl.results.metrics import declared
from tico_ssl.results.record import Result
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say

ALL = "all"
QUICK_COST = COSTS[0]


def evaluate(
    run: str | Path,
    protocol: str,
    data: Given | None = None,
    overrides: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    cache: bool = True,
    bf16: bool = False,
    against: Sequence[str | Path] = (),
) -> Result:
    """Evaluate a run, a backbone file or a model by name, append the result to its results.jsonl, and return it:
    `numbers`, `intervals` and `differences`, by representation ("trained", "untrained", ...) and metric.

    `protocol` is one of `tico list evaluations`, or the dotted path of your own; `overrides` are its settings. `data`
    are by default the run's. `weights` is a file of weights for a model by name, whose weights are random otherwise.
    `cache=False` recomputes everything. `bf16` computes frozen features in bf16. `against` adds columns for other
    models, on the same images. If the result cannot be saved, a warning is printed and it is still returned.

        result = evaluate("runs/mine", "knn", data="labelled/")
        result.numbers["trained"]["top1_k20"], result.intervals["trained"]["top1_k20"]
    """
    if not isinstance(protocol, str) or protocol == ALL:
        raise UserError("evaluate computes one protocol: call it for each, or give `tico evaluate RUN all`")
    subject = run if weights is None else imported(run, weights, data)
    try:
        return evaluate_all(subject, [protocol], data, overrides, cache, bf16, against=against)[0]
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
    again: bool = True,
    quick: bool = False,
    against: Sequence[str | Path] = (),
) -> list[Result]:
    """The same by several protocols; those that need the same context share it. An override `few-shot.draws` is for one
    protocol, `seed` for all that have it. `all` is every protocol that the data allow, cheap ones first; the others are
    named with a reason. Without `again`, `all` takes results that exist already. A `quick` look needs features only, of
    some of the images. `against` are models to compare with: runs, backbone files, models by name, and NAME=WEIGHTS.
    Results that cannot be written are raised as NotSaved, after the last protocol."""
    against = [against] if isinstance(against, str | Path) else list(against)
    everything = ALL in protocols
    chosen = cheap_first(catalogue.entries("evaluations")) if everything else list(protocols)
    given = _checked_settings(chosen, overrides or {})
    if quick:
        chosen = _quick_ones(chosen, everything)
    require_subject(run, data)
    for other in others_beside(run, against).values():
        other.require()

    from tico_ssl.evaluations._session import Asked, Session
    from tico_ssl.runtime.device import choose_device, tune_process
    from tico_ssl.runtime.process_group import process_group

    device = choose_device()
    tune_process(device)
    anew = again or not everything or quick
    session = Session(Asked(run, data, given, cache, bf16, everything, anew, quick, against))
    with process_group(device):  # one for all protocols: a process group is initialised once per launch
        results = list(session.results(chosen))
    if not results:
        raise UserError(f"{in_words(data)}: no protocol supports these data")
    if session.unsaved:
        raise NotSaved("; ".join(session.unsaved), results)
    return results


def _checked_settings(protocols: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of each protocol; a misspelt name or key is an error before the work begins."""
    given = overrides_by_protocol(protocols, overrides)
    for protocol in protocols:
        kind = catalogue.declaration("evaluations", protocol, "Config")
        validate(kind, given[protocol], f"evaluation {protocol}")
        declared(protocol)
    return given


def _quick_ones(protocols: Sequence[str], everything: bool) -> list[str]:
    """The protocols that a quick look can take; others that were asked for by name are refused."""
    possible = [protocol for protocol in protocols if cost_of(protocol) == QUICK_COST]
    if not everything and (slow := [protocol for protocol in protocols if protocol not in possible]):
        every = [name for name in catalogue.entries("evaluations") if cost_of(name) == QUICK_COST]
        raise UserError(f"{slow[0]} is not for a quick look, which needs features only: {', '.join(every)}")
    return possible


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
