"""What a run is built of: a resumed run whose script or model has changed is refused.

A checkpoint is loaded by place and name. What it holds would replace changed settings in silence,
go to other objects, or fail in the middle. The frozen parameters of a script's model are part of
what a run is built of where checkpoints leave them out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdtrain.errors import TrainingError, UsageError, refuse
from hvdtrain.exchange.agreement import first_difference
from hvdtrain.tensors import items_of, tensors_sha256

Settings = dict[str, Any]  # plain values by their path
# Of a group of parameters: what says how an update is computed, not which.
EXECUTION = ("params", "foreach", "fused", "capturable", "differentiable")
TOLERANCE = 1e-9  # of settings, which processors may compute with other last bits


def built_of(
    optimizers: Sequence[torch.optim.Optimizer], further_state: Sequence[Any]
) -> dict[str, Any]:
    """Return types and settings of optimizers and further objects; plain values, to be saved."""
    return {
        "optimizers": [
            _named(
                optimizer,
                [
                    {key: value for key, value in group.items() if key not in EXECUTION}
                    for group in optimizer.param_groups
                ],
            )
            for optimizer in optimizers
        ],
        "state": [
            _named(stateful, stateful.state_dict() if isinstance(stateful, LRScheduler) else {})
            for stateful in further_state
        ],
    }


def refuse_other_build(
    state: Mapping[str, Any], model: torch.nn.Module, built: Mapping[str, Any]
) -> None:
    """Raise UsageError, with all differences, unless model, optimizers and further objects are
    built as those that a captured state is of. Settings of earlier versions are not known.
    """
    problems = [*_of_model(state, model.state_dict())]
    saved = state.get("built", {})
    for kind, what in (("optimizers", "the optimizer"), ("state", "of state, the")):
        problems += _of_objects(kind, what, saved.get(kind, built[kind]), built[kind])
    if not saved:
        counts = {
            "optimizers": 1 + len(state.get("further_optimizers", ())),
            "state": len(state.get("further_state", ())),
        }
        problems += [
            f"{kind}: there are {len(built[kind])}, and were {there}"
            for kind, there in counts.items()
            if len(built[kind]) != there
        ]
    refuse(
        (f"--resume: {problem}" for problem in problems),
        ". A resumed run is the same experiment: build them as they were, or start another "
        "--experiment",
    )


@dataclass(frozen=True)
class FrozenWeights:
    """The frozen parameters of a script's model, which the script makes at each start.

    Checkpoints hold their names and SHA-256 in place of their values.
    """

    names: tuple[str, ...]  # in the model's state, so each name of tied parameters
    sha256: str

    @classmethod
    def of(cls, model: torch.nn.Module) -> FrozenWeights:
        """Return the base of a model."""
        frozen = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        }
        return cls(tuple(frozen), tensors_sha256(frozen))

    def difference(self, model: torch.nn.Module) -> str | None:
        """Return how these parameters differ from those of a model; None if they do not."""
        state = model.state_dict()
        if missing := [name for name in self.names if name not in state]:
            return f"the model has no {missing[0]} ({len(missing)} of {len(self.names)} missing)"
        now = tensors_sha256({name: state[name] for name in self.names})
        if now == self.sha256 or not self.names:
            return None
        return f"{len(self.names)} tensors of SHA-256 {self.sha256[:16]} then, {now[:16]} now"

    def check(self, model: torch.nn.Module, step: int) -> None:
        """Raise TrainingError if training has changed these parameters: they would be lost."""
        if changed := self.difference(model):
            raise TrainingError(
                f"step {step}: parameters that were frozen at the start have changed: {changed}. "
                "Leave save_frozen=False out"
            )

    def left_out(self, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """Return a model's state without these parameters. `prefix`: of the names in `state`."""
        kept = copy.copy(state)  # with the versions of modules, an attribute
        for name in self.names:
            kept.pop(prefix + name, None)
        return kept

    def filled(
        self, state: dict[str, Any], model: torch.nn.Module, prefix: str = ""
    ) -> dict[str, Any]:
        """Return a saved state with these parameters as `model` has them."""
        values, filled = model.state_dict(), copy.copy(state)
        filled.update({prefix + name: values[name].cpu() for name in self.names})
        return filled


NONE_LEFT_OUT = FrozenWeights((), "")


def saved_base(state: Mapping[str, Any]) -> FrozenWeights:
    """Return the base that a checkpoint's state leaves out."""
    saved = state.get("base")
    return FrozenWeights(tuple(saved["names"]), saved["sha256"]) if saved else NONE_LEFT_OUT


def refuse_another_base(state: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise UsageError unless the model has the frozen parameters that a checkpoint leaves out."""
    if changed := saved_base(state).difference(model):
        raise UsageError(
            "the frozen parameters, which the checkpoint does not hold (save_frozen=False), are "
            f"not those of the run: {changed}. Make the model with the same ones"
        )


def _named(one: Any, settings: Any) -> dict[str, Any]:
    return {"kind": type(one).__name__, "settings": dict(_settings(settings, ""))}


def _settings(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a structure by path; others count by their type."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    items = items_of(value)
    if items is not None:
        yield f"{path} has", len(items)
        for key, item in items.items():
            yield from _settings(item, f"{path}.{key}" if path else str(key))
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value if type(value) in (bool, int, str) or value is None else float(value)
    else:
        yield path, type(value).__name__


def _of_model(state: Mapping[str, Any], model_state: Mapping[str, Any]) -> Iterator[str]:
    left_out = set((state.get("base") or {}).get("names", ()))
    parameters = set(state.get("parameters", ()))

    def described(held: Mapping[str, Any]) -> list[str]:
        # A buffer may have changed its shape.
        return [
            f"{name} {list(tensor.shape)} {tensor.dtype}" if name in parameters else name
            for name, tensor in held.items()
            if name not in left_out and isinstance(tensor, torch.Tensor)
        ]

    if difference := first_difference(described(model_state), described(state["model"])):
        yield (
            f"the model is another: tensor {difference.number} of it is {difference.here}, and was "
            f"{difference.there} when the checkpoint was saved"
        )


def _of_objects(
    kind: str, what: str, there: Sequence[Settings], here: Sequence[Settings]
) -> Iterator[str]:
    kinds = [[entry["kind"] for entry in held] for held in (here, there)]
    if kinds[0] != kinds[1]:
        names = [", ".join(side) or "none" for side in kinds]
        yield f"{kind}: they are {names[0]}, and were {names[1]} when the run began"
        return
    for number, (now, before) in enumerate(zip(here, there, strict=True)):
        current, old = now["settings"], before["settings"]
        paths = dict.fromkeys([*current, *old])
        changes = [path for path in paths if not _alike(current.get(path), old.get(path))]
        for path in changes[:1]:
            name = now["kind"] + (f" (number {number})" if len(here) > 1 else "")
            yield (
                f"{what} {name}: {path} is {current.get(path)}, and was {old.get(path)} when "
                "the run began"
            )


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=TOLERANCE) or one == two or one != one != two
    return bool(one == two)
