"""The package in other people's frames computes what it computes in its own."""

import warnings
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks
from torch.utils.data import DataLoader

from tico_ssl import TiCoLoss, load_backbone
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.formats.textures import draw_textures
from tico_ssl.integrations._batches import read_batch
from tico_ssl.integrations.sklearn import ImageEmbedder
from tico_ssl.methods import byol
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.loop import seed_network
from tico_ssl.training.setup import build_step, prepare
from tiny import TINY

CPU = torch.device("cpu")
EPOCHS = 2

# Lightning warns where SLURM is installed and a program runs without it.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")


# ---------------------------------------------------------------------------------------------------- Lightning


@pytest.fixture(scope="module")
def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        pytest.importorskip("lightning")
        import lightning

        import tico_ssl.integrations.lightning as ours
    lightning.LightningMethod = ours.LightningMethod
    return lightning


def recipe_of(method, **changes):
    settings = TINY | {"training.epochs": EPOCHS, "data.limit": 64, "optimizer.warmup_epochs": 1.0}
    return load_recipe("demo", {**settings, "method": {"name": method, "hidden": 16, "dim": 8}, **changes})


def own_training(recipe):
    """Losses and final weights of the package's own steps, and the batches that they were made of."""
    setup = prepare(recipe, CPU)
    step, plan = build_step(setup), setup.plan
    batches, losses = list(setup.loader.iterate(0, plan.steps)), []
    for number, raw in enumerate(batches):
        seed_network(recipe.training.seed, number)
        losses.append(step(raw, plan.lr(number), number / plan.steps).output.loss.item())
    return losses, setup.method.state_dict(), batches, setup.views


