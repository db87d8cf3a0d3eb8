"""Protocols one after the other, on contexts that they share: said before, done, or taken as done already."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tico_ssl.config import catalogue
from tico_ssl.config.section import Section, validate
from tico_ssl.data.given import Given
from tico_ssl.data.source import Source
from tico_ssl.evaluations._context import Context, open_context
from tico_ssl.evaluations._estimate import Pace, measure_pace
from tico_ssl.evaluations._single import NotSaved, evaluate_with
from tico_ssl.features.homes import home_of
from tico_ssl.results.finished import finished
from tico_ssl.results.record import Line, Result, duration
from tico_ssl.results.run_folder import Run
from tico_ssl.results.table import in_a_line
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say

QUICK_TRAIN, QUICK_TEST = 2_000, 1_000  # images of a quick look, at most


@dataclass(frozen=True)
class Asked:
    """What a command asks for."""

    run: str | Path
    data: Given | None
    given: Mapping[str, Mapping[str, Any]]
    """Settings by protocol."""
    cache: bool
    bf16: bool
    """Compute frozen features in bf16."""
    everything: bool
    """Every protocol that the data allow: the others are left out, with a reason."""
    again: bool
    """Compute results that exist already."""
    quick: bool
    against: Sequence[str | Path] = ()
    """Models to compare with."""


class Session:
    """The protocols of a command. Why results could not be saved is in `unsaved`."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.unsaved: list[str] = []
        self._contexts: dict[Callable[..., Any], Any] = {}
        self._pace: Pace | None = None

    def results(self, protocols: Sequence[str]) -> Iterator[Result]:
        """One result after the other, as they come."""
        protocols = self._allowed(protocols)
        known = {protocol: found for protocol in protocols if (found := self._known(protocol)) is not None}
        waiting = [protocol for protocol in protocols if protocol not in known]
        if known:
            say(f"already done: {', '.join(known)}; --again repeats them on cached features")
        self._say_plan(waiting)
        for protocol in protocols:
            if protocol in known:
                yield known[protocol]
                continue
            number = f" ({waiting.index(protocol) + 1} of {len(waiting)})" if len(waiting) > 1 else ""
            try:
                result = self._made(protocol, number)
            except UserError as reason:
                if not self.asked.everything:
                    raise
                say(f"left out {protocol}: {reason}")
                continue
            say(in_a_line(result))
            if isinstance(context := self._context(protocol), Context):
                context.unread.tell(context.data["source"], Run(home_of(self.asked.run)).unread_file)
            yield result

    def _allowed(self, protocols: Sequence[str]) -> list[str]:
        """Without those that must be asked for by name."""
        if not self.asked.everything:
            return list(protocols)
        refused = {name: catalogue.declaration("evaluations", name, "NOT_IN_ALL", None) for name in protocols}
        for protocol, reason in refused.items():
            if reason is not None:
                say(f"left out {protocol}: {reason}")
        return [protocol for protocol in protocols if refused[protocol] is None]

    def _known(self, protocol: str) -> Result | None:
        """The result that exists already, if that may be taken."""
        if self.asked.again:
            return None
        try:
            context, config = self._context(protocol), self._config(protocol)
        except UserError:  # which is said when its turn comes
            return None
        if not isinstance(context, Context):
            return None
        settings, data = config.model_dump(mode="json"), context.data_of_results
        if any(isinstance(value, str) and Path(value).expanduser().is_file() for value in settings.values()):
            return None  # of a file, only the name would be compared
        like = Result(protocol, settings, data, context.checkpoint, context.seed, {}, 0.0, context.digest)
        return finished(self._earlier, like)

    @cached_property
    def _earlier(self) -> list[Line]:
        """Results of earlier commands, as the main process reads them; other processes may read a moment later."""
        lines: list[Line] = distributed.everyone(Run(home_of(self.asked.run)).results())[0]
        return lines

    def _say_plan(self, protocols: Sequence[str]) -> None:
        """The protocols in order, with how long those will take that train, and all of these."""
        estimates = {protocol: self._seconds(protocol) for protocol in protocols}
        timed = [seconds for seconds in estimates.values() if seconds is not None]
        if len(protocols) < 2 and not timed:
            return
        words = [name if s is None else f"{name} (about {duration(s)})" for name, s in estimates.items()]
        total = f"; in all about {duration(sum(timed))} of training" if len(timed) > 1 else ""
        rough = "; times are rough, from a few steps on random images" if timed else ""
        say(f"in order: {', '.join(words)}{total}{rough}")

    def _seconds(self, protocol: str) -> float | None:
        """Estimated seconds of a protocol that says how much work it is; None of another, and of one that the data do
        not allow."""
        module = catalogue.load("evaluations", protocol)
        if not hasattr(module, "work"):
            return None
        try:
            context = self._context(protocol)
            work = module.work(context, self._config(protocol))
        except UserError:  # which is said when its turn comes
            return None
        if self._pace is None:
            say("timing a few steps of the network, to say how long protocols that train will take")
            self._pace = measure_pace(context)
        return self._pace.seconds(work)

    def _made(self, protocol: str, number: str) -> Result:
        context = self._context(protocol)
        say(f"evaluating {protocol}{number}")
        try:
            digest = context.digest if isinstance(context, Context) else None
            return evaluate_with(context, self.asked.run, protocol, self.asked.given[protocol], digest)
        except NotSaved as error:
            self.unsaved.append(str(error))
            return error.results[0]

    def _config(self, protocol: str) -> Section:
        kind: type[Section] = catalogue.load("evaluations", protocol).Config
        return validate(kind, dict(self.asked.given[protocol]), f"evaluation {protocol}")

    def _context(self, protocol: str) -> Any:
        """The context of a protocol, opened once."""
        opener: Callable[..., Any] = getattr(catalogue.load("evaluations", protocol), "open_context", open_context)
        if opener not in self._contexts:
            asked = self.asked
            if opener is open_context:
                opened = open_context(asked.run, asked.data, asked.cache, asked.bf16, asked.against)
                self._contexts[opener] = quick_look(opened) if asked.quick else opened
            elif "against" in inspect.signature(opener).parameters:
                self._contexts[opener] = opener(asked.run, asked.data, asked.against)
            else:
                if asked.against:
                    say(f"{protocol}: without {', '.join(map(str, asked.against))}, since it compares no other models")
                self._contexts[opener] = opener(asked.run, asked.data)
        return self._contexts[opener]


def quick_look(context: Context) -> Context:
    """Some of the images, spread evenly. Results say so, wherever they go."""

    def some(train: Source, test: Source) -> tuple[Source, Source]:
        return train.limited(QUICK_TRAIN), test.limited(QUICK_TEST)

    reopen, (train, test) = context.reopen, some(context.train, context.test)
    data = context.data | {"train": len(train), "test": len(test), "quick": True}
    again = None if reopen is None else lambda shorter: some(*reopen(shorter))
    return replace(context, train=train, test=test, data=data, reopen=again)
