"""Studies: which runs a file makes, what a budget buys, what is done again and what is not, and what the table says."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

from tico_ssl import pretrain
from tico_ssl.cli import app, main
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import dump_recipe, load_recipe, packaged_recipes
from tico_ssl.config.study import Budget, Study, Variant, check, expand, jobs, load_study, packaged_studies
from tico_ssl.report import report
from tico_ssl.results.comparison import read_comparison
from tico_ssl.results.reading import read_records
from tico_ssl.results.record import step_seconds
from tico_ssl.results.run_folder import Run, create_run
from tico_ssl.results.statistics import Spread
from tico_ssl.results.verdict import collapse_verdict
from tico_ssl.runtime.errors import UserError
from tico_ssl.studies import Workshop, processes, study, table, timing
from tico_ssl.studies import cost as costs
from tico_ssl.studies.cost import Cost, epochs_for
from tico_ssl.studies.halving import budgets
from tico_ssl.studies.processes import Work, environment_of, run_all
from tico_ssl.studies.table import Measured, Summary, columns, row_of
from tico_ssl.studies.worker import make_run
from tiny import TINY


def written(folder, **values) -> str:
    """A study in a file."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(path)


def error_of(*words: str, capsys) -> str:
    """The one line that a command ends with."""
    with mock.patch.object(sys, "argv", ["tico", *words]), pytest.raises(SystemExit) as stopped:
        main()
    line = capsys.readouterr().err
    assert stopped.value.code == 2
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


# ---------------------------------------------------------------------------------------------------- which runs


def names(**values) -> list[str]:
    return [job.name for job in jobs(Study(**values))]


def test_a_study_without_runs_is_its_base():
    assert names() == ["base-seed0"]
    assert expand(Study(base="cifar10/tico"))[0].recipe == "cifar10/tico"


def test_runs_seeds_and_grid_are_all_combined():
    assert names(runs=[{"name": "a"}, {"name": "b"}], seeds=[3, 1]) == ["a-seed3", "a-seed1", "b-seed3", "b-seed1"]
    grid = {"method.rho": [4.0, 8.0], "method.beta": [0.9]}
    assert names(grid=grid) == ["rho-4-beta-0.9-seed0", "rho-8-beta-0.9-seed0"]
    assert names(runs=[{"name": "a"}, {"name": "b"}], grid=grid)[2] == "b-rho-4-beta-0.9-seed0"
    assert len(names(runs=[{"name": "a"}, {"name": "b"}], grid={"x.y": [1, 2, 3], "x.z": [1, 2]}, seeds=[0, 1])) == 24


def test_names_of_a_grid_are_names_of_folders():
    assert names(grid={"backbone.name": ["timm/a b", None]}) == ["name-timm-a-b-seed0", "name-None-seed0"]
    assert names(grid={"a.lr": [1], "b.lr": [2]}) == ["a.lr-1-b.lr-2-seed0"]
    with pytest.raises(UserError, match="2 runs called 'x-a-b'"):
        expand(Study(grid={"x": ["a b", "a-b"]}))


def test_later_changes_win():
    given = Study(
        overrides={"method.rho": 1.0, "data.limit": 100, "method.beta": 0.1},
        runs=[{"name": "a", "recipe": "photos", "overrides": {"method.rho": 2.0, "method.beta": 0.2}}, {"name": "b"}],
        grid={"method.rho": [3.0]},
    )
    a, b = expand(given)
    assert (a.recipe, a.changes) == ("photos", {"method.rho": 3.0, "data.limit": 100, "method.beta": 0.2})
    assert (b.recipe, b.changes) == ("demo", {"method.rho": 3.0, "data.limit": 100, "method.beta": 0.1})
    loaded = b.load(seed=5, epochs=7)
    assert (loaded.training.seed, loaded.training.epochs) == (5, 7)
    assert b.load().training.epochs == load_recipe("demo").training.epochs


def test_a_change_of_a_part_follows_the_change_of_the_whole():
    """The run's method takes the place of the study's, its rho included; words of a command come last."""
    given = Study(
        overrides={"method": {"rho": 1.0}, "method.rho": 2.0}, runs=[{"name": "a", "overrides": {"method": {}}}]
    )
    assert expand(given)[0].load().method.rho == 8.0


