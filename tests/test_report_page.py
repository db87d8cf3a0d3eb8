"""What a reader of the report relies on: the number first, names for people, captions that agree with their curves,
results by protocol, runs compared on the same data only, and a page that is small."""

import base64
import gzip
import hashlib
import html
import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image
from plotly.offline import get_plotlyjs

from reports import knn, log_line, made_run, small_picture
from test_published import made_run as published_run
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import load_recipe
from tico_ssl.features.picture import Images, Picture
from tico_ssl.report import GALLERIES, atlas, headline, image_sections, report, run_curves, several_runs, static
from tico_ssl.report.charts import HUES, OTHER, SHOWN_NAMES, Chart, as_plotly, mark
from tico_ssl.report.evaluation_section import evaluations
from tico_ssl.report.findings import findings
from tico_ssl.report.html import joined
from tico_ssl.report.names import full_name, protocol_name, within
from tico_ssl.report.page import command, page
from tico_ssl.results.comparison import read_comparison
from tico_ssl.results.metrics import Metric, Quantity, declared
from tico_ssl.results.reading import read_record
from tico_ssl.results.run_folder import admit
from tico_ssl.runtime.locks import alone_in

NOTHING = "no images"


@pytest.fixture(autouse=True)
def _page_alone(monkeypatch):
    """Without the figures for papers, which take longer than the rest."""
    monkeypatch.setattr(static, "save", lambda *_: [])


def text_of(markup) -> str:
    """Text as a reader sees it."""
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", markup)).replace("\u00a0", " ").replace("&#x27;", "'")


def head_of(run, picture=NOTHING) -> str:
    return text_of(joined(*headline.header(read_record(run.folder), picture)))


# ------------------------------------------------------------------------------------------------ above the fold


def test_the_number_comes_first_with_its_interval_and_what_it_is_against(tmp_path):
    intervals = {"trained": {"top1_k20": [82.0, 86.0]}, "untrained": {"top1_k20": [36.0, 40.0]}}
    differences = {"untrained": {"top1_k20": [43.5, 48.25]}}
    result = knn(84.1, 38.2, intervals=intervals, differences=differences, data={"test": 2000})
    said = head_of(made_run(tmp_path / "a", results=[result]))
    assert "kNN accuracy, k = 20, 2,000 test images 84.1 % 95 % interval 82.0 to 86.0 %" in said
    assert "untrained 38.2 % +45.9 points (95 % interval +43.5 to +48.2)" in said


def test_without_intervals_none_are_shown_and_initial_weights_come_before_untrained(tmp_path):
    result = knn(84.1, 38.2, data={})
    result["numbers"] |= {"initial": {"top1_k20": 70.0}}
    said = head_of(made_run(tmp_path / "a", results=[result]))
    assert "95 % interval" not in said
    assert said.index("initial 70.0 % +14.1 points") < said.index("untrained 38.2 % +45.9")


def test_before_an_evaluation_the_number_is_that_of_training_or_none(tmp_path):
    metrics = [log_line(20, 2.0), {"step": 20, "epoch": 2, "knn_top1_k20": 55.5}]
    said = head_of(made_run(tmp_path / "a", metrics=metrics))
    assert "kNN accuracy during training, epoch 2, on some of the images 55.5 %" in said
    metrics[-1]["test_images"] = 38
    said = head_of(made_run(tmp_path / "c", metrics=metrics))
    assert "epoch 2, 38 test images 55.5 % 95 % interval 39.9 to 70.1 %" in said
    assert "accuracy" not in head_of(made_run(tmp_path / "b"))


def test_four_rows_of_neighbours_are_above_the_fold(tmp_path):
    few = small_picture(["cat", "dog"])
    five = Images(["q"] * 5, np.array([0, 1, 0, 1, 0]), few.points.thumbnails[:5])
    near = Images(["n"] * 10, np.array([0, 1] * 5), np.concatenate([few.points.thumbnails, few.points.thumbnails[:2]]))
    picture = Picture(**vars(few) | {"queries": five, "neighbours": near, "similarity": np.full((5, 2), 0.5)})
    made = joined(*headline.header(read_record(made_run(tmp_path / "a").folder), picture))
    assert made.count('class="row"') == 4


