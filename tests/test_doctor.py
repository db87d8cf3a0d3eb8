"""`tico doctor`: every line says what there is, and what to do about what is missing."""

import os
import shutil
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tico_ssl.cli import app
from tico_ssl.runtime import checkup
from tico_ssl.runtime.extras import EXTRAS

GIB = 2**30


def of(about):
    """What `examine` finds about something, as lines."""
    return [one.line() for one in checkup.examine() if one.about == about]


def without(monkeypatch, *modules):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


def test_where_training_can_run_the_exit_code_is_0():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = [line.split(maxsplit=1) for line in result.output.splitlines()]
    assert all(len(words) == 2 for words in lines)
    about = [words[0] for words in lines]
    wanted = ["python", "torch", "gpu", "kernels", "cpu", "memory", "folder", "cache", "extra", "device", "result"]
    assert [name for name in dict.fromkeys(about) if name in wanted] == wanted
    assert about.count("extra") == len(EXTRAS)
    assert f"torch      {torch.__version__}" in result.output
    assert "result     training can run here\n" in result.output


def test_without_torch_it_says_so_and_the_exit_code_is_1(monkeypatch):
    without(monkeypatch, "torch")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "torch      cannot be imported" in result.output
    assert result.output.endswith("result     training cannot run here: see torch\n")


def test_a_folder_that_cannot_be_written_to_prevents_training_a_cache_does_not(monkeypatch, tmp_path):
    monkeypatch.setenv("TICO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert of("cache")[0].endswith("not writable: set TICO_CACHE")
    assert of("result") == ["result     training can run here"]
    monkeypatch.chdir(tmp_path)
    assert of("folder")[0].endswith("not writable: work in another folder, or give --out")
    assert of("result") == ["result     training cannot run here: see folder"]


def test_what_is_scarce_or_missing_has_a_remedy(monkeypatch):
    monkeypatch.setattr(checkup, "free_memory", lambda: GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6, total=10**6))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    without(monkeypatch, "tifffile")
    found = {one.about: one for one in checkup.examine()}
    assert found["memory"].line().startswith("memory     1.0 GiB free: close other programs")
    assert found["folder"].remedy == found["cache"].remedy == "free some space"
    assert found["kernels"].remedy == "install a C compiler (gcc)"
    (tiff,) = [line for line in of("extra") if "tiff" in line]
    assert tiff.startswith("extra      tiff (TIFFs of ")
    assert "), tifffile not installed: pip install " in tiff
    assert tiff.endswith("[tiff]'")
    assert not found["result"].prevents


def test_a_device_that_cannot_compute_prevents_training(monkeypatch):
    monkeypatch.setenv("TICO_DEVICE", "cuda:7" if not torch.cuda.is_available() else "cuda:77")
    assert of("device")[0].endswith("TICO_DEVICE=cpu uses the CPU instead")
    assert of("result") == ["result     training cannot run here: see device"]


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch>=2.11", ""),
        ("torch>=999.1", f"torch {metadata.version('torch')} is too old"),
        ("no-such-library>=1", "no-such-library is not installed"),
        ("numpy", ""),
    ],
)
def test_libraries_must_be_new_enough(requirement, expected):
    assert checkup._unmet(requirement) == expected


class Cuda(SimpleNamespace):
    """torch.cuda of a machine with so many GPUs."""

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def get_device_properties(self, number):
        return SimpleNamespace(name="NVIDIA H200", major=9, minor=0)

    def mem_get_info(self, number):
        return 100 * GIB, 140 * GIB


@pytest.mark.parametrize(
    ("gpus", "cuda", "driver", "expected"),
    [
        (1, "13.0", True, "0: NVIDIA H200, 140.0 GiB of memory, 100.0 free, capability 9.0"),
        (0, None, True, "not usable: this torch is built for CPUs; install one for CUDA"),
        (0, "13.0", True, "there is a driver, but torch finds no GPU: CUDA 13.0 may need a newer driver"),
        (0, "13.0", False, "none; training runs on the CPU"),
    ],
)
def test_gpus(gpus, cuda, driver, expected, tmp_path, monkeypatch):
    (tmp_path / "version").touch()
    monkeypatch.setattr(checkup, "DRIVER", tmp_path / ("version" if driver else "nowhere"))
    found = list(checkup._gpus(SimpleNamespace(cuda=Cuda(count=gpus), version=SimpleNamespace(cuda=cuda))))
    assert [one.line().startswith(f"gpu        {expected}") for one in found] == [True]