def test_words_of_a_command_are_for_all_runs_and_come_last(tmp_path):
    runs = [{"name": "a", "overrides": {"method": {"rho": 3.0}}}, {"name": "b"}]
    file = written(tmp_path, overrides={"method.beta": 0.5}, runs=runs)
    given = load_study(file, {"method.beta": 0.25, "data.limit": 50})
    loaded = [variant.load() for variant in expand(given)]
    assert [(recipe.method.rho, recipe.method.beta, recipe.data.limit) for recipe in loaded] == [
        (3.0, 0.25, 50),
        (8.0, 0.25, 50),
    ]
    for key in ("method", "method.rho.x"):
        with pytest.raises(UserError, match="differs between the runs"):
            load_study(written(tmp_path, grid={"method.rho": [1.0]}), {key: 1})
    assert load_study(written(tmp_path, grid={"method.rho": [1.0]}), {"method.rhos": 1}).overrides == {"method.rhos": 1}


def test_some_runs_alone():
    given = Study(runs=[{"name": "a"}, {"name": "b"}], seeds=[0, 1])
    assert [job.name for job in jobs(given, ["b"])] == ["b-seed0", "b-seed1"]
    assert [job.name for job in jobs(given, ["b-seed1", "a-seed0"])] == ["a-seed0", "b-seed1"]
    with pytest.raises(UserError, match="no run of the study is called 'a-seed7'; did you mean 'a-seed"):
        jobs(given, ["a-seed7"])


def test_protocols_as_names_or_with_settings():
    assert Study(protocols=["knn"]).protocols == {"knn": {}}
    assert Study(protocols={"knn": None, "linear": {"iterations": 3}}).protocols["linear"] == {"iterations": 3}


# ---------------------------------------------------------------------------------------------------- packaged


@pytest.mark.parametrize("name", packaged_studies())
def test_every_packaged_study_is_right(name):
    given = load_study(name)
    assert given.description
    check(given, expand(given))
    assert name not in packaged_recipes()


@pytest.mark.parametrize("name", ["methods-textures", "methods-cifar10"])
def test_every_method_is_compared(name):
    recipes = [variant.load() for variant in expand(load_study(name))]
    assert {recipe.method.name for recipe in recipes} == set(catalogue.entries("methods"))
    assert len({recipe.backbone.name for recipe in recipes}) == 1
    for recipe in recipes:
        keys = getattr(recipe.method, "queue", 0) or getattr(recipe.method, "bank", 0)
        assert keys % (recipe.training.batch_size * (1 + getattr(recipe.method, "symmetric", False))) == 0


def test_the_papers_table_has_its_rows():
    views = [variant.load().views for variant in expand(load_study("paper-augmentations"))]
    assert [pair[0].greyscale for pair in views] == [0.2, 0.0, 0.0, 0.0, 0.0]
    assert [pair[0].jitter for pair in views] == [0.8, 0.8, 0.0, 0.0, 0.0]
    assert [pair[0].blur for pair in views] == [1.0, 1.0, 1.0, 1.0, 0.0]


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run": []}, "unknown key 'run'; did you mean 'runs'?"),
        ({"runs": [{"name": "a", "override": {}}]}, "unknown key 'runs.0.override'; did you mean 'overrides'?"),
        ({"runs": [{"name": "a/b"}]}, "'runs.0.name'"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "2 runs called 'a'"),
        ({"seeds": [1, 1]}, "seeds must differ"),
        ({"seeds": []}, "'seeds'"),
        ({"grid": {"method.rho": []}}, "'grid.method.rho'"),
        ({"overrides": {"training.seed": 1}}, "training.seed is set by 'seeds'"),
        ({"budget": {"epochs": 2}, "grid": {"training.epochs": [1]}}, "training.epochs is set by 'budget'"),
        ({"budget": {}}, "either epochs or seconds"),
        ({"budget": {"epochs": 2, "seconds": 2.0}}, "either epochs or seconds"),
        ({"budget": {"seconds": 2.0, "epochs_of": "base"}}, "epochs_of needs budget.epochs"),
        ({"budget": {"epochs": 2, "epochs_of": "bas"}}, "no run is called 'bas'; did you mean 'base'?"),
        ({"runs": [{"name": "a", "recipe": "cifar10/tic"}]}, "run a: no recipe is called 'cifar10/tic'; did you mean"),
        (
            {"runs": [{"name": "ok"}, {"name": "a", "overrides": {"method.roh": 1.0}}]},
            "run a: recipe demo: unknown key",
        ),
        ({"protocols": ["kn"]}, "no evaluation is called 'kn'; did you mean 'knn'?"),
        ({"protocols": {"linear": {"iteration": 3}}}, "protocol linear: unknown key 'iteration'; did you mean"),
    ],
)
def test_bad_studies_are_one_line_before_anything_runs(tmp_path, capsys, values, said):
    file = written(tmp_path, **values)
    assert said in error_of("study", file, "--out", str(tmp_path / "out"), capsys=capsys)
    assert not (tmp_path / "out").exists()


