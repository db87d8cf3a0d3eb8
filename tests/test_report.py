"""The report: what it says of a run in any state, that data stay text, and that figures hold what was measured."""

import base64
import colorsys
import html as stdlib_html
import io
import json
import os
import re
import sys
import time
from unittest import mock

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from reports import EVIL, knn, log_line, made_run, small_picture, write_lines
from tico_ssl import pretrain
from tico_ssl.cli import main
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.features import exploration
from tico_ssl.features.extraction import Extracted
from tico_ssl.features.picture import Picture
from tico_ssl.features.subjects import open_subject
from tico_ssl.methods._base import Method
from tico_ssl.methods.tico import Config, TiCo
from tico_ssl.report import charts, image_sections, report, run_curves, static
from tico_ssl.report.atlas import COLUMNS, build_atlas
from tico_ssl.report.charts import Chart, Series, as_plotly
from tico_ssl.report.findings import findings
from tico_ssl.report.html import inline_json, joined, tag
from tico_ssl.report.page import Section, page, table
from tico_ssl.report.several_runs import curves
from tico_ssl.results.comparison import comparison_of
from tico_ssl.results.reading import read_record, read_records
from tico_ssl.results.record import duration
from tico_ssl.results.run_folder import Run
from tico_ssl.results.table import Cell
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest
from tico_ssl.training import monitor
from tico_ssl.training.checkpoint import Position


@pytest.fixture
def page_alone(monkeypatch):
    """Without the figures for papers, which take longer than the rest."""
    monkeypatch.setattr(static, "save", lambda *_: [])


def sentences(run) -> str:
    return " ".join(sentence.text for sentence in findings(read_record(run.folder)))


# ------------------------------------------------------------------------------------------------ the run in words


def test_the_verdict_says_that_pretraining_helped(tmp_path):
    rank = {"protocol": "rankme", "numbers": {"trained": {"rankme": 187.2, "width": 256.0}}}
    run = made_run(tmp_path / "a", results=[knn(84.1, 38.2), rank])
    said = sentences(run)
    helped = "Pretraining helped: kNN accuracy (k = 20) 84.1 % against 38.2 % untrained: +45.9 points (95 % interval"
    assert helped in said
    assert "No sign of collapse." in said
    assert "Effective rank of the features: 187 of 256." in said


def test_the_verdict_says_that_it_did_not_help(tmp_path):
    sure = {"differences": {"untrained": {"top1_k20": [-0.5, 0.9]}}}
    found = findings(read_record(made_run(tmp_path / "a", results=[knn(38.4, 38.2, **sure)]).folder))
    assert [s.tone for s in found if "did not help" in s.text] == ["bad"]
    found = findings(read_record(made_run(tmp_path / "b", results=[knn(38.9, 38.2)]).folder))
    assert [s.tone for s in found if "Cannot tell" in s.text] == ["plain"]


def test_results_of_an_earlier_checkpoint_do_not_count(page_alone, tmp_path):
    run = made_run(tmp_path / "a", results=[knn(84.1, 38.2, checkpoint="another")])
    assert "has not been measured" in sentences(run)
    page_text = report(run.folder, points=0).read_text()
    assert "Results of earlier checkpoints" in page_text


def test_a_run_whose_weights_are_gone_keeps_its_latest_results(page_alone, tmp_path):
    run = made_run(tmp_path / "a", results=[knn(20.0, 38.2, checkpoint="another"), knn(84.1, 38.2)])
    run.backbone_file.unlink()
    assert "Pretraining helped: kNN accuracy (k = 20) 84.1 %" in sentences(run)
    page_text = report(run.folder).read_text()
    assert "There is no backbone any more, so no map" in page_text
    assert "There is no backbone to evaluate any more: its weights are gone." in page_text


def test_the_verdict_names_collapse(tmp_path):
    run = made_run(tmp_path / "a", metrics=[log_line(20, 2.0, mean_cosine=0.95)])
    assert "Signs of collapse: different images have cosine 0.95" in sentences(run)


