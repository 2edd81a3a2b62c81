"""Comparison of runs on different numbers of workers, and the first step at which they part.

Checkpoints at intervals bound the step: the last equal one and the first that differs. Both runs
are then continued from the last equal one with a finer interval, until the bounds are one step
apart. A run at the same N resumes bit for bit, so the continued runs are the original ones.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.evidence.trials import POLL_S, Training, Trial
from hvdtrain.train.checkpoint import MANIFEST_FILE, Checkpoints, load_state, name_of

# In float64, of the largest magnitude of a tensor. Runs of hundreds of steps stay below it (see
# docs/guide.md); dropout or batch norm exceed it by many orders of magnitude in the first step.
AGREEMENT = 1e-9
# A tensor this much smaller than the largest of the model is measured on that scale: a bias before
# batch norm that starts at zero holds nothing but rounding errors, 1e-16 of its neighbours.
SMALLEST_SCALE = 1e-6
PARTS = 8  # checkpoints between two bounds, and so the factor by which each pass narrows them
KEEP_ALL = 1_000_000  # checkpoints, of a run that is ended at the upper bound

Tensors = Mapping[str, torch.Tensor]


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


@dataclass(frozen=True)
class Saved:
    """The tensors of a checkpoint: trained parameters, and all others."""

    parameters: Tensors
    others: Tensors  # buffers, and the moving average of the weights

    def largest_gap(self, other: Saved) -> Gap:
        """Return the largest relative difference of any tensor."""
        pairs = ((self.parameters, other.parameters), (self.others, other.others))
        return max((largest_gap(*pair) for pair in pairs), key=lambda gap: gap.relative)

    def gap_above(self, limit: float, other: Saved) -> Gap | None:
        """Return the largest difference above `limit`, of a parameter if any exceeds it, or None.

        With a limit of 0 the bits must be equal.
        """
        pairs = ((self.parameters, other.parameters), (self.others, other.others))
        for kind, pair in zip(("parameter", "tensor"), pairs, strict=True):
            worst = largest_gap(*pair)
            if worst.relative > limit:
                return replace(worst, kind=kind)
            if limit == 0 and (name := _unequal_bits(*pair)):
                return Gap(0.0, name, kind=kind)
        return None


def _unequal_bits(one: Tensors, other: Tensors) -> str | None:
    """Return the name of a tensor whose bits differ although its values are equal (0 and -0)."""
    for name, values in one.items():
        pair = [
            tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (values, other[name])
        ]
        if not torch.equal(*pair):
            return name
    return None


def read_saved(checkpoint: Path) -> Saved:
    """Return the tensors of a checkpoint. Raises DamagedCheckpoint."""
    state = load_state(checkpoint)
    names, model = set(state["parameters"]), state["model"]
    others = {name: values for name, values in model.items() if name not in names}
    for name, values in (state["update"]["average"] or {}).items():
        if isinstance(values, torch.Tensor):
            others[f"the moving average of {name.removeprefix('module.')}"] = values
    return Saved({name: model[name] for name in state["parameters"] if name in model}, others)


def newest(run: Path) -> Path:
    """Return the newest checkpoint of a run. Raises TrainingError if it has none."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1).complete()
    if not checkpoints:
        raise TrainingError(f"{run} has no checkpoint")
    return checkpoints[0]


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
    runs: tuple[Path, Path]  # finished, and different at the end
    limit: float

    def first_difference(self, at_end: Gap) -> Parting:
        """Return where the runs part; parts of them are run again as often as needed.

        `at_end`: the difference of the final tensors.
        """
        last_step, number = max(_steps(self.runs[1])), 0
        parting = self._bounds(self.runs, None) or Parting(last_step, 0, at_end, None)
        while parting.step - parting.last_equal > 1:
            number += 1
            folders = self._repeat(parting, number)
            narrowed = self._bounds(folders, parting)
            if narrowed is None or not parting.contains(narrowed):
                break  # run again, they part elsewhere: something is random
            parting = narrowed
        return parting

    def _bounds(self, folders: tuple[Path, Path], parting: Parting | None) -> Parting | None:
        """Return the first common checkpoint that differs; None if all are equal.

        `parting`: the bounds within which both runs were made.
        """
        last, before = (parting.last_equal, parting.before) if parting else (0, None)
        for step in sorted(set.intersection(*(_steps(folder) for folder in folders))):
            paths = [folder / "checkpoints" / name_of(step) for folder in folders]
            one, other = map(read_saved, paths)
            if gap := one.gap_above(self.limit, other):
                return Parting(step, last, gap, before)
            last, before = step, paths[0]
        return None

    def _repeat(self, parting: Parting, number: int) -> tuple[Path, Path]:
        """Run both again from the last equal checkpoint, one after the other, until they part."""
        scratch = self.runs[0].parent
        interval = math.ceil((parting.step - parting.last_equal) / PARTS)
        made = []
        for workers, run in zip(self.workers, self.runs, strict=True):
            again = scratch / f"{run.name}-again-{number}"
            start: dict[str, object] = {}
            if parting.before is not None:
                begun = _beginning(run, parting.before.name, scratch)
                start = {"resume": str(begun)}
                again.mkdir()
                shutil.copy(run / "config.yaml", again)
            options = checkpoint_options(interval, KEEP_ALL) | start
            trial = Trial(self.training, workers, scratch, again.name, **options)
            _run_until(trial, parting.step)
            made.append(again)
        return made[0], made[1]


def checkpoint_options(interval: int, keep: int = PARTS + 2) -> dict[str, object]:
    """Return the options for checkpoints every so many steps (0: only at evaluations)."""
    return {"checkpoint_interval": interval, "keep_checkpoints": keep}


def _beginning(run: Path, checkpoint: str, scratch: Path) -> Path:
    """Return a checkpoint of this name of the run, or of one that repeated a part of it."""
    folders: Iterable[Path] = (run, *sorted(scratch.glob(f"{run.name}-again-*")))
    paths = [folder / "checkpoints" / checkpoint for folder in folders]
    return next(path for path in paths if (path / MANIFEST_FILE).is_file())


def _run_until(trial: Trial, step: int) -> None:
    """Wait for the checkpoint of `step`, then end the run. Raises TrainingError if it fails."""
    awaited = trial.path / "checkpoints" / name_of(step) / MANIFEST_FILE
    while trial.is_running() and not awaited.is_file():
        time.sleep(POLL_S)
    if not awaited.is_file():
        trial.wait_for_success()
    trial.end()


def _steps(run: Path) -> set[int]:
    checkpoints = Checkpoints(run / "checkpoints", keep=1).complete()
    return {int(path.name.partition("-")[2]) for path in checkpoints}
