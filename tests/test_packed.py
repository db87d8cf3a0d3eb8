"""Packed files: what goes in comes out, whatever interrupts the packing; what is damaged is refused."""

import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time
import warnings
from array import array
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import BadImage, Reading, decode
from tico_ssl.data.formats.packed import PAGE, PREAMBLE, open_packed, verify_packed
from tico_ssl.data.source import Source, spread_evenly
from tico_ssl.data.sources import open_source
from tico_ssl.pipeline import packing
from tico_ssl.pipeline.packing import pack
from tico_ssl.runtime.errors import UserError


def pictures(count: int, channels: int = 3, low: int = 12, high: int = 40, seed: int = 0) -> list[torch.Tensor]:
    """Smooth images of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(low, high, (count, 2), generator=generator).tolist()
    coarse = torch.rand(count, channels, 4, 4, generator=generator) * 255
    return [torch.nn.functional.interpolate(c[None], s, mode="bilinear")[0].byte() for c, s in zip(coarse, sizes)]


def source_of(images, labelled: bool = True, names=None, name: str = "some") -> Source:
    labels = torch.arange(len(images)) % 3 if labelled else None
    names = names or [f"a/{i}.png" for i in range(len(images))]
    return Source(
        name, len(images), images.__getitem__, None, labels, ("x", "y", "z") if labelled else (), names.__getitem__
    )


def failing(source: Source, at: int) -> Source:
    """The same, but the machine stops at one image."""

    def fetch(i: int) -> torch.Tensor:
        if i == at:
            raise RuntimeError("stopped")
        return source.fetch(i)

    return Source(source.name, source.count, fetch, None, source.labels, source.classes, source.names)


def error_of(call, path) -> str:
    """The one line with which a call refuses a file."""
    with pytest.raises(UserError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def sections(path) -> dict[str, tuple[int, int]]:
    """Where everything lies."""
    content = path.read_bytes()
    *_, offset, size, _ = PREAMBLE.unpack_from(content)
    found = json.loads(content[offset : offset + size])["sections"]
    return {name: (begin, end) for name, (begin, end, _) in found.items()} | {"header": (offset, offset + size)}


def starts(path) -> list[int]:
    """Where each image begins in the data."""
    begin, end = sections(path)["index"]
    return np.frombuffer(path.read_bytes()[begin:end], "<i8")[:-1].tolist()


def flip(path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


# -------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(("channels", "jpeg"), [(1, False), (3, False), (4, False), (1, True), (3, True)])
def test_what_goes_in_comes_out(tmp_path, channels, jpeg, labelled):
    source, out = source_of(pictures(7, channels), labelled), tmp_path / "deep" / "set.tico"
    report = pack(source, out, 16, jpeg=jpeg)
    assert (report.images, report.bad, report.resumed_from, report.bytes) == (7, [], 0, out.stat().st_size)
    assert [path.name for path in out.parent.iterdir()] == ["set.tico"]
    assert verify_packed(out) == (7, out.stat().st_size)
    found = open_packed(out)
    assert (found.name, len(found), found.classes) == (source.name, 7, source.classes)
    assert [found.names(i) for i in range(7)] == [source.names(i) for i in range(7)]
    assert found.names(-1) == source.names(6)
    assert found.labels.tolist() == source.labels.tolist() if labelled else found.labels is None
    for i in range(7):
        image = found.fetch(i)
        assert image.dtype == torch.uint8
        assert len(image) == channels
        assert min(image.shape[1:]) == (min(16, *source.fetch(i).shape[1:]) if jpeg else 16)
    assert (found.images is None) == (not found.mapped) == jpeg
    if not jpeg:
        assert found.images.shape == (7, channels, 16, 16)
    with pytest.raises(IndexError):
        found.fetch(7)


@pytest.mark.parametrize("count", [1, 5])
def test_several_labels_an_image(tmp_path, count):
    source = source_of(pictures(count), labelled=False)
    labels = torch.randint(-1, 2, (count, 4))
    pack(replace(source, labels=labels), tmp_path / "l.tico", 8)
    assert torch.equal(open_packed(tmp_path / "l.tico").labels, labels)


def test_images_of_the_right_size_are_kept_exactly(tmp_path):
    images = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    source = Source("arrays", 9, images.__getitem__, images)
    pack(source, tmp_path / "a.tico", 8)
    assert torch.equal(open_packed(tmp_path / "a.tico").images, images)
    assert open_packed(tmp_path / "a.tico").names(3) == "3"


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.binary(max_size=30), min_size=1, max_size=5), title=st.binary(min_size=1, max_size=9))
def test_names_may_hold_any_bytes(tmp_path, names, title):
    out = tmp_path / "n.tico"
    out.unlink(missing_ok=True)
    decoded = [os.fsdecode(name) for name in names]
    source = source_of([torch.zeros(3, 4, 4, dtype=torch.uint8)] * len(names), names=decoded, name=os.fsdecode(title))
    pack(Source(*list(vars(source).values())[:5], classes=(os.fsdecode(title),), names=source.names), out, 4)
    found = open_packed(out)
    assert [os.fsencode(found.names(i)) for i in range(len(found))] == names
    assert os.fsencode(found.name) == os.fsencode(found.classes[0]) == title


@settings(deadline=None, max_examples=40)
@given(height=st.integers(1, 70), width=st.integers(1, 70), size=st.integers(1, 40), seed=st.integers(0, 99))
def test_squares_are_those_of_pillow(height, width, size, seed):
    image = pictures(1, 3, 80, 81, seed)[0][:, :height, :width]
    found = torch.frombuffer(bytearray(packing._square(image, size)), dtype=torch.uint8).view(3, size, size)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    picture = picture.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    assert np.abs(found.permute(1, 2, 0).numpy().astype(int) - np.asarray(picture).astype(int)).max() <= 2


def test_jpegs_keep_their_shape_and_are_never_enlarged(tmp_path):
    images = [pictures(1, 3, 100, 101)[0][:, :60], pictures(1, 3, 100, 101)[0][:, :, :50], pictures(1, 3, 9, 10)[0]]
    pack(source_of(images), tmp_path / "j.tico", 20, jpeg=True, quality=95)
    found = open_packed(tmp_path / "j.tico")
    assert [tuple(found.fetch(i).shape[1:]) for i in range(3)] == [(20, 33), (40, 20), (9, 9)]
    stream = io.BytesIO()
    Image.fromarray(images[2].permute(1, 2, 0).contiguous().numpy()).save(stream, "JPEG", quality=95)
    assert torch.equal(found.fetch(2), decode(stream.getvalue()))


def test_a_tensor_over_the_file_that_cannot_harm_it(tmp_path):
    out = tmp_path / "m.tico"
    pack(source_of(pictures(3)), out, 8)
    before = out.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = open_packed(out)
    with out.open("r+b") as file:  # what the file says now is what the tensor says
        file.seek(PAGE + 5)
        file.write(b"\x07")
    assert found.images.view(-1)[5] == 7
    found.images.fill_(1)
    with out.open("r+b") as file:
        file.seek(PAGE)
        file.write(before[PAGE : PAGE + 6])
    assert out.read_bytes() == before


def test_a_file_larger_than_memory_opens_at_once(tmp_path):
    """Linux would refuse a plain private mapping of it."""
    out, size = tmp_path / "sparse.tico", 3 << 40  # bytes of nothing
    work = packing.Unfinished(out, b"")
    work.channels, work.kept = size >> 20, array("q", (0, size, 0))
    try:
        work.data.truncate(PAGE + size)
    except OSError:
        pytest.skip("the file system has no sparse files")
    work.finish(source_of([None]), [b"a"], 1024, "fixed")
    found = open_packed(out)
    assert found.images.numel() == size
    assert found.images[0, -1].sum() == 0
    assert found.names(0) == "a"
    part = found.subset(torch.tensor([0]))
    assert part.images.data_ptr() == found.images.data_ptr()


@pytest.mark.parametrize("inner", [None, [2, 0]])
def test_a_part_of_a_file_stays_on_disk(tmp_path, inner):
    """Not a copy of the images, but other places of the same tensor, also for a part of a part."""
    pack(source_of(pictures(9)), tmp_path / "p.tico", 8)
    whole = open_packed(tmp_path / "p.tico")
    places = [7, 1, 4]
    part = whole.subset(torch.tensor(places))
    if inner is not None:
        part, places = part.subset(torch.tensor(inner)), [places[i] for i in inner]
    assert part.mapped
    assert part.images.data_ptr() == whole.images.data_ptr()
    assert part.rows.tolist() == places
    assert len(part) == len(places)
    assert torch.equal(part.take(torch.arange(len(part))), whole.images[places])
    assert torch.equal(part.take(torch.tensor([1, 0, 1])), whole.images[[places[1], places[0], places[1]]])
    for i, place in enumerate(places):
        assert torch.equal(part.fetch(i), whole.fetch(place))
        assert part.names(i) == whole.names(place)
        assert part.labels[i] == whole.labels[place]
    with pytest.raises(IndexError):
        part.take(torch.tensor([len(places)]))


def test_limits_of_a_file_stay_on_disk(tmp_path):
    pack(source_of(pictures(10)), tmp_path / "p.tico", 8)
    whole = open_packed(tmp_path / "p.tico")
    assert whole.limited(10) is whole
    assert whole.limited(3).mapped
    assert torch.equal(whole.limited(3).rows, spread_evenly(10, 3))


def test_a_part_of_a_file_packs_again(tmp_path):
    pack(source_of(pictures(9)), tmp_path / "p.tico", 8)
    part = open_packed(tmp_path / "p.tico").limited(4)
    pack(part, tmp_path / "q.tico", 8)
    assert torch.equal(open_packed(tmp_path / "q.tico").images, part.take(torch.arange(4)))


@pytest.mark.parametrize(("packed", "wanted"), [(1, 3), (3, 1), (3, 3), (1, None), (3, None)])
def test_jpegs_have_the_channels_that_are_wanted(tmp_path, packed, wanted):
    pack(source_of(pictures(3, packed)), tmp_path / "c.tico", 16, jpeg=True)
    found, as_packed = (
        open_packed(tmp_path / "c.tico", wanted and Reading(wanted)).fetch(0),
        open_packed(tmp_path / "c.tico").fetch(0),
    )
    assert len(found) == (wanted or packed)
    if packed == 1:
        assert torch.equal(found, as_packed.expand_as(found))


def test_squares_of_other_channels_than_the_network_has_are_refused(tmp_path):
    for channels in (1, 3):
        pack(source_of(pictures(3, channels)), tmp_path / f"{channels}.tico", 8)
    for places in ("1.tico", ["3.tico", "1.tico"]):
        given = [str(tmp_path / place) for place in ([places] if isinstance(places, str) else places)]
        config = DataConfig(source=given if len(given) > 1 else given[0])
        line = error_of(lambda: open_source(config), "1.tico")  # noqa: B023
        assert "1 channels" in line
        assert "backbone.channels is 3" in line


# ---------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("jpeg", [False, True])
def test_the_same_bytes_whatever_the_workers(tmp_path, jpeg):
    source, contents = source_of(pictures(30)), set()
    for workers in (1, 2, 5):
        threads = torch.get_num_threads()
        pack(source, tmp_path / f"{workers}.tico", 11, jpeg=jpeg, workers=workers, label="packing")
        assert torch.get_num_threads() == threads
        contents.add((tmp_path / f"{workers}.tico").read_bytes())
    assert len(contents) == 1


def with_bad(images, bad: dict[int, Exception], **settings) -> Source:
    source = source_of(images, **settings)

    def fetch(i: int) -> torch.Tensor:
        if i in bad:
            raise bad[i]
        return images[i]

    return Source(source.name, source.count, fetch, None, source.labels, source.classes, source.names)


def test_bad_images_are_left_out_and_reported(tmp_path):
    images = pictures(8)
    images[3] = torch.zeros(1, 9, 9, dtype=torch.uint8)
    images[5] = torch.zeros(3, 9, 9)
    source = with_bad(images, {0: BadImage("0.png", "empty file"), 6: OSError("cannot identify")})
    report = pack(source, tmp_path / "b.tico", 8)
    assert report.images == 4
    assert [name for name, _ in report.bad] == ["a/0.png", "a/3.png", "a/5.png", "a/6.png"]
    assert [reason.split(",")[0] for _, reason in report.bad][:2] == ["empty file", "1 channels"]
    verify_packed(tmp_path / "b.tico")
    found = open_packed(tmp_path / "b.tico")
    assert [found.names(i) for i in range(4)] == ["a/1.png", "a/2.png", "a/4.png", "a/7.png"]
    assert found.labels.tolist() == [1, 2, 1, 1]


def test_nothing_but_bad_images_leaves_no_file(tmp_path):
    source = with_bad(pictures(2), {i: BadImage(str(i), "empty file") for i in range(2)})
    for broken in (source, source_of([])):
        assert "none of" in error_of(lambda: pack(broken, tmp_path / "b.tico", 8), "some")  # noqa: B023
    assert not any(tmp_path.iterdir())


def test_a_jpeg_too_long_for_the_format_is_a_bad_image(tmp_path):
    images = [*pictures(2), torch.zeros(3, 1, 66_000, dtype=torch.uint8), *pictures(2)]
    assert [name for name, _ in pack(source_of(images), tmp_path / "l.tico", 8, jpeg=True).bad] == ["a/2.png"]


def test_what_cannot_be_packed_is_refused(tmp_path):
    source, out = source_of(pictures(2)), tmp_path / "r.tico"
    assert ".tico" in error_of(lambda: pack(source, tmp_path / "r.bin", 8), "r.bin")
    error_of(lambda: pack(source, out, 0), "size 0")
    error_of(lambda: pack(source, out, 8, workers=0), "workers 0")
    error_of(lambda: pack(source, out, 8, jpeg=True, quality=101), "quality 101")
    assert "4 channels" in error_of(lambda: pack(source_of(pictures(2, 4)), out, 8, jpeg=True), "some")
    (tmp_path / "file").write_text("")
    error_of(lambda: pack(source, tmp_path / "file" / "r.tico", 8), "cannot be written")
    pack(source, out, 8)
    before = out.read_bytes()
    assert "exists" in error_of(lambda: pack(source, out, 8), out)
    assert out.read_bytes() == before


def test_a_full_disk_is_one_line_and_work_is_kept(tmp_path, monkeypatch):
    source, out = source_of(pictures(6)), tmp_path / "d.tico"
    append = packing.Unfinished.append

    def full(self, *result):
        if self.done == 4:
            raise OSError(28, "No space left on device")
        append(self, *result)

    with monkeypatch.context() as patch:
        patch.setattr(packing.Unfinished, "append", full)
        assert "No space left" in error_of(lambda: pack(source, out, 8), out)
    assert pack(source, out, 8).resumed_from == 4


# ----------------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("jpeg", [False, True])
def test_packing_continues_where_it_was_stopped(tmp_path, jpeg):
    source = with_bad(pictures(40), {7: BadImage("7", "odd \udcff reason"), 20: BadImage("20", "")})
    pack(source, tmp_path / "whole.tico", 9, jpeg=jpeg)
    out = tmp_path / "parts.tico"
    for stop in (3, 4, 9, 21, 31, 36):
        with pytest.raises(RuntimeError, match="stopped"):
            pack(failing(source, stop), out, 9, jpeg=jpeg)
        assert not out.exists()
    report = pack(source, out, 9, jpeg=jpeg)
    assert report.resumed_from >= 20
    assert [name for name, _ in report.bad] == ["a/7.png", "a/20.png"]
    assert out.read_bytes() == (tmp_path / "whole.tico").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.tico", "whole.tico"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_whatever_a_crash_leaves_the_file_comes_out_the_same(tmp_path, draw):
    """The unfinished file and its journal cut anywhere, or overwritten with zeros from anywhere, as a power cut may."""
    source, out = source_of(pictures(12)), tmp_path / "c.tico"
    whole = tmp_path / "w.tico"
    if not whole.exists():
        pack(source, whole, 6, jpeg=True)
    out.unlink(missing_ok=True)
    with pytest.raises(RuntimeError):
        pack(failing(source, 10), out, 6, jpeg=True, workers=1)
    for end in (".partial", ".journal"):
        path = tmp_path / f"c.tico{end}"
        content = path.read_bytes()
        cut = draw.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut] + bytes(draw.draw(st.sampled_from([0, len(content) - cut]))))
    pack(source, out, 6, jpeg=True)
    assert out.read_bytes() == whole.read_bytes()


def test_killed_between_the_last_image_and_the_name(tmp_path, monkeypatch):
    source, out = source_of(pictures(6)), tmp_path / "k.tico"

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing.os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, 8)
    assert pack(source, out, 8).resumed_from == 6
    pack(source, tmp_path / "whole.tico", 8)
    assert out.read_bytes() == (tmp_path / "whole.tico").read_bytes()


def test_other_work_starts_over(tmp_path):
    images = pictures(20)
    source, out = source_of(images), tmp_path / "o.tico"
    others = [
        (source, {"size": 9}),
        (source, {"size": 8, "jpeg": True}),
        (source, {"size": 8, "jpeg": True, "quality": 50}),
        (source_of(images[:19]), {"size": 8}),
        (source_of(images, names=[f"b/{i}.png" for i in range(20)]), {"size": 8}),
        (source_of(pictures(20, seed=1)), {"size": 8}),  # the same names, other pixels
    ]
    for other, setting in others:
        with pytest.raises(RuntimeError):
            pack(failing(source, 15), out, 8)
        assert (tmp_path / "o.tico.journal").exists()
        assert pack(other, out, **setting).resumed_from == 0
        verify_packed(out)
        out.unlink()


SLOW = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_packed import Source, pack, pictures, source_of
    source = source_of(pictures(60))
    fetch = lambda i: (time.sleep(0.01), source.fetch(i))[1]
    slow = Source(source.name, source.count, fetch, None, source.labels, source.classes, source.names)
    pack(slow, Path(sys.argv[1]), 10)
"""


