"""Every parser of what may come from anyone: right inputs to begin with, and how commands read one.

Used by `test_fuzzing.py`, which damages right inputs at random, and by `guided.py`, which looks for inputs that reach
new code.
"""

import functools
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load

from test_png import encoded
from tico_ssl import load_backbone
from tico_ssl.classifying.model import ImageClassifier
from tico_ssl.classifying.storage import read_classifier, save_classifier
from tico_ssl.config.recipe import load_recipe, packaged_recipes, parse_override
from tico_ssl.config.sections import DataConfig
from tico_ssl.config.study import expand, load_study, packaged_studies
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import BadImage, decode
from tico_ssl.data.formats._tar_index import index_places, load_index
from tico_ssl.data.formats.packed import MAGIC, PAGE, PREAMBLE, SPLIT, first_page
from tico_ssl.data.given import require_data
from tico_ssl.data.sources import open_source
from tico_ssl.evaluations._detection.drawing import true_marks
from tico_ssl.evaluations._detection.samples import Maker, Task
from tico_ssl.evaluations._detection.scoring import Found, score
from tico_ssl.evaluations._detection.splits import open_pictures
from tico_ssl.listing import described
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.pipeline.packing import pack
from tico_ssl.results.comparison import compare
from tico_ssl.results.run_folder import Run
from tico_ssl.results.study_state import last_epoch
from tico_ssl.runtime.checksums import checksums
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

SECONDS = 10  # for one input, on a busy machine
RECIPES = Path(load_recipe.__code__.co_filename).parents[1] / "recipes"


def require_clear(work: Callable[[], object]) -> None:
    """Do it: it works, or the reason why not is one printable line, soon. Anything else is a failure."""
    started = time.monotonic()
    try:
        work()
    except UserError as error:
        line = str(error)
    else:
        line = "right"
    assert line.strip()
    assert printable(line) == line
    assert time.monotonic() - started < SECONDS


def written(folder: Path, name: str, content: bytes) -> Path:
    """A file under a name of its own: indices beside it are not those of another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
    return folder / name


def use(place: Path, channels: int = 3) -> None:
    """Open images in every way that a command does, and read some."""
    for split in ("train", "test"):
        source = open_source(DataConfig(source=str(place)), split, channels)
        if source is None:
            continue
        assert len(source) > 0
        for i in {0, len(source) // 2, len(source) - 1}:
            source.names(i)
            with suppress(BadImage):
                image = source.fetch(i)
                assert image.dtype == torch.uint8
                assert image.ndim == 3
        if source.images is not None:
            source.take(torch.arange(min(8, len(source))))
        if source.labels is not None:
            assert len(source.labels) == len(source)


# --------------------------------------------------------------------------------------------------- right inputs


def saved(kind: str, **options) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).convert(options.pop("mode", "RGB")).save(stream, kind, **options)
    return stream.getvalue()


@functools.cache
def images() -> list[bytes]:
    modes = {"JPEG": ("RGB", "CMYK", "L"), "PNG": ("RGB", "RGBA", "P", "1", "I;16")}
    plain = ("WEBP", "GIF", "BMP", "TIFF", "PPM")
    deep_colours = [np.arange(20 * 24 * channels, dtype=np.uint16).reshape(20, 24, channels) for channels in (3, 4)]
    of_modes = [saved(kind, mode=mode) for kind, several in modes.items() for mode in several]
    special = [saved("JPEG", progressive=True), saved("TIFF", compression="tiff_lzw"), saved("WEBP", lossless=True)]
    special += [encoded(deep, interlaced) for deep in deep_colours for interlaced in (False, True)]
    return [*of_modes, *map(saved, plain), *special]


def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)


@functools.cache
def arrays() -> list[tuple[str, bytes]]:
    found = []
    for write in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        splits = {"x_train": noise(), "y_train": np.arange(6), "x_test": noise()[:2], "y_test": np.arange(2)}
        write(stream, **splits, classes=np.array(list("abcdef")))
        found.append(("x.npz", stream.getvalue()))
    return [*found, ("x.npy", array(noise()))]


def array(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


@functools.cache
def shard() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, content in enumerate(images()[:4]):
            for name, text in ((f"{'long' * 30}{number}.jpg", content), (f"{'long' * 30}{number}.cls", b"%d" % number)):
                entry = tarfile.TarInfo(name)
                entry.size, entry.pax_headers = len(text), {"comment": "of some length" * 9}
                tar.addfile(entry, io.BytesIO(text))
    return stream.getvalue()


@functools.cache
def tables() -> list[bytes]:
    import pyarrow
    from pyarrow import parquet

    rows = [{"bytes": content, "path": "a"} for content in images()[:6]]
    table = pyarrow.table({"image": rows, "label": list(range(6))})
    found = []
    for options in ({"write_page_checksum": True}, {"compression": "none", "use_dictionary": False}):
        stream = io.BytesIO()
        parquet.write_table(table, stream, row_group_size=2, **options)
        found.append(stream.getvalue())
    return found


@functools.cache
def packed() -> list[bytes]:
    source = from_arrays("some", torch.from_numpy(noise()).permute(0, 3, 1, 2).contiguous(), torch.arange(6))
    with tempfile.TemporaryDirectory() as folder:
        for jpeg in (False, True):
            splits = {"train": 4, "valid": 2} if jpeg else None
            pack(source, Path(folder, f"{jpeg}.tico"), 12, jpeg=jpeg, splits=splits)
        return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


@functools.cache
def backbone() -> bytes:
    settings = load_recipe("demo", {"backbone.name": "tico/resnet10-w2"}).backbone
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(build_backbone(settings, 16), Path(folder, "x.safetensors"))
        return Path(folder, "x.safetensors").read_bytes()


def header_of(whole: bytes) -> bytes:
    """The header of a packed file."""
    _, _, _, offset, size, _ = PREAMBLE.unpack_from(whole)
    return whole[offset : offset + size]


def with_header(whole: bytes, text: bytes) -> bytes:
    """A packed file with another header, and the right checksums of that."""
    offset = PREAMBLE.unpack_from(whole)[3]
    page = first_page(PREAMBLE.pack(MAGIC, SPLIT, crc32(text), offset, len(text), offset + len(text)))
    return page + whole[PAGE:offset] + text


def description_of(whole: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and what comes after it."""
    size = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]


