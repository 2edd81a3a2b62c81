"""The flags of `hvdtrain bench peers` alone; the bench is a part of `bench.py`."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.cli.flags import Flag
from hvdtrain.config.fields import at_least

MODELS = ("lenet", "mlp", "resnet18-small", "gpt")
KINDS = ("memory", "images")
SYSTEMS = ("train", "loop", "ddp", "accelerate", "fabric", "trainer", "horovod", "published")
LEAST_STEPS = 6  # one after the warm-up
CHOICES = {"models": MODELS, "data": KINDS, "systems": SYSTEMS}


def _names(name: str, what: str, left_out: str = "") -> Flag:
    text = ",".join(choice for choice in CHOICES[name] if choice != left_out)
    return Flag(f"--{name}", f"{what} ({text})", str, text, "A,B")


FLAGS = (
    _names("models", "train these models"),
    Flag(
        "--batch-size",
        "take B samples per worker, for all models or for each (lenet, mlp 128; others 16)",
        metavar="B,B",
    ),
    _names("data", "train on data in memory, on a folder of image files, or on both"),
    _names("systems", "measure these systems, or published too, Horovod's own code", "published"),
    Flag(
        "--readers", "read images with R processes per worker (1)", int, 1, "R", check=at_least(0)
    ),
    Flag(
        "--steps",
        "train S steps in each run (lenet, mlp 120; resnet18-small 24; gpt 60)",
        int,
        None,
        "S",
        check=at_least(LEAST_STEPS),
    ),
    Flag("--rounds", "run R rounds (8)", int, 8, "R", check=at_least(1)),
)


def read_names(arguments: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the lists of data and systems, each name once; the models are checked too."""
    lists = {name: [part.strip() for part in arguments[name].split(",")] for name in CHOICES}
    for name, parts in lists.items():
        if len(set(parts)) < len(parts) or not set(parts) <= set(CHOICES[name]):
            choices = ", ".join(CHOICES[name])
            problems.append(f"--{name}={arguments[name]}: choose from {choices}, each once")
    if lists["models"] == ["gpt"] and lists["data"] == ["images"]:
        problems.append("--models=gpt: takes no images: give --data memory, or another model")
    return {name: tuple(lists[name]) for name in ("data", "systems")}
