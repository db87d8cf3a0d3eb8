"""Studies and the runs they expand to: recipes side by side, grids of overrides, seeds, a budget."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from tico_ssl.config import catalogue
from tico_ssl.config.recipe import Recipe, full_key, load_recipe, yaml_text
from tico_ssl.config.section import Section, validate
from tico_ssl.config.yaml_text import dump_yaml, parse_yaml
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.wording import counted

Changes = dict[str, Any]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"  # also a folder name
LONGEST_NAME = 200  # of a run; a file system takes 255 bytes, and endings are added
MOST_RUNS = 10_000


def _usual_protocols() -> dict[str, Changes]:
    return {"knn": {}, "linear": {}, "rankme": {}}


class RunEntry(Section):
    """One run of a study: a recipe and overrides."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of its folder and of its row in the table."""
    recipe: str | None = None
    """A packaged recipe or a YAML file; default: the study's base."""
    overrides: Changes = Field(default_factory=dict)
    """Overrides of the recipe, such as {method.rho: 20.0}."""


class Budget(Section):
    """How long every run trains: a number of epochs or seconds, or the time that one of the runs takes for its epochs.

    Seconds are predicted from a run's step time, measured on an idle machine before anything is trained."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Epochs of every run, or of the run in `epochs_of`."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds of training for every run, rounded to whole epochs, at least one."""
    epochs_of: str | None = None
    """Name of a run: every run trains for the time that this one takes for `epochs`."""

    @model_validator(mode="after")
    def _one_measure(self) -> "Budget":
        if (self.epochs is None) == (self.seconds is None):
            raise ValueError("budget needs either epochs or seconds")
        if self.epochs_of is not None and self.epochs is None:
            raise ValueError("budget.epochs_of needs budget.epochs")
        return self

    @property
    def timed(self) -> bool:
        """Whether runs must be timed before their number of epochs is known."""
        return self.seconds is not None or self.epochs_of is not None


class Halving(Section):
    """Choose among many variants in rounds: the first has short runs of all, each later one longer runs of the best,
    from the start. The last has the study's budget, each earlier one `keep` times that of the next."""

    by: Annotated[str, Field(pattern=r"^\S+ \S+$")] = "linear top1"
    """Protocol and metric by which variants are compared, the mean over seeds."""
    rounds: Annotated[int, Field(ge=2)] = 3
    """Number of rounds."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    """Fraction of the variants that go on to the next round, at least one."""


class Study(Section):
    """Runs to compare: every entry of `runs`, at every point of `grid`, with every seed."""

    description: str = ""
    """The question of the study, and the expected result."""
    base: str = "demo"
    """Default recipe of the runs."""
    overrides: Changes = Field(default_factory=dict)
    """Overrides for all runs, applied before those of a run and of the grid."""
    runs: list[RunEntry] = Field(default_factory=list)
    """Recipes to compare; default: the base alone."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Values by recipe key, in all combinations: {method.rho: [4.0, 8.0], method.beta: [0.9, 0.99]}."""
    seeds: list[Annotated[int, Field(ge=0)]] = Field(default_factory=lambda: [0], min_length=1)
    """Every run is repeated with each seed."""
    protocols: dict[str, Changes] = Field(default_factory=_usual_protocols)
    """Evaluations with their settings, such as {knn: {}, linear: {iterations: 200}}, or a list of names."""
    budget: Budget | None = None
    """Equal length for all runs; default: the epochs of each recipe."""
    halving: Halving | None = None
    """Choose in rounds instead of training every variant for the whole budget; set data.held_out, to choose by other
    images than the test images."""

    @field_validator("protocols", mode="before")
    @classmethod
    def _names_alone(cls, given: Any) -> Any:
        if isinstance(given, list):
            return {str(name): {} for name in given}
        return {name: settings or {} for name, settings in given.items()} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _each_setting_once(self) -> "Study":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, got {self.seeds}")
        if self.halving is not None and self.budget is None:
            raise ValueError("halving needs a budget, that of its last round")
        if self.halving is not None and (protocol := self.halving.by.split()[0]) not in self.protocols:
            raise ValueError(f"halving.by: {protocol} is not among the protocols")
        for changes in (self.overrides, self.grid, *(run.overrides for run in self.runs)):
            if "training.seed" in changes:
                raise ValueError("training.seed is set by 'seeds'")
            if "training.epochs" in changes and self.budget is not None:
                raise ValueError("training.epochs is set by 'budget'")
        return self


@dataclass(frozen=True)
class Variant:
    """A recipe with its overrides: one row of the table, one run per seed."""

    name: str
    recipe: str
    changes: Changes

    def load(self, seed: int = 0, epochs: int | None = None) -> Recipe:
        """Its recipe, checked."""
        try:
            return load_recipe(self.recipe, self.with_seed(seed, epochs))
        except UserError as error:
            raise UserError(f"run {self.name}: {error}") from error

    def with_seed(self, seed: int, epochs: int | None) -> Changes:
        """All overrides of the recipe; without `epochs` it keeps its own."""
        return self.changes | {"training.seed": seed} | ({} if epochs is None else {"training.epochs": epochs})


