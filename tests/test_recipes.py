"""Recipes: strict, equal however they are given, and with one helpful line for every mistake."""

import importlib

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tico_ssl import pretrain
from tico_ssl.config.recipe import Recipe, dump_recipe, load_recipe, packaged_recipes, parse_override
from tico_ssl.config.study import Study, dump_study, load_study, packaged_studies
from tico_ssl.config.views import packaged_policies
from tico_ssl.config.yaml_text import dump_yaml, parse_yaml
from tico_ssl.listing import described
from tico_ssl.runtime.errors import UserError
from tico_ssl.views.executor import Views

VIEWS = [{"crop_scale": [0.3, 1.0]}, {"blur": 0.5}]


def mapping(**changes) -> dict:
    return {"views": VIEWS} | changes


def error_of(*arguments, **keywords) -> str:
    """The one line that loading a recipe ends with."""
    with pytest.raises(UserError) as caught:
        load_recipe(*arguments, **keywords)
    line = str(caught.value)
    assert "\n" not in line
    return line


def from_words(name: str, *words: str) -> Recipe:
    return load_recipe(name, dict(parse_override(word) for word in words))


# ---------------------------------------------------------------------------------------------------- packaged recipes


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_loads(name):
    recipe = load_recipe(name)
    assert recipe.description
    assert sum(policy.count for policy in recipe.views) >= recipe.method.minimum_views


def test_the_recipes_that_were_promised_are_there():
    assert {"demo", "cifar10/tico", "imagenet/tico", "imagenet/tico-300"} <= set(packaged_recipes())


def test_the_papers_run_has_the_papers_values():
    recipe = load_recipe("imagenet/tico")
    training, optimizer, method = recipe.training, recipe.optimizer, recipe.method
    assert (training.epochs, training.batch_size) == (1000, 4096)
    assert (optimizer.name, optimizer.lr, optimizer.scale_lr) == ("lars", 0.2, True)
    assert (optimizer.warmup_epochs, optimizer.end_lr_ratio) == (10.0, 0.01)
    assert (optimizer.weight_decay, optimizer.momentum, optimizer.trust_coefficient) == (1.5e-6, 0.9, 1e-3)
    assert optimizer.one_dimensional_lr_ratio == 1.0
    assert (method.name, method.rho, method.beta) == ("tico", 8.0, 0.9)
    assert (method.hidden, method.dim) == (4096, 256)
    assert (method.ema_start, method.ema_end) == (0.99, 1.0)
    assert (method.symmetric, method.source, method.detach) == (False, "online", False)
    assert recipe.backbone.name == "torchvision/resnet50"
    assert recipe.data.image_size == 224
    assert [(view.blur, view.solarise) for view in recipe.views] == [(1.0, 0.0), (0.1, 0.2)]


def test_the_papers_ablation_differs_in_its_length_alone():
    long, short = (load_recipe(name).model_dump() for name in ("imagenet/tico", "imagenet/tico-300"))
    assert short["training"].pop("epochs") == 300
    assert long["training"].pop("epochs") == 1000
    assert short.pop("description") != long.pop("description")
    assert short == long


# ---------------------------------------------------------------------------------------------------- equal runs