def test_collapse_on_the_way_is_not_forgotten(tmp_path):
    run = made_run(tmp_path / "a")
    (run.folder / "train.log").write_text("2026-01-01 00:00:00  warning: this looks like collapse: one direction\n" * 2)
    assert "Signs of collapse during training" in sentences(run)
    assert read_record(run.folder).warnings == ["warning: this looks like collapse: one direction"]


def test_steps_that_were_not_carried_out_as_intended_are_said(page_alone, tmp_path):
    told = {"step": 4, "epoch": 0.4, "fallback": {"captured": "a value was asked for"}, "execution": "eager"}
    run = made_run(tmp_path / "a", metrics=[told, log_line(10, 1.0), log_line(20, 2.0)])
    assert "eager (the step is not captured: a value was asked for)" in report(run.folder, points=0).read_text()
    plain = made_run(tmp_path / "b")
    assert "not captured" not in report(plain.folder, points=0).read_text()


def test_without_evaluation_the_knn_of_training_speaks(tmp_path):
    metrics = [log_line(10, 1.0), {"step": 10, "epoch": 1, "knn_top1_k20": 20.0}]
    metrics += [log_line(20, 2.0), {"step": 20, "epoch": 2, "knn_top1_k20": 55.5}]
    said = "kNN accuracy rose from 20.0 % (epoch 1) to 55.5 % (epoch 2)"
    assert f"{said}." in sentences(made_run(tmp_path / "a", metrics=metrics))
    for images, end, tone in ((8, ", which may be chance with 8 test images.", "plain"), (800, ".", "good")):
        counted = [line | ({"test_images": images} if "knn_top1_k20" in line else {}) for line in metrics]
        found = findings(read_record(made_run(tmp_path / str(images), metrics=counted).folder))
        assert (found[0].tone, found[0].text) == (tone, said + end)


def test_a_run_in_progress_and_one_that_stopped_say_so(page_alone, tmp_path):
    run = made_run(tmp_path / "a", metrics=[log_line(10, 1.0)], backbone=False)
    assert "in progress: epoch 1 of 2" in read_record(run.folder).state
    past = time.time() - 7_200
    for file in run.folder.iterdir():
        os.utime(file, (past, past))
    record = read_record(run.folder)
    assert "stopped: epoch 1 of 2, last activity 2.0 h ago" in record.state
    assert "--resume" in record.state
    text = report(run.folder).read_text()
    assert "The run stopped: epoch 1 of 2, step 10, last activity 2.0 h ago. To resume it from the start" in text
    out, resume = (f'<span class="option">--{name}</span>' for name in ("out", "resume"))
    assert f"<code>tico pretrain {run.folder}/recipe.yaml {out} {run.folder} {resume}</code>" in text
    assert "There is no backbone yet" in text


def test_a_run_that_has_written_nothing_but_its_recipe_has_a_report(page_alone, tmp_path):
    run = made_run(tmp_path / "a", metrics=[], backbone=False)
    run.metrics_file.unlink()
    (run.folder / "environment.json").write_text("{cut o")
    text = report(run.folder).read_text()
    assert "before its first logged step" in text
    assert "No step has been logged yet." in text


def test_time_is_divided_as_worked_out_by_hand(tmp_path):
    # 10 steps of 100 images at 100 and then at 50 images/s: 10 s and 20 s, of which a tenth and a half were waited for.
    metrics = [log_line(10, 1.0, data_wait=0.1), log_line(20, 2.0, images_per_second=50.0, data_wait=0.5, seconds=40.0)]
    record = read_record(made_run(tmp_path / "a", metrics=metrics).folder)
    assert record.training_seconds == pytest.approx(30)
    assert record.waiting_seconds == pytest.approx(1 + 10)
    assert record.images_per_second == pytest.approx(2000 / 30)
    bars = run_curves.time_section(record).charts[0].series[0]
    assert dict(zip(bars.x, bars.y)) == pytest.approx(
        {"training steps": 19, "waiting for images": 11, "kNN, checkpoints, start": 10, "evaluations afterwards": 0}
    )
    assert "37% of the training time was spent waiting" in sentences(Run(tmp_path / "a"))