def test_images_held_out_are_not_said_to_be_trained_on(tmp_path):
    """Of 600, a quarter is held out."""
    run = made_run(tmp_path / "run", overrides={"data.limit": 600, "data.held_out": 0.25})
    run.images_file.write_text(json.dumps({"images": 450}))
    assert headline.facts_of(read_record(run.folder))["data"] == "textures, 450 images"


def test_facts_are_of_the_run_and_not_the_recipe_s_sentence(tmp_path):
    run = made_run(tmp_path / "a", metrics=[log_line(15, 1.5)], overrides={"description": "Minutes on a laptop."})
    facts = headline.facts_of(read_record(run.folder))
    assert facts["image size"] == "32 px"
    assert facts["epochs"] == "1.5 of 2"
    assert facts["batch"] == "100 images"
    assert facts["time"] == "15 s, 100 images/s"
    assert {"method", "network", "data"} <= facts.keys()
    assert "laptop" not in head_of(run)


@pytest.mark.parametrize("protocol", catalogue.entries("evaluations"))
def test_every_metric_has_a_name_for_people(protocol):
    for metric in declared(protocol):
        name = full_name(Quantity(protocol, metric.name.replace("*", ""), metric))
        assert not re.search(r"_|top[15]\b", name)
    assert not re.search(r"[_-]$", protocol_name(protocol))


def test_settings_in_the_name_of_a_metric_are_said():
    names = {
        ("knn", "top1_k200_t0.07"): "kNN accuracy, k = 200, temperature 0.07",
        ("few-shot", "top1_5shot"): "Few-shot accuracy, 5 per class",
        ("semi-supervised", "top5_1%"): "Semi-supervised top-5 accuracy, 1 % of the labels",
        ("corruptions", "linear_shot-noise"): "Corruptions linear accuracy, shot noise",
        ("detection", "train_box_ap50"): "Detection box AP, IoU 0.50, training images",
        ("retrieval", "map_at_r"): "Retrieval mean average precision at R",
        ("my.lab", "right_of_worst"): "my.lab right_of_worst",  # which its authors have named
    }
    for (protocol, name), words in names.items():
        assert full_name(Quantity(protocol, name, Metric("*"))) == words


def test_names_inside_a_sentence():
    names = {
        "Linear accuracy": "linear accuracy",
        "Few-shot accuracy, 5 per class": "few-shot accuracy (5 per class)",
        "kNN accuracy, k = 20": "kNN accuracy (k = 20)",
        "SVM accuracy": "SVM accuracy",
        "RankMe effective rank": "RankMe effective rank",
    }
    assert {name: within(name) for name in names} == names


def test_a_stopped_run_says_where_and_how_to_go_on_with_itself(tmp_path):
    run = made_run(tmp_path / "my run", metrics=[log_line(15, 1.5)], backbone=False)
    with alone_in(run.folder, "in use"):
        assert "in progress" in findings(read_record(run.folder))[0].text
    first = findings(read_record(run.folder))[0]  # it has given its folder free: nobody waits ten minutes
    assert "stopped: epoch 1.5 of 2, step 15" in first.text
    assert "from the start" in first.text
    assert first.command == f"tico pretrain '{run.folder}/recipe.yaml' --out '{run.folder}' --resume"
    both = [run.folder, made_run(tmp_path / "other").folder]
    assert command(first.command) in report(both, tmp_path / "out").read_text()
    admit(run.folder, load_recipe(shlex.split(first.command)[2]), resume=True, overwrite=False)  # it may go on so
    run.checkpoint_file.write_bytes(b"state")
    assert "from its last checkpoint" in findings(read_record(run.folder))[0].text


# ------------------------------------------------------------------------------------------------ figures


def classes_picture(counts) -> Picture:
    """A map with so many points of each class."""
    labels = np.repeat(np.arange(len(counts)), counts)
    few, total = small_picture([str(i) for i in range(len(counts))]), len(labels)
    points = Images(["x"] * total, labels, np.zeros((total, 1, 1, 3), dtype=np.uint8))
    return Picture(**vars(few) | {"points": points, "positions": np.zeros((total, 2)), "clusters": labels})