@dataclass(frozen=True)
class Job:
    """A variant with a seed: one run folder."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return f"{self.variant.name}-seed{self.seed}"


def expand(study: Study) -> list[Variant]:
    """The variants of a study in the order of its table: by run, then by grid point, the last key varying fastest."""
    entries: list[RunEntry | None] = [*study.runs] or [None]
    count = len(entries) * math.prod(map(len, study.grid.values())) * len(study.seeds)
    if count > MOST_RUNS:
        raise UserError(
            f"the study has {counted(count, 'run')}: a grid in which every value meets every other grows quickly"
        )
    variants = [
        Variant(_named(run, point), (run.recipe if run else None) or study.base, _changes(study, run, point))
        for run in entries
        for point in _points(study.grid)
    ]
    for name, count in Counter(variant.name for variant in variants).items():
        if count > 1:
            raise UserError(f"the study has {counted(count, 'run')} called '{name}'")
        if len(name) > LONGEST_NAME:
            raise UserError(f"the name of run '{name[:40]}...' is longer than {LONGEST_NAME} characters")
    reference = study.budget.epochs_of if study.budget else None
    if reference is not None and reference not in (names := [variant.name for variant in variants]):
        raise UserError(f"budget.epochs_of: no run is called '{reference}'{suggestion(reference, names)}")
    return variants


def jobs(study: Study, only: list[str] | None = None) -> list[Job]:
    """The runs of a study, or `only` those with these names (with or without the seed)."""
    every = [Job(variant, seed) for variant in expand(study) for seed in study.seeds]
    for name in only or []:
        names = {known for job in every for known in (job.name, job.variant.name)}
        if name not in names:
            raise UserError(f"no run of the study is called '{name}'{suggestion(name, names)}")
    return [job for job in every if not only or job.name in only or job.variant.name in only]


def _points(grid: Mapping[str, list[Any]]) -> list[Changes]:
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def _changes(study: Study, run: RunEntry | None, point: Changes) -> Changes:
    return _in_turn(study.overrides, run.overrides if run else {}, point)


def _in_turn(*parts: Mapping[str, Any]) -> Changes:
    """Overrides in the order in which they are applied; a repeated key takes the position of its last occurrence."""
    changes: Changes = {}
    for key, value in (item for part in parts for item in part.items()):
        changes.pop(key, None)
        changes[key] = value
    return changes


def _named(run: RunEntry | None, point: Changes) -> str:
    """tico-rho-8-beta-0.9: the run, then the last part of each grid key, or the whole key if that is ambiguous."""
    last = Counter(key.split(".")[-1] for key in point)
    words = [run.name] if run else []
    for key, value in point.items():
        short = key.split(".")[-1]
        words.append(f"{_in_words(short if last[short] == 1 else key)}-{_in_words(value)}")
    return "-".join(words) or "base"


def _in_words(value: Any) -> str:
    """A key or a value as part of a folder's name."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-") or "none"


def check(study: Study, variants: list[Variant]) -> None:
    """Check every recipe and every protocol, before anything runs."""
    for name in study.protocols:
        protocol_settings(study, name)
    for variant in variants:
        variant.load()


def protocol_settings(study: Study, name: str) -> dict[str, Any]:
    """All settings of a protocol, as its results record them."""
    config: type[Section] = catalogue.declaration("evaluations", name, "Config")
    return validate(config, study.protocols[name], f"protocol {name}").model_dump(mode="json")


def packaged_studies() -> list[str]:
    """The names of the studies that come with the package."""
    folder = resources.files("tico_ssl") / "recipes" / "studies"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_study(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Study:
    """A packaged study or a YAML file, with overrides for all its runs."""
    text, where = yaml_text(str(name), "study", "recipes/studies", packaged_studies())
    values = parse_yaml(text, where)
    if not isinstance(values, dict):
        raise UserError(f"{where}: a study is a mapping (see `tico describe methods-textures`)")
    study = validate(Study, values, where)
    return validate(Study, _changed(study, overrides), where) if overrides else study


def _changed(study: Study, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A study with further overrides for all its runs, applied after those of the runs."""
    of_runs = {full_key(*item) for run in study.runs for item in run.overrides.items()}
    for key, value in overrides.items():
        if full_key(key, value) in of_runs or any(_touches(key, other) for other in study.grid):
            raise UserError(f"{key} differs between the runs of this study, so it cannot be one value for all")
    runs = [run.model_dump() | {"overrides": _in_turn(run.overrides, overrides)} for run in study.runs]
    return study.model_dump() | {"overrides": _in_turn(study.overrides, overrides), "runs": runs}


def _touches(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def dump_study(study: Study) -> str:
    """The study as YAML, itself a valid study."""
    return dump_yaml(study.model_dump(mode="json"))
