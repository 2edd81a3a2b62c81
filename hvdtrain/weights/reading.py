"""Reads weights: safetensors, what torch.save wrote, our own checkpoints. No file is trusted.

Pickled code is never run: torch reads with `weights_only`, and what that refuses is refused here.
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
# Where training scripts put the weights in a larger dictionary. Where there are several, the first
# counts: the model before its moving average.
NESTS = (
    *("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params"),
    *("model_ema", "ema_state_dict", "state_dict_ema", "ema"),
)
DEEPEST_NEST = 3
POINTERS = ("best", "last")
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)")


def read_weights(path: Path) -> Weights:
    """The tensors by name of a weights file, a checkpoint's folder or a run's folder.

    Raises UsageError, saying what is wrong with it.
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
    """The weights file that `path` means, or the checkpoint's folder where that can be verified.

    A run's folder means its best checkpoint, or the last one where there is no best one.
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
                f"{path}: no run and no checkpoint: holds neither checkpoints/ nor {MODEL_FILE}"
            )
        return path / MODEL_FILE
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
    return path


def _follow(pointer: Path) -> Path:
    """The checkpoint that `best` or `last` names."""
    try:
        target = pointer.parent / pointer.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{pointer}: cannot be read: {error}") from error
    if target == pointer.parent or not target.is_dir():
        raise UsageError(f"{pointer}: names no checkpoint that is there")
    return target


def _read_safetensors(path: Path) -> object:
    try:
        return load_file(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: damaged, or no safetensors file: {error}") from error


def _read_torch(path: Path) -> object:
    """What torch.save wrote, with no code of it run."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        # Scripts of torchvision and timm save their options beside the weights: plain attributes,
        # no code. A torch.jit archive warns before it is refused.
        options = torch.serialization.safe_globals([argparse.Namespace])
        with stream, options, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or forged archive may trip over anything
        code = _refused_code(error)
        if code:
            raise UsageError(
                f"{path}: holds pickled code ({code}), which is not run. Where you trust it, "
                "re-save only its weights: torch.save(model.state_dict(), FILE)"
            ) from error
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = ""  # of torch's many words none is about the file
        named = f": {type(error).__name__}: {reason}" if reason else ""
        raise UsageError(f"{path}: damaged, or no file of torch.save{named}") from error


def _refused_code(error: Exception) -> str | None:
    """The class or function that torch has refused to run, if that was its complaint."""
    if "TorchScript" in str(error):
        return "a TorchScript archive"
    found = _REFUSED_GLOBAL.search(str(error))
    return (found[1] or found[2]) if found else None


def _unnest(content: object, place: Path) -> Weights:
    """The weights in `content`, or in the dictionary around them."""
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
    """`level` without modules' extra state that is no tensor. Anything else there is a mistake."""
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
    """Plain tensors only: those without values, or with values in another layout, are refused."""
    for name, tensor in weights.items():
        if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
            kind = "without values" if tensor.is_meta else "quantized or sparse"
            raise UsageError(f"{place}: tensor {name} is {kind}")
    return {name: tensor.detach() for name, tensor in weights.items()}


COMPILED = "_orig_mod"
WRAPPED = "module."
COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


def clean_names(weights: Weights) -> tuple[Weights, dict[str, int]]:
    """The weights by their clean names, and how often each prefix was removed.

    A model whose one and only attribute is called `module` cannot be told from a wrapped one: its
    names lose that too. Raises UsageError when two names become one.
    """
    origins, removed = find_origins(weights)
    return {clean: weights[name] for clean, name in origins.items()}, removed


def find_origins(names: Iterable[str]) -> tuple[dict[str, str], dict[str, int]]:
    """The names by their clean ones, and how often each prefix was removed. Raises UsageError."""
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