def test_of_many_classes_the_most_frequent_have_a_hue_each_and_the_rest_are_grey():
    section, thumbnails = image_sections.map_section(classes_picture([1] * 20 + [3] * 12))
    (chart,) = section.charts
    colours = [mark(chart, series, number)[0] for number, series in enumerate(chart.series)]
    assert colours == [OTHER, *HUES]
    assert [series.name for series in chart.series] == ["20 other classes", *map(str, range(20, 32))]
    assert sum(len(series.x) for series in chart.series) == len(thumbnails.notes) == 56
    assert thumbnails.notes[:2] == ["0", "1"]  # the card still says which
    assert "scaleanchor" not in as_plotly(chart)["layout"]["yaxis"]  # it takes the whole width


def test_the_knn_curve_has_the_untrained_network_as_a_line(tmp_path):
    metrics = [log_line(20, 2.0), {"step": 20, "epoch": 2, "knn_top1_k20": 55.5}]
    for name, results in (("a", [knn(60.0, 38.2)]), ("b", [])):
        record = read_record(made_run(tmp_path / name, metrics=metrics, results=results).folder)
        lines = {series.name: series for chart in run_curves.training(record).charts for series in chart.series}
        assert ("untrained, k = 20" in lines) == bool(results)
        if results:
            assert lines["untrained, k = 20"].y == [38.2, 38.2]
            assert lines["untrained, k = 20"].dashed


@pytest.mark.parametrize(("losses", "flagged"), [((2.0, 1.0), False), ((1.0, 2.0), True)])
def test_a_loss_that_rises_is_flagged_where_the_caption_says_that_it_should_fall(tmp_path, losses, flagged):
    metrics = [log_line(10 * i, float(i), loss=loss) for i, loss in enumerate(losses, 1)]
    chart = run_curves.training(read_record(made_run(tmp_path / "a", metrics=metrics).folder)).charts[0]
    assert chart.caption.startswith("Should fall")
    assert chart.flag == ("Here it rose, from 1 to 2." if flagged else "")
    started = ("step", "epoch", "loss")
    metrics = [{key: line[key] for key in started} | {"invariance": 0.5, "contrast": 0.5} | line for line in metrics]
    chart = run_curves.training(read_record(made_run(tmp_path / "b", metrics=metrics).folder)).charts[0]
    assert chart.caption.startswith("The loss should fall") and len(chart.series) == 3
    assert bool(chart.flag) == flagged


@pytest.mark.parametrize(("last", "flagged"), [(18.2, False), (17.0, True)])
def test_an_accuracy_that_falls_is_flagged_unless_by_less_than_matters(tmp_path, last, flagged):
    accuracies = [{"step": 10 * i, "epoch": i, "knn_top1_k20": value} for i, value in enumerate((18.3, last), 1)]
    metrics = [log_line(10, 1.0), accuracies[0], log_line(20, 2.0), accuracies[1]]
    charts = run_curves.training(read_record(made_run(tmp_path / "a", metrics=metrics).folder)).charts
    (chart,) = (chart for chart in charts if chart.key == "knn")
    assert chart.flag == ("Here it fell, from 18.3 to 17." if flagged else "")


def test_runs_whose_loss_rises_are_named(tmp_path):
    for name, losses in (("falls", (2.0, 1.0)), ("rises", (1.0, 2.0))):
        metrics = [log_line(10 * i, float(i), loss=loss) for i, loss in enumerate(losses, 1)]
        made_run(tmp_path / name, metrics=metrics, overrides={"method.rho": losses[0]})
    found = several_runs.curves(read_comparison([tmp_path / "falls", tmp_path / "rises"])).charts[0]
    assert found.flag == "Here it rose in rises."


def heat(count, share=None) -> Chart:
    names = [f"a class with a long name, {i}" for i in range(count)]
    return image_sections.confusion_chart(names, np.eye(count) * 100 if share is None else share)


