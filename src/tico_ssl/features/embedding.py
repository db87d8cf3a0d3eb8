"""The features of images as a table. User errors are raised before torch is imported."""

from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.data.given import ALL_SPLITS, Given, require_split
from tico_ssl.features.homes import require_model
from tico_ssl.results.formats import require_kind
from tico_ssl.runtime.json_lines import write_json_lines
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    from tico_ssl.features.album import Album

SUFFIXES = (".csv", ".npy", ".npz", ".parquet", ".pt")
SHOWN = 20  # unreadable files on the terminal


def embed(
    run: str | Path,
    data: Given | None = None,
    out: str | Path = "features.npz",
    bf16: bool = False,
    *,
    normalise: bool = False,
    weights: str | Path | None = None,
    split: str = ALL_SPLITS,
) -> Path:
    """Write features, paths, splits and labels (if any) of images as .npz, .npy, .csv, .parquet or .pt, and return the
    path of the file.

    `run` is a run folder, a backbone file, or a model by name with a file of its `weights`. `data` are by default the
    run's; `split` selects train, val or test instead of all. `bf16` computes features in bf16; `normalise` divides them
    by their length. Unfinished work is kept in a folder beside `out`, so after an interruption the same call
    continues. With several processes, each computes a share.

        features = numpy.load(embed("runs/mine", "photos/"))["features"]
    """
    out = Path(out).expanduser()
    require_kind(out, SUFFIXES, "features")
    require_split(split)
    require_model(run, data, weights)

    import torch

    from tico_ssl.data.fingerprint import require_same_everywhere
    from tico_ssl.features.album import open_album
    from tico_ssl.features.feature_store import fill, opened_store, store_key
    from tico_ssl.features.subjects import open_model
    from tico_ssl.features.tables import Table, write_table
    from tico_ssl.runtime import distributed
    from tico_ssl.runtime.device import choose_device, tune_process
    from tico_ssl.runtime.process_group import process_group

    device = choose_device()
    tune_process(device)
    subject = open_model(run, data, weights)
    backbone, dtype = subject.backbone, torch.bfloat16 if bf16 else torch.float32
    album = open_album(subject.data, backbone.config.channels, split)
    with process_group(device):
        require_same_everywhere([part.source for part in album.parts])
        if not distributed.is_main():  # which computes its share, and leaves the writing to the main process
            fill(None, album, backbone, device, dtype, normalise)
            return out
        key = store_key(backbone, album.fingerprint(), device, dtype, normalise)
        with opened_store(out.with_name(f"{out.name}.partial"), key, backbone.width) as store:
            fill(store, album, backbone, device, dtype, normalise)
            write_table(Table(album, store.places(), store.matrix()), out)
            name_bad_files(album, store.bad, out.with_name(f"{out.name}.bad_files.jsonl"))
            store.clear()
    return out


def name_bad_files(album: "Album", bad: dict[int, str], file: Path) -> None:
    """Say which images have no features and why, and write all of them to a file; without any, there is no file."""
    if not bad:
        file.unlink(missing_ok=True)
        return
    lines = [{"file": album.path(place), "reason": reason} for place, reason in bad.items()]
    write_json_lines(file, lines)
    say(f"{len(bad):,} of {counted(len(album), 'image')} cannot be read; all are in {file}")
    for line in lines[:SHOWN]:
        say(f"  {line['file']}: {line['reason']}")
