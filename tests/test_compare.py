"""Several runs as one table: who belongs to one row, mean and deviation, and every form that it is written in."""

import csv
import io
import json
import re
import sys
from unittest import mock

import pytest
from typer.testing import CliRunner

from tico_ssl.cli import app, main
from tico_ssl.config.recipe import dump_recipe, load_recipe
from tico_ssl.results.comparison import compare, comparison_of, read_comparison
from tico_ssl.results.confidence import unpaired_interval
from tico_ssl.results.formats import FORMATS, latex
from tico_ssl.results.reading import read_records
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest


def made_run(folder, knn=None, epoch=2.0, settings=None, gpu=None, **overrides):
    """A run folder as training and an evaluation leave it: 20 steps of 100 images in 10 seconds."""
    (folder / "checkpoints").mkdir(parents=True)
    run = Run(folder)
    changes = {"training.epochs": 2, "training.batch_size": 100, **overrides}
    run.recipe_file.write_text(dump_recipe(load_recipe("demo", changes)))
    (folder / "environment.json").write_text(json.dumps({"gpu": gpu}))
    line = {"step": 20, "epoch": epoch, "loss": 1.0, "images_per_second": 200.0, "data_wait": 0.0, "seconds": 12.0}
    run.metrics_file.write_text(json.dumps(line) + "\n")
    run.backbone_file.write_bytes(b"weights")
    if knn is not None:
        numbers = {"trained": {"top1_k20": knn}, "untrained": {"top1_k20": 10.0}}
        made = {"protocol": "knn", "numbers": numbers, "settings": settings or {}, "seconds": 1.0}
        made["data"] = {"test": 1_000}
        run.results_file.write_text(json.dumps(made | {"checkpoint": digest(run.backbone_file)}) + "\n")
    return folder


def add_result(folder, protocol, numbers, **data):
    """A further result of a made run."""
    run = Run(folder)
    made = {"protocol": protocol, "numbers": numbers, "settings": {}, "data": data, "seconds": 1.0}
    with run.results_file.open("a") as file:
        file.write(json.dumps(made | {"checkpoint": digest(run.backbone_file)}) + "\n")
    return folder


def row(comparison, name) -> dict:
    cells = next(cells for cells in comparison.rows if cells[0].text == name)
    return dict(zip(comparison.head, cells))


@pytest.fixture
def three(tmp_path):
    """Two seeds of one recipe, and another recipe."""
    return [
        made_run(tmp_path / "a-seed0", 60.0, **{"training.seed": 0}),
        made_run(tmp_path / "a-seed1", 64.0, **{"training.seed": 1}),
        made_run(tmp_path / "b_c & d", 50.0, **{"method.rho": 20.0}),
    ]


def test_seeds_of_one_recipe_are_one_row_with_mean_and_deviation(three):
    comparison = comparison_of(read_records(three))
    found = row(comparison, "a")
    assert found["seeds"].text == "2"
    assert found["knn top1_k20"].text == "62.0 ± 2.8"
    assert found["knn top1_k20"].deviation == pytest.approx(8**0.5)  # of 60 and 64: sqrt((4 + 4) / 1)
    assert found["untrained"].value == 10.0
    assert row(comparison, "b_c & d")["knn top1_k20"].text == "50.0"


def test_time_is_that_of_the_steps(three):
    found = row(comparison_of(read_records(three)), "a")
    assert (found["seconds"].value, found["images/s"].value) == (10.0, 200.0)


def test_copies_and_repeats_of_a_seed_are_no_further_seeds(tmp_path):
    """Three copies of a run would otherwise have an interval over seeds, of no width."""
    folders = [made_run(tmp_path / name, 60.0) for name in ("a", "copy", "again")]
    one, three = (comparison_of(read_records(some)) for some in (folders[:1], folders))
    assert [cells[1:] for cells in three.rows] == [cells[1:] for cells in one.rows]
    assert "copy, again: of the same recipe and seed as a, so not counted as further seeds." in three.notes
    assert len(three.groups[0].records) == 3
    more = [*folders, made_run(tmp_path / "other", 64.0, **{"training.seed": 1})]
    (group,) = comparison_of(read_records(more)).groups
    assert group.verdict.seeds == 2
    assert group.number("knn", "top1_k20").values == [60.0, 64.0]


def test_of_repeats_the_complete_run_counts(tmp_path):
    stopped, whole = made_run(tmp_path / "x" / "run", epoch=1.0), made_run(tmp_path / "y" / "run", 60.0)
    comparison = comparison_of(read_records([stopped, whole]))
    assert row(comparison, "run")["seeds"].text == "1"
    assert row(comparison, "run")["knn top1_k20"].text == "60.0"
    assert "x/run: of the same recipe and seed as y/run, so not counted as further seeds." in comparison.notes


