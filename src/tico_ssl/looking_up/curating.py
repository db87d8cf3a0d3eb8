"""Near-duplicates, outliers and a diverse subset of images, as tables and a page. Nothing is deleted. User errors are
raised before torch is imported, as far as they can be."""

from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.data.given import ALL_SPLITS, Given, in_words, require_split
from tico_ssl.features.embedding import name_bad_files
from tico_ssl.features.homes import require_model
from tico_ssl.looking_up.findings import Curation, Threshold, scored
from tico_ssl.looking_up.searching import alone_in_output, require_output_folder
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    import torch

    from tico_ssl.looking_up.index import Index

AT_ONCE = 65_536  # images whose neighbours are looked for in one pass over all


def curate(
    model: str | Path,
    data: Given,
    out: str | Path = "curated",
    *,
    threshold: float | None = None,
    neighbours: int = 10,
    subset: int | None = None,
    weights: str | Path | None = None,
    split: str = ALL_SPLITS,
    bf16: bool = False,
) -> Curation:
    """Find near-duplicates and outliers, choose a `subset` of so many images, and write tables and a page to a folder.
    Without a `threshold`, the cosine from which images are near-duplicates follows from their nearest neighbours."""
    _require_numbers(threshold, neighbours, subset)
    require_split(split)
    require_output_folder(out)
    require_model(model, data, weights)

    import torch

    from tico_ssl.features.subjects import open_model
    from tico_ssl.looking_up.curation_files import write
    from tico_ssl.looking_up.index import opened_index
    from tico_ssl.runtime.device import choose_device, tune_process

    device = choose_device()
    tune_process(device)
    subject = open_model(model, data, weights)
    folder, dtype = Path(out).expanduser(), torch.bfloat16 if bf16 else torch.float32
    with alone_in_output(folder), opened_index(subject, device, split, dtype) as index:
        found = examined(index, in_words(data), device, threshold, neighbours, subset)
        write(folder, found, index)
        name_bad_files(index.album, index.bad, folder / "bad_files.jsonl")
    return found


def _require_numbers(threshold: float | None, neighbours: int, subset: int | None) -> None:
    if threshold is not None and not -1 <= threshold <= 1:
        raise UserError(f"threshold is {threshold}: a cosine is from -1 to 1")
    for name, value in (("neighbours", neighbours), ("subset", subset)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: at least 1 is needed")


def examined(
    index: "Index", data: str, device: "torch.device", threshold: float | None, neighbours: int, subset: int | None
) -> Curation:
    """What there is to find in an index."""
    from tico_ssl.looking_up.coverage import k_centre
    from tico_ssl.looking_up.duplicates import chosen_threshold, groups
    from tico_ssl.looking_up.outliers import fence, neighbour_cosines

    count = len(index.rows)
    if count < 2:
        raise UserError(f"{data}: {count} image, which has nothing to be compared with")
    if subset is not None and subset > count:
        raise UserError(f"--subset={subset}: there are only {counted(count, 'image')} that can be read")
    cosines = neighbour_cosines(index.rows, min(neighbours, count - 1), device, AT_ONCE)
    nearest, scores = cosines[:, 0], 1 - cosines.mean(dim=1)
    cut = chosen_threshold(nearest) if threshold is None else Threshold(threshold, "as given")
    alike = [scored(index, rows, nearest[rows].tolist()) for rows in groups(index.rows, nearest, cut.cosine, device)]
    order = scores.argsort(descending=True, stable=True)
    chosen = None if subset is None else k_centre(index.rows, subset, device)
    return Curation(
        data=data,
        images=count,
        threshold=cut,
        nearest=nearest.tolist(),
        neighbours=cosines.shape[1],
        groups=sorted(alike, key=lambda group: -min(member.score for member in group)),
        outliers=scored(index, order.tolist(), scores[order].tolist()),
        unusual=int((scores > fence(scores)).sum()),
        subset=None if chosen is None else scored(index, *chosen),
    )
