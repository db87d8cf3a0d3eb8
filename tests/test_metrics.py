"""What numbers mean is declared once, by their protocol; tables, verdicts and reports follow from it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tico_ssl import evaluate, study
from tico_ssl.cli import app
from tico_ssl.config import catalogue
from tico_ssl.evaluations import Metric
from tico_ssl.features.frozen import Features
from tico_ssl.report import report, static
from tico_ssl.results.comparison import read_comparison
from tico_ssl.results.metrics import declared, first_of_each, measurements
from tico_ssl.results.run_folder import open_run
from tico_ssl.results.statistics import Spread, with_deviation
from tico_ssl.results.verdict import POINTS, verdict, verdict_over_seeds
from tico_ssl.runtime.errors import UserError

DOCUMENTED = (Path(__file__).parents[1] / "docs" / "extending" / "evaluation.md").read_text(encoding="utf-8")
PLAIN = '''"""The length of features."""
from tico_ssl.evaluations import Context, Result, Section

class Config(Section):
    """Nothing to set."""

def run(context: Context, config: Config) -> Result:
    return context.compare(config, lambda features: {"length": float(features.test.norm(dim=1).mean())})
'''


@pytest.fixture
def my_lab(tmp_path, monkeypatch):
    """A package elsewhere: the protocol of the documentation, and one without METRICS."""
    folder = tmp_path / "elsewhere" / "my_lab"
    folder.mkdir(parents=True)
    (folder / "nearest_mean.py").write_text(DOCUMENTED.split("```python\n")[1].split("```")[0], encoding="utf-8")
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    monkeypatch.syspath_prepend(folder.parent)
    yield "my_lab.nearest_mean"
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


# ---------------------------------------------------------------------------------------------------- declarations


def test_what_is_shown_follows_from_the_declaration():
    numbers = {"trained": {"top1": 50.0, "top5": 90.0, "weight_decay": 1e-4}, "untrained": {"top1": 20.0, "top5": 60.0}}
    found = measurements("linear", numbers)
    assert [one.title for one in found] == ["top1 (%)", "top5 (%)"]
    assert [one.gain_over("untrained") for one in found] == [30.0, 30.0]
    (alpha,) = measurements("alpha-req", {"trained": {"alpha": 1.23456}})
    assert alpha.text("trained") == "1.235"
    assert (alpha.text("untrained"), alpha.gain_over("untrained")) == ("", None)


def test_names_that_depend_on_settings_are_declared_by_a_pattern():
    for protocol, name in (("knn", "top1_k7_t0.5"), ("few-shot", "top1_3shot"), ("semi-supervised", "top1_1%")):
        (found,) = measurements(protocol, {"trained": {name: 1.0, f"{name}_std": 0.5}})
        assert found.metric.verdict
        assert found.text("trained") == "1.0 ± 0.5"
    assert not first_of_each([("rankme", ["width"])])
    assert [str(shown) for shown in first_of_each([("rankme", ["width", "rankme"])])] == ["rankme rankme"]


def test_results_outlive_their_protocols(my_lab, tmp_path):
    """A name that is gone, a module that is broken, a METRICS that is none: the numbers are still shown."""
    (tmp_path / "elsewhere" / "my_lab" / "broken.py").write_text("METRICS = 1 / 0\n")
    (tmp_path / "elsewhere" / "my_lab" / "wrong.py").write_text("METRICS = ('top1',)\nConfig = run = None\n")
    for protocol in ("gone", "nobody.knows", "my_lab.broken", "my_lab.wrong", "my_lab.plain"):
        (found,) = measurements(protocol, {"trained": {"top1": 50.0}, "untrained": {"top1": 20.0}})
        assert found.text("trained") == "50.0"
        assert verdict([line(protocol, "top1", 50.0, 20.0, 1_000)]) is None
    with pytest.raises(UserError, match=r"^evaluation my_lab\.wrong: METRICS are of type Metric$"):
        declared("my_lab.wrong")
    with pytest.raises(UserError, match="must declare which direction is better"):
        Metric("x", verdict=True)


# ---------------------------------------------------------------------------------------------------- the verdict


def line(protocol, metric, trained, untrained, test=None, **more):
    """A result of a protocol, on so many test images."""
    numbers = {"trained": {metric: trained}, "untrained": {metric: untrained}}
    return {"protocol": protocol, "numbers": numbers, "data": {} if test is None else {"test": test}, **more}


def judged(low, high, metric=("linear", "top1")):
    protocol, name = metric
    middle = (low + high) / 2
    return verdict([line(protocol, name, 50 + middle, 50.0, 819, differences={"untrained": {name: [low, high]}})])


def test_the_interval_of_the_difference_decides():
    cases = {
        (0.1, 0.5): "helped",
        (6.3, 12.7): "helped",
        (0.0, 9.0): "cannot tell",
        (-3.1, 5.8): "cannot tell",
        (-0.5, 0.9): "did not help",
        (-0.5, 1.0): "cannot tell",
        (-5.0, -0.1): "harmed",
    }
    assert {ends: judged(*ends).outcome for ends in cases} == cases
    assert POINTS == 1.0


def test_the_sentence_has_the_difference_its_interval_and_what_would_help():
    assert str(judged(6.3, 12.7)) == (
        "Pretraining helped: linear top1 59.5 % against 50.0 % untrained: "
        "+9.5 points (95 % interval +6.3 to +12.7, 819 test images)."
    )
    assert str(judged(-3.1, 5.8)).startswith("Cannot tell whether pretraining helped: linear top1 51.4 % against")
    more = "More test images (about 4,000 if the difference stays), or several seeds, would tell."
    assert str(judged(-2, 6)).endswith(more)
    assert str(judged(-5, 5)).endswith("More test images, or several seeds, would tell.")  # any number of images may do
    assert str(judged(-9, -3)).startswith("Pretraining did not help, it harmed: linear top1 44.0 %")


def advised(gain, low, high, images):
    """The number of test images that an undecided verdict asks for."""
    ends = {"differences": {"untrained": {"top1": [low, high]}}}
    text = str(verdict([line("linear", "top1", 50.0 + gain, 50.0, images, **ends)]))
    found = re.search(r"More test images \(about ([\d,]+) if", text)
    return None if found is None else int(found[1].replace(",", ""))


def test_advice_counts_the_side_of_the_interval_that_has_to_leave_0():
    assert advised(4.0, -2.0, 6.0, 1_000) == 3_000  # 6 / 4 of the gain, squared: 2,250 images
    assert advised(-4.0, -6.0, 2.0, 1_000) == 3_000
    assert advised(6.0, 0.0, 8.0, 1_000) == 2_000  # more than there are, if only by one


@given(st.floats(-20, 20), st.floats(-50, 0), st.floats(1, 50), st.integers(1, 10**6))
def test_advice_asks_for_more_images_than_there_are(gain, low, high, images):
    """Also of one or two, which a test may have."""
    number = advised(gain, min(low, gain), max(high, gain), images)
    assert number is None or number > images


def test_one_declared_metric_decides_whatever_the_order():
    """The linear probe, else kNN with 20 neighbours, else others, and few-shot only where there is nothing else."""
    found = [
        line("few-shot", "top1_1shot", 14.3, 13.1, 300),
        line("my_lab.gone", "top1", 1.0, 99.0, 300),
        line("svm", "map", 40.0, 30.0, 300),
        line("knn", "top1_k200", 1.0, 99.0, 300),
        line("linear", "top1", 60.0, 20.0, 300),
    ]
    found[3]["numbers"]["trained"]["top1_k20"] = found[3]["numbers"]["untrained"]["top1_k20"] = 30.0
    deciding = []
    while (decided := verdict(found)) is not None:
        deciding.append(str(decided.by))
        found = [one for one in found if one["protocol"] != decided.by.protocol]
    assert deciding == ["linear top1", "knn top1_k20", "svm map", "few-shot top1_1shot"]
    assert verdict([line("rankme", "rankme", 90.0, 10.0, 300)]) is None
    assert verdict([{"protocol": "knn", "numbers": {"trained": {"top1_k20": 50.0}}}]) is None  # nothing to compare with


def test_results_without_intervals_are_judged_by_the_number_of_test_images():
    """By a wider interval, since which images were right is not known; without their number by none."""
    assert verdict([line("knn", "top1_k20", 84.1, 38.2, 819)]).helped
    assert verdict([line("knn", "top1_k20", 20.7, 19.3, 300)]).undecided
    assert verdict([line("knn", "top1_k20", 19.3, 60.7, 300)]).harmed
    unknown = verdict([line("knn", "top1_k20", 84.1, 38.2)])
    assert (unknown.outcome, unknown.interval) == ("cannot tell", None)
    assert "(interval not known)" in str(unknown)
    precision = verdict([line("svm", "map", 84.1, 38.2, 819)])  # no share of the images
    assert str(precision).endswith("+45.9 points (interval not known, 819 test images). Several seeds would give one.")


def test_several_seeds_have_the_interval_over_seeds_paired_with_their_own_reference():
    runs = [[line("linear", "top1", 30.0 + s, 20.0 + s + 0.1 * (s % 2), 100)] for s in range(4)]
    found = verdict_over_seeds(runs)
    assert (found.seeds, found.outcome) == (4, "helped")
    spread = Spread.of([10.0, 9.9, 10.0, 9.9])
    assert found.interval == pytest.approx(spread.interval)
    assert "(95 % interval +9.9 to +10.0, 4 seeds)" in str(found)
    assert found.by.text("trained") == "31.5 ± 1.3"
    one = verdict_over_seeds(runs[:1])
    assert (one.seeds, one.undecided) == (1, True)  # 100 test images are few


def test_two_seeds_have_what_their_intervals_over_test_images_span():
    """Student's interval of two would say nothing, even of gains of 30 and 40 points."""
    ends = ([25.0, 35.0], [34.0, 46.0])
    runs = [[line("linear", "top1", 50.0 + 10 * s, 20.0, differences={"untrained": {"top1": ends[s]}})] for s in (0, 1)]
    found = verdict_over_seeds(runs)
    assert (found.gain, found.interval, found.outcome) == (35.0, (25.0, 46.0), "helped")
    ends[1][0] = -1.0
    assert verdict_over_seeds(runs).outcome == "cannot tell"


