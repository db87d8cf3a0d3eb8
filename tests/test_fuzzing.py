"""Random and damaged input of every kind: each gives a right result or one clear line, soon and in little memory.

`make test-faults` tries ten thousand inputs, `make test` one in twenty.
"""

import functools
import io
import json
import re
import resource
import string
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import parsers
from faults import FAULTS
from parsers import PARSERS, RECIPES, require_clear, use, written
from tico_ssl import load_backbone
from tico_ssl.config.recipe import load_recipe, packaged_recipes, parse_override
from tico_ssl.config.study import packaged_studies
from tico_ssl.data.decoding import decode
from tico_ssl.data.formats.packed import verify_packed
from tico_ssl.data.given import require_data
from tico_ssl.listing import described
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.checkpoint import restore, save_checkpoint

pytestmark = pytest.mark.faults

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
    """Count an input that gives a right result or one clear line; anything else is a failure."""
    tried[kind] += 1
    try:
        require_clear(work)
    except BaseException:
        failed[kind] += 1
        raise


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
        text = (RECIPES / f"{name}.yaml").read_bytes()
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
    name = content.draw(st.sampled_from(packaged_studies()))
    text = content.draw(damaged((RECIPES / "studies" / f"{name}.yaml").read_bytes()))
    clear("studies", lambda: parsers.read_study(text, tmp_path_factory.getbasetemp() / "studies"))


# -------------------------------------------------------------------------------------------------------- images


@fuzz(
    80,
    content=st.deferred(lambda: st.sampled_from(parsers.images()).flatmap(damaged)) | st.binary(max_size=200),
    channels=st.sampled_from([1, 3, 3, 5]),
)
def test_images(content, channels):
    def read():
        image = decode(content, channels, "x.tif" if channels == 5 else None, shorter=8)
        assert image.shape[0] == channels

    clear("images", read)


@fuzz(50, content=st.data())
def test_arrays(tmp_path_factory, content):
    name, whole = content.draw(st.sampled_from(parsers.arrays()))
    place = written(tmp_path_factory.getbasetemp() / "arrays", name, content.draw(damaged(whole)))
    clear("numpy files", lambda: use(place))


@fuzz(50, content=st.deferred(lambda: damaged(parsers.shard())))
def test_shards(tmp_path_factory, content):
    place = written(tmp_path_factory.getbasetemp() / "shards", "x.tar", content)
    clear("tar files", lambda: use(place))


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="without pyarrow")
@fuzz(40, content=st.deferred(lambda: st.sampled_from(parsers.tables()).flatmap(damaged)))
def test_tables(tmp_path_factory, content):
    place = written(tmp_path_factory.getbasetemp() / "tables", "x.parquet", content)
    clear("parquet files", lambda: use(place))


@fuzz(40, content=st.data())
def test_packed_files(tmp_path_factory, content):
    whole = content.draw(st.sampled_from(parsers.packed()))
    place = written(tmp_path_factory.getbasetemp() / "packed-files", "x.tico", content.draw(damaged(whole)))
    clear("packed files", lambda: use(place))
    if place.read_bytes() != whole:
        with pytest.raises(UserError):
            verify_packed(place)


NUMBERS = st.sampled_from([-1, 0, 1, 2, 6, 12, 4096, 4095, 2**31, 2**63, 10**30]) | st.integers() | SCALARS


@fuzz(30, content=st.data())
def test_headers_of_packed_files(tmp_path_factory, content):
    """Headers with other values whose checksums are right."""
    whole = content.draw(st.sampled_from(parsers.packed()))
    header = json.loads(parsers.header_of(whole))
    for key in content.draw(st.lists(st.sampled_from([*header, *header["sections"]]), min_size=1, max_size=3)):
        if key in header["sections"]:
            header["sections"][key] = content.draw(st.lists(NUMBERS, min_size=3, max_size=3) | VALUES)
        else:
            header[key] = content.draw(NUMBERS | VALUES)
        if not isinstance(header["sections"], dict):
            break
    changed = parsers.with_header(whole, json.dumps(header).encode())
    place = written(tmp_path_factory.getbasetemp() / "packed-files", "x.tico", changed)
    clear("packed files", lambda: use(place))


# --------------------------------------------------------------------------------------------------- checkpoints


