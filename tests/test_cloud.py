"""Data in object storage: the same images, epochs and weights as from files, to the bit, whatever the network does."""

import io
import logging
import multiprocessing
import os
import re
import signal
import tarfile
import threading
import time
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl import pretrain
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.fingerprint import glance
from tico_ssl.data.formats import _tar_index
from tico_ssl.data.given import require_data
from tico_ssl.data.remote import blocks, client, stores, urls
from tico_ssl.data.source import joined
from tico_ssl.data.sources import open_source
from tico_ssl.pipeline.packing import pack
from tico_ssl.runtime import cache_folder
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.runtime.extras import install_command
from tico_ssl.training.checkpoint import read_checkpoint

obstore = pytest.importorskip("obstore")
moto_server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

from cloud_proxy import Proxy  # noqa: E402
from test_pretrain import assert_same, interrupt_after, without_clock  # noqa: E402

SIDE = 1100  # of large images: three of them are more than two blocks


class Bucket:
    """A bucket of this process, behind a proxy, and the same files in a folder."""

    def __init__(self, folder: Path) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.folder = folder
        self._moto = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        port = self._moto.get_host_and_port()[1]
        self.proxy = Proxy(port)
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self._client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
        self._client.create_bucket(Bucket="bucket")

    def put(self, name: str, content: bytes | None = None) -> str:
        """Upload a file of the folder, or other bytes."""
        content = (self.folder / name).read_bytes() if content is None else content
        self._client.put_object(Bucket="bucket", Key=f"data/{name}", Body=content)
        return f"s3://bucket/data/{name}"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    made = Bucket(tmp_path_factory.mktemp("files"))
    write_files(made.folder)
    for file in sorted(made.folder.rglob("*")):
        if file.is_file():
            made.put(str(file.relative_to(made.folder)))
    with pytest.MonkeyPatch.context() as environment:
        settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        settings |= {"AWS_ENDPOINT_URL": made.proxy.url, "AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1"}
        settings |= {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
        for name, value in settings.items():
            environment.setenv(name, value)
        yield made
    made._moto.stop()


@pytest.fixture(autouse=True)
def _calm(bucket):
    bucket.proxy.calm()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of a test's own."""
    monkeypatch.setenv("TICO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def new_command() -> None:
    """What a command that starts now knows of the ones before: nothing but the cache."""
    if client._helper is not None:
        client._forget(client._helper)
    blocks._folder.cache_clear()


def write_files(folder: Path) -> None:
    """Two shards of ten images with labels, the same images packed in two ways and as parquet, and large images."""
    numbers = np.random.default_rng(0)
    pictures = [Image.fromarray(numbers.integers(0, 256, (24, 20, 3), np.uint8)) for _ in range(20)]
    (folder / "shards").mkdir()
    for shard in range(2):
        with tarfile.open(folder / "shards" / f"train-{shard:03d}.tar", "w") as tar:
            for number in range(10 * shard, 10 * shard + 10):
                add(tar, f"{number:04d}.png", encoded(pictures[number]))
                add(tar, f"{number:04d}.cls", b"%d" % (number % 2))
    (folder / "shards" / "classes.txt").write_text("cats\ndogs\n")
    with tarfile.open(folder / "large.tar", "w") as tar:
        for number in range(3):
            large = Image.fromarray(numbers.integers(0, 256, (SIDE, SIDE, 3), np.uint8))
            add(tar, f"{number}.bmp", encoded(large, "BMP"))
    with tarfile.open(folder / "relabelled.tar", "w") as tar:
        for number in range(3):
            add(tar, f"{number}.png", encoded(pictures[number]))
            add(tar, f"{number}.cls", b"%d" % number)
    _tar_index.load_index(folder / "relabelled.tar")
    source = open_source(DataConfig(source=str(folder / "shards")))
    pack(source, folder / "squares.tico", 16, workers=1)
    pack(source, folder / "jpegs.tico", 16, jpeg=True, workers=1)
    write_parquet(folder / "tables" / "data", [encoded(picture) for picture in pictures])


def write_parquet(folder: Path, images: list[bytes]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)
    for split, part in (("train", images[:16]), ("test", images[16:])):
        rows = {"image": [{"bytes": image} for image in part], "label": [number % 2 for number in range(len(part))]}
        parquet.write_table(arrow.table(rows), folder / f"{split}-0.parquet", row_group_size=4)


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def opened(place: str, split: str = "train"):
    found = open_source(DataConfig(source=place), split)
    assert found is not None
    return found


def assert_same_images(one, other) -> None:
    assert len(one) == len(other)
    assert [one.names(i) for i in range(len(one))] == [other.names(i) for i in range(len(other))]
    assert one.classes == other.classes
    assert (one.labels is None and other.labels is None) or torch.equal(one.labels, other.labels)
    order = torch.randperm(len(one), generator=torch.Generator().manual_seed(0)).tolist()
    assert all(torch.equal(one.fetch(i), other.fetch(i)) for i in order)


# ---------------------------------------------------------------------------------------------------- the same images


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("shards/", "shards"),
        ("shards/train-{000..001}.tar", "shards"),
        ("shards/train-*.tar", "shards"),
        ("shards/train-001.tar", "shards/train-001.tar"),
        ("tables/", "tables"),
        ("tables/data/train-0.parquet", "tables/data/train-0.parquet"),
        ("squares.tico", "squares.tico"),
        ("jpegs.tico", "jpegs.tico"),
    ],
)
def test_images_are_those_of_the_files(bucket, url, local):
    remote, here = opened(f"s3://bucket/data/{url}"), opened(str(bucket.folder / local))
    assert_same_images(remote, here)
    assert glance(remote) == glance(here)  # so a run may go on with the files where it began with the objects
    assert remote.fingerprint() is not None


