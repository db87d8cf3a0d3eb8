"""Files appear whole or not at all, whoever writes them."""

import pytest

from tico_ssl.runtime.files import write_atomically, written_atomically


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


def test_what_a_killed_writer_left_is_written_over_by_one_that_is_alone(tmp_path):
    path = tmp_path / "last.pt"
    (tmp_path / "last.pt.tmp").write_text("half of the ol")
    with written_atomically(path, alone=True) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