def test_durations_are_read_by_people():
    assert [duration(s) for s in (45, 720, 12_600, 172_800)] == ["45 s", "12 min", "3.5 h", "2 days"]


def test_missing_protocols_come_with_the_command_that_makes_them(page_alone, tmp_path):
    text = report(made_run(tmp_path / "a", results=[knn(80.0, 20.0)]).folder, points=0).read_text()
    assert f"tico evaluate {tmp_path}/a linear rankme" in text


def test_lines_that_a_crash_has_cut_are_left_out(tmp_path):
    run = made_run(tmp_path / "a")
    with run.metrics_file.open("a") as file:
        file.write('{"step": 30, "los')
    assert len(read_record(run.folder).logged) == 2


# ------------------------------------------------------------------------------------------------ data stay text


@given(st.text())
def test_text_in_elements_and_attributes_comes_back_as_it_was(text):
    made = tag("p", text, title=text)
    inner = re.fullmatch(r'<p title="([^"]*)">([^<]*)</p>', made, re.DOTALL)
    assert inner is not None
    for part in inner.groups():
        assert part == stdlib_html.escape(text)


def test_markup_is_not_escaped_twice_and_nothing_is_nothing():
    assert joined(tag("b", "a & b"), None, ["<", 3]) == "<b>a &amp; b</b>&lt;3"
    assert tag("input", disabled=True, checked=False, data_x=None) == "<input disabled>"


@given(
    st.recursive(
        st.text() | st.integers(-5, 5) | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_inline_json_comes_back_and_cannot_end_its_script(values):
    text = inline_json(values)
    assert "<" not in text
    assert json.loads(text) == values


def test_numbers_that_json_lacks_are_null():
    assert json.loads(inline_json({"a": [float("nan"), float("inf"), 1.5]})) == {"a": [None, None, 1.5]}


def test_labels_that_look_like_markup_are_text_for_plotly():
    assert charts.label("<b>&") == "&lt;b&gt;&amp;"
    chart = Chart("x", "t", "c", [Series(EVIL, [0, 1], [0, 1]), Series("b", [0], [0])], EVIL, EVIL)
    assert "<script" not in json.dumps(as_plotly(chart))


def test_a_class_called_script_is_text_everywhere(page_alone, tmp_path):
    run = made_run(tmp_path / "a", overrides={"description": EVIL, "data.source": EVIL})
    write_lines(run.bad_files_file, [{"file": EVIL, "reason": EVIL}])
    (run.folder / "train.log").write_text(f"2026-01-01 00:00:00  warning: {EVIL}\n")
    with mock.patch.object(exploration, "picture_of", lambda *_: small_picture([EVIL, "b"])):
        text = report(run.folder).read_text()
    assert EVIL not in text
    assert text.count("<script") == 4  # the data, the map's images, Plotly, and the page's own
    assert stdlib_html.escape(EVIL) in text


def test_only_the_page_s_own_scripts_may_run_and_nothing_is_fetched(page_alone, tmp_path):
    text = report(made_run(tmp_path / "a").folder, points=0).read_text()
    policy = stdlib_html.unescape(re.search(r'Security-Policy" content="([^"]*)"', text)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert not re.search(r'(src|href)="(?!data:|#)', re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))


# ------------------------------------------------------------------------------------------------ figures


LINES = Chart("l", "t", "c", [Series("a", [1, 2], [1.0, None]), Series("b", [1], [2.0], deviation=[0.1])], log_y=True)
BARS = Chart("b", "cost $1_2$", "c", [Series("a", ["x", "<y>"], [1.0, 2.0])], kind="bars")
POINTS = Chart("p", "t", "c", [Series(str(i), [0.0], [1.0], places=[i]) for i in range(9)], kind="points")
HEAT = Chart("h", "t", "c", [], kind="heat", cells=[[90.0, 10.0], [0.0, 100.0]], names=["$a", "<b>"])


@pytest.mark.parametrize("chart", [LINES, BARS, POINTS, HEAT], ids=lambda chart: chart.kind)
def test_every_kind_of_figure_is_one_that_plotly_accepts(chart):
    figure = go.Figure(as_plotly(chart))  # an unknown key or a wrong value is an error here
    assert len(figure.data) == max(1, len(chart.series))
    assert chart.alt


def test_twelve_classes_differ_in_hue_and_more_in_shape():
    many = Chart("p", "t", "c", [Series(str(i), [0.0], [1.0]) for i in range(24)], kind="points")
    marks = [(trace["marker"]["color"], trace["marker"]["symbol"]) for trace in as_plotly(many)["data"]]
    assert len(set(marks)) == 24
    first = [colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))) for colour, _ in marks[:12]]
    hues = sorted(360 * hue for hue, _, _ in first)
    assert min(b - a for a, b in zip(hues, [*hues[1:], hues[0] + 360])) > 10
    assert all(0.2 < lightness < 0.75 and saturation > 0.3 for _, lightness, saturation in first)  # on white and black