class Losses:
    """A callback that notes losses and learning rates."""

    def __init__(self, lightning):
        outer = self
        self.seen, self.rates = [], []

        class Noting(lightning.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                outer.seen.append(float(outputs["loss"]))
                outer.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        self.callback = Noting()


def fit(lightning, module, batches, noted, checkpoint=None, **settings):
    trainer = lightning.Trainer(
        **{"max_epochs": EPOCHS, "accelerator": "cpu", "logger": False, "enable_checkpointing": False} | settings,
        callbacks=[noted.callback],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers, and its own use of torch
        trainer.fit(module, batches, ckpt_path=checkpoint)
    return trainer


class Epochs(torch.utils.data.IterableDataset):
    """The batches of every epoch, as the package's loader has made them."""

    def __init__(self, batches, of):
        self.batches, self.of, self.each = batches, of, len(batches) // EPOCHS
        self.epoch = 0

    def __len__(self):
        return self.each

    def __iter__(self):
        begin = self.epoch * self.each
        self.epoch += 1
        return iter([self.of(raw) for raw in self.batches[begin : begin + self.each]])


def images_of(raw: RawBatch):
    return raw.pixels, raw.label


def same(one, other, tolerance=0.0):
    return all(torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance) for name in one)


@pytest.mark.parametrize("method", ["tico", "simclr", "byol"])
def test_a_lightning_trainer_makes_the_steps_of_the_package(lightning, method):
    recipe = recipe_of(method)
    losses, weights, batches, _ = own_training(recipe)
    module, noted = lightning.LightningMethod(recipe), Losses(lightning)
    fit(lightning, module, DataLoader(Epochs(batches, images_of), batch_size=None), noted)
    assert noted.seen == losses and len(losses) == 4
    assert same(weights, module.method.state_dict())


@pytest.mark.parametrize(("ours", "theirs", "tolerance"), [("fp64", "64-true", 1e-6), ("bf16", "bf16-mixed", 1e-2)])
def test_views_are_made_in_float32_whatever_the_precision(lightning, ours, theirs, tolerance):
    recipe = recipe_of("tico", **{"training.precision": ours})
    losses, _, batches, _ = own_training(recipe)
    noted = Losses(lightning)
    loader = DataLoader(Epochs(batches, images_of), batch_size=None)
    fit(lightning, lightning.LightningMethod(recipe), loader, noted, precision=theirs)
    assert noted.seen == pytest.approx(losses, rel=tolerance)


def test_views_of_the_users_own_in_float64(lightning):
    """With clipped gradients, whose norm Lightning sums in another order."""
    recipe = recipe_of("byol", **{"training.precision": "fp64", "training.clip_gradient": 0.05})
    losses, weights, batches, views = own_training(recipe)
    made = Epochs(batches, lambda raw: [*views.make(raw.pixels, raw.decisions), raw.label])
    module, noted = lightning.LightningMethod(recipe), Losses(lightning)
    fit(lightning, module, DataLoader(made, batch_size=None), noted, precision="64-true")
    assert noted.seen == pytest.approx(losses, rel=1e-12)
    assert same(weights, module.method.state_dict(), 1e-10)


def test_a_checkpoint_of_lightning_goes_on_where_it_was(lightning, tmp_path, monkeypatch):
    recipe = recipe_of("tico")
    losses, weights, batches, _ = own_training(recipe)
    first, noted = lightning.LightningMethod(recipe), Losses(lightning)
    loader = DataLoader(Epochs(batches, images_of), batch_size=None)

    class Ending(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = True

    noted.callback.on_train_epoch_end = Ending().on_train_epoch_end
    trainer = fit(lightning, first, loader, noted, min_epochs=1)
    assert noted.seen == losses[:2]
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = lightning.LightningMethod.load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True)
    assert again.recipe == recipe and same(first.state_dict(), again.state_dict())
    noted = Losses(lightning)
    fit(lightning, again, loader, noted, checkpoint=tmp_path / "half.ckpt")
    assert noted.seen == losses[2:] and same(weights, again.method.state_dict())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert again.save_backbone("~/backbone.safetensors") == tmp_path / "backbone.safetensors"
    assert load_backbone(tmp_path / "backbone.safetensors").width == again.method.backbone.width


def test_accumulated_batches_move_the_target_once(lightning):
    """Also of a method that no recipe has made."""
    recipe = recipe_of("tico", **{"training.batch_size": 64})
    config = byol.Config(hidden=16, dim=8, ema_start=0.5, ema_end=0.5)
    method = byol.BYOL(build_backbone(recipe.backbone, 16), config)
    module, noted = lightning.LightningMethod(recipe, method=method), Losses(lightning)
    moved = []
    follow = module.method.target.follow
    module.method.target.follow = lambda online, decay: (moved.append(decay), follow(online, decay))
    batches = [torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8) for _ in range(4)]
    fit(lightning, module, DataLoader(batches, batch_size=None), noted, max_epochs=1, accumulate_grad_batches=2)
    assert moved == [0.5, 0.5]


def test_a_memory_bank_needs_to_know_the_images(lightning):
    recipe = load_recipe("cifar10/pirl", {"data.image_size": 16, "backbone.name": "tico/resnet10-w4"})
    module, given = lightning.LightningMethod(recipe), [VIEW, VIEW]
    with pytest.raises(UserError, match=r"method pirl .* 'index'"):
        module._batch(read_batch(given))
    assert module._batch(read_batch({"views": given, "index": LABEL})).index is LABEL


def test_mistakes_with_lightning_are_one_line(lightning):
    recipe = recipe_of("tico", **{"optimizer.scale_lr": True})
    loader = DataLoader([torch.zeros(8, 3, 16, 16, dtype=torch.uint8)] * 2, batch_size=None)
    with pytest.raises(UserError, match=r"8 images .* training\.batch_size=32: pass overrides"):
        fit(lightning, lightning.LightningMethod(recipe), loader, Losses(lightning))
    with pytest.raises(UserError, match="max_epochs or max_steps"):
        fit(lightning, lightning.LightningMethod(recipe), loader, Losses(lightning), max_epochs=-1)


