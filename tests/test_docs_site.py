"""The documentation site builds; pages made from the code name all that the code has; examples of extensions run."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from tico_ssl import evaluate, pretrain
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import packaged_recipes
from tico_ssl.config.study import packaged_studies
from tico_ssl.views.executor import Views, sizes_of
from tiny import TINY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def build(monkeypatch):
    """The generators of pages, which are no package."""
    monkeypatch.syspath_prepend(DOCS / "_build")
    names = ("methods", "recipes", "command_line", "tables")
    yield lambda name: __import__(name).page()
    for name in names:
        sys.modules.pop(name, None)


def example(page):
    """The first Python of a page."""
    return (DOCS / "extending" / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def test_every_setting_of_every_method_is_on_its_page(build):
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", build("methods"), re.MULTILINE | re.DOTALL))
    assert sorted(sections) == catalogue.entries("methods")
    for name, text in sections.items():
        fields = catalogue.declaration("methods", name, "Config").model_fields
        assert [key for key in fields if key != "name" and f"| `method.{key}` |" not in text] == []
        assert f"`imagenet/{name}`" in text
        assert re.search(r"^    .*loss = ", text, re.MULTILINE), f"{name}: its formula is not set as code"
    assert (
        "| `method.beta` | `float >= 0, < 1` | `0.9` | Decay of the covariance's moving average. |" in sections["tico"]
    )


def test_every_recipe_and_study_is_on_its_page(build):
    page = build("recipes")
    assert [name for name in packaged_recipes() if f"| [{name}](#" not in page or f"### {name}\n" not in page] == []
    assert [name for name in packaged_studies() if f"| `{name}` |" not in page] == []
    simclr = next(line for line in page.splitlines() if line.startswith("| [cifar10/simclr]("))
    assert "| `simclr` | `resnet18` | `cifar10` | 1000 | 256 | 90.74 | [90.98](../../benchmarks/" in simclr
    assert simclr.endswith("| 25 minutes on one H200 |")


def test_every_verb_and_option_is_on_its_page(build):
    page = build("command_line")
    asked = subprocess.run([sys.executable, "-m", "tico_ssl", "--help"], capture_output=True, text=True, check=True)
    verbs = re.findall(r"^  ([a-z]+) ", asked.stdout.partition("Commands:")[2], re.MULTILINE)
    assert len(verbs) > 15
    assert [verb for verb in verbs if f"## tico {verb}" not in page] == []
    section = page.split("## tico pretrain\n")[1].split("\n## ")[0]
    assert "`--resume` | off |" in section
    assert "`--batch-size" in section
    assert "tico pretrain photos --data photos/" in section


def test_the_site_and_the_package_name_one_repository():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    repository = re.search(r"^repo_url: (\S+)", settings, re.MULTILINE)[1]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    assert all(url.startswith(repository) for url in urls.values() if "github" in url)


def test_every_page_is_in_the_navigation():
    """And nothing else, but what is generated."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w/-]+\.md", text))
    written = {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")}
    assert written <= named
    assert named - written == {f"reference/{name}.md" for name in ("methods", "recipes", "command-line")}
    assert yaml.safe_load(text)


def test_the_site_builds_without_a_warning_and_asks_no_other_server(tmp_path):
    """Needs the extra `docs`."""
    for library in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(library)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {file.name: file.read_text("utf-8") for file in (tmp_path / "site").rglob("*.html")}
    for name, text in pages.items():
        assert not re.search(r"<(script|img|link|iframe)\b[^>]*(src|href)=\"?(https?:)?//", text), name
        assert 'data-md-component="source"' not in text  # which would ask for the stars of the repository
    assert "<math" in pages["theory.html"]
    assert "arithmatex" not in pages["theory.html"]
    assert "https://github.com/tico-ssl/tico-ssl/tree/main/benchmarks/logs/cifar10-tico" in pages["is-it-working.html"]
    assert "https://github.com/tico-ssl/tico-ssl/blob/main/src/tico_ssl/methods/tico.py" in pages["paper.html"]


def test_the_spelling_is_right():
    """Needs the extra `docs`."""
    program = shutil.which("typos", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("typos is not installed")
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    done = subprocess.run([program, "--format", "brief", *pages], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_data_format_of_the_documentation_trains(tmp_path, monkeypatch):
    """Under its dotted name: both splits, labels, and an unreadable frame that is left out."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "frames.py").write_text(example("data-format.md"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    random = torch.Generator().manual_seed(0)
    for split, count in (("train", 48), ("test", 16)):
        folder = tmp_path / "scans" / split
        folder.mkdir(parents=True)
        for number in range(count):
            low, high = (0, 80) if number % 2 else (120, 256)
            frame = torch.randint(low, high, (48, 64), dtype=torch.uint8, generator=random).numpy().tobytes()
            (folder / f"{'night' if number % 2 else 'day'}-{number:03}.raw").write_bytes(frame)
    (tmp_path / "scans" / "train" / "day-cut.raw").write_bytes(b"short")
    place = f"my_lab.frames:{tmp_path / 'scans'}"
    small = {key: value for key, value in TINY.items() if key != "data.limit"} | {"training.batch_size": 8}
    run = pretrain("demo", place, tmp_path / "run", overrides=small)
    assert "3072" in (run.folder / "bad_files.jsonl").read_text(encoding="utf-8")
    result = evaluate(run.folder, "knn")
    assert result.numbers["trained"]["top1_k20"] > 80
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def test_the_view_operation_of_the_documentation_runs():
    found = {}
    exec(example("view-operation.md"), found)
    views = found["views"]
    assert isinstance(views, Views)
    levels = torch.tensor([2.0, 3.0])
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    made = found["posterise"](images, torch.tensor([1.0, 0.0]), levels)
    assert set(made[0].unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(made[1], images[1])
    drawn = views.draw(2, torch.Generator().manual_seed(0))
    decisions = views.decide(drawn, sizes_of(images))
    crops = views.crop((images * 255).to(torch.uint8), decisions)
    assert [view.shape for view in views.finish(crops, decisions)] == [(2, 3, 32, 32)] * 2
