"""Public names that are imported on first use, so that importing the package costs nothing."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def attributes(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: `homes` maps each name to its module, relative to the package."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get
