"""Files appear whole or not at all, whoever writes them."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tico_ssl.runtime.files import (
    is_sealed,
    remove_old_temporaries,
    remove_temporaries,
    seal,
    write_atomically,
    written_atomically,
    written_together,
)


def test_until_all_is_written_the_file_is_what_it_was(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with written_atomically(path) as first, written_atomically(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert path.read_text() == "old"
    assert path.read_text() == "first"  # which ended last
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("alone", [False, True])
def test_of_what_fails_nothing_is_left(tmp_path, alone):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with pytest.raises(RuntimeError), written_atomically(path, alone) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_belong_together_are_renamed_together_or_none_is(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for attempt in ("old", "new", "failed"):
        with suppress(RuntimeError), written_together(*paths) as temporaries:
            for path, temporary in zip(paths, temporaries):
                write_atomically(temporary, attempt)
                if (attempt, path.name) == ("failed", "b"):
                    raise RuntimeError
    assert [path.read_text() for path in paths] == ["new"] * 3
    assert sorted(tmp_path.iterdir()) == paths


def test_what_is_no_file_is_never_replaced(tmp_path):
    """Neither a device, which root could, nor a link to one, such as /dev/stdout."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(FileExistsError, match="not a regular file"):
            write_atomically(tmp_path / name, "x")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_what_a_killed_writer_left_is_written_over_by_one_that_is_alone(tmp_path):
    path = tmp_path / "last.pt"
    (tmp_path / "last.pt.tmp").write_text("half of the ol")
    with written_atomically(path, alone=True) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_is_on_the_disk_before_it_has_its_name_and_the_name_before_one_goes_on(tmp_path, monkeypatch):
    events, path = [], tmp_path / "a.json"
    sync, replace = os.fsync, os.replace

    def synced(opened):
        events.append(("sync", Path(f"/proc/self/fd/{opened}").resolve().name))
        sync(opened)

    def replaced(old, new):
        events.append(("rename", new.name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with written_atomically(path, alone=True) as temporary:
        temporary.write_text("new")
    assert events == [("sync", "a.json.tmp"), ("rename", "a.json"), ("sync", tmp_path.name)]


def test_remains_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    for name in ("a.json", "a.json.1", "a.json.tmp", "a.json.0a1b2c3d.tmp", "b.json.0a1b2c3d.tmp"):
        (tmp_path / name).write_text(name)
    remove_temporaries(tmp_path / "a.json")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.json.1", "b.json.0a1b2c3d.tmp"}


def test_a_seal_covers_every_bit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"some bytes")
    assert not is_sealed(path)
    seal(path)
    whole = path.read_bytes()
    assert is_sealed(path) and whole.startswith(b"some bytes") and len(whole) == 10 + 64
    for bit in range(0, 8 * len(whole), 7):
        path.write_bytes(bytes(byte ^ (1 << bit % 8) * (i == bit // 8) for i, byte in enumerate(whole)))
        assert not is_sealed(path)


def test_temporary_files_of_killed_commands_are_removed_once_nobody_can_be_writing_them(tmp_path):
    old, new, other = (tmp_path / name for name in ("a.safetensors.12ab.tmp", ".tmpAbCdEf", "features.safetensors"))
    for file in (old, new, other):
        file.write_text("half")
    for file in (old, other):
        os.utime(file, (1, 1))
    remove_old_temporaries(tmp_path)
    assert sorted(tmp_path.iterdir()) == [new, other]