def test_figures_for_papers_are_svg_and_png(tmp_path):
    files = static.save([LINES, BARS, POINTS, HEAT], tmp_path)
    assert sorted(file.name for file in files) == sorted(f"{k}.{s}" for k in "lbph" for s in ("svg", "png"))
    for file in files:
        if file.suffix == ".png":
            assert Image.open(file).size[0] >= 800
        else:
            assert "<svg" in file.read_text()


def test_the_same_figure_is_the_same_file(tmp_path):
    static.save([LINES], tmp_path / "a")
    static.save([LINES], tmp_path / "b")
    assert (tmp_path / "a" / "l.svg").read_bytes() == (tmp_path / "b" / "l.svg").read_bytes()


def test_long_curves_are_thinned_and_keep_their_ends():
    lines = [{"epoch": i, "loss": float(i)} for i in range(50_000)]
    found = run_curves.curve(lines, "loss", "loss")
    assert len(found.x) == run_curves.MOST_POINTS
    assert (found.x[0], found.x[-1]) == (0, 49_999)


def test_the_spectrum_is_drawn_from_its_first_to_its_last_epoch(tmp_path):
    spectrum = [{"step": i, "epoch": i, "ranks": [1, 2, 4], "shares": [0.5, 0.3, 0.0]} for i in range(1, 101)]
    chart = run_curves.covariance(read_record(made_run(tmp_path / "a", spectrum=spectrum).folder)).charts[0]
    assert chart.key == "spectrum"
    assert [chart.series[0].name, chart.series[-2].name] == ["epoch 1", "epoch 100"]
    assert chart.series[-1].y == [0.25, 0.25]  # an even spread over four dimensions
    assert min(chart.series[0].y) > 0  # a logarithm follows


def test_per_class_accuracy_and_confusion_are_those_of_the_counts():
    section = image_sections.classes(small_picture(["a", "b"]))
    bars, heat = section.charts
    assert dict(zip(bars.series[0].x, bars.series[0].y)) == {"a": 75.0, "b": 100.0}
    assert heat.cells == [[75.0, 25.0], [0.0, 100.0]]
    assert "87.5 % accuracy" in bars.caption


def test_neighbours_of_another_class_are_marked():
    text = joined(*image_sections.gallery(small_picture(["cat", "dog"])).content)
    assert text.count('class="right"') == text.count('class="wrong"') == 1
    assert 'alt="dog, another class, cosine 0.80"' in text