IMAGES, VIEW, LABEL = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, 3, 8, 8), torch.arange(4)


@pytest.mark.parametrize(
    ("given", "images", "views", "labelled"),
    [
        (IMAGES, 4, 0, False),
        ([IMAGES, LABEL], 4, 0, True),
        (list(IMAGES), 4, 0, False),
        ((list(IMAGES), LABEL), 4, 0, True),
        ([VIEW, VIEW], 0, 2, False),
        ([VIEW, VIEW, LABEL], 0, 2, True),
        ([[VIEW, VIEW], LABEL, ["a.jpg"] * 4], 0, 2, True),
        ({"views": [VIEW, VIEW], "index": LABEL}, 0, 2, False),
        ({"images": IMAGES, "label": LABEL}, 4, 0, True),
    ],
)
def test_batches_as_loaders_make_them(given, images, views, labelled):
    found = read_batch(given)
    assert (0 if found.images is None else len(found.images), len(found.views)) == (images, views)
    assert (found.label is not None) == labelled and found.count == 4


@pytest.mark.parametrize("given", [[], "images", [IMAGES, IMAGES], [VIEW, VIEW[:2]], {"image": IMAGES}, [LABEL], {}])
def test_what_is_no_batch_is_refused(given):
    with pytest.raises(UserError, match=r"batch|views"):
        read_batch(given)