def test_less_is_better_where_the_protocol_says_so(my_lab, tmp_path):
    code = PLAIN + 'from tico_ssl.evaluations import Metric\nMETRICS = [Metric("e", "m", 2, "lower", True)]\n'
    (tmp_path / "elsewhere" / "my_lab" / "distance.py").write_text(code)
    found = verdict([line("my_lab.distance", "e", 3.0, 5.0, differences={"untrained": {"e": [-3.0, -1.0]}})])
    assert (found.gain, found.interval, found.helped) == (2.0, (1.0, 3.0), True)
    assert str(found) == (
        "Pretraining helped: my_lab.distance e 3.00 m against 5.00 m untrained: -2.00 m (95 % interval -3.00 to -1.00)."
    )
    assert verdict([line("my_lab.distance", "e", 5.0, 3.0, differences={"untrained": {"e": [1.0, 3.0]}})]).harmed


def test_a_name_that_protocol_and_metric_share_is_in_a_row_once():
    found = measurements("rankme", {"trained": {"rankme": 1.0, "embedding_rankme": 2.0}})
    assert [one.row_title for one in found] == ["rankme (↑)", "rankme embedding (↑)"]
    (found,) = measurements("knn", {"trained": {"top1_k20": 1.0}})
    assert found.row_title == "knn top1_k20 (%) ↑"


