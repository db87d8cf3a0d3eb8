"""YAML as recipes and studies use it: plain values, within limits, and every error is one line.

A file may come from anyone. Tags construct plain values alone; aliases may not multiply into more than a large recipe
has, and nesting and size are bounded, so that no text takes long to read.
"""

import re
from typing import Any

import yaml

from tico_ssl.runtime.errors import UserError

MOST_BYTES = 1 << 18  # of a text; the longest packaged recipe has 4 kB
MOST_VALUES = 50_000  # in a text, every alias counted as what it stands for
MOST_LEVELS = 50  # of nesting
MOST_DIGITS = 100  # of a whole number, in any base; Python does not even print those of thousands
WHOLE = "tag:yaml.org,2002:int"


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number, 2020-01-31 and 1:30 as texts, and 010 not as 8, as people and YAML 1.2 do."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse deep nesting while it is read."""
        self.depth += 1
        if self.depth > MOST_LEVELS:
            raise yaml.YAMLError(f"more than {MOST_LEVELS} levels of nesting")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> Any:
        """The tree of values, if with every alias spelled out it is no more than a recipe can be, and no key is given
        twice: of two sections of one name the first would be lost."""
        root = super().get_single_node()
        seen, waiting = 0, [(root, 1)]
        while waiting:
            node, level = waiting.pop()
            seen += 1
            if seen > MOST_VALUES or level > MOST_LEVELS:  # an alias of itself is an endless nesting
                raise yaml.YAMLError(f"more than {MOST_VALUES:,} values, with every alias spelled out")
            if isinstance(node, yaml.ScalarNode) and node.tag == WHOLE and len(node.value) > MOST_DIGITS:
                raise yaml.MarkedYAMLError(
                    problem=f"a number of more than {MOST_DIGITS} digits", problem_mark=node.start_mark
                )
            if isinstance(node, yaml.SequenceNode):
                waiting.extend((child, level + 1) for child in node.value)
            elif isinstance(node, yaml.MappingNode):
                _require_different([key for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
                waiting.extend((child, level + 1) for pair in node.value for child in pair)
        return root


def _require_different(keys: list[yaml.ScalarNode]) -> None:
    before = set[str]()
    for key in keys:
        if key.value in before:
            raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
        before.add(key.value)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The base class's own, which stay unchanged, without dates and whole numbers."""
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()
    others = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int")
    return {first: [pair for pair in resolvers if pair[0] not in others] for first, resolvers in known}


class _Dumper(yaml.SafeDumper):
    """YAML in which every text that a reader would take for something else is quoted."""


_Loader.yaml_implicit_resolvers = _resolvers()
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
    )


def dump_yaml(values: Any) -> str:
    """Values as YAML that `parse_yaml` reads as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120)


def parse_yaml(text: str, where: str) -> Any:
    """Parsed YAML; errors are one line."""
    if len(text) > MOST_BYTES:
        raise UserError(f"{where}: longer than {MOST_BYTES:,} characters, which no recipe needs")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UserError(f"{where}: not valid YAML{place}: {reason}") from error
    except Exception as error:  # a tag such as !!int in front of what is none, a number of thousands of digits
        raise UserError(f"{where}: not valid YAML: a value that cannot be converted ({error})") from error