def test_a_parquet_folder_has_its_test_split(bucket):
    assert_same_images(opened("s3://bucket/data/tables", "test"), opened(str(bucket.folder / "tables"), "test"))


def test_a_resumed_run_equals_one_on_files(bucket, cache, tmp_path, tiny, monkeypatch):
    settings = tiny | {"training.batch_size": 4, "training.epochs": 2, "training.workers": 2, "data.store": "none"}
    del settings["data.limit"]
    whole = pretrain("demo", data=str(bucket.folder / "shards"), out=tmp_path / "whole", overrides=settings)
    place = "s3://bucket/data/shards/"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        with pytest.raises(Interrupted):
            pretrain("demo", data=place, out=tmp_path / "parts", overrides=settings)
    monkeypatch.setenv("TICO_CACHE", str(tmp_path / "none"))
    cache_folder.set_limit("0")  # nothing is kept any more: workers ask for every image
    bucket.proxy.calm()
    parts = pretrain("demo", data=place, out=tmp_path / "parts", overrides=settings, resume=True)
    assert bucket.proxy.asked > 12
    assert_same(read_checkpoint(whole.checkpoint_file)["method"], read_checkpoint(parts.checkpoint_file)["method"])
    assert without_clock(whole.metrics()) == without_clock(parts.metrics())
    assert not any(b"secret" in file.read_bytes() for file in (tmp_path / "parts").rglob("*") if file.is_file())


def _digest(source, places, found) -> None:
    found.put([source.fetch(i).sum().item() for i in places])


def test_forks_read_by_themselves(bucket, cache):
    """After the parent has used the library, whose threads no fork has; and when the process they share is killed."""
    cache_folder.set_limit("0")
    source = opened("s3://bucket/data/shards/")
    expected = [source.fetch(i).sum().item() for i in range(20)]
    context = multiprocessing.get_context("fork")
    for killed in (False, True):
        if killed:
            os.kill(client._helper._process.pid, signal.SIGKILL)
            client._helper._process.wait()
        found = context.SimpleQueue()
        workers = [context.Process(target=_digest, args=(source, range(k, 20, 2), found)) for k in range(2)]
        for worker in workers:
            worker.start()
        answers = [found.get() for _ in workers]
        for worker in workers:
            worker.join(10)
        assert sorted(answers) == sorted([expected[0::2], expected[1::2]])


# ---------------------------------------------------------------------------------------------------- the network


