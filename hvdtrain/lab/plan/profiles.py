"""Profile of a step of one worker: its phases, and when each gradient is ready.

Profiles are read from files, measured on this machine, or derived from the counted operations of a
model and a step time.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.config import plugins
from hvdtrain.data import load_dataset
from hvdtrain.data.builtin import SYNTHETIC, read_spec
from hvdtrain.data.splits import Shape
from hvdtrain.errors import UsageError, refuse
from hvdtrain.lab.systems.work import Work, WorkSpec
from hvdtrain.models import LENET_SIZE, build_model, fit_dataset
from hvdtrain.run.process import keep_freed_memory

LEAST_S, MOST_S = 1e-9, 1e9
MOST_COUNT = 1 << 60
EXAMPLE = '{"name": "weight", "size_bytes": 4096, "ready_s": 0.01}'
FORWARD_SHARE = 1 / 3  # of the operations of a step; the backward pass takes twice as many
WARM_UP_STEPS = 3
PHASES = ("forward_s", "backward_s", "update_s")  # fields of a profile


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


def read_profile(path: Path) -> Profile:
    """Read a profile, written by `--save-profile` or by hand. Raises UsageError with every problem
    of the file.
    """
    content = read_fields(path, "--profile", _problems)
    gradients = sorted(content["gradients"], key=lambda gradient: gradient["ready_s"])
    content["gradients"] = tuple(Gradient(**one) for one in gradients)
    content["step_times_s"] = tuple(content.get("step_times_s", ()))
    return Profile(**content)


def read_fields(
    path: Path, flag: str, problems_of: Callable[[dict[str, Any]], Iterable[str]]
) -> dict[str, Any]:
    """Read a JSON object. Raises UsageError, which names the flag, for any other content, and with
    every problem that `problems_of` finds in it.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{flag}={path}: {error.strerror or error}") from error
    except ValueError as error:  # also for bytes that are not UTF-8
        raise UsageError(f"{flag}={path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{flag}={path}: a JSON object was expected")
    refuse(f"{flag}={path}: {text}" for text in problems_of(content))
    return content


Kind = tuple[Callable[[Any], bool], str]  # of a value in a file: its check, and what is expected


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_COUNT