def test_name_file_mapping_and_overrides_give_equal_recipes(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: demo\ntraining: {epochs: 7}\nmethod:\n  rho: 20.0\nviews:\n  - {blur: 0.5}\n  - {}\n")
    views = [{"blur": 0.5}, {}]
    by_file = load_recipe(str(file))
    assert load_recipe(file) == by_file
    assert (by_file.training.epochs, by_file.training.batch_size) == (7, load_recipe("demo").training.batch_size)
    assert load_recipe({"base": "demo", "training": {"epochs": 7}, "method": {"rho": 20.0}, "views": views}) == by_file
    assert load_recipe("demo", {"training.epochs": 7, "method.rho": 20.0, "views": views}) == by_file
    assert from_words("demo", "training.epochs=7", "method.rho=20.0", "views=[{blur: 0.5}, {}]") == by_file


def test_a_name_is_the_file_behind_it(tmp_path):
    for name in packaged_recipes():
        file = tmp_path / f"{name.replace('/', '-')}.yml"
        file.write_text(dump_recipe(load_recipe(name)))
        assert load_recipe(file) == load_recipe(name)


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_dumped_recipe_is_the_same_recipe(name):
    recipe = load_recipe(name, {"optimizer.lr": 1e-5, "data.source": "bilder/Åre 日本", "data.limit": 1000})
    text = dump_recipe(recipe)
    assert load_recipe(parse_yaml(text, "dump")) == recipe
    assert load_recipe(yaml.safe_load(text)) == recipe  # and in any other reader of YAML


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_described_recipe_is_the_same_recipe(name, tmp_path):
    recipe = load_recipe(name)
    file = tmp_path / "described.yaml"
    file.write_text(described(recipe), encoding="utf-8")
    assert load_recipe(file) == recipe


@pytest.mark.parametrize(
    "change",
    [
        {"data.source": "bilder/Åre 日本"},
        {"data.source": "🦔"},
        {"description": 'a "quoted": #text'},
        {"optimizer.weight_decay": 1e-7},
        {"backbone.arguments": {"patch_size": 4, "norm": "x"}},
        {"data.limit": 10, "training.clip_gradient": 1.0, "views.0.size": 20},
    ],
)
def test_a_described_recipe_is_the_same_recipe_with_odd_values(change):
    recipe = load_recipe("demo", change)
    assert load_recipe(parse_yaml(described(recipe), "described")) == recipe


def test_a_description_explains_every_field():
    text = described(load_recipe("imagenet/tico"))
    for line in text.splitlines():
        key = line.strip().removeprefix("- ").split(":")[0]
        if line.strip() and not line.strip().startswith("#") and not line.endswith(":") and key != "name":
            assert "  # " in line, line
    assert "Weight of the covariance contrast." in text


def test_a_recipe_does_not_change_what_it_was_given():
    values = {"base": "demo", "views": [{"blur": 0.1}, {}], "method": {"name": "tico"}}
    load_recipe(values, {"views.*.blur": 1.0, "method.rho": 1.0})
    assert values == {"base": "demo", "views": [{"blur": 0.1}, {}], "method": {"name": "tico"}}


def test_a_recipe_cannot_be_changed():
    recipe = load_recipe("demo")
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.epochs = 3


def test_a_method_may_be_left_out():
    recipe = load_recipe(mapping())
    assert (recipe.method.name, recipe.method.rho) == ("tico", 8.0)


# ---------------------------------------------------------------------------------------------------- base


def test_a_base_lies_below(tmp_path):
    (tmp_path / "a.yaml").write_text("base: demo\ntraining: {epochs: 3, seed: 5}\n")
    (tmp_path / "b.yaml").write_text(f"base: {tmp_path / 'a.yaml'}\ntraining: {{seed: 6}}\n")
    recipe = load_recipe(tmp_path / "b.yaml")
    assert (recipe.training.epochs, recipe.training.seed) == (3, 6)
    assert recipe.method == load_recipe("demo").method


def test_views_replace_those_of_the_base():
    recipe = load_recipe({"base": "imagenet/tico", "views": "byol-small"})
    assert [view.blur for view in recipe.views] == [0.0, 0.0]


def test_an_unknown_base_is_one_line():
    assert "did you mean 'demo'" in error_of({"base": "demmo"})


def test_a_base_that_leads_back_to_itself_is_one_line(tmp_path):
    (tmp_path / "a.yaml").write_text(f"base: {tmp_path / 'b.yaml'}\n")
    (tmp_path / "b.yaml").write_text(f"base: {tmp_path / 'a.yaml'}\n")
    assert "base" in error_of(tmp_path / "a.yaml").replace(str(tmp_path), "")


# ---------------------------------------------------------------------------------------------------- overrides


def test_overrides_of_every_view():
    recipe = from_words("imagenet/tico", "views.*.blur=0.25", "views.1.solarise=0.5", "views.0.crop_scale=[0.2, 1.0]")
    assert [view.blur for view in recipe.views] == [0.25, 0.25]
    assert [view.solarise for view in recipe.views] == [0.0, 0.5]
    assert [view.crop_scale for view in recipe.views] == [(0.2, 1.0), (0.08, 1.0)]


def test_later_overrides_win():
    recipe = from_words("imagenet/tico", "views.*.blur=0.25", "views.1.blur=1")
    assert [view.blur for view in recipe.views] == [0.25, 1.0]


def test_views_by_the_name_of_a_policy():
    recipe = from_words("demo", "views=byol", "views.1.blur=0.3")
    assert [view.blur for view in recipe.views] == [1.0, 0.3]
    assert "did you mean 'byol'" in error_of("demo", {"views": "byyol"})


@pytest.mark.parametrize("key", ["views.2.blur", "views.-1.blur", "views.x.blur", "views.second.blur"])
def test_a_view_that_is_not_there(key):
    line = error_of("demo", {key: 1.0})
    assert f"'{key}'" in line
    assert "from 0 to 1" in line


def test_an_override_below_a_plain_value():
    assert "training.epochs.x" in error_of("demo", {"training.epochs.x": 1})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a=1e-3", 1e-3),
        ("a=1.5e-6", 1.5e-6),
        ("a=-2E5", -2e5),
        ("a=+1e3", 1e3),
        ("a=1.e-3", 1e-3),
        ("a=3", 3),
        ("a=0.5", 0.5),
        ("a=true", True),
        ("a=null", None),
        ("a=", None),
        ("a=[1, 2e-1]", [1, 0.2]),
        ("a={x: 1}", {"x": 1}),
        ("a=b=c", "b=c"),
        ("a=1e", "1e"),
        ("a=e3", "e3"),
        ("a=my folder/ü", "my folder/ü"),
    ],
)
def test_overrides_are_read_as_people_mean_them(word, value):
    key, read = parse_override(word)
    assert key == "a"
    assert read == value
    assert type(read) is type(value)