@pytest.mark.parametrize("count", [2, 25, 26, 50, 102])
def test_labels_of_a_confusion_matrix_have_room(count):
    chart = heat(count)
    layout = as_plotly(chart)["layout"]
    for axis in (layout["xaxis"], layout["yaxis"]):
        assert len(axis["tickvals"]) == len(axis["ticktext"]) <= SHOWN_NAMES
        assert set(axis["tickvals"]) <= set(chart.names)
        assert max(map(len, axis["ticktext"])) <= 22
        assert axis["title"]["standoff"] > 0  # the title is clear of the longest name
        assert (chart.height - 170) / len(axis["tickvals"]) >= 12  # pixels for each, beside the names below
    assert layout["xaxis"]["tickangle"] == -90


def test_of_many_classes_the_most_confused_are_shown():
    share = np.eye(102) * 90.0
    share[7, 93], share[93, 50] = 10.0, 5.0
    chart = heat(102, share)
    numbers = [int(name.split(", ")[1]) for name in chart.names]
    assert {7, 50, 93} <= set(numbers)
    assert chart.cells[numbers.index(7)][numbers.index(93)] == 10.0
    assert "25 classes of 102" in chart.caption


# ------------------------------------------------------------------------------------------------ results


def test_each_protocol_has_its_newest_result_and_earlier_ones_are_folded(tmp_path):
    run = made_run(tmp_path / "a", results=[knn(11.0, 5.0), knn(84.1, 38.2)])
    shown, earlier = joined(*evaluations(read_record(run.folder)).content).split("<summary>Earlier results")
    assert "84.1" in shown and "+45.9" in shown
    assert "11.0" not in shown and "11.0" in earlier


def test_a_difference_has_its_interval_below_it(tmp_path):
    result = knn(84.1, 38.2, differences={"untrained": {"top1_k20": [43.5, 48.25]}})
    made = joined(*evaluations(read_record(made_run(tmp_path / "a", results=[result]).folder)).content)
    assert re.search(r">\+45\.9<small>\+43\.5 to \+48\.2</small></td>", made)


def test_those_that_decide_come_first_and_every_metric_says_which_way_is_better(tmp_path):
    several = {
        "alpha-req": {"alpha": 1.4, "alpha_r2": 0.9},
        "rankme": {"rankme": 55.0},
        "few-shot": {"top1_1shot": 20.0},
    }
    several["corruptions"] = {"knn_lost": 20.0}
    results = [{"protocol": name, "numbers": {"trained": found}} for name, found in several.items()]
    made = joined(
        *evaluations(read_record(made_run(tmp_path / "a", results=[*results, knn(84.1, 38.2)]).folder)).content
    )
    places = [made.index(f"<h3>{name}</h3>") for name in ("kNN", "Few-shot", "α-ReQ", "RankMe", "Corruptions")]
    assert places == sorted(places)
    titles = (
        "accuracy, k = 20 (%)\u00a0↑",
        "exponent α\u00a0(→1)",
        "R² of the fit",
        "effective rank\u00a0(↑)",
        "kNN accuracy lost (%)\u00a0↓",
    )
    assert all(f">{title}</td>" in made for title in titles)
    assert "↑ higher is better; ↓ lower is better; →1 nearer 1 is better; no sign: neither way is better" in made


def test_a_result_on_other_images_says_so_and_is_no_baseline_of_the_run(tmp_path):
    metrics = [log_line(10, 1.0), {"step": 10, "epoch": 1, "knn_top1_k20": 30.0}]
    for source, words in (("textures", ""), ("textures/", ""), ("leaves/", ", on leaves/")):
        result = knn(84.1, 38.2, data={"test": 100, "source": source})
        record = read_record(made_run(tmp_path / source.replace("/", "-"), results=[result], metrics=metrics).folder)
        assert f"<h3>kNN{words}</h3>" in joined(*evaluations(record).content)
        assert f"kNN accuracy, k = 20, 100 test images{words}</p>" in joined(*headline.header(record, ""))
        lines = [series.name for chart in run_curves.training(record).charts for series in chart.series]
        assert ("untrained, k = 20" in lines) == (not words)


