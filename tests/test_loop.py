"""The loop that every training shares, with steps that compute next to nothing."""

import math
import os
import signal
import time

import pytest
import torch

from tico_ssl.methods._base import StepOutput
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.training.checkpoint import Position, restore, save_checkpoint
from tico_ssl.training.clock import Clock
from tico_ssl.training.display import Display
from tico_ssl.training.journal import Journal, check_finite, mean_values
from tico_ssl.training.loop import Course, Hooks, train
from tico_ssl.training.step import Outcome
from tico_ssl.training.stop import NotFinite


def numbers(start, stop):
    yield from range(start, stop)


def outcome(loss=1.0):
    return Outcome(StepOutput(torch.tensor(loss)))


class Course10:
    """Ten steps that are written down: every third is logged, every fourth saved."""

    def __init__(self, start=0, at_step=lambda step: None, loss=lambda step: 1.0):
        self.start, self.at_step, self.loss = start, at_step, loss
        self.events, self.drawn, self.told = [], [], []
        self.check = None

    def make_step(self, step, batch):
        assert step == batch
        self.drawn.append(torch.rand(1).item())
        self.at_step(step)
        return outcome(self.loss(step))

    def run(self):
        hooks = Hooks(
            self.make_step,
            lambda done: done % 3 == 0,
            lambda done, _: self.events.append(("log", done)),
            lambda done: done % 4 == 0 or done == 10,
            lambda done: self.events.append(("save", done)),
            between=lambda done: self.events.append(("between", done)) if done % 6 == 0 else None,
            tell=lambda done, reasons: self.told.append((done, reasons)),
            **({} if self.check is None else {"check": self.check}),
        )
        course = Course(self.start, 10, seed=5, name="ten", go_on="; once more")
        train(course, numbers(self.start, 10), hooks, Clock(self.start), Display("ten", 10, self.start))
        return self


def test_everything_happens_at_its_moment_and_a_checkpoint_comes_last():
    expected = [("log", 3), ("save", 4), ("log", 6), ("between", 6), ("save", 8), ("log", 9), ("save", 10)]
    assert Course10().run().events == expected


def test_what_a_network_draws_is_a_function_of_the_step():
    whole = Course10().run().drawn
    torch.manual_seed(99)
    assert Course10(start=6).run().drawn == whole[6:]
    assert len(set(whole)) == 10


def test_a_state_that_is_no_number_is_not_kept():
    course = Course10(loss=lambda step: math.nan if step >= 7 else 1.0)
    with pytest.raises(NotFinite, match="the loss became nan at or before step 8"):
        course.run()
    assert [event for event in course.events if "save" in event] == [("save", 4)]


def test_a_state_is_checked_before_it_is_logged_or_saved_and_once():
    course, checked = Course10(), []
    course.check = lambda done, batch, outcome: checked.append((done, batch, len(course.events)))
    events = course.run().events
    assert [done for done, _, _ in checked] == [3, 4, 6, 8, 9, 10]
    assert all(batch == done - 1 for done, batch, _ in checked)
    assert all(all(moment >= done for _, moment in events[count:]) for done, _, count in checked)


def test_a_request_to_stop_is_answered_with_a_checkpoint():
    course = Course10(at_step=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None)
    with pytest.raises(Interrupted, match=r"^ten: stopped after step 5 of 10; once more$"):
        course.run()
    assert course.events[-1] == ("save", 5)
    late = Course10(at_step=lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 9 else None)
    assert late.run().events[-1] == ("save", 10)  # it is done anyway


def test_a_fallback_is_told_once():
    fallbacks.drain()
    course = Course10(at_step=lambda step: fallbacks.note("captured", "no graph") if step >= 3 else None).run()
    assert course.told == [(4, {"captured": "no graph"})]
    fallbacks.note("compiled", "no compiler")
    assert fallbacks.sentence(*fallbacks.drain().popitem()) == "the step is not compiled: no compiler"
    assert fallbacks.drain() == {}


def test_batches_are_closed_when_a_step_fails():
    closed = []

    def batches():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    def fail(step, batch):
        raise ZeroDivisionError

    hooks = Hooks(fail, lambda done: False, lambda *_: None, lambda done: False, lambda done: None)
    with pytest.raises(ZeroDivisionError):
        train(Course(0, 10, 0), batches(), hooks, Clock(), Display("x", 10, 0))
    assert closed


def test_a_clock_goes_on_and_leaves_pauses_out_of_laps():
    clock = Clock(start=3, seconds=100.0)
    with clock.pause():
        time.sleep(0.05)
    steps, spent = clock.lap(7)
    assert steps == 4 and 0 < spent < 0.05
    assert 100.05 < clock.seconds < 110
    assert not clock.ever_saved and clock.since_saved >= 0.05
    clock.saved()
    assert clock.ever_saved and clock.since_saved < 0.05


def test_a_journal_forgets_the_steps_that_are_made_again(tmp_path):
    first = Journal(tmp_path / "new" / "metrics.jsonl", 0)
    for step in range(1, 6):
        first.write({"step": step})
    again = Journal(first.file, 3)
    again.write({"step": 4, "again": True})
    assert again.kept == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert Journal(first.file, 9).kept == [*again.kept, {"step": 4, "again": True}]
    assert not Journal(tmp_path / "none.jsonl", 0).file.exists()


def test_lines_are_few_and_the_last_is_one_of_them():
    display = Display("x", 1000, 0, lines=7)
    due = [done for done in range(1, 1001) if display.line_due(done)]
    assert len(due) == 7 and due[-1] == 1000
    resumed = Display("x", 1000, 500, lines=7)
    assert [done for done in range(501, 1001) if resumed.line_due(done)] == [done for done in due if done > 500]


def test_the_loss_that_stops_a_training_is_named():
    check_finite(1.0, 3, "do something")
    for name, who in (("", ""), ("probe", "probe: ")):
        with pytest.raises(UserError, match=rf"^{who}the loss became nan at or before step 3: do something$"):
            check_finite(math.nan, 3, "do something", name)
    values = mean_values(StepOutput(torch.tensor(3.0), {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}))
    assert values == {"loss": 3.0, "a": 1.0, "b": 2.0}


def test_a_checkpoint_says_where_to_go_on(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file, cpu = tmp_path / "folder" / "last.pt", torch.device("cpu")
    assert restore(None, model, optimizer, cpu) == restore(file, model, optimizer, cpu) == Position(0, 0.0)
    save_checkpoint(file, 7, model, optimizer, 1.5)
    other = torch.nn.Linear(2, 2)
    assert restore(file, other, torch.optim.SGD(other.parameters(), lr=0.1), cpu) == Position(7, 1.5)
    assert torch.equal(model.weight, other.weight)
