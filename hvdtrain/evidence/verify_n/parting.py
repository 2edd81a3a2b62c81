"""Comparison of runs on different numbers of workers, and the first step at which they part.

Checkpoints at intervals bound the step: the last equal one and the first that differs. Both runs
are then continued from the last equal one with a finer interval, until the bounds are one step
apart. A run at the same N resumes bit for bit, so the continued runs are the original ones.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from hvdtrain.errors import TrainingError
from hvdtrain.evidence.children import wait_while
from hvdtrain.evidence.trials import Training, Trial
from hvdtrain.records.folders import CHECKPOINTS, CONFIG
from hvdtrain.tensors import bytes_of
from hvdtrain.train.checkpoint import MANIFEST_FILE, Checkpoints, load_state, name_of, step_of

# In float64, of the largest magnitude of a tensor. Runs of hundreds of steps stay below it (see
# docs/guide.md); dropout or batch norm exceed it by many orders of magnitude in the first step.
AGREEMENT = 1e-9
# A tensor this much smaller than the largest of the model is measured on that scale: a bias before
# batch norm that starts at zero holds nothing but rounding errors, 1e-16 of its neighbours.
SMALLEST_SCALE = 1e-6
PARTS = 8  # checkpoints between two bounds, and so the factor by which each pass narrows them
KEEP_ALL = 1_000_000  # checkpoints, of a run that is ended at the upper bound

Tensors = Mapping[str, torch.Tensor]
# The tensors of a checkpoint by kind, as in `Gap`: trained parameters first, then all others.
Saved = Mapping[str, Tensors]


@dataclass(frozen=True)
class Gap:
    """The largest relative difference between two sets of tensors, and its place."""

    relative: float = 0.0  # max |difference| / max |reference|, of one tensor
    tensor: str = ""
    index: tuple[int, ...] = ()
    reference: float = 0.0
    found: float = 0.0
    kind: str = "parameter"  # or tensor: a buffer, or a moving average

    def described(self) -> str:
        """Return the place and both values as text."""
        index = f", index {list(self.index)}" if self.index else ""
        return f"{self.kind} {self.tensor}{index}: {self.reference:.9g} and {self.found:.9g}"


def largest_gap(reference: Tensors, actual: Tensors) -> Gap:
    """Return the largest relative difference; infinity for a tensor that only one set holds."""
    for name in reference.keys() ^ actual.keys():
        return Gap(math.inf, name)
    largest = max(map(_magnitude, reference.values()), default=0.0)
    worst = Gap()
    for name, values in reference.items():
        one, other = (_wide(tensor) for tensor in (values, actual[name]))
        if one.shape != other.shape:
            return Gap(math.inf, name)
        distance = torch.where(one == other, 0.0, (one - other).abs()).nan_to_num(nan=math.inf)
        if not distance.numel() or not float(distance.max()):
            continue
        scale = max(_magnitude(values), SMALLEST_SCALE * largest)
        relative = float(distance.max()) / scale if scale else math.inf
        if relative > worst.relative:
            index = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
            worst = Gap(relative, name, index, _number(one[index]), _number(other[index]))
    return worst


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().to(torch.complex128 if values.is_complex() else torch.float64)


def _magnitude(values: torch.Tensor) -> float:
    """Return the largest finite magnitude, or 0."""
    magnitudes = _wide(values).abs()
    finite = magnitudes[magnitudes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _number(value: torch.Tensor) -> float:
    return float(value.abs() if value.is_complex() else value)


def gap_above(limit: float, one: Saved, other: Saved) -> Gap | None:
    """Return the largest difference above `limit`, of a parameter if any exceeds it, or None.

    With a limit of 0 the bits must be equal.
    """
    for kind in one:
        worst = largest_gap(one[kind], other[kind])
        if worst.relative > limit:
            return replace(worst, kind=kind)
        if limit == 0:  # where the values are equal: 0 and -0 differ
            for name in one[kind]:
                if not np.array_equal(bytes_of(one[kind][name]), bytes_of(other[kind][name])):
                    return Gap(0.0, name, kind=kind)
    return None


def read_saved(checkpoint: Path) -> Saved:
    """Return the tensors of a checkpoint. Raises DamagedCheckpoint."""
    state = load_state(checkpoint)
    names, model = set(state["parameters"]), state["model"]
    others = {name: values for name, values in model.items() if name not in names}
    others |= {
        f"the moving average of {name.removeprefix('module.')}": values
        for name, values in (state["update"]["average"] or {}).items()
        if isinstance(values, torch.Tensor)
    }
    parameters = {name: model[name] for name in state["parameters"] if name in model}
    return {"parameter": parameters, "tensor": others}


def newest(run: Path) -> Path:
    """Return the newest checkpoint of a run. Raises TrainingError if it has none."""
    if checkpoints := _checkpoints(run):
        return checkpoints[0]
    raise TrainingError(f"{run} has no checkpoint")


@dataclass(frozen=True)
class Parting:
    """The first step after which two runs differ.

    `last_equal`: the last step at which they are known to be equal, which is the one before unless
    the difference did not repeat. `before`: the reference's checkpoint of that step; None: the
    start.
    """

    step: int
    last_equal: int
    gap: Gap
    before: Path | None

    def contains(self, other: Parting) -> bool:
        """Return whether `other` has closer bounds, within these."""
        return (
            self.last_equal <= other.last_equal < other.step <= self.step
            and other.step - other.last_equal < self.step - self.last_equal
        )


@dataclass(frozen=True)
class Pair:
    """The runs on two numbers of workers, whose difference is searched for."""

    training: Training
    workers: tuple[int, int]  # of the reference, and of the other
    scratch: Path  # of the finished runs, each named by its number of workers
    limit: float

    def first_difference(self, at_end: Gap) -> Parting:
        """Return where the runs part; parts of them are run again as often as needed.

        `at_end`: the difference of the final tensors.
        """
        one, other = (self.scratch / str(workers) for workers in self.workers)
        last_step, number = max(_steps(other)), 0
        parting = self._bounds([one, other], None) or Parting(last_step, 0, at_end, None)
        while parting.step - parting.last_equal > 1:
            number += 1
            narrowed = self._bounds(self._repeat(parting, number), parting)
            if narrowed is None or not parting.contains(narrowed):
                break  # run again, they part elsewhere: something is random
            parting = narrowed
        return parting

    def _bounds(self, folders: Sequence[Path], parting: Parting | None) -> Parting | None:
        """Return the first common checkpoint that differs; None if all are equal.

        `parting`: the bounds within which both runs were made.
        """
        last, before = (parting.last_equal, parting.before) if parting else (0, None)
        for step in sorted(set.intersection(*(_steps(folder) for folder in folders))):
            paths = [folder / CHECKPOINTS / name_of(step) for folder in folders]
            one, other = map(read_saved, paths)
            if gap := gap_above(self.limit, one, other):
                return Parting(step, last, gap, before)
            last, before = step, paths[0]
        return None

    def _repeat(self, parting: Parting, number: int) -> list[Path]:
        """Run both again from the last equal checkpoint, one after the other, until they part."""
        interval = math.ceil((parting.step - parting.last_equal) / PARTS)
        made = []
        for workers in self.workers:
            run, name = self.scratch / str(workers), f"{workers}-again-{number}"
            options = checkpoint_options(interval, KEEP_ALL)
            if parting.before is not None:
                # A checkpoint of this name of the run, or of one that repeated a part of it.
                folders = (run, *sorted(self.scratch.glob(f"{workers}-again-*")))
                checkpoints = (folder / CHECKPOINTS / parting.before.name for folder in folders)
                options["resume"] = str(
                    next(path for path in checkpoints if (path / MANIFEST_FILE).is_file())
                )
                (self.scratch / name).mkdir()
                shutil.copy(run / CONFIG, self.scratch / name)
            trial = Trial(self.training, workers, self.scratch, name, **options)
            _run_until(trial, parting.step)
            made.append(trial.path)
        return made


def checkpoint_options(interval: int, keep: int = PARTS + 2) -> dict[str, object]:
    """Return the options for checkpoints every so many steps (0: only at evaluations)."""
    return {"checkpoint_interval": interval, "keep_checkpoints": keep}


def _run_until(trial: Trial, step: int) -> None:
    """Wait for the checkpoint of `step`, then end the run. Raises TrainingError if it fails."""
    awaited = trial.path / CHECKPOINTS / name_of(step) / MANIFEST_FILE
    wait_while(lambda: trial.is_running() and not awaited.is_file())
    if not awaited.is_file():
        trial.wait_for_success()
    trial.end()


def _checkpoints(run: Path) -> list[Path]:
    return Checkpoints(run / CHECKPOINTS, keep=1).complete()


def _steps(run: Path) -> set[int]:
    return {step_of(path.name) for path in _checkpoints(run)}
