"""Configuration fields that are command-line flags, and checks of their values."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from hvdtrain.errors import UsageError


def flag(
    default: Any, text: str, choices: tuple[str, ...] = (), learns: bool = True, short: str = ""
) -> Any:
    """Return a dataclass field that is also a command-line flag; `text` is its help.

    `learns`: the value affects what is learned, so a resumed run must have the same. `short`: an
    alternative spelling of the flag.
    """
    metadata = {"help": text, "choices": choices, "learns": learns, "short": short}
    return field(default=default, metadata=metadata)


def require(*checks: tuple[bool, str]) -> None:
    """Raise UsageError with the messages of all checks, (holds, message), that do not hold."""
    problems = [problem for holds, problem in checks if not holds]
    if problems:
        raise UsageError(*problems)


def positive(name: str, value: float | None, zero: bool = False) -> tuple[bool, str]:
    """Return a check that `value` is None, or finite and above zero (`zero`: or zero)."""
    text = f"--{name.replace('_', '-')}={value}: must be {'at least' if zero else 'above'} 0"
    if value is None:
        return True, text
    finite = isinstance(value, int) or math.isfinite(value)
    return finite and (value > 0 or (zero and value == 0)), text


def one_of(config: Any, name: str) -> tuple[bool, str]:
    """Return a check that the field `name` of `config` has one of its choices."""
    choices = config.__dataclass_fields__[name].metadata["choices"]
    value = getattr(config, name)
    return value in choices, f"--{name.replace('_', '-')}={value}: choose from {', '.join(choices)}"


def are_weights(text: str) -> bool:
    """Return whether `text` is a comma-separated list of numbers of at least 0, not all 0."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return (
        all(math.isfinite(weight) and weight >= 0 for weight in weights)
        and 0 < sum(weights) < math.inf
    )


def profiled_steps(text: str) -> tuple[int, int] | None:
    """Return the first and last step of a range such as "20-22", or None if it is malformed."""
    first, dash, last = text.partition("-")
    numbers = all(part.isascii() and part.isdigit() and len(part) < 19 for part in (first, last))
    if not dash or not numbers or not 1 <= int(first) <= int(last):
        return None
    return int(first), int(last)


def is_file_name(text: str) -> bool:
    """Return whether `text` is a single path component."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text
