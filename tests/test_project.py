"""The files around the code agree with each other: package data, workflows, container, citation, README."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_file_of_the_package_is_packaged():
    package = ROOT / "src" / "tico_ssl"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["tico_ssl"]
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == packaged


def test_workflows_run_make_targets_that_exist():
    workflows = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    steps = [step for flow in workflows for job in flow["jobs"].values() for step in job["steps"]]
    called = [re.match(r"make (\S+)", step["run"])[1] for step in steps if "run" in step]
    assert "test" in called
    for target in called:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    assert all(flow["permissions"] == {"contents": "read"} for flow in workflows)


def test_files_that_make_names_are_there_and_git_keeps_them():
    named = re.findall(r"tests/[\w/]+\.py", MAKEFILE)
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).is_file()] == []
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not {"dist/", "build/"} & set(ignored)  # which would hide tests/dist, too


def test_issue_forms_ask_for_something():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= form.keys(), path.name
            assert len({part["id"] for part in form["body"]}) == len(form["body"])
            attributes = [part["attributes"] for part in form["body"]]  # an unquoted comma would begin another one
            assert all(one.keys() <= {"label", "description", "placeholder", "render", "value"} for one in attributes)


def test_the_extra_all_has_all_of_them():
    from tico_ssl.runtime.extras import EXTRAS

    (everything,) = PROJECT["project"]["optional-dependencies"]["all"]
    named = set(re.fullmatch(r"tico-ssl\[(.*)\]", everything)[1].split(","))
    assert named == set(EXTRAS)


def test_the_version_is_the_same_everywhere():
    version = PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((\S+)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (citation["version"], citation["date-released"]) == (newest[1], newest[2])
    assert newest[1] == version
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert len(citation["preferred-citation"]["authors"]) == 6


def test_the_container_is_made_of_files_that_are_there():
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists() and f"!{name}" in ignored, name
    for extra in re.search(r'"\.\[(.*)\]"', text)[1].split(","):
        assert extra in PROJECT["project"]["optional-dependencies"]


def test_the_oldest_versions_are_those_the_package_asks_for():
    oldest = dict(re.findall(r"^(\S+)==(\d+\.\d+)", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    asked = dict(re.findall(r"(torch|torchvision)>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"])))
    assert {name: oldest.get(name) for name in asked} == asked


def test_readme_is_short_and_its_pictures_have_addresses_of_their_own():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    pictures = re.findall(r'<img src="([^"]*)"', text) + re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    base = PROJECT["project"]["urls"]["Homepage"].replace("//github.com", "//raw.githubusercontent.com") + "/main/"
    assert pictures
    for address in pictures:
        assert address.startswith(base)
        assert (ROOT / address.removeprefix(base)).is_file(), address