@pytest.mark.parametrize(
    "changes",
    [{"training.keep_checkpoints": 3}, {"training.loggers": []}, {"data.store": "none"}, {"training.workers": 3}],
)
def test_settings_that_do_not_affect_weights_make_no_other_recipe(tmp_path, changes):
    folders = [made_run(tmp_path / "a", 60.0), made_run(tmp_path / "b", 61.0, **{"training.seed": 1}, **changes)]
    comparison = comparison_of(read_records(folders))
    assert [cells[2].text for cells in comparison.rows] == ["2"]
    assert comparison.differing_settings() == {}


def test_what_differs_between_recipes_is_found_and_seeds_do_not_differ(three):
    assert comparison_of(read_records(three)).differing_settings() == {"method.rho": [8.0, 20.0]}


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path):
    folders = [made_run(tmp_path / "x" / "run"), made_run(tmp_path / "y" / "run", **{"method.rho": 1.0})]
    assert [cells[0].text for cells in comparison_of(read_records(folders)).rows] == ["x/run", "y/run"]


def test_the_same_run_twice_is_one_run(three):
    assert len(read_records([three[0], three[0]])) == 1


def test_a_study_is_its_runs(tmp_path, three):
    (tmp_path / "study.yaml").write_text("{}")
    assert len(read_records([tmp_path])) == 3


def test_a_study_says_the_order_the_times_and_what_failed(tmp_path):
    """Runs side by side slow each other down: the seconds are those of the study, which has timed each alone."""
    for name, rho in (("a", 1.0), ("b", 2.0)):
        made_run(tmp_path / f"{name}-seed0", **{"method.rho": rho})
    (tmp_path / "study.yaml").write_text("{}")
    rows = [
        {"run": "b", "seconds": 3.0, "images_per_second": 700.0, "failed": {}},
        {"run": "a", "seconds": None, "images_per_second": None, "failed": {"a-seed1": "out of memory"}},
    ]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    comparison = read_comparison([tmp_path])
    assert [cells[0].text for cells in comparison.rows] == ["b-seed0", "a-seed0"]
    assert [cells[4].value for cells in comparison.rows] == [3.0, 10.0]
    assert [cells[5].value for cells in comparison.rows] == [700.0, 200.0]
    assert "a-seed1 failed: out of memory" in comparison.notes


def test_notes_say_what_does_not_compare(tmp_path):
    folders = [
        made_run(tmp_path / "a", 60.0, settings={"k": 20}),
        made_run(tmp_path / "b", 61.0, settings={"k": 200}, gpu="a GPU", **{"method.rho": 1.0}),
        made_run(tmp_path / "c", None, epoch=1.0, **{"method.rho": 2.0}),
    ]
    notes = "\n".join(comparison_of(read_records(folders)).notes)
    assert "knn: not all runs were evaluated with the same settings" in notes
    assert "knn: not measured for c." in notes
    assert "c is in progress: epoch 1 of 2" in notes
    assert "different machines" in notes


def test_without_results_the_table_says_how_to_get_them(tmp_path):
    comparison = comparison_of(read_records([made_run(tmp_path / "a")]))
    assert "untrained" not in comparison.head
    assert any("tico evaluate RUN knn linear rankme" in note for note in comparison.notes)


def test_csv_has_the_numbers_themselves(three):
    lines = list(csv.DictReader(io.StringIO(compare(three, "csv")[1])))
    assert [line["run"] for line in lines] == ["a", "b_c & d"]
    assert float(lines[0]["knn top1_k20"]) == 62.0
    assert float(lines[0]["knn top1_k20 deviation"]) == pytest.approx(8**0.5)
    assert float(lines[0]["knn top1_k20 untrained"]) == 10.0
    assert lines[1]["knn top1_k20 deviation"] == ""


def test_markdown_is_a_table_whatever_names_contain(tmp_path):
    text = compare([made_run(tmp_path / "a|b")], "markdown")[1]
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert r"a\|b" in text


