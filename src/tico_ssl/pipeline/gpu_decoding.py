"""JPEGs decoded by the GPU (nvJPEG): threads read files and the GPU decodes them, some batches ahead of training.

Its pixels differ from those of the CPU's decoders by a few levels here and there, so a run keeps its decoder. What is
not a plain JPEG is decoded by the CPU as always: other formats, four components, rotated or cut files.
"""

import io
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.bad_files import BadFiles, in_order, readable
from tico_ssl.data.decoding import MOST_PIXELS, BadImage
from tico_ssl.data.opening import open_picture
from tico_ssl.data.plain import ORIENTATION, jpeg_frame, jpeg_notes
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError

AHEAD = 3  # batches that are read or decoded while another one is used
DECODING = 2  # threads for it: one reads files while the GPU decodes those of the other
AT_ONCE = 2**29  # bytes of images that are decoded together, before those that are too large are reduced
TAIL = 64  # last bytes of a file, in which a JPEG that is not cut has its end
BATCH = 256  # images, when all are decoded

Decode = Callable[[list[Tensor]], list[Tensor]]
"""From encoded JPEGs to RGB images (3, H, W) on the device."""


class Decoded(NamedTuple):
    """Images on the device, and their heights and widths on the CPU."""

    images: Ragged
    sizes: Tensor