def test_another_environment_has_a_process_of_its_own_and_the_old_one_ends(bucket, cache, tmp_path, monkeypatch):
    require_data("s3://bucket/data/squares.tico")
    old = client._helper
    monkeypatch.setenv("TICO_CACHE", str(tmp_path / "another"))
    require_data("s3://bucket/data/squares.tico")
    assert client._helper is not old
    assert old._process.wait(10) == 0
    assert not Path(old.address).parent.exists()


def test_faults_cost_time_only(bucket, cache):
    bucket.proxy.disturb("reset", "truncated", "503", every=2, latency=0.01)
    for name in ("shards/", "squares.tico", "large.tar"):
        assert_same_images(opened(f"s3://bucket/data/{name}"), opened(str(bucket.folder / name)))
    assert set(bucket.proxy.made) == {"reset", "truncated", "503"}


def test_images_that_do_not_fit_into_the_cache_are_read_together(bucket, cache):
    cache.mkdir()
    cache_folder.set_limit("0")
    here = opened(str(bucket.folder / "shards"))
    even, odd = (opened("s3://bucket/data/shards/").subset(torch.arange(begin, 20, 2)) for begin in (0, 1))
    source = joined([even, odd])
    bucket.proxy.disturb(latency=0.2)
    source.expect(range(5, 15))
    assert bucket.proxy.asked == 10
    assert [source.content(i) for i in range(5, 15)] == [here.content(i) for i in (*range(10, 20, 2), *range(1, 11, 2))]
    assert bucket.proxy.asked == 10
    assert bucket.proxy.most_at_once > 2  # of five of a source
    assert source.content(0) == source.content(0) == here.content(0)
    assert bucket.proxy.asked == 11


def test_a_server_that_does_not_answer_is_asked_again(bucket, monkeypatch):
    """In this process, where its patience can be short; and at last it is given up."""
    monkeypatch.setattr(stores, "TIMEOUT", stores.timedelta(seconds=1))
    monkeypatch.setattr(stores, "HURRIED", 3.0)
    monkeypatch.setattr(stores, "PATIENT", 0.2)
    monkeypatch.setattr(stores, "_sending", set())
    known = stores.head("s3://bucket/data/squares.tico")
    bucket.proxy.disturb("silent", "none")
    assert stores.get(known, 0, 8) == b"TICOPACK"
    assert bucket.proxy.made == ["silent", "none"]
    bucket.proxy.disturb("503")
    line = r"^s3://bucket/data/squares.tico: cannot be read after \d tries \(the server says 503 Service Unavailable\)$"
    with pytest.raises(UserError, match=line):
        stores.get(known, 0, 8)


def test_a_store_that_has_sent_nothing_yet_is_soon_given_up(bucket, monkeypatch):
    """Whereas one that has is waited for."""
    monkeypatch.setattr(stores, "HURRIED", 0.2)
    monkeypatch.setattr(stores, "PATIENT", 2.0)
    monkeypatch.setattr(stores, "_sending", set())
    bucket.proxy.calm()
    known = stores.head("s3://bucket/data/squares.tico")
    tries = []
    for _ in range(2):
        bucket.proxy.disturb("503")
        with pytest.raises(UserError, match="cannot be read"):
            stores.get(known, 0, 8)
        tries.append(len(bucket.proxy.made))
        bucket.proxy.calm()
        assert stores.get(known, 0, 8) == b"TICOPACK"
    assert tries[0] < tries[1]


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("s3://bucket/data/none.tar", "there is no such file"),
        ("s3://bucket/data/none/", "no .tar, .parquet or .tico file, and no folder"),
        ("s3://bucket/data/none-*.tar", "no tar files found"),
        ("s3://nowhere/data/none.tar", "there is no such bucket"),
        ("s3://bucket/data/image.zip", "no .tar, .parquet or .tico file"),
        ("s3://user:secret@bucket/x.tar", "leave the user name and password out"),
        ("https://server/x.tar?signature=secret", "leave out what follows"),
        ("https://server/folder/", "a web server does not list its files"),
        ("az://container/x.tar", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3:///x.tar", "a bucket or a server is missing"),
    ],
)
def test_a_mistake_is_one_line(bucket, url, line):
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        require_data(url)
        opened(url)
    assert line in str(caught.value)
    assert "secret" not in str(caught.value)
    assert str(caught.value).startswith(url.partition("://")[0] + "://")


