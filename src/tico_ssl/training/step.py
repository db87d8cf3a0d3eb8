"""One training step: views, loss, gradient, optimiser, target. One function, executed in one of three ways.

    eager      operation by operation: the oracle
    compiled   the forward and backward pass through torch.compile
    captured   the whole step, from views to target, as a CUDA graph that is replayed: no Python overhead

Whatever changes between steps enters through tensors (images, decisions, learning rate, progress), and no step
synchronises with the host; so a captured step computes the same as an eager one. If compilation or capture fails, the
step falls back, and `Step.execution` says so.

Several processes average gradients in the step itself, so that capture records these and all other collective
operations. It succeeds in all processes or in none.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tico_ssl.config.sections import Execution
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
from tico_ssl.networks.batch_norm import kept_statistics
from tico_ssl.networks.dropping import drops
from tico_ssl.networks.target import overlapping
from tico_ssl.optim.groups import set_learning_rate
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.device import autocast
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import random_state, set_random_state
from tico_ssl.views.executor import Views

WARM_UP = 3  # eager steps before capture, in which libraries choose algorithms and allocate workspaces


@dataclass(frozen=True)
class Outcome:
    """The output of a step, overwritten by the next captured step. `extra` are more values to log."""

    output: StepOutput
    extra: dict[str, float | Tensor] = field(default_factory=dict)


class Step:
    """Carries out training steps on one device. With `overlap`, captured steps run target and online network on two
    streams.

    `execution` is the intended way until `WARM_UP` + 1 steps are done, then the actual one.
    """

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        views: Views,
        precision: torch.dtype,
        device: torch.device,
        clip_gradient: float | None = None,
        execution: Execution = "auto",
        parts: int = 1,
        overlap: bool = True,
    ) -> None:
        self.method, self.optimizer, self.views = method, optimizer, views
        self.parts = parts
        self.precision, self.device, self.clip_gradient = precision, device, clip_gradient
        self.execution: Execution = resolve_execution(execution, device)
        if parts > 1:
            self._settle_for_parts()
        self._forward: Callable[..., StepOutput] = self._loss
        if "compiled" in self.execution:
            self._forward = _Compiled(self._loss, self._give_up)
        self._run: Callable[[RawBatch], Outcome] = self._compute
        if "captured" in self.execution:
            # One communicator carries out its operations in one order: beside each other, networks would wait in turns
            overlap = overlap and not distributed.active()
            self._run = _Captured(self._compute, self._give_up, method, overlap)
        self._progress: float | Tensor = 0.0
        if device.type == "cuda":
            self._progress = torch.zeros((), device=device)
            torch.backends.cudnn.benchmark = True  # shapes never change

    def __call__(self, raw: RawBatch, lr: float, progress: float) -> Outcome:
        """One step; progress runs from 0 to 1 over the run."""
        set_learning_rate(self.optimizer, lr)
        if isinstance(self._progress, Tensor):
            self._progress.fill_(progress)
        else:
            self._progress = progress
        return self._run(raw)

    def close(self) -> None:
        """Free what was captured, which must not outlive the processes' communicator."""
        if isinstance(self._run, _Captured):
            self._run.forget()

    def _settle_for_parts(self) -> None:
        """Parts are eager or captured, and what is captured cannot draw the same random numbers twice."""
        if "compiled" in self.execution:
            self._give_up("compiled", UserError("a batch in parts (training.parts) is not compiled"))
        if "captured" in self.execution and drops(self.method):
            self._give_up("captured", UserError("its parts (training.parts) drop the same activations twice"))

    def _compute(self, raw: RawBatch) -> Outcome:
        made = tuple(as_input(view) for view in self.views.make(raw.pixels, raw.decisions))
        self.optimizer.zero_grad(set_to_none=True)
        if self.parts > 1:
            output = self._in_parts(Batch(made, raw.index, raw.label))
        else:
            with autocast(self.device, self.precision):
                output = self._forward(made, raw.index, raw.label)
            output.loss.backward()
        distributed.average_gradients(self.method.parameters())
        if self.clip_gradient is not None:
            nn.utils.clip_grad_norm_(self.method.parameters(), self.clip_gradient)
        self.optimizer.step()
        return Outcome(output, self.method.after_step(self._progress))

    def _in_parts(self, batch: Batch) -> StepOutput:
        """The gradient of the whole batch's loss, with the activations of one part at a time in memory.

        The loss is not a sum over images (TiCo's covariance is that of the whole batch), so embeddings come first,
        without gradient; then the loss and its gradient with respect to them; then each part again, with the same
        random numbers, to backpropagate that gradient. BatchNorm sees one part at a time, as on several GPUs without
        synchronised statistics.
        """
        chunks = [_part(batch, number, self.parts) for number in range(self.parts)]
        random = drops(self.method)
        states, encoded = [], []
        with torch.no_grad(), autocast(self.device, self.precision):
            for chunk in chunks:
                states.append(random_state(self.device) if random else None)
                encoded.append(self.method.encode(chunk))
        whole = [torch.cat(parts) for parts in zip(*(chunk.trained for chunk in encoded), strict=True)]
        fixed = [torch.cat(parts) for parts in zip(*(chunk.fixed for chunk in encoded), strict=True)]
        whole = [embedding.requires_grad_() for embedding in whole]
        with autocast(self.device, self.precision):
            output = self.method.loss(Encoded(tuple(whole), tuple(fixed)))
        gradients = torch.autograd.grad(output.loss, whole)
        pieces = [gradient.chunk(self.parts) for gradient in gradients]
        for number, chunk in enumerate(chunks):
            with autocast(self.device, self.precision), kept_statistics(self.method):
                if (state := states[number]) is not None:
                    set_random_state(self.device, state)
                again = self.method.encode(chunk, fixed=False).trained
            torch.autograd.backward(again, [piece[number] for piece in pieces])
        return output

    def _give_up(self, what: str, error: Exception) -> None:
        """Fall back to an execution without "compiled" or "captured"."""
        left = " and ".join(part for part in self.execution.split(" and ") if part != what)
        self.execution = cast(Execution, left or "eager")
        fallbacks.note(what, fallbacks.reason_of(error))

    def _loss(self, made: tuple[Tensor, ...], index: Tensor, label: Tensor | None) -> StepOutput:
        output: StepOutput = self.method(Batch(made, index, label))
        return output


