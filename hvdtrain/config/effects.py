"""Options of a training run that have no effect beside another one, or without it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hvdtrain.config.fields import flag_of

Values = Mapping[str, Any]  # of all options, by name

# Optimizers of torch.optim, as in --opt; a test compares them with torch's signatures.
WITHOUT_MOMENTUM = (
    *("adafactor", "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam"),
    "rprop",
)
WITHOUT_WEIGHT_DECAY = ("rprop",)
OF_IMAGES = (  # read by classification, not by a hvdtrain.Task of one's own
    *("num_classes", "valid_split", "image_size", "hflip", "crop_padding", "crop_scale"),
    *("max_image_pixels", "workers", "skip_bad_samples"),
)
IN_MEMORY = ("digits", "fashion-mnist", "cifar10", "synthetic:")
DOWNLOADED = ("fashion-mnist", "cifar10")
OFF = (None, False, 0, "none")


class Idle(NamedTuple):
    """Options that have no effect while a condition on another option holds."""

    names: tuple[str, ...]
    other: str
    applies: Callable[[Values], object]


def _has_data_of(values: Values, *beginnings: str) -> bool:
    """Return whether the data, if they are not those of a task, are one of these."""
    return values["task"] is None and values["data"].startswith(beginnings)


IDLE = (
    Idle(("bucket_bytes",), "virtual_workers", lambda v: v["virtual_workers"] is not None),
    Idle(("audit", "audit_parts"), "audit_every", lambda v: not v["audit_every"]),
    Idle(("model_ema_decay",), "model_ema", lambda v: not v["model_ema"]),
    Idle(("lr_base_batch_size",), "scale_lr", lambda v: v["scale_lr"] == "none"),
    Idle(("min_delta",), "patience", lambda v: v["patience"] is None),
    Idle(("min_lr",), "sched", lambda v: v["sched"] == "constant"),
    Idle(("momentum",), "opt", lambda v: v["opt"].lower() in WITHOUT_MOMENTUM),
    Idle(("weight_decay",), "opt", lambda v: v["opt"].lower() in WITHOUT_WEIGHT_DECAY),
    Idle(("amp",), "dtype", lambda v: v["dtype"] == "float64"),
    Idle(OF_IMAGES, "task", lambda v: v["task"] is not None),
    Idle(("workers",), "data", lambda v: _has_data_of(v, *IN_MEMORY)),
    Idle(
        ("image_size",),
        "data",
        lambda v: v["task"] is None and not _has_data_of(v, "imagefolder:"),
    ),
    Idle(
        ("data_dir",),
        "data",
        lambda v: v["task"] is None and not _has_data_of(v, *DOWNLOADED),
    ),
)


def idle_options(values: Values, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield those of `names` that have no effect, each with the option that is the reason."""
    chosen = set(names)
    for row in IDLE:
        if row.applies(values):
            yield from ((name, row.other) for name in row.names if name in chosen)


def without_idle(values: Values, defaults: Values) -> dict[str, Any]:
    """Return all options, those that have no effect with their defaults."""
    idle = {name: defaults[name] for name, _ in idle_options(values, values)}
    return {**values, **idle}


def idle_problems(chosen: Values, values: Values, defaults: Values, flags: Values) -> list[str]:
    """Return a message for each option that is chosen and has no effect.

    `chosen`: the options that the user gives, in a file or as `flags`; `values`: of all options, as
    they result. Not refused are a default, since a configuration that a run has written gives all
    options, a value that switches off what does not happen anyway, and one of a file that a flag
    makes useless, as `--opt adam` does the momentum of a file for SGD.
    """
    names = [name for name, value in chosen.items() if value not in (*OFF, defaults[name])]
    return [
        f"{_as_flag(name, chosen[name])}: has no effect {_beside(other, values[other])}"
        for name, other in idle_options(values, names)
        if name in flags or other not in flags
    ]


def _beside(name: str, value: Any) -> str:
    """Return which other option is the reason, and what to do."""
    if value in OFF:
        return f"without {flag_of(name)}: leave it out, or add {flag_of(name)}"
    return f"beside {_as_flag(name, value)}: leave it out"


def _as_flag(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)}={value}"
