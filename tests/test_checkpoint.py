"""Nothing lost: training state and backbone are verified, kept, put right on resume, and one command's at a time."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from faults import FAULTS
from test_pretrain import assert_same, interrupt_after, state_of, without_clock
from tico_ssl import pretrain
from tico_ssl.cli import app
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import holds, load_backbone, save_backbone
from tico_ssl.results import run_folder
from tico_ssl.results.run_folder import Run, open_run
from tico_ssl.runtime import distributed
from tico_ssl.runtime.checksums import checksums, damage
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.locks import InUse, alone_in
from tico_ssl.training import checkpoint
from tico_ssl.training.checkpoint import Damaged, Position, StopRequest, kept, read_checkpoint, restore, save_checkpoint
from tiny import TINY

CPU = torch.device("cpu")


def a_model(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def saved(path, steps=(1,), keep=1):
    for step in steps:
        save_checkpoint(path, step, *a_model(step), 0.5, keep)
    return path


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flips(path, count):
    """The contents of a file with one bit flipped each, for a number of bits."""
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), min(count, 8 * len(whole))):
        flip(path, bit)
        yield bit
        path.write_bytes(whole)


# ------------------------------------------------------------------------------------------------- checksums


def test_checksums_follow_every_part_of_nested_values():
    values = {"a": torch.arange(6).view(2, 3), "b": [1, {"c": torch.zeros(0)}, None], 3: (0.1, True)}
    manifest = checksums(values)
    assert set(manifest) == {"a", "b.1.c", "everything but the tensors"}
    assert damage(json.loads(json.dumps({"b": 0})), checksums({"b": 0})) is None
    assert (
        damage({3: [0.1, True], **{key: values[key] for key in "ba"}}, manifest) is None
    )  # order and tuples are alike
    assert damage(values | {"a": values["a"].T.contiguous().T}, manifest) is None  # and so is the layout in memory
    for changed, words in (
        ({"a": values["a"] + 1}, "the checksum of a is wrong"),
        ({"a": values["a"].view(3, 2)}, "the checksum of everything but the tensors is wrong"),
        ({3: (0.1, False)}, "the checksum of everything but the tensors is wrong"),
    ):
        assert damage(values | changed, manifest) == words
    assert damage({"b": values["b"]}, manifest).endswith("(and 1 more)")


@pytest.mark.faults
def test_no_flipped_bit_of_a_checkpoint_is_used(tmp_path):
    path, found = saved(tmp_path / "last.pt"), 0
    for bit in flips(path, 60 * FAULTS):
        with pytest.raises(Damaged) as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value), bit
        found += 1
    print(f"checkpoint: {found} bit flips found, 0 failures")
    assert read_checkpoint(path)["step"] == 1


@pytest.mark.faults
def test_no_flipped_bit_of_a_backbone_is_used(tmp_path):
    backbone, path = build_backbone(BackboneConfig(name="tico/resnet10-w2"), 8), tmp_path / "b.safetensors"
    save_backbone(backbone, path)
    found = 0
    for bit in flips(path, 60 * FAULTS):
        with pytest.raises(UserError) as caught:
            load_backbone(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), bit
        assert not holds(path, backbone)
        found += 1
    print(f"backbone: {found} bit flips found, 0 failures")
    assert holds(path, backbone)


def test_a_backbone_without_checksums_still_loads_and_that_is_said_once(tmp_path, capsys):
    backbone, path = build_backbone(BackboneConfig(name="tico/resnet10-w2"), 8), tmp_path / "b.safetensors"
    save_backbone(backbone, path)
    description = {"config": {"name": "tico/resnet10-w2"}, "image_size": 8, "mean": backbone.mean, "std": backbone.std}
    save_file(load_file(path), path, metadata={"tico_ssl": json.dumps(description)})
    for _ in range(2):
        assert load_backbone(path).width == backbone.width
    assert capsys.readouterr().out.count("without checksums") == 1
    assert holds(path, backbone)


def test_a_backbone_can_be_read_by_those_who_may_read_files(tmp_path):
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w2"), 8), tmp_path / "b.safetensors")
    (tmp_path / "text").write_text("")
    assert (tmp_path / "b.safetensors").stat().st_mode == (tmp_path / "text").stat().st_mode


# ------------------------------------------------------------------------------------------------- what is kept


def test_the_last_checkpoints_are_kept(tmp_path):
    path = saved(tmp_path / "last.pt", range(1, 6), keep=3)
    assert [file.name for file in kept(path)] == ["last.pt", "last.pt.1", "last.pt.2"]
    assert [read_checkpoint(file)["step"] for file in kept(path)] == [5, 4, 3]
    saved(path, [6], keep=2)
    assert [read_checkpoint(file)["step"] for file in kept(path)] == [6, 5]
    saved(path, [7])
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_no_checkpoint_goes_before_the_new_one_is_verified(tmp_path, monkeypatch):
    path = saved(tmp_path / "last.pt", (1, 2), keep=2)

    def torn(file, state):
        torch.save(state, file)
        file.write_bytes(file.read_bytes()[:-500])

    monkeypatch.setattr(checkpoint, "_write", torn)
    with pytest.raises(OSError, match=r"last\.pt: what was written reads back wrong \(.*; is the disk damaged\?"):
        saved(path, [3], keep=2)
    assert [read_checkpoint(file)["step"] for file in kept(path)] == [2, 1]
    assert {file.name for file in tmp_path.iterdir()} == {"last.pt", "last.pt.1"}


def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr("tico_ssl.runtime.files.secrets.token_hex", lambda count: "full")
    (tmp_path / "last.pt.full.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        saved(tmp_path / "last.pt")
    assert list(tmp_path.iterdir()) == []


def test_several_writers_do_not_mix(tmp_path):
    path, models = tmp_path / "last.pt", [a_model(step) for step in range(16)]
    save_checkpoint(path, 0, *models[0], 0.5)
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(save_checkpoint, path, step, *model, 0.5) for step, model in enumerate(models)]
        while not all(writer.done() for writer in writers):
            state = read_checkpoint(path)
            assert_same(dict(state["method"]), dict(models[state["step"]][0].state_dict()))
    assert [writer.result() for writer in writers] == [None] * 16
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("damage", [lambda path: flip(path, 8 * 3000), lambda path: path.write_bytes(b"no checkpoint")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    path, told = saved(tmp_path / "last.pt", (1, 2, 3), keep=3), []
    damage(path)
    model, optimizer = a_model(9)
    assert restore(path, model, optimizer, CPU, told.append) == Position(2, 0.5)
    assert_same(dict(model.state_dict()), dict(a_model(2)[0].state_dict()))
    (line,) = told
    assert line.startswith(f"warning: {path} is damaged (") and line.endswith("checkpoint is used, after step 2")
    saved(path, [4], keep=3)
    assert [read_checkpoint(file)["step"] for file in kept(path)] == [4, 2, 1]  # the damaged one is not among them
    for file in kept(path):
        damage(file)
    with pytest.raises(UserError, match=r"last\.pt: cannot be resumed from .*there is no other checkpoint") as caught:
        restore(path, model, optimizer, CPU)
    assert "\n" not in str(caught.value)


def test_an_error_that_is_not_the_files_is_no_damage(tmp_path, monkeypatch):
    path = saved(tmp_path / "last.pt", (1, 2), keep=2)

    def exhausted(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", exhausted)
    with pytest.raises(MemoryError):
        restore(path, *a_model(), CPU)
    assert [file.name for file in kept(path)] == ["last.pt", "last.pt.1"]


def test_a_kill_between_two_renames_leaves_a_gap_that_does_not_matter(tmp_path):
    path = saved(tmp_path / "last.pt", (1, 2), keep=2)
    path.rename(tmp_path / "last.pt.1")
    assert restore(path, *a_model(), CPU).step == 2
    saved(path, [3], keep=2)
    assert [read_checkpoint(file)["step"] for file in kept(path)] == [3, 2]


def test_a_checkpoint_of_another_version_is_taken_or_names_its_version(tmp_path, capsys):
    path = saved(tmp_path / "last.pt")
    state = torch.load(path, weights_only=True)
    early = {key: state[key] for key in ("step", "seconds", "method", "optimizer")}
    torch.save(early, path)
    assert restore(path, *a_model(), CPU).step == 1
    assert "without checksums" in capsys.readouterr().out

    later = read_checkpoint(saved(path)) | {"format": 99, "version": "9.9"}
    checkpoint._write(path, later | {"checksums": checksums(later)})
    with pytest.raises(UserError, match=r"was written by tico-ssl 9\.9; this is .*, which is too old"):
        restore(path, *a_model(), CPU)

    other = read_checkpoint(saved(path)) | {"version": "0.0.3"}
    other["method"]["1.more"] = torch.zeros(1)
    checkpoint._write(path, other | {"checksums": checksums(other)})
    with pytest.raises(UserError, match=r"cannot be resumed from: it was written by tico-ssl 0\.0\.3") as caught:
        restore(path, *a_model(), CPU)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    settings = TINY | {"training.checkpoint_seconds": 0.0}
    return settings, pretrain("demo", out=tmp_path_factory.mktemp("whole") / "run", overrides=settings)


@pytest.fixture
def copied(whole, tmp_path):
    settings, run = whole
    shutil.copytree(run.folder, tmp_path / "run")
    return settings, Run(tmp_path / "run")


def assert_like(run, whole):
    one, other = state_of(run), state_of(whole)
    one.pop("seconds"), other.pop("seconds")
    assert_same(one, other)
    assert without_clock(run.metrics()) == without_clock(whole.metrics())
    assert run.backbone_file.read_bytes() == whole.backbone_file.read_bytes()


def earlier(file):
    backbone = load_backbone(file)
    with torch.no_grad():
        backbone.network.conv1.weight += 1e-3
    save_backbone(backbone, file)


@pytest.mark.parametrize("harm", [Path.unlink, earlier, lambda file: flip(file, 8 * 9000)])
def test_the_backbone_is_that_of_the_checkpoint(copied, whole, harm, capsys):
    """A complete run too: it may have been killed within its last save."""
    settings, run = copied
    harm(run.backbone_file)
    pretrain("demo", out=run.folder, overrides=settings, resume=True)
    assert "is not that of the checkpoint: it is written again" in capsys.readouterr().out
    assert_like(run, whole[1])
    pretrain("demo", out=run.folder, overrides=settings, resume=True)
    assert "written again" not in capsys.readouterr().out


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(copied, whole, capsys):
    settings, run = copied
    flip(run.checkpoint_file, 4 * run.checkpoint_file.stat().st_size)
    pretrain("demo", out=run.folder, overrides=settings, resume=True)
    said = capsys.readouterr().out
    assert f"warning: {run.checkpoint_file} is damaged (the checksum of" in said
    assert "continuing after step 6 of 9" in said
    assert "is damaged" in (run.folder / "train.log").read_text()
    assert_like(run, whole[1])


@pytest.mark.faults
def test_killed_at_any_moment_and_inside_any_write_a_run_ends_to_the_same_bits(tmp_path):
    script = Path(__file__).with_name("kills.py")
    command = [sys.executable, str(script), str(tmp_path), str(3 * FAULTS), str(FAULTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count = json.loads(done.stdout.splitlines()[-1])
    points = ", ".join(f"{number} of {command}" for command, number in count["points"].items())
    print(f"{count['kills']} kills survived ({count['tried']} points of {points}), failures {count['failures']}")
    assert count["failures"] == [], done.stderr
    assert count["kills"] >= 3


@pytest.mark.parametrize("left", [(), ("environment.json",), ("environment.json", "recipe.yaml.0a1b2c3d.tmp", "lock")])
@pytest.mark.parametrize("way", [{}, {"resume": True}, {"overwrite": True}])
def test_a_start_that_died_early_does_not_block_its_folder(tmp_path, tiny, monkeypatch, left, way):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in left:
        (tmp_path / "run" / name).write_text("{")
    monkeypatch.setattr("tico_ssl.training.pretrain._train", lambda *_: None)
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny, **way)
    assert run.recipe().training.epochs == 3
    assert not list(run.folder.glob("*.tmp"))


def test_a_replacement_that_died_leaves_a_run_that_goes_on(copied, whole, monkeypatch):
    settings, run = copied

    def die(path):
        raise InterruptedError

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(InterruptedError):
        run_folder._clear(run)
    monkeypatch.undo()
    assert run.recipe_file.is_file()
    pretrain("demo", out=run.folder, overrides=settings, resume=True)
    assert_like(run, whole[1])


def test_every_difference_of_a_recipe_is_named_unless_it_does_not_matter(copied):
    settings, run = copied
    changed = settings | {"training.seed": 5, "optimizer.lr": 0.123}
    with pytest.raises(
        UserError, match=r"optimizer\.lr was .*, is 0\.123; training\.seed was 0, is 5; `tico pretrain "
    ):
        pretrain("demo", out=run.folder, overrides=changed, resume=True)
    free = {"description": "x", "training.keep_checkpoints": 4, "training.checkpoint_seconds": 7, "training.workers": 1}
    pretrain("demo", out=run.folder, overrides=settings | free, resume=True)


# ------------------------------------------------------------------------------------------------- one at a time

HOLD = """
import sys, time
from pathlib import Path
from tico_ssl.runtime.locks import alone_in
with alone_in(Path(sys.argv[1]), "no"):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_second_command_in_a_run_folder_is_refused_and_a_dead_one_is_not_in_the_way(copied):
    settings, run = copied
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run.folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        for way in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=rf"in use by another command: .* \(process {holder.pid} on ") as caught:
                pretrain("demo", out=run.folder, overrides=settings, **way)
            assert "\n" not in str(caught.value)
    finally:
        holder.kill()
        holder.wait()
    pretrain("demo", out=run.folder, overrides=settings, resume=True)


