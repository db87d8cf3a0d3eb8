"""Small files in place of those that the documents speak of: photos, data sets in their published layouts, weights."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from test_detection import write_coco, write_voc
from test_layouts import inaturalist, places
from tico_ssl import study
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.formats.textures import draw_textures
from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.networks.storage import save_backbone

NARROW = "tico/resnet10-w4"  # the backbone that small recipes train
SIDE = 16  # its images
TINY_RESNET, TINY_VIT = "timm/test_resnet", "timm/test_vit"  # in place of large networks of other libraries
COUNT = 48


def pictures(count: int = COUNT) -> list[tuple[Image.Image, int]]:
    """Textures of two kinds in turn, and their kind."""
    images, labels = draw_textures(10 * count, 32)
    kinds = [[image for image, label in zip(images, labels.tolist()) if label == kind] for kind in (0, 3)]
    return [(Image.fromarray(kinds[n % 2][n // 2].permute(1, 2, 0).numpy()), n % 2) for n in range(count)]


def saved(picture: Image.Image, file: Path) -> None:
    """A picture in a folder that may be new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file)


def picture(file: Path) -> None:
    """One photo."""
    saved(pictures(1)[0][0], file)


def photos(folder: Path) -> None:
    """Photos without labels."""
    for number, (image, _) in enumerate(pictures()):
        saved(image, folder / (f"{number}.jpg" if number % 2 else f"{number}.png"))


def labelled(folder: Path) -> None:
    """A folder for each of two classes."""
    for number, (image, kind) in enumerate(pictures()):
        saved(image, folder / ("cats", "dogs")[kind] / f"{number}.png")


def in_splits(folder: Path) -> None:
    """Classes in train/ and test/."""
    labelled(folder / "train")
    labelled(folder / "test")


def listed(file: Path) -> None:
    """Names of some images of `in_splits`."""
    file.write_text("".join(f"{kind}/{number}.png\n" for number in range(8) for kind in [("cats", "dogs")[number % 2]]))


def arrays(file: Path) -> None:
    """Images and labels as `.npz`."""
    images = np.stack([np.asarray(image) for image, _ in pictures()])
    labels = np.array([kind for _, kind in pictures()])
    np.savez(file, x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])


def scans(folder: Path) -> None:
    """Images in Hounsfield units."""
    spectral(folder, channels=1, low=-1000, high=400, kind="float32")


def spectral(folder: Path, channels: int = 13, low: int = 0, high: int = 10_000, kind: str = "uint16") -> None:
    """Arrays of many channels."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(COUNT):
        np.save(folder / f"{number}.npy", random.integers(low, high, (channels, 24, 24)).astype(kind))


def slides(folder: Path) -> None:
    """One large image."""
    pixels = np.random.default_rng(0).integers(0, 256, (2048, 4096, 3), dtype=np.uint8)
    saved(Image.fromarray(pixels), folder / "1.tif")


def voc(folder: Path) -> None:
    """VOC of 2007 and 2012, with the lists of every class."""
    write_voc(folder, "VOC2007", {"trainval": range(12), "test": range(12, 16)})
    write_voc(folder, "VOC2012", {"trainval": range(16, 20)})
    for place, name in enumerate(VOC_CLASSES):
        for split, numbers in {"trainval": range(12), "test": range(12, 16)}.items():
            marks = "".join(f"{number:06d} {(number + place) % 3 - 1:2d}\n" for number in numbers)
            (folder / "VOC2007" / "ImageSets" / "Main" / f"{name}_{split}.txt").write_text(marks)


def raw_frames(folder: Path) -> None:
    """Frames of the camera in extending/data-format.md."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for number in range(COUNT):
            content = bytes([40 + 100 * (number % 2)] * (48 * 64))
            (folder / split / f"{('night', 'day')[number % 2]}-{number:02}.raw").write_bytes(content)


def network(name: str = NARROW, size: int = SIDE) -> Backbone:
    """An untrained network."""
    torch.manual_seed(0)
    return build_backbone(BackboneConfig(name=name), size)


def narrow_weights(file: Path) -> None:
    """A state dict of the narrow network."""
    torch.save(network().network.state_dict(), file)


def moco_checkpoint(file: Path) -> None:
    """The same as MoCo's programs write it."""
    state = {f"module.encoder_q.{name}": value for name, value in network().network.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 800, "arch": "resnet50"}, file)


def library_weights(file: Path) -> None:
    """A state dict of the tiny ResNet."""
    torch.save(network(TINY_RESNET, 224).network.state_dict(), file)


def transformer_weights(file: Path) -> None:
    """Those of the tiny transformer."""
    save_file(network(TINY_VIT, 224).network.state_dict(), file)


def backbone_file(file: Path) -> None:
    """The narrow network as a run saves it."""
    save_backbone(network(), file)


def recipe(file: Path) -> None:
    """A recipe of the reader's own."""
    file.write_text(yaml.safe_dump({"base": "photos", "backbone": {"name": NARROW}, "data": {"image_size": SIDE}}))


STAND_INS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(["photos", "my photos", "more-photos", "new-photos", "more"], photos),
    **dict.fromkeys(["one.jpg", "one.png", "cat.jpg", "a.jpg", "b.png", "1.jpg", "2.jpg"], picture),
    "labelled": labelled,
    **dict.fromkeys(["flowers", "imagenet", "cifar10"], in_splits),
    "1percent.txt": listed,
    "cifar10.npz": arrays,
    "scans": scans,
    "satellite": spectral,
    "slides": slides,
    "coco": lambda folder: write_coco(folder, train=4, val=2),
    "VOCdevkit": voc,
    "places205": places,
    "inaturalist2018": inaturalist,
    "public.pth": narrow_weights,
    "moco_v2_800ep.pth.tar": moco_checkpoint,
    **dict.fromkeys(["resnet18.pth", "imagenet.pth", "moco.pth"], library_weights),
    "vit.safetensors": transformer_weights,
    **dict.fromkeys(["best.safetensors", "backbone.safetensors"], backbone_file),
    "my.yaml": recipe,
}


def lay_out(folder: Path, text: str) -> None:
    """Put what a text speaks of into a folder."""
    for name, make in STAND_INS.items():
        if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-]*[\w-])", text) or name == "public.pth":
            (raw_frames if name == "scans" and "my_lab.frames" in text else make)(folder / name)


def prepared_study(folder: Path) -> None:
    """A study of two runs, carried out."""
    settings = {"data.limit": 48, "data.image_size": SIDE, "backbone.name": NARROW, "training.batch_size": 8}
    settings |= {"training.epochs": 1, "method.hidden": 16, "method.dim": 8, "optimizer.warmup_epochs": 0.0}
    runs = [{"name": "tico"}, {"name": "detached", "overrides": {"method.detach": True}}]
    file = folder.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"base": "demo", "overrides": settings, "runs": runs, "protocols": ["rankme"]}))
    study(file, out=folder, side_by_side=1)
