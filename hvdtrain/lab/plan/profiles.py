"""Profile of a step of one worker: its phases, and when each gradient is ready.

Profiles are read from files, or derived from the counted operations of a model and a step time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain import plugins
from hvdtrain.data import load_dataset
from hvdtrain.data.splits import Shape
from hvdtrain.data.synthetic import PREFIX, read_spec
from hvdtrain.errors import UsageError
from hvdtrain.lab.systems.work import DTYPES
from hvdtrain.models import build_model, fit_dataset, lenet

LEAST_S, MOST_S = 1e-9, 1e9
MOST_COUNT = 1 << 60
EXAMPLE = '{"name": "weight", "size_bytes": 4096, "ready_s": 0.01}'
FORWARD_SHARE = 1 / 3  # of the operations of a step; the backward pass takes twice as many


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter tensor."""

    name: str
    size_bytes: int
    ready_s: float  # from the beginning of the backward pass


@dataclass(frozen=True)
class Profile:
    """The times of a step of a single worker, without exchange."""

    name: str
    batch_size: int  # samples per step
    forward_s: float  # everything before the backward pass
    backward_s: float
    update_s: float  # everything after the exchange
    gradients: tuple[Gradient, ...]  # in the order in which they become ready
    step_times_s: tuple[float, ...] = ()  # of measured steps; empty: spread unknown
    source: str = "as given"

    @property
    def step_s(self) -> float:
        """Seconds of a step without any exchange."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.size_bytes for gradient in self.gradients)

    def as_json(self) -> dict[str, Any]:
        """Return the fields that `read_profile` reads."""
        return asdict(self)


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile as JSON. Raises UsageError if that fails."""
    try:
        path.write_text(json.dumps(profile.as_json(), indent=2) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"--save-profile={path}: {error.strerror or error}") from error


def read_profile(path: Path) -> Profile:
    """Read a profile, written by `--save-profile` or by hand. Raises UsageError with every problem
    of the file.
    """
    content = read_json_object(path, "--profile")
    problems = [f"--profile={path}: {text}" for text in _problems(content)]
    if problems:
        raise UsageError(*problems)
    gradients = [
        Gradient(one["name"], one["size_bytes"], float(one["ready_s"]))
        for one in content["gradients"]
    ]
    return Profile(
        name=content["name"],
        batch_size=content["batch_size"],
        forward_s=float(content["forward_s"]),
        backward_s=float(content["backward_s"]),
        update_s=float(content["update_s"]),
        gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        step_times_s=tuple(map(float, content.get("step_times_s", ()))),
        source=str(content.get("source", "as given")),
    )


def read_json_object(path: Path, flag: str) -> dict[str, Any]:
    """Read a JSON object. Raises UsageError, which names the flag, for any other content."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{flag}={path}: {error.strerror or error}") from error
    except ValueError as error:  # also for bytes that are not UTF-8
        raise UsageError(f"{flag}={path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{flag}={path}: a JSON object was expected")
    return content


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    known = Profile.__dataclass_fields__
    yield from (f"{name}: no such field" for name in content if name not in known)
    if not isinstance(content.get("name"), str):
        yield "name: a string was expected"
    if not is_count(content.get("batch_size")):
        yield f"batch_size={content.get('batch_size')}: a whole number of at least 1 was expected"
    for name in ("forward_s", "backward_s", "update_s"):
        if not is_seconds(content.get(name)):
            yield f"{name}={content.get(name)}: seconds of at least 0 were expected"
    times = content.get("step_times_s", [])
    if not isinstance(times, list) or not all(is_seconds(one) and one > 0 for one in times):
        yield "step_times_s: a list of seconds above 0 was expected"
    backward_s = content.get("backward_s")
    phases = [backward_s, content.get("forward_s")]
    if all(is_seconds(phase) and phase < LEAST_S for phase in phases):
        yield f"forward_s, backward_s: one of them must be at least {LEAST_S:g}"
    yield from _problems_of_gradients(content.get("gradients"), backward_s)


def _problems_of_gradients(gradients: Any, backward_s: Any) -> Iterator[str]:
    if not isinstance(gradients, list) or not gradients:
        yield f"gradients: a list was expected, of objects such as {EXAMPLE}"
        return
    for number, one in enumerate(gradients):
        if not isinstance(one, dict) or set(one) != set(Gradient.__dataclass_fields__):
            yield f"gradients[{number}]: an object such as {EXAMPLE} was expected"
            continue
        if not isinstance(one["name"], str):
            yield f"gradients[{number}].name: a string was expected"
        if not is_count(one["size_bytes"]):
            size = one["size_bytes"]
            yield f"gradients[{number}].size_bytes={size}: must be a whole number of at least 1"
        ready = one["ready_s"]
        if not is_seconds(ready) or (is_seconds(backward_s) and ready > backward_s):
            yield f"gradients[{number}].ready_s={ready}: must be from 0 to backward_s"


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_COUNT


def is_seconds(value: Any) -> TypeGuard[float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MOST_S


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters directly."""

    name: str
    operations: int  # of the forward pass on one sample
    sizes_bytes: Mapping[str, int]  # by parameter


