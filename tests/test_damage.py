"""Damaged text files of a run or a study: every command says so in one line, and goes on with what is readable."""

import json
import random
import re
import shutil
import sys

import pytest

from faults import FAULTS
from tico_ssl import evaluate
from tico_ssl.cli import main
from tico_ssl.config.recipe import dump_recipe
from tico_ssl.config.study import Variant
from tico_ssl.report import static
from tico_ssl.results.record import images_of
from tico_ssl.studies.cost import Cost, cost_file, read_cost, write_cost

READING = ("compare", "csv", "report")
FILES = {  # and the commands that read them
    "recipe.yaml": (*READING, "evaluate", "embed", "export", "resume"),
    "environment.json": READING,
    "metrics.jsonl": (*READING, "resume"),
    "spectrum.jsonl": READING,
    "results.jsonl": (*READING, "evaluate"),
    "train.log": READING,
}
SETTINGS = [  # of the fixture `run`
    "data.limit=300",
    "data.image_size=16",
    "backbone.name=tico/resnet10-w4",
    "method.hidden=32",
    "method.dim=16",
    "training.batch_size=50",
    "training.epochs=1",
    "training.knn_every_epochs=0",
]
COMMANDS = {
    "compare": ("compare", "RUN"),
    "csv": ("compare", "RUN", "RUN", "--format", "csv"),
    "report": ("report", "RUN", "--points", "0", "--out", "OUT/report"),
    "evaluate": ("evaluate", "RUN", "rankme"),
    "embed": ("embed", "RUN", "--out", "OUT/features.npz"),
    "export": ("export", "RUN", "timm", "--out", "OUT/backbone.pth"),
    "resume": ("pretrain", "demo", "--resume", "--out", "RUN", *SETTINGS),
}


def said(capsys, *words) -> tuple[int, str]:
    """The exit code of a command and what it printed; a traceback is an exception here."""
    before = sys.argv
    sys.argv = ["tico", *map(str, words)]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    out, error = capsys.readouterr()
    assert error.count("\n") <= 1 and "Traceback" not in error, error
    assert (code == 2) == error.startswith("error: "), (code, error)
    return code, out + error


@pytest.fixture(scope="module")
def whole(run):
    """A run with a result."""
    evaluate(run.folder, "knn")
    return run.folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def flipped(content: bytes, seed: int) -> bytes:
    """A few flipped bits."""
    draw, damaged = random.Random(seed), bytearray(content)
    for _ in range(5):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def wrong_types(content: bytes) -> bytes:
    """JSON and YAML that parse, with values of other types."""
    try:
        lines = [json.loads(line) for line in content.splitlines()]
    except ValueError:
        return content.replace(b": ", b": - ")
    for line in lines:
        for number, key in enumerate(list(line)):
            line[key] = (None, "text", [1], {"a": 2}, 10**400, True)[number % 6]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "binary": lambda content: b"\x89PNG\0\xff\xfe" * 9,
    "list": lambda content: b"[1, 2]\n",
    "deep": lambda content: b"[" * 100_000 + b"\n",
    "null": lambda content: b"null\n",
    "types": wrong_types,
    **{f"bits {seed}": lambda content, seed=seed: flipped(content, seed) for seed in range(2 * FAULTS)},
}


@pytest.mark.faults
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_command_says_in_one_line_what_is_damaged(copy, tmp_path, capsys, monkeypatch, file, damage):
    place = copy / file
    content = place.read_bytes() if place.is_file() else b'{"epoch": 1, "ranks": [1, 2], "shares": [0.5, 0.5]}\n'
    if file == "recipe.yaml" and damage == "deep":
        pytest.skip("of YAML's own limits see test_recipes")
    monkeypatch.setattr(static, "save", lambda charts, folder: [])  # figures take seconds
    for command in FILES[file]:
        place.write_bytes(DAMAGES[damage](content))
        words = COMMANDS[command]
        said(capsys, *(word.replace("RUN", str(copy)).replace("OUT", str(tmp_path)) for word in words))