def test_images_without_classes_have_clusters_and_no_confusion():
    section, thumbnails = image_sections.map_section(small_picture([], labelled=False))
    assert [series.name for series in section.charts[0].series] == ["cluster 1", "cluster 2"]
    assert thumbnails.notes[1] == "cluster 2"
    assert "for example from class folders" in joined(
        *image_sections.classes(small_picture([], labelled=False)).content
    )
    assert 'class="right"' not in joined(*image_sections.gallery(small_picture([], labelled=False)).content)


def decoded(atlas, place) -> np.ndarray:
    """An image of an atlas, cut out as the page does it."""
    content = base64.b64decode(atlas.sheets[place // atlas.per_sheet].partition(",")[2])
    sheet = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    inside = place % atlas.per_sheet
    top, left = inside // atlas.columns * atlas.side, inside % atlas.columns * atlas.side
    return sheet[top : top + atlas.side, left : left + atlas.side]


def test_an_atlas_gives_back_each_image():
    count = COLUMNS * COLUMNS + 5
    values = (np.arange(count) * 37 % 251).astype(np.uint8)
    atlas = build_atlas(np.broadcast_to(values[:, None, None, None], (count, 8, 8, 3)))
    assert len(atlas.sheets) == 2
    for place in (0, 33, count - 1):
        middle = decoded(atlas, place)[3:5, 3:5].astype(int)
        assert abs(middle - int(values[place])).max() <= 12


def test_an_atlas_keeps_to_its_budget_by_quality_and_then_by_size():
    noise = np.random.default_rng(0).integers(0, 256, (256, 32, 32, 3), dtype=np.uint8)
    sizes = [sum(map(len, build_atlas(noise, budget).sheets)) * 3 / 4 for budget in (1 << 30, 100_000, 30_000)]
    assert sizes[0] > 100_000
    assert sizes[1] <= 100_000
    assert sizes[2] <= 30_000
    assert build_atlas(noise, 30_000).side < 32
    assert build_atlas(noise, 1).sheets  # it cannot be kept, and something is shown


# ------------------------------------------------------------------------------------------------ the embedding


def test_a_map_has_two_finite_numbers_for_each_image_and_says_how():
    features = np.random.default_rng(0).normal(size=(120, 8)).astype(np.float32)
    with (
        mock.patch.object(exploration.importlib.util, "find_spec", lambda name: None),
        mock.patch.object(exploration, "LANDMARKS", 60),
    ):
        positions, how = exploration.project(features)
    assert positions.shape == (120, 2)
    assert np.isfinite(positions).all()
    assert "t-SNE of 8 principal components, fitted to 60 of them" in how
    assert exploration.project(features[:5, :1])[0].shape == (5, 2)


def test_images_that_are_not_arranged_stand_by_those_they_resemble():
    """Two far groups: everyone ends up in the half of the map that their own group's landmarks are in."""
    points = np.concatenate([np.zeros((20, 3)), np.full((20, 3), 100.0)]) + np.random.default_rng(0).normal(
        size=(40, 3)
    )
    marks = np.arange(0, 40, 4)
    embedded = np.where(marks[:, None] < 20, [-10.0, 0.0], [10.0, 0.0])
    placed = exploration._placed(points, marks, embedded)
    assert (placed[:20, 0] < -9).all()
    assert (placed[20:, 0] > 9).all()
    np.testing.assert_array_equal(placed[marks], embedded)


def labelled(labels) -> Source:
    values = torch.tensor(labels)
    return Source("s", len(values), lambda i: torch.zeros(3, 4, 4), labels=values, classes=("a", "b", "c"))


def test_classes_take_turns_in_the_gallery():
    labels = [0] * 50 + [1] * 5 + [2] * 2
    extracted = Extracted(torch.zeros(57, 2), torch.arange(57))
    chosen = exploration._spread(extracted, labelled(labels), 9)
    assert torch.tensor(labels)[chosen].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    assert len(set(chosen.tolist())) == 9


def test_neighbours_and_confusion_are_those_of_brute_force():
    generator = torch.Generator().manual_seed(0)
    bank = Extracted(torch.randn(40, 4, generator=generator), torch.arange(40).flip(0))
    asked = Extracted(torch.randn(12, 4, generator=generator), torch.arange(1, 13))
    known, true = labelled([i % 3 for i in range(40)]), labelled([i % 3 for i in range(13)])
    _, nearest = exploration._nearest(asked.features, bank.features)
    cosine = torch.nn.functional.cosine_similarity(
        asked.features[:, None].double(), bank.features[None].double(), dim=2
    )
    assert nearest.tolist() == cosine.argsort(dim=1, descending=True)[:, :8].tolist()
    confusion = exploration._confusion(bank, known, asked, true)
    by_hand = np.zeros((3, 3), dtype=int)
    for row, place in zip(cosine, asked.places.tolist()):
        votes = np.zeros(3)
        for other in row.argsort(descending=True)[:20].tolist():
            votes[int(known.labels[bank.places[other]])] += np.exp(float(row[other]) / 0.07)
        by_hand[int(true.labels[place]), votes.argmax()] += 1
    np.testing.assert_array_equal(confusion, by_hand)


def test_thumbnails_are_central_squares_of_any_image():
    image = torch.zeros(1, 40, 80)
    image[:, :, 20:60] = 1.0  # its central square is white
    source = Source("s", 1, lambda i: image)
    made = exploration.thumbnails(source, torch.tensor([0]), 16)
    assert made.shape == (1, 16, 16, 3)
    assert made.dtype == np.uint8
    assert (made == 255).all()


def test_thumbnails_of_files_take_a_thread_each_and_leave_the_others_alone():
    """Threads of one operator wait for each other, for 10,000 small images most of the time where cores are busy."""
    before, seen = torch.get_num_threads(), []

    def fetch(place: int) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if place == 1:
            raise BadImage("1.png", "empty")
        return torch.full((3, 8, 12), 50 * place, dtype=torch.uint8)

    torch.set_num_threads(2)
    try:
        found = exploration.thumbnails(Source("s", 4, fetch), torch.tensor([0, 1, 3]), 4)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert after == 2
    assert found[:, 0, 0, 0].tolist() == [0, 0, 150]


def test_a_run_is_reported_from_its_folder_of_images(tmp_path, tiny):
    """All of it, from training to the page: classes, names and images are those of the folder."""
    colours = {"reds": (200, 30, 30), "blues": (30, 30, 200)}
    for name, colour in colours.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            Image.new("RGB", (20, 16 + number), colour).save(tmp_path / "images" / name / f"{number}.png")
    (tmp_path / "images" / "reds" / "broken.png").write_bytes(b"no image")
    settings = tiny | {"data.limit": None, "training.epochs": 1, "data.most_bad": 0.5}
    run = pretrain("demo", tmp_path / "images", tmp_path / "run", settings)
    evaluated = [digest(run.backbone_file)]
    picture = exploration.picture_of(run.folder, None, 1_000, 5, evaluated)
    assert picture.classes == ["blues", "reds"]
    assert len(picture.positions) == len(picture.points.names) == len(picture.points.thumbnails) == 60
    for name, label, pixels in zip(picture.points.names, picture.points.labels, picture.points.thumbnails):
        assert picture.classes[label] in name
        assert abs(pixels[4, 4].astype(int) - colours[picture.classes[label]]).max() <= 3
    _, test = exploration._splits(open_subject(run.folder), 16)
    assert picture.confusion.sum() == sum("broken" not in test.names(place) for place in range(len(test)))
    path = report(run.folder)
    text = path.read_text()
    assert "1 file could not be read" in text
    assert "broken.png" in text
    assert sorted(file.name for file in (run.folder / "figures").glob("map.*")) == ["map.png", "map.svg"]


def test_images_that_are_gone_cost_the_map_and_not_the_report(page_alone, tmp_path):
    run = made_run(tmp_path / "run", overrides={"data.source": str(tmp_path / "gone")}, results=[knn(80.0, 20.0)])
    text = report(run.folder).read_text()
    assert "No map and no gallery" in text
    assert "Pretraining helped" in text


# ------------------------------------------------------------------------------------------------ several runs


def test_a_study_has_a_page_with_its_description_and_figures(tmp_path):
    for seed, value in enumerate((60.0, 62.0)):
        numbers = {"trained": {"top1": value}, "untrained": {"top1": 20.0}}
        result = {"protocol": "linear", "data": {"source": "textures", "test": 2000}, "numbers": numbers}
        made_run(tmp_path / f"tico-seed{seed}", results=[result], overrides={"training.seed": seed})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"description": f"Which? {EVIL}"}))
    text = report(tmp_path).read_text()
    assert "61.0 ± 1.4" in text
    assert "Published results" not in text  # none is of textures
    assert EVIL not in text
    assert (tmp_path / "figures" / "accuracy-seconds.svg").is_file()


