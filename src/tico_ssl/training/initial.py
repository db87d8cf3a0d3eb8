"""The weights that a run starts from. They are kept in its folder, for a resume before the first checkpoint and for
evaluations, which compare with them."""

from dataclasses import dataclass, field

from tico_ssl.config.recipe import Recipe
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.initial import Initial, initial_weights
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError


@dataclass(frozen=True)
class Start:
    """The weights that a recipe's backbone starts from, instead of random ones, and what was said about them."""

    weights: Initial
    strict: bool
    said: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Recipe, run: Run, overwrite: bool = False) -> "Start | None":
        """Those of a run, which may have begun; None if they are random, or if there is a checkpoint, which wins."""
        settings = recipe.training
        if settings.init is None:
            return None
        begun = run.checkpoint_file.is_file() and not overwrite
        exact = not recipe.backbone.weight_standardisation  # kept weights have it folded in
        if run.initial_file.is_file() and exact and not overwrite:
            try:
                return cls(initial_weights(str(run.initial_file)), settings.init_strict)
            except UserError:
                if not begun:
                    raise
        return None if begun else cls(initial_weights(settings.init), settings.init_strict)

    def load(self, backbone: Backbone) -> None:
        """Into a backbone, before a target is copied from it."""
        self.said[:] = self.weights.load(backbone, self.strict)
