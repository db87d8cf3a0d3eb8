"""A classifier from beginning to end: images, training, test, and the folder with all that came of it."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tico_ssl.classifying.heads import fitted, forget_state, trained
from tico_ssl.classifying.held_out import class_names
from tico_ssl.classifying.model import ImageClassifier
from tico_ssl.classifying.page import page_of, shown_mistakes
from tico_ssl.classifying.place import FILE, folder_for
from tico_ssl.classifying.scores import judged, scores_of
from tico_ssl.classifying.settings import LinearHead, WholeNetwork
from tico_ssl.classifying.storage import save_classifier
from tico_ssl.data.given import Given
from tico_ssl.evaluations._context import Context, open_context
from tico_ssl.results.record import Numbers, split_in_words
from tico_ssl.results.run_folder import installed_version
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import choose_device, tune_process
from tico_ssl.runtime.files import digest, remove_temporaries, write_atomically, written_together
from tico_ssl.runtime.locks import alone_in
from tico_ssl.runtime.process_group import process_group
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted


def make(
    run: str | Path, data: Given | None, folder: Path, config: LinearHead | WholeNetwork, overwrite: bool
) -> dict[str, Any]:
    """Make a classifier and write its folder, the classifier last; what was found, in the main process."""
    device = choose_device()
    tune_process(device)
    with process_group(device), _alone(folder):
        folder_for(run, folder, overwrite)  # again: another command may have ended since
        begun = perf_counter()
        context = replace(open_context(run, data, cache=True), protocol="finetune")
        classes = class_names(context)
        images = f"{counted(context.data['train'], 'training image')}, {counted(context.data['test'], 'test image')}"
        say(f"{counted(len(classes), 'class')}, {images} ({split_in_words(context.data)})")
        model, chosen = _made(context, config, classes, folder)
        if not distributed.is_main():
            return {}
        results = {"settings": config.model_dump(mode="json"), "chosen": chosen, "backbone": context.checkpoint}
        return _written(folder, context, model.eval().to(device), results, begun)


def _alone(folder: Path) -> AbstractContextManager[object]:
    if not distributed.is_main():
        return nullcontext()
    return alone_in(folder, f"another command makes a classifier in {folder}: wait for its end")


def _made(
    context: Context, config: LinearHead | WholeNetwork, classes: tuple[str, ...], folder: Path
) -> tuple[ImageClassifier, Numbers]:
    if isinstance(config, LinearHead):
        return fitted(context, config, classes)
    return trained(context, config, classes, folder)


def _written(
    folder: Path, context: Context, model: ImageClassifier, results: dict[str, Any], begun: float
) -> dict[str, Any]:
    """Test a classifier and write all files; the results with what was found."""
    verdicts = judged(model, context.test, context.device)
    assert context.train.labels is not None
    found = scores_of(verdicts, model.classes, int(context.train.labels.bincount().argmax()))
    about = {"accuracy": found["accuracy"], "images": found["images"], "data": context.data["source"]}
    about |= {"backbone": context.checkpoint, "head": results["settings"]["head"], "tico-ssl": _version()}
    files = [folder / name for name in ("results.json", "report.html", FILE)]
    for file in files:
        remove_temporaries(file)
    found |= results | {"data": context.data, "seed": results["settings"]["seed"], "split_seed": context.seed}
    found |= {"unreadable": len(context.test) - found["images"], "seconds": round(perf_counter() - begun, 2)}
    mistakes = shown_mistakes(verdicts, context.test, model.classes)
    with written_together(*files) as (results_file, report_file, classifier_file):
        write_atomically(results_file, json.dumps(found) + "\n")
        write_atomically(report_file, page_of(folder.resolve().name, found, mistakes))
        save_classifier(model, classifier_file, about)
    forget_state(folder)
    return found | {"classifier": digest(folder / FILE)}


def _version() -> str:
    return installed_version("tico-ssl") or "unknown"