def test_latex_is_booktabs_and_escaped(three):
    text = compare(three, "latex")[1]
    lines = text.splitlines()
    assert lines[0].startswith(r"\begin{tabular}{ll")
    assert [line for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert r"b\_c \& d" in text
    assert r"62.0 $\pm$ 2.8" in text
    cells = [len(re.findall(r"(?<!\\)&", line)) for line in lines if line.endswith(r"\\")]
    assert set(cells) == {len(lines[0].partition("}{")[2].rstrip("}")) - 1}


def test_every_letter_that_latex_takes_for_its_own_is_escaped():
    assert latex(r"\&%$#_{}~^") == r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"


def test_the_suffix_of_the_file_says_the_form(three, tmp_path):
    for suffix, name in ((".md", "markdown"), (".csv", "csv"), (".tex", "latex")):
        file = tmp_path / "new" / f"table{suffix}"
        comparison, _ = compare(three, out=file)
        assert file.read_text() == FORMATS[name](comparison)
    compare(three, "csv", tmp_path / "table.md")  # what is said outright wins
    assert (tmp_path / "table.md").read_text().startswith("run,")


def test_the_command_prints_what_is_asked_for(three, tmp_path):
    words = ["compare", *map(str, three)]
    assert "62.0 ± 2.8" in CliRunner().invoke(app, words).output
    assert CliRunner().invoke(app, [*words, "--format", "csv"]).output == compare(three, "csv")[1]
    told = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "t.tex")]).output
    assert "t.tex" in told
    assert (tmp_path / "t.tex").is_file()


def test_an_unknown_form_is_one_line(three, capsys):
    with pytest.raises(UserError, match="no format is called 'latx'; did you mean 'latex'"):
        compare(three, "latx")
    words = ["tico", "compare", str(three[0]), "--format", "latx"]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------- further columns


def test_the_gain_has_an_interval_over_seeds_or_over_test_images(three):
    """The two seeds gain 50 and 54 over untrained, on 1,000 test images each, and so does the single run 40."""
    comparison = comparison_of(read_records(three))
    several, single = row(comparison, "a"), row(comparison, "b_c & d")
    (low, _), (_, high) = (unpaired_interval(trained, 1000, 0.1, 1000) for trained in (0.6, 0.64))
    assert several["gain"].interval == pytest.approx((100 * low, 100 * high))
    assert single["gain"].text == "+40.0 [+36.3, +43.5]"
    assert (several["helped?"].text, single["helped?"].text) == ("helped", "helped")
    lines = list(csv.DictReader(io.StringIO(compare(three, "csv")[1])))
    assert float(lines[0]["knn top1_k20 gain low"]) == pytest.approx(100 * low)


def test_the_lead_of_the_best_says_whether_it_may_be_chance(tmp_path):
    def recipes(name, values, **changes):
        return [
            made_run(tmp_path / f"{name}-seed{seed}", value, **{"training.seed": seed, **changes})
            for seed, value in enumerate(values)
        ]

    ours, theirs = recipes("a", (60.0, 64.0, 62.0)), recipes("b", (59.0, 63.1, 60.9), **{"method.rho": 1.0})
    (note,) = (note for note in read_comparison([*ours, *theirs]).notes if note.startswith("By "))
    assert note == "By knn top1_k20, a is ahead of b: +1.0 points (95 % interval +0.8 to +1.2, 3 seeds)."
    (note,) = (note for note in read_comparison([ours[0], theirs[0]]).notes if note.startswith("By "))
    assert "95 % interval -3.3 to +5.3, 1,000 test images), so nobody can tell which is better" in note
    (note,) = (note for note in read_comparison([*ours, *theirs[:2]]).notes if note.startswith("By "))
    assert "seeds that are not the same), so nobody can tell" in note


def test_the_metric_of_the_verdict_ranks_the_runs(tmp_path):
    folder = made_run(tmp_path / "a", 60.0)
    add_result(folder, "linear", {"trained": {"top1": 70.0}, "untrained": {"top1": 20.0}}, test=1_000)
    comparison = read_comparison([folder])
    assert str(comparison.headline) == "linear top1"
    assert comparison.head.index("gain") == comparison.head.index("linear top1") + 2
    assert comparison.head.count("gain") == 1


@pytest.fixture
def beside(tmp_path):
    """A run that started from weights and was compared with another model, and one of an older version."""
    first = made_run(tmp_path / "a")
    numbers = {"trained": 60.0, "initial": 55.0, "untrained": 10.0, "resnet50": 70.0, "pixels": 20.0}
    found = {name: {"top1_k20": value, "top1_k200": value - 1} for name, value in numbers.items()}
    add_result(first, "knn", found, source="x", against={"resnet50": {"model": "timm/resnet50=w"}})
    numbers = {"trained": {"rankme": 7.0, "embedding_rankme": 3.0}, "untrained": {"rankme": 2.0}}
    add_result(first, "rankme", numbers, source="x")
    old = {"trained": {"top1_k20": 50.0}, "untrained": {"top1_k20": 11.0}}
    old = add_result(made_run(tmp_path / "b", **{"method.rho": 1.0}), "knn", old, source="x")
    return [first, old]


