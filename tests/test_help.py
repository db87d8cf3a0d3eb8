"""Help on the command line: an example for every verb that works, every option with its default; and completion."""

import os
import re
import shlex
import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

import tico_ssl
from test_documentation import parsed
from tico_ssl.cli import app
from tico_ssl.cli._help import ORDER


def verbs(command=None, names=()):
    """Every verb of the command line with its name in words."""
    command = typer.main.get_command(app) if command is None else command
    if not hasattr(command, "commands"):
        return [pytest.param(command, list(names), id=" ".join(names))]
    return [found for name, one in command.commands.items() for found in verbs(one, (*names, name))]


@pytest.mark.parametrize(("command", "names"), verbs())
def test_every_verb_has_an_example_that_is_understood(command, names):
    text = CliRunner().invoke(app, [*names, "--help"]).output
    examples = [line.strip() for line in text.partition("Example")[2].splitlines() if line.strip().startswith("tico ")]
    assert examples
    for line in examples:
        assert parsed(shlex.split(line)[1:])[0] == names


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["finetune", "runs/a", "--lr-head", "2"], "No such option: --lr-head; settings have no dashes: lr_head=VALUE"),
        (["pretrain", "demo", "--method.rho=3"], "settings have no dashes: method.rho=VALUE"),
        (["pretrain", "demo", "--epoch", "2"], "Possible options: --epochs"),
        (["cache", "--epochs", "2"], "No such option: --epochs"),
    ],
)
def test_an_option_that_there_is_not_may_be_a_setting(words, hint):
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2
    assert hint in " ".join(said.output.split())
    assert ("settings have no dashes" in said.output) == ("settings have no dashes" in hint)


@pytest.mark.parametrize(("command", "names"), verbs())
def test_every_option_says_what_it_is_and_its_default(command, names):
    for one in command.params:
        help = getattr(one, "help", None)
        assert help, one.name
        if one.param_type_name != "option" or one.is_flag or one.name == "help":
            continue
        if one.default is None or one.default == ():
            assert any(word in help for word in ("default", "As ", "Set ", "Repeatable")), one.name
        else:
            shown = one.get_help_record(click.Context(click.Command("x")))
            assert f"default: {one.default}" in shown[1], one.name


@pytest.mark.parametrize(("command", "names"), verbs())
def test_help_names_what_to_give_in_words(command, names):
    """FOLDER, N, SECONDS: no types of Python, and no brackets in brackets."""
    text = CliRunner().invoke(app, [*names, "--help"]).output
    assert not re.search(r"<\w+(\[\w+\]| range)?>|\[\[|\{", text), text
    for one in command.params:
        if one.param_type_name == "option" and not one.is_flag:
            assert f"{one.opts[-1]} {one.metavar}" in text


def test_verbs_are_in_the_order_in_which_one_meets_them():
    listed = re.findall(
        r"^  (\w+) ", CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2], re.MULTILINE
    )
    assert listed[:2] == ["pretrain", "evaluate"]
    assert tuple(listed) == ORDER and set(ORDER) == set(typer.main.get_command(app).commands)


def test_a_shell_completes_verbs_and_options():
    def completed(line):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_TICO_COMPLETE": "complete_bash"}
        program = "import sys; sys.argv = ['tico']; from tico_ssl.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | words, capture_output=True, text=True)
        return done.stdout.split()

    assert sorted(completed("tico pre")) == ["predict", "pretrain"]
    assert "--no-cache" in completed("tico evaluate --no")


def test_the_version_is_said_by_the_command_and_in_python():
    assert CliRunner().invoke(app, ["--version"]).output == f"tico-ssl {tico_ssl.__version__}\n"
    assert dir(tico_ssl) == sorted(tico_ssl.__all__)
    assert all(getattr(tico_ssl, name) is not None for name in dir(tico_ssl))