def test_losses_of_different_methods_are_drawn_in_the_range_of_each(tmp_path):
    def losses(*methods):
        runs = [
            made_run(
                tmp_path / "-".join((*methods, str(number))),
                metrics=[
                    log_line(step, step / 10, loss=scale * loss) for step, loss in ((10, 8.0), (20, 2.0), (30, 5.0))
                ],
                overrides={"method": {"name": method}, "training.epochs": 3, "training.seed": number},
            )
            for number, (method, scale) in enumerate(zip(methods, (1, -100)))
        ]
        comparison = comparison_of(read_records([run.folder for run in runs]))
        return [list(series.y) for series in curves(comparison).charts[0].series]

    assert losses("tico", "simclr") == [[1, 0, 0.5], [0, 1, 0.5]]
    assert losses("tico", "tico") == [[8, 2, 5], [-800, -200, -500]]


def test_several_runs_are_written_to_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", overrides={"method.rho": 20.0})
    path = report([a.folder, b.folder])
    assert path.resolve() == tmp_path / "report" / "report.html"
    text = path.read_text()
    assert "<code>method.rho</code>" in text
    assert "<mark>20.0</mark>" in text
    assert "No run has an accuracy yet" in text


def test_a_table_sorts_by_numbers_not_by_what_is_written():
    made = table(["a"], [[Cell("1,000 ± 3", 1000.0)], [Cell("")]], sortable=True)
    assert 'data-value="1000.0"' in made
    assert "<button" in made


