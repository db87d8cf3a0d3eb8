"""The images nearest to others. User errors are raised before torch is imported, as far as they can be."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.data.given import ALL_SPLITS, Given, require_split
from tico_ssl.features.homes import require_model
from tico_ssl.looking_up.findings import Found, scored
from tico_ssl.results.table import print_table
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.locks import LOCK, alone_in
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tico_ssl.looking_up.index import Index
    from tico_ssl.networks.backbones import Backbone


def search(
    model: str | Path,
    data: Given,
    queries: str | Path | Sequence[str | Path],
    top: int = 12,
    out: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    split: str = ALL_SPLITS,
    bf16: bool = False,
) -> list[Found]:
    """The `top` images nearest to each query by cosine similarity, exact; with `out`, also as a page, a contact sheet
    and a table in that folder."""
    queries = [queries] if isinstance(queries, str | Path) else queries
    _require_queries(queries, top)
    require_split(split)
    require_output_folder(out)
    require_model(model, data, weights)

    import torch

    from tico_ssl.features.neighbours import nearest
    from tico_ssl.features.subjects import open_model
    from tico_ssl.looking_up.index import features_of, opened_index
    from tico_ssl.runtime.device import choose_device, tune_process

    device = choose_device()
    tune_process(device)
    subject, dtype = open_model(model, data, weights), torch.bfloat16 if bf16 else torch.float32
    images = [_decoded(query, subject.backbone) for query in queries]
    asked = features_of(images, subject.backbone, device, dtype)
    folder = None if out is None else Path(out).expanduser()
    with alone_in_output(folder), opened_index(subject, device, split, dtype) as index:
        cosines, rows = (found.tolist() for found in nearest(index.rows, asked, top, device=device))
        matches = [scored(index, *near) for near in zip(rows, cosines, strict=True)]
        found = [Found(str(query), near) for query, near in zip(queries, matches, strict=True)]
        if index.bad:
            say(f"{len(index.bad):,} of {counted(len(index.album), 'image')} cannot be read (`tico data check`)")
        if folder is not None:
            _write(folder, found, images, index)
    return found


def require_output_folder(out: str | Path | None) -> None:
    """Refuse a file where a folder is needed."""
    if out is not None and Path(out).expanduser().is_file():
        raise UserError(f"{out} is a file: --out takes a folder")


@contextmanager
def alone_in_output(folder: Path | None) -> Iterator[None]:
    """Keep other commands from writing to the folder, if there is one. In the end it holds results alone."""
    if folder is None:
        yield
        return
    with alone_in(folder, f"another command writes to {folder}: wait for its end, or choose another --out"):
        yield
        (folder / LOCK).unlink(missing_ok=True)  # whoever has opened it meanwhile sees that it is gone


def _require_queries(queries: Sequence[str | Path], top: int) -> None:
    if not queries:
        raise UserError("which image? Give it with --query, once or several times")
    for query in queries:
        if not Path(query).expanduser().is_file():
            raise UserError(f"{query}: no such image")
    if top < 1:
        raise UserError(f"top is {top}: at least one image has to be found")


def _decoded(query: str | Path, backbone: "Backbone") -> "Tensor":
    from tico_ssl.data.decoding import BadImage
    from tico_ssl.data.images import as_images

    try:
        return as_images([Path(query)], backbone.config.channels, backbone.limits)[0]
    except BadImage as error:
        raise UserError(f"{query}: cannot be read as an image ({error.reason})") from error


def show(found: Sequence[Found]) -> None:
    """A table for each query, on the terminal."""
    for one in found:
        say(f"\n{one.query}")
        named = any(match.name for match in one.matches)
        rows = [
            [str(number), f"{match.score:.4f}", match.path, *([match.name] if named else [])]
            for number, match in enumerate(one.matches, 1)
        ]
        print_table(["", "cosine", "path", *(["class"] if named else [])], rows, left=[2, 3])


def _write(folder: Path, found: Sequence[Found], images: "Sequence[Tensor]", index: "Index") -> None:
    from tico_ssl.features.thumbnails import squares
    from tico_ssl.looking_up.pages import SIDE, search_page
    from tico_ssl.looking_up.sheet import write_sheet
    from tico_ssl.looking_up.tables import write_csv
    from tico_ssl.runtime.files import write_atomically

    asked: list[np.ndarray] = [squares(image[None], SIDE)[0] for image in images]
    near = [index.album.thumbnails([match.place for match in one.matches], SIDE) for one in found]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        (one.query, number, match.path, match.split, match.name, match.score)
        for one in found
        for number, match in enumerate(one.matches, 1)
    ]
    write_csv(folder / "search.csv", ["query", "rank", "path", "split", "class", "cosine"], rows)
    write_sheet(folder / "search.png", asked, near)
    write_atomically(folder / "search.html", search_page(found, asked, near))
