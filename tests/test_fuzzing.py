"""Random and damaged input of every kind: each gives a right result or one clear line, soon and in little memory.

`make test-faults` tries ten thousand inputs, `make test` one in twenty.
"""

import functools
import io
import json
import os
import resource
import shutil
import string
import tarfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from faults import FAULTS
from tico_ssl import load_backbone
from tico_ssl.config.recipe import load_recipe, packaged_recipes, parse_override
from tico_ssl.config.sections import DataConfig
from tico_ssl.config.study import expand, load_study, packaged_studies
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import BadImage, decode
from tico_ssl.data.formats.packed import MAGIC, PAGE, PREAMBLE, VERSION, first_page, verify_packed
from tico_ssl.data.given import require_data
from tico_ssl.data.sources import open_source
from tico_ssl.listing import described
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.pipeline.packing import pack
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable
from tico_ssl.training.checkpoint import restore, save_checkpoint

pytestmark = pytest.mark.faults

SECONDS = 10  # for one input, on a busy machine
MEGABYTES = 1_500  # more than before, at most

tried: Counter[str] = Counter()
failed: Counter[str] = Counter()


def fuzz(examples: int, **inputs):
    """A test of so many inputs, the same ones in every run unless there are more."""
    chosen = settings(
        max_examples=examples * FAULTS,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        derandomize=FAULTS == 1,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: chosen(given(**inputs)(test))


@pytest.fixture(scope="module", autouse=True)
def _counts():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    kinds = ", ".join(f"{count} {kind}" for kind, count in tried.items())
    found = f"memory grew by {grown:.0f} MB; failures: {sum(failed.values())}"
    print(f"\ninputs tried: {sum(tried.values())} ({kinds}); {found}")
    assert grown < MEGABYTES


def clear(kind: str, work) -> None:
    """Do it: it works, or the reason why not is one printable line. Anything else is a failure."""
    tried[kind] += 1
    started = time.monotonic()
    try:
        work()
    except UserError as error:
        line = str(error)
    except BaseException:
        failed[kind] += 1
        raise
    else:
        line = "right"
    assert line.strip()
    assert printable(line) == line
    assert time.monotonic() - started < SECONDS


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Bytes with flipped bits, other numbers, missing, repeated or foreign parts."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        length = draw(st.integers(1, 64))
        kind = draw(st.sampled_from(["flip", "write", "number", "cut", "end", "repeat", "insert", "zero"]))
        if kind == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            data[at : at + length] = draw(st.binary(min_size=1, max_size=64))
        elif kind == "number":
            extreme = draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]))
            order = draw(st.sampled_from(["little", "big"]))
            data[at : at + 8] = extreme.to_bytes(8, order)
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "end":
            del data[at:]
        elif kind == "repeat":
            data[at:at] = data[at : at + length] * draw(st.integers(1, 50))
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=64))
        else:
            data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


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


# ------------------------------------------------------------------------------------------------------- recipes

