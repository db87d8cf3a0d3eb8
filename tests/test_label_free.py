"""Numbers without labels at points where the answer is known, and on a run: backbone, embedding, untrained twin."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from tico_ssl import evaluate
from tico_ssl.evaluations import alignment_uniformity, alpha_req, clustering, spectrum
from tico_ssl.evaluations import rankme as rankme_protocol
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._representation.augmented import views_of_images
from tico_ssl.evaluations._representation.projectors import CALIBRATION, embeddings
from tico_ssl.evaluations._representation.settings import ViewSettings
from tico_ssl.evaluations._representation.spectra import (
    eigenvalues,
    entropy_rank,
    lidar,
    participation_ratio,
    power_law,
    rankme,
    thinned,
    usable,
)
from tico_ssl.evaluations._representation.sphere import alignment, uniformity
from tico_ssl.evaluations.clustering import agreement, cluster, mutual_information, rand_index
from tico_ssl.evaluations.neighbour_consistency import consistency
from tico_ssl.features.evidence import intervals_of
from tico_ssl.features.frozen import Features
from tico_ssl.results.collapse import collapse_signs
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.monitor import occupied

LABEL_FREE = ("rankme", "alpha-req", "lidar", "alignment-uniformity", "spectrum", "neighbour-consistency")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(rows, columns, seed=0):
    """Columns of length one, at right angles to each other and to the vector of ones: their mean is zero."""
    values = normal(rows, columns, seed=seed)
    return torch.linalg.qr(values - values.mean(dim=0))[0]


def with_spectrum(variances, rows=400, seed=0):
    """Features whose covariance has exactly these eigenvalues, in directions of no importance."""
    variances = torch.as_tensor(variances, dtype=torch.float64)
    turn = torch.linalg.qr(normal(len(variances), len(variances), seed=seed + 1))[0]
    return math.sqrt(rows) * orthonormal(rows, len(variances), seed) * variances.sqrt() @ turn


# ---------------------------------------------------------------------------------------------------- spectra


@pytest.mark.parametrize("rows", [20, 400])
def test_eigenvalues_are_those_of_the_covariance(rows):
    features = normal(rows, 30) @ normal(30, 30, seed=1) + 5
    expected = np.linalg.eigvalsh(np.cov(features.numpy().T, bias=True))[::-1][: min(rows, 30)]
    assert np.allclose(eigenvalues(features).numpy(), expected, rtol=1e-9, atol=1e-10)
    about_zero = np.linalg.svd(features.numpy(), compute_uv=False) ** 2 / rows
    assert np.allclose(eigenvalues(features, centred=False).numpy(), about_zero, rtol=1e-9, atol=1e-10)


def test_all_counts_of_dimensions_agree_on_an_even_spread():
    for rank in (1, 3, 12):
        features = with_spectrum([2.0] * rank + [0.0] * (12 - rank))
        found = spectrum.measures(eigenvalues(features))
        for name in ("rank_by_variance", "rank_by_deviation", "participation_ratio"):
            assert found[name] == pytest.approx(rank, rel=1e-4)
        assert found["largest_share"] == pytest.approx(100 / rank, rel=1e-6)
        assert rankme(features) == pytest.approx(rank, rel=1e-4)


def test_an_isotropic_gaussian_fills_its_space():
    found = spectrum.measures(eigenvalues(normal(20_000, 16)))
    assert found["rank_by_variance"] == pytest.approx(16, rel=2e-3)
    assert found["participation_ratio"] == pytest.approx(16, rel=2e-3)
    assert rankme(normal(20_000, 16)) == pytest.approx(16, rel=1e-3)


def test_entropies_by_variance_and_by_deviation_differ_as_they_should():
    """Variances 4 and 1 have shares 4/5 and 1/5, deviations 2 and 1 have 2/3 and 1/3: weak directions count more."""
    found = spectrum.measures(eigenvalues(with_spectrum([4.0, 1.0])))
    assert found["rank_by_variance"] == pytest.approx(math.exp(-(0.8 * math.log(0.8) + 0.2 * math.log(0.2))), rel=1e-5)
    expected = math.exp(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert found["rank_by_deviation"] == pytest.approx(expected, rel=1e-5)
    assert found["participation_ratio"] == pytest.approx(25 / 17)


def test_rankme_is_about_zero_and_the_effective_rank_is_about_the_mean():
    """A common mean far away is one direction more for RankMe, and none for the covariance."""
    features = with_spectrum([1.0, 1.0, 1.0]) + torch.tensor([1e4, 0, 0])
    assert rankme(features) == pytest.approx(1, abs=5e-3)
    assert entropy_rank(eigenvalues(features)) == pytest.approx(3, rel=1e-3)


def test_one_point_has_one_dimension():
    point = torch.full((50, 8), 3.7) * (1 + 1e-7 * normal(50, 8).float())  # but for what a network rounds
    found = spectrum.measures(eigenvalues(point))
    assert found["rank_by_variance"] == pytest.approx(1, abs=1e-4)
    assert found["largest_share"] == 0
    assert participation_ratio(torch.zeros(4)) == 0


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.5])
def test_alpha_of_a_power_law_is_its_exponent(alpha):
    variances = torch.arange(1, 65, dtype=torch.float64) ** -alpha
    variances[:4] = torch.tensor([50.0, 40.0, 30.0, 20.0])  # the first few follow no law and do not count
    found = alpha_req.fitted(eigenvalues(with_spectrum(variances)), alpha_req.Config())
    assert found.alpha == pytest.approx(alpha, abs=1e-8)
    assert found.r2 == pytest.approx(1, abs=1e-10)
    assert (found.first, found.last) == (5, 32)


def test_alpha_of_white_noise_is_zero_and_its_line_explains_what_numpy_says():
    assert power_law(torch.ones(50), 5, 25).alpha == pytest.approx(0, abs=1e-12)
    values = (
        torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    )
    x, y = np.log(np.arange(3, 31)), values[2:30].log().numpy()
    slope, residual, *_ = np.polyfit(x, y, 1, full=True)
    found = power_law(values, 3, 30)
    assert found.alpha == pytest.approx(-slope[0], rel=1e-9)
    assert found.r2 == pytest.approx(1 - residual[0] / ((y - y.mean()) ** 2).sum(), rel=1e-9)


def test_alpha_says_when_there_is_nothing_to_fit():
    assert usable(eigenvalues(with_spectrum([1.0, 1.0, 0.0, 0.0]))) == 2
    assert usable(torch.zeros(3)) == 0
    with pytest.raises(UserError, match="alpha-req needs at least 4 eigenvalues"):
        alpha_req.fitted(eigenvalues(torch.ones(30, 20)), alpha_req.Config())


def test_a_thinned_spectrum_begins_and_ends_where_the_whole_does():
    for count in (1, 2, 48, 2048):
        values = torch.arange(count, 0, -1, dtype=torch.float64)
        found = thinned(values)
        assert found["index"][0] == 1
        assert found["index"][-1] == count
        assert len(found["index"]) == len(set(found["index"])) <= 48
        total = count * (count + 1) / 2
        assert found["share"] == pytest.approx([(count + 1 - i) / total for i in found["index"]], rel=1e-3)


# ---------------------------------------------------------------------------------------------------- LiDAR


@pytest.mark.parametrize(("images", "width"), [(5, 12), (9, 8), (30, 8)])
def test_lidar_of_images_far_apart_is_the_rank_that_their_means_can_have(images, width):
    """Means that are as spread out as can be, and views alike in all directions: min(images - 1, width) of them."""
    rank = min(images - 1, width)
    means = torch.zeros(images, width, dtype=torch.float64)
    means[:, :rank] = 100 * orthonormal(images, rank)
    noise = 1e-3 * torch.cat([torch.eye(width), -torch.eye(width)]).double()
    views = means[:, None] + noise  # the same views of every image: within is a multiple of the identity
    assert lidar(views) == pytest.approx(rank, rel=1e-4)


def test_lidar_equals_its_definition():
    views = normal(40, 6, 5) @ normal(5, 5, seed=1) + 3 * normal(40, 1, 5, seed=2)
    means = views.mean(1).numpy()
    between = np.cov(means.T)
    within = np.mean([np.cov(image.numpy().T) for image in views], axis=0) + 1e-4 * np.eye(5)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    found = np.linalg.eigvalsh(root @ between @ root)
    shares = found / found.sum() + 1e-8
    assert lidar(views) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-9)


def test_lidar_of_collapse_is_one():
    assert lidar(torch.full((20, 5, 8), 2.0)) == pytest.approx(1, abs=1e-4)
    assert lidar(torch.full((20, 5, 8), 30.0) * (1 + 1e-7 * normal(20, 5, 8))) == pytest.approx(1, abs=1e-4)
    on_a_line = normal(20, 1, 1) * normal(8, seed=1) + torch.zeros(20, 5, 8)
    assert lidar(on_a_line) == pytest.approx(1, abs=1e-4)


def test_lidar_ignores_directions_that_views_change():
    """Two directions tell images apart; the third varies as much, but within images: RankMe counts it, LiDAR less."""
    apart = 10 * math.sqrt(60) * orthonormal(60, 2)
    within = 10 * normal(60, 40, 1)
    views = torch.cat([apart[:, None].expand(60, 40, 2) + 1e-3 * normal(60, 40, 2, seed=1), within], dim=2)
    assert lidar(views) == pytest.approx(2, rel=1e-3)
    assert rankme(views.flatten(0, 1)) == pytest.approx(3, rel=1e-2)


# ---------------------------------------------------------------------------------------------------- the sphere


def test_alignment_at_the_known_points():
    z = normal(50, 6)
    assert alignment(z, 3 * z) == pytest.approx(0, abs=1e-12)
    assert alignment(z, -z) == pytest.approx(4)
    assert alignment(torch.eye(4)[:2].double(), torch.eye(4)[2:].double()) == pytest.approx(2)
    other = normal(50, 6, seed=1)
    assert alignment(z, other) == pytest.approx(float(2 - 2 * F.cosine_similarity(z, other).mean()))


def test_uniformity_at_the_known_points():
    assert uniformity(torch.ones(30, 4)) == pytest.approx(0, abs=1e-12)
    assert uniformity(torch.eye(9)) == pytest.approx(-4)  # all at right angles: squared distance 2
    assert uniformity(torch.eye(9), t=3.0) == pytest.approx(-6)
    both_ends = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert uniformity(both_ends) == pytest.approx(-8)
    assert uniformity(normal(3000, 256)) == pytest.approx(-4 + 8 / 256, abs=2e-3)  # uniform on the sphere, to 1/d


def test_uniformity_in_pieces_is_that_of_all_pairs(monkeypatch):
    z = normal(100, 5)
    monkeypatch.setattr("tico_ssl.evaluations._representation.sphere.CHUNK", 7)
    pairs = torch.pdist(F.normalize(z, dim=1)).square()
    assert uniformity(z) == pytest.approx(float(torch.exp(-2 * pairs).mean().log()), rel=1e-10)


# ---------------------------------------------------------------------------------------------------- neighbours


def test_views_that_agree_find_each_other_and_the_same_neighbours():
    z = normal(60, 8)
    assert consistency(torch.stack([z, z], dim=1), 10) == {"same_image": 100, "kept_neighbours_k10": 100}


def test_unrelated_views_agree_by_chance():
    found = consistency(torch.stack([normal(400, 8), normal(400, 8, seed=1)], dim=1), 10)
    assert found["same_image"] < 3
    assert found["kept_neighbours_k10"] == pytest.approx(100 * 10 / 399, abs=1)


def test_neighbour_consistency_by_hand():
    """On a circle, in degrees. First views: 0, 10, 100, 110; second views of the first two have changed places."""
    degrees = torch.tensor([[0.0, 10.0], [10.0, 0.0], [100.0, 101.0], [110.0, 111.0]], dtype=torch.float64)
    views = torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], dim=2)
    found = consistency(views, 1)
    assert found["same_image"] == 50  # 100 and 101, 110 and 111; the others meet the other image
    assert found["kept_neighbours_k1"] == 100  # the nearest other image is the same in both views


def test_neighbour_consistency_has_an_interval_over_images():
    near = normal(300, 8)
    views = {"trained": torch.stack([near, near + 0.2 * normal(300, 8, seed=1)], dim=1)}
    views["untrained"] = torch.stack([near, near + 1.0 * normal(300, 8, seed=1)], dim=1)
    numbers = {name: consistency(each, 10) for name, each in views.items()}
    intervals, differences = intervals_of(numbers)
    for metric, value in numbers["trained"].items():
        low, high = intervals["trained"][metric]
        assert 0 <= low < value < high <= 100
        low, high = differences["untrained"][metric]
        assert 0 < low < value - numbers["untrained"][metric] < high


# ---------------------------------------------------------------------------------------------------- clustering


def test_clusters_under_other_names_are_the_classes():
    truth = np.arange(60) % 3
    assert set(agreement((truth + 1) % 3 + 5, truth).values()) == {100.0}


def test_agreement_by_hand_and_by_scikit_learn():
    truth = np.array([0, 0, 0, 1, 1, 1])
    clusters = np.array([1, 1, 0, 0, 0, 2])
    found = agreement(clusters, truth)
    assert found["accuracy"] == pytest.approx(100 * 4 / 6)  # cluster 1 is class 0, cluster 0 is class 1, 2 is nobody's
    assert found["nmi"] == pytest.approx(100 * normalized_mutual_info_score(truth, clusters))
    assert found["ari"] == pytest.approx(100 * adjusted_rand_score(truth, clusters))
    joint = {(0, 1): 2 / 6, (0, 0): 1 / 6, (1, 0): 2 / 6, (1, 2): 1 / 6}
    of_clusters = {0: 3 / 6, 1: 2 / 6, 2: 1 / 6}
    mutual = sum(p * math.log(p / (0.5 * of_clusters[c])) for (_, c), p in joint.items())
    entropies = math.log(2), -sum(p * math.log(p) for p in of_clusters.values())
    assert found["nmi"] == pytest.approx(100 * mutual / (sum(entropies) / 2))


def test_agreement_is_that_of_scikit_learn_also_on_resamples_and_bounded_by_an_interval():
    """The interval of better clusters lies higher, and that of the difference tells them apart."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 5, 400)
    better, worse = (np.where(rng.random(400) < share, truth, rng.integers(0, 7, 400)) for share in (0.8, 0.6))
    again = rng.integers(0, 400, 400)
    counts = np.bincount(again, minlength=400)
    table = np.array([[counts[(truth == row) & (better == column)].sum() for column in range(7)] for row in range(5)])
    assert mutual_information(table) == pytest.approx(normalized_mutual_info_score(truth[again], better[again]))
    assert rand_index(table) == pytest.approx(adjusted_rand_score(truth[again], better[again]))
    numbers = {"trained": agreement(better, truth), "untrained": agreement(worse, truth)}
    intervals, differences = intervals_of(numbers)
    for metric, value in numbers["trained"].items():
        low, high = intervals["trained"][metric]
        assert 0 < low < value < high < 100
        assert high - low < 20
        low, high = differences["untrained"][metric]
        assert 0 < low < value - numbers["untrained"][metric] < high


