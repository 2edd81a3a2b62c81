"""Reading of weights from safetensors, files of torch.save and checkpoints. No file is trusted.

Pickled code is never run: torch reads with `weights_only`, and files that it refuses are refused.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint import MANIFEST_FILE, MODEL_FILE, DamagedCheckpoint, load_checkpoint

Weights = dict[str, torch.Tensor]
# Keys of the weights in dictionaries that training scripts save. The first one present is used: the
# model before its moving average.
NESTS = (
    *("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params"),
    *("model_ema", "ema_state_dict", "state_dict_ema", "ema"),
)
DEEPEST_NEST = 3
POINTERS = ("best", "last")
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)")


def read_weights(path: Path) -> Weights:
    """Return the tensors by name of a weights file, a checkpoint's folder or a run's folder.

    Raises UsageError if they cannot be read.
    """
    place = find_weights(path)
    if place.is_dir():
        try:
            weights: object = load_checkpoint(place)[0]
        except DamagedCheckpoint as error:
            raise UsageError(str(error)) from error
    elif place.suffix == ".safetensors":
        weights = _read_safetensors(place)
    else:
        weights = _read_torch(place)
    return _checked(_unnest(weights, place), place)


def find_weights(path: Path) -> Path:
    """Return the weights file that `path` refers to, or the folder of a verifiable checkpoint.

    A run's folder refers to its best checkpoint, or the last one if there is no best one.
    """
    for pointer in POINTERS:
        for file in (path / "checkpoints" / pointer, path / pointer):
            if file.is_file():
                return _follow(file)
    if path.name in POINTERS and path.is_file():
        return _follow(path)
    if path.is_dir():
        if (path / MANIFEST_FILE).is_file():
            return path
        if not (path / MODEL_FILE).is_file():
            raise UsageError(
                f"{path}: not a run or checkpoint: contains neither checkpoints/ nor {MODEL_FILE}"
            )
        return path / MODEL_FILE
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
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


def _read_safetensors(path: Path) -> object:
    try:
        return load_file(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: damaged, or not a safetensors file: {error}") from error


def _read_torch(path: Path) -> object:
    """Read a file of torch.save without running code in it."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        # Scripts of torchvision and timm save their options as a Namespace of plain attributes.
        # torch.jit archives cause a warning before they are refused.
        options = torch.serialization.safe_globals([argparse.Namespace])
        with stream, options, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged or forged archives raise errors of many types
        code = _refused_code(error)
        if code:
            raise UsageError(
                f"{path}: holds pickled code ({code}), which is not run. If you trust it, "
                "re-save only its weights: torch.save(model.state_dict(), FILE)"
            ) from error
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = ""  # torch's message is not about the file
        named = f": {type(error).__name__}: {reason}" if reason else ""
        raise UsageError(f"{path}: damaged, or not a file of torch.save{named}") from error


def _refused_code(error: Exception) -> str | None:
    """Return the class or function that torch refused to run, if that was the error."""
    if "TorchScript" in str(error):
        return "a TorchScript archive"
    found = _REFUSED_GLOBAL.search(str(error))
    return (found[1] or found[2]) if found else None


def _unnest(content: object, place: Path) -> Weights:
    """Return the weights in `content`, or in a dictionary nested in it."""
    level = content
    for _ in range(DEEPEST_NEST):
        if not isinstance(level, dict):
            break
        if any(isinstance(value, torch.Tensor) for value in level.values()):
            return _only_tensors(level, place)
        level = next((level[name] for name in NESTS if isinstance(level.get(name), dict)), None)
    held = ""
    if isinstance(content, dict):
        held = f"; holds {', '.join(map(str, list(content)[:5])) or 'nothing'}"
    raise UsageError(f"{place}: no tensors by name in it{held}")


def _only_tensors(level: dict[Any, Any], place: Path) -> Weights:
    """Return `level` without non-tensor extra state. Raises UsageError for other objects."""
    kept = {
        name: value
        for name, value in level.items()
        if isinstance(value, torch.Tensor) or not str(name).endswith("_extra_state")
    }
    for name, value in kept.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UsageError(f"{place}: holds {name!r} among the tensors, a {type(value).__name__}")
    return kept


def _checked(weights: Weights, place: Path) -> Weights:
    """Return detached tensors. Raises UsageError for meta, quantized and sparse ones."""
    for name, tensor in weights.items():
        if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
            kind = "without values" if tensor.is_meta else "quantized or sparse"
            raise UsageError(f"{place}: tensor {name} is {kind}")
    return {name: tensor.detach() for name, tensor in weights.items()}


COMPILED = "_orig_mod"
WRAPPED = "module."
COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


def clean_names(weights: Weights) -> tuple[Weights, dict[str, int]]:
    """Return the weights by their clean names, and how often each prefix was removed.

    A model whose only attribute is called `module` is indistinguishable from a wrapped one: that
    prefix is removed too. Raises UsageError if two names become equal.
    """
    origins, removed = find_origins(weights)
    return {clean: weights[name] for clean, name in origins.items()}, removed


def find_origins(names: Iterable[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the names by their clean names, and how often each prefix was removed.

    Raises UsageError if two names become equal.
    """
    removed: Counter[str] = Counter()
    cleaned = {name: _without_compiled(name, removed) for name in names}
    while _all_wrapped(cleaned):
        for name, clean in list(cleaned.items()):
            if clean == COUNTER:
                del cleaned[name]
                removed[COUNTER] += 1
            else:
                cleaned[name] = clean.removeprefix(WRAPPED)
                removed[WRAPPED] += 1
    origins: dict[str, str] = {}
    for name, clean in cleaned.items():
        other = origins.setdefault(clean, name)
        if other != name:
            raise UsageError(f"the names {other} and {name} would both become {clean}")
    return origins, dict(removed)


def _without_compiled(name: str, removed: Counter[str]) -> str:
    *path, last = name.split(".")
    kept = [part for part in path if part != COMPILED]
    if len(kept) < len(path):
        removed[f"{COMPILED}."] += len(path) - len(kept)
    return ".".join([*kept, last])


def _all_wrapped(cleaned: dict[str, str]) -> bool:
    own = [clean for clean in cleaned.values() if clean != COUNTER]
    return bool(own) and all(clean.startswith(WRAPPED) for clean in own)
