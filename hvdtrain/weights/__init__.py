"""Weights of files: read without trusting the file, and loaded into a model.

All are loaded or none, except a head for other classes. Files are safetensors, those of torch.save
and checkpoints. Pickled code is never run: torch reads with `weights_only`, and files that it
refuses are refused.
"""

import argparse
import json
import pickle
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.train.bounded import Inflated, read_safetensors, read_torch
from hvdtrain.train.checkpoint import MANIFEST_FILE, MODEL_FILE, DamagedCheckpoint, load_checkpoint
from hvdtrain.weights.names import (
    Weights,
    clean_names,
    describe_removed,
    find_origins,
    is_like,
    without_prefix,
)

# Keys of the weights in dictionaries that training scripts save. The first one present is used: the
# model before its moving average.
NESTS = (
    *("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network"),
    *("weights", "params", "state"),
    *("model_ema", "ema_state_dict", "state_dict_ema", "ema"),
)
DEEPEST_NEST = 3
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
POINTERS = ("best", "last")
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)")
EXAMPLES = 3
HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Training heads of googlenet and inception_v3 in torchvision's files.
AUXILIARY = ("aux1", "aux2", "AuxLogits")
# torchvision's files of DenseNet have old layer names, norm.1 for norm1.
OLD_DENSENET = re.compile(r"(.*\.denselayer\d+\.(?:norm|conv))\.([12]\.\w+)")