def test_protocols_that_decide_come_before_others(tmp_path):
    folder = made_run(tmp_path / "a")
    for protocol, numbers in (
        ("alpha-req", {"alpha": 1.4}),
        ("few-shot", {"top1_1shot": 20.0}),
        ("linear", {"top1": 70.0}),
    ):
        add_result(folder, protocol, {"trained": numbers})
    head = read_comparison([folder]).head
    found = [title.split()[0] for title in head if title.startswith(("alpha-req", "few-shot", "linear"))]
    assert found == ["linear", "few-shot", "alpha-req"]


def test_models_beside_the_run_have_columns_and_older_results_leave_them_empty(beside):
    comparison = comparison_of(read_records(beside))
    head = ["knn top1_k20", "initial", "untrained", "resnet50", "gain", "rankme rankme", "untrained", "helped?"]
    assert comparison.head[6:-1] == head
    assert [cells[6:-1] for cells in comparison.texts] == [
        ["60.0", "55.0", "10.0", "70.0", "+5.0", "7.0", "2.0", "cannot tell"],
        ["50.0", "", "11.0", "", "+39.0", "", "", "cannot tell"],  # how many test images is not known
    ]
    assert not any("same data" in note for note in comparison.notes)  # other models beside change no number
    head = next(csv.reader(io.StringIO(compare(beside, "csv")[1])))
    assert {"knn top1_k20 initial", "knn top1_k20 resnet50", "rankme rankme untrained"} <= set(head)


def test_what_was_found_in_the_same_images_does_not_make_them_others(tmp_path):
    runs = []
    for rank in (3.0, 7.0):
        folder = made_run(tmp_path / f"rank-{rank:g}", **{"method.rho": rank})
        numbers = {"trained": {"rank_by_variance": rank, "largest_share": 50.0}}
        runs.append(add_result(folder, "spectrum", numbers, source="x", train=100, spectra={"trained": [rank]}))
    notes = "\n".join(comparison_of(read_records(runs), every=True).notes)
    assert "same data" not in notes
    assert "spectrum largest_share in %" in notes  # and not its ranks
    add_result(runs[1], "spectrum", numbers, source="x", train=50, spectra={"trained": [7.0]})
    assert "spectrum: not all runs were evaluated with the same data" in "\n".join(
        comparison_of(read_records(runs)).notes
    )


def test_every_metric_is_there_if_asked_for(beside, capsys):
    few, every = comparison_of(read_records(beside)), comparison_of(read_records(beside), every=True)
    assert [str(one) for one in few.shown] == ["knn top1_k20", "rankme rankme"]
    added = ["knn top1_k200", "rankme embedding_rankme"]
    assert sorted({str(one) for one in every.shown} - {str(one) for one in few.shown}) == added
    assert (few.left_out, every.left_out) == (2, 0)
    words = ["compare", *map(str, beside)]
    assert "--all shows 2 more metrics" in CliRunner().invoke(app, words).output
    assert "knn top1_k200" in CliRunner().invoke(app, [*words, "--all"]).output


def test_a_wide_table_becomes_several_that_fit(beside):
    text = CliRunner().invoke(app, ["compare", *map(str, beside), "--all"], env={"COLUMNS": "80"}).output
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if line.startswith("| run")]
    assert len(heads) > 1
    assert all(head.count("| knn") <= head.count("| initial") for head in heads)  # what belongs together stays together
    numbers = [cell.strip() for line in lines if line.startswith("| a ") for cell in line.split("|")]
    assert {"60.0", "55.0", "70.0", "59.0", "7.0", "3.0"} <= set(numbers)


# ---------------------------------------------------------------------------------------------------- no runs


def test_what_is_no_run_is_passed_over_and_said_in_one_line(three, tmp_path, capsys):
    (tmp_path / "models").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "study.yaml").write_text("{}")
    others = [tmp_path / name for name in ("models", "notes.txt", "planned")]
    comparison, text = compare([others[0], *three, *others[1:]], "csv")
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert all(str(place) in said.err for place in others)
    assert said.out == ""  # where the table goes
    assert (comparison.rows, text) == (compare(three)[0].rows, compare(three, "csv")[1])
    with pytest.raises(UserError, match="none of these is a run folder"):
        compare(others)
    with pytest.raises(UserError, match="nowhere: not a run folder"):  # a misspelt name is a mistake
        compare([three[0], tmp_path / "nowhere"])
