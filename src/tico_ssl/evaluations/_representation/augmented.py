"""Features of augmented views: several per image, the same views for every backbone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tico_ssl.config.section import validate
from tico_ssl.config.views import SMALL_IMAGE, ViewPolicy, named_policy, shorter_side
from tico_ssl.data.source import Source
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.settings import ViewSettings
from tico_ssl.features.batches import BATCH, own_share, prepared_batches
from tico_ssl.features.extraction import Extracted, in_order
from tico_ssl.networks.backbones import Backbone
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.randomness import generator
from tico_ssl.runtime.wording import counted
from tico_ssl.views.executor import Views, sizes_of

DRAW = 10  # random stream of these views within the purpose "probe"


def views_of_images(context: Context, settings: ViewSettings, number: int) -> dict[str, Tensor]:
    """For each backbone the features (images, number, width) of `number` views per image."""
    policies = _policies(context, settings.policy)
    chosen = [policies[i % len(policies)] for i in range(number)]
    if (images := min(len(context.train), settings.images)) < 2:
        raise UserError(f"{context.protocol} compares images; there is only {images}")
    made: dict[str, list[Tensor]] = {name: [] for name in context.backbones}
    for names in context.alike:
        backbones = {name: context.backbones[name] for name in names}
        side = shorter_side(chosen, backbones[names[0]].image_size)
        source = context.training_images(side).limited(settings.images)
        for place, policy in enumerate(chosen):
            key = ("view", names[0], place, policy, settings.images, settings.seed)
            if key not in context.kept:
                label = f"{context.protocol}: view {place + 1} of {number}"
                made_of = _one_view(backbones, source, policy, settings.seed, place, context.device, label)
                context.unread.note("train", source, made_of[names[0]].places)
                context.kept[key] = {name: found.features for name, found in made_of.items()}
            for name, features in context.kept[key].items():
                made[name].append(features)
    return {name: torch.stack(views, dim=1) for name, views in made.items()}


def _policies(context: Context, name: str | None) -> list[ViewPolicy]:
    """Policies whose views have the input size of the backbone under evaluation; they take turns. Views of others have
    that of theirs."""
    size = context.image_size
    if name is None and context.run is not None:
        given = list(open_run(context.run).recipe().views)
    else:
        name = name or ("byol-small" if size <= SMALL_IMAGE else "byol")
        given = [validate(ViewPolicy, values, f"views {name}") for values in named_policy(name)]
    fitting = [policy for policy in given if policy.side(size) == size and not policy.jigsaw]
    if not fitting:
        raise UserError(f"no view of this recipe is one image of {size} pixels: name a policy, such as policy=byol")
    return [policy.model_copy(update={"count": 1, "size": None, "relative_size": None}) for policy in fitting]


@torch.no_grad()
def _one_view(
    backbones: Mapping[str, Backbone],
    source: Source,
    policy: ViewPolicy,
    seed: int,
    number: int,
    device: torch.device,
    label: str,
) -> dict[str, Extracted]:
    """A view of every image through every backbone, in evaluation mode; a function of seed and number. Of several
    processes each computes a share, and has all."""
    like = next(iter(backbones.values()))
    make = Views([policy], like.image_size, like.mean, like.std)
    begins = range(0, len(source), BATCH)
    drawn = [make.draw(min(BATCH, len(source) - i), generator(seed, "probe", DRAW, number, i)) for i in begins]
    share, mine = own_share(source)
    uniforms = torch.cat(drawn)[mine]

    def crop(images: Tensor | Sequence[Tensor], places: list[int]) -> Tensor:
        (crops,) = make.crop(images, make.decide(uniforms[places], sizes_of(images)))
        return crops / 255 if crops.dtype == torch.uint8 else crops

    features = {name: [torch.empty(0, backbone.width)] for name, backbone in backbones.items()}
    seen: list[int] = []
    for backbone in backbones.values():
        backbone.eval().to(device)
    batches = prepared_batches(share, crop, (len(like.mean), like.image_size, like.image_size), device)
    for crops, places in track(batches, len(share), label, "images", lambda batch: len(batch.places)):
        (view,) = make.finish([crops], make.decide(uniforms[places]).to(device))
        view = view.contiguous(memory_format=torch.channels_last)  # a third faster on a CPU
        for name, backbone in backbones.items():
            features[name].append(backbone(view).cpu())
        seen += places
    found = {name: in_order(torch.cat(parts), mine[seen]) for name, parts in features.items()}
    if not len(next(iter(found.values())).places):
        raise UserError(f"{source.name}: none of the {counted(len(source), 'image')} can be read")
    return found
