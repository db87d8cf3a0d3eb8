"""Each pixel operation against torchvision: on PIL images within 8-bit rounding, on float tensors closely."""

from itertools import permutations

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import InterpolationMode

from tico_ssl.config.views import ViewPolicy
from tico_ssl.views import executor, operations
from tico_ssl.views.executor import Views

# PIL rounds its result to eight bits, and where it works in two passes also what lies between them.
PIL_TOLERANCE = 2 / 255 + 1e-6  # two steps of eight bits
FLOAT_TOLERANCE = 1e-5
few_examples = settings(max_examples=25, deadline=None)
interpolations = pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
seeds = st.integers(0, 2**16)


def make_images(seed: int, n: int = 4, rows: int = 24, columns: int = 20) -> Tensor:
    """Byte images: noise with plenty of black and white in the even samples, smooth colours in the odd ones."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(n, 3, rows, columns, generator=generator) * 1.6 - 0.3
    coarse = torch.rand(n, 3, 3, 3, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (rows, columns), mode="bilinear", align_corners=True)
    odd = (torch.arange(n) % 2 == 1).view(-1, 1, 1, 1)
    return torch.where(odd, smooth, noise).clamp(0, 1).mul(255).round().to(torch.uint8)


def uniform(seed: int, n: int, low: float, high: float) -> Tensor:
    return torch.empty(n).uniform_(low, high, generator=torch.Generator().manual_seed(seed + 1))


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def on_pil(function, images: Tensor, *parameters: Tensor) -> Tensor:
    """Apply a torchvision function to each byte image as a PIL image, with its own parameters."""
    rows = zip(images, *(p.tolist() for p in parameters), strict=True)
    return torch.stack([from_pil(function(to_pil(image), *row)) for image, *row in rows])


def on_floats(function, images: Tensor, *parameters: Tensor) -> Tensor:
    rows = zip(images, *(p.tolist() for p in parameters), strict=True)
    return torch.stack([function(image, *row) for image, *row in rows])


def variance(profile: Tensor) -> float:
    """Of a distribution over pixels (1, length)."""
    weights = profile[0].double() / profile.sum()
    places = torch.arange(len(weights), dtype=torch.float64)
    return float(weights @ (places - weights @ places).square())


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= tolerance


def boxes(seed: int, n: int, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Top, left, height, width and flip, inside the image."""
    draw = np.random.default_rng(seed)
    height, width = draw.integers(1, rows + 1, n), draw.integers(1, columns + 1, n)
    top, left = draw.integers(0, rows - height + 1), draw.integers(0, columns - width + 1)
    return tuple(torch.as_tensor(p) for p in (top, left, height, width, draw.integers(0, 2, n)))


def crop_on_pil(images, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, size: int) -> Tensor:
    """Crop and resize with PIL, horizontally and then vertically.

    The two steps are what one resize does, except that Pillow 13 and later begin with the height where it shrinks much
    more than the width. The order shows where the cubic overshoots black or white and is clipped in between.
    """
    crops = []
    for image, y, x, h, w, mirrored in zip(
        images, *(p.tolist() for p in (top, left, height, width, flip)), strict=True
    ):
        crop = to_pil(image).crop((x, y, x + w, y + h))
        crop = crop.resize((size, h), Image.Resampling.BICUBIC).resize((size, size), Image.Resampling.BICUBIC)
        crops.append(from_pil(reference.hflip(crop) if mirrored else crop))
    return torch.stack(crops)


