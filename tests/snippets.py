"""The commands and the Python of the documents, and how tests carry them out at small size.

A page's snippets run in their order, in a folder of their own, in this process. The files that a page speaks of lie
there (`stand_ins`), and so do the runs that it speaks of but does not make. Commands run as written, with words after
them that make them small (`small`); Python runs as written but for a few replaced words (`Desk.replaced`).
"""

import importlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from stand_ins import TINY_RESNET, TINY_VIT, lay_out, prepared_study
from test_detection import SMALL as SMALL_DETECTOR
from tico_ssl import pretrain
from tico_ssl.cli import app
from tico_ssl.cli._app import split_words
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.studies import timing, worker
from tico_ssl.training.stop import NotFinite

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = re.compile(r"(tico|torchrun|pip|make|git|python|hf|CUDA_VISIBLE_DEVICES=\S+|\.venv/bin/\S+) ")
SYNOPSIS = re.compile(r"^[^#]*( \[[A-Za-z- ]+\]|\.\.\.)")  # as in `tico report RUN...`, which is no command to type
OURS = re.compile(r"(?:^| )(?:tico|-m tico_ssl) ")


@dataclass(frozen=True)
class Snippet:
    """A command, a block of Python, or the YAML of a study, of a page."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words after `tico`, however it is started; none of other programs."""
        if self.kind != "command":
            return []
        ours = OURS.search(self.text)
        return shlex.split(self.text[ours.end() :].removesuffix(" &"), comments=True) if ours else []

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0][:70]}"


def name_of(page: Path) -> str:
    """README.md, docs/faq.md."""
    return page.relative_to(ROOT).as_posix()


def snippets_of(page: Path) -> list[Snippet]:
    """All of a page, in order."""
    return [Snippet(name_of(page), line, kind, text) for line, kind, text in _found(page.read_text(encoding="utf-8"))]