@fuzz(30, content=st.data())
def test_backbones(tmp_path_factory, content):
    whole = parsers.backbone()
    start = content.draw(st.sampled_from([len(whole), 3_000, 600]))  # the description is at the beginning
    changed = content.draw(damaged(whole[:start])) + whole[start:]
    place = written(tmp_path_factory.getbasetemp() / "backbones", "x.safetensors", changed)
    clear("backbones", lambda: load_backbone(place))


@fuzz(20, content=st.data())
def test_descriptions_of_backbones(tmp_path_factory, content):
    """Metadata with other values."""
    header, rest = parsers.description_of(parsers.backbone())
    about = json.loads(header["__metadata__"]["tico_ssl"])
    for key in content.draw(st.lists(st.sampled_from([*about, *about["config"]]), min_size=1, max_size=2, unique=True)):
        part = about["config"] if key in about["config"] else about
        part[key] = content.draw(NUMBERS | VALUES)
        if part is about:
            break
    changed = parsers.with_description(header, json.dumps(about), rest)
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
    from tico_ssl.networks.foreign import read_tensors

    stream = io.BytesIO()
    torch.save({"state_dict": {name: torch.zeros(3, 4) for name in string.ascii_lowercase}}, stream)
    place = written(tmp_path_factory.getbasetemp() / "weights", "x.pth", content.draw(damaged(stream.getvalue())))
    clear("weights", lambda: read_tensors(place))


@fuzz(20, content=st.data())
def test_descriptions_of_classifiers(tmp_path_factory, content):
    """Metadata with other values, and the right checksums."""
    (right,) = PARSERS["classifier-metadata"].right()
    about = changed_values(content, json.loads(right), VALUES | NUMBERS)
    folder = tmp_path_factory.getbasetemp() / "classifiers"
    clear("classifiers", lambda: parsers.read_classifier_metadata(json.dumps(about).encode(), folder))


# --------------------------------------------------------------------------------------------------- annotations

NUMBERS_OF_JSON = st.sampled_from([1e9, -1e9, 4e8, 1e300, float("nan"), float("inf"), 10**400]) | NUMBERS


def changed_values(content, about: dict, values) -> dict:
    """JSON with other values in one to three places, at any depth."""
    for _ in range(content.draw(st.integers(1, 3))):
        at = about
        while True:
            key = content.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not (isinstance(at[key], dict | list) and at[key]) or content.draw(st.integers(0, 4)) == 0:
                break
            at = at[key]
        at[key] = content.draw(values)
    return about


@fuzz(40, content=st.data())
def test_coco_files(tmp_path_factory, content):
    pytest.importorskip("pycocotools")
    whole = content.draw(st.sampled_from(parsers.coco()))
    if content.draw(st.booleans()):
        text = content.draw(damaged(whole))
    else:
        text = json.dumps(changed_values(content, json.loads(whole), NUMBERS_OF_JSON | VALUES)).encode()
    clear("COCO files", lambda: parsers.read_coco(text, tmp_path_factory.getbasetemp() / "coco"))


@fuzz(20, content=st.deferred(lambda: damaged(parsers.voc())))
def test_voc_files(tmp_path_factory, content):
    pytest.importorskip("pycocotools")
    clear("VOC files", lambda: parsers.read_voc(content, tmp_path_factory.getbasetemp() / "voc"))


# ------------------------------------------------------------------------------------------------ guided by coverage


@pytest.mark.skipif(FAULTS == 1, reason="a matter of minutes: `make test-faults`")
@pytest.mark.skipif(find_spec("atheris") is None, reason="no coverage-guided fuzzing: atheris is not installed")
@pytest.mark.parametrize("parser", PARSERS)
def test_inputs_that_reach_new_code(tmp_path, parser):
    """As many seconds for each parser as TICO_FAULTS says."""
    script = Path(__file__).with_name("guided.py")
    command = [sys.executable, str(script), parser, str(FAULTS), str(tmp_path / "inputs")]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, f"see {tmp_path}/inputs\n{done.stderr[-4000:]}"
    (units,) = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    print(f"{parser}: {units} inputs guided by coverage, no failure")


@pytest.mark.parametrize("parser", PARSERS)
def test_what_guided_fuzzing_begins_with_is_read(tmp_path, parser):
    for name, library in (("parquet", "pyarrow"), ("coco", "pycocotools"), ("voc", "pycocotools")):
        if parser == name:
            pytest.importorskip(library)
    for content in PARSERS[parser].right():
        PARSERS[parser].read(content, tmp_path / "place")
