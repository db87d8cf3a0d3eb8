"""The package's softmax regression against torch's L-BFGS and scikit-learn's, on the same features and objective.

    python benchmarks/regression.py [--out FILE] [--classes 10 100]

50,000 features of width 512 as in probes.py, standardised, with the four weight decays of the linear probe. Every
solver gets at most 100 iterations and the same objective: mean cross entropy + decay / 2 |W|^2, no decay on the bias.
`excess` is the final objective above the lowest of the three solvers, for the worst of the four weight decays.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from probes import drawn

from tico_ssl.features.regression import fit_linears
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import choose_device

DECAYS, ITERATIONS = (1e-5, 1e-4, 1e-3, 1e-2), 100

Weights = tuple[Tensor, Tensor]  # (classes, features) and (classes,)
Solver = Callable[[Tensor, Tensor, int], list[Weights]]


def own(features: Tensor, labels: Tensor, classes: int) -> list[Weights]:
    """All weight decays in one call, as in the linear probe."""
    return [(linear.weight, linear.bias) for linear in fit_linears(features, labels, DECAYS, ITERATIONS, classes)]


def of_torch(features: Tensor, labels: Tensor, classes: int) -> list[Weights]:
    """torch.optim.LBFGS with strong Wolfe line search and the same history size, one weight decay after the other."""
    return [_by_torch(features, labels, classes, decay) for decay in DECAYS]


def _by_torch(features: Tensor, labels: Tensor, classes: int, decay: float) -> Weights:
    weight = torch.zeros(classes, features.shape[1], device=features.device, requires_grad=True)
    bias = torch.zeros(classes, device=features.device, requires_grad=True)
    limits = {"max_iter": ITERATIONS, "max_eval": 10 * ITERATIONS, "history_size": 50}
    optimizer = torch.optim.LBFGS([weight, bias], line_search_fn="strong_wolfe", **limits)

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(features @ weight.T + bias, labels) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss  # type: ignore[return-value]

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def of_scikit_learn(features: Tensor, labels: Tensor, classes: int) -> list[Weights]:
    """LogisticRegression, whose solver is SciPy's L-BFGS. CPU only."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    found = []
    for decay in DECAYS:
        model = LogisticRegression(C=1 / (len(features) * decay), max_iter=ITERATIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # all solvers have the same iteration limit
            model.fit(features.numpy(), labels.numpy())
        found.append((torch.tensor(model.coef_).float(), torch.tensor(model.intercept_).float()))
    return found


def objective(features: Tensor, labels: Tensor, weights: Weights, decay: float) -> float:
    """The objective in float64."""
    weight, bias = (part.double() for part in weights)
    loss = F.cross_entropy(features.double() @ weight.T + bias, labels) + decay / 2 * weight.square().sum()
    return float(loss)


def compare(classes: int, device: torch.device) -> list[dict[str, Any]]:
    """Seconds and objective of every solver that supports this device."""
    given = drawn(classes)
    train_labels, _ = given.labels("regression")
    features, labels = given.train.to(device), train_labels.to(device)
    features = (features - features.mean(0)) / features.std(0)
    solvers: dict[str, Solver] = {"tico_ssl": own, "torch.optim.LBFGS": of_torch}
    if device.type == "cpu":
        solvers["scikit-learn"] = of_scikit_learn
    seconds, values = {}, {}
    for name, solve in solvers.items():
        if device.type == "cuda":
            solve(features, labels, classes)  # warm-up
            torch.cuda.synchronize()
        begin = time.perf_counter()
        weights = solve(features, labels, classes)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - begin
        values[name] = [objective(features, labels, *pair) for pair in zip(weights, DECAYS, strict=True)]
    lowest = [min(found) for found in zip(*values.values(), strict=True)]
    return [
        {
            "solver": name,
            "classes": classes,
            "seconds": round(seconds[name], 2),
            "excess": max(value - low for value, low in zip(values[name], lowest, strict=True)),
        }
        for name in solvers
    ]


def main() -> None:
    """Print one JSON line for each solver and number of classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--classes", type=int, nargs="*", default=[10, 100])
    arguments = parser.parse_args()
    device = choose_device()
    lines: list[dict[str, Any]] = [{"machine": environment(), "threads": torch.get_num_threads()}]
    for classes in arguments.classes:
        for line in compare(classes, device):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
