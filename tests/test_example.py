"""The one-file example computes the package's loss, and runs."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tico_ssl import LARS, tico_loss

FILE = Path(__file__).parent.parent / "examples" / "tico_in_one_file.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("tico_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_loss_and_gradient_are_the_package_s(example):
    generator = torch.Generator().manual_seed(0)
    covariance = mine = torch.zeros(5, 5, dtype=torch.float64)
    for _ in range(4):
        online, target = torch.randn(2, 7, 5, dtype=torch.float64, generator=generator)
        a, b = online.clone().requires_grad_(), online.clone().requires_grad_()
        loss, mine = example.tico_loss(a, target, mine)
        terms = tico_loss(b, target, covariance, rho=example.RHO, beta=example.BETA)
        covariance = terms.covariance
        loss.backward()
        terms.loss.backward()
        assert loss.item() == pytest.approx(terms.loss.item(), abs=1e-14)
        assert torch.allclose(a.grad, b.grad, atol=1e-14, rtol=0)
        assert torch.allclose(mine, covariance, atol=1e-15, rtol=0)


def test_its_lars_is_the_package_s(example):
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    other.load_state_dict(one.state_dict())
    optimizer, momenta = LARS(other.parameters(), lr=0.7, weight_decay=example.WEIGHT_DECAY), {}
    for _ in range(3):
        batch = torch.randn(6, 4, dtype=torch.float64)
        for network in (one, other):
            network(batch).square().mean().backward()
        example.lars_step(one, momenta, 0.7)
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(one.parameters(), other.parameters()):
        assert torch.allclose(mine, theirs, atol=1e-14, rtol=0)


def test_it_trains_and_saves_an_encoder_that_torchvision_loads(
    example, tmp_path, monkeypatch, folder_of_images, capsys
):
    import torchvision

    monkeypatch.chdir(tmp_path)
    for name, value in {"BATCH": 4, "EPOCHS": 2, "IMAGE_SIZE": 32, "HIDDEN": 16, "DIM": 8}.items():
        monkeypatch.setattr(example, name, value)
    example.main(str(folder_of_images))
    assert "epoch 2/2" in capsys.readouterr().out
    missing = torchvision.models.resnet18().load_state_dict(torch.load("encoder.pth"), strict=False)
    assert missing.missing_keys == ["fc.weight", "fc.bias"]
    assert missing.unexpected_keys == []


def test_it_refuses_a_folder_without_images(example, tmp_path):
    with pytest.raises(SystemExit, match=r"0 images \(\.jpg \.jpeg \.png \.webp\), and a batch needs 64"):
        example.main(str(tmp_path))
    with pytest.raises(SystemExit, match="nowhere: there is no such folder"):
        example.main(str(tmp_path / "nowhere"))


def test_it_reads_the_usual_endings_in_any_case_at_any_depth(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "BATCH", 4)
    names = ("a.jpeg", "b.JPG", "deep/c.webp", "deep/d.Png")
    for name in (*names, "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(file.relative_to(tmp_path)) for file in example.TwoViews(str(tmp_path)).files] == sorted(names)


@pytest.mark.parametrize(("words", "code", "said"), [(["--help"], 0, "at any depth"), (["a", "b"], 2, "usage: ")])
def test_it_explains_itself(words, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FILE), *words])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(FILE), run_name="__main__")
    assert stopped.value.code == code
    assert said in "".join(capsys.readouterr())


def test_it_is_short():
    assert len(FILE.read_text().splitlines()) <= 140