def test_a_killed_process_is_continued(tmp_path):
    out, code = tmp_path / "s.tico", textwrap.dedent(SLOW.format(tests=os.path.dirname(__file__)))  # noqa: PTH120
    process = subprocess.Popen([sys.executable, "-c", code, str(out)])
    journal, deadline = tmp_path / "s.tico.journal", time.monotonic() + 60
    while time.monotonic() < deadline and not (journal.exists() and journal.read_bytes().count(b"\n") > 10):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    report = pack(source_of(pictures(60)), out, 10)
    assert 10 <= report.resumed_from < 60
    pack(source_of(pictures(60)), tmp_path / "whole.tico", 10)
    assert out.read_bytes() == (tmp_path / "whole.tico").read_bytes()


# --------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(params=[False, True], ids=["fixed", "jpeg"])
def file(request, tmp_path):
    pack(source_of(pictures(10)), tmp_path / "f.tico", 12, jpeg=request.param)
    return tmp_path / "f.tico"


def test_what_is_no_packed_file_is_refused(tmp_path):
    for content in (b"", b"TICO", b"PK\x03\x04" + bytes(9000)):
        (tmp_path / "x.tico").write_bytes(content)
        assert "not a packed file" in error_of(lambda: open_packed(tmp_path / "x.tico"), "x.tico")
    error_of(lambda: open_packed(tmp_path / "none.tico"), "none.tico")
    error_of(lambda: open_packed(tmp_path), tmp_path)