# ---------------------------------------------------------------------------------------------------- scikit-learn


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("model") / "backbone.safetensors"
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16), file)
    return file


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Textures as files, in order, with their pixels (N, C, H, W) and classes."""
    pixels, labels = draw_textures(24, 16, seed=0)
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{number}.png" for number in range(24)]
    for path, image in zip(paths, pixels):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return paths, pixels, labels


def test_rows_are_the_features_of_the_backbone_however_images_are_given(model, pictures):
    paths, pixels, _ = pictures
    backbone = load_backbone(model)
    with torch.no_grad():
        expected = backbone(backbone.preprocess(pixels)).numpy()
    embedder = ImageEmbedder(model, batch_size=7)
    arrays = pixels.permute(0, 2, 3, 1).numpy()
    columns = [paths, [str(path) for path in paths], np.array([str(path) for path in paths])]
    columns += [np.array([[str(path)] for path in paths], dtype=object), [Image.open(path) for path in paths]]
    for given in (pixels, list(pixels), arrays, list(arrays), [*paths[:5], *arrays[5:]], *columns):
        found = embedder.fit(given).transform(given)
        assert found.dtype == np.float32 and np.allclose(found, expected, atol=1e-5)
    assert np.allclose(embedder.transform(paths[3]), expected[3:4], atol=1e-5)
    assert embedder.transform([]).shape == (0, backbone.width)
    unit = ImageEmbedder(load_backbone(model), normalise=True).fit_transform(paths)
    assert np.allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)
    names = embedder.get_feature_names_out()
    assert list(names[:2]) == ["feature_0", "feature_1"] and len(names) == backbone.width


def test_in_a_pipeline(model, pictures, tmp_path):
    paths, _, labels = pictures
    labels = labels.numpy() % 2
    pipeline = make_pipeline(ImageEmbedder(str(model)), LogisticRegression())
    scores = cross_val_score(pipeline, paths, labels, cv=2)
    assert scores.shape == (2,) and np.isfinite(scores).all()
    pipeline.set_params(imageembedder__normalise=True, imageembedder__batch_size=5)
    copy = clone(pipeline)
    assert copy.get_params()["imageembedder__batch_size"] == 5
    fitted = copy.fit(paths, labels)
    joblib.dump(fitted, tmp_path / "pipeline.joblib")
    again = joblib.load(tmp_path / "pipeline.joblib")
    assert np.array_equal(again.predict_proba(paths), fitted.predict_proba(paths))
    assert (tmp_path / "pipeline.joblib").stat().st_size < model.stat().st_size  # the path, not the weights


def test_a_loaded_model_is_cloned_and_pickled_with_its_weights(model, pictures, tmp_path):
    paths = pictures[0]
    embedder = ImageEmbedder(load_backbone(model))
    joblib.dump(clone(embedder), tmp_path / "embedder.joblib")
    again = joblib.load(tmp_path / "embedder.joblib")
    assert np.array_equal(again.transform(paths), embedder.transform(paths))


# Every other check fits a matrix of numbers, which is no batch of images: scikit-learn itself leaves them out for an
# estimator whose tags say that it takes no such matrix.
APPLICABLE = [
    "check_estimator_cloneable",
    "check_do_not_raise_errors_in_init_or_set_param",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_mixin_order",
]


def test_the_checks_of_scikit_learn_that_apply(model):
    embedder = ImageEmbedder(str(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be tested with matrices
        assert all(check["status"] != "failed" for check in estimator_checks.check_estimator(embedder, on_fail=None))
    for name in APPLICABLE:
        if (check := getattr(estimator_checks, name, None)) is not None:  # they come and go with versions
            check("ImageEmbedder", clone(embedder))


@pytest.mark.parametrize("given", [np.zeros((4, 64)), np.array([["a.png", "b.png"]], dtype=object), [3.0], ["no.png"]])
def test_what_is_no_image_is_refused(model, given):
    with pytest.raises(UserError):
        ImageEmbedder(model).transform(given)


def test_a_model_that_is_not_there_and_a_batch_of_none(model):
    with pytest.raises(UserError, match="no trained backbone here"):
        ImageEmbedder("runs/nowhere").fit()
    with pytest.raises(UserError, match="batch_size"):
        ImageEmbedder(model, batch_size=0).transform([])


# ---------------------------------------------------------------------------------------------------- torch.hub


def test_torch_hub_loads_a_backbone_and_the_loss(model, pictures):
    root, images = str(Path(__file__).parents[1]), pictures[1]
    hubs, ours = torch.hub.load(root, "backbone", str(model), source="local"), load_backbone(model)
    with torch.no_grad():
        assert torch.equal(hubs(hubs.preprocess(images)), ours(ours.preprocess(images)))
    assert torch.hub.load(root, "backbone", str(model), image_size=24, source="local").image_size == 24
    torch.manual_seed(0)
    online, target = torch.randn(2, 8, 4)
    loss = torch.hub.load(root, "tico_loss", dim=4, rho=20.0, source="local")
    assert torch.equal(loss(online, target), TiCoLoss(dim=4, rho=20.0)(online, target))


def test_a_module_starts_from_the_weights_of_its_recipe(tmp_path, tiny):
    pytest.importorskip("lightning")
    from tico_ssl.integrations.lightning import LightningMethod

    torch.manual_seed(3)
    theirs = build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16).network.state_dict()
    torch.save(theirs, tmp_path / "theirs.pth")
    module = LightningMethod("demo", tiny | {"training.init": str(tmp_path / "theirs.pth")})
    for network in (module.method.backbone, module.method.target[0]):
        assert all(torch.equal(value, theirs[name]) for name, value in network.network.state_dict().items())


def test_deep_images_are_embedded_by_the_range_of_the_backbone(tmp_path):
    backbone = build_backbone(
        BackboneConfig(name="tico/resnet10-w4", channels=1), 16, (0.5,), (0.25,), (0.0, 9e3)
    ).eval()
    path = tmp_path / "deep.png"
    Image.fromarray(np.linspace(500, 8_000, 20 * 24).reshape(20, 24).astype(np.uint16)).save(path)
    with torch.inference_mode():
        expected = backbone(backbone.preprocess([path]))
    np.testing.assert_allclose(ImageEmbedder(backbone).transform([path]), expected.numpy(), rtol=1e-5, atol=1e-6)
