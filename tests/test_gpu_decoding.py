"""JPEGs decoded by a GPU; on a CPU, torchvision's decoder of many images stands in for it, to the bit."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.decoding import decode
from tico_ssl.data.sources import open_training
from tico_ssl.pipeline import gpu_decoding
from tico_ssl.pipeline import loader as loading
from tico_ssl.pipeline.gpu_decoding import GpuDecoder, gpu_decoder, is_plain, reduced
from tico_ssl.pipeline.loader import Loader
from tico_ssl.runtime.device import choose_device
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.setup import prepare
from tico_ssl.views.executor import Views

CPU = torch.device("cpu")
ROTATED = Image.Exif()
ROTATED[gpu_decoding.ORIENTATION] = 6
UPRIGHT = Image.Exif()
UPRIGHT[gpu_decoding.ORIENTATION] = 1
XMP = b'http://ns.adobe.com/xap/1.0/\0tiff:Orientation="6"'


def picture(number, height=40, width=52):
    random = np.random.default_rng(number)
    coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **settings):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **settings)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JPEGs of all kinds and other formats; two that cannot be read."""
    place = tmp_path_factory.mktemp("photos")
    for number in range(14):
        (place / f"{number:02}.jpg").write_bytes(jpeg(picture(number, 40 + number, 52 - number)))
    (place / "14.jpg").write_bytes(jpeg(picture(14), exif=ROTATED))
    (place / "15.jpg").write_bytes(jpeg(picture(15), exif=UPRIGHT))
    (place / "16.jpg").write_bytes(jpeg(picture(16).convert("CMYK")))
    (place / "17.jpg").write_bytes(jpeg(picture(17).convert("L")))
    (place / "18.jpg").write_bytes(jpeg(picture(18), progressive=True))
    picture(19).save(place / "19.png")
    whole = jpeg(picture(20))
    (place / "20.jpg").write_bytes(whole[: len(whole) // 2])
    (place / "21.jpg").write_bytes(b"not an image")
    for number in range(22, 26):
        (place / f"{number}.jpg").write_bytes(jpeg(picture(number)))
    return place


def source_of(folder, **settings):
    return open_training(DataConfig(source=str(folder), **settings))


def views(size=24):
    return Views(load_recipe("cifar10/tico").views, size, (0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize("kept", [True, False], ids=["all on the GPU", "batch by batch"])
@pytest.mark.parametrize("at_once", [1, 10**9], ids=["one by one", "together"])
def test_batches_are_those_of_worker_processes(folder, kept, at_once, monkeypatch):
    monkeypatch.setattr(loading, "_room", lambda device: 10**9 if kept else 1000)
    monkeypatch.setattr(gpu_decoding, "AT_ONCE", at_once)
    monkeypatch.setattr(gpu_decoding, "BATCH", 7)
    source = source_of(folder)
    decoder = GpuDecoder(source, None, CPU, 3, BadFiles())
    ours, theirs = (
        Loader(source, views(), 8, 1, CPU, bad=decoder.bad, decoder=decoder),
        Loader(source, views(), 8, 1, CPU),
    )
    for mine, expected in zip(ours.iterate(1, 8), theirs.iterate(1, 8), strict=True):
        assert torch.equal(mine.index, expected.index)
        assert all(torch.equal(*pair) for pair in zip(mine.pixels, expected.pixels, strict=True))
        made = [ours.views.make(one.pixels, one.decisions) for one in (mine, expected)]
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True))
    assert (ours._ragged is not None) == kept
    assert {*ours.bad.reasons} == {"20.jpg", "21.jpg"} == {*theirs.bad.reasons}
    assert "GPU" in ours.storage


@pytest.mark.parametrize(
    ("content", "plain"),
    [
        (jpeg(picture(0)), True),
        (jpeg(picture(0), exif=UPRIGHT), True),
        (jpeg(picture(0).convert("L")), True),
        (jpeg(picture(0), exif=ROTATED), False),
        (jpeg(picture(0))[:2] + b"\xff\xe1" + (2 + len(XMP)).to_bytes(2, "big") + XMP + jpeg(picture(0))[2:], False),
        (jpeg(picture(0).convert("CMYK")), False),
        (jpeg(picture(0))[:-300], False),
        (b"\xff\xd8\xff" + bytes(50), False),
        (b"", False),
    ],
)
def test_only_plain_jpegs_go_to_the_gpu(content, plain):
    assert is_plain(content) == plain


def test_a_jpeg_that_the_gpu_refuses_is_decoded_by_the_cpu(folder, monkeypatch):
    source = source_of(folder)
    decoder = GpuDecoder(source, None, CPU, 2, BadFiles())
    usual = decoder._decode

    def refuses(encoded):
        if any(len(one) == len(source.content(3)) for one in encoded):
            raise RuntimeError("nvjpegDecode failed")
        return usual(encoded)

    monkeypatch.setattr(decoder, "_decode", refuses)
    (made,) = decoder.batches([[2, 3, 4]])
    for place, image in zip((2, 3, 4), made.images, strict=True):
        assert torch.equal(image, source.fetch(place))
    assert torch.equal(made.sizes, torch.tensor([image.shape[1:] for image in made.images]).float())
    assert not decoder.bad.reasons


@pytest.mark.parametrize(("side", "expected"), [(15, 15), (31, 31), (32, 16), (63, 32), (64, 16), (128, 16), (300, 38)])
def test_large_images_are_reduced_as_the_cpu_does(side, expected):
    """By the same factors; the average of a square is what a JPEG's reduced decoding approximates."""
    content = jpeg(picture(1, side, side + 9), subsampling=0)
    image = reduced(decode(content), 16)
    by_cpu = decode(content, shorter=16)
    assert image.shape == by_cpu.shape
    assert image.shape[1] == expected
    assert (image.float() - by_cpu.float()).abs().mean() < 2
    assert torch.equal(reduced(image, None), image)


def test_what_it_needs_is_said_in_a_line(folder, tmp_path):
    source = source_of(folder)
    with pytest.raises(UserError, match=r"data\.decoder=gpu needs a CUDA GPU; this is a cpu"):
        gpu_decoder(source, DataConfig(), 3, None, CPU, 1, BadFiles())
    with pytest.raises(UserError, match=r"three channels; backbone\.channels is 4"):
        gpu_decoder(source, DataConfig(), 4, None, torch.device("cuda"), 1, BadFiles())
    np.save(tmp_path / "a.npy", np.zeros((20, 8, 8, 3), np.uint8))
    with pytest.raises(UserError, match="needs files, shards or tables of JPEGs"):
        GpuDecoder(source_of(tmp_path / "a.npy"), None, CPU, 1, BadFiles())
    if choose_device().type == "cpu":
        recipe = load_recipe("photos", {"data.source": str(folder), "data.decoder": "gpu", "data.most_bad": 0.5})
        with pytest.raises(UserError, match="needs a CUDA GPU"):
            prepare(recipe, CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_decodes_nearly_the_same_pixels_and_the_same_in_any_batch(folder):
    device = torch.device("cuda")
    source = source_of(folder)
    decoder = GpuDecoder(source, None, device, 3, BadFiles())
    together = next(decoder.batches([[*range(20)]]))
    alone = [next(decoder.batches([[place]])) for place in range(20)]
    for place, image in enumerate(together.images):
        expected = source.fetch(place)
        assert image.shape == expected.shape
        assert (image.cpu().float() - expected.float()).abs().mean() < 2
        assert torch.equal(image, alone[place].images[0])