def test_small_numbers_in_files(tmp_path):
    (tmp_path / "a.yaml").write_text("base: demo\noptimizer: {lr: 1e-3, weight_decay: 1E-6}\n")
    optimizer = load_recipe(tmp_path / "a.yaml").optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-3, 1e-6)


def test_reading_numbers_so_is_for_recipes_alone():
    assert yaml.safe_load("1e-3") == "1e-3"  # what PyYAML does elsewhere is not ours to change


@pytest.mark.parametrize("word", ["training.epochs", "=3", ""])
def test_a_word_that_is_no_override(word):
    with pytest.raises(UserError, match="key=value"):
        parse_override(word)


def test_an_override_that_is_not_yaml_names_its_key():
    with pytest.raises(UserError, match=r"data\.mean.*YAML"):
        parse_override("data.mean=[0.5, ")


# ---------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("trainig", "'training'"),
        ("metod.rho", "'method'"),
        ("method.roh", "'rho'"),
        ("method.betta", "'beta'"),
        ("training.epoch", "'epochs'"),
        ("optimizer.weigth_decay", "'weight_decay'"),
        ("data.imagesize", "'image_size'"),
        ("backbone.stemm", "'stem'"),
        ("views.1.solarize", "'solarise'"),
        ("views.0.grayscale", "'greyscale'"),
    ],
)
def test_an_unknown_key_names_its_place_and_the_nearest(key, expected):
    line = error_of("demo", {key: 1})
    assert f"did you mean {expected}?" in line
    place = key if not key.startswith("metod") else "metod"
    assert f"unknown key '{place}'" in line


