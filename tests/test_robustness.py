"""Corruptions: against the formulas that define them, ordered by severity, and in their effect on a classifier."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.stats import poisson

from tico_ssl import evaluate
from tico_ssl.evaluations import corruptions
from tico_ssl.evaluations._representation.corruption import corrupt, strength
from tico_ssl.evaluations._representation.settings import SEVERITIES, STRENGTHS
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.errors import UserError

SEEDED = ("gaussian-noise", "shot-noise", "impulse-noise")


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(side):
    """Smooth shapes with some noise, of medium brightness: each corruption has something to act on."""
    y, x = np.mgrid[0:side, 0:side] / side
    random = np.random.default_rng(0)
    images = []
    for _ in range(24):
        a, b, c = random.uniform(2, 9, 3)
        waves = np.stack([np.sin(a * x + b * y), np.cos(b * x - c * y), np.sin(c * x * y)])
        images.append(110 + 70 * waves + 12 * random.standard_normal((3, side, side)))
    return torch.from_numpy(np.clip(np.stack(images), 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def pictures():
    return drawn(32)


@pytest.mark.parametrize("side", [32, 64, 96])
@pytest.mark.parametrize("name", STRENGTHS)
def test_more_severe_is_farther_from_the_clean_image(name, side):
    images = drawn(side)
    before = images.clone()
    distances = [float((corrupt(images, name, s, draw()).float() - images).square().mean()) for s in SEVERITIES]
    assert distances[0] > 0
    assert distances == sorted(distances)
    assert len(set(distances)) == 5
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", STRENGTHS)
def test_bytes_stay_bytes_and_the_seed_decides(pictures, name):
    for images in (pictures[:3], pictures[:3, :1], pictures[:2].repeat(1, 2, 1, 1)[:, :5]):  # colour, grey, five bands
        one, again, other = (corrupt(images, name, 4, draw(seed)) for seed in (0, 0, 1))
        assert one.dtype == torch.uint8
        assert one.shape == images.shape
        assert torch.equal(one, again)
        assert torch.equal(one, other) == (name not in SEEDED)


def test_strengths_are_those_of_the_nearest_size_that_is_defined():
    assert [strength("gaussian-noise", s, 32) for s in SEVERITIES] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert [strength("jpeg", s, 64) for s in SEVERITIES] == [65, 58, 50, 40, 25]
    assert [strength("pixelate", s, 224) for s in SEVERITIES] == [0.6, 0.5, 0.4, 0.3, 0.25]
    assert strength("contrast", 1, 16) == strength("contrast", 1, 32) == 0.75
    assert strength("contrast", 1, 48) == strength("contrast", 1, 384) == 0.4
    with pytest.raises(UserError, match="no corruption is called 'jpg'; did you mean 'jpeg'"):
        strength("jpg", 1, 32)


def test_noise_has_the_deviation_that_it_should_have():
    grey = torch.full((8, 3, 64, 64), 128, dtype=torch.uint8)
    value = 128 / 255
    for severity in (1, 3):
        noisy = corrupt(grey, "gaussian-noise", severity, draw()).double() / 255
        assert float(noisy.std()) == pytest.approx(strength("gaussian-noise", severity, 64), rel=0.01)
        assert float(noisy.mean()) == pytest.approx(value, abs=1e-3)
        shot = corrupt(grey, "shot-noise", severity, draw()).double() / 255
        photons = strength("shot-noise", severity, 64)
        counts = np.arange(1000)
        rounded = np.clip(np.round(counts / photons * 255), 0, 255) / 255
        variance = np.cov(rounded, aweights=poisson.pmf(counts, value * photons), bias=True)
        assert float(shot.mean()) == pytest.approx(value, abs=2e-3)
        assert float(shot.var()) == pytest.approx(float(variance), rel=0.02)
        salted = corrupt(grey, "impulse-noise", severity, draw())
        share = strength("impulse-noise", severity, 64)
        assert float((salted == 255).double().mean()) == pytest.approx(share / 2, rel=0.1)
        assert float((salted == 0).double().mean()) == pytest.approx(share / 2, rel=0.1)
        assert set(salted.unique().tolist()) == {0, 128, 255}


def test_blur_is_the_gaussian_filter(pictures):
    for severity in SEVERITIES:
        sigma = strength("gaussian-blur", severity, 32)
        expected = gaussian_filter(pictures.double().numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4.0)
        found = corrupt(pictures, "gaussian-blur", severity, draw()).double().numpy()
        assert np.abs(found - expected).max() <= 0.5 + 1e-3  # rounding to bytes


def test_contrast_and_brightness_by_hand():
    image = torch.tensor([[[[100, 200]], [[50, 50]], [[0, 0]]]], dtype=torch.uint8)  # one row of two pixels
    paler = corrupt(image, "contrast", 2, draw())  # half as far from the mean of each channel
    assert paler.squeeze().tolist() == [[125, 175], [50, 50], [0, 0]]
    brighter = corrupt(image, "brightness", 2, draw())  # the largest channel gains a tenth of 255, the others in step
    assert brighter[0, 0, 0].tolist() == [126, 226]
    assert brighter[0, 1, 0].tolist() == [round(50 * 125.5 / 100), round(50 * 225.5 / 200)]
    black = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    assert (corrupt(black, "brightness", 5, draw()) == round(0.3 * 255)).all()


def test_brightness_keeps_hue_and_saturation(pictures):
    from colorsys import rgb_to_hsv

    found = corrupt(pictures, "brightness", 3, draw())
    for place in range(0, 32, 5):
        before, after = (rgb_to_hsv(*(i[0, :, place, place].double() / 255).tolist()) for i in (pictures, found))
        assert after[2] == pytest.approx(min(1, before[2] + 0.15), abs=3e-3)
        assert after[1] == pytest.approx(before[1], abs=0.02)


def test_jpeg_and_pixels_are_pillows(pictures):
    picture = Image.fromarray(pictures[0].permute(1, 2, 0).numpy())
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=58)
    expected = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
    assert torch.equal(corrupt(pictures, "jpeg", 3, draw())[0], expected)
    box = Image.Resampling.BOX
    small = picture.resize((20, 20), box).resize((32, 32), box)
    assert torch.equal(corrupt(pictures, "pixelate", 5, draw())[0], torch.from_numpy(np.array(small)).permute(2, 0, 1))


# ---------------------------------------------------------------------------------------------------- on a run


def test_the_summary_is_the_mean_of_means_and_what_is_lost_of_the_clean_accuracy():
    def right(count: int) -> torch.Tensor:
        return torch.arange(10) < count

    cases = {"clean": [right(8)], "jpeg": [right(6), right(4)], "contrast": [right(3), right(3)]}
    expected = {"clean": 80.0, "corrupted": 40.0, "lost": 50.0, "jpeg": 50.0, "contrast": 30.0}
    assert corruptions._summary("knn", cases) == pytest.approx({f"knn_{name}": x for name, x in expected.items()})


def test_corruptions_on_a_run(run):
    overrides = {"images": 60, "kinds": ["gaussian-noise", "contrast"], "iterations": 20}
    first, second = (evaluate(run.folder, "corruptions", overrides=overrides) for _ in range(2))
    assert first.numbers == second.numbers
    assert list(first.numbers) == ["trained", "untrained"]
    assert first.data["tested"] == 60
    for judge in ("knn", "linear"):
        levels = first.data["severities"]["trained"][judge]
        assert [len(levels[kind]) for kind in ("clean", "gaussian-noise", "contrast")] == [1, 5, 5]
        assert first.numbers["trained"][f"{judge}_contrast"] == pytest.approx(np.mean(levels["contrast"]))
    assert open_run(run.folder).results()[-1]["protocol"] == "corruptions"


def test_clean_images_are_judged_as_knn_judges_them(run):
    """All test images, and the same k and temperature: the clean accuracy is that of the kNN protocol."""
    clean = evaluate(run.folder, "corruptions", overrides={"images": 5000, "kinds": ["contrast"], "iterations": 2})
    expected = evaluate(run.folder, "knn").numbers["trained"]["top1_k20"]
    assert clean.numbers["trained"]["knn_clean"] == pytest.approx(expected, abs=0.11)


def test_a_misspelt_corruption_is_said_at_once(run):
    with pytest.raises(UserError, match="no corruption is called 'fog'"):
        evaluate(run.folder, "corruptions", overrides={"kinds": ["fog"]})


def test_retrieval_and_clustering_on_a_run(run):
    for protocol in ("retrieval", "clustering"):
        result = evaluate(run.folder, protocol)
        assert list(result.numbers) == ["trained", "untrained", "pixels"]
        assert all(-1 <= value <= 100 for numbers in result.numbers.values() for value in numbers.values())