class TestResizedCrop:
    @settings(max_examples=80, deadline=None)
    @given(seeds, st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
    def test_equals_pil_for_any_box_and_size(self, seed, rows, columns, size):
        images, box = make_images(seed, 4, rows, columns), boxes(seed, 4, rows, columns)
        actual = operations.resized_crop(images, *box, size)
        assert actual.dtype == torch.float32
        assert actual.min() >= 0
        assert actual.max() <= 1
        assert_close(actual, crop_on_pil(images, *box, size), PIL_TOLERANCE)

    @pytest.mark.parametrize(("side", "size"), [(32, 32), (256, 96), (40, 224)])
    def test_equals_pil_at_usual_sizes(self, side, size):
        images, box = make_images(0, 4, side, side), boxes(0, 4, side, side)
        assert_close(operations.resized_crop(images, *box, size), crop_on_pil(images, *box, size), PIL_TOLERANCE)

    @few_examples
    @given(seeds, st.integers(2, 60), st.integers(2, 60), st.integers(1, 40))
    def test_smooth_images_equal_torchvision(self, seed, rows, columns, size):
        images = make_images(seed, 6, rows, columns)[1::2] // 2 + 64
        *box, _ = boxes(seed, 3, rows, columns)
        expected = on_pil(
            lambda image, *row: reference.resized_crop(image, *row, [size, size], InterpolationMode.BICUBIC),
            images,
            *box,
        )
        assert_close(operations.resized_crop(images, *box, torch.zeros(3), size), expected, PIL_TOLERANCE)

    @interpolations
    @pytest.mark.parametrize(("rows", "columns", "size"), [(24, 20, 15), (32, 32, 32), (256, 200, 96), (100, 70, 224)])
    def test_equals_torchvision_on_tensors(self, interpolation, rows, columns, size):
        """Of middling values, on which the cubic does not overshoot: torchvision does not clip floats."""
        images = make_images(5, 6, rows, columns) // 2 + 64
        *box, _ = boxes(5, 6, rows, columns)
        mode = InterpolationMode(interpolation)

        def resized(image, *row):
            return reference.resized_crop(image, *row, [size, size], mode, antialias=True)

        never = torch.zeros(6)
        from_floats = operations.resized_crop(images / 255, *box, never, size, interpolation)
        assert_close(from_floats, on_floats(resized, images / 255, *box), FLOAT_TOLERANCE)
        from_bytes = operations.resized_crop(images, *box, never, size, interpolation)
        assert_close(from_bytes, on_floats(resized, images, *box) / 255, PIL_TOLERANCE)

    @few_examples
    @given(seeds, st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
    def test_bilinear_equals_pil_for_any_box_and_size(self, seed, rows, columns, size):
        images, (*box, _) = make_images(seed, 4, rows, columns), boxes(seed, 4, rows, columns)
        expected = on_pil(
            lambda image, *row: reference.resized_crop(image, *row, [size, size], InterpolationMode.BILINEAR),
            images,
            *box,
        )
        assert_close(operations.resized_crop(images, *box, torch.zeros(4), size, "bilinear"), expected, PIL_TOLERANCE)

    @interpolations
    def test_whole_image_at_its_own_size_is_unchanged(self, interpolation):
        images = make_images(1, 4, 16, 16)
        zero, side = torch.zeros(4, dtype=torch.long), torch.full((4,), 16)
        actual = operations.resized_crop(images, zero, zero, side, side, zero, 16, interpolation)
        assert_close(actual, images / 255, 1e-6)

    def test_flip_mirrors_the_crop(self):
        images, (*box, _) = make_images(2, 4), boxes(2, 4, 24, 20)
        plain = operations.resized_crop(images, *box, torch.zeros(4, dtype=torch.bool), 15)
        mirrored = operations.resized_crop(images, *box, torch.ones(4, dtype=torch.bool), 15)
        assert_close(mirrored, plain.flip(3), 1e-6)

    def test_bytes_and_floats_agree(self):
        """Bytes on a CPU take torch's eight-bit kernel, floats the matrix products that a GPU takes."""
        for rows, columns, size in ((24, 20, 15), (32, 32, 32), (256, 200, 96), (40, 40, 128)):
            images, box = make_images(3, 4, rows, columns), boxes(3, 4, rows, columns)
            from_bytes = operations.resized_crop(images, *box, size)
            assert_close(from_bytes, operations.resized_crop(images / 255, *box, size), PIL_TOLERANCE)

    def test_sequence_of_one_size_equals_the_batch(self):
        images, box = make_images(4), boxes(4, 4, 24, 20)
        sequence = operations.resized_crop(list(images), *box, 16)
        assert_close(sequence, operations.resized_crop(images, *box, 16), 1e-6)

    def test_sequence_of_different_sizes_equals_pil(self):
        sizes = [(17, 40), (64, 23), (9, 9), (50, 31)]
        images = [make_images(i, 1, *size)[0] for i, size in enumerate(sizes)]
        parts = [boxes(i, 1, *size) for i, size in enumerate(sizes)]
        box = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        assert_close(operations.resized_crop(images, *box, 20), crop_on_pil(images, *box, 20), PIL_TOLERANCE)

    @few_examples
    @given(seeds, st.integers(1, 50), st.integers(1, 50))
    def test_constant_image_stays_constant(self, seed, side, size):
        images = uniform(seed, 3, 0, 1).view(-1, 1, 1, 1).expand(3, 2, side, side)
        actual = operations.resized_crop(images, *boxes(seed, 3, side, side), size)
        assert_close(actual, images[:, :, :1, :1].expand_as(actual), 1e-5)

    def test_only_pixels_inside_the_box_count(self):
        images = torch.ones(1, 3, 30, 30)
        images[:, :, 10:20, 5:25] = 0
        box = [torch.tensor([value]) for value in (10, 5, 10, 20, 0)]
        assert operations.resized_crop(images, *box, 7).abs().max() == 0


class TestColour:
    @few_examples
    @given(seeds)
    def test_blends_equal_pil_and_float_reference(self, seed):
        images, factor = make_images(seed), uniform(seed, 4, 0, 2)
        for ours, theirs in (
            (operations.adjust_brightness, reference.adjust_brightness),
            (operations.adjust_contrast, reference.adjust_contrast),
            (operations.adjust_saturation, reference.adjust_saturation),
        ):
            assert_close(ours(images / 255, factor), on_pil(theirs, images, factor), PIL_TOLERANCE)
            assert_close(ours(images / 255, factor), on_floats(theirs, images / 255, factor), FLOAT_TOLERANCE)

    @few_examples
    @given(seeds)
    def test_hue_equals_float_reference(self, seed):
        images, shift = make_images(seed) / 255, uniform(seed, 4, -0.5, 0.5)
        assert_close(operations.adjust_hue(images, shift), on_floats(reference.adjust_hue, images, shift), 1e-5)

    @pytest.mark.parametrize("shift", [-0.5, -1 / 3, 0.0, 1 / 6, 0.5])
    def test_hue_at_special_colours_and_shifts(self, shift):
        levels = torch.tensor([0, 0.25, 1.0])
        image = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 9, 3)
        expected = reference.adjust_hue(image, shift)
        assert_close(operations.adjust_hue(image, torch.tensor([shift])), expected, FLOAT_TOLERANCE)

    @few_examples
    @given(seeds)
    def test_hue_equals_pil(self, seed):
        """PIL rounds the hue down to 8 bits, cuts the shift to whole steps, and wraps at 256 a circle of 255 steps.

        Each of the three can cost one step, which moves a channel by six times the chroma: the general tolerance can
        hold for grey pixels only, and grows with the chroma.
        """
        images, shift = make_images(seed), uniform(seed, 4, -0.5, 0.5)
        error = (operations.adjust_hue(images / 255, shift) - on_pil(reference.adjust_hue, images, shift)).abs()
        chroma = (images.amax(1, keepdim=True) - images.amin(1, keepdim=True)) / 255
        assert (error <= PIL_TOLERANCE + 3 * 6 * chroma / 255).all()

    @few_examples
    @given(seeds)
    def test_greyscale_equals_pil(self, seed):
        images = make_images(seed)
        actual = operations.greyscale(images / 255, torch.ones(4, dtype=torch.bool))
        assert_close(actual, on_pil(lambda image: reference.to_grayscale(image, 3), images), PIL_TOLERANCE)

    @few_examples
    @given(seeds)
    def test_solarise_equals_pil(self, seed):
        images = make_images(seed)
        actual = operations.solarise(images / 255, torch.ones(4, dtype=torch.bool))
        assert_close(actual, on_pil(lambda image: reference.solarize(image, 128), images), 1e-6)

    def test_solarise_threshold(self):
        image = torch.tensor([0.0, 0.3, 0.31, 1.0]).view(1, 1, 2, 2)
        actual = operations.solarise(image, torch.ones(1), threshold=0.31)
        assert torch.allclose(actual.flatten(), torch.tensor([0.0, 0.3, 0.69, 0.0]))

    def test_normalise(self):
        images, mean, std = make_images(0) / 255, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
        expected = reference.normalize(images, mean, std)
        assert_close(operations.normalise(images, mean, std), expected, 1e-6)
        assert_close(operations.normalise(images, torch.tensor(mean), torch.tensor(std)), expected, 1e-6)


TORCHVISION_KINDS = (
    reference.adjust_brightness,
    reference.adjust_contrast,
    reference.adjust_saturation,
    reference.adjust_hue,
)
OUR_KINDS = (
    operations.adjust_brightness,
    operations.adjust_contrast,
    operations.adjust_saturation,
    operations.adjust_hue,
)


def jitter_reference(image, *parameters_and_order):
    *parameters, order = parameters_and_order
    for kind in order:
        image = TORCHVISION_KINDS[kind](image, parameters[kind])
    return image


def jitter_parameters(seed: int, n: int, strength: float = 1.0) -> tuple[Tensor, ...]:
    factors = (uniform(seed + i, n, 1 - 0.4 * strength, 1 + 0.4 * strength) for i in range(3))
    return (*factors, uniform(seed + 3, n, -0.1, 0.1))


class TestColourJitter:
    orders = torch.tensor(list(permutations(range(4))))

    @settings(max_examples=10, deadline=None)
    @given(seeds)
    def test_every_order_equals_float_reference(self, seed):
        images, parameters = make_images(seed, 24) / 255, jitter_parameters(seed, 24, 2.0)
        actual = operations.colour_jitter(images, *parameters, self.orders, torch.ones(24, dtype=torch.bool))
        assert_close(actual, on_floats(jitter_reference, images, *parameters, self.orders), 2e-5)

    def test_every_order_equals_the_single_operations_in_turn(self):
        images, parameters = make_images(5, 24) / 255, jitter_parameters(5, 24)
        actual = operations.colour_jitter(images, *parameters, self.orders, torch.ones(24))
        for i, order in enumerate(self.orders.tolist()):
            expected = images[i : i + 1]
            for kind in order:
                expected = OUR_KINDS[kind](expected, parameters[kind][i : i + 1])
            assert_close(actual[i : i + 1], expected, 1e-6)

    def test_a_sample_alone_is_as_in_the_batch(self):
        """On a CPU it goes through its own order only, in the batch through all blends there are."""
        images, parameters = make_images(7, 24) / 255, jitter_parameters(7, 24)
        arguments = (images, *parameters, self.orders, torch.arange(24) % 3 > 0)
        batch = operations.colour_jitter(*arguments)
        for i in range(24):
            assert_close(operations.colour_jitter(*(a[i : i + 1] for a in arguments)), batch[i : i + 1], 1e-6)

    def test_every_order_stays_near_pil(self):
        """PIL's blends round down, half a level each on average, so the mean error is about 1.5 levels by itself.

        Later operations amplify what earlier ones rounded, most of all the 8-bit hue (see above), so a bound for every
        single pixel is given only for weak colours, of which a step of that hue moves no channel by over a level.
        """
        images, parameters = make_images(6, 24), jitter_parameters(6, 24)
        actual = operations.colour_jitter(images / 255, *parameters, self.orders, torch.ones(24))
        error = (actual - on_pil(jitter_reference, images, *parameters, self.orders)).abs()
        weak = actual.amax(1, keepdim=True) - actual.amin(1, keepdim=True) < 1 / 6
        assert error.mean() < 2 / 255
        assert error[weak.expand_as(error)].max() < 8 / 255


class TestGaussianBlur:
    @pytest.mark.parametrize(("side", "tolerance"), [(14, 0.02), (32, 0.001), (224, 0.001)])
    @pytest.mark.parametrize("sigma", [0.8, 1.0, 1.5, 2.0])
    def test_the_full_kernel_blurs_by_its_standard_deviation(self, side, tolerance, sigma):
        """The variance of a blurred impulse is sigma^2, less 0.1 % beyond the kernel; 14 pixels reflect its tails."""
        impulse = torch.zeros(1, 3, side, side)
        impulse[..., side // 2, side // 2] = 1
        kernel = operations.full_blur_kernel(side, 2.0)
        blurred = operations.gaussian_blur(impulse, torch.tensor([sigma]), torch.ones(1), kernel)
        for axis in (2, 3):
            assert variance(blurred[:, 0].sum(dim=axis - 1)) == pytest.approx(sigma**2, rel=tolerance)

    @pytest.mark.parametrize(("side", "share"), [(14, 0.0), (32, 0.16), (224, 1.0)])
    def test_the_tenth_of_a_small_view_hardly_blurs(self, side, share):
        """Of sigma 2: three taps have a variance of 2w / (1 + 2w) = 0.64 with w = exp(-1/8), one has none."""
        impulse = torch.zeros(1, 3, side, side)
        impulse[..., side // 2, side // 2] = 1
        blurred = operations.gaussian_blur(impulse, torch.tensor([2.0]), torch.ones(1))
        assert variance(blurred[:, 0].sum(dim=1)) / 4 == pytest.approx(share, abs=2e-3)

    @pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0])
    def test_the_full_kernel_is_near_pillows_filter(self, sigma):
        """Which approximates a Gaussian by box filters: within six steps of eight bits, and the edges differ."""
        images, sigmas = make_images(2, 8, 32, 32), torch.full((8,), sigma)
        expected = on_pil(lambda image, s: image.filter(ImageFilter.GaussianBlur(s)), images, sigmas)
        kernel = operations.full_blur_kernel(32, 2.0)
        actual = operations.gaussian_blur(images / 255, sigmas, torch.ones(8), kernel)
        assert_close(actual[..., 8:-8, 8:-8], expected[..., 8:-8, 8:-8], 6 / 255)

    @pytest.mark.parametrize(("side", "kernel"), [(224, 17), (32, 17), (14, 17), (9, 17), (8, 15), (1, 1)])
    def test_the_full_kernel_is_as_wide_as_a_view_can_be_reflected(self, side, kernel):
        assert operations.full_blur_kernel(side, 2.0) == kernel
        images = make_images(3, 2, side, side) / 255
        assert operations.gaussian_blur(images, torch.full((2,), 2.0), torch.ones(2), kernel).isfinite().all()

    @few_examples
    @given(seeds, st.integers(3, 50), st.integers(3, 50), st.integers(0, 11))
    def test_equals_float_reference(self, seed, rows, columns, radius):
        kernel_size = 2 * min(radius, min(rows, columns) - 1) + 1
        images, sigma = make_images(seed, 4, rows, columns) / 255, uniform(seed, 4, 0.1, 2.0)
        actual = operations.gaussian_blur(images, sigma, torch.ones(4), kernel_size)
        expected = on_floats(lambda x, s: reference.gaussian_blur(x, kernel_size, s), images, sigma)
        assert_close(actual, expected, FLOAT_TOLERANCE)

    def test_equals_reference_over_several_blocks(self):
        images, sigma = make_images(0, 2, 100, 70) / 255, torch.tensor([0.4, 2.0])
        expected = on_floats(lambda x, s: reference.gaussian_blur(x, 23, s), images, sigma)
        assert_close(operations.gaussian_blur(images, sigma, torch.ones(2), 23), expected, FLOAT_TOLERANCE)

    def test_equals_pil(self):
        images, sigma = make_images(1), uniform(1, 4, 0.1, 2.0)
        expected = on_pil(lambda image, s: reference.gaussian_blur(image, 9, s), images, sigma)
        assert_close(operations.gaussian_blur(images / 255, sigma, torch.ones(4), 9), expected, PIL_TOLERANCE)

    @few_examples
    @given(seeds, st.integers(12, 40))
    def test_constant_image_stays_constant(self, seed, side):
        images = uniform(seed, 3, 0, 1).view(-1, 1, 1, 1).expand(3, 3, side, side)
        actual = operations.gaussian_blur(images, uniform(seed, 3, 0.1, 3), torch.ones(3), 23)
        assert_close(actual, images, FLOAT_TOLERANCE)


def chain(images: Tensor, box: tuple[Tensor, ...], factor: Tensor, order: Tensor, apply: Tensor) -> Tensor:
    """Every public operation, one after another."""
    x = operations.resized_crop(images, *box, 16)
    for adjust in OUR_KINDS[:3]:
        x = adjust(x, factor)
    x = operations.adjust_hue(x, factor - 1)
    x = operations.colour_jitter(x, factor, factor, factor, factor - 1, order, apply)
    x = operations.greyscale(x, apply)
    x = operations.gaussian_blur(x, factor, apply, 5)
    x = operations.solarise(x, apply)
    return operations.normalise(x, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def chain_arguments() -> list:
    order = torch.tensor(list(permutations(range(4))))[::3]
    return [make_images(7, 8), boxes(7, 8, 24, 20), uniform(7, 8, 0.6, 1.4), order, torch.arange(8) % 2 == 0]


def moved(arguments: list, device: str) -> list:
    return [tuple(a.to(device) for a in x) if isinstance(x, tuple) else x.to(device) for x in arguments]


class TestContract:
    apply = torch.tensor([True, False, False, True])
    masked = pytest.mark.parametrize(
        "operation",
        [
            lambda x, apply: operations.colour_jitter(
                x, *jitter_parameters(8, 4), torch.tensor([[3, 1, 0, 2]] * 4), apply
            ),
            operations.greyscale,
            lambda x, apply: operations.gaussian_blur(x, torch.where(apply.bool(), 1.0, 0.0), apply, 5),
            operations.solarise,
        ],
        ids=["colour_jitter", "greyscale", "gaussian_blur", "solarise"],
    )

    @masked
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8])
    def test_mask_leaves_the_others_unchanged_to_the_bit(self, operation, dtype):
        images = make_images(8) / 255
        before = images.clone()
        actual = operation(images, self.apply.to(dtype))
        assert torch.equal(images, before), "the input must not be modified"
        assert torch.equal(actual[~self.apply], images[~self.apply])
        assert all(not torch.equal(a, x) for a, x in zip(actual[self.apply], images[self.apply], strict=True))

    @masked
    def test_samples_do_not_influence_each_other(self, operation):
        images, everyone = make_images(9) / 255, torch.ones(4, dtype=torch.bool)
        swapped = images.clone()
        swapped[1:] = 1 - swapped[1:]
        assert_close(operation(images, everyone)[:1], operation(swapped, everyone)[:1], 1e-6)

    @masked
    def test_with_no_sample_chosen_all_are_unchanged_to_the_bit(self, operation):
        images = make_images(10) / 255
        assert torch.equal(operation(images, torch.zeros(4)), images)

    def test_inputs_are_not_modified(self):
        arguments = chain_arguments()
        images = arguments[0] / 255
        before = images.clone()
        for adjust in OUR_KINDS:
            adjust(images, arguments[2])
        operations.normalise(images, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
        operations.resized_crop(images, *arguments[1], 9)
        assert torch.equal(images, before)

    def test_no_value_is_read_on_the_host(self):
        """Tensors without data can go through only if neither control flow nor shapes depend on values."""
        assert chain(*moved(chain_arguments(), "meta")).shape == (8, 3, 16, 16)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_captured_graph_equals_the_cpu(self):
        arguments = chain_arguments()
        on_gpu = moved(arguments, "cuda")
        chain(*on_gpu)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = chain(*on_gpu)
        graph.replay()
        # Solarising makes a jump of a pixel at the threshold, so a few may differ.
        close = (actual.cpu() - chain(*arguments)).abs() < 1e-4
        assert close.float().mean() > 0.999

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, p: operations.adjust_hue(x[0], p),
            lambda x, p: operations.adjust_contrast(x[:, :2], p),
            lambda x, p: operations.adjust_brightness(x, p[:2]),
            lambda x, p: operations.adjust_saturation(x, p.view(-1, 1)),
            lambda x, p: operations.greyscale(x[:, :1], p),
            lambda x, p: operations.solarise(x[0], p),
            lambda x, p: operations.colour_jitter(x, p, p, p, p, torch.zeros(4, 3), p),
            lambda x, p: operations.gaussian_blur(x, p, p, 4),
            lambda x, p: operations.gaussian_blur(x, p, p, 41),
            lambda x, p: operations.normalise(x, (0.5,), (0.5,)),
            lambda x, p: operations.resized_crop(x[0], p, p, p, p, p, 8),
            lambda x, p: operations.resized_crop([], p, p, p, p, p, 8),
            lambda x, p: operations.resized_crop(list(x), p, p, p, p, p[:2], 8),
            lambda x, p: operations.resized_crop(list(x[:, 0]), p, p, p, p, p, 8),
        ],
    )
    def test_wrong_shapes_are_refused(self, call):
        with pytest.raises(ValueError, match=r"expected|kernel_size"):
            call(make_images(0) / 255, torch.ones(4))


@pytest.mark.parametrize("greyscale_first", [False, True])
def test_large_views_one_by_one_are_those_of_the_batch(monkeypatch, greyscale_first):
    """On a CPU; the crops are bytes in both, so nothing differs but the way through the colours."""
    policy = ViewPolicy(jitter=0.8, greyscale=0.3, greyscale_first=greyscale_first, blur=0.5)
    views = Views([policy], executor.LARGE, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    images = make_images(11, 12, 180, 170)
    uniforms = views.draw(12, torch.Generator().manual_seed(11))
    one_by_one = views(images, uniforms)[0]
    monkeypatch.setattr(executor, "LARGE", executor.LARGE + 1)
    assert_close(one_by_one, views(images, uniforms)[0], 2e-5)