def build_layers(model_name: str, data: str, data_dir: str, dtype: str) -> list[Layer]:
    """Return the layers of the model that `--model` and `--data` name. Raises UsageError."""
    shape, classes = _shape_and_classes(model_name, data, data_dir, DTYPES[dtype])
    # Without values a large network is built instantly; a plugin may need them.
    with nullcontext() if plugins.is_plugin(model_name) else torch.device("meta"):
        model = build_model(model_name, shape, classes, DTYPES[dtype])
    layers: list[Layer] = plugins.call("--model", model_name, count_layers, model, shape)
    return layers


def _shape_and_classes(
    model_name: str, data: str, data_dir: str, dtype: torch.dtype
) -> tuple[Shape, int]:
    """Return sample shape and classes; synthetic data are not generated for that."""
    if data.startswith(PREFIX):
        shape, classes, _ = read_spec(data)
        size = lenet.IMAGE_SIZE if model_name == "lenet" else shape[1:]
        return (shape[0], *size), classes
    dataset = fit_dataset(load_dataset(data, Path(data_dir), 0, dtype), model_name)
    return dataset.shape, dataset.classes


def count_layers(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Return the layers in order of first execution, for inputs of `shape` (without the batch).

    Nothing is computed: on the meta device torch propagates shapes only.
    """
    model = model.to("meta").eval()
    order: dict[str, None] = {}
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: order.setdefault(name))
        for name, module in model.named_modules()
    ]
    dtype = next(model.parameters()).dtype
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.empty(1, *shape, dtype=dtype, device="meta"))
    for hook in hooks:
        hook.remove()
    counted = {
        name.partition(".")[2]: sum(by_kind.values())
        for name, by_kind in counter.get_flop_counts().items()
    }
    return [
        Layer(name, _own_operations(name, module, counted), sizes)
        for name, module in _in_order(model, order)
        if (sizes := _own_sizes(name, module))
    ]


def _in_order(model: nn.Module, order: Mapping[str, None]) -> list[tuple[str, nn.Module]]:
    """Return modules in execution order; one that did not run takes the place of its parent."""
    places = {name: place for place, name in enumerate(order)}

    def place(name: str) -> int:
        while name not in places:
            name = name.rpartition(".")[0]
        return places[name]

    return sorted(model.named_modules(), key=lambda item: place(item[0]))


def _own_operations(name: str, module: nn.Module, counted: Mapping[str, int]) -> int:
    """Return the operations of a module without those of its children."""
    prefix = f"{name}." if name else ""
    inner = sum(counted.get(prefix + child, 0) for child, _ in module.named_children())
    return max(counted.get(name, 0) - inner, 0)


def _own_sizes(name: str, module: nn.Module) -> dict[str, int]:
    return {
        f"{name}.{key}".lstrip("."): p.numel() * p.element_size()
        for key, p in module.named_parameters(recurse=False)
        if p.requires_grad
    }


def share_out(layers: list[Layer], name: str, batch_size: int, step_s: float) -> Profile:
    """Return a profile with a step of `step_s` seconds, distributed by operations; update is 0."""
    total = sum(layer.operations for layer in layers)
    backward_s = (1 - FORWARD_SHARE) * step_s
    gradients, done = [], 0
    for layer in reversed(layers):
        done += layer.operations
        ready_s = backward_s * min(done / total, 1.0) if total else backward_s
        gradients += [
            Gradient(key, size, ready_s) for key, size in reversed(list(layer.sizes_bytes.items()))
        ]
    return Profile(
        name=name,
        batch_size=batch_size,
        forward_s=FORWARD_SHARE * step_s,
        backward_s=backward_s,
        update_s=0.0,
        gradients=tuple(gradients),
        source="given step time, distributed by counted operations",
    )
