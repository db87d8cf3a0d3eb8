"""What the documents show can be done: every command is understood, recipes and settings in them exist, and every
command and all Python run at small size, but for those that are listed with the reason."""

import click
import pytest
import torch
import typer

from snippets import PAGES, ROOT, SMALL, Desk, name_of, small_changes, small_studies, snippets_of
from tico_ssl import pretrain
from tico_ssl.cli import app
from tico_ssl.cli._app import split_words
from tico_ssl.config.recipe import load_recipe, packaged_recipes

ELSEWHERE = {  # pages whose snippets other tests carry out
    "docs/theory.md": "test_theory.py",
    "docs/tutorials/photos-to-search.md": "test_tutorials.py",
    "docs/tutorials/labelled-to-onnx.md": "test_tutorials.py",
    "docs/tutorials/comparing-methods.md": "test_tutorials.py",
    "docs/tutorials/your-own-loop.md": "test_tutorials.py",
}
NOT_RUN = {  # beginnings of snippets
    "pip install": "fetches from the network",
    "git clone": "fetches from the network",
    "make ": "installs from the network; its steps are commands that run",
    ".venv/bin/": "needs the environment that make installs",
}
SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]
COMMANDS = [pytest.param(snippet.words, id=str(snippet)) for snippet in SNIPPETS if snippet.words]
NAMES: dict = {}
REPLACED: dict = {}


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    from stand_ins import labelled
    folder = tmp_path_factory.mktemp("documented")
    labelled(folder / "labelled")
    return pretrain("photos", str(folder / "labelled"), folder / "run", overrides=small_changes("photos")).folder


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in ELSEWHERE and snippets_of(page)], ids=name_of)
def test_the_snippets_of_a_page_run(page, run, tmp_path, monkeypatch):
    import time
    monkeypatch.chdir(tmp_path)
    small_studies(monkeypatch)
    desk = Desk(tmp_path, page, run, NAMES.get(name_of(page), lambda: {})(), REPLACED.get(name_of(page), {}))
    errors = []
    for snippet in desk.snippets:
        if not any(snippet.text.startswith(b) for b in NOT_RUN):
            import os; t = sum(os.times()[:4]); w = time.time()
            try:
                desk.carry_out(snippet)
            except AssertionError as error:
                errors.append(str(error))
            with open("/tmp/times.txt", "a") as f: print(f"{sum(os.times()[:4])-t:.2f} {time.time()-w:.2f} {snippet}", file=f)
    assert not errors, "\n".join(errors)
