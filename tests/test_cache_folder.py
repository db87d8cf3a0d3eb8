"""The cache stays within its limit, and what is in use stays."""

import errno
import gc
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tico_ssl.cli import app
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.backing import OnDisk
from tico_ssl.data.sources import open_source
from tico_ssl.data.stored import store_for
from tico_ssl.runtime import cache_folder, memory
from tico_ssl.runtime.errors import UserError, one_line

pwd = pytest.importorskip("pwd")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TICO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def filled(name, size=8192, used=None):
    folder = cache_folder.opened(name, f"what is in {name}")
    (folder / "pixels").write_bytes(os.urandom(size))
    if used is not None:
        os.utime(folder / "about.json", (used, used))
    return folder


def names():
    return [entry.folder.name for entry in cache_folder.entries()]


def test_where_it_is(monkeypatch, tmp_path):
    assert cache_folder.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("TICO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.cache_folder() == tmp_path / "tico-ssl"


def homeless(monkeypatch):
    """A user of whom the system knows no home."""
    for name in ("TICO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)


def unreadable(monkeypatch):
    """A cache that another user keeps for himself."""

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)


@pytest.mark.parametrize("trouble", [homeless, unreadable])
@pytest.mark.parametrize("fill", [True, False])
def test_without_a_cache_images_are_read_nevertheless(folder_of_images, monkeypatch, trouble, fill):
    config = DataConfig(source=str(folder_of_images))
    source = open_source(config, "train", 3, 32)
    with monkeypatch.context() as patch:
        trouble(patch)
        store = store_for(source, config, 3, 32, fill)
    assert (store is not None) == fill  # in memory
    assert store is None or torch.equal(store.stored().fetch(0), source.fetch(0))


def test_without_a_home_commands_that_need_one_say_so(monkeypatch):
    homeless(monkeypatch)
    with pytest.raises(OSError) as caught:
        cache_folder.entries()
    assert one_line(caught.value) == "there is no home folder to keep a cache in: set TICO_CACHE"
    assert "TICO_CACHE" in CliRunner().invoke(app, ["doctor"]).output
    with pytest.raises(RuntimeError) as caught:
        Path("~nobody-of-this-name/run").expanduser()
    assert "begins with ~" in (one_line(caught.value) or "")


def test_entries_say_what_they_hold_and_when_it_was_used():
    filled("old", used=1000)
    filled("new", used=2000)
    new, old = cache_folder.entries()
    assert (new.folder.name, new.what, new.used, old.used) == ("new", "what is in new", 2000, 1000)
    assert 8192 <= new.bytes <= 8192 + 2 * 4096
    cache_folder.opened("old", "")  # uses it
    assert names() == ["old", "new"]


def test_only_the_user_reads_it():
    assert filled("mine").stat().st_mode & 0o077 == 0


def test_what_was_not_used_for_longest_makes_room(monkeypatch):
    for number in range(4):
        filled(f"number{number}", used=1000 + number)
    size = cache_folder.entries()[0].bytes
    monkeypatch.setattr(cache_folder, "limit", lambda: 4 * size)
    assert cache_folder.make_room(2 * size) == 2 * size
    assert names() == ["number3", "number2"]
    assert cache_folder.make_room(5 * size, mine=cache_folder.cache_folder() / "number2") == 3 * size
    assert names() == ["number2"]


def test_what_another_command_uses_stays(place):
    folder = filled("used", used=1000)
    script = "import sys; from pathlib import Path; from tico_ssl.runtime.cache_folder import held\n"
    script += "file = held(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    other = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert not cache_folder.remove(folder)
        assert names() == ["used"]
        process.stdin.close()
        process.wait()
    assert cache_folder.remove(folder)
    assert names() == []


def test_a_store_that_nobody_holds_has_no_open_file():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backing = OnDisk(cache_folder.opened("some", "images"))
        (begin,) = backing.append([torch.arange(10, dtype=torch.uint8)])
        assert backing.read(begin, 10).tolist() == list(range(10))
        del backing
        gc.collect()
    assert said == []


def test_a_store_is_in_use_until_it_is_closed():
    """Also after the cache was listed, or room was asked for, which read the same files."""
    backing = OnDisk(filled("store", used=1000))
    assert names() == ["store"]
    assert not cache_folder.remove(backing.folder)
    cache_folder.set_limit("1K")
    assert names() == ["store"]
    backing.close()
    cache_folder.make_room(0)
    assert names() == []


@pytest.mark.parametrize(("text", "size"), [("20G", 20 * 10**9), ("1.5gb", 1.5 * 10**9), ("500 M", 5e8), ("0", 0)])
def test_a_limit_in_words(text, size):
    assert cache_folder.set_limit(text) == cache_folder.limit() == size


@pytest.mark.parametrize("text", ["", "G", "much", "-3G", "1e400", "nan"])
def test_no_limit_at_all(text):
    with pytest.raises(UserError, match="not a size, such as 20G"):
        cache_folder.set_limit(text)
    assert cache_folder.limit() == cache_folder.DEFAULT_LIMIT


def test_a_lower_limit_removes_what_is_over_it():
    filled("one", used=1000)
    cache_folder.set_limit("1K")
    assert names() == []


def test_the_command_shows_limits_and_clears():
    def tico(*words):
        return CliRunner().invoke(app, ["cache", *words]).output.splitlines()

    filled("one", 10**6, used=time.time() - 3 * 86_400)
    filled("two", 2 * 10**6)
    assert [line.split(maxsplit=4)[-1] for line in tico()[:2]] == ["what is in two", "what is in one"]
    assert "3 days" in tico("one")[0]
    assert tico("--limit", "7G")[-2].split(" in ")[0].strip() == "0.00 GB of 7 GB"
    assert ["removed" in line for line in tico("two", "--clear")] == [True, False, False]
    assert names() == ["one"]
    tico("--clear")
    assert names() == []


def test_a_damaged_entry_is_none(place):
    for text in ("{", "{}", "[]", "3", "[" * 10**5):
        (filled("one") / "about.json").write_text(text)
        assert names() == []


@pytest.mark.parametrize(
    ("limit", "used", "cached"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_free_memory_is_that_of_the_control_group_if_it_has_a_limit(limit, used, cached, tmp_path, monkeypatch):
    assert memory.free_memory() > 0
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("2000\n")
    (tmp_path / used).write_text("900\n")
    (tmp_path / used).with_name("memory.stat").write_text(f"anon 5\n{cached} 300\n")
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    assert memory.free_memory() == 1400
    for none in ("max", str(2**63 - 4096)):
        (tmp_path / limit).write_text(none)
        assert memory.free_memory() > 1400


def test_free_memory_is_within_the_limit_of_the_process():
    pytest.importorskip("resource")
    script = "import resource; from tico_ssl.runtime.memory import free_memory\n"
    script += "resource.setrlimit(resource.RLIMIT_AS, (10**9, resource.RLIM_INFINITY)); print(free_memory())"
    found = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert 0 < found < 10**9
