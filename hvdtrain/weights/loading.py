"""Loading of weights into a model: all or none, except a head for other classes."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.weights.reading import Weights, clean_names, find_origins, find_weights, read_weights

EXAMPLES = 3
# Training heads of googlenet and inception_v3 in torchvision's files.
AUXILIARY = ("aux1", "aux2", "AuxLogits")
# torchvision's files of DenseNet have old layer names, norm.1 for norm1.
OLD_DENSENET = re.compile(r"(.*\.denselayer\d+\.(?:norm|conv))\.([12]\.\w+)")


def load_pretrained(model: nn.Module, path: Path) -> list[str]:
    """Load the weights at `path` into `model` and return notes about it.

    A head (the last linear or convolutional layer) for another number of classes is left
    unchanged. Raises UsageError if the weights are of another architecture or not finite; the model
    is then unusable.
    """
    try:
        place = find_weights(path)
        weights, removed = clean_names(read_weights(path))
        notes = [f"{len(weights)} tensors from {place}", *describe_removed(removed)]
        notes += _load(model, weights)
    except UsageError as error:
        reasons = [problem.removeprefix(f"{path}: ") for problem in error.problems]
        raise UsageError(*(f"--pretrained={path}: {reason}" for reason in reasons)) from error
    return notes


def describe_removed(removed: dict[str, int]) -> list[str]:
    """Return a note such as ['removed from names: _orig_mod. (62 times)'], or none."""
    counted = [f"{prefix} ({times} times)" for prefix, times in removed.items()]
    return [f"removed from names: {', '.join(counted)}"] if counted else []


def _load(model: nn.Module, weights: Weights) -> list[str]:
    own = model.state_dict()
    origins, _ = find_origins(own)  # remove the same prefixes on both sides
    targets = {clean: own[name] for clean, name in origins.items()}
    weights = {_renewed(name, targets): tensor for name, tensor in weights.items()}
    left, notes = _leave_auxiliary(weights, targets)
    head, head_notes = _leave_head(model, weights, origins, targets)
    common = weights.keys() & targets.keys() - head
    wrong = sorted(name for name in common if _differs(weights[name], targets[name]))
    left |= head | set(wrong)
    chosen = {name: tensor for name, tensor in weights.items() if name not in left}
    values, type_notes = _converted(chosen, targets)
    missing, extra = _put(model, {origins.get(name, name): t for name, t in values.items()})
    there = {own[origins[name]].data_ptr() for name in values if name in origins}  # for tied names
    lacking = [
        name
        for name in missing
        if name not in {origins.get(n) for n in left} and own[name].data_ptr() not in there
    ]
    shapes = [f"{n} {_shape(weights[n])} and {_shape(targets[n])} here" for n in wrong]
    found = {"missing in the file": lacking, "not in the model": extra, "of other shapes": shapes}
    problems = [_count(what, names) for what, names in found.items() if names]
    if problems:
        raise UsageError(f"weights of another architecture: {'; '.join(problems)}")
    return [*notes, *head_notes, *type_notes]


def _renewed(name: str, targets: Weights) -> str:
    renewed = OLD_DENSENET.sub(r"\1\2", name)
    return name if name in targets or renewed not in targets else renewed


def _leave_auxiliary(weights: Weights, targets: Weights) -> tuple[set[str], list[str]]:
    """Return the names of auxiliary heads in the file that the model lacks, and a note."""
    names = {n for n in weights if n not in targets and n.partition(".")[0] in AUXILIARY}
    return names, [f"auxiliary heads: {len(names)} tensors are ignored"] if names else []


def _leave_head(
    model: nn.Module, weights: Weights, origins: dict[str, str], targets: Weights
) -> tuple[set[str], list[str]]:
    """Return the names of the head if the file has it for other classes, and a note."""
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    head = {f"{layers[-1]}.weight", f"{layers[-1]}.bias"} if layers else set()
    names = sorted(clean for clean, name in origins.items() if name in head)
    pairs = [(weights.get(name), targets[name]) for name in names]
    if not pairs or not all(_has_other_classes(theirs, ours) for theirs, ours in pairs):
        return set(), []
    layer, _, _ = names[0].rpartition(".")
    counts = f"{len(weights[names[0]])} classes in the file, {len(targets[names[0]])} here"
    return set(names), [f"head {layer}: {counts}: reinitialised"]


def _has_other_classes(theirs: torch.Tensor | None, ours: torch.Tensor) -> bool:
    """Return whether the shapes differ only in the first dimension, the number of classes."""
    if theirs is None or theirs.dim() != ours.dim():
        return False
    return len(theirs) != len(ours) and theirs.shape[1:] == ours.shape[1:]


def _differs(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether shapes differ, or only one of the types is floating point."""
    same_kind = theirs.is_floating_point() == ours.is_floating_point()
    return theirs.shape != ours.shape or not same_kind


def _converted(weights: Weights, targets: Weights) -> tuple[Weights, list[str]]:
    """Return the weights in the types of the model, and a note.

    Raises UsageError unless all are finite after the conversion, which may overflow.
    """
    values = {n: t.to(targets[n].dtype) if n in targets else t for n, t in weights.items()}
    not_finite = [name for name, value in values.items() if not value.isfinite().all()]
    if not_finite:
        raise UsageError(_count("not finite", not_finite))
    changes = sorted(
        {(_type(weights[n]), _type(t)) for n, t in values.items() if t.dtype != weights[n].dtype}
    )
    return values, [f"converted from {theirs} to {ours}" for theirs, ours in changes]


def _put(model: nn.Module, values: Weights) -> tuple[list[str], list[str]]:
    """Load values and return the names missing in them, and those that the model lacks."""
    state = OrderedDict(values)
    # Without versions of layers, torch and torchvision convert the names of older releases. The
    # version of the network itself is required by torchvision's MNASNet.
    state._metadata = {"": {"version": model._version}}  # type: ignore[attr-defined]
    try:
        missing, extra = model.load_state_dict(state, strict=False)
    except Exception as error:  # layers may define their own loading
        raise UsageError(f"cannot be loaded: {error}") from error
    return list(missing), list(extra)


def _count(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > EXAMPLES else ""
    return f"{len(names)} {what} ({', '.join(names[:EXAMPLES])}{more})"


def _shape(tensor: torch.Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {_type(tensor)}"
    return ("x".join(map(str, tensor.shape)) or "scalar") + kind


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
