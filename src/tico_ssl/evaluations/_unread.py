"""Images that evaluations leave out, since they cannot be read: counted in results, and named with the reason."""

from pathlib import Path

from torch import Tensor

from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.features.extraction import left_out
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

SHOWN = 20  # on the terminal
WORDS = {"train": "training image", "test": "test image"}


class Unread:
    """The images of each split that cannot be read. `train` also takes what the loader of a training leaves out."""

    def __init__(self) -> None:
        self.train, self.test = BadFiles(), BadFiles()
        self._tried: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    @property
    def reasons(self) -> dict[str, dict[str, str]]:
        """By split and name; without splits of which all images can be read."""
        found = {"train": self.train.reasons, "test": self.test.reasons}
        return {split: dict(reasons) for split, reasons in found.items() if reasons}

    @property
    def counts(self) -> dict[str, int]:
        """Their number by split."""
        return {split: len(reasons) for split, reasons in self.reasons.items()}

    def add(self, reasons: dict[str, dict[str, str]]) -> None:
        """Those that are known from before."""
        for split, found in reasons.items():
            for name, reason in found.items():
                self._of(split).add(BadImage(name, reason))

    def note(self, split: str, source: Source, places: Tensor) -> None:
        """Those of a source that are not at these places, each with the reason, which another try tells."""
        for place in left_out(source, places):
            name = source.names(place)
            if (split, name) in self._tried:
                continue
            self._tried.add((split, name))
            try:
                source.fetch(place)
                self._of(split).add(BadImage(printable(name), "it could not be read at first"))
            except BadImage as error:
                self._of(split).add(error)

    def share(self) -> None:
        """Every process has the findings of all. A collective call."""
        for found in distributed.everyone(self.reasons):
            self.add(found)

    def tell(self, source: str, file: Path) -> None:
        """Say which images were found since the last call, and append them to a file, each once."""
        found = [(split, *pair) for split, reasons in self.reasons.items() for pair in reasons.items()]
        new = [(split, name, reason) for split, name, reason in found if (split, name) not in self._told]
        if not new or not distributed.is_main():
            return
        self._told |= {(split, name) for split, name, _ in new}
        numbers = " and ".join(counted(number, WORDS[split]) for split, number in self.counts.items())
        say(f"{numbers} left out, which cannot be read; all are in {file}")
        for _, name, reason in new[:SHOWN]:
            say(f"  {name}: {reason}")
        try:
            known = [(line.get("source"), line.get("split"), line.get("file")) for line in read_json_lines(file)]
            for split, name, reason in new:
                if (source, split, name) not in known:
                    append_json_line(file, {"source": source, "split": split, "file": name, "reason": reason})
        except OSError as error:  # which costs a list, not the result
            say(f"{file} is not written: {refusal(error)}")

    def _of(self, split: str) -> BadFiles:
        return self.train if split == "train" else self.test