def test_an_interval_of_clusters_holds_what_other_images_would_give():
    """In about 95 of 100 draws of the test images from one population of clustered images."""
    rng, held = np.random.default_rng(1), 0
    truth = rng.integers(0, 4, 40_000)
    clusters = np.where(rng.random(40_000) < 0.7, truth, rng.integers(0, 4, 40_000))
    whole = 100 * float((clusters == truth).mean())
    for _ in range(60):
        some = rng.integers(0, 40_000, 300)
        low, high = agreement(clusters[some], truth[some]).evidence["accuracy"].interval()
        held += low < whole < high
    assert held >= 52


def test_alignment_has_an_interval_over_images():
    views = torch.stack([near := normal(300, 8), near + 0.3 * normal(300, 8, seed=1)], dim=1)
    found = alignment_uniformity._both(views, 2.0)
    found |= found.renamed("embedding_{}".format)
    low, high = found.evidence["embedding_alignment"].interval()
    assert found["embedding_alignment"] == pytest.approx(alignment(views[:, 0], views[:, 1]))
    assert low < found["embedding_alignment"] < high
    assert "embedding_uniformity" not in found.evidence


def test_one_cluster_for_everything_says_nothing():
    found = agreement(np.zeros(40, dtype=int), np.arange(40) % 4)
    assert (found["nmi"], found["ari"], found["accuracy"]) == (0, 0, 25)


