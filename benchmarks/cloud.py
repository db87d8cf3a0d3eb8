"""Tar shards in object storage: images per second from a store with and without latency, against the same file.

    python benchmarks/cloud.py [--images 400] [--workers 2] [--photos FOLDER] [--out FILE]

The store is moto's, on this machine, behind a proxy that waits before it answers every request. JPEGs are those of
streaming.py, in one shard, and are decoded by worker processes in shuffled order. `open_s` includes the one pass over
the shard that indexes it, which fills the cache, and the reading of some images to learn their depth; with no cache
every image is a request of its own, and a worker makes those of its part of a batch together.
"""

import argparse
import io
import json
import logging
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import HEIGHT, WIDTH, write_files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cloud_proxy import Proxy
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.pipeline.streaming import Stream, Task
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime import cache_folder

LATENCIES = (0.0, 0.05)  # seconds per request
BATCH = 50  # images
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def serve(shard: Path, pipe: Connection) -> None:
    """A process of its own: a store with the shard, and a proxy for each latency, whose addresses it sends."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="photos/train.tar", Body=shard.read_bytes())
    proxies = [Proxy(port) for _ in LATENCIES]
    for proxy, latency in zip(proxies, LATENCIES, strict=True):
        proxy.latency = latency
    pipe.send([proxy.url for proxy in proxies])
    pipe.recv()


def write_shard(folder: Path, count: int, photos: Path | None) -> Path:
    """The JPEGs in one shard, with labels."""
    (folder / "files").mkdir()
    write_files(folder / "files", count, photos)
    with tarfile.open(folder / "train.tar", "w") as tar:
        for number, file in enumerate(sorted((folder / "files").iterdir())):
            tar.add(file, file.name)
            label = tarfile.TarInfo(f"{file.stem}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(b"%d" % (number % 2)))
    return folder / "train.tar"


def epoch(source: Source, workers: int, seed: int) -> float:
    """Images per second of a shuffled pass."""
    whole = 3 * WIDTH * HEIGHT
    stream = Stream(source, lambda image, _: (image,), whole, BATCH, workers, torch.device("cpu"), BadFiles())
    order = np.random.default_rng(seed).permutation(len(source)).reshape(-1, BATCH)
    start = time.perf_counter()
    done = sum(len(images) for (images,) in stream.batches(Task(places, np.zeros((BATCH, 1))) for places in order))
    return round(done / (time.perf_counter() - start), 1)


def measure(what: str, place: str, workers: int, cache: Path, limit: str) -> dict[str, Any]:
    """Opening, and two epochs, with an empty cache of this limit."""
    os.environ["TICO_CACHE"] = str(cache)
    cache_folder.set_limit(limit)
    start = time.perf_counter()
    source = open_training(DataConfig(source=place))
    seconds = round(time.perf_counter() - start, 2)
    rates = [epoch(source, workers, seed) for seed in range(2)]
    start = time.perf_counter()
    open_training(DataConfig(source=place))
    again = round(time.perf_counter() - start, 2)
    return {"what": what, "open_s": seconds, "open_again_s": again, "images_per_second": rates}


def main() -> None:
    """Print one JSON line for the machine and one for each place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400, help=f"A multiple of {BATCH}.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ |= KEYS | {"AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shard = write_shard(folder, arguments.images, arguments.photos)
        pipe, theirs = multiprocessing.Pipe()
        store = multiprocessing.get_context("fork").Process(target=serve, args=(shard, theirs), daemon=True)
        store.start()
        about = {"images": arguments.images, "workers": arguments.workers, "bytes": shard.stat().st_size}
        open_training(DataConfig(source=str(folder / "files"))).fetch(0)  # loads the decoder, which workers inherit
        lines = [{"machine": environment(), "load": os.getloadavg()[0], **about}]
        places = [("file", "", str(shard), "1G")]
        for latency, url in zip(LATENCIES, pipe.recv(), strict=True):
            what = f"store, {latency * 1000:.0f} ms per request"
            places += [(what, url, "s3://bucket/photos/", "1G"), (f"{what}, no cache", url, "s3://bucket/photos/", "0")]
        for number, (what, url, place, limit) in enumerate(places):
            os.environ["AWS_ENDPOINT_URL"] = url
            lines.append(measure(what, place, arguments.workers, folder / f"cache-{number}", limit))
            print(json.dumps(lines[-1]), flush=True)
        pipe.send(None)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