def test_a_network_that_does_not_exist_is_refused_before_any_run_begins(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(processes, "run_all", lambda *_: pytest.fail("something has begun"))
    for name, said in [
        ("resnet50", "run b: recipe demo: backbone.name 'resnet50' must be library/model"),
        ("torchvision/resnet51", "run b: backbone.name: torchvision has no model 'resnet51'; did you mean"),
        ("tico/resnet10-w", "run b: backbone.name"),
    ]:
        runs = [{"name": "a"}, {"name": "b", "overrides": {"backbone.name": name}}]
        given = {key: value for key, value in tiny.items() if key != "backbone.name"}
        with pytest.raises(UserError, match=re.escape(said)):
            study(written(tmp_path, overrides=given, runs=runs), out=tmp_path / "out", side_by_side=1)
    assert not any((tmp_path / "out").glob("*/*"))


@pytest.mark.parametrize(
    ("of_runs", "for_all"), [("backbone", "backbone.name"), ("backbone.name", "backbone"), ("data", "data.source")]
)
def test_words_for_all_runs_do_not_replace_what_runs_differ_in_however_it_is_written(of_runs, for_all, tmp_path):
    file = written(tmp_path, runs=[{"name": name, "overrides": {of_runs: name}} for name in "ab"])
    with pytest.raises(UserError, match="differs between the runs"):
        load_study(file, {for_all: "c"})


def test_a_folder_of_other_things_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    for out in ("", "."):
        line = error_of("study", "mine.yaml", "--out", out, capsys=capsys)
        assert "exists and is not the folder of a study (it has no study.yaml): choose another --out" in line
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    create_run(tmp_path / "out" / "base-seed0", load_recipe("demo"), overwrite=False)
    Workshop.open("mine.yaml", out="out")


def test_bad_words_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'methods-textures'?" in error_of("study", "methods-texture", capsys=capsys)
    assert "there is no study file x.yaml" in error_of("study", "x.yaml", capsys=capsys)
    assert "which study?" in error_of("study", "a.b=1", capsys=capsys)
    assert "no run of the study is called 'ticos'" in error_of(
        "study", "methods-textures", "--only", "ticos", capsys=capsys
    )
    assert "method.rho differs between the runs" in error_of("study", "cifar10-rho", "method.rho=1.0", capsys=capsys)
    assert "training.epochs is set by 'budget'" in error_of(
        "study", "methods-textures", "training.epochs=1", capsys=capsys
    )
    (tmp_path / "list.yaml").write_text("- a\n")
    assert "a study is a mapping" in error_of("study", "list.yaml", capsys=capsys)
    assert not (tmp_path / "runs").exists()


def test_studies_are_listed_and_described(tmp_path):
    listed = CliRunner().invoke(app, ["list", "studies"]).output
    assert all(name in listed for name in packaged_studies())
    text = CliRunner().invoke(app, ["describe", "methods-textures"]).output
    (tmp_path / "described.yaml").write_text(text)
    assert load_study(tmp_path / "described.yaml") == load_study("methods-textures")


# ---------------------------------------------------------------------------------------------------- budgets


def costing(seconds_per_step: float, steps: int = 10, recipe: str = "") -> Cost:
    return Cost(seconds_per_step, steps, 100, "CPU", 1, recipe)


def test_what_a_budget_buys():
    """An epoch of a takes 1 s, of b 2 s, of c 0.3 s, of d 50 s."""
    known = {"a": costing(0.1), "b": costing(0.2), "c": costing(0.03), "d": costing(0.5, 100)}
    variants = {name: Variant(name, "demo", {}) for name in known}

    def bought(budget: Budget | None) -> list[int | None]:
        return [epochs_for(budget, variant, known) for variant in variants.values()]

    assert bought(None) == [None] * 4
    assert bought(Budget(epochs=7)) == [7] * 4
    assert bought(Budget(seconds=6.0)) == [6, 3, 20, 1]
    assert bought(Budget(epochs=60, epochs_of="a")) == [60, 30, 200, 1]
    assert bought(Budget(epochs=60, epochs_of="b")) == [120, 60, 400, 2]


def test_a_cost_is_measured_kept_and_forgotten_with_its_recipe(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.05)
    (tmp_path / "costs").mkdir()
    variant = Variant("a", "demo", tiny)
    costs.write_cost(tmp_path, variant, timing.measure(variant.load()))
    cost = costs.read_cost(tmp_path, variant)
    assert cost is not None
    assert (cost.steps_per_epoch, cost.batch_size, cost.threads) == (96 // 32, 32, 1)
    assert cost.epoch_seconds == pytest.approx(3 * cost.seconds_per_step)
    assert cost.images_per_second == pytest.approx(32 / cost.seconds_per_step)
    assert costs.read_cost(tmp_path, Variant("a", "demo", tiny | {"training.epochs": 50})) == cost
    assert costs.read_cost(tmp_path, Variant("a", "demo", tiny | {"training.knn_every_epochs": 3})) == cost
    assert costs.read_cost(tmp_path, Variant("a", "demo", tiny | {"training.batch_size": 16})) is None
    assert costs.read_cost(tmp_path, Variant("b", "demo", tiny)) is None
    rates = {"optimizer.lr": 0.5, "method.rho": 3.0, "method.beta": 0.5}
    assert costs.read_cost(tmp_path, Variant("a", "demo", tiny | rates)) == cost
    assert costs.read_cost(tmp_path, Variant("a", "demo", tiny | {"method.rho": 0.0})) is None  # may save work
    alike, wider = Variant("b", "demo", tiny | rates), Variant("c", "demo", tiny | {"method.dim": 64})
    assert costs.read_costs(tmp_path, [alike, variant, wider]) == {"a": cost, "b": cost}


def test_a_study_that_goes_on_has_the_epochs_it_began_with(tmp_path, tiny):
    """Costs are kept: 12 s at 0.5 s a step and 3 steps an epoch are 8 epochs."""
    del tiny["training.epochs"]
    file = written(tmp_path, overrides=tiny, budget={"seconds": 12.0})
    out = tmp_path / "out"
    workshop = Workshop.open(file, out=out)
    (job,) = jobs(workshop.study)
    assert not workshop.timed(job.variant)
    recipe = dump_recipe(job.variant.load())
    (out / "costs").mkdir(parents=True)
    (out / "costs" / "base.json").write_text(json.dumps(vars(costing(0.5, 3, recipe))))
    workshop = Workshop.open(file, out=out)
    assert workshop.epochs(job.variant) == 8


# ---------------------------------------------------------------------------------------------------- halving


def test_rounds_grow_to_the_whole_budget():
    def rounds(**budget) -> list[Budget]:
        return budgets(Study(budget=budget, halving={"keep": 0.25, "rounds": 3}))

    assert [one.epochs for one in rounds(epochs=100)] == [6, 25, 100]
    assert [one.seconds for one in rounds(seconds=80.0)] == [5.0, 20.0, 80.0]
    assert [one.epochs for one in rounds(epochs=2)] == [1, 1, 2]


@pytest.fixture(scope="module")
def halved(tmp_path_factory) -> tuple[dict, Path]:
    """A study of two rounds that is done, and its folder."""
    settings = {key: value for key, value in TINY.items() if key != "training.epochs"} | {"data.held_out": 0.25}
    values = {"overrides": settings, "grid": {"optimizer.lr": [1e-4, 3e-4, 1e-3]}, "budget": {"epochs": 2}}
    values |= {"protocols": ["knn"], "halving": {"by": "knn top1_k20", "rounds": 2, "keep": 0.34}}
    folder = tmp_path_factory.mktemp("halved")
    study(written(folder, **values), out=folder / "out", side_by_side=1)
    return values, folder / "out"


def test_the_best_of_each_round_go_on(halved):
    """Three variants, then one; the same command does nothing again."""
    values, out = halved
    story = json.loads((out / "halving.json").read_text())
    assert [len(one["ranking"]) for one in story] == [3, 1]
    for earlier, later in pairwise(story):
        numbers = dict(earlier["ranking"])
        assert min(numbers[name] for name in earlier["kept"]) >= max(
            number for name, number in numbers.items() if name not in earlier["kept"]
        )
        assert {name for name, _ in later["ranking"]} == set(earlier["kept"])
    times = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    summary = study(written(out.parent, **values), out=out, side_by_side=1)
    assert [row.run for row in summary.rows if row.seeds] == [story[-1]["ranking"][0][0]]
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert len(times) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overrides": {"method.rho": 50.0}}, "lr-0.0001-seed0 was made by another study: method.rho was 8.0, is 50.0"),
        ({"budget": {"epochs": 6}}, "budget.epochs was 2, is 6"),
        ({"halving": {"rounds": 3}}, "halving.rounds was 2, is 3"),
        ({"halving": {"keep": 0.4}}, "halving.keep was 0.34, is 0.4"),
        ({"halving": {"by": "knn top1_k200"}}, "halving.by was knn top1_k20, is knn top1_k200"),
        ({"halving": None}, "round-2 was made by another study: halving.by was knn top1_k20, is None"),
    ],
)
def test_rounds_are_not_taken_for_those_of_other_settings(change, said, halved, tmp_path):
    """Also where a change leaves the epochs of every round as they were."""
    values, out = halved
    ((key, value),) = change.items()
    new = values | {key: values[key] | value if isinstance(value, dict) else value}
    table = (out / "round-2" / "results.csv").read_bytes()
    with pytest.raises(UserError) as refused:
        study(written(tmp_path, **new), out=out, side_by_side=1)
    assert said in str(refused.value)
    assert str(refused.value).endswith("; choose another out=")
    assert (out / "round-2" / "results.csv").read_bytes() == table


