"""Measurement of a profile: steps of a single worker on the CPU, timed at each gradient."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hvdtrain.errors import UsageError
from hvdtrain.lab.plan.profiles import Gradient, Profile
from hvdtrain.lab.systems.work import GlobalBatch, Work, WorkSpec
from hvdtrain.run.memory import keep_freed_memory

WARM_UP_STEPS = 3


@dataclass
class StepTimes:
    """The moments of one step, in seconds of `time.perf_counter`."""

    begun: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    ended: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)


def measure_profile(spec: WorkSpec) -> Profile:
    """Measure `spec.steps` steps and return the medians of those after WARM_UP_STEPS.

    A step is that of training: load, forward, loss, backward, update. Raises UsageError for an
    invalid model or invalid data.
    """
    keep_freed_memory()
    work = Work(spec)
    samples = len(work.dataset.train)
    if samples < spec.global_batch_size:
        raise UsageError(
            f"--batch-size={spec.global_batch_size}: {spec.data} has {samples} samples to train "
            "on; use a smaller batch or other data"
        )
    names = [name for name, p in work.model.named_parameters() if p.requires_grad]
    steps = [times for times in _run(work) if set(times.ready) == set(names)]
    if not steps:
        raise UsageError(f"--model={spec.model}: no step computed a gradient for every parameter")
    parameters = dict(work.model.named_parameters())
    gradients = [
        Gradient(
            name,
            parameters[name].numel() * parameters[name].element_size(),
            statistics.median(times.ready[name] - times.backward for times in steps),
        )
        for name in names
    ]
    return Profile(
        name=f"{spec.model} on {spec.data}",
        batch_size=spec.global_batch_size,
        forward_s=statistics.median(t.backward - t.begun for t in steps),
        backward_s=statistics.median(t.update - t.backward for t in steps),
        update_s=statistics.median(t.ended - t.update for t in steps),
        gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        step_times_s=tuple(t.ended - t.begun for t in steps),
        source=f"measured here: {len(steps)} steps on the CPU, {torch.get_num_threads()} thread",
    )


def _run(work: Work) -> Iterator[StepTimes]:
    """Yield the times of each full step after the warm-up."""
    optimizer = work.tuned_optimizer()
    work.model.train()
    times = StepTimes()

    def record(name: str) -> None:
        times.ready[name] = time.perf_counter()

    for name, parameter in work.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: record(name))
    for number, batch in enumerate(work.batches()):
        times = StepTimes()
        _step(work, optimizer, batch, times)
        if number >= WARM_UP_STEPS and len(batch.indices) == work.spec.global_batch_size:
            yield times  # full batches only: the last one of an epoch may be smaller


def _step(
    work: Work, optimizer: torch.optim.Optimizer, batch: GlobalBatch, times: StepTimes
) -> None:
    times.begun = time.perf_counter()
    loaded = work.load(batch.indices, batch.epoch)
    optimizer.zero_grad()
    loss = work.task.loss(work.model, loaded).loss / len(batch.indices)
    times.backward = time.perf_counter()
    loss.backward()
    times.update = time.perf_counter()
    work.update(optimizer)
    times.ended = time.perf_counter()