def test_credentials_that_are_wrong_or_missing(bucket, monkeypatch):
    bucket.proxy.disturb("403")
    with pytest.raises(UserError, match=r"squares.tico: access is refused; check the credentials \(AWS_ACCESS_KEY_ID"):
        require_data("s3://bucket/data/squares.tico")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match=r"squares.tico: no credentials found: set AWS_ACCESS_KEY_ID"):
        require_data("s3://bucket/data/squares.tico")


def test_without_the_library(bucket, monkeypatch):
    monkeypatch.setattr(urls.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(install_command("cloud"))):
        require_data("s3://bucket/data/squares.tico")


# ---------------------------------------------------------------------------------------------------- the cache


def blocks_in(cache: Path) -> list[Path]:
    return sorted(cache.glob(f"*/*{blocks.SUFFIX}"))


def test_what_was_read_is_not_asked_for_again(bucket, cache):
    source = opened("s3://bucket/data/large.tar")
    new_command()
    bucket.proxy.calm()
    again = opened("s3://bucket/data/large.tar")
    assert [again.content(i) for i in range(3)] == [source.content(i) for i in range(3)]
    assert bucket.proxy.ranges == ["bytes=0-0"]  # what the object is now
    (entry,) = cache_folder.entries()
    assert entry.what == "bytes of s3://bucket/data/"
    assert len(blocks_in(cache)) == 3


def test_a_damaged_block_is_fetched_again(bucket, cache):
    here, source = opened(str(bucket.folder / "large.tar")), opened("s3://bucket/data/large.tar")
    content = [block.read_bytes() for block in blocks_in(cache)]
    damages = [lambda old: b"\1" + old[1:], lambda old: old[:9_000] + b"?" + old[9_001:], lambda old: old[:-1]]
    for block, old, damage in zip(blocks_in(cache), content, damages, strict=True):
        block.write_bytes(damage(old))
    assert [source.content(i) for i in range(3)] == [here.content(i) for i in range(3)]
    assert [block.read_bytes() for block in blocks_in(cache)] == content


def test_the_cache_stays_within_its_limit(bucket, cache):
    """And what does not fit is read by exact ranges, so that nothing is fetched and dropped again and again."""
    cache.mkdir()
    limit = cache_folder.set_limit("9M")  # two blocks of three
    here, source = opened(str(bucket.folder / "large.tar")), opened("s3://bucket/data/large.tar")
    for _ in range(2):
        assert_same_images(source, here)
    assert len(blocks_in(cache)) == 2
    assert sum(entry.bytes for entry in cache_folder.entries()) <= limit
    bucket.proxy.calm()
    source.content(2)
    assert bucket.proxy.ranges == [f"bytes={2 * blocks.BLOCK}-{2 * blocks.BLOCK + tail(bucket) - 1}"]


def tail(bucket) -> int:
    """Bytes of the last large image in the third block."""
    with tarfile.open(bucket.folder / "large.tar") as tar:
        last = tar.getmembers()[-1]
        return last.offset_data + last.size - 2 * blocks.BLOCK


def test_the_least_recently_used_blocks_go(cache):
    """Those of earlier commands; what this one has used stays, and then there is no room."""
    cache.mkdir()
    cache_folder.set_limit("1M")
    folder = blocks.folder_of("s3://bucket/data/")
    names = [f"{number}{blocks.SUFFIX}" for number in range(4)]
    for number, name in enumerate(names):
        folder.write(name, bytes(200_000))
        os.utime(folder.path / name, (1_000 + number, 1_000 + number))
    assert folder.read(names[0], 200_000, 0, 10) == bytes(10)  # which counts as a use
    assert folder.reserve(300_000)
    assert [(folder.path / name).exists() for name in names] == [True, False, True, True]
    assert folder.reserve(400_000)
    assert [(folder.path / name).exists() for name in names] == [True, False, False, False]
    assert not folder.reserve(300_000)
    assert (folder.path / names[0]).exists()


