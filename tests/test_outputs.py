"""What commands write: whole or not at all, with the permissions of the umask, and said if it was not written."""

import ast
import csv
import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tico_ssl
from faults import FAULTS
from tico_ssl import embed, evaluate
from tico_ssl.classifying.tables import require_table
from tico_ssl.classifying.tables import write_table as write_predictions
from tico_ssl.cli import main
from tico_ssl.data.source import Source
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._unread import Unread
from tico_ssl.exporting._snippets import write_state_dict
from tico_ssl.features import cache
from tico_ssl.features.album import Album, Part
from tico_ssl.features.extraction import Extracted
from tico_ssl.features.tables import Table, write_table
from tico_ssl.networks.storage import load_backbone
from tico_ssl.results.formats import as_csv, safe_cell
from tico_ssl.results.run_folder import Run
from tico_ssl.results.table import Cell, Sheet
from tico_ssl.runtime.errors import UserError, memory_advice, one_line
from tico_ssl.runtime.json_lines import append_json_line, parsed_lines, read_json_lines, sealed, write_json_lines
from tico_ssl.runtime.printing import printable


def permissions() -> int:
    """Of a new file."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def tico(capsys, *words) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    before, sys.argv = sys.argv, ["tico", *map(str, words)]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    return code, *capsys.readouterr()


# ------------------------------------------------------------------------------------------------- lines of JSON


def test_a_line_after_one_that_was_cut_off_is_its_own(tmp_path):
    file = tmp_path / "results.jsonl"
    append_json_line(file, {"a": 1})
    with file.open("a") as opened:
        opened.write('{"b": ')
    assert parsed_lines(file) == [{"a": 1}]
    append_json_line(file, {"c": 3}, durable=True)
    assert parsed_lines(file) == [{"a": 1}, None, {"c": 3}]
    assert read_json_lines(file) == [{"a": 1}, {"c": 3}]


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, full_disk):
    file = tmp_path / "results.jsonl"
    append_json_line(file, {"a": 1})
    before = file.read_bytes()
    for room in range(len(before), len(before) + 20):
        with full_disk(room), pytest.raises(OSError):
            append_json_line(file, {"text": "of a line that is longer"})
        assert file.read_bytes() == before


def test_lines_of_several_commands_are_all_kept(tmp_path):
    script = (
        "import sys; from pathlib import Path; from tico_ssl.runtime.json_lines import append_json_line\n"
        "for number in range(200):\n"
        "    line = {'by': sys.argv[2], 'number': number, 'text': 'x' * (number * 50)}\n"
        "    append_json_line(Path(sys.argv[1]), line, durable=number % 50 == 0)"
    )
    file = tmp_path / "results.jsonl"
    commands = [subprocess.Popen([sys.executable, "-c", script, str(file), str(by)]) for by in range(3)]
    assert [command.wait() for command in commands] == [0, 0, 0]
    found = [(line["by"], line["number"]) for line in read_json_lines(file)]
    assert sorted(found) == sorted((str(by), number) for by in range(3) for number in range(200))


def test_lines_that_are_no_objects_are_left_out(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'\xff\n[1]\nnull\n{"a": 1}\n' + b"[" * 100_000 + b'\n{"b": 2}')
    assert read_json_lines(file) == [{"a": 1}, {"b": 2}]


# ------------------------------------------------------------------------------------------------------- results


def test_a_result_after_a_cut_line_is_kept(run, capsys):
    results = Run(run.folder).results_file
    results.write_text('{"protocol": "knn", "numb')
    code, out, _ = tico(capsys, "evaluate", run.folder, "rankme")
    assert code == 0 and f"results    {results}" in out
    assert [line["protocol"] for line in Run(run.folder).results()] == ["rankme"]
    results.unlink()


def test_a_result_that_is_not_saved_is_shown_and_is_an_error(run, capsys, full_disk):
    evaluate(run.folder, "rankme")  # whose features are cached now
    before = Run(run.folder).results_file.read_bytes()
    with full_disk():
        code, out, error = tico(capsys, "evaluate", run.folder, "rankme")
    assert code == 2
    assert "rankme" in out and "results    " not in out
    results = Run(run.folder).results_file
    assert error == f"error: {results}: the result of rankme was not saved (File too large)\n"
    assert results.read_bytes() == before
    with full_disk():
        assert evaluate(run.folder, "rankme").protocol == "rankme"  # in Python it is returned
    assert "warning: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- outputs

OUTPUTS = {
    "features.npz": ("embed", "RUN", "--out", "OUT"),
    "features.csv": ("embed", "RUN", "--out", "OUT"),
    "features.parquet": ("embed", "RUN", "--out", "OUT"),
    "features.pt": ("embed", "RUN", "--out", "OUT"),
    "table.csv": ("compare", "RUN", "--out", "OUT"),
    "preview.png": ("data", "preview", "IMAGES", "--out", "OUT", "--count", "4"),
    "bad.jsonl": ("data", "check", "IMAGES", "--out", "OUT"),
    "figures/loss.svg": ("report", "RUN", "--points", "0", "--out", "FOLDER"),
}


def words_of(name, run, images, folder) -> list[str]:
    places = {"RUN": run.folder, "OUT": folder / name, "IMAGES": images, "FOLDER": folder}
    return [str(places.get(word, word)) for word in OUTPUTS[name]]


@pytest.fixture
def images(folder_of_images):
    (folder_of_images / "cats" / "broken.png").write_text("not an image")
    return folder_of_images


@pytest.mark.parametrize("name", OUTPUTS)
def test_on_a_full_disk_a_file_stays_what_it_was(run, images, tmp_path, capsys, name, full_disk):
    folder = tmp_path / "out"
    (file := folder / name).parent.mkdir(parents=True)
    file.write_text("earlier")
    with full_disk(16):
        code, out, error = tico(capsys, *words_of(name, run, images, folder))
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert "wrote" not in out
    assert str(folder) in error
    assert [path for path in folder.rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "earlier"


def test_what_a_killed_command_was_writing_is_overwritten(tmp_path, monkeypatch):
    file = tmp_path / "predictions.csv"

    def rows():
        yield [["a.jpg", "cat", 0.5]]
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # a kill tidies up nothing
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(file, 1, rows())
    monkeypatch.undo()
    assert len([*tmp_path.iterdir()]) == 1
    write_predictions(file, 1, [[["a.jpg", "cat", 0.5]]])
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_in_place_of_a_table_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "a.csv").mkdir()
    for refuse in (lambda out: embed("nowhere", out=out), require_table):
        with pytest.raises(UserError, match="not a regular file"):
            refuse(tmp_path / "a.csv")


def test_both_files_of_npy_features_overwrite_what_a_killed_command_left(tmp_path):
    album = Album((Part("train", Source("images", 2, torch.zeros, names=str)),))
    names = ["features.npy", "features.npy.csv"]
    for name in names:
        (tmp_path / f"{name}.tmp").write_text("cut off")
    write_table(Table(album, torch.arange(2), torch.zeros(2, 3)), tmp_path / "features.npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("name", OUTPUTS)
def test_files_have_the_permissions_of_the_umask(run, images, tmp_path, capsys, name):
    before = os.umask(0o027)
    try:
        code, _, error = tico(capsys, *words_of(name, run, images, tmp_path / "out"))
    finally:
        os.umask(before)
    assert code in (0, 1), error
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {0o640}


def test_a_run_and_its_caches_have_the_permissions_of_the_umask(run):
    evaluate(run.folder, "knn")
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {"backbone.safetensors", "last.pt", "recipe.yaml"} <= {path.name for path in files}
    assert any(path.parent.name == "features" for path in files)
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {oct(permissions())}


def test_an_export_is_written_whole_or_not_at_all(run, tmp_path, full_disk):
    backbone, file = load_backbone(run.folder), tmp_path / "backbone.pth"
    with full_disk(1000), pytest.raises(RuntimeError) as caught:
        write_state_dict(backbone, file)
    assert one_line(caught.value) == "File too large"
    assert list(tmp_path.iterdir()) == []
    write_state_dict(backbone, file)
    assert oct(stat.S_IMODE(file.stat().st_mode)) == oct(permissions())
    backbone.network.load_state_dict(torch.load(file, weights_only=True))


def test_a_full_disk_costs_the_cache_not_the_features(tmp_path, capsys, full_disk):
    made = Extracted(torch.rand(30, 4), torch.arange(30))
    with full_disk(100):
        cache._write(tmp_path / "a.safetensors", made)
    assert "features are not cached: File too large" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_flipped_bits_in_cached_features_are_found(tmp_path, capsys):
    file = tmp_path / "a.safetensors"
    made = Extracted(torch.rand(6, 4), torch.arange(6))
    cache._write(file, made)
    content, draw = file.read_bytes(), random.Random(0)
    places = draw.sample(range(8 * len(content)), min(8 * len(content), 400 * FAULTS))
    found = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        kept = cache._read(file)
        # A bit that says nothing about the features, such as one of a space, may be any.
        assert kept is None or all(torch.equal(a, b) for a, b in zip(kept, made))
        found += kept is None
    assert found > 0.9 * len(places)
    assert "damaged, so its features are extracted again" in capsys.readouterr().out
    print(f"bit flips in cached features: {found} of {len(places)} found, of the others none changes a feature")


def test_flipped_bits_in_the_state_of_a_long_protocol_are_found(tmp_path):
    file, numbers = tmp_path / "trained.json", {"top1": 61.25, "top1_std": 0.5}
    write_json_lines(file, [sealed({"result": numbers, "unread": {"test": {"a.png": "empty file"}}})])
    content, context = file.read_bytes(), SimpleNamespace(unread=Unread())
    assert Context._finished(context, file) == numbers
    assert context.unread.counts == {"test": 1}
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        assert Context._finished(context, file) in (None, numbers)
    assert context.unread.counts == {"test": 1}
    file.unlink()
    assert Context._finished(context, file) is None


# ----------------------------------------------------------------------------------------------------- CSV cells

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "'quoted", "plain", "1-2"]


def read_back(text: str) -> str:
    return text[1:] if text.startswith("'") else text


def test_cells_that_look_like_formulas_are_written_as_text(tmp_path):
    file = tmp_path / "features.csv"
    count, labels = len(FORMULAS), torch.tensor([[1, -1]] * len(FORMULAS))
    source = Source("images", count, torch.zeros, labels=labels, classes=("=a", "b"), names=FORMULAS.__getitem__)
    album = Album((Part("train", source),))
    write_table(Table(album, torch.arange(count), torch.full((count, 1), -0.5)), file)
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["path"][0] for row in rows] == ["'"] * 4 + ["\\", "'", "p", "1"]
    assert [read_back(row["path"]) for row in rows] == [printable(text) for text in FORMULAS]
    assert {row["feature_0"] for row in rows} == {"-0.5"}  # numbers are numbers
    sheet = Sheet(["run", "=gain"], [[Cell(text), Cell("-1.5", -1.5)] for text in FORMULAS], [])
    lines = list(csv.reader(as_csv(sheet).splitlines()))
    assert lines[0] == ["run", "'=gain"]
    assert [read_back(line[0]) for line in lines[1:]] == [text.replace("\n", " ") for text in FORMULAS]
    assert {line[1] for line in lines[1:]} == {"-1.5"}
    assert safe_cell("") == ""


# ------------------------------------------------------------------------------------------- errors of the machine


def test_what_the_machine_refuses_is_one_line(tmp_path, full_disk):
    from safetensors.torch import save_file

    big = {"a": torch.zeros(100_000)}
    with full_disk(1000):
        for write in (
            lambda: save_file(big, tmp_path / "a"),
            lambda: torch.save(big, tmp_path / "b"),
            lambda: (tmp_path / "c").write_bytes(bytes(2000)),
        ):
            with pytest.raises(Exception) as caught:
                write()
            assert (line := one_line(caught.value)) and "\n" not in line
    assert (
        one_line(OSError(28, "No space left on device", "a.csv")) == "a.csv: No space left on device; free some space"
    )
    assert one_line(RuntimeError("shapes do not match")) is None
    assert one_line(KeyError("a")) is None


def test_exhausted_memory_is_said_with_advice():
    with pytest.raises(UserError, match=r"^out of memory: lower it$"), memory_advice("lower it"):
        torch.empty(10**15)
    with pytest.raises(UserError, match=r"^out of GPU memory: lower it"), memory_advice("lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match=r"^another$"), memory_advice("lower it"):
        raise RuntimeError("another")


def test_an_output_that_takes_no_more_is_said(capsys):
    command = [sys.executable, "-m", "tico_ssl", "list", "recipes"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device; free some space\n")


def test_no_command_goes_through_a_shell():
    for file in Path(tico_ssl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert "shell" not in [keyword.arg for keyword in node.keywords], file
                assert ast.unparse(node.func) not in ("os.system", "os.popen", "subprocess.getoutput"), file