def test_an_unknown_key_that_is_near_nothing_lists_what_is_valid():
    line = error_of("demo", {"method.qqq": 1})
    assert "'method.qqq'" in line
    for name in ("rho", "beta", "hidden", "dim"):
        assert name in line


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("training", 5, "'training'"),
        ("training.epochs", "many", "integer"),
        ("training.epochs", 1.5, "integer"),
        ("training.epochs", True, "integer"),
        ("training.epochs", None, "integer"),
        ("training.epochs", [3], "integer"),
        ("training.seed", False, "integer"),
        ("method.rho", "8", "number"),
        ("method.rho", True, "number"),
        ("method.last_bias", 1, "boolean"),
        ("method.last_bias", "yes", "boolean"),
        ("data.source", 5, "string"),
        ("data.mean", 0.5, "tuple"),
        ("backbone.arguments", [1], "dictionary"),
        ("views", 5, "list"),
        ("views", [], "views"),
        ("views.0", 3, "views.0"),
        ("views.1.blur", "often", "number"),
        ("training.epochs", 0, "greater than or equal to 1"),
        ("training.batch_size", 1, "greater than or equal to 2"),
        ("method.beta", 1.0, "less than 1"),
        ("method.rho", -1.0, "greater than or equal to 0"),
        ("method.ema_start", 1.1, "less than or equal to 1"),
        ("views.1.flip", 2.0, "less than or equal to 1"),
        ("optimizer.lr", 0, "greater than 0"),
        ("optimizer.lr", float("inf"), "finite"),
        ("optimizer.lr", float("nan"), "optimizer.lr"),
        ("data.image_size", 4, "greater than or equal to 8"),
        ("optimizer.name", "adam", "'adamw'"),
        ("training.precision", "fp16", "'bf16'"),
        ("backbone.stem", "tiny", "'small'"),
        ("method.source", "both", "'target'"),
        ("views.0.crop_scale", [0.5, 0.1], "crop_scale"),
        ("views.0.crop_scale", [0.5], "crop_scale"),
    ],
)
def test_a_wrong_value_names_its_place_and_what_would_be_right(key, value, expected):
    line = error_of("demo", {key: value})
    assert expected in line
    place = "views.0" if key == "views.0.crop_scale" else key
    assert f"'{place}" in line
    assert "recipe demo" in line


def test_mistakes_in_a_file_name_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: demo\nmethod: {roh: 3.0}\n")
    line = error_of(file)
    assert str(file) in line
    assert "'method.roh'" in line
    assert "did you mean 'rho'?" in line


def test_several_mistakes_are_counted():
    line = error_of("demo", {"method.roh": 1, "training.epochs": "x", "views.0.blurr": 1})
    assert line.endswith("(and 2 more)")


def test_views_cannot_be_left_out():
    assert "'views' is missing" in error_of({"method": {"name": "tico"}})


def test_an_unknown_method_names_the_nearest():
    assert "did you mean 'tico'" in error_of("demo", {"method.name": "ticco"})


@pytest.mark.parametrize("method", ["tico", 5, None, ["tico"], {"name": 5}])
def test_a_method_is_a_mapping_with_a_name(method):
    assert "method" in error_of(mapping(method=method))


def told(source, changes) -> tuple:
    """A recipe and what is said about it."""
    lines: list[str] = []
    return load_recipe(source, changes, lines.append), lines


@pytest.mark.parametrize("key", ["method", "method.name"])
def test_another_method_begins_with_its_own_defaults(key):
    recipe, lines = told("cifar10/tico", {key: "simclr"})
    assert recipe.method == load_recipe(mapping(method={"name": "simclr"})).method
    assert lines == ["method simclr starts from its own defaults: hidden, dim, ema_start of tico are dropped"]
    assert recipe.optimizer == load_recipe("cifar10/tico").optimizer


@pytest.mark.parametrize("words", [("method.hidden", "method"), ("method", "method.hidden")])
def test_settings_given_with_another_method_are_its_own(words):
    values = {"method": "simclr", "method.hidden": 77}
    recipe, _ = told("cifar10/tico", {word: values[word] for word in words})
    assert (recipe.method.name, recipe.method.hidden) == ("simclr", 77)


def test_the_same_method_keeps_its_settings():
    recipe, lines = told("cifar10/tico", {"method": "tico", "method.rho": 3.0})
    assert (recipe.method.ema_start, recipe.method.rho, lines) == (0.95, 3.0, [])