def test_k_means_finds_groups_whatever_the_scale_of_an_image_and_the_same_every_time():
    labels = torch.arange(90) % 3
    lengths = torch.rand(90, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    features = lengths * (torch.eye(3)[labels] + 0.05 * normal(90, 3).float())
    config = clustering.Config(restarts=3)
    found = cluster(features, 3, config)
    assert agreement(found, labels.numpy())["accuracy"] == 100
    assert np.array_equal(found, cluster(features, 3, config))


def test_more_restarts_are_never_worse():
    features = normal(200, 5)

    def inertia(clusters):
        unit = F.normalize(features, dim=1)
        return sum(
            float((unit[clusters == c] - unit[clusters == c].mean(0)).square().sum()) for c in np.unique(clusters)
        )

    one, ten = (cluster(features, 8, clustering.Config(restarts=n)) for n in (1, 10))
    assert inertia(ten) <= inertia(one) + 1e-4


def test_clusters_must_be_possible():
    with pytest.raises(UserError, match="clustering needs between 2 and 5 clusters"):
        cluster(normal(5, 2), 4, clustering.Config(clusters=6))
    with pytest.raises(UserError, match=r"not 1$"):
        cluster(normal(5, 2), 1, clustering.Config())


# ---------------------------------------------------------------------------------------------------- while training


def test_what_the_monitor_sees_of_a_batch():
    features = normal(128, 32)
    found = {name: float(value) for name, value in occupied(features.float()).items()}
    unit = F.normalize(features.float().double(), dim=1)
    assert found["embedding_rank"] == pytest.approx(rankme(unit), rel=1e-6)
    assert found["embedding_uniformity"] == pytest.approx(uniformity(unit), abs=1e-9)


def test_the_monitor_sees_collapse_of_all_and_of_most_dimensions():
    point = occupied(torch.ones(64, 32, dtype=torch.bfloat16))
    assert float(point["embedding_rank"]) == pytest.approx(1, abs=1e-3)
    assert float(point["embedding_uniformity"]) == pytest.approx(0, abs=1e-6)
    plane = {"loss": 1.0, "embedding_rank": float(occupied(normal(64, 2) @ normal(2, 32, seed=1))["embedding_rank"])}
    assert plane["embedding_rank"] <= 2 + 1e-3
    assert "effective rank 2.0" in collapse_signs(plane, None)["embedding_rank"]
    assert collapse_signs({"loss": 1.0, "embedding_rank": 40.0}, None) == {}
    assert collapse_signs({"loss": 1.0}, None) == {}


def test_a_rank_is_not_held_against_few_images_or_few_dimensions():
    assert occupied(normal(64, 4)) == {}
    assert occupied(normal(6, 64)) == {}


def test_large_batches_are_judged_by_their_first_images():
    features = normal(700, 16)
    assert occupied(features) == occupied(features[:256])


# ---------------------------------------------------------------------------------------------------- on a run


def test_the_log_has_the_early_signals(run):
    for line in run.metrics():
        assert 1 <= line["embedding_rank"] <= 16 + 1e-3
        assert -4.3 <= line["embedding_uniformity"] <= 0


@pytest.fixture(scope="module")
def results(run):
    overrides = {"alpha-req": {"first": 2}, "lidar": {"views": 3, "images": 60}}
    return {name: evaluate(run.folder, name, overrides=overrides.get(name)) for name in LABEL_FREE}


def test_every_number_stands_beside_the_untrained_one(results):
    for result in results.values():
        assert list(result.numbers) == ["trained", "untrained"]
        assert result.numbers["trained"].keys() == result.numbers["untrained"].keys()
        assert all(math.isfinite(value) for numbers in result.numbers.values() for value in numbers.values())
        assert result.numbers["trained"] != result.numbers["untrained"]
        json.dumps(result.data)


def test_numbers_of_the_embedding_are_there(results):
    for protocol, metric in (
        ("rankme", "embedding_rankme"),
        ("lidar", "embedding_lidar"),
        ("alignment-uniformity", "embedding_alignment"),
        ("spectrum", "embedding_rank_by_variance"),
    ):
        assert metric in results[protocol].numbers["trained"]
    assert 1 <= results["rankme"].numbers["trained"]["embedding_rankme"] <= 16 + 1e-3


def test_the_result_has_the_spectrum_to_draw(results):
    spectra = results["spectrum"].data["spectra"]
    assert spectra.keys() == {"trained", "untrained", "trained embedding", "untrained embedding"}
    for found in spectra.values():
        assert found["share"] == sorted(found["share"], reverse=True)
        assert sum(found["share"]) <= 1 + 1e-3
    share = results["spectrum"].numbers["trained"]["largest_share"]
    assert spectra["trained"]["share"][0] == pytest.approx(share / 100, rel=1e-3)


def test_embeddings_are_what_the_trained_projector_makes_of_features(run):
    context = open_context(run.folder)
    features = context.features("trained").train[:7]
    state = torch.load(run.checkpoint_file, weights_only=True)["method"]
    weights = {k.removeprefix("projector."): v for k, v in state.items() if k.startswith("projector.")}
    hidden = F.linear(features, weights["0.weight"], weights.get("0.bias"))
    norm = [weights[f"1.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
    hidden = F.relu(F.batch_norm(hidden, *norm))
    expected = F.normalize(F.linear(hidden, weights["3.weight"], weights.get("3.bias")), dim=1)
    found = embeddings(context, {name: context.features(name).train[:7] for name in context.backbones})
    assert torch.allclose(found["trained"], expected, atol=1e-5)
    assert found["untrained"].shape == (7, 16)
    assert not torch.allclose(found["untrained"], found["trained"], atol=1e-2)


def sorted_by_class(run, images, width=32, classes=4):
    """A context whose features are sorted by class; each class has directions of its own and a mean far from the
    others'."""
    values = torch.zeros(images, width)
    for label in range(classes):
        mine = slice(label * images // classes, (label + 1) * images // classes)
        own = slice(label * width // classes, (label + 1) * width // classes)
        values[mine, own] = normal(images // classes, width // classes, seed=label).float() + 10
    context = open_context(run.folder)
    for name in context.backbones:
        context._features[name, False, context.cache] = Features(values, values[:1])
    return context


def test_some_images_of_sorted_ones_have_the_directions_of_all_classes(run):
    context = sorted_by_class(run, 400)
    of_a_class = 8
    assert rankme_protocol.run(context, rankme_protocol.Config(images=100)).numbers["trained"]["rankme"] > of_a_class
    assert spectrum.run(context, spectrum.Config(images=100)).numbers["trained"]["rank_by_deviation"] > of_a_class
    assert alpha_req.run(context, alpha_req.Config(images=100)).data["fitted"]["trained"] == [5, 16]


def test_the_untrained_projector_is_calibrated_on_all_classes_of_sorted_images(run):
    context = sorted_by_class(run, 4 * CALIBRATION)
    features = context.features("untrained").train
    embeddings(context, dict.fromkeys(context.backbones, features[:2]))
    linear, norm = context.kept["projectors"]["untrained"][:2]
    outputs = linear(features)
    assert ((norm.running_mean - outputs.mean(0)).abs() < 0.2 * outputs.std(0)).all()
    assert ((norm.running_var / outputs.var(0) - 1).abs() < 0.1).all()


def test_without_a_checkpoint_there_are_no_numbers_of_the_embedding(run, monkeypatch, capsys):
    context = open_context(run.folder)
    hidden = run.checkpoint_file.with_name("hidden.pt")
    run.checkpoint_file.rename(hidden)
    try:
        assert embeddings(context, {name: torch.zeros(2, 32) for name in context.backbones}) == {}
        assert "no metrics of the embedding" in capsys.readouterr().out
    finally:
        hidden.rename(run.checkpoint_file)


def test_views_are_the_same_every_time_differ_from_each_other_and_are_made_once(run, monkeypatch):
    contexts = [open_context(run.folder) for _ in range(2)]
    settings = ViewSettings(images=20)
    three = views_of_images(contexts[0], settings, 3)
    two = views_of_images(contexts[1], settings, 2)
    assert three["trained"].shape == (20, 3, 32)
    assert torch.equal(three["trained"][:, :2], two["trained"])
    assert not torch.allclose(three["trained"][:, 0], three["trained"][:, 1])
    monkeypatch.setattr(
        "tico_ssl.evaluations._representation.augmented._one_view", lambda *given: pytest.fail("made again")
    )
    assert torch.equal(views_of_images(contexts[0], settings, 2)["untrained"], two["untrained"])


def test_a_policy_by_name_and_its_errors(run, monkeypatch):
    context = open_context(run.folder)
    own = views_of_images(context, ViewSettings(images=5), 1)["trained"]
    named = views_of_images(context, ViewSettings(images=5, policy="byol-small"), 1)["trained"]
    assert not torch.allclose(own, named)
    with pytest.raises(UserError, match="no policy is called 'byl'; did you mean 'byol'"):
        views_of_images(context, ViewSettings(policy="byl"), 1)
    monkeypatch.setattr(
        "tico_ssl.evaluations._representation.augmented.named_policy", lambda name: [{"size": 20}, {"jigsaw": 3}]
    )
    with pytest.raises(UserError, match="no view of this recipe is one image of 16 pixels"):
        views_of_images(context, ViewSettings(policy="byol"), 1)


def test_files_of_many_sizes_have_views_too(run, tmp_path):
    random = np.random.default_rng(0)
    for number in range(12):
        side = int(random.integers(20, 40))
        Image.fromarray(random.integers(0, 256, (side, 30, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_bytes(b"not an image")
    for protocol in ("lidar", "alignment-uniformity", "neighbour-consistency", "spectrum"):
        numbers = evaluate(run.folder, protocol, data=str(tmp_path)).numbers
        assert all(math.isfinite(value) for value in numbers["trained"].values())
