"""A parser under a coverage-guided fuzzer: `python guided.py PARSER SECONDS FOLDER`.

Needs atheris (`pip install atheris`). It begins with right inputs and keeps those changed ones that reach new code of
this package or of the parsers written in Python that it uses. An input that gives neither a right result nor one clear
line ends it with a traceback; the input is then in the folder.
"""

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tico_ssl", "yaml", "tarfile", "zipfile", "numpy.lib"]):
    from parsers import PARSERS, SECONDS, require_clear

MEGABYTES = 4_000  # of the process, torch included
# What no change of single bytes comes upon
VALUES = ("null", "true", "{}", "[]", "[[]]", '""', "NaN", "-Infinity", "1e400", "-1", "9223372036854775808", "9" * 400)
MARKS = ("[" * 60, "&a", "*a", "!!int", "<<: *a", "..", "/", "\\u202e", "\\ud800", "x_test", "<f8", "|O", ".cls")
MARKS += ("<!ENTITY a", "&a;", '"counts"')


def main() -> None:
    name, seconds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).resolve()
    parser = PARSERS[name]
    right = folder / "right"
    right.mkdir(parents=True)
    for number, content in enumerate(parser.right()):
        require_clear(lambda content=content: parser.read(content, folder / "place"))
        (right / str(number)).write_bytes(content)
    (folder / "new").mkdir()
    quoted = (word.replace("\\", "\\\\").replace('"', '\\"') for word in VALUES + MARKS)
    (folder / "words").write_text("".join(f'"{word}"\n' for word in quoted))
    os.dup2(2, 1)  # where atheris writes a traceback
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - what is said of damaged input

    def one(content: bytes) -> None:
        require_clear(lambda: parser.read(content, folder / "place"))

    limits = [f"-max_total_time={seconds}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}"]
    options = [*limits, "-print_final_stats=1", f"-dict={folder}/words", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options, str(folder / "new"), str(right)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