# ------------------------------------------------------------------------------------------------ what users do wrong


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_what_is_not_a_run_is_one_line(tmp_path, capsys, verb):
    file = tmp_path / "file"
    file.write_text("nothing")
    for words in ([str(tmp_path)], [str(tmp_path / "nowhere")], [str(file)]):
        with mock.patch.object(sys, "argv", ["tico", verb, *words]), pytest.raises(SystemExit) as stopped:
            main()
        line = capsys.readouterr().err
        assert stopped.value.code == 2
        assert line.count("\n") == 1
        assert "not a run folder" in line


def test_what_is_no_run_among_several_is_passed_over(tmp_path, monkeypatch, capsys, page_alone):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    run = made_run(tmp_path / "run")
    assert report([tmp_path / "models", run.folder], points=0) == run.folder / "report.html"
    assert capsys.readouterr().err == f"passed over, since not a run folder: {tmp_path / 'models'}\n"


def test_a_broken_recipe_and_an_empty_study_are_one_line(tmp_path):
    (tmp_path / "recipe.yaml").write_text("[1, 2]")
    with pytest.raises(UserError, match="not a recipe"):
        report(tmp_path)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.yaml").write_text("{}")
    with pytest.raises(UserError, match="no run of this study has started"):
        report(tmp_path / "study")
    with pytest.raises(UserError, match="which run"):
        report([])
    with pytest.raises(UserError, match="is a file"):
        report(made_run(tmp_path / "run").folder, out=tmp_path / "recipe.yaml")


def test_other_images_that_cannot_be_read_are_an_error(tmp_path):
    run = made_run(tmp_path / "run")
    with pytest.raises(UserError):
        report(run.folder, data=tmp_path / "gone")