def test_the_folder_of_a_study_in_rounds_is_a_study(halved, capsys):
    values, out = halved
    kept = json.loads((out / "halving.json").read_text())[0]["kept"]
    assert load_study(out / "study.yaml") == load_study(written(out.parent, **values))
    assert "packages" in json.loads((out / "environment.json").read_text())
    assert [record.run.folder for record in read_records([out])] == [out / "round-2" / f"{name}-seed0" for name in kept]
    assert report(out) == out / "report.html"
    assert kept[0] in (out / "report.html").read_text()
    assert [group.first.run.folder.parent for group in read_comparison([out]).groups] == [out / "round-2"]
    capsys.readouterr()
    words = ["study", str(out.parent / "mine.yaml"), "--out", str(out), "--dry-run"]
    shown = CliRunner().invoke(app, words).output + capsys.readouterr().out
    lines = [" ".join(line.split()[:2]) for line in shown.splitlines()]
    variants = [f"lr-{rate}-seed0 done" for rate in ("0.0001", "0.0003", "0.001")]
    assert lines == ["round 1", *variants, "round 2", f"{kept[0]}-seed0 done"]


def test_rounds_that_are_still_to_come_are_shown(halved, tmp_path, capsys):
    values, _ = halved
    Workshop.open(file := written(tmp_path, **values), out=tmp_path / "out").show_plan(jobs(load_study(file)))
    first, *variants, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("round 1 of 2: 3 variants, 1 epoch", "round 2 of 2: not chosen yet, 2 epochs")
    assert all("not started" in line for line in variants)
    assert not (tmp_path / "out").exists()


