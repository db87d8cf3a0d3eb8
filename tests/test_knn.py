"""Nearest neighbours in pieces against all at once, votes of several settings, and retrieval by their ranking."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

from tico_ssl import evaluate
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.evaluations import knn, retrieval
from tico_ssl.evaluations.retrieval import retrieved
from tico_ssl.features.frozen import Features
from tico_ssl.features.knn import knn_accuracy, knn_predictions, metric_names
from tico_ssl.features.neighbours import nearest
from tico_ssl.features.settings import Voters
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime.errors import UserError


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels_of(count, classes, seed=0):
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize(("bank_chunk", "query_chunk"), [(1, 1), (7, 5), (16, 100), (101, 3), (1000, 1000)])
@pytest.mark.parametrize("k", [1, 5, 101, 500])
def test_pieces_give_what_the_whole_matrix_gives(bank_chunk, query_chunk, k):
    bank, queries = normal(101, 6), normal(23, 6, seed=1)
    found = nearest(bank, queries, k, bank_chunk=bank_chunk, query_chunk=query_chunk)
    whole = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    expected = whole.sort(dim=1, descending=True)
    assert found.places.shape == (23, min(k, 101))
    assert torch.equal(found.places, expected.indices[:, :k])
    assert torch.allclose(found.cosines, expected.values[:, :k], rtol=0, atol=1e-14)


@pytest.mark.parametrize("bank_chunk", [4, 50])
def test_a_place_that_is_left_out_is_never_found(bank_chunk):
    bank = normal(50, 3)
    itself = torch.arange(50)
    found = nearest(bank, bank, 49, left_out=itself, bank_chunk=bank_chunk, query_chunk=8)
    assert found.places.shape == (50, 49)
    assert not (found.places == itself[:, None]).any()
    assert all(len(set(row)) == 49 for row in found.places.tolist())
    assert nearest(bank, bank, 60, left_out=itself).places.shape == (50, 49)  # there are no more


def test_the_inputs_stay_as_they_were():
    bank, queries = normal(20, 3), normal(5, 3, seed=1)
    before = bank.clone(), queries.clone()
    nearest(bank, queries, 3)
    assert torch.equal(bank, before[0])
    assert torch.equal(queries, before[1])


# ---------------------------------------------------------------------------------------------------- votes


def test_several_ks_and_temperatures_in_one_pass_equal_brute_force():
    train, labels, queries = normal(300, 8), labels_of(300, 5), normal(60, 8, seed=1)
    voters = [Voters(k=k, temperature=t) for k in (1, 3, 20, 200, 1000) for t in (0.02, 0.07, 1.0)]
    found = knn_predictions(train, labels, queries, voters, chunk=11, bank_chunk=37)
    assert len(found) == 15
    whole = (F.normalize(queries, dim=1) @ F.normalize(train, dim=1).T).numpy()
    for voter, predicted in zip(voters, found):
        for row, guess in zip(whole, predicted.tolist()):
            votes = np.zeros(5)
            for place in np.argsort(-row)[: voter.k]:
                votes[labels[place]] += math.exp((row[place] - row.max()) / voter.temperature)
            assert guess == votes.argmax()


def test_a_small_temperature_is_the_vote_of_the_nearest_and_a_large_one_counts_heads():
    train, labels, queries = normal(200, 4), labels_of(200, 3), normal(40, 4, seed=1)
    first, sharp, flat = knn_predictions(
        train,
        labels,
        queries,
        [Voters(k=1, temperature=1.0), Voters(k=15, temperature=1e-9), Voters(k=15, temperature=1e9)],
    )
    assert torch.equal(first, sharp)
    places = nearest(train, queries, 15).places
    heads = F.one_hot(labels[places], 3).sum(dim=1)
    assert torch.equal(heads.gather(1, flat[:, None]).ravel(), heads.amax(dim=1))


def test_names_tell_settings_apart():
    pair = [Voters(k=20, temperature=0.07), Voters(k=200, temperature=0.1)]
    assert metric_names(pair) == ["top1_k20", "top1_k200"]
    same = [*pair, Voters(k=20, temperature=0.1)]
    assert metric_names(same) == ["top1_k20_t0.07", "top1_k200", "top1_k20_t0.1"]
    features = Features(normal(50, 4), normal(10, 4, seed=1), labels_of(50, 3), labels_of(10, 3))
    assert len(knn_accuracy(features, knn.Config(voters=tuple(same)))) == 3


def test_defaults_are_those_in_common_use():
    assert [(voter.k, voter.temperature) for voter in knn.Config().voters] == [(20, 0.07), (200, 0.1)]


def test_images_of_several_classes_are_refused_before_anything_is_extracted(tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w2"), 8), tmp_path / "b.safetensors")
    images = np.zeros((10, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.ones((10, 3), dtype=np.int64), classes=np.array(list("abc")))
    monkeypatch.setattr("tico_ssl.features.frozen.frozen_features", lambda *given: pytest.fail("extracted"))
    for protocol in ("knn", "retrieval", "clustering", "corruptions"):
        with pytest.raises(UserError, match=f"^{protocol} needs one class per image; these images have several$"):
            evaluate(tmp_path / "b.safetensors", protocol, data=str(tmp_path / "x.npz"))


# ---------------------------------------------------------------------------------------------------- retrieval


def test_retrieval_by_hand():
    """The query's class is 0 and it ranks 0 1 0 1 0: precision 1, 2/3 and 3/5 at the hits, of which R = 3 sees two."""
    angles = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    bank = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([3.0, 0.1, 2.0, 5.0, 1.0])[:, None]
    labels = torch.tensor([0, 1, 0, 1, 0])
    query = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    found = retrieved(Features(bank, query, labels, torch.tensor([0])), retrieval.Config(ks=(1, 2, 4)))
    assert found["map"] == pytest.approx(100 * (1 + 2 / 3 + 3 / 5) / 3)
    assert found["map_at_r"] == pytest.approx(100 * (1 + 2 / 3) / 3)
    assert [found[f"precision_at_{k}"] for k in (1, 2, 4)] == pytest.approx([100, 50, 50])
    other = retrieved(Features(bank, query, labels, torch.tensor([1])), retrieval.Config(ks=(1, 2)))
    assert (other["recall_at_1"], other["recall_at_2"]) == (0, 100)
    assert other["map"] == pytest.approx(50)