def resolve_execution(execution: Execution, device: torch.device) -> Execution:
    """The execution that a recipe's setting means on a device. CUDA graphs need a GPU; of several processes' compiled
    steps none has been captured yet."""
    possible = device.type == "cuda" and not ("compiled" in execution and distributed.active())
    if execution == "auto":
        return "captured" if possible else "eager"
    if not possible and "captured" in execution:
        return "compiled" if "compiled" in execution else "eager"
    return execution


def _part(batch: Batch, number: int, parts: int) -> Batch:
    views = tuple(view.chunk(parts)[number] for view in batch.views)
    label = None if batch.label is None else batch.label.chunk(parts)[number]
    return Batch(views, batch.index.chunk(parts)[number], label)


def as_input(view: Tensor) -> Tensor:
    """A view in the memory format of the weights."""
    return view.contiguous(memory_format=torch.channels_last) if view.ndim == 4 else view


GiveUp = Callable[[str, Exception], None]


class _Compiled:
    """A function through torch.compile, or eager if compilation fails."""

    def __init__(self, function: Callable[..., StepOutput], give_up: GiveUp) -> None:
        self.plain, self.give_up = function, give_up
        # Inductor's hint to round float32 products to TF32, which whoever asks for float32 does not want
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        self.compiled: Callable[..., StepOutput] | None = torch.compile(function, dynamic=False)

    def __call__(self, made: tuple[Tensor, ...], index: Tensor, label: Tensor | None) -> StepOutput:
        if self.compiled is not None:
            try:
                return self.compiled(made, index, label)
            except Exception as error:  # compilers fail in many ways; eager computes the same
                self.give_up("compiled", error)
                self.compiled = None
        return self.plain(made, index, label)


class _Captured:
    """A step that is captured after the warm-up, then replayed; or eager if capture fails in any process."""

    def __init__(self, step: Callable[[RawBatch], Outcome], give_up: GiveUp, method: nn.Module, overlap: bool) -> None:
        self.step, self.give_up, self.method, self.calls = step, give_up, method, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream() if overlap else None

    def __call__(self, raw: RawBatch) -> Outcome:
        self.calls += 1
        if self.calls == WARM_UP + 1:
            self._record(raw)
        if self.graph is None:
            return self._beside(raw)
        for mine, theirs in zip(_tensors(self.inputs), _tensors(raw), strict=True):
            mine.copy_(theirs, non_blocking=True)
        self.graph.replay()
        return self.outcome

    def forget(self) -> None:
        if self.graph is not None:
            self.graph.reset()
            self.graph = None

    def _beside(self, raw: RawBatch) -> Outcome:
        """On a side stream, as the warm-up before a capture requires."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), overlapping(self.method, self.side):
            outcome = self.step(raw)
        torch.cuda.current_stream().wait_stream(self.stream)
        return outcome

    def _record(self, raw: RawBatch) -> None:
        self.inputs = _copied(raw)
        graph = torch.cuda.CUDAGraph()
        failed: Exception | None = None
        # NCCL's watchdog thread asks for the state of earlier operations meanwhile: allowed, since nobody else is
        mode = "thread_local" if distributed.active() else "global"
        try:
            with (
                _no_collection(),
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode),
                overlapping(self.method, self.side),
            ):
                self.outcome = self.step(self.inputs)
        except Exception as error:  # a method or a library that synchronises with the host
            failed = error
        if (failed := _anyones(failed)) is not None:
            self.give_up("captured", failed)
            return
        self.graph = graph


def _anyones(failed: Exception | None) -> Exception | None:
    """This process's failure or, if it has none, that of the first process that has one. A capture carries nothing out,
    so no process waits for another one in it, and all can answer."""
    reasons = distributed.everyone(None if failed is None else fallbacks.reason_of(failed))
    theirs = [f"process {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    return failed or (RuntimeError(theirs[0]) if theirs else None)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage before, not during a capture: freeing an older graph meanwhile would invalidate the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tensors(raw: RawBatch) -> list[Tensor]:
    """All tensors that a step reads."""
    pixels = [raw.pixels] if isinstance(raw.pixels, Tensor) else list(raw.pixels)
    return [*pixels, raw.decisions, raw.index] + ([] if raw.label is None else [raw.label])


def _copied(raw: RawBatch) -> RawBatch:
    pixels = raw.pixels
    pixels = pixels.clone() if isinstance(pixels, Tensor) else tuple(crop.clone() for crop in pixels)
    label = None if raw.label is None else raw.label.clone()
    return RawBatch(pixels, raw.decisions.clone(), raw.index.clone(), label)