DERIVED = """
from tico_ssl.methods import simsiam

class Config(simsiam.Config):
    name: str = "derived_simsiam"
    further: bool = False

def build(config, backbone):
    return simsiam.SimSiam(backbone, config=config)
"""


@pytest.mark.parametrize("imported", [False, True])
def test_a_method_that_extends_another_keeps_its_settings(tmp_path, monkeypatch, imported):
    package = f"mine_{imported}".lower()
    (tmp_path / package).mkdir()
    (tmp_path / package / "derived_simsiam.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"{package}.derived_simsiam"
    if imported:
        importlib.import_module(name)
    before = load_recipe("cifar10/simsiam-lightly").method
    recipe, lines = told("cifar10/simsiam-lightly", {"method": name, "method.further": True, "method.hidden": 77})
    assert recipe.method.model_dump() == before.model_dump() | {"name": name, "further": True, "hidden": 77}
    assert lines == []
    (tmp_path / "derived.yaml").write_text(f"base: cifar10/simsiam-lightly\nmethod: {{name: {name}, hidden: 77}}\n")
    recipe, lines = told(tmp_path / "derived.yaml", {})
    assert recipe.method.model_dump() == before.model_dump() | {"name": name, "further": False, "hidden": 77}
    _, lines = told(tmp_path / "derived.yaml", {"method": "tico"})  # which does not extend it
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["of-another-version", 5])
def test_a_method_that_is_replaced_need_not_exist(tmp_path, name):
    (tmp_path / "mine.yaml").write_text(f"base: cifar10/tico\nmethod: {{name: {name}}}\n")
    assert told(tmp_path / "mine.yaml", {"method": "simclr"})[0].method.name == "simclr"


def test_another_method_above_a_base(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: cifar10/tico\nmethod:\n  name: barlow-twins\n  dim: 64\n")
    recipe, lines = told(tmp_path / "mine.yaml", {})
    assert recipe.method == load_recipe(mapping(method={"name": "barlow-twins", "dim": 64})).method
    assert len(lines) == 1


def test_settings_of_the_old_method_are_refused_beside_a_new_one():
    assert "unknown key 'method.rho'" in error_of("cifar10/tico", {"method": "simclr", "method.rho": 3.0})


def test_nothing_is_said_about_a_recipe_that_is_refused():
    lines: list[str] = []
    with pytest.raises(UserError, match="did you mean 'tico'"):
        load_recipe("demo", {"method": "ticco"}, lines.append)
    assert lines == []


def test_names_have_hyphens_and_old_names_still_work():
    names = [*packaged_recipes(), *packaged_studies(), *packaged_policies()]
    assert not [name for name in names if "_" in name]
    assert load_recipe("cifar10/moco_v2") == load_recipe("cifar10/moco-v2")


def test_a_recipe_for_images_of_ones_own_names_none():
    assert load_recipe("photos").data.source == ""


@pytest.mark.parametrize("name", ["nowhere.methods.better", "os.path", "..x", ".x", "a..b"])
def test_a_method_elsewhere_that_is_none_is_one_line(name):
    assert name in error_of("demo", {"method.name": name})


def test_the_normalisation_has_a_value_per_channel():
    line = error_of("demo", {"backbone.channels": 1, "data.mean": [0.5, 0.5]})
    assert "data.mean" in line
    assert "backbone.channels 1" in line
    assert load_recipe("demo", {"backbone.channels": 1}).data.source  # three values: those of the images are found
    assert "data.std" in error_of("demo", {"data.std": [0.2, 0.2]})
    assert "positive" in error_of("demo", {"data.std": [0.2, 0.0, 0.2]})
    recipe = load_recipe("demo", {"backbone.channels": 1, "data.mean": [0.5], "data.std": [0.5]})
    assert recipe.data.mean == (0.5,)


def test_one_value_for_three_channels_is_refused_or_serves_them_all():
    """Not accepted first and a traceback later."""
    try:
        recipe = load_recipe("demo", {"data.mean": [0.5], "data.std": [0.25]})
    except UserError as error:
        assert "data.mean" in str(error)
        return
    views = Views(recipe.views, 8, recipe.data.mean, recipe.data.std)
    uniforms = views.draw(2, torch.Generator().manual_seed(0))
    assert views(torch.full((2, 3, 8, 8), 255, dtype=torch.uint8), uniforms)[0].shape == (2, 3, 8, 8)


def test_an_unknown_recipe_names_the_nearest(tmp_path):
    assert "did you mean 'imagenet/tico'" in error_of("imagenet/tiko")
    assert "did you mean 'demo'" in error_of("demos")
    assert str(tmp_path / "none.yaml") in error_of(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "line_number"),
    [("views: [\n  a: b\n", 3), ("a: 1\nb: 2\n c: 3\n", 3), ("a: 'open\n", 2), ("a: 1\n\tb: 2\n", 2)],
)
def test_broken_yaml_says_the_line(tmp_path, text, line_number):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    line = error_of(file)
    assert f"{file}: not valid YAML in line {line_number}" in line


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n", "5\n"])
def test_a_recipe_is_a_mapping(tmp_path, text):
    file = tmp_path / "list.yaml"
    file.write_text(text)
    assert str(file) in error_of(file)