def _found(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, kind and text: of blocks of sh every line, of other code the lines that begin with a program's name."""
    for line, language, block in _blocks(text.splitlines()):
        if language == "python":
            yield line, "python", "\n".join(block) + "\n"
        elif language == "yaml":
            yield line, "study", "\n".join(block) + "\n"
        elif language in ("", "sh"):
            for offset, command in _commands(block):
                if language == "sh" or (PROGRAMS.match(command) and not SYNOPSIS.search(command)):
                    yield line + offset, "command", command


def _blocks(lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Fenced code, and code that is indented by four spaces: the number of its first line, its language, its lines."""
    block, language, begin = list[str](), None, 0
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("```"):
            if language is not None:
                yield begin, language, block
            block, begin = [], number + 1
            language = line[3:].strip() if language is None else None
        elif language is not None:
            block.append(line)
        elif line.startswith("    "):
            begin = begin if block else number
            block.append(line[4:])
        elif block:
            yield begin, "", block
            block = []


def _commands(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Commands, which a backslash continues on the next line."""
    begun, begin = "", 0
    for number, line in enumerate(lines):
        begin = begin if begun else number
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1]
        else:
            if begun and not begun.startswith("#"):
                yield begin, begun
            begun = ""


# ------------------------------------------------------------------------------------------------------ small size

NARROW = "tico/resnet10-w4"
SMALL = {
    "data.image_size": 16,
    "data.limit": 48,
    "backbone.name": NARROW,
    "optimizer.warmup_epochs": 0.0,
    "training.batch_size": 8,
    "training.epochs": 1,
    "training.precision": "fp32",
    "training.workers": 1,
    "training.knn_every_epochs": 0,
}
HEADS = {"hidden": 16, "dim": 8}  # of the methods that have them
_detector = SMALL_DETECTOR | {"iterations": 1, "warmup_iterations": 0, "sizes": [32], "test_size": 32, "longest": 48}
_detector |= {"batch_size": 2, "width": 8, "proposals": 8, "regions": 8, "precise_norm": 1, "drawn": 1}
DETECTOR = [f"{key}={value}" for key, value in _detector.items()]
SMALL_PROTOCOLS = {
    "fine-tune": ["epochs=1", "least_steps=1"],
    "linear-augmented": ["epochs=1", "least_steps=1"],
    "semi-supervised": ["epochs=1", "least_steps=1", "draws=1"],
    "places205": ["epochs=1", "least_steps=1"],
    "inaturalist2018": ["epochs=1", "least_steps=1"],
    "few-shot": ["draws=2"],
    "clustering": ["restarts=1"],
    "svm": ["costs=[1.0]"],
    "detection": DETECTOR,
    "segmentation": DETECTOR,
}


def small_changes(recipe: str, changes: Mapping[str, object] = {}) -> dict[str, object]:
    """Settings that make a recipe a matter of a second. What a page sets itself gets another value than the default."""
    known = {"data.source": "photos"} | {key: value for key, value in changes.items() if key != "backbone.arguments"}
    method = load_recipe(recipe, known).method
    heads = {f"method.{key}": value for key, value in HEADS.items() if hasattr(method, key)}
    return SMALL | heads | {"training.epochs": 2 if "training.epochs" in changes else 1}


def small(words: list[str]) -> list[str]:
    """A command's words, and those that make it small."""
    words = list(words)
    return SHRINKING.get(words[0], list)(words)


def _smaller_recipe(words: list[str]) -> list[str]:
    names = [word for word in words[1:] if not word.startswith("-")]
    given = {"--epochs": "2", "--batch-size": "16", "--image-size": "24"}
    keys = {"--epochs": "training.epochs", "--batch-size": "training.batch_size", "--image-size": "data.image_size"}
    for option in given.keys() & set(words):
        words[words.index(option) + 1] = given[option]
    recipe = next((name for name in names if name in packaged_recipes()), "demo")
    changes = split_words([word for word in names if "=" in word])[1]
    settings = small_changes(recipe, changes)
    settings |= {"training.init": "public.pth"} if recipe == "photos-continue" and "--init" not in words else {}
    decided = [keys[option] for option in given.keys() & set(words)]
    return words + [f"{key}={value}" for key, value in settings.items() if key not in decided]


def _smaller_pretraining(words: list[str]) -> list[str]:
    return _smaller_recipe(words) + ([] if "--resume" in words else ["--overwrite"])


def _smaller_evaluation(words: list[str]) -> list[str]:
    named = [name for name in SMALL_PROTOCOLS if name in words or ("all" in words and name not in FOR_OTHER_DATA)]
    words = [re.sub(r"^torchvision/resnet(50|18(?==))", TINY_RESNET, word) for word in words]
    words = [re.sub(r"^timm/vit\w+", TINY_VIT, word) for word in words]
    return words + [f"{name}.{change}" for name in named for change in SMALL_PROTOCOLS[name]]


FOR_OTHER_DATA = ("detection", "segmentation", "places205", "inaturalist2018")
OF_LIBRARIES = ("torchvision", "timm", "huggingface", "detectron2")  # formats of networks that those have


def _smaller_subset(words: list[str]) -> list[str]:
    return [str(min(int(word), 20)) if before == "--subset" else word for before, word in zip(["", *words], words)]


SHRINKING = {
    "curate": _smaller_subset,
    "pretrain": _smaller_pretraining,
    "evaluate": _smaller_evaluation,
    "bench": lambda words: [*_smaller_recipe(words), "--seconds", "0.01"],
    "predict": lambda words: [*words, "--overwrite"],
    "finetune": lambda words: [*words, "--overwrite", *(["epochs=1"] if "head=whole" in words else [])],
}

# ---------------------------------------------------------------------------------------------------- carrying out


def tico(*words: str) -> None:
    """A command, in this process."""
    code = typer.main.get_command(app).main(list(words), prog_name="tico", standalone_mode=False)
    assert code in (0, None), f"exit code {code}"


class Desk:
    """A folder where the snippets of a page are carried out."""

    def __init__(
        self,
        folder: Path,
        page: Path,
        run: Path | None = None,
        names: Mapping[str, object] = {},
        replaced: Mapping[str, str] = {},
        small_study: Sequence[str] = ("--dry-run",),
    ) -> None:
        self.folder, self.page, self.run = folder, page, run
        self.small_study = small_study
        self.names, self.replaced = {"__name__": "documented", **names}, replaced
        self.snippets = snippets_of(page)
        lay_out(folder, page.read_text(encoding="utf-8"))
        module = re.search(r"`(my_lab/\w+\.py)`", page.read_text(encoding="utf-8"))
        if module:  # the first Python of such a page
            (folder / "my_lab").mkdir()
            code = next(snippet.text for snippet in self.snippets if snippet.kind == "python")
            (folder / module[1]).write_text(code, encoding="utf-8")
            importlib.invalidate_caches()
        for snippet in self.snippets:
            if snippet.kind == "study":  # whose first line is a comment, the name of its file
                (folder / snippet.text.split()[1]).write_text(self._replaced(snippet.text), encoding="utf-8")

    def carry_out(self, snippet: Snippet) -> None:
        """One snippet; the current folder is the desk's."""
        try:
            self._lend_runs(snippet)
            if snippet.kind == "python":
                exec(compile(self._replaced(snippet.text), str(snippet), "exec"), self.names)
            elif snippet.kind == "study":
                tico("study", snippet.text.split()[1], "--dry-run")
            else:
                self._command(list(self._expanded(snippet)))
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{snippet}\n{type(error).__name__}: {error}") from error

    def _command(self, words: list[str]) -> None:
        if words[0] == "replay":
            with in_place_of(Path(words[1]), diverged_run):
                tico(*words)
        elif words[0] == "export" and words[2] in OF_LIBRARIES:
            with in_place_of(Path(words[1]), run_of_a_library):
                tico(*words)
        elif words[0] == "study":
            tico(*words, *(self.small_study if "--dry-run" not in words else []))
        else:
            if "--resume" in words:  # begins it, for fewer epochs if the page says how many
                tico(*small([word for word in words if word != "--resume" and not word.startswith("training.epochs=")]))
            tico(*small(words))

    def _replaced(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    def _expanded(self, snippet: Snippet) -> Iterator[str]:
        """Words as a shell passes them on: patterns without quotes become the files that there are."""
        for word in snippet.words:
            if "*" in word and f" {word}" in snippet.text:
                yield from sorted(map(str, Path().glob(word)))
            else:
                yield word

    def _lend_runs(self, snippet: Snippet) -> None:
        """A run that the page has not made is a copy of one that was made before."""
        made = re.findall(r"--out (runs/[\w-]+)", snippet.text) + re.findall(r'out="(runs/[\w-]+)', snippet.text)
        for name in re.findall(r"(?<![\w/])runs/[\w-]+", snippet.text):
            if self.run is None or name in made or (self.folder / name).exists():
                continue
            if name.startswith("runs/study-"):
                prepared_study(self.folder / name)
            else:
                shutil.copytree(self.run, self.folder / name)


@contextmanager
def in_place_of(run: Path, make: Callable[[Path], None]) -> Iterator[None]:
    """Another run, for a moment, where the page's run is."""
    aside = run.rename(run.with_name("aside"))
    make(run)
    yield
    shutil.rmtree(run)
    aside.rename(run)


def diverged_run(folder: Path) -> None:
    """A run whose training became NaN."""
    hot = {"optimizer.name": "adamw", "optimizer.lr": 1e9, "optimizer.scale_lr": False, "training.epochs": 2}
    with pytest.raises(NotFinite):
        pretrain("demo", out=folder, overrides=small_changes("demo") | hot | {"training.log_every_steps": 50})


def run_of_a_library(folder: Path) -> None:
    """A run whose network torchvision has, too."""
    changes = {"backbone.name": "torchvision/resnet18", "data.image_size": 64, "data.limit": 8}
    pretrain("demo", out=folder, overrides=small_changes("demo") | changes | {"training.batch_size": 4})


def in_this_process(works, width, share_of, label) -> dict[str, str]:
    """In place of `studies.processes.run_all`: timing and runs of a study, one after the other, without importing torch
    anew for each."""
    for work in works:
        _, task, folder, name = work.arguments
        {"time": worker.time_variant, "run": worker.make_run}[task](Path(folder), name)
    return {}


def small_studies(monkeypatch) -> None:
    """Studies train in this process, and time their steps for a moment."""
    monkeypatch.setattr("tico_ssl.studies.processes.run_all", in_this_process)
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.05)