def test_a_page_without_figures_does_not_carry_plotly():
    assert len(page("t", [], [Section("a", "A", [])])) < 100_000


# ------------------------------------------------------------------------------------------------ what training keeps


def test_the_spectrum_is_that_of_the_covariance():
    method = TiCo(torch.nn.Flatten(), width=4, config=Config(hidden=4, dim=300))
    basis = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.linspace(1, 3, 300, dtype=torch.float64)
    method.covariance().copy_(basis @ torch.diag(values) @ basis.T)
    found = monitor.spectrum(method)
    assert found["ranks"][:3] == [1, 2, 3]
    assert found["ranks"][-1] == 300
    assert len(found["ranks"]) <= monitor.SPECTRUM_RANKS
    expected = (values.flip(0) / values.sum())[[rank - 1 for rank in found["ranks"]]]
    assert found["shares"] == pytest.approx(expected.tolist(), rel=1e-3)
    assert monitor.spectrum(Method(torch.nn.Flatten())) is None


def test_keeping_the_spectrum_changes_nothing_and_resumes_without_repetition(tmp_path, tiny):
    kept = pretrain("demo", None, tmp_path / "kept", tiny)
    with mock.patch.object(monitor, "spectrum", lambda method: None):
        plain = pretrain("demo", None, tmp_path / "plain", tiny)
    assert digest(kept.backbone_file) == digest(plain.backbone_file)
    losses = [[line["loss"] for line in run.metrics()] for run in (kept, plain)]
    assert losses[0] == losses[1]
    lines = [json.loads(line) for line in kept.spectrum_file.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert all(sum(line["shares"]) == pytest.approx(1, abs=1e-3) for line in lines)
    assert not plain.spectrum_file.exists()
    with monitor.Monitor(kept, 9, 32, Position(6)):  # as a run that goes on after its second epoch
        assert [json.loads(line)["epoch"] for line in kept.spectrum_file.read_text().splitlines()] == [1, 2]


def test_tensorboard_has_the_same_scalars_and_the_contact_sheet(tmp_path, tiny):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = pretrain("demo", None, tmp_path / "run", tiny | {"training.epochs": 1})
    events = EventAccumulator(str(run.folder))
    events.Reload()
    names = set(run.metrics()[-1]) - {"step", "epoch"}
    assert names <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["views"]
    shown = Image.open(io.BytesIO(events.Images("views")[0].encoded_image_string))
    np.testing.assert_array_equal(np.asarray(shown.convert("RGB")), np.asarray(Image.open(run.folder / "views.png")))


def test_the_terms_of_any_method_are_drawn():
    line = log_line(1, 1.0)
    assert run_curves.loss_terms(
        {"step": 1, "loss": 1.0, "variance": 0.5, "covariance": 0.1, "embedding_std": 0.0}
    ) == [
        "loss",
        "variance",
        "covariance",
    ]
    assert run_curves.loss_terms(line) == ["loss"]


def test_a_thousand_classes_are_cut_down_to_what_can_be_seen():
    names = [f"class {i}" for i in range(1000)]
    few = small_picture(names)
    many = Picture(**vars(few) | {"clusters": np.zeros(8, dtype=int), "confusion": np.eye(1000, dtype=int)})
    bars, heat = image_sections.classes(many).charts
    assert len(bars.series[0].x) == image_sections.MOST_BARS
    assert "The 20 hardest and the 20 easiest of 1,000 classes" in bars.caption
    assert len(heat.names) == image_sections.CONFUSED_CLASSES
    assert "25 classes of 1,000" in heat.caption


def test_colours_that_were_chosen_are_not_dashed():
    series = [Series(str(i), [1, 2], [1.0, 2.0], colour="#000000") for i in range(10)]
    assert {trace["line"]["dash"] for trace in as_plotly(Chart("x", "t", "c", series))["data"]} == {"solid"}
