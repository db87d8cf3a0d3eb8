"""TiCo in one file: Algorithm 1 of the paper with everything it needs, on one GPU or none.

    python examples/tico_in_one_file.py photos/        # any folder of images
    python examples/tico_in_one_file.py                # random images, as a smoke test

Plain torch and torchvision, no imports from the package, which adds batched views, checkpoints, multi-GPU training,
monitoring and evaluation.
"""

import argparse
import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

RHO, BETA, EMA_START = 8.0, 0.9, 0.99
DIM, HIDDEN, IMAGE_SIZE = 256, 4096, 64
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
BATCH, EPOCHS, BASE_LR, WEIGHT_DECAY, WARMUP = 64, 10, 0.2, 1.5e-6, 1


def make_view(blur: float, solarise: float) -> v2.Transform:
    """BYOL's random augmentations: T always blurs; T' blurs rarely and sometimes solarises."""
    kernel = 2 * (IMAGE_SIZE // 20) + 1
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(IMAGE_SIZE, scale=(0.08, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(kernel, (0.1, 2.0))], p=blur),
            v2.RandomSolarize(128, p=solarise),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two randomly augmented versions of every image of a folder."""

    def __init__(self, folder: str | None) -> None:
        self.files = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in SUFFIXES) if folder else []
        if folder and not Path(folder).is_dir():
            sys.exit(f"{folder}: there is no such folder")
        if folder and len(self.files) < BATCH:
            sys.exit(f"{folder}: {len(self.files)} images ({' '.join(SUFFIXES)}), and a batch needs {BATCH}")
        self.view_1, self.view_2 = make_view(blur=1.0, solarise=0.0), make_view(blur=0.1, solarise=0.2)

    def __len__(self) -> int:
        return len(self.files) or 4 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.files:
            image = Image.open(self.files[index]).convert("RGB")
        else:
            image = Image.effect_noise((96, 96), 50 + index % 100).convert("RGB")
        return self.view_1(image), self.view_2(image)


def make_network() -> nn.Module:
    """Encoder and projector."""
    encoder = torchvision.models.resnet18(zero_init_residual=True)
    width, encoder.fc = encoder.fc.in_features, nn.Identity()
    projector = [
        nn.Linear(width, HIDDEN, bias=False),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, DIM, bias=False),
    ]
    return nn.Sequential(encoder, nn.Sequential(*projector))


def tico_loss(z_1: Tensor, z_2: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the covariance for the next step."""
    z_1, z_2 = F.normalize(z_1, dim=1), F.normalize(z_2, dim=1)
    B = z_1.T @ z_1 / len(z_1)
    C = BETA * C + (1 - BETA) * B
    loss = 1 - (z_1 * z_2).sum(dim=1).mean() + RHO * ((z_1 @ C) * z_1).sum(dim=1).mean()
    return loss, C.detach()


@torch.no_grad()
def lars_step(network: nn.Module, momenta: dict[str, Tensor], lr: float) -> None:
    """LARS with a trust coefficient of 0.001; biases and BatchNorm use plain momentum."""
    for name, p in network.named_parameters():
        g = p.grad
        assert g is not None
        if p.ndim > 1:
            g = g + WEIGHT_DECAY * p
            if p.norm() > 0 and g.norm() > 0:
                g = g * 1e-3 * p.norm() / g.norm()
        momenta[name] = 0.9 * momenta.get(name, torch.zeros_like(p)) + g
        p.sub_(lr * momenta[name])
        p.grad = None


def main(folder: str | None) -> None:
    """Train and save the encoder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(TwoViews(folder), BATCH, shuffle=True, drop_last=True, num_workers=2)
    f = make_network().to(device)
    fm = copy.deepcopy(f).requires_grad_(False)
    C, momenta = torch.zeros(DIM, DIM, device=device), dict[str, Tensor]()
    total, warmup, peak = EPOCHS * len(loader), WARMUP * len(loader), BASE_LR * BATCH / 256
    step = 0
    for epoch in range(EPOCHS):
        for x_1, x_2 in loader:
            z_1 = f(x_1.to(device))
            with torch.no_grad():
                z_2 = fm(x_2.to(device))
            loss, C = tico_loss(z_1, z_2, C)
            loss.backward()
            cosine = (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
            lars_step(f, momenta, peak * (step / warmup if step < warmup else 0.01 + 0.99 * cosine))
            alpha = 1 - (1 - EMA_START) * (math.cos(math.pi * step / total) + 1) / 2
            with torch.no_grad():
                for xi, theta in zip(fm.parameters(), f.parameters()):
                    xi.lerp_(theta, 1 - alpha)
            step += 1
        print(f"epoch {epoch + 1}/{EPOCHS}  loss {loss.item():.3f}  (at collapse: {RHO})")
    torch.save(f[0].state_dict(), "encoder.pth")  # type: ignore[index]
    print("wrote encoder.pth, for torchvision.models.resnet18")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help=f"images ({' '.join(SUFFIXES)}) at any depth; by default random ones")
    main(parser.parse_args().folder)
