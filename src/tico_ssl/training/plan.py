"""A recipe in steps: their number, and the learning rate of each."""

from dataclasses import dataclass

from tico_ssl.config.recipe import Recipe
from tico_ssl.config.sections import OptimizerConfig
from tico_ssl.optim.schedules import scaled_lr, warmup_cosine, warmup_steps

LONGEST_WARMUP = 0.5  # of a run; one that is longer was meant for a longer run
SHORT_WARMUP = 0.1  # of a run, instead


@dataclass(frozen=True)
class Plan:
    """Number of steps, the learning rate of each, and the optimiser's settings with the weight decay of the batch."""

    steps_per_epoch: int
    steps: int
    warmup: int
    peak_lr: float
    optimizer: OptimizerConfig

    @classmethod
    def of(cls, recipe: Recipe, steps_per_epoch: int, steps: int | None = None) -> "Plan":
        """The plan of a recipe for a number of steps per epoch, and in all, by default that of the recipe's epochs."""
        optimizer, steps = recipe.optimizer, steps_per_epoch * recipe.training.epochs if steps is None else steps
        peak = scaled_lr(optimizer.lr, recipe.training.batch_size) if optimizer.scale_lr else optimizer.lr
        if optimizer.scale_decay and optimizer.scale_lr:
            decay = optimizer.weight_decay * optimizer.lr / peak
            optimizer = optimizer.model_copy(update={"weight_decay": decay})
        warmup = round(optimizer.warmup_epochs * steps_per_epoch)
        if warmup > LONGEST_WARMUP * steps:
            warmup = round(SHORT_WARMUP * steps)
        return cls(steps_per_epoch, steps, warmup, peak, optimizer)

    @property
    def shortened(self) -> str:
        """What was done to a warm-up that is too long, if it was."""
        if self.warmup == round(self.optimizer.warmup_epochs * self.steps_per_epoch):
            return ""
        epochs, asked = self.steps // self.steps_per_epoch, self.optimizer.warmup_epochs
        instead = f"shortened to {self.epoch(self.warmup):.2g}" if self.warmup else "left out"
        return f"a warm-up of {asked:g} epochs is too long for a run of {epochs}: {instead}"

    @property
    def end_lr(self) -> float:
        """Final learning rate of a cosine schedule."""
        return self.peak_lr * self.optimizer.end_lr_ratio

    def due(self, done: int, every_epochs: int) -> bool:
        """Whether something that happens every `every_epochs` epochs, and after the last, is due after `done` steps."""
        return done == self.steps or done % (self.steps_per_epoch * every_epochs) == 0

    def epoch(self, done: int) -> float:
        """Completed epochs after `done` steps."""
        return done / self.steps_per_epoch

    def lr(self, step: int) -> float:
        """Learning rate of a step."""
        optimizer, peak = self.optimizer, self.peak_lr
        start = peak * optimizer.start_lr_ratio
        if optimizer.schedule == "cosine":
            return warmup_cosine(step, self.steps, self.warmup, peak, self.end_lr, start)
        return warmup_steps(step, self.steps, self.warmup, peak, optimizer.decay_at, optimizer.decay, start)