def test_a_recipe_in_another_encoding_is_one_line(tmp_path):
    file = tmp_path / "latin.yaml"
    file.write_bytes("description: café\n".encode("latin-1"))
    assert str(file) in error_of(file)


def test_a_recipe_cannot_run_code(tmp_path):
    file = tmp_path / "evil.yaml"
    file.write_text(f"data: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'touched'}]\n")
    assert str(file) in error_of(file)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("data=cifar10", "data.source"),
        ("backbone=torchvision/resnet50", "backbone.name"),
        ("optimizer=lars", "optimizer.name"),
    ],
)
def test_a_name_for_a_section_is_its_name(short, full):
    key, value = parse_override(short)
    assert load_recipe("demo", {key: value}) == load_recipe("demo", {full: value})


def test_a_value_for_a_section_without_a_name_is_refused_with_its_keys():
    with pytest.raises(
        UserError, match=r"'training' is a section, .* as training\.KEY=VALUE; keys: epochs, batch_size"
    ):
        load_recipe("demo", {"training": 3})


@pytest.mark.parametrize("given", [5, 0.5, object(), iter(["photos/"])])
def test_what_cannot_be_data_is_one_line(given, tmp_path):
    with pytest.raises(UserError, match=r"^data=.*: a place, a data set, or a list of places or images is expected"):
        pretrain("demo", data=given, out=tmp_path / "run")


def test_unknown_data_are_called_what_was_typed(tmp_path):
    for words in ({"overrides": {"data": "foo"}}, {"data": "foo"}, {"overrides": {"data.source": "foo"}}):
        with pytest.raises(UserError, match=r"^data 'foo' is neither a file, a folder nor a known name"):
            pretrain("demo", out=tmp_path / "a", **words)


# ---------------------------------------------------------------------------------------------------- written


TEXTS = st.text() | st.text("0123456789abcdefxyXEnoNO+-._~:=<!&*?|>%@`'\"#,[]{} \n\t")


@given(st.dictionaries(TEXTS, st.lists(TEXTS | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none())))
def test_whatever_is_written_is_read_as_the_same(values):
    assert parse_yaml(dump_yaml(values), "here") == values


@pytest.mark.parametrize("name", ["5e12", "1e5", "010", "0x1f", "1:30", "1_000", "2020-01-31", "on", "null", ".5", "~"])
def test_data_may_be_called_like_a_number(name, tmp_path):
    recipe = load_recipe("demo", {"data.source": [name, "more"]})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    planned = Study(overrides={"data.source": name}, grid={"training.init": [name]})
    (tmp_path / "study.yaml").write_text(dump_study(planned))
    assert load_study(tmp_path / "study.yaml") == planned
