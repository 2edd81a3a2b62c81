"""Reads options from a YAML file: one mapping of option names to plain values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

_BOOLEANS = {"true": True, "false": False}
NULL = "tag:yaml.org,2002:null"
ELSEWHERE = {  # what other programs call our options
    "learning_rate": "lr",
    "optimizer": "opt",
    "scheduler": "sched",
    "lr_scheduler": "sched",
    "dataset": "data",
    "arch": "model",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_workers": "workers",
    "grad_clip": "clip_grad",
}


@dataclass(frozen=True)
class Option:
    """One field of one group of the configuration."""

    group: str
    name: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    learns: bool
    short: str


def read_options(file: Path, options: dict[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """The values in the file, and its problems, each with file and line.

    Values are read as the flag of the same name reads them (YAML by itself would take 1e-3 for
    text and 2024-06-30 for a date). Raises UsageError when the file is no readable mapping.
    """
    import yaml

    try:
        root = yaml.compose(file.read_text("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config={file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise UsageError(f"{file}{line}: not valid YAML: {reason}") from error
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file}:1: must hold lines of the form NAME: VALUE")
    values: dict[str, Any] = {}
    problems = []
    for key_node, value_node in root.value:
        name = str(key_node.value).replace("-", "_")
        try:
            values[name] = _value(name, value_node, options, values)
        except ValueError as error:
            problems.append(f"{file}:{key_node.start_mark.line + 1}: {error}")
    return values, problems


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The option that was probably meant."""
    close = difflib.get_close_matches(name, [*known, *ELSEWHERE], n=1)
    return ELSEWHERE.get(close[0], close[0]) if close else None


def _value(name: str, node: Any, options: dict[str, Option], seen: dict[str, Any]) -> Any:
    """One value in its option's type. Raises ValueError with the reason when there is none."""
    option = options.get(name)
    if option is None:
        near = nearest(name, options)
        raise ValueError(f"unknown option {name!r}" + (f"; did you mean {near}?" if near else ""))
    if name in seen:
        raise ValueError(f"{name} is given twice")
    if not isinstance(node.value, str):
        raise ValueError(f"{name}: a single value was expected")
    if node.tag == NULL and option.optional:
        return None
    try:
        return _BOOLEANS[node.value.lower()] if option.type is bool else option.type(node.value)
    except (ValueError, KeyError):
        kind = option.type.__name__
        raise ValueError(f"{name}: {node.value[:40]!r} is not of type {kind}") from None
