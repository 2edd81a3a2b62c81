"""The frozen parameters of a model, where checkpoints leave them out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.tensors import tensors_sha256


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
