"""Make a classifier from a backbone and labelled images. User errors are raised before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tico_ssl.classifying.place import folder_for
from tico_ssl.classifying.settings import settings_of
from tico_ssl.data.given import Given
from tico_ssl.features.homes import require_subject
from tico_ssl.runtime.wording import counted


@dataclass(frozen=True)
class Finetuned:
    """The folder of a new classifier, and the content of its results.json; none in other processes than the main."""

    folder: Path
    results: dict[str, Any]

    @property
    def summary(self) -> str:
        """Its accuracy and the interval of it, beside that of always naming the most frequent class."""
        found = self.results
        low, high = found["intervals"]["accuracy"]
        interval = f"95 % interval {low:.1f} to {high:.1f}"
        always = f"most frequent class: {found['most_frequent_class']['accuracy']:.1f} %"
        photos = counted(found["images"], "photo")
        return f"accuracy {found['accuracy']:.1f} % on {photos} ({interval}; {always})"


def finetune(
    run: str | Path,
    data: Given | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Finetuned:
    """Write classifier.safetensors, results.json and report.html into a folder. `run` is a run folder, a backbone file
    or a model by name, untrained. With `head=whole`, the same call continues one that was interrupted."""
    settings = settings_of(overrides or {})
    folder = folder_for(run, out, overwrite)
    require_subject(run, data)

    from tico_ssl.classifying.making import make

    return Finetuned(folder, make(run, data, folder, settings, overwrite))
