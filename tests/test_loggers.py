"""Loggers beside metrics.jsonl: the same numbers, once each, and none of them stops a training."""

import json
import struct
import threading
import warnings
from typing import ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tico_ssl import pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.results.run_folder import Run, flattened
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.training.checkpoint import Position
from tico_ssl.training.events import Events
from tico_ssl.training.logger import Tracker
from tico_ssl.training.monitor import LOGGERS, Monitor
from tico_ssl.training.stop import NotFinite
from tico_ssl.training.trackers import LONGEST_VALUE, _parameter
from tiny import TINY


@pytest.fixture
def settings(tiny) -> dict:
    return tiny | {"data.limit": 64, "training.checkpoint_seconds": 0}


def interrupted_after(monkeypatch, epoch):
    """Ask a training to stop at the end of an epoch, then let it go on as usual."""
    before = Monitor.epoch_ended

    def ended(self, step, number, epochs, bad_files=0):
        before(self, step, number, epochs, bad_files)
        if number == epoch:
            raise Interrupted("stopped")

    monkeypatch.setattr(Monitor, "epoch_ended", ended)


# ---------------------------------------------------------------------------------------------------- wandb and MLflow


def stored_messages(file):
    """The messages of a file of Weights & Biases, whose format is that of LevelDB's log: blocks of 32 KiB, in which
    every piece has a checksum, its length and its kind (whole, first, middle, last)."""
    data, at, message = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if -at % 32768 < 7 and at % 32768:
            at += -at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


def offline_records(folder):
    """The history of every offline run in a folder, from the first run to the last, and their exit codes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows, codes = [], []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
        for message in stored_messages(file):
            record = pb.Record.FromString(message)
            if record.HasField("history"):
                items = record.history.item
                rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
    return rows, codes


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run that is interrupted in its second epoch, after steps were logged that have no checkpoint, and resumed with
    one logger more; and MLflow's status of it in between."""
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("tracked")
    run, settings = folder / "experiments" / "mine", TINY | {"data.limit": 64, "training.checkpoint_seconds": 0}
    environment = {
        "MLFLOW_TRACKING_URI": (folder / "store").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
    }
    with pytest.MonkeyPatch.context() as patches, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        for name, value in environment.items():
            patches.setenv(name, value)
        with patches.context() as more:
            interrupted_after(more, 2)
            with pytest.raises(Interrupted):
                pretrain("demo", out=run, overrides=settings | {"training.loggers": ["wandb", "mlflow"]})
        client, written = mlflow.MlflowClient(), list(run.glob("events*"))
        (first,) = client.search_runs([client.get_experiment_by_name("experiments").experiment_id])
        names = ["tensorboard", "wandb", "mlflow"]
        pretrain("demo", out=run, overrides=settings | {"training.loggers": names}, resume=True)
        yield Run(run), client, first, written


def test_mlflow_has_every_number_once_also_after_a_resume(tracked):
    run, client, first, _ = tracked
    assert (first.info.status, first.info.run_name) == ("KILLED", "mine")
    (found,) = client.search_runs([first.info.experiment_id])
    assert (found.info.run_id, found.info.status) == (first.info.run_id, "FINISHED")
    for name in ("loss", "lr", "epoch"):
        points = client.get_metric_history(found.info.run_id, name)
        assert {point.step: point.value for point in points} == {line["step"]: line[name] for line in run.metrics()}
        assert len(points) == 6
    settings = flattened(run.recipe().model_dump(mode="json"))
    assert found.data.params == {key: str(value) for key, value in settings.items()}
    assert [artifact.path for artifact in client.list_artifacts(found.info.run_id)] == ["views.png"]


def test_wandb_has_every_number_once_also_after_a_resume(tracked):
    run, folder = tracked[0], tracked[0].folder.parents[1]
    identity = json.loads((run.folder / "wandb.json").read_text())["id"]
    files = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    rows, codes = offline_records(folder)
    assert codes == [1, 0]
    logged = [(row["_step"], row["loss"]) for row in rows if "loss" in row]
    assert logged == [(line["step"], line["loss"]) for line in run.metrics()]
    assert "image-file" in [row.get("views._type") for row in rows]


