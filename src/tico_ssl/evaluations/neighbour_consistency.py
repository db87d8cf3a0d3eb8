"""Neighbour consistency: do views of an image find each other, and the same neighbours? Needs no labels."""

from time import perf_counter
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.augmented import views_of_images
from tico_ssl.evaluations._representation.settings import ViewSettings
from tico_ssl.features.evidence import Scores, means
from tico_ssl.features.neighbours import nearest
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result

COST = "head"
METRICS = (Metric("same_image", "%", better="higher"), Metric("kept_neighbours_k*", "%", better="higher"))


class Config(ViewSettings):
    """Two views of each image."""

    k: Annotated[int, Field(ge=1)] = 10
    """Number of neighbours."""


def run(context: Context, config: Config) -> Result:
    """Shares in per cent, for every backbone."""
    begun = perf_counter()
    views = views_of_images(context, config, 2)
    numbers: dict[str, Numbers] = {
        name: consistency(values, config.k, context.device) for name, values in views.items()
    }
    return context.result(config, numbers, perf_counter() - begun)


def consistency(views: Tensor, k: int, device: torch.device | None = None) -> Scores:
    """For views (images, 2, width), in per cent: how often the nearest of all other views is of the same image, and the
    overlap of the k nearest images of the first view, among first views, with the second's, among second views."""
    images = len(views)
    k = min(k, images - 1)
    both = torch.cat([views[:, 0], views[:, 1]])
    itself = torch.arange(2 * images)
    (found,) = nearest(both, both, 1, left_out=itself, device=device).places.cpu().T
    lists = [nearest(view, view, k, left_out=itself[:images], device=device).places.cpu() for view in views.unbind(1)]
    shared = (lists[0].unsqueeze(2) == lists[1].unsqueeze(1)).sum(dim=(1, 2))
    same = (found % images == itself % images).view(2, images)
    return means({"same_image": same.double().mean(dim=0), f"kept_neighbours_k{k}": shared.double() / k})