def test_what_is_readable_is_shown_and_the_rest_said(copy, tmp_path, capsys):
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\nnot json\n')
    with (copy / "results.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"protocol": "knn", "num')
    (copy / "environment.json").write_text("{")
    code, text = said(capsys, "compare", copy)
    assert code == 0 and "knn top1_k20" in text
    assert "environment.json is damaged and left out" in text
    assert "metrics.jsonl is damaged: 2 of 3 lines are left out" in text
    assert "results.jsonl is damaged: 1 of 2 lines are left out" in text
    code, text = said(capsys, "report", copy, "--points", "0")
    assert code == 0 and "warning: run: metrics.jsonl is damaged" in text
    assert "metrics.jsonl is damaged" in (copy / "report.html").read_text()


HOSTILE = '"<b>\\u001b[2J\\ud800"'  # a lone surrogate, which no file in UTF-8 can have
NUMBERS = ("NaN", "Infinity", "1e308", "-1e308", "1e-308", "9" * 400, "true")


def replaced(file, pattern, value):
    text, count = re.subn(pattern, lambda found: found[1] + value, file.read_text())
    assert count
    file.write_text(text)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "key", [("results.jsonl", "top1_k20"), ("metrics.jsonl", "images_per_second"), ("metrics.jsonl", "seconds")]
)
def test_numbers_that_cannot_have_been_measured_are_left_out(copy, tmp_path, capsys, key, number):
    """With figures: whatever is drawn of them."""
    name, metric = key
    replaced(copy / name, rf'("{metric}": )[-\d.e]+', number)
    other = shutil.copytree(copy, tmp_path / "other")
    for words in (("compare", copy, other), ("report", copy, "--points", "0")):
        code, text = said(capsys, *words)
        assert code == 0 and f"{name} is damaged: 1 of 1 line" in text


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("results.jsonl", '("source": )"[^"]*"'), ("environment.json", '("command": )".*"'), ("bad_files.jsonl", "")],
)
def test_text_that_is_not_utf8_is_shown_as_escapes(copy, tmp_path, capsys, monkeypatch, name, pattern):
    monkeypatch.setattr(static, "save", lambda charts, folder: [])
    if name == "bad_files.jsonl":
        (copy / name).write_text(f'{{"file": {HOSTILE}, "reason": {HOSTILE}}}\n')
    else:
        replaced(copy / name, pattern, HOSTILE)
    for words in (("compare", copy), ("report", copy, "--points", "0")):
        assert said(capsys, *words)[0] == 0
    assert "\\ud800" in (copy / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["0x" + "F" * 6_000, "9" * 6_000, "1e308", ".nan"])
@pytest.mark.parametrize("key", ["epochs", "batch_size", "seed"])
def test_a_recipe_with_an_impossible_number_is_one_line(copy, tmp_path, capsys, key, number):
    if (key, number) in {("seed", "1e308"), ("seed", ".nan")}:
        pytest.skip("not a number of a table")
    replaced(copy / "recipe.yaml", rf"(\b{key}: )\d+", number)
    for words in (("compare", copy), ("report", copy), ("describe", copy / "recipe.yaml")):
        code, text = said(capsys, *words)
        assert code == 2 and len(text) < 1_000


# --------------------------------------------------------------------------------------------------------- studies

STUDY = {
    "study.yaml": b"description: two runs\nruns: {a: {recipe: demo}}\nseeds: [0, 1]\n",
    "results.json": json.dumps(
        {"rows": [{"run": "a", "failed": {"a-seed2": "no memory"}, "seconds": 3.0, "images_per_second": 9.0}]}
    ).encode(),
    "a-seed0/recipe.yaml": None,
    "a-seed1/results.jsonl": None,
}


@pytest.fixture
def study(whole, tmp_path):
    folder = tmp_path / "study"
    for seed in range(2):
        shutil.copytree(whole, folder / f"a-seed{seed}")
    for name, content in STUDY.items():
        if content is not None:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("file", STUDY)
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "deep"])
def test_a_damaged_study_is_compared_as_far_as_it_can_be_read(study, capsys, monkeypatch, file, damage):
    monkeypatch.setattr(static, "save", lambda charts, folder: [])
    place = study / file
    place.write_bytes(DAMAGES[damage](place.read_bytes()))
    for words in (("compare", study), ("report", study)):
        code, text = said(capsys, *words)
        assert code == 0, text
    if file == "a-seed0/recipe.yaml" and damage in ("binary", "list", "null", "empty"):
        assert "left out a-seed0: " in text


def test_a_damaged_cost_is_measured_again(tmp_path):
    variant = Variant("a", "demo", {})
    cost = Cost(0.1, 10, 32, "cpu", 1, dump_recipe(variant.load()))
    (tmp_path / "costs").mkdir()
    write_cost(tmp_path, variant, cost)
    assert read_cost(tmp_path, variant) == cost
    content = cost_file(tmp_path, variant).read_bytes()
    for name in ("empty", "cut", "binary", "list", "deep", "null", "types"):
        cost_file(tmp_path, variant).write_bytes(DAMAGES[name](content) if name != "types" else b'{"recipe": 1}')
        assert read_cost(tmp_path, variant) is None


@pytest.mark.parametrize("unread", [{"test": "x"}, {"test": None}, [3], "x", 3])
def test_numbers_of_images_that_are_damaged_are_not_known(unread):
    assert images_of({"test": 60, "unread": unread}, "test") is None
    assert images_of({"test": 60, "unread": {"test": 24}}, "test") == 36