def test_every_metric_without_labels_says_which_way_is_better_or_that_none_is():
    """As their papers claim, of runs of one kind: a higher rank, a decay of exponent 1, closer views, more uniform
    images."""
    names = {
        "rankme": {"rankme": "(↑)", "embedding_rankme": "(↑)"},
        "lidar": {"lidar": "(↑)"},
        "alpha-req": {"alpha": "(→1)", "alpha_r2": ""},
        "alignment-uniformity": {"alignment": "(↓)", "embedding_uniformity": "(↓)"},
        "neighbour-consistency": {"same_image": "↑"},
        "spectrum": {"participation_ratio": "", "largest_share": ""},
    }
    for protocol, ways in names.items():
        found = measurements(protocol, {"trained": dict.fromkeys(ways, 1.0)})
        assert [one.directed_title for one in found] == [f"{one.title} {ways[one.name]}".rstrip() for one in found]
        assert not any(one.metric.verdict for one in found)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_mean_and_standard_deviation_are_those_of_torch(values):
    spread, expected = Spread.of(values), torch.tensor(values, dtype=torch.float64)
    assert spread.mean == pytest.approx(float(expected.mean()), abs=1e-6)
    assert spread.deviation == pytest.approx(float(expected.std()), abs=1e-6)
    assert with_deviation(spread.mean, None, 2) == f"{spread.mean:.2f}"


