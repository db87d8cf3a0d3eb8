"""A method of this package in Lightning's Trainer: views, loss, optimiser and target are those of `tico pretrain`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tico_ssl.config.recipe import Recipe, load_recipe
from tico_ssl.integrations._batches import Given, read_batch
from tico_ssl.methods._base import Batch, Method
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.networks.initial import initial_weights
from tico_ssl.networks.storage import save_backbone
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import install_command
from tico_ssl.runtime.randomness import generator
from tico_ssl.runtime.wording import counted
from tico_ssl.training.initial import Start
from tico_ssl.training.plan import Plan
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import as_input
from tico_ssl.views.executor import Views, sizes_of

try:
    from lightning.pytorch import LightningModule
except ModuleNotFoundError as error:
    raise ImportError(f"tico_ssl.integrations.lightning needs lightning: {install_command('lightning')}") from error

CPU = torch.device("cpu")


class LightningMethod(LightningModule):
    """A LightningModule for a recipe's method, or for a `method` of your own with the recipe's views and optimiser.

    A batch is uint8 images, of which the recipe's views are made on the device, or the views themselves, either with
    labels or without (`_batches.read_batch`). The Trainer decides how long to train, in which precision and where.
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Any] | Recipe = "demo",
        overrides: Mapping[str, Any] | None = None,
        method: Method | None = None,
    ) -> None:
        super().__init__()
        self.recipe = load_recipe(recipe.model_dump() if isinstance(recipe, Recipe) else recipe, overrides)
        self.save_hyperparameters({"recipe": self.recipe.model_dump(mode="json")})  # rebuilds it from a checkpoint
        self.method = _built(self.recipe) if method is None else method
        data = self.recipe.data
        self.views = Views(self.recipe.views, data.image_size, data.mean, data.std)
        self._plan: Plan | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Features of normalised images."""
        features: Tensor = self.method.backbone(images)
        return features

    def setup(self, stage: str) -> None:
        """BatchNorm has the statistics of the global batch, as in `tico pretrain`."""
        if distributed.active():
            share_statistics(self.method.to(self.trainer.strategy.root_device))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch; its terms are logged."""
        given = read_batch(batch)
        if self.trainer.global_step == 0 and batch_idx == 0:
            self._require_batch_size(given.count)
        output = self.method(self._batch(given))
        self.log("loss", output.loss.detach(), prog_bar=True, batch_size=given.count)
        self.log_dict({name: value.detach() for name, value in output.terms.items()}, batch_size=given.count)
        loss: Tensor = output.loss
        return loss

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """One step of the optimiser, then of what follows it: target, queue, prototypes."""
        assert self._plan is not None
        progress = self.trainer.global_step / self._plan.steps
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.log_dict(self.method.after_step(progress))

    def configure_optimizers(self) -> Any:
        """The recipe's optimiser and schedule, over as many steps as the Trainer makes."""
        self._plan = plan = self._planned()
        optimizer = build_optimizer(self.method, plan.optimizer, plan.peak_lr, self.method.fixed_rate())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": PlannedRate(optimizer, plan), "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """As the Trainer says or, if it says nothing, as the recipe does."""
        if gradient_clip_val is None:
            gradient_clip_val = self.recipe.training.clip_gradient
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")

    def save_backbone(self, path: str | Path) -> Path:
        """Write the backbone as a file that every command and `load_backbone` take."""
        if not isinstance(self.method.backbone, Backbone):
            raise UserError("only a backbone that was built by this package can be saved as one of its files")
        file = Path(path).expanduser()
        save_backbone(self.method.backbone, file)
        return file

    def _batch(self, given: Given) -> Batch:
        dtype = next(self.method.parameters()).dtype
        with _in_float32(self.device):
            views = given.views if given.images is None else self._made(given.images)
        return Batch(tuple(as_input(view.to(dtype)) for view in views), self._index(given), given.label)

    def _index(self, given: Given) -> Tensor:
        if given.index is not None:
            return given.index
        config = getattr(self.method, "config", self.recipe.method)
        if "images" in type(config).model_fields:
            raise UserError(f"method {config.name} keeps something of every image: batches need an 'index'")
        return torch.empty(0, dtype=torch.long, device=self.device)

    @torch.no_grad()
    def _made(self, images: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
        """The views of this process's images, a function of the recipe's seed and the number of the batch."""
        count, number = len(images), self.trainer.fit_loop.total_batch_idx
        drawn = self.views.draw(count * distributed.world_size(), generator(self.recipe.training.seed, "views", number))
        mine = drawn[distributed.rank() * count :][:count]
        decisions = self.views.decide(mine, sizes_of(images)).to(self.device)
        return self.views.finish(self.views.crop(images, decisions), decisions)

    def _require_batch_size(self, count: int) -> None:
        """The learning rate follows the batch size, so a recipe must know it."""
        found = count * distributed.world_size() * self.trainer.accumulate_grad_batches
        if self.recipe.optimizer.scale_lr and found != (said := self.recipe.training.batch_size):
            raise UserError(
                f"a step has {counted(found, 'image')} and the learning rate is for training.batch_size={said}: "
                f"pass overrides={{'training.batch_size': {found}}}, or 'optimizer.scale_lr': False"
            )

    def _planned(self) -> Plan:
        steps, batches = self.trainer.estimated_stepping_batches, self.trainer.num_training_batches
        if not 0 < steps < float("inf"):
            raise UserError("a schedule has an end: give the Trainer max_epochs or max_steps")
        if batches == float("inf"):  # nobody knows how long an epoch is
            return Plan.of(self.recipe, max(1, round(steps / self.recipe.training.epochs)), int(steps))
        return Plan.of(self.recipe, -(-int(batches) // self.trainer.accumulate_grad_batches), int(steps))


class PlannedRate(LRScheduler):
    """The learning rate of every step of a plan; groups with a fixed rate keep theirs."""

    def __init__(self, optimizer: Optimizer, plan: Plan) -> None:
        self.plan = plan
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the groups at this step."""
        rate, groups = self.plan.lr(self.last_epoch), self.optimizer.param_groups
        return [group["lr"] if group.get("fixed_rate") else rate * group.get("lr_ratio", 1.0) for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Without the plan, which follows from recipe and Trainer."""
        return {key: value for key, value in super().state_dict().items() if key != "plan"}


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Within, the Trainer's precision is not at work, which is for networks: views are made in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def _built(recipe: Recipe) -> Method:
    """With the initial weights of `tico pretrain`; the caller's random numbers stay as they are."""
    settings = recipe.training
    precision = torch.float64 if settings.precision == "fp64" else torch.float32
    start = None if settings.init is None else Start(initial_weights(settings.init), settings.init_strict)
    with torch.random.fork_rng(devices=[]):
        return build_method(recipe, CPU, precision, fused=False, start=start)