def test_a_round_of_a_folder_without_its_study_is_checked_by_its_recipes(halved, tmp_path):
    """As older versions left it."""
    values, out = halved
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "study.yaml").unlink()
    with pytest.raises(UserError, match=r"round-1.*training\.epochs was 1, is 2"):
        study(written(tmp_path, **values | {"budget": {"epochs": 6}}), out=tmp_path / "out")


# ---------------------------------------------------------------------------------------------------- the table


def test_training_seconds_leave_out_what_is_between_steps():
    """10 steps of 20 images at 100 a second, then 5 at 50: 2 s and 2 s."""
    lines = [{"step": 10, "images_per_second": 100.0}, {"step": 15, "images_per_second": 50.0}]
    assert sum(step_seconds(lines, 20)) == pytest.approx(4.0)


def test_mean_and_deviation_over_seeds():
    spread = Spread.of([10.0, 12.0, 17.0])
    assert spread.mean == pytest.approx(13.0)
    assert spread.deviation == pytest.approx(13.0**0.5)  # (9 + 1 + 16) / 2
    assert spread.text() == "13.0 ± 3.6"
    assert Spread.of([7.25]).text() == "7.2"
    assert Spread.of([7.25]).deviation is None


def one(seed: int, knn: float, collapsed: str = "no") -> Measured:
    numbers = {
        "knn": {"trained": {"top1_k20": knn, "top1_k200": 1.0}, "untrained": {"top1_k20": 20.0, "top1_k200": 2.0}},
        "rankme": {"trained": {"rankme": 30.0, "width": 64.0}, "untrained": {"rankme": 40.0, "width": 64.0}},
    }
    results = {name: {"protocol": name, "numbers": found, "data": {"test": 500}} for name, found in numbers.items()}
    return Measured(seed, 8, 12.0 + seed, 1000.0 + 100 * seed, collapsed, results)


