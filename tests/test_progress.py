"""What a user sees of the progress: on a narrow terminal, in a file, and how long it will take."""

import io
import time

import pytest
from rich.console import Console

from tico_ssl import pretrain
from tico_ssl.runtime import progress
from tico_ssl.training import forecast
from tico_ssl.training.display import Display
from tico_ssl.training.forecast import Forecast
from tico_ssl.training.step import Step

STATUS = "loss 1.234  invariance 0.123  contrast 0.456  dimensions 42  1,234 images/s  63% of it waiting for images"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_keeps_steps_and_time_left_at_any_width(width, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, width=width, force_terminal=True, color_system=None))
    display, now = Display("pretraining", 390_600, 0), 0.0
    display._bar.get_time = lambda: now
    display.status(STATUS)
    for now in (0.0, 10.0, 20.0):
        display.advance(int(100 * now))
    progress.console.print(display._bar.get_renderable())
    (line,) = screen.getvalue().splitlines()
    assert len(line) <= width
    assert "pretraining" in line
    assert "2000/390600" in line
    assert "1:04:46" in line  # 388,600 steps at 100 a second
    assert ("loss 1.234" in line) == (width > 60)
    assert (STATUS in line) == (width == 200)


def test_a_forecast_comes_once_and_again_only_if_it_is_another_one():
    now = 0.0
    expected = Forecast(1000, [0, 100], clock=lambda: now)
    said = {}
    for done in range(1, 1001):
        now += 30.0 if done == 1 else 1.0 if done <= 100 else 0.1  # the first step prepares, the first epoch decodes
        if (seconds := expected.left(done)) is not None:
            said[done] = seconds
    assert list(said.values()) == pytest.approx([1000 - 4, 0.1 * (1000 - 131)], rel=0.01)
    steady = Forecast(1000, [0, 100], clock=lambda: now)
    counted = 0
    for done in range(1, 1001):
        now += 1.0
        counted += steady.left(done) is not None
    assert counted == 1


def test_a_slow_start_is_corrected_also_within_the_last_moment():
    """As where worker processes start beside the first steps, or a run goes on in the middle of an epoch."""
    now, said = 0.0, {}
    expected = Forecast(1000, [17], clock=lambda: now)
    for done in range(18, 1001):
        now += 3.0 if done < 25 else 0.1
        if (seconds := expected.left(done)) is not None:
            said[done] = seconds
    assert list(said.values()) == pytest.approx([3.0 * (1000 - 19), 0.1 * (1000 - 68)], rel=0.01)


def test_a_training_that_has_ended_needs_no_forecast():
    now = 0.0
    expected = Forecast(2, [0], clock=lambda: now)
    for done in (1, 2):
        now += 60.0
        assert expected.left(done) is None


def test_training_says_in_its_log_how_long_it_will_take(tmp_path, tiny, monkeypatch, capsys):
    usual = Step.__call__

    def slow(self, *given):
        time.sleep(0.02)
        return usual(self, *given)

    monkeypatch.setattr(Step, "__call__", slow)
    monkeypatch.setattr(forecast, "TIMED", 0.2)
    monkeypatch.setattr("tico_ssl.training.pretrain.duration", lambda seconds: f"{seconds:.3f} s")
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny | {"training.epochs": 10})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" at the present speed")]
    assert line in (run.folder / "train.log").read_text()
    assert " for 10 epochs at" in line or " of 10 epochs at" in line
    seconds = [entry["seconds"] for entry in run.metrics()]
    assert 1 / 3 < float(line.split()[1]) / (seconds[-1] - seconds[5]) < 3  # this machine may have other things to do


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert list(progress.track(range(4), 4, "embedding", "images")) == [0, 1, 2, 3]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"embedding: {done} of 4 images" for done in (1, 2, 3)]
    assert all("images/s" in line and line.endswith(" left") for line in lines)