def read_weights(path: Path) -> Weights:
    """Return the tensors by name of a weights file, a checkpoint's folder or a run's folder.

    Raises UsageError if they cannot be read.
    """
    weights_path = find_weights(path)
    try:
        if weights_path.is_dir():
            content: object = load_checkpoint(weights_path)[0]
        elif weights_path.name in INDEX_FILES:
            content = _read_shards(weights_path)
        else:
            content = _read_file(weights_path)
    except DamagedCheckpoint as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{weights_path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(f"{weights_path}: damaged, or not a safetensors file: {error}") from error
    return _checked(_unnest(content, weights_path), weights_path)


def find_weights(path: Path) -> Path:
    """Return the weights file that `path` refers to, or the folder of a verifiable checkpoint.

    A run's folder refers to its best checkpoint, or the last one if there is no best one.
    """
    pointers = [folder / name for name in POINTERS for folder in (path / "checkpoints", path)]
    for pointer in [*pointers, *([path] if path.name in POINTERS else [])]:
        if pointer.is_file():
            return _follow(pointer)
    if path.is_dir():
        for name in (MANIFEST_FILE, MODEL_FILE, *INDEX_FILES):
            if (path / name).is_file():
                return path if name == MANIFEST_FILE else path / name
        raise UsageError(
            f"{path}: not a run or checkpoint: contains neither checkpoints/ nor {MODEL_FILE}"
        )
    if not path.is_file():
        reason = "is not a regular file" if path.exists() else "no such file or folder"
        raise UsageError(f"{path}: {reason}")
    return path


def _follow(pointer: Path) -> Path:
    """Return the checkpoint that `best` or `last` names."""
    try:
        target = pointer.parent / pointer.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{pointer}: cannot be read: {error}") from error
    if target == pointer.parent or not target.is_dir():
        raise UsageError(f"{pointer}: names a checkpoint that does not exist")
    return target


def _read_file(path: Path) -> object:
    try:
        return read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except Inflated as error:
        raise UsageError(f"{path}: {error}") from error


def _read_shards(index: Path) -> Weights:
    """Return the tensors of the files that an index names, as transformers writes large models.

    Raises UsageError for an index of another form, or files that lack a tensor.
    """
    try:
        weight_map = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        shards = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{index}: not an index of weights: {error!r}") from error
    if foreign := [name for name in shards if Path(name).name != name]:
        raise UsageError(f"{index}: names a file outside its folder: {foreign[0]}")
    content: Weights = {}
    for name in shards:
        content |= _checked(_unnest(_read_file(index.parent / name), index), index)
    if missing := sorted(weight_map.keys() - content.keys()):
        raise UsageError(f"{index}: {_count('tensors are in none of its files', missing)}")
    return content


def _read_torch(path: Path) -> object:
    """Read a file of torch.save without running code in it."""
    try:
        # Scripts of torchvision and timm save their options as a Namespace of plain attributes.
        # torch.jit archives cause a warning before they are refused.
        options = torch.serialization.safe_globals([argparse.Namespace])
        with options, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read_torch(path)
    except (Inflated, OSError):
        raise
    except Exception as error:  # damaged or forged archives raise errors of many types
        if code := _refused_code(error):
            raise UsageError(
                f"{path}: holds pickled code ({code}), which is not run. If you trust it, "
                "re-save only its weights: torch.save(model.state_dict(), FILE)"
            ) from error
        # torch's message of an UnpicklingError is not about the file.
        is_named = not isinstance(error, pickle.UnpicklingError) and str(error)
        reason = f": {type(error).__name__}: {str(error).splitlines()[0]}" if is_named else ""
        raise UsageError(f"{path}: damaged, or not a file of torch.save{reason}") from error


def _refused_code(error: Exception) -> str | None:
    """Return the class or function that torch refused to run, if that was the error."""
    if "TorchScript" in str(error):
        return "a TorchScript archive"
    match = _REFUSED_GLOBAL.search(str(error))
    return (match[1] or match[2]) if match else None


def _unnest(content: object, path: Path) -> dict[Any, Any]:
    """Return `content`, or a dictionary nested in it, that holds tensors."""
    level = content
    for _ in range(DEEPEST_NEST):
        if not isinstance(level, dict):
            break
        tensors = [value for value in level.values() if isinstance(value, torch.Tensor)]
        inner = next((level[name] for name in NESTS if isinstance(level.get(name), dict)), None)
        # A loss or a count that stands beside the weights is a tensor too, without a dimension.
        if tensors and (inner is None or any(tensor.dim() > 0 for tensor in tensors)):
            return level
        level = inner
    if not isinstance(content, dict):
        raise UsageError(f"{path}: no tensors by name in it")
    held = ", ".join(map(str, list(content)[:5])) or "nothing"
    inside = [key for key, value in content.items() if isinstance(value, dict)]
    fix = (
        f". Save the model's: torch.save(torch.load(FILE)[{inside[-1]!r}], OTHER)" if inside else ""
    )
    raise UsageError(f"{path}: no tensors by name in it; holds {held}{fix}")


def _checked(level: dict[Any, Any], path: Path) -> Weights:
    """Return detached tensors by name, without extra state of layers that is no tensor. Raises
    UsageError for other objects, and for meta, quantized and sparse tensors.
    """
    weights = {
        name: value
        for name, value in level.items()
        if isinstance(value, torch.Tensor) or not str(name).endswith("_extra_state")
    }
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UsageError(f"{path}: holds {name!r} among the tensors, a {type(value).__name__}")
        if value.is_meta or value.is_quantized or value.layout != torch.strided:
            kind = "without values" if value.is_meta else "quantized or sparse"
            raise UsageError(f"{path}: tensor {name} is {kind}")
    return {name: value.detach() for name, value in weights.items()}


def load_pretrained(model: nn.Module, path: Path) -> list[str]:
    """Load the weights at `path` into `model` and return notes about it.

    A head (the last linear or convolutional layer) for another number of classes is left
    unchanged. Raises UsageError if the weights are of another architecture or not finite; the model
    is then unusable.
    """
    try:
        weights_path = find_weights(path)
        weights, removed = clean_names(read_weights(path))
        notes = [f"{len(weights)} tensors from {weights_path}", *describe_removed(removed)]
        return [*notes, *_load(model, weights)]
    except UsageError as error:
        reasons = [reason.removeprefix(f"{path}: ") for reason in error.problems]
        raise UsageError(*(f"--pretrained={path}: {reason}" for reason in reasons)) from error


def _load(model: nn.Module, weights: Weights) -> list[str]:
    state = model.state_dict()
    origins, _ = find_origins(state)  # remove the same prefixes on both sides
    targets = {clean: state[name] for clean, name in origins.items()}
    weights, prefix_notes = without_prefix(weights, targets)
    weights = {_renewed(name, targets): tensor for name, tensor in weights.items()}
    auxiliary = {n for n in weights if n not in targets and n.partition(".")[0] in AUXILIARY}
    head, head_notes = _leave_head(model, weights, origins, targets)
    common = weights.keys() & targets.keys() - head
    wrong = sorted(
        name
        for name in common
        if weights[name].shape != targets[name].shape
        or weights[name].is_floating_point() != targets[name].is_floating_point()
    )
    left = auxiliary | head | set(wrong)
    chosen = {name: tensor for name, tensor in weights.items() if name not in left}
    values, type_notes = _converted(chosen, targets)
    missing, extra = _put(model, {origins.get(name, name): t for name, t in values.items()})
    there = {state[origins[n]].data_ptr() for n in values if n in origins}  # for tied names
    expected = {origins.get(name) for name in left}
    lacking = [n for n in missing if n not in expected and state[n].data_ptr() not in there]
    shapes = [f"{n} {_shape(weights[n])} and {_shape(targets[n])} here" for n in wrong]
    faults = {"missing in the file": lacking, "not in the model": extra, "of other shapes": shapes}
    if problems := [_count(what, names) for what, names in faults.items() if names]:
        raise UsageError(f"weights of another architecture: {'; '.join(problems)}")
    ignored = [f"auxiliary heads: {len(auxiliary)} tensors are ignored"] if auxiliary else []
    return [*prefix_notes, *ignored, *head_notes, *type_notes]


def _renewed(name: str, targets: Weights) -> str:
    renewed = OLD_DENSENET.sub(r"\1\2", name)
    return renewed if renewed in targets and name not in targets else name


def _leave_head(
    model: nn.Module, weights: Weights, origins: dict[str, str], targets: Weights
) -> tuple[set[str], list[str]]:
    """Return the names of the head if the file has it for other classes, and a note."""
    layers = [name for name, module in model.named_modules() if isinstance(module, HEADS)]
    head = {f"{layers[-1]}.weight", f"{layers[-1]}.bias"} if layers else set()
    names = sorted(clean for clean, name in origins.items() if name in head)
    if not names or not all(
        name in weights
        and is_like(weights[name], targets[name])
        and len(weights[name]) != len(targets[name])
        for name in names
    ):
        return set(), []
    layer, _, _ = names[0].rpartition(".")
    counts = f"{len(weights[names[0]])} classes in the file, {len(targets[names[0]])} here"
    return set(names), [f"head {layer}: {counts}: reinitialised"]


def _converted(weights: Weights, targets: Weights) -> tuple[Weights, list[str]]:
    """Return the weights in the types of the model, and a note. Raises UsageError unless all are
    finite after the conversion, which may overflow.
    """
    values = {n: t.to(targets[n].dtype) if n in targets else t for n, t in weights.items()}
    if not_finite := [name for name, value in values.items() if not value.isfinite().all()]:
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
