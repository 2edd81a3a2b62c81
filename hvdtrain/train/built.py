"""What a run is built of: a resumed run whose script or model has changed is refused.

A checkpoint is loaded by place and name. What it holds would replace changed settings in silence,
go to other objects, or fail in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdtrain.errors import refuse
from hvdtrain.exchange.agreement import first_difference
from hvdtrain.tensors import items_of

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
