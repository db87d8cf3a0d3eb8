"""Optional libraries: the command that installs an extra is one that works where the package came from."""

import json
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tico_ssl.runtime import extras

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, "pip install 'tico-ssl[onnx]'"),
        ({"url": "https://x.org/tico_ssl-1.whl", "archive_info": {}}, "pip install 'tico-ssl[onnx]'"),
        ({"url": "file:///my/clone", "dir_info": {"editable": True}}, "pip install -e '/my/clone[onnx]'"),
        ({"url": "file:///my%20own/clone", "dir_info": {}}, "pip install '/my own/clone[onnx]'"),
        ({"url": "HERE", "dir_info": {"editable": True}}, "pip install -e '.[onnx]'"),
        (
            {"url": "https://x.org/tico", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'tico-ssl[onnx] @ git+https://x.org/tico'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(record, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = None if record is None else json.dumps(record).replace("HERE", tmp_path.as_uri())
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert extras.install_command("onnx") == expected


def test_a_clone_that_was_never_installed_is_installed_with_its_extra(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metadata, "distribution", missing)
    assert extras.install_command("tiff") == f"pip install -e '{PROJECT.parent}[tiff]'"


def test_every_extra_of_the_project_is_named_with_its_purpose():
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras.EXTRAS.keys() == declared.keys() - {"all", "dev", "docs"}
    for name, extra in extras.EXTRAS.items():
        assert extra.purpose
        assert len(extra.modules) == len(declared[name])


def test_a_folder_of_that_name_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not extras.installed("of_nobody")
    assert not extras.installed("nowhere_at_all")
    assert extras.installed("numpy")