def test_another_version_is_refused(file):
    content = bytearray(file.read_bytes())
    content[8] = 3
    file.write_bytes(content)
    assert "version 3" in error_of(lambda: open_packed(file), file)


def test_cut_anywhere_it_is_refused(file):
    content, draw = file.read_bytes(), random.Random(0)
    edges = [place + step for pair in sections(file).values() for place in pair for step in (-1, 0, 1)]
    for cut in [*draw.sample(range(len(content)), 60), *edges, PAGE - 1, 40, 8]:
        if cut < len(content):
            file.write_bytes(content[:cut])
            assert "cut short" in error_of(lambda: open_packed(file), file) or cut < 8
    file.write_bytes(content + b"\0")
    assert "too long" in error_of(lambda: open_packed(file), file)


def test_any_flipped_byte_is_found(file):
    draw, content = random.Random(0), file.read_bytes()
    for name, (begin, end) in (sections(file) | {"first page": (12, PAGE)}).items():
        for place in {begin, end - 1, *draw.sample(range(begin, end), 12)}:
            flip(file, place)
            if name == "data":
                source = open_packed(file)  # which does not read the images
                number = bisect_right(starts(file), place - PAGE) - 1
                assert f"damaged (image {number}, a/{number}.png)" in error_of(lambda: verify_packed(file), file)
                message = error_of(lambda source=source, number=number: source.fetch(number), file)
                assert f"image {number}, a/{number}.png: not a readable image (damaged" in message
                if source.images is not None:
                    error_of(lambda source=source: source.take(torch.arange(len(source))), file)
            else:
                assert f"damaged ({name})" in error_of(lambda: open_packed(file), file)
            flip(file, place)
    assert file.read_bytes() == content
    verify_packed(file)