@pytest.fixture
def summary(tmp_path) -> Summary:
    rows = [
        row_of(Variant("a", "demo", {"method.rho": 4.0}), 2, [one(0, 50.0), one(1, 60.0, "signs")], {}),
        row_of(Variant("b", "demo", {}), 2, [one(0, 70.0)], {"b-seed1": "the loss became nan"}),
        row_of(Variant("c", "demo", {}), 2, [], {}),
    ]
    machine = {"gpu": None, "processor": "a CPU", "packages": {"torch": "2.11"}}
    return Summary("mine", "What is asked.", tmp_path, {"epochs": 8}, rows, machine)


def test_the_table_that_people_read(summary):
    head, cells = columns(summary.rows)
    assert head[:5] == ["run", "seeds", "epochs", "seconds", "images/s"]
    assert head[5:] == ["knn", "untrained", "gain", "rankme", "untrained", "helped?", "collapsed?"]
    assert cells[0][:5] == ["a", "2", "8", "12", "1,050"]
    over_seeds, over_images = "+35.0 [+24.3, +45.3]", "+50.0 [+44.4, +55.1]"  # what two span, and one, on 500 images
    assert cells[0][5:8] == ["55.0 ± 7.1", "20.0 ± 0.0", over_seeds]
    assert cells[0][8:] == ["30.0 ± 0.0", "40.0 ± 0.0", "helped", "1 no, 1 signs"]
    assert cells[1][:7] == ["b", "1 of 2", "8", "12", "1,000", "70.0", "20.0"]
    assert cells[1][7:] == [over_images, "30.0", "40.0", "helped", "failed"]
    assert cells[2] == ["c", "0 of 2", *[""] * 10]
    text = table.as_markdown(summary)
    assert "- b-seed1: the loss became nan" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5
    assert {line.count("|") for line in rows} == {len(head) + 1}


def test_the_tables_that_programs_read(summary):
    table.write(summary)
    lines = list(csv.DictReader(io.StringIO((summary.folder / "results.csv").read_text())))
    assert [line["run"] for line in lines] == ["a", "b", "c"]
    assert float(lines[0]["knn_top1_k20_trained_mean"]) == 55.0
    assert float(lines[0]["knn_top1_k20_trained_deviation"]) == pytest.approx(50**0.5)
    assert (lines[1]["knn_top1_k20_trained_deviation"], lines[1]["failed"]) == ("", "the loss became nan")
    assert json.loads(lines[0]["changes"]) == {"method.rho": 4.0}
    values = json.loads((summary.folder / "results.json").read_text())
    assert values["rows"][0]["numbers"]["knn"]["top1_k20"]["trained"]["values"] == [50.0, 60.0]
    assert values["rows"][0]["seconds"] == 12.5
    assert values["rows"][1]["helped"] == lines[1]["helped"] == "helped"
    assert values["rows"][1]["verdict"].startswith("Pretraining helped: knn top1_k20 70.0 % against 20.0 % untrained")
    assert values["environment"]["packages"]["torch"] == "2.11"


