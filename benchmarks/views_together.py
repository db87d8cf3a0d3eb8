"""Time that a captured step saves by taking both views through the backbone in one pass, each with its own BatchNorm
statistics.

Methods that train on two views, with their CIFAR-10 recipes, views included.

    python benchmarks/views_together.py [KEY=VALUE ...] [--recipes cifar10/simclr ...] [--seconds 4]
"""

from steps import Form, main

RECIPES = ("simclr", "vicreg", "barlow-twins", "simsiam", "byol", "moco-v2", "byol-lightly")

if __name__ == "__main__":
    main(
        __doc__,
        {f"cifar10/{name}": {} for name in RECIPES},
        {"a pass for each view": Form(together=False), "one pass": Form()},
    )
