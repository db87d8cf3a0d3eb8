"""huggingface: a folder with config.json, model.safetensors and a model card, for timm and the Hugging Face Hub."""

import json
import secrets
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save

from tico_ssl.exporting._agreement import agreement, normal_images
from tico_ssl.exporting._card import model_card, using
from tico_ssl.exporting._counterparts import in_library
from tico_ssl.exporting._writing import Origin
from tico_ssl.networks.backbones import Backbone, timm_arguments
from tico_ssl.networks.stems import has_small_stem
from tico_ssl.networks.storage import plain_state
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import sync
from tico_ssl.views.centre import KEPT

OUT = "backbone-huggingface"
OPTIONS = ("origin",)


def write(backbone: Backbone, out: Path, origin: Origin) -> str:
    """The folder, from which timm must build the same network."""
    if has_small_stem(backbone.network):
        raise UserError(
            "timm cannot build the stem for small images from a folder; timm, safetensors, onnx and torch-export can "
            "take this backbone"
        )
    model = in_library(backbone, "timm")
    config = timm_config(model)
    with _written_atomically(out) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "model.safetensors").write_bytes(save(plain_state(model), metadata={"format": "pt"}))
        (folder / "README.md").write_text(model_card(model, origin, out.name), encoding="utf-8")
        _require_same(model, folder)
    publish = shlex.join(["hf", "upload", "USER/NAME", str(out)])
    return "\n".join([*using(model, f"local-dir:{out}"), "", f"# to publish it: hf auth login, then {publish}"])


def timm_config(model: Backbone) -> dict[str, Any]:
    """What timm reads: the architecture with its arguments, the input, and which layer a classifier would be."""
    name, size = model.config.name.partition("/")[2], model.image_size
    in_the_rest = ("num_classes", "in_chans")
    arguments = timm_arguments(name, model.config, size)
    classifier = getattr(model.network, "pretrained_cfg", {}).get("classifier")
    return {
        "architecture": name.partition(".")[0],
        "num_classes": 0,
        "num_features": model.width,
        "model_args": {key: value for key, value in arguments.items() if key not in in_the_rest},
        "pretrained_cfg": {
            "input_size": [model.config.channels, size, size],
            "interpolation": "bicubic",
            "crop_pct": KEPT,
            "crop_mode": "center",
            "mean": list(model.mean),
            "std": list(model.std),
            "num_classes": 0,
            "classifier": classifier,
        },
    }


def _require_same(model: Backbone, folder: Path) -> None:
    import timm

    read = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    found = agreement(model, read, normal_images(model.config.channels, model.image_size))
    if not found:
        raise UserError(f"timm builds another network from the folder: {found}; nothing was written")


@contextmanager
def _written_atomically(folder: Path) -> Iterator[Path]:
    """A temporary folder, which gets its name when everything is in it. A folder with content stays: its model card
    may have been edited."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another --out, or remove it")
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        temporary.replace(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