def with_description(header: dict, text: str, rest: bytes) -> bytes:
    """A backbone with other metadata."""
    changed = json.dumps(header | {"__metadata__": {"tico_ssl": text}}).encode()
    return len(changed).to_bytes(8, "little") + changed + rest


# ------------------------------------------------------------------------------------------------------- readers


def read_recipe(content: bytes, folder: Path) -> None:
    recipe = load_recipe(written(folder, "recipe.yaml", content))
    described(recipe)
    require_clear(lambda: require_data(recipe.data.source))  # of most recipes the images are not here


def read_override(content: bytes, folder: Path) -> None:
    load_recipe(demo(), dict(map(parse_override, content.decode(errors="replace").splitlines())))


@functools.cache
def demo() -> dict:
    return load_recipe("demo").model_dump(mode="json")


def read_study(content: bytes, folder: Path) -> None:
    for variant in expand(load_study(written(folder, "study.yaml", content))):
        assert os.sep not in variant.name
        assert variant.name.strip(".")


def read_image(content: bytes, folder: Path) -> None:
    assert decode(content, 3, shorter=8).shape[0] == 3
    assert decode(content, 1).shape[0] == 1


def read_member(name: str, content: bytes, folder: Path) -> None:
    """An array in an archive, whose checksum is right."""
    members = {"x_train": array(noise()), "y_train": array(np.arange(6))} | {name: content}
    with zipfile.ZipFile(written(folder, "x.npz", b""), "w") as archive:
        for member, text in members.items():
            archive.writestr(f"{member}.npy", text)
    use(folder / "x.npz")


def read_shard(content: bytes, folder: Path) -> None:
    """A tar whose headers have the right checksums."""
    whole = bytearray(content)
    for at in range(0, len(whole) - tarfile.BLOCKSIZE + 1, tarfile.BLOCKSIZE):
        if whole[at + 257 : at + 262] == b"ustar":
            block = bytes(whole[at : at + tarfile.BLOCKSIZE])
            whole[at + 148 : at + 156] = b"%06o\0 " % tarfile.calc_chksums(block)[0]
    use(written(folder, "x.tar", bytes(whole)))


def read_tar_index(content: bytes, folder: Path) -> None:
    """An index that came with a tar, whose time is right."""
    place = written(folder, "x.tar", shard())
    os.utime(place, (1, 1))
    index_places(place)[0].write_bytes(content)
    use(place)


