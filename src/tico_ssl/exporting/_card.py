"""A model card in Markdown, made from what is in the run folder."""

from pathlib import Path

from tico_ssl.exporting._snippets import about_input, assembled, reading
from tico_ssl.exporting._writing import Origin
from tico_ssl.networks.backbones import Backbone
from tico_ssl.results.metrics import measurements
from tico_ssl.results.reading import read_record
from tico_ssl.results.record import Line, Numbers, Record, images_of
from tico_ssl.results.run_folder import Run
from tico_ssl.results.table import OWN, markdown_lines
from tico_ssl.results.verdict import verdict
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.wording import counted

SPLITS = ("train", "val", "test", "images")  # names of folders that say little
HEADER = """---
library_name: timm
pipeline_tag: image-feature-extraction
tags:
- timm
- self-supervised
# license: yours to choose; the images that it was trained on may have a say in it
---
"""


def model_card(model: Backbone, origin: Origin, title: str) -> str:
    """Architecture, input, training, results and use. Folders of this machine are named by their last part only."""
    record = read_record(origin.place) if Run(origin.place).recipe_file.is_file() else None
    lines = [f"# {_plain(title)}", "", "Features of images, from self-supervised pretraining with tico-ssl.", ""]
    lines += ["## Model", "", *_bullets(_facts(model)), ""]
    if record is not None:
        lines += ["## Training", "", *_bullets(_training(record, origin)), ""]
        lines += ["## Results", "", *_results(record, origin), ""]
    return HEADER + "\n".join([*lines, *_use(model)]) + "\n"


def _facts(model: Backbone) -> dict[str, str]:
    size = model.image_size
    return {
        "architecture": model.config.name,
        "features": f"{model.width:,} numbers per image",
        "parameters": f"{sum(value.numel() for value in model.parameters()):,}",
        "input": f"{model.config.channels} channels, {size} x {size} pixels: the central square, resized (bicubic)",
        "normalisation": f"(pixels / 255 - mean) / std, mean {list(model.mean)}, std {list(model.std)}",
    }


def _training(record: Record, origin: Origin) -> dict[str, str]:
    name = record.setting("method.name")
    target = " (the target, which follows the trained network)" if origin.network == "target" else ""
    packages = record.environment["packages"]
    images = f", {counted(record.images, 'image')}" if record.images else ""
    return {
        "method": f"{name}{target}",
        "data": _data_name(record.setting("data.source")) + images,
        "epochs": f"{record.epoch:g} of {record.epochs}",
        "batch": counted(record.batch_size, "image"),
        "optimiser": f"{record.setting('optimizer.name')}, base learning rate {record.setting('optimizer.lr')}",
        "seed": str(record.setting("training.seed")),
        "software": ", ".join(f"{key} {packages[key]}" for key in ("tico-ssl", "torch") if key in packages),
    }


def _data_name(source: object) -> str:
    """The last part of every place, with the one before it where that says more: flowers/train."""
    places = [Path(str(place)).parts for place in (source if isinstance(source, list) else [source])]
    return ", ".join("/".join(parts[-2:] if parts[-1] in SPLITS else parts[-1:]) for parts in places if parts)


def _results(record: Record, origin: Origin) -> list[str]:
    """A row per metric of the exported weights; those of the online network say nothing about the target."""
    found = {} if origin.network == "target" else record.current_results
    rows = [row for result in found.values() for row in _rows(result)]
    if not rows:
        return ["These weights have not been evaluated."]
    said = verdict(result | {"numbers": _own(result["numbers"])} for result in found.values())
    head = ["protocol", "metric", "trained", "untrained", "data", "settings"]
    return [*([] if said is None else [_plain(str(said)), ""]), *markdown_lines(head, rows, left=(0, 1, 4, 5))]


def _own(numbers: dict[str, Numbers]) -> dict[str, Numbers]:
    """Without other models beside, which are named after folders."""
    return {name: found for name, found in numbers.items() if name in OWN}


def _rows(result: Line) -> list[list[str]]:
    data, settings = result.get("data", {}), result.get("settings", {})
    train, test = (images_of(data, split) for split in ("train", "test"))
    images = f"{'?' if train is None else train} training, {counted('?' if test is None else test, 'test image')}"
    where = f"{_data_name(data.get('source', '?'))}: {images}"
    written = ", ".join(f"{key} {value}" for key, value in settings.items())
    return [
        [
            _plain(cell)
            for cell in (one.protocol, one.directed_title, one.text("trained"), one.text("untrained"), where, written)
        ]
        for one in measurements(result["protocol"], result["numbers"])
    ]


def _use(model: Backbone) -> list[str]:
    return [
        "## Use",
        "",
        "```python",
        *using(model, "local-dir:.", '  # or "hf-hub:NAME/MODEL"'),
        "```",
        "",
        "`num_classes=10` gives it a classifier to train. timm's own transform (`timm.data.create_transform`) cuts "
        "nearly the same square, so features differ a little from those of `preprocess`, which were evaluated.",
    ]


def using(model: Backbone, place: str, remark: str = "") -> list[str]:
    """Lines that build the network by timm, and make its input of a picture."""
    return assembled(
        [
            "import timm",
            "import torch",
            f"model = timm.create_model({place!r}, pretrained=True).eval(){remark}",
            "config = timm.data.resolve_model_data_config(model)  # of timm's own transforms",
            *reading(model, "outside", "torch.tensor"),
            f"# features = model(preprocess('photo.jpg')), which {about_input(model)}",
        ]
    ).split("\n")


def _bullets(facts: dict[str, str]) -> list[str]:
    return [f"- {key}: {_plain(value)}" for key, value in facts.items()]


def _plain(text: str) -> str:
    """One line that is safe to print: names come from anyone's files."""
    return printable(" ".join(text.split()))
