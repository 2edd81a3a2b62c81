"""Configuration fields that are command-line flags, and checks of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError


class Check(NamedTuple):
    """A condition that a value must meet, and the problem otherwise, as text after its flag."""

    holds: Callable[[Any], object]
    problem: str


NOT_EMPTY = Check(bool, " is empty")
POSITIVE = Check(lambda number: 0 < number < math.inf, "={}: must be above 0")
NOT_NEGATIVE = Check(lambda number: 0 <= number < math.inf, "={}: must be at least 0")
SOME_TRACKERS = Check(
    ("mlflow", "wandb", "mlflow,wandb", "wandb,mlflow").__contains__,
    "={}: choose from mlflow, wandb, or both, separated by a comma",
)
AUTO = "auto"
Allowed = Check | tuple[str, ...]  # the latter: choices


def flag(
    default: Any, text: str, allowed: Allowed = (), learns: bool = True, short: str = ""
) -> Any:
    """Return a dataclass field that is also a command-line flag; `text` is its help.

    `allowed`: choices, or a check of values other than None. `learns`: the value affects what is
    learned, so a resumed run must have the same. `short`: an alternative spelling of the flag.
    """
    choices = () if isinstance(allowed, Check) else allowed
    if choices:
        allowed = Check(choices.__contains__, f"={{}}: choose from {', '.join(choices)}")
    metadata = {"help": text, "choices": choices, "learns": learns, "short": short}
    return field(default=default, metadata=metadata | {"check": allowed})


def free_flag(default: Any, text: str, allowed: Allowed = (), short: str = "") -> Any:
    """Return a `flag` that does not affect what is learned, and so may change in a resumed run."""
    return flag(default, text, allowed, learns=False, short=short)


class FlagGroup:
    """A group of flags, which reports all of its problems on construction."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise UsageError(*problems)

    def problems(self) -> list[str]:
        """Return a message for each field whose check fails."""
        problems = []
        for option in fields(self):  # type: ignore[arg-type]
            value, check = getattr(self, option.name), option.metadata["check"]
            if value is not None and check and not check.holds(value):
                problems.append(f"--{option.name.replace('_', '-')}{check.problem.format(value)}")
        return problems


def are_weights(text: str) -> bool:
    """Return whether `text` is "auto", or comma-separated numbers of at least 0, not all 0."""
    if text == AUTO:
        return True
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf


def is_size(text: str) -> bool:
    """Return whether `text` is "auto", or a number of bytes of at most 18 digits."""
    return text == AUTO or re.fullmatch(r"\d{1,18}", text, re.ASCII) is not None


def are_betas(text: str) -> bool:
    """Return whether `text` is two or three numbers from 0 to below 1, separated by commas."""
    try:
        betas = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas)


def profiled_steps(text: str) -> tuple[int, int] | None:
    """Return the first and last step of a range such as "20-22", or None if it is malformed."""
    match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        return None
    return int(match[1]), int(match[2])


def is_file_name(text: str) -> bool:
    """Return whether `text` is a single path component."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text