@pytest.mark.parametrize("held", [1, 50_000])
def test_average_precision_over_all_ranks_is_scikit_learns(held, monkeypatch):
    monkeypatch.setattr(retrieval, "SIMILARITIES", held)
    bank, labels, queries, asked = normal(150, 5), labels_of(150, 4), normal(30, 5, seed=1), labels_of(30, 4, seed=1)
    found = retrieved(Features(bank, queries, labels, asked), retrieval.Config())
    cosines = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    expected = [average_precision_score(labels == y, row) for y, row in zip(asked, cosines)]
    assert found["map"] == pytest.approx(100 * np.mean(expected), rel=1e-12)


def test_a_perfect_representation_retrieves_perfectly():
    labels, asked = torch.arange(40) % 4, torch.arange(12) % 4
    found = retrieved(Features(torch.eye(4)[labels], torch.eye(4)[asked], labels, asked), retrieval.Config())
    assert set(found.values()) == {100.0}


def test_classes_that_nobody_has_seen_do_not_ask():
    labels, asked = torch.tensor([0, 0, 1]), torch.tensor([0, 7])
    found = retrieved(Features(torch.eye(3), torch.eye(3)[:2], labels, asked), retrieval.Config(ks=(1,)))
    assert found["recall_at_1"] == 100
    with pytest.raises(UserError, match="retrieval needs a class that training and test images share"):
        retrieved(Features(torch.eye(3), torch.eye(3)[:1], labels, torch.tensor([7])), retrieval.Config())


def test_of_many_queries_some_are_asked():
    labels = torch.arange(100) % 2
    features = Features(torch.eye(2)[labels], torch.eye(2)[labels], labels, labels)
    assert retrieved(features, retrieval.Config(queries=7))["map"] == 100