def is_seconds(value: Any) -> TypeGuard[float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MOST_S


TEXT: Kind = (lambda value: isinstance(value, str), "a string was expected")
COUNT: Kind = (is_count, "a whole number of at least 1 was expected")
SECONDS: Kind = (is_seconds, "seconds of at least 0 were expected")


def wrong_values(
    content: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str = ""
) -> Iterator[str]:
    """Yield a problem for each field that is missing or not of its kind."""
    for name, (holds, expected) in kinds.items():
        if not holds(value := content.get(name)):
            yield f"{prefix}{name}={value}: {expected}"


def wrong_rows(
    content: Mapping[str, Any], name: str, least: int, kinds: Mapping[str, Kind], example: str
) -> Iterator[str]:
    """Yield the problems of a list of objects that have exactly the fields of `kinds`."""
    rows = content.get(name)
    if not isinstance(rows, list) or len(rows) < least:
        yield f"{name}: a list of at least {least} was expected, of objects such as {example}"
        return
    for number, row in enumerate(rows):
        if isinstance(row, dict) and set(row) == set(kinds):
            yield from wrong_values(row, kinds, f"{name}[{number}].")
        else:
            yield f"{name}[{number}]: an object such as {example} was expected"


def _problems(content: dict[str, Any]) -> Iterator[str]:
    fields = Profile.__dataclass_fields__
    yield from (f"{name}: no such field" for name in content if name not in fields)
    kinds = {"name": TEXT, "batch_size": COUNT, **dict.fromkeys(PHASES, SECONDS)}
    yield from wrong_values(content, kinds)
    times = content.get("step_times_s", [])
    if not isinstance(times, list) or not all(is_seconds(one) and one > 0 for one in times):
        yield "step_times_s: a list of seconds above 0 was expected"
    forward_s, backward_s = content.get("forward_s"), content.get("backward_s")
    if all(is_seconds(phase) and phase < LEAST_S for phase in (forward_s, backward_s)):
        yield f"forward_s, backward_s: one of them must be at least {LEAST_S:g}"
    latest_s = backward_s if is_seconds(backward_s) else MOST_S
    ready: Kind = (lambda s: is_seconds(s) and s <= latest_s, "must be from 0 to backward_s")
    of_gradient = {"name": TEXT, "size_bytes": COUNT, "ready_s": ready}
    yield from wrong_rows(content, "gradients", 1, of_gradient, EXAMPLE)


def measure_profile(spec: WorkSpec) -> Profile:
    """Measure `spec.steps` steps of a single worker on the CPU, timed at each gradient; return the
    medians of those after WARM_UP_STEPS.

    A step is that of training: load, forward, loss, backward, update. Raises UsageError for an
    invalid model or invalid data.
    """
    keep_freed_memory()
    work = Work(spec)
    samples = len(work.dataset.train)
    if samples < spec.global_batch_size:
        raise UsageError(
            f"--batch-size={spec.global_batch_size}: {spec.data} has fewer samples to train on "
            f"({samples}); use a smaller batch or other data"
        )
    sizes = _sizes(work.model.named_parameters())
    steps = [step for step in _time_steps(work) if set(step[1]) == set(sizes)]
    if not steps:
        raise UsageError(f"--model={spec.model}: no step computed a gradient for every parameter")
    phases, moments = zip(*steps, strict=True)
    gradients = [
        Gradient(name, size, statistics.median(ready[name] for ready in moments))
        for name, size in sizes.items()
    ]
    return Profile(
        name=f"{spec.model} on {spec.data}",
        batch_size=spec.global_batch_size,
        **{phase: statistics.median(seconds[phase] for seconds in phases) for phase in PHASES},
        gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        step_times_s=tuple(sum(seconds.values()) for seconds in phases),
        source=f"measured here: {len(steps)} steps on the CPU, {torch.get_num_threads()} thread",
    )


def _time_steps(work: Work) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Yield, for each step after the warm-up that has a full batch (the last one of an epoch may be
    smaller), the seconds by phase, and those from the beginning of the backward pass until a
    gradient is ready, by parameter.
    """
    optimizer = work.tuned_optimizer()
    work.model.train()
    clock = time.perf_counter
    moments: dict[str, float] = {}
    for name, parameter in work.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: moments.update({name: clock()})
            )
    for number, batch in enumerate(work.batches()):
        moments.clear()
        begun = clock()
        loaded = work.load(batch.indices, batch.epoch)
        optimizer.zero_grad()
        loss = work.task.loss(work.model, loaded).loss / len(batch.indices)
        backward = clock()
        loss.backward()
        update = clock()
        work.update(optimizer)
        seconds = (backward - begun, update - backward, clock() - update)
        if number >= WARM_UP_STEPS and len(batch.indices) == work.spec.global_batch_size:
            ready = {name: moment - backward for name, moment in moments.items()}
            yield dict(zip(PHASES, seconds, strict=True)), ready


def _sizes(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Return the bytes of each trained parameter."""
    return {name: p.numel() * p.element_size() for name, p in parameters if p.requires_grad}


@dataclass(frozen=True)
class Layer:
    """A module that holds parameters directly."""

    name: str
    operations: int  # of the forward pass on one sample
    sizes_bytes: Mapping[str, int]  # by parameter


def build_layers(model_name: str, data: str, data_dir: str) -> list[Layer]:
    """Return the layers of the model that `--model` and `--data` name. Raises UsageError."""
    shape: Shape
    if data.startswith(SYNTHETIC):  # not generated just for its shape
        shape, classes, _ = read_spec(data)
        if model_name == "lenet":
            shape = (shape[0], *LENET_SIZE)
    else:
        dataset = fit_dataset(load_dataset(data, Path(data_dir), 0, torch.float32), model_name)
        shape, classes = dataset.shape, dataset.classes
    # Without values a large network is built instantly; a plugin may need them.
    with nullcontext() if plugins.is_plugin(model_name) else torch.device("meta"):
        model = build_model(model_name, shape, classes, torch.float32)
    return list(plugins.call("--model", model_name, count_layers, model, shape))


def count_layers(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Return the layers in order of first execution, for inputs of `shape` (without the batch).

    Nothing is computed: on the meta device torch propagates shapes only. The model cannot be used
    after.
    """
    model = model.to("meta").eval()
    order: dict[str, None] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: order.setdefault(name))
    dtype = next(model.parameters()).dtype
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.empty(1, *shape, dtype=dtype, device="meta"))
    counted = {
        name.partition(".")[2]: sum(by_kind.values())
        for name, by_kind in counter.get_flop_counts().items()
    }
    layers = []
    for name, module in _in_order(model, list(order)):
        prefix = f"{name}." if name else ""
        inside = sum(counted.get(prefix + child, 0) for child, _ in module.named_children())
        sizes = _sizes((prefix + key, p) for key, p in module.named_parameters(recurse=False))
        if sizes:
            layers.append(Layer(name, max(counted.get(name, 0) - inside, 0), sizes))
    return layers


def _in_order(model: nn.Module, order: list[str]) -> list[tuple[str, nn.Module]]:
    """Return modules in execution order; one that did not run takes the place of its parent."""

    def position(name: str) -> int:
        while name not in order:
            name = name.rpartition(".")[0]
        return order.index(name)

    return sorted(model.named_modules(), key=lambda item: position(item[0]))


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