def test_a_lock_keeps_out_its_own_process_too_and_is_not_inherited(tmp_path):
    with alone_in(tmp_path / "new", "taken"):
        with pytest.raises(InUse, match=rf"^taken \(process {os.getpid()}\)$"), alone_in(tmp_path / "new", "taken"):
            pass
        pid = os.fork()
        if pid == 0:  # a worker that outlives its process
            time.sleep(60)
            os._exit(0)
    try:
        with alone_in(tmp_path / "new", "taken"):
            pass
        other = subprocess.run(
            [sys.executable, "-c", HOLD.replace("100", "0"), str(tmp_path / "new")], capture_output=True, text=True
        )
        assert other.stdout == "held\n"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_with_a_checkpoint_a_word_and_its_own_exit_code(
    tmp_path, tiny, monkeypatch, number, code, capsys
):
    interrupt_after(monkeypatch, 2, number)
    words = [f"{key}={value}" for key, value in tiny.items()]
    outcome = CliRunner().invoke(app, ["pretrain", "demo", *words, "--out", str(tmp_path / "run")])
    assert outcome.exit_code == code
    assert "stopped after step 2 of 9; continue with --resume" in outcome.output + capsys.readouterr().out
    assert state_of(open_run(tmp_path / "run"))["step"] == 2


def test_processes_agree_on_a_signal_within_seconds_and_at_one_step(monkeypatch):
    """Two processes, one of which is slow and gets the signal; log steps play no part."""
    clock = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(distributed, "active", lambda: True)
    ours, theirs = StopRequest(), StopRequest()
    asked = []

    def together(numbers):
        asked.append((made, numbers))
        return [max(numbers[0], theirs.number), 0.5]

    monkeypatch.setattr(distributed, "all_max", together)
    for made in range(1, 100):
        clock[0] += 0.1
        if made == 20:
            theirs.number = signal.SIGTERM
        if ours.agreed(made):
            break
    assert made - 20 <= 4  # two seconds of half a second each
    assert ours.number == signal.SIGTERM
    assert [step for step, _ in asked] == [1, 5, 9, 13, 17, 21]
    assert asked[1][1] == [0.0, pytest.approx(0.1)]