def test_an_unfinished_file_is_not_a_packed_one(tmp_path):
    with pytest.raises(RuntimeError):
        pack(failing(source_of(pictures(20)), 15), tmp_path / "u.tico", 8)
    assert "not a packed file" in error_of(lambda: open_packed(tmp_path / "u.tico.partial"), "u.tico")


def test_a_file_that_another_command_wrote_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    out, fingerprint = tmp_path / "a.tico", packing._fingerprint

    def meanwhile(*given):
        out.write_text("another's")
        return fingerprint(*given)

    monkeypatch.setattr(packing, "_fingerprint", meanwhile)
    assert "exists" in error_of(lambda: pack(source_of(pictures(4)), out, 8), "a.tico")
    assert [*tmp_path.iterdir()] == [out]
    assert out.read_text() == "another's"


@contextmanager
def another_at_work(journal):
    hold = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, journal], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        yield
        other.communicate(b"\n")


def test_a_command_that_is_refused_leaves_nothing(tmp_path):
    """The other has given its file its name, and not taken its journal away yet."""
    out, journal = tmp_path / "a.tico", tmp_path / "a.tico.journal"
    with another_at_work(journal):
        assert "another command is writing it" in error_of(lambda: pack(source_of(pictures(4)), out, 16), out)
    assert [*tmp_path.iterdir()] == [journal]


