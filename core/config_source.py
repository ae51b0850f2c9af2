"""Where the values of a configuration come from: lines of a YAML file, and overrides. For errors
that name the place."""

import reprlib
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from core.errors import ConfigError


class KeyedError(ValueError):
    """What a validator of a whole section found at a key below it."""

    def __init__(self, location: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.location = location


def apply_override(data: dict[str, Any], override: str) -> None:
    """Sets one key. Sections on the way are copied: YAML aliases may share them."""
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected key=value, for example dtype=float32")
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent} is not a section")
        node[parent] = child = dict(child or {})
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--set {key}: value is not valid YAML") from error


def first_problem(error: ValidationError, data: Any) -> tuple[tuple[str, ...], str]:
    """Location of the first problem in `data`, and what was expected there."""
    problems = error.errors()
    location = _existing(problems[0]["loc"], data)
    here = [p for p in problems if _existing(p["loc"], data) == location]
    cause = here[0].get("ctx", {}).get("error")
    if isinstance(cause, KeyedError):
        return (*location, *cause.location), str(cause)
    kind = here[0]["type"]
    if kind == "extra_forbidden":
        return location, "unknown key"
    if kind == "missing":
        return location, "missing, a value is required"
    got = reprlib.repr(here[0]["input"])
    if kind in ("model_type", "dict_type"):
        return location, f"expected a section with keys of its own, got {got}"
    # A union has one problem for each branch.
    wanted = " or ".join(p["msg"].removeprefix("Input should be ") for p in here)
    wanted = wanted.removeprefix("Value error, ")
    return (
        location,
        f"{wanted if wanted.startswith('expected') else f'expected {wanted}'}, got {got}",
    )


def _existing(location: tuple[str | int, ...], data: Any) -> tuple[str, ...]:
    """Without the branch names that a union adds after a plain value."""
    parts = []
    for part in location:
        if not isinstance(data, dict):
            break
        parts.append(str(part))
        data = data.get(part)
        if data is None:
            break
    return tuple(parts)


def where_set(
    location: tuple[str, ...], overrides: Sequence[str], root: yaml.Node | None, source: str
) -> str:
    """The override that set a key, or the line of the file."""
    for override in reversed(overrides):
        path = tuple(override.partition("=")[0].split("."))
        if path == location[: len(path)]:
            return f"--set {override}"
    line = _line_of(root, location)
    return f"{source}:{line}" if line else source


def _line_of(node: yaml.Node | None, location: tuple[str, ...]) -> int | None:
    """Line of the deepest part of `location` that the file holds; 1-based."""
    line = None
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            break
        for key, value in node.value:
            if key.value == part:
                line, node = key.start_mark.line + 1, value
                break
        else:
            break
    return line


def refuse_duplicates(node: yaml.Node | None, source: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if key.value in seen:
            raise ConfigError(f"{source}:{key.start_mark.line + 1}: {key.value}: key given twice")
        seen.add(key.value)
        refuse_duplicates(value, source)
