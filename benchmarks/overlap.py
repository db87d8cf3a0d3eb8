"""Time that a captured step saves by running target and online network on two CUDA streams.

Every method with a target network, with its CIFAR-10 recipe, views included.

    python benchmarks/overlap.py [KEY=VALUE ...] [--recipes cifar10/tico ...] [--seconds 4]
"""

from steps import Form, main

RECIPES = ("tico", "byol", "moco", "moco-v2", "squared-contrastive")

if __name__ == "__main__":
    main(
        __doc__,
        {f"cifar10/{name}": {} for name in RECIPES},
        {"one after the other": Form(overlap=False), "side by side": Form()},
    )