def test_an_object_that_was_replaced_is_another_one(bucket, cache):
    url = bucket.put("changing.tar", (bucket.folder / "shards" / "train-000.tar").read_bytes())
    before = opened(url)
    bucket.put("changing.tar", (bucket.folder / "shards" / "train-001.tar").read_bytes())
    after = opened(url)
    here = opened(str(bucket.folder / "shards" / "train-001.tar"))
    assert [after.content(i) for i in range(10)] == [here.content(i) for i in range(10)]
    assert before.fingerprint() != after.fingerprint()
    for block in blocks_in(cache):
        block.unlink()
    with pytest.raises(UserError, match=r"^s3://bucket/data/changing.tar: changed while it was read"):
        before.fetch(0)


def test_an_index_beside_a_shard_is_used_unless_it_is_older(bucket, cache, monkeypatch):
    shard = bucket.folder / "relabelled.tar"
    url = "s3://bucket/data/relabelled.tar"  # uploaded before its index
    with monkeypatch.context() as patch:
        patch.setattr(_tar_index, "scan", lambda shard: pytest.fail("the index is there"))
        assert opened(url).labels.tolist() == [0, 1, 2]
    bucket.put("relabelled.tar", shard.read_bytes().replace(b"2" + bytes(511), b"5" + bytes(511)))
    assert opened(url).labels.tolist() == [0, 1, 5]


# ---------------------------------------------------------------------------------------------------- the web


class Ranged(SimpleHTTPRequestHandler):
    """Files by range requests."""

    ranges = True
    wrong = None  # what is wrong with bytes that are asked for

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not self.ranges or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(begin) : int(end) + 1]
        size = len(content)
        said = f"{begin}-{int(begin) + len(part) - 1}"
        if self.wrong == "claim":
            size = 10**15
        elif self.wrong is not None and len(part) > 1:
            said, part = {
                "compressed": (said, zlib.compress(part)),
                "longer": (said, part + bytes(1 << 22)),
                "elsewhere": (f"{int(begin) + 7}-{int(begin) + len(part) + 6}", part),
            }[self.wrong]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {said}/{size}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def web(bucket):
    kind = type(
        "Handler", (Ranged,), {"__init__": lambda *a, **k: Ranged.__init__(*a, directory=str(bucket.folder), **k)}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", kind
    server.shutdown()


def test_web_servers(bucket, cache, web):
    url, kind = web
    for name, local in (("shards/train-{000..001}.tar", "shards"), ("squares.tico", "squares.tico")):
        assert_same_images(opened(f"{url}/{name}"), opened(str(bucket.folder / local)))
    (bucket.folder / "with space.tico").write_bytes((bucket.folder / "squares.tico").read_bytes())
    assert len(opened(f"{url}/with%20space.tico")) == 20
    kind.ranges = False
    with pytest.raises(UserError, match=r"jpegs.tico: the server does not send parts of files"):
        require_data(f"{url}/jpegs.tico")
    with pytest.raises(UserError, match=r"none.tar: there is no such file"):
        require_data(f"{url}/none.tar")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("compressed", r"[\d,]+ bytes came and not [\d,]+"),
        ("longer", r"more bytes came and not [\d,]+"),
        ("elsewhere", r".*Requested \d+\.\.\d+, got 7\.\."),
        ("claim", r".*Requested \d+\.\.\d+, got 0\.\."),
    ],
)
def test_a_web_server_that_sends_other_bytes_is_soon_given_up(bucket, cache, web, wrong, line):
    url, kind = web
    kind.wrong = wrong
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"^{url}/shards/train-000.tar: cannot be read after 2 tries \({line}"):
        opened(f"{url}/shards/train-000.tar")
    assert time.monotonic() - started < 5


def test_urls_and_their_parts():
    assert urls.split("s3://bucket/a/b.tar") == ("s3://bucket/", "a/b.tar")
    assert urls.split("https://host:1/a%20b.tar") == ("https://host:1/", "a b.tar")
    assert urls.parent("s3://bucket/a/b.tar") == "s3://bucket/a/"
    assert urls.parent("s3://bucket/a/") == urls.parent("s3://bucket/a.tar") == urls.parent("s3://bucket/")
    assert urls.matching("s3://b/x*.tar", ["s3://b/x1.tar", "s3://b/x/1.tar", "s3://b/y.tar"]) == ["s3://b/x1.tar"]
