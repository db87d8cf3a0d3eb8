"""What the documents show can be done: every command is understood, recipes and settings in them exist, and the page
about weights runs."""

import re
import shlex
from pathlib import Path

import click
import pytest
import torch
import typer
from PIL import Image

from tico_ssl.cli import app
from tico_ssl.cli._app import split_words
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks.backbones import build_backbone
from tiny import TINY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONAL = re.compile(r"\[[A-Za-z- ]+\]|\.\.\.")  # as in `tico report RUN...`, which is no command to type


def commands():
    """The lines in blocks of code that begin with tico, without their comments."""
    for page in PAGES:
        code = False
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("```"):
                code = not code
            elif (code or line.startswith("    ")) and line.strip().startswith("tico ") and not OPTIONAL.search(line):
                yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{page.name}: {line.strip()[:60]}")


COMMANDS = list(commands())


def parsed(words):
    """The verb and its arguments as the command line understands them."""
    command, names = typer.main.get_command(app), []
    context = click.Context(command)
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        names.append(name)
    return names, command.make_context(names[-1], list(words), resilient_parsing=False).params


def test_there_are_commands():
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_understood(words):
    names, arguments = parsed(words)
    if names == ["pretrain"]:
        recipe, changes = split_words(list(arguments["words"] or []))
        if (recipe or "demo") in packaged_recipes() and "my_lab" not in str(changes):
            load_recipe(recipe or "demo", {"data.source": "photos"} | changes)


def test_the_page_about_weights_runs(tmp_path, monkeypatch):
    """Its Python, at small size: with other photos, a narrow network and few epochs."""
    monkeypatch.chdir(tmp_path)
    random = torch.Generator().manual_seed(0)
    for number in range(40):
        for place in (Path("photos"), Path("labelled") / ("cats" if number % 2 else "dogs")):
            place.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8, generator=random)
            Image.fromarray(pixels.numpy()).save(place / f"{number}.png")
    torch.save(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16).network.state_dict(), "resnet18.pth")
    page = (ROOT / "docs" / "using-the-weights.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    small = {key: value for key, value in TINY.items() if key != "data.limit"} | {"training.batch_size": 8}
    small |= {"training.epochs": 1, "optimizer.warmup_epochs": 0.0}
    assert blocks
    for block in blocks:
        assert '{"training.epochs": 50}' in block
        exec(block.replace('{"training.epochs": 50}', repr(small)), {})
    assert Path("predictions.csv").read_text().count("\n") == 41
