"""Text that is safe to print. Names of files, classes and runs may contain any characters, also those that command a
terminal, end a line or reverse the direction of what follows; they are shown as escapes, such as \\x1b."""

import io
import re
import sys

# Control characters, line and paragraph separators, marks and overrides of direction, and what is not UTF-8
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def accept_all_text() -> None:
    """From now on, what the encoding of the output lacks is printed as escapes, and no error that ends the work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(name: str) -> str:
    """A name on one line that can be shown and stored, whatever bytes it contains."""
    return _UNSAFE.sub(_escaped, name)


def printable_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n"))) if _UNSAFE.search(text) else text


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return found[0].encode("unicode_escape").decode()