def test_two_commands_never_write_one_file(tmp_path):
    """The second is refused while the first is at work, and takes nothing from it."""
    out, source = tmp_path / "a.tico", source_of(pictures(4))
    with pytest.raises(RuntimeError, match="stopped"):
        pack(failing(source, 1), out, 16)
    journal = tmp_path / "a.tico.journal"
    before = journal.read_bytes()
    with another_at_work(journal):
        assert "another command is writing it" in error_of(lambda: pack(source, out, 16), out)
    assert journal.read_bytes() == before
    assert pack(source, out, 16).resumed_from == 1


def test_a_file_is_one_command_s_until_it_has_its_name(tmp_path, monkeypatch):
    """Also while the last of it is written to the disk, which may take long."""
    out, sync, seen = tmp_path / "a.tico", os.fsync, []
    lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def syncing(file: int) -> None:
        seen.append(subprocess.run([sys.executable, "-c", lock, f"{out}.journal"], capture_output=True).returncode)
        sync(file)

    monkeypatch.setattr(os, "fsync", syncing)
    pack(source_of(pictures(4)), out, 16)
    assert seen and 0 not in seen
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("kind", ["chunk", "size"])
def test_a_bad_file_is_left_out_also_if_its_size_cannot_be_known(kind, tmp_path):
    """Pillow fails on these otherwise than with an OSError."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    if kind == "size":
        content[16:24] = struct.pack(">II", 40_000, 40_000)
        content[29:33] = struct.pack(">I", crc32(content[12:29]))
    else:  # pixels that end too early, after which no chunk begins
        content[content.index(b"IDAT") - 1] -= 8
    (tmp_path / "b.png").write_bytes(content)
    source = open_source(DataConfig(source=str(tmp_path)))
    report = pack(source, tmp_path / "x.tico", 16)
    assert (report.images, [name for name, _ in report.bad]) == (1, ["b.png"])
