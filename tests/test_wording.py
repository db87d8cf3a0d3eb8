"""Options are called as their reader knows them: flags after a command, arguments in a Python program."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tico_ssl
from tico_ssl.bench import bench
from tico_ssl.classifying.finetune import finetune
from tico_ssl.classifying.predict import predict
from tico_ssl.cli import app
from tico_ssl.looking_up.curating import curate
from tico_ssl.looking_up.searching import search
from tico_ssl.pipeline.packing import pack
from tico_ssl.report import report
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import command_line, counted, worded

ROOT = Path(tico_ssl.__file__).parent
FUNCTIONS = (tico_ssl.pretrain, tico_ssl.evaluate, tico_ssl.embed, tico_ssl.export, tico_ssl.study)
FUNCTIONS += (finetune, predict, search, curate, report, bench, pack)
# Also printed by what only a command calls, and options of SLURM's commands.
SHOWN_BY_COMMANDS = {"again", "all", "gpu", "overwrite", "per_gpu", "points", "resume", "slurm"}
SHOWN_BY_COMMANDS |= {"array", "job", "me", "noheader", "oneliner", "wait"}


@pytest.mark.parametrize(
    ("message", "argument"),
    [
        ("say which images with --data", "say which images with data="),
        ("--resume and --overwrite exclude each other", "resume=True and overwrite=True exclude each other"),
        ("--subset=40: there are only 39", "subset=40: there are only 39"),
        ("(see --data)", "(see data=)"),
        ("or `tico pretrain --resume` again", "or `tico pretrain --resume` again"),
        ("a--data, ---, photos--2, -- and well-known", "a--data, ---, photos--2, -- and well-known"),
        ("another --batch-size", "another batch_size="),
    ],
)
def test_flags_become_arguments_outside_of_commands(message, argument, capsys):
    for made in (UserError, Interrupted):
        assert str(made(message)) == argument
    with command_line(), command_line():
        assert str(UserError(message)) == worded(message) == message
    say(message)
    assert capsys.readouterr().out == f"{argument}\n"


def test_the_same_mistake_is_told_in_the_readers_words():
    with pytest.raises(UserError, match=r"which images\? Say it with data= \("):
        tico_ssl.pretrain("photos")
    done = CliRunner().invoke(app, ["pretrain", "photos"])
    assert "Say it with --data (" in str(done.exception)
    assert worded("--data") == "data="  # the command has ended


def texts(file: Path):
    """The strings of a module that are no docstrings, without what is in backticks."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield re.sub(r"`[^`]*(`|$)", "", node.value)


def test_every_flag_in_a_message_is_an_argument_of_a_function():
    arguments = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    for file in sorted(ROOT.rglob("*.py")):
        if "cli" in file.relative_to(ROOT).parts:
            continue
        for text in texts(file):
            for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text):
                assert worded(f"--{flag}").partition("=")[0] in arguments | SHOWN_BY_COMMANDS, f"{file}: {text}"


# ------------------------------------------------------------------------------------------------ nouns with a number


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (1_000, "test image", "1,000 test images"),
        (2, "class", "2 classes"),
        (1, "process", "1 process"),
        (3, "copy", "3 copies"),
        ("?", "epoch", "? epochs"),
    ],
)
def test_a_noun_agrees_with_its_number(number, noun, words):
    assert counted(number, noun) == words


COUNTED = "image|photo|epoch|step|file|process|class|run|seed|thread|core|tensor|link|group|folder|GPU|node|minute"
NUMBER_AND_PLURAL = re.compile(rf"{{([^{{}}]+)}} ((?:(?:training|test|other) )?(?:{COUNTED})(?:es|s))\b(?!/)")
# Of a matrix, a warm-up that is too long for one, and what is no number.
NO_ONE = {"len(self.names)", "asked:g", "resolve_execution(execution_of(recipe), device)"}
NO_ONE |= {"report.methods[0].execution", "data.source", "self.kind", "split", "where", "left_out"}


def test_a_number_in_a_message_is_counted_and_never_one_of_several():
    """No "1 epochs", no "1 process(es)": what stands before a plural is a constant, or known not to be one."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        for line in file.read_text(encoding="utf-8").splitlines():
            found += [f"{file}: {line.strip()}" for _ in re.findall(r"\w\((?:s|es)\)(?=[ ,:])", line) if 'f"' in line]
            for value, words in NUMBER_AND_PLURAL.findall(line):
                if not re.match(r"[A-Z_]+\b", value) and value not in NO_ONE:
                    found.append(f"{file}: {value} {words}")
    assert not found, "runtime.wording.counted"