def test_loggers_may_change_when_a_run_goes_on(tracked):
    run, _, _, before = tracked
    assert not before and list(run.folder.glob("events*"))


# ---------------------------------------------------------------------------------------------------- any logger


class Broken(Tracker):
    title, library = "the records of a library", "broken"

    def _begin(self, identity):
        return "1"

    def _send(self, step, values):
        raise RuntimeError("no route to host\nand many more lines")

    def _show(self, name, picture): ...

    def _close(self, ending):
        raise AssertionError("it has ended")


class Noting(Broken):
    endings: ClassVar[list[str]] = []

    def _close(self, ending):
        self.endings.append(ending)


@pytest.mark.parametrize(
    ("error", "ending"), [(NotFinite("NaN"), "failed"), (RuntimeError(), "failed"), (Interrupted(), "stopped")]
)
def test_loggers_are_told_how_a_training_ended(tmp_path, monkeypatch, error, ending):
    monkeypatch.setitem(LOGGERS, "wandb", Noting)
    with pytest.raises(type(error)), Monitor(Run(tmp_path), 9, 32, Position(0), ["wandb"]):
        raise error
    assert Noting.endings.pop() == ending


class NeverBegun(Broken):
    title = "the records of another"

    def _begin(self, identity):
        raise ConnectionError("not logged in")


def test_a_failing_logger_is_a_line_and_training_goes_on(tmp_path, settings, monkeypatch, capsys):
    monkeypatch.setitem(LOGGERS, "wandb", Broken)
    monkeypatch.setitem(LOGGERS, "mlflow", NeverBegun)
    monkeypatch.setattr("tico_ssl.training.start.require_loggers", lambda names: None)
    names = ["wandb", "mlflow", "wandb"]
    hook = threading.excepthook
    run = pretrain("demo", out=tmp_path / "run", overrides=settings | {"training.loggers": names})
    out = capsys.readouterr().out
    assert out.count("warning: the records of a library end here: no route to host\n") == 1
    assert out.count("warning: the records of another end here: not logged in\n") == 1
    assert (run.folder / "train.log").read_text().count("no route to host") == 1
    assert len(run.metrics()) == 6 and threading.excepthook is hook


def test_a_resumed_run_keeps_the_events_up_to_its_checkpoint(tmp_path):
    """Those of the checkpoint's own step were written before it; those behind it are written again."""
    for start, steps in ((0, (2, 4, 6)), (4, (6, 8))):
        events = Events(Run(tmp_path), start)
        for step in steps:
            events.add({"step": step, "loss": start + step})
        events.close("stopped")
    found = EventAccumulator(str(tmp_path), purge_orphaned_data=True).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [(2, 2), (4, 4), (6, 10), (8, 12)]


def test_events_that_fail_leave_no_hook_behind(tmp_path, monkeypatch, capsys):
    hook = threading.excepthook
    events = Events(Run(tmp_path), 0)
    monkeypatch.setattr(events._writer, "add_scalar", lambda *_: 1 / 0)
    events.add({"step": 1, "loss": 1.0})
    events.add({"step": 2, "loss": 1.0})
    events.close("failed")
    assert threading.excepthook is hook
    assert not [thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboard.")]
    assert capsys.readouterr().out.count("TensorBoard's events end here") == 1


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"'training\.loggers\.0' must be 'tensorboard', 'wandb' or 'mlflow'"):
        load_recipe("demo", {"training.loggers": ["tensorbored"]})
    (tmp_path / "wandb").mkdir()  # as wandb itself leaves one
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tico_ssl.training.logger.installed", lambda name: False)
    with pytest.raises(UserError, match=r"^training\.loggers: wandb .*pip install .*\[wandb\]'$"):
        pretrain("demo", out=tmp_path / "run", overrides={"training.loggers": ["wandb"]})
    assert not (tmp_path / "run").exists()


def test_long_parameters_are_cut():
    pytest.importorskip("mlflow")
    assert len(_parameter("description", "long " * 400).value) == LONGEST_VALUE
