"""Configuration fields that are command-line flags, and checks of their values."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import refuse


class Check(NamedTuple):
    """A condition that a value must meet, and the problem otherwise, as text after its flag."""

    holds: Callable[[Any], object]
    problem: str


def at_least(least: int) -> Check:
    """Return the check of a finite number that must be at least this one."""
    return Check(lambda number: least <= number < math.inf, f"={{}}: must be at least {least}")


NOT_EMPTY = Check(bool, " is empty")
POSITIVE = Check(lambda number: 0 < number < math.inf, "={}: must be above 0")
NOT_NEGATIVE = at_least(0)
BELOW_1 = Check(lambda part: 0 <= part < 1, "={}: must be at least 0 and below 1")
SOME_TRACKERS = Check(
    ("mlflow", "wandb", "mlflow,wandb", "wandb,mlflow").__contains__,
    "={}: choose from mlflow, wandb, or both, separated by a comma",
)
AUTO = "auto"
Allowed = Check | tuple[str, ...]  # the latter: choices


def flag_of(name: str) -> str:
    """Return the flag of an option: --batch-size of batch_size."""
    return f"--{name.replace('_', '-')}"


def wrong_values(flags: Iterable[tuple[str, Any, Check | None]]) -> list[str]:
    """Return a message for each flag, with its value and its check, whose check fails.

    A value of None is one that is not given.
    """
    return [
        f"{flag}{check.problem.format(value)}"
        for flag, value, check in flags
        if value is not None and check and not check.holds(value)
    ]


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
    return field(default=default, metadata=metadata | {"check": allowed or None})


free_flag = partial(flag, learns=False)  # one that may change in a resumed run


class FlagGroup:
    """A group of flags, which reports all of its problems on construction."""

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> list[str]:
        """Return a message for each field whose check fails."""
        return wrong_values(
            (flag_of(option.name), getattr(self, option.name), option.metadata["check"])
            for option in fields(self)  # type: ignore[arg-type]
        )


def numbers_of(text: str) -> list[float]:
    """Return comma-separated numbers; an empty list if one of them is malformed."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def whole_number(text: str) -> int:
    """Return a whole number in plain digits; 0 if the text is anything else."""
    return int(text) if text.isascii() and text.isdigit() else 0


def are_weights(text: str) -> bool:
    """Return whether `text` is "auto", or comma-separated numbers of at least 0, not all 0."""
    weights = numbers_of(text)
    return text == AUTO or (all(part >= 0 for part in weights) and 0 < sum(weights) < math.inf)


def are_betas(text: str) -> bool:
    """Return whether `text` is two or three numbers from 0 to below 1, separated by commas."""
    betas = numbers_of(text)
    return len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas)


BETAS = Check(are_betas, "={}: must be two or three numbers, each at least 0 and below 1")


def step_range(text: str) -> tuple[int, int] | None:
    """Return the first and last step of a range such as "20-22", or None if it is malformed."""
    match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        return None
    return int(match[1]), int(match[2])


SIZE = Check(
    lambda text: text == AUTO or re.fullmatch(r"\d{1,18}", text, re.ASCII),
    "={}: must be auto, or a number of bytes from 0",
)
FOLDER_NAME = Check(
    lambda text: text not in ("", ".", "..") and not {"/", "\0"} & set(text),
    "={!r}: must be one folder name",
)


SCHEME = "://"
# Of object storage. A folder whose name looks like the start of one is an address that pathlib has
# shortened.
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://(?=.*[^/])[^?#\s]+")
SHORTENED = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/).*")
PASSWORD = re.compile(r"://[^/]*:[^/]*@")


def is_output(text: str) -> bool:
    """Return whether `text` is a folder, or an address in object storage without credentials."""
    if SCHEME not in text:
        return not SHORTENED.fullmatch(text)
    is_plain = ADDRESS.fullmatch(text) and not PASSWORD.search(text)
    return bool(is_plain) and not {".", ".."} & set(text.split("/"))


OUTPUT = Check(  # its value may hold a password, and is not shown
    is_output,
    " is neither a folder nor an address as text, such as s3://BUCKET/runs, without '..', query "
    "and credentials, which the library of the storage takes from the environment or its own files",
)


def folder_of(output: str) -> Path:
    """Return the folder below which runs are written: of s3://bucket/a, it is runs/s3/bucket/a."""
    return Path("runs", output.replace(SCHEME, "/", 1)) if SCHEME in output else Path(output)
