"""Options of a training run by name, one for each field of the configuration's groups."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config import TrainConfig

MAY_NAME_CODE = ("model", "data", "task")  # run code named by a file only if trusted
ELSEWHERE = {  # names in other programs
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


def train_options() -> dict[str, Option]:
    """Return every option of `hvdtrain train` by name. Names are unique over the groups."""
    options = {}
    for group, group_type in typing.get_type_hints(TrainConfig).items():
        hints = typing.get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            kinds = set(typing.get_args(hints[field.name])) or {hints[field.name]}
            (kind,) = kinds - {types.NoneType}
            options[field.name] = Option(
                group=group,
                name=field.name,
                type=kind,
                optional=types.NoneType in kinds,
                default=field.default,
                help=field.metadata["help"],
                choices=field.metadata["choices"],
                learns=field.metadata["learns"],
                short=field.metadata["short"],
            )
    return options


def as_flat_dict(config: TrainConfig) -> dict[str, Any]:
    """Return every option's value by name, the content of config.yaml."""
    return {
        name: getattr(getattr(config, option.group), name)
        for name, option in train_options().items()
    }


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known option closest to `name`, if any is close."""
    close = difflib.get_close_matches(name, [*known, *ELSEWHERE], n=1)
    return ELSEWHERE.get(close[0], close[0]) if close else None