# ------------------------------------------------------------------------------------------------ a protocol elsewhere


def test_the_protocol_of_the_documentation_measures_what_it_says(my_lab):
    protocol = catalogue.load("evaluations", my_lab)
    train = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.1, 1.0], [-0.1, 1.0]])
    test = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0], [1.0, 0.0]])
    features = Features(train, test, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]))
    numbers = protocol.nearest_mean(features, centred=False)
    assert numbers == {"right": 75.0, "right_of_worst_class": pytest.approx(200 / 3), "classes": 2}


def test_a_protocol_elsewhere_is_evaluated_under_its_name(my_lab, run):
    words = ["evaluate", str(run.folder), my_lab, "my_lab.plain", "rankme", f"{my_lab}.centred=false"]
    outcome = CliRunner().invoke(app, words, catch_exceptions=False)
    assert outcome.exit_code == 0
    for text in (f"{my_lab} right (%) ↑", "right_of_worst_class (%) ↑", "my_lab.plain length", f": {my_lab} right"):
        assert text in outcome.output
    assert f"{my_lab} classes" not in outcome.output
    made = next(made for made in reversed(open_run(run.folder).results()) if made["protocol"] == my_lab)
    assert made["settings"] == {"centred": False}
    assert made["numbers"]["trained"]["classes"] == 10
    assert list(made["intervals"]["trained"]) == list(made["differences"]["untrained"]) == ["right"]
    result = evaluate(run.folder, "my_lab.plain")
    assert result.protocol == "my_lab.plain"


def test_a_protocol_elsewhere_without_labels_says_so_under_its_name(my_lab, run, tmp_path, folder_of_images):
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted(folder_of_images.rglob("*.png"))):
        path.rename(tmp_path / "flat" / f"{number}.png")
    with pytest.raises(UserError, match=r"^my_lab\.nearest_mean needs labels"):
        evaluate(run.folder, my_lab, str(tmp_path / "flat"))


def test_a_protocol_elsewhere_is_in_studies_comparisons_and_reports(my_lab, tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(static, "save", lambda *_: [])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path / "elsewhere", catalogue.PACKAGE.parent))))
    file, out = tmp_path / "mine.yaml", tmp_path / "study"
    overrides = tiny | {"training.epochs": 1}
    file.write_text(yaml.safe_dump({"overrides": overrides, "protocols": [my_lab, "my_lab.plain"]}))
    summary = study(file, out=out, side_by_side=1)
    assert summary.failures == {}
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    value = open_run(out / "base-seed0").results()[0]["numbers"]["trained"]["right"]
    assert row["numbers"][my_lab]["right"]["trained"]["values"] == [value]
    text = (out / "results.md").read_text()
    assert f"| {my_lab} |" in text
    assert f"{my_lab} in %." in text
    comparison = read_comparison([out])
    assert comparison.head[6:11] == [f"{my_lab} right", "untrained", "gain", "my_lab.plain length", "untrained"]
    assert comparison.rows[0][6].text == f"{value:.1f}"
    assert str(comparison.headline) == f"{my_lab} right"
    assert f"{my_lab} right: {value:.1f} %." in report(out).read_text()
    one = report(out / "base-seed0", points=0).read_text()
    assert f"{my_lab} right" in one
    assert "right_of_worst_class (%)" in one


def test_a_declaration_elsewhere_is_read_without_torch(my_lab, tmp_path):
    code = (
        "import sys; from tico_ssl.results.metrics import declared; from tico_ssl.config import catalogue\n"
        f"assert declared({my_lab!r})[0].verdict; catalogue.declaration('evaluations', {my_lab!r}, 'Config')\n"
        "assert 'torch' not in sys.modules and 'my_lab.nearest_mean' not in sys.modules"
    )
    path = os.pathsep.join(map(str, (tmp_path / "elsewhere", catalogue.PACKAGE.parent)))
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
