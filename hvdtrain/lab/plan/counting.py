"""A profile without a measurement: the time of a step is given, and shared out by operations.

For devices that are not here. The forward pass is a third of the step, as the backward pass has
twice its operations: the gradient of each layer's input, and that of its weights. Within the
backward pass layers take time in proportion to their operations, the last that was run coming
first. Layers without counted operations (activations, normalisation) take none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain import plugins
from hvdtrain.data import load_dataset
from hvdtrain.data.splits import Shape
from hvdtrain.data.synthetic import PREFIX, read_spec
from hvdtrain.lab.plan.profiles import Gradient, Profile
from hvdtrain.lab.systems.work import DTYPES
from hvdtrain.models import build_model, fit_dataset, lenet

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own."""

    name: str
    operations: int  # of its forward pass on one sample
    sizes_bytes: Mapping[str, int]  # by parameter


def build_layers(model_name: str, data: str, data_dir: str, dtype: str) -> list[Layer]:
    """Of the model that `--model` and `--data` name. Raises UsageError."""
    shape, classes = _shape_and_classes(model_name, data, data_dir, DTYPES[dtype])
    # Without values, a large network is built in no time; whose code is not ours may need them.
    with nullcontext() if plugins.is_plugin(model_name) else torch.device("meta"):
        model = build_model(model_name, shape, classes, DTYPES[dtype])
    layers: list[Layer] = plugins.call("--model", model_name, count_layers, model, shape)
    return layers


def _shape_and_classes(
    model_name: str, data: str, data_dir: str, dtype: torch.dtype
) -> tuple[Shape, int]:
    """Made-up data need not be made up for that."""
    if data.startswith(PREFIX):
        shape, classes, _ = read_spec(data)
        size = lenet.IMAGE_SIZE if model_name == "lenet" else shape[1:]
        return (shape[0], *size), classes
    dataset = fit_dataset(load_dataset(data, Path(data_dir), 0, dtype), model_name)
    return dataset.shape, dataset.classes


def count_layers(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """In the order in which they are first run, for inputs of `shape` (without the batch).

    Nothing is computed: torch follows shapes alone (its meta device).
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
    """Modules as they were run. One that was not is used by the module around it, at its place."""
    places = {name: place for place, name in enumerate(order)}

    def place(name: str) -> int:
        while name not in places:
            name = name.rpartition(".")[0]
        return places[name]

    return sorted(model.named_modules(), key=lambda item: place(item[0]))


def _own_operations(name: str, module: nn.Module, counted: Mapping[str, int]) -> int:
    """Without those of the modules in it, which are counted with it."""
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
    """A profile in which a step takes `step_s`; of the update nothing is known, and it is 0."""
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
        source="the step's time as given, shared out by counted operations",
    )