def test_the_verdict_on_collapse():
    better, alike, worse = (
        [
            {
                "protocol": "knn",
                "numbers": {"trained": {"top1_k20": trained}, "untrained": {"top1_k20": 30.0}},
                "data": {"test": 1_000},
            }
        ]
        for trained in (50.0, 30.5, 20.0)
    )
    healthy, sick = {"loss": 1.0, "mean_cosine": 0.1}, {"loss": 1.0, "mean_cosine": 0.99}
    cases = (better, alike, worse, [])
    assert [collapse_verdict(healthy, lines) for lines in cases] == ["no", "no", "worse", "no"]
    assert [collapse_verdict(sick, lines) for lines in cases] == ["signs", "yes", "yes", "yes"]


# ---------------------------------------------------------------------------------------------------- processes


def test_processes_share_threads_workers_and_gpus():
    changed = environment_of(0, 3, {"HOME": "x"}, threads=8, devices=1)
    assert changed == {"HOME": "x", "OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "3"}
    assert environment_of(0, 4, {}, threads=2, devices=0)["OMP_NUM_THREADS"] == "1"
    seen = [environment_of(slot, 3, {}, 8, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert seen == ["0", "1", "0"]
    assert environment_of(1, 2, {"CUDA_VISIBLE_DEVICES": "5,7"}, 8, 2)["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Works that run lines of Python."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, *lines: str) -> Work:
        (tmp_path / f"work_{name}.py").write_text("\n".join(lines) + "\n")
        return Work(name, (f"work_{name}",), tmp_path / f"{name}.log", 1, lambda: 0.0, lambda: "well")

    return make


def test_failures_are_said_in_a_line_and_stop_nobody(script, capsys):
    works = [
        script("a", "import sys; sys.stderr.write('error: too warm\\n'); sys.exit(2)"),
        script("b", "1 / 0"),
        script("c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        script("d", "import sys; sys.exit(3)"),
        script("e", "print('fine')"),
    ]
    assert run_all(works, 2, 2, "runs") == {
        "a": "too warm",
        "b": "ZeroDivisionError: division by zero",
        "c": "ended by SIGKILL (out of memory?)",
        "d": "ended with exit code 3",
    }
    assert "5/5" in capsys.readouterr().out


def test_no_more_than_asked_for_at_a_time(script, tmp_path):
    note = "open('times', 'a').write(f'{time.monotonic()} {change}\\n')"
    lines = ("import time", f"for change in (1, -1): {note}; time.sleep(0.3 * (change > 0))")
    with mock.patch.object(subprocess, "Popen", wraps=subprocess.Popen) as started:
        works = [script(f"w{i}", "import os; os.chdir(os.path.dirname(__file__))", *lines) for i in range(4)]
        assert run_all(works, 2, 2, "runs") == {}
    assert started.call_count == 4
    changes = sorted(line.split() for line in (tmp_path / "times").read_text().splitlines())
    at_work = [sum(int(change) for _, change in changes[: i + 1]) for i in range(len(changes))]
    assert max(at_work) == 2
    assert at_work[-1] == 0


def test_a_stop_is_passed_on_and_waited_for(script, tmp_path, monkeypatch):
    polite = (
        "import pathlib, signal, sys, time",
        "here = pathlib.Path(__file__).parent",
        "def stop(*_): time.sleep(0.3); (here / 'saved').write_text('x'); sys.exit(130)",
        "signal.signal(signal.SIGTERM, stop)",
        "(here / 'ready').write_text('x')",
        "time.sleep(60)",
    )
    sleep = time.sleep

    def interrupt_when_ready(seconds):
        sleep(seconds)
        if (tmp_path / "ready").exists():
            os.kill(os.getpid(), signal.SIGTERM)  # a scheduler's warning, to the study

    monkeypatch.setattr(processes.time, "sleep", interrupt_when_ready)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_all([script("a", *polite), script("b", "raise SystemExit(1)")], 1, 1, "runs")
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "b.log").exists()
    assert signal.getsignal(signal.SIGTERM) == before


# ---------------------------------------------------------------------------------------------------- from end to end

QUICK = {"protocols": {"knn": {"voters": [{"k": 5, "temperature": 0.1}]}}}


def test_a_failure_leaves_the_others_alone_and_is_tried_again(tmp_path, tiny, monkeypatch):
    del tiny["training.epochs"]
    runs = [{"name": "bad", "overrides": {"training.batch_size": 200}}, {"name": "good"}]
    file = written(tmp_path, overrides=tiny, runs=runs, budget={"epochs": 2}, **QUICK)
    out = tmp_path / "out"
    outcome = CliRunner().invoke(app, ["study", file, "--out", str(out), "--side-by-side", "1"])
    assert outcome.exit_code == 1
    bad_row, good_row = json.loads((out / "results.json").read_text())["rows"]
    assert bad_row["failed"] == {"bad-seed0": "training.batch_size 200 is larger than the 96 images of textures"}
    assert (good_row["failed"], good_row["seeds"], good_row["epochs"]) == ({}, [0], 2)
    line = Run(out / "good-seed0").results()[0]
    assert good_row["numbers"]["knn"]["top1_k5"]["trained"]["mean"] == line["numbers"]["trained"]["top1_k5"]
    assert load_study(out / "study.yaml").runs[1].name == "good"

    tried = []
    monkeypatch.setattr(processes, "run_all", lambda works, *_: tried.extend(work.name for work in works) or {})
    study(file, out=out, side_by_side=1)
    assert tried == ["bad-seed0"]
    shutil.move(Run(out / "good-seed0").backbone_file, tmp_path)  # weights are large: the rest may be kept without them
    study(file, out=out, side_by_side=1, only=["good"])
    assert tried == ["bad-seed0"]
    assert json.loads((out / "results.json").read_text())["rows"][1] == good_row
    more = yaml.safe_load((tmp_path / "mine.yaml").read_text()) | {"protocols": ["knn"]}
    study(written(tmp_path, **more), out=out, side_by_side=1, only=["good"])  # other settings of a protocol
    assert tried == ["bad-seed0", "good-seed0"]
    with pytest.raises(UserError, match=r"training\.epochs was 2, is 3"):
        study(written(tmp_path, **more | {"budget": {"epochs": 3}}), out=out)


def test_a_killed_study_goes_on_to_the_same_bits(tmp_path, tiny):
    """SIGKILL leaves the study no time for anything: its run notices, writes a checkpoint and ends."""
    del tiny["training.epochs"]
    file = written(tmp_path, overrides=tiny, budget={"epochs": 24}, **QUICK)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tico_ssl", "study", file, "--out", str(out), "--side-by-side", "1"]
    first = Run(out / "base-seed0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(first.metrics()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()

    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "runs 1/1  base-seed0: done" in again.stdout
    assert (first.folder / "train.log").read_text().count("continuing after step") == 1
    whole = pretrain("demo", out=tmp_path / "whole", overrides=tiny | {"training.epochs": 24})
    assert first.backbone_file.read_bytes() == whole.backbone_file.read_bytes()
    row = json.loads((out / "results.json").read_text())["rows"][0]
    assert (row["seeds"], row["epochs"]) == ([0], 24)
    assert row["seconds"] > 0


def test_a_trained_run_without_its_metrics_is_a_failure_and_not_passed_over(tmp_path, tiny):
    out = tmp_path / "out"
    Workshop.open(written(tmp_path, overrides=tiny, **QUICK), out=out).begin()
    make_run(out, "base-seed0")
    Run(out / "base-seed0").metrics_file.unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl: ends at epoch 0 of 3, though .*; remove"):
        make_run(out, "base-seed0")


def test_a_plan_is_shown_and_nothing_is_written(tmp_path, tiny, capsys):
    del tiny["training.epochs"]
    file = written(tmp_path, overrides=tiny, runs=[{"name": "a"}, {"name": "b"}], budget={"epochs": 2})
    outcome = CliRunner().invoke(app, ["study", file, "--out", str(tmp_path / "out"), "--dry-run"])
    assert outcome.exit_code == 0
    lines = (outcome.output + capsys.readouterr().out).splitlines()
    assert [line.split() for line in lines] == [
        [f"{run}-seed0", "not", "started", "2", "epochs", "demo"] for run in "ab"
    ]
    assert not (tmp_path / "out").exists()