@functools.cache
def tar_index() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        place = written(Path(folder, "of"), "x.tar", shard())
        os.utime(place, (1, 1))
        load_index(place)
        return index_places(place)[0].read_bytes()


def read_packed_header(content: bytes, folder: Path) -> None:
    """A header with the right checksums, also of the sections wherever it has them."""
    whole = packed()[b"jpeg" in content]
    with suppress(ValueError, RecursionError, TypeError, AttributeError, LookupError):
        header = json.loads(content)
        for section in header["sections"].values():
            section[2] = section[2] and crc32(whole[section[0] : section[1]])
        content = json.dumps(header).encode()
    use(written(folder, "x.tico", with_header(whole, content)))


def read_description(content: bytes, folder: Path) -> None:
    """Metadata with the right checksums."""
    load_backbone(written(folder, "x.safetensors", with_metadata(backbone(), content)))


def with_metadata(whole: bytes, content: bytes) -> bytes:
    """A backbone or classifier with other metadata, and the right checksums of these if they can be read."""
    header, rest = description_of(whole)
    with suppress(ValueError, RecursionError, TypeError, AttributeError):
        about = json.loads(content)
        about.pop("checksums", None)
        about["checksums"] = checksums([load(whole), about])
        content = json.dumps(about).encode()
    return with_description(header, content.decode(errors="replace"), rest)


LINES = {
    "results.jsonl": {
        "protocol": "knn",
        "settings": {"k": 20},
        "data": {"source": "textures", "train": 96, "test": 96, "split": "own"},
        "checkpoint": "0123456789abcdef",
        "seed": 0,
        "numbers": {"trained": {"top1_k20": 50.0, "top5_k20": 90.5}, "untrained": {"top1_k20": 40.0}},
        "seconds": 1.5,
    },
    "metrics.jsonl": {
        "step": 3,
        "epoch": 1.0,
        "loss": 0.5,
        "images_per_second": 100.0,
        "seconds": 2.0,
        "data_wait": 0.1,
        "embedding_std": 0.3,
        "knn_top1_k20": 30.0,
    },
}


def read_lines(name: str, content: bytes, folder: Path) -> None:
    """A file of a run folder, in one of the tables."""
    written(folder, "recipe.yaml", b"method: {name: tico}\ntraining: {epochs: 3, batch_size: 32}\n")
    (folder / name).write_bytes(content)
    comparison, text = compare([folder], ("markdown", "csv", "latex")[len(content) % 3])
    assert text
    assert len(comparison.rows) == 1
    last_epoch(Run(folder))


def use_pictures(folder: Path) -> None:
    """Open annotated images as the evaluation of a detector does, and read and draw some with their masks."""
    splits = open_pictures(folder, 0)
    for split in splits[:2]:
        for picture in split.pictures[:2]:
            true_marks(picture, split.classes)
            Maker(3, 64, split.has_outlines)(Task(picture, 32, False))
        none = Found(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64), [])
        score(split, [none] * len(split), split.has_outlines)


SIDES = (12, 8)  # width and height of annotated images
BOX = [1, 2, 6, 4]
OUTLINES = (
    [[1, 2, 7.5, 2, 7, 6], [0, 0, 3, 0, 3, 3]],
    {"size": [8, 12], "counts": [9, 5, 82]},
    {"size": [8, 12], "counts": "95b2"},
)


def annotated_images(folder: Path) -> None:
    for number in range(6):
        Image.fromarray(np.full((*SIDES[::-1], 3), 40 * number, np.uint8)).save(folder / f"{number}.png")


@functools.cache
def coco() -> list[bytes]:
    width, height = SIDES
    images = [{"id": i, "file_name": f"{i}.png", "width": width, "height": height} for i in range(6)]
    about = {"category_id": 3, "bbox": BOX, "area": 24, "iscrowd": 0}
    return [
        json.dumps(
            {
                "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
                "images": images,
                "annotations": [{"id": i, "image_id": i, "segmentation": outline} | about for i in range(6)],
            }
        ).encode()
        for outline in OUTLINES
    ]


def read_coco(content: bytes, folder: Path) -> None:
    annotated_images(written(folder, "annotations.json", content).parent)
    use_pictures(folder)


