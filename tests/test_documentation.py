"""What the documents show can be done: every command is understood, recipes and settings in them exist, and every
command, all Python and every study run at small size, but for those that are listed with the reason."""

import sys

import click
import pytest
import torch
import typer
from torch import nn

from snippets import PAGES, ROOT, Desk, Snippet, name_of, small_changes, small_studies, snippets_of
from stand_ins import labelled, pictures
from tico_ssl import pretrain
from tico_ssl.cli import app
from tico_ssl.cli._app import split_words
from tico_ssl.config.recipe import load_recipe, packaged_recipes

SNIPPETS = {name_of(page): snippets_of(page) for page in PAGES}
COMMANDS = [snippet for snippets in SNIPPETS.values() for snippet in snippets if snippet.kind == "command"]

RUN_ELSEWHERE = {  # pages whose snippets run in a test of their own
    "docs/theory.md": "test_theory.py",
    **{f"docs/tutorials/{page.name}": "test_tutorials.py" for page in (ROOT / "docs" / "tutorials").glob("*.md")},
}
NOT_RUN = {  # what a snippet contains, and why it is not run; commands of tico are understood all the same
    "pip install": "fetches from the network",
    "hf auth login": "needs an account",
    "hf upload": "needs an account; the folder that it takes is written by the command before",
    "git clone": "fetches from the network",
    "make demo": "installs from the network; what it runs then is on the page, too",
    "--slurm": "submits to a cluster (test_slurm.py)",
    "training.sharded=true": "needs several processes (test_collectives.py)",
    "--find-batch": "needs the memory of a GPU",
    "--init timm/resnet50.a1_in1k": "downloads weights (test_initial.py)",
    "loggers=[tensorboard,wandb]": "needs an account (test_loggers.py logs offline)",
    "loggers=[mlflow]": "needs a server (test_loggers.py has one)",
    "--gpu my-gpu.json": "needs the measurements of a GPU",
    "from detectron2.config": "needs detectron2, which is not on PyPI",
    "self.target = Target(": "three lines of the middle of a class",
}
SMALL_OVERRIDES = repr(small_changes("photos"))
REPLACED = {  # words of a page's Python, and what makes them small
    "docs/data.md": {'out="runs/pairs"': f'out="runs/pairs", overrides={SMALL_OVERRIDES}'},
    "docs/quick-start.md": {'out="runs/python"': f'out="runs/python", overrides={small_changes("demo")!r}'},
    "docs/using-the-weights.md": {
        '{"training.epochs": 50}': SMALL_OVERRIDES,
        'init="resnet18.pth"': 'init="public.pth"',  # of the network that is trained
    },
    "docs/integrations.md": {
        '{"training.batch_size": 256}': repr(small_changes("cifar10/byol")),
        "batch_size=256": "batch_size=8",
        'max_epochs=200, precision="bf16-mixed"': "max_epochs=1, accelerator='cpu', enable_progress_bar=False, "
        "enable_model_summary=False, logger=False, enable_checkpointing=False",
        "path/to/clone": str(ROOT),
        "cv=5": "cv=2",
    },
}


def names_left_to_the_reader(page: str) -> dict[str, object]:
    """What a page's Python takes for granted."""
    if page == "README.md":
        online, target = torch.randn(2, 8, 256)
        return {"online_embeddings": online, "target_embeddings": target, "model": nn.Linear(8, 256)}
    if page == "docs/integrations.md":
        images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
        given = pictures(12)
        paths, labels = [image for image, _ in given], [kind for _, kind in given]
        return {"dataset": list(images), "paths": paths, "labels": labels}
    return {}


def reason(snippet: Snippet) -> str | None:
    """Why a snippet is not run."""
    return next((why for part, why in NOT_RUN.items() if part in snippet.text), None)


def parsed(words):
    """The verb and its arguments as the command line understands them."""
    command, names = typer.main.get_command(app), []
    context = click.Context(command)
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        names.append(name)
    return names, command.make_context(names[-1], list(words), resilient_parsing=False).params


def test_there_are_commands_and_python():
    assert len(COMMANDS) > 100
    assert sum(snippet.kind == "python" for snippets in SNIPPETS.values() for snippet in snippets) > 30


@pytest.mark.parametrize("snippet", [snippet for snippet in COMMANDS if snippet.words], ids=str)
def test_every_command_is_understood(snippet, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # of benchmarks, where a page's method is
    names, arguments = parsed(snippet.words)
    if names == ["pretrain"]:
        recipe, changes = split_words(list(arguments["words"] or []))
        if (recipe or "demo") in packaged_recipes() and "my_lab" not in str(changes):
            load_recipe(recipe or "demo", {"data.source": "photos"} | changes)


def test_what_is_not_run_is_in_a_document():
    texts = [snippet.text for snippets in SNIPPETS.values() for snippet in snippets]
    assert [part for part in NOT_RUN if not any(part in text for text in texts)] == []
    for page, test in RUN_ELSEWHERE.items():
        assert SNIPPETS[page] and (ROOT / "tests" / test).is_file()
    for page, words in REPLACED.items():
        assert [old for old in words if not any(old in snippet.text for snippet in SNIPPETS[page])] == []


def test_other_programs_are_tico_or_not_run():
    assert [str(snippet) for snippet in COMMANDS if not snippet.words and not reason(snippet)] == []


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The run that pages speak of."""
    folder = tmp_path_factory.mktemp("documented")
    labelled(folder / "labelled")
    return pretrain("photos", str(folder / "labelled"), folder / "run", overrides=small_changes("photos")).folder


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # of other libraries
@pytest.mark.parametrize("page", [page for page in SNIPPETS if SNIPPETS[page] and page not in RUN_ELSEWHERE])
def test_a_page_runs(page, trained, tmp_path, monkeypatch):
    """Every snippet, in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)  # of benchmarks
    monkeypatch.syspath_prepend(tmp_path)  # of my_lab
    small_studies(monkeypatch)
    names, replaced = names_left_to_the_reader(page), REPLACED.get(page, {})
    desk = Desk(tmp_path, ROOT / page, trained, names, replaced)
    try:
        for snippet in desk.snippets:
            if reason(snippet) is None:
                desk.carry_out(snippet)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
            del sys.modules[name]