NASTY = st.sampled_from(
    [
        *("2020-13-45", "!!int x", "!!timestamp q", "1e400", "-.inf", ".nan", "0x" + "f" * 400, "9" * 5_000, "~", "''"),
        *(
            "&a [*a]",
            "[" * 80,
            "{a: " * 80,
            "!!set {a}",
            "!!binary x",
            "1:2:3:4",
            "²",
            "\u202e",
            "<<: 3",
            "*",
            "- - - -",
        ),
        *("textures", "tico", "a.b", "demo", "[]", "{}", "true", "-1", "0", "1e308", "2147483648", "..", "/dev/zero"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | NASTY
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@functools.cache
def keys() -> list[str]:
    """Keys of recipes, and others."""
    values = load_recipe("demo").model_dump(mode="json")
    inner = [f"{name}.{key}" for name, part in values.items() if isinstance(part, dict) for key in part]
    views = [f"views.{place}.{key}" for place in ("0", "*", "²", "7") for key in ("blur", "size", "crop_scale")]
    return [*values, *inner, *views, "base", "method", "", ".", "views.", "..", "method.name.x"]


@fuzz(80, content=st.data())
def test_recipes(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    if content.draw(st.booleans()):
        name = content.draw(st.sampled_from(packaged_recipes()))
        text = (Path(load_recipe.__code__.co_filename).parents[1] / "recipes" / f"{name}.yaml").read_bytes()
        recipe = folder / "recipe.yaml"
        recipe.write_bytes(content.draw(damaged(text)))
    else:
        recipe = {}
        for key in content.draw(st.lists(st.sampled_from(keys()), max_size=4)):
            recipe[key.partition(".")[0]] = (
                {key.partition(".")[2]: content.draw(VALUES)} if "." in key else content.draw(VALUES)
            )
        recipe = {"base": "demo"} | recipe
        if content.draw(st.booleans()):
            path = folder / "recipe.yaml"
            path.write_text(yaml.safe_dump(recipe), encoding="utf-8", errors="replace")
            recipe = path

    def read():
        loaded = load_recipe(recipe)
        described(loaded)
        require_data(loaded.data.source)

    clear("recipes", read)


@fuzz(60, key=st.sampled_from(keys()) | st.text(max_size=20), value=NASTY | st.text(max_size=30))
def test_overrides(key, value):
    clear("overrides", lambda: load_recipe("demo", dict([parse_override(f"{key}={value}")])))


@fuzz(30, content=st.data())
def test_studies(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "study.yaml"
    name = content.draw(st.sampled_from(packaged_studies()))
    text = (Path(load_recipe.__code__.co_filename).parents[1] / "recipes" / "studies" / f"{name}.yaml").read_bytes()
    path.write_bytes(content.draw(damaged(text)))

    def read():
        for variant in expand(load_study(path)):
            assert os.sep not in variant.name
            assert variant.name.strip(".")

    clear("studies", read)


# -------------------------------------------------------------------------------------------------------- images


def saved(kind: str, **options) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).convert(options.pop("mode", "RGB")).save(stream, kind, **options)
    return stream.getvalue()


IMAGES = [
    *(saved("JPEG"), saved("JPEG", progressive=True), saved("JPEG", mode="CMYK"), saved("JPEG", mode="L")),
    *(
        saved("PNG"),
        saved("PNG", mode="RGBA"),
        saved("PNG", mode="P"),
        saved("PNG", mode="1"),
        saved("PNG", mode="I;16"),
    ),
    *(saved("WEBP"), saved("GIF"), saved("BMP"), saved("TIFF"), saved("TIFF", compression="tiff_lzw"), saved("PPM")),
]


@fuzz(
    80,
    content=st.sampled_from(IMAGES).flatmap(damaged) | st.binary(max_size=200),
    channels=st.sampled_from([1, 3, 3, 5]),
)
def test_images(content, channels):
    def read():
        image = decode(content, channels, "x.tif" if channels == 5 else None, shorter=8)
        assert image.shape[0] == channels

    clear("images", read)


@pytest.fixture(scope="module")
def images():
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 12, 12), dtype=np.uint8))


def written(folder: Path, name: str, content: bytes) -> Path:
    """A file under a name of its own: indices beside it are not those of another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / name).write_bytes(content)
    return folder / name


@functools.cache
def arrays() -> list[tuple[str, bytes]]:
    noise = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
    found = []
    for write in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        write(
            stream,
            x_train=noise,
            y_train=np.arange(6),
            x_test=noise[:2],
            y_test=np.arange(2),
            classes=np.array(list("abcdef")),
        )
        found.append(("x.npz", stream.getvalue()))
    stream = io.BytesIO()
    np.save(stream, noise)
    return [*found, ("x.npy", stream.getvalue())]


@fuzz(50, content=st.data())
def test_arrays(tmp_path_factory, content):
    name, whole = content.draw(st.sampled_from(arrays()))
    place = written(tmp_path_factory.getbasetemp() / "arrays", name, content.draw(damaged(whole)))
    clear("numpy files", lambda: use(place))


@functools.cache
def shard() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, content in enumerate(IMAGES[:4]):
            for name, text in ((f"{'long' * 30}{number}.jpg", content), (f"{'long' * 30}{number}.cls", b"%d" % number)):
                entry = tarfile.TarInfo(name)
                entry.size, entry.pax_headers = len(text), {"comment": "of some length" * 9}
                tar.addfile(entry, io.BytesIO(text))
    return stream.getvalue()


@fuzz(50, content=st.deferred(lambda: damaged(shard())))
def test_shards(tmp_path_factory, content):
    place = written(tmp_path_factory.getbasetemp() / "shards", "x.tar", content)
    clear("tar files", lambda: use(place))


@functools.cache
def tables() -> list[bytes]:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [{"bytes": content, "path": "a"} for content in IMAGES[:6]], "label": list(range(6))})
    found = []
    for options in ({"write_page_checksum": True}, {"compression": "none", "use_dictionary": False}):
        stream = io.BytesIO()
        parquet.write_table(table, stream, row_group_size=2, **options)
        found.append(stream.getvalue())
    return found


@fuzz(40, content=st.deferred(lambda: st.sampled_from(tables()).flatmap(damaged)))
def test_tables(tmp_path_factory, content):
    place = written(tmp_path_factory.getbasetemp() / "tables", "x.parquet", content)
    clear("parquet files", lambda: use(place))


@pytest.fixture(scope="module")
def packed(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("packed")
    for jpeg in (False, True):
        pack(from_arrays("some", images, torch.arange(6)), folder / f"{jpeg}.tico", 12, jpeg=jpeg)
    return [path.read_bytes() for path in folder.iterdir()]


@fuzz(40, content=st.data())
def test_packed_files(tmp_path_factory, packed, content):
    whole = content.draw(st.sampled_from(packed))
    place = written(tmp_path_factory.getbasetemp() / "packed-files", "x.tico", content.draw(damaged(whole)))
    clear("packed files", lambda: use(place))
    if place.read_bytes() != whole:
        with pytest.raises(UserError):
            verify_packed(place)


NUMBERS = st.sampled_from([-1, 0, 1, 2, 6, 12, 4096, 4095, 2**31, 2**63, 10**30]) | st.integers() | SCALARS


@fuzz(30, content=st.data())
def test_headers_of_packed_files(tmp_path_factory, packed, content):
    """Headers with other values whose checksums are right."""
    whole = content.draw(st.sampled_from(packed))
    _, _, _, offset, size, _ = PREAMBLE.unpack_from(whole)
    header = json.loads(whole[offset : offset + size])
    for key in content.draw(st.lists(st.sampled_from([*header, *header["sections"]]), min_size=1, max_size=3)):
        if key in header["sections"]:
            header["sections"][key] = content.draw(st.lists(NUMBERS, min_size=3, max_size=3) | VALUES)
        else:
            header[key] = content.draw(NUMBERS | VALUES)
        if not isinstance(header["sections"], dict):
            break
    text = json.dumps(header).encode()
    page = first_page(PREAMBLE.pack(MAGIC, VERSION, crc32(text), offset, len(text), offset + len(text)))
    place = written(tmp_path_factory.getbasetemp() / "packed-files", "x.tico", page + whole[PAGE:offset] + text)
    clear("packed files", lambda: use(place))


# --------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("backbone") / "backbone.safetensors"
    save_backbone(build_backbone(load_recipe("demo", {"backbone.name": "tico/resnet10-w2"}).backbone, 16), path)
    return path.read_bytes()


@fuzz(30, content=st.data())
def test_backbones(tmp_path_factory, backbone, content):
    start = content.draw(st.sampled_from([len(backbone), 3_000, 600]))  # the description is at the beginning
    changed = content.draw(damaged(backbone[:start])) + backbone[start:]
    place = written(tmp_path_factory.getbasetemp() / "backbones", "x.safetensors", changed)
    clear("backbones", lambda: load_backbone(place))


@fuzz(20, content=st.data())
def test_descriptions_of_backbones(tmp_path_factory, backbone, content):
    """Metadata with other values."""
    size = int.from_bytes(backbone[:8], "little")
    header = json.loads(backbone[8 : 8 + size])
    about = json.loads(header["__metadata__"]["tico_ssl"])
    for key in content.draw(st.lists(st.sampled_from([*about, *about["config"]]), min_size=1, max_size=2, unique=True)):
        part = about["config"] if key in about["config"] else about
        part[key] = content.draw(NUMBERS | VALUES)
        if part is about:
            break
    header["__metadata__"]["tico_ssl"] = json.dumps(about)
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + backbone[8 + size :]
    place = written(tmp_path_factory.getbasetemp() / "backbones", "x.safetensors", changed)
    clear("backbones", lambda: load_backbone(place))


@fuzz(20, content=st.data())
def test_checkpoints(tmp_path_factory, content):
    method = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(method.parameters(), 0.1)
    folder = tmp_path_factory.getbasetemp() / "checkpoints"
    place = written(folder, "last.pt", b"")
    save_checkpoint(place, 3, method, optimizer, 1.0)
    whole = place.read_bytes()
    written(folder, "last.pt", content.draw(damaged(whole)))
    clear("checkpoints", lambda: restore(place, method, optimizer, torch.device("cpu")))


@fuzz(20, content=st.data())
def test_weights_of_other_libraries(tmp_path_factory, content):
    from tico_ssl.features.subjects import _read_state

    stream = io.BytesIO()
    torch.save({"state_dict": {name: torch.zeros(3, 4) for name in string.ascii_lowercase}}, stream)
    place = written(tmp_path_factory.getbasetemp() / "weights", "x.pth", content.draw(damaged(stream.getvalue())))
    clear("weights", lambda: _read_state(place))