class GpuDecoder:
    """Decodes the images of a source on a device. Images of at least twice `shorter` pixels along their shorter side
    are reduced as JPEG decoders on the CPU reduce them: to 1/2, 1/4 or 1/8; None: they stay whole."""

    name = "JPEGs decoded by the GPU"

    def __init__(self, source: Source, shorter: int | None, device: torch.device, threads: int, bad: BadFiles) -> None:
        if source.content is None:
            raise UserError(f"{source.name}: data.decoder=gpu needs files, shards or tables of JPEGs")
        self.source, self.shorter, self.device, self.threads, self.bad = source, shorter, device, threads, bad
        self._decode = jpeg_decoder_on(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # beside that of training

    def batches(self, batches: Iterable[Sequence[int]]) -> Generator[Decoded]:
        """The images at these indices, one batch after the other; in place of a bad image the next that is not."""
        with ThreadPoolExecutor(self.threads) as reading, ThreadPoolExecutor(DECODING) as decoding:
            for made, ready in in_order(decoding, partial(self._batch, reading), batches, AHEAD):
                if ready is not None:
                    now = torch.cuda.current_stream(self.device)
                    now.wait_event(ready)
                    for part in (made.images.memory, made.images.begins, made.images.sizes):
                        part.record_stream(now)  # it was allocated for another stream
                yield made

    def everything(self, room: int) -> Decoded | None:
        """All images, or None if they take more than `room` bytes."""
        places, parts, used = iter(range(len(self.source))), [], 0
        with closing(self.batches(iter(lambda: [*islice(places, BATCH)], []))) as batches:
            for part in batches:
                used += len(part.images.memory)
                if used > room:
                    return None
                parts.append(part)
        return Decoded(joined([part.images for part in parts]), torch.cat([part.sizes for part in parts]))

    def _batch(self, reading: ThreadPoolExecutor, places: Sequence[int]) -> tuple[Decoded, torch.cuda.Event | None]:
        items = [*reading.map(self._read, places)]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            images: list[Tensor] = []
            for group in _groups(items):
                images += self._decoded(items[group], places[group])
            made = Ragged.of(images)
            decoded = Decoded(made.to(self.device), made.sizes.float())
            return decoded, None if self._stream is None else self._stream.record_event()

    def _read(self, place: int) -> Tensor:
        """The bytes of a plain JPEG (n), or the pixels (C, H, W) of what is none."""
        assert self.source.content is not None
        try:
            content = self.source.content(place)
        except BadImage:
            return readable(self.source, place, self.bad)
        if is_plain(content):
            return torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return readable(self.source, place, self.bad)

    def _decoded(self, items: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
        """Images (C, H, W) on the device."""
        encoded = [item for item in items if item.ndim == 1]
        try:
            by_gpu = iter(self._decode(encoded) if encoded else [])
            found = [next(by_gpu) if item.ndim == 1 else item.to(self.device) for item in items]
        except RuntimeError:  # of any of them; decoders do not say of which
            found = [self._alone(item, place) for item, place in zip(items, places, strict=True)]
        return [reduced(image, self.shorter) for image in found]

    def _alone(self, item: Tensor, place: int) -> Tensor:
        if item.ndim == 1:
            try:
                return self._decode([item])[0]
            except RuntimeError:
                item = readable(self.source, place, self.bad)
        return item.to(self.device)


def gpu_decoder(
    source: Source,
    data: DataConfig,
    channels: int,
    shorter: int | None,
    device: torch.device,
    threads: int,
    bad: BadFiles,
) -> GpuDecoder:
    """The decoder of a recipe that asks for one. `shorter` is the shorter side, in pixels, that its crops need."""
    if device.type != "cuda":
        raise UserError(f"data.decoder=gpu needs a CUDA GPU; this is a {device.type}")
    if channels != 3:
        raise UserError(f"data.decoder=gpu decodes three channels; backbone.channels is {channels}")
    return GpuDecoder(source, shorter if data.reduced_decoding else None, device, threads, bad)


def is_plain(content: bytes) -> bool:
    """Whether bytes are a whole JPEG of one or three components that is not rotated."""
    frame = jpeg_frame(content)
    if frame is None or frame[2] not in (1, 3) or frame[0] * frame[1] > MOST_PIXELS:
        return False
    if b"\xff\xd9" not in content[-TAIL:]:
        return False
    if not jpeg_notes(content):
        return True
    try:
        with open_picture(io.BytesIO(content)) as image:
            return bool(image.getexif().get(ORIENTATION, 1) == 1)
    except Exception:  # of many kinds; the CPU's decoder tells what is wrong
        return False


def reduced(image: Tensor, shorter: int | None) -> Tensor:
    """An image averaged over squares of 2, 4 or 8 pixels, if `shorter` pixels remain."""
    factor = next((some for some in (8, 4, 2) if shorter is not None and min(image.shape[1:]) >= some * shorter), 1)
    if factor == 1:
        return image
    means = F.avg_pool2d(image[None].float(), factor, ceil_mode=True, count_include_pad=False)
    return means[0].round().to(torch.uint8)


def joined(parts: Sequence[Ragged]) -> Ragged:
    """All images of some batches as one."""
    lengths = [len(part.memory) for part in parts]
    starts = [sum(lengths[:number]) for number in range(len(parts))]
    return Ragged(
        torch.cat([part.memory for part in parts]),
        torch.cat([part.begins + start for part, start in zip(parts, starts, strict=True)]),
        torch.cat([part.sizes for part in parts]),
        parts[0].channels,
        max(part.largest for part in parts),
    )


def jpeg_decoder_on(device: torch.device) -> Decode:
    """TorchCodec's decoder if it is installed, else torchvision's."""
    try:
        from torchcodec.decoders import decode_jpeg as newer  # from 0.16 on

        return lambda encoded: newer(encoded, mode="RGB", device=device)
    except Exception:  # it is not there, or does not fit to this torch
        pass
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError as error:
        raise UserError("data.decoder=gpu needs torchcodec (`pip install torchcodec`)") from error
    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities of TorchVision")
    return lambda encoded: decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)


def _groups(items: Sequence[Tensor]) -> Iterator[slice]:
    """Items that are decoded together, so that images that are reduced afterwards are not in memory all at once."""
    begin, size = 0, 0
    for number, item in enumerate(items):
        size += _bytes(item)
        if size >= AT_ONCE:
            yield slice(begin, number + 1)
            begin, size = number + 1, 0
    if begin < len(items):
        yield slice(begin, len(items))


def _bytes(item: Tensor) -> int:
    """Of an image, decoded."""
    if item.ndim > 1:
        return item.numel()
    frame = jpeg_frame(item.numpy().tobytes())
    assert frame is not None
    return 3 * frame[0] * frame[1]
