"""The page of all packaged recipes and studies: one table, and what each says of itself."""

import re

from tables import code, table

from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.config.study import load_study, packaged_studies

INTRODUCTION = """---
hide: [toc]
---

# Recipes

`tico describe NAME` prints a recipe with every field documented; its output is itself a recipe file. *Published*
accuracies are those of the original authors or programs; those under *here* were measured with this package and link to
the log of the run. Two numbers in one row are of the same protocol, which [the recipe's
description](#what-each-recipe-says) names ([reproductions](../reproductions.md), [the paper](../paper.md)). An empty
cell means that nothing has been measured or published.
"""
HEAD = ["recipe", "method", "backbone", "data", "epochs", "batch", "published, %", "here, %", "time here"]
HERE = re.compile(r"Here: ([\d.]+) % (.*?), ([\d.]+ (?:seconds|minutes|hours) on [^,(]*) \((\S+)\)")


def page() -> str:
    """The page in Markdown."""
    data = {"data.source": "--data"}
    found = {name: load_recipe(name, {} if in_recipe(name) else data) for name in packaged_recipes()}
    rows = [
        (
            f"[{name}](#{anchor(name)})",
            code(recipe.method.name),
            code(recipe.backbone.name.partition("/")[2]),
            code(recipe.data.source),
            str(recipe.training.epochs),
            f"{recipe.training.batch_size:,}",
            *stated(recipe.description),
        )
        for name, recipe in found.items()
    ]
    parts = [INTRODUCTION, table(HEAD, rows), "## What each recipe says"]
    parts += [f"### {name}\n\n{recipe.description}" for name, recipe in found.items()]
    parts += ["## Studies", "Many runs from one file ([studies](../studies.md)): `tico study NAME`.", studies()]
    return "\n\n".join(parts)


def in_recipe(name: str) -> bool:
    """Whether a recipe names its data; those for a folder of photos take `--data`."""
    return not name.startswith("photos")


def anchor(name: str) -> str:
    """The anchor of a recipe's heading."""
    return re.sub(r"[^\w\- ]", "", name)


def stated(description: str) -> tuple[str, str, str]:
    """The first published accuracy that a description states, the one measured here with its log, and how long that
    took."""
    text = " ".join(description.split())
    published, here = re.search(r"Published: ([\d.]+) %", text), HERE.search(text)
    return published[1] if published else "", f"[{here[1]}](../../{here[4]})" if here else "", here[3] if here else ""


def studies() -> str:
    """The packaged studies."""
    rows = [(code(name), load_study(name).description) for name in packaged_studies()]
    return table(["study", "what it compares"], rows)