def voc(number: int = 0) -> bytes:
    corners = "".join(
        f"<{side}>{value}</{side}>" for side, value in zip(("xmin", "ymin", "xmax", "ymax"), (2, 3, 7, 6))
    )
    size = f"<size><width>{SIDES[0]}</width><height>{SIDES[1]}</height><depth>3</depth></size>"
    thing = f"<object><name>cat</name><difficult>0</difficult><bndbox>{corners}</bndbox></object>"
    return f"<annotation><filename>{number}.png</filename>{size}{thing}</annotation>".encode()


def read_voc(content: bytes, folder: Path) -> None:
    """One annotation of six."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("Annotations", "JPEGImages"):
        (folder / name).mkdir(parents=True)
    annotated_images(folder / "JPEGImages")
    for number in range(6):
        (folder / "Annotations" / f"{number}.xml").write_bytes(voc(number) if number else content)
    use_pictures(folder)


@functools.cache
def classifier() -> bytes:
    settings = load_recipe("demo", {"backbone.name": "tico/resnet10-w2"}).backbone
    backbone = build_backbone(settings, 16)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "classifier.safetensors")
        model = ImageClassifier(backbone, torch.nn.Linear(backbone.width, 2), ("cat", "dog"))
        save_classifier(model, place, {"accuracy": 50.0, "data": "some"})
        return place.read_bytes()


def read_classifier_metadata(content: bytes, folder: Path) -> None:
    """Metadata with the right checksums, and what the classifier then says of an image."""
    place = written(folder, "classifier.safetensors", with_metadata(classifier(), content))
    model, _ = read_classifier(place)
    (((_, probability), *_),) = model.predict(noise()[0])
    assert 0 <= probability <= 1


class Parser(NamedTuple):
    """What reads a kind of input, and inputs of that kind that are right."""

    read: Callable[[bytes, Path], object]
    right: Callable[[], list[bytes]]


def _yaml(folder: Path, names: list[str]) -> list[bytes]:
    return [(folder / f"{name}.yaml").read_bytes() for name in names]


def _lines(name: str) -> Parser:
    line = json.dumps(LINES[name]).encode() + b"\n"
    return Parser(functools.partial(read_lines, name), lambda: [line, line * 3])


PARSERS = {
    "recipes": Parser(read_recipe, lambda: _yaml(RECIPES, packaged_recipes())),
    "overrides": Parser(read_override, lambda: [b"training.epochs=5\nviews.*.blur=0.5", b"method=moco", b"views=byol"]),
    "studies": Parser(read_study, lambda: _yaml(RECIPES / "studies", packaged_studies())),
    "images": Parser(read_image, images),
    "npy": Parser(lambda content, folder: use(written(folder, "x.npy", content)), lambda: [array(noise())]),
    "npz": Parser(lambda content, folder: use(written(folder, "x.npz", content)), lambda: [arrays()[0][1]]),
    "npz-images": Parser(functools.partial(read_member, "x_train"), lambda: [array(noise())]),
    "npz-labels": Parser(functools.partial(read_member, "y_train"), lambda: [array(np.arange(6))]),
    "npz-classes": Parser(functools.partial(read_member, "classes"), lambda: [array(np.array(list("abcdef")))]),
    "tar": Parser(read_shard, lambda: [shard()]),
    "tar-index": Parser(read_tar_index, lambda: [tar_index()]),
    "parquet": Parser(lambda content, folder: use(written(folder, "x.parquet", content)), tables),
    "packed": Parser(lambda content, folder: use(written(folder, "x.tico", content)), packed),
    "packed-headers": Parser(read_packed_header, lambda: [header_of(whole) for whole in packed()]),
    "backbones": Parser(
        lambda content, folder: load_backbone(written(folder, "x.safetensors", content)), lambda: [backbone()]
    ),
    "backbone-metadata": Parser(
        read_description, lambda: [description_of(backbone())[0]["__metadata__"]["tico_ssl"].encode()]
    ),
    "classifier-metadata": Parser(
        read_classifier_metadata, lambda: [description_of(classifier())[0]["__metadata__"]["tico_ssl"].encode()]
    ),
    "coco": Parser(read_coco, coco),
    "voc": Parser(read_voc, lambda: [voc()]),
    "results": _lines("results.jsonl"),
    "metrics": _lines("metrics.jsonl"),
}