def test_corruptions_are_summed_up_and_each_is_folded(tmp_path):
    numbers = {"knn_clean": 80.0, "knn_corrupted": 60.0, "knn_lost": 25.0, "knn_jpeg": 61.0, "knn_contrast": 59.0}
    result = {"protocol": "corruptions", "numbers": {"trained": numbers}}
    record = read_record(made_run(tmp_path / "a", results=[result]).folder)
    shown, more = joined(*evaluations(record).content).split("<details><summary>2 more metrics")
    assert "corrupted images" in shown and "jpeg" not in shown
    assert "kNN accuracy, jpeg" in more


def test_runs_are_compared_within_one_data_set_only(tmp_path):
    places = []
    for name, data in (("a", "textures"), ("b", "textures"), ("c", "cifar10")):
        rho = 1.0 + len(places)
        overrides = {"data.source": data, "method.rho": rho}
        places.append(made_run(tmp_path / name, results=[knn(80.0, 20.0)], overrides=overrides).folder)
    text = report(places, tmp_path / "out").read_text()
    tables = [section for section in re.split("<section", text)[1:] if section.startswith(' id="table')]
    assert [text_of(table)[:40].count("cifar10") for table in tables] == [0, 1]
    names = [re.findall(r"<tr><td[^>]*>([abc])</td>", table) for table in tables]
    assert names == [["a", "b"], ["c"]]
    heads = [re.findall(r"<th[^>]*><button[^>]*>([^<]*)", table) for table in tables]
    assert heads[0][:3] == ["run", "kNN accuracy, k = 20", "untrained"]  # which a phone shows without scrolling
    ids = re.findall(r' id="([^"]+)"', re.sub("<script.*?</script>", "", text, flags=re.DOTALL))
    assert len(ids) == len(set(ids))
    assert "textures: Highest kNN accuracy (k = 20)" in text_of(text)
    assert "cifar10: kNN accuracy, k = 20: " in text_of(text)  # of one run none is the highest


def test_published_tables_are_for_those_who_open_them(tmp_path):
    data = {"source": "cifar10", "train": 50_000, "test": 10_000}
    voters = [{"k": 20, "temperature": 0.07}, {"k": 200, "temperature": 0.1}]
    result = {"protocol": "knn", "numbers": {"trained": {"top1_k200": 83.2}}, "data": data}
    run = published_run(tmp_path / "a", "cifar10/simclr", [result | {"settings": {"voters": voters}}])
    text = report(run.folder, points=0).read_text()
    section = text.split('<section id="published"')[1].split("</section>")[0]
    assert re.match(r"><h2>Published results</h2><details><summary>.*</details>$", section, re.DOTALL)


# ------------------------------------------------------------------------------------------------ the size of a page


def unpacked(text, key) -> bytes:
    return gzip.decompress(base64.b64decode(re.search(rf'id="{key}">([^<]*)</script>', text)[1]))


def test_ten_thousand_photos_fit_into_ten_mebibytes():
    """The page without its images, the most that sheets may take, and a gallery of images that compress badly."""
    count, rng = 10_000, np.random.default_rng(0)
    names, labels = [f"some/folder/of/images/{i:08}.jpg" for i in range(count)], np.arange(count) % 20
    few, positions = small_picture([f"class {i}" for i in range(20)]), rng.normal(size=(count, 2)) * 50
    points = Images(names, labels, np.zeros((count, 1, 1, 3), dtype=np.uint8))
    section, shown = image_sections.map_section(Picture(**vars(few) | {"points": points, "positions": positions}))
    text = page("t", [], [section], shown)
    soft = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((96, 96))
    gallery = GALLERIES * 9 * len(atlas.image_url(np.asarray(soft)))
    assert len(text) + atlas.BUDGET * 4 / 3 + gallery < 10 << 20
    drawn = json.loads(unpacked(text, "data"))["figures"]["map"]["data"]
    assert sum(len(trace["x"]) for trace in drawn) == count


def test_plotly_is_packed_and_only_it_has_the_hash_that_the_policy_allows(tmp_path):
    text = report(made_run(tmp_path / "a").folder, points=0).read_text()
    script = unpacked(text, "plotly")
    allowed = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert f"sha256-{allowed}" in html.unescape(re.search(r'Security-Policy" content="([^"]*)"', text)[1])
    assert script.decode() == get_plotlyjs()
