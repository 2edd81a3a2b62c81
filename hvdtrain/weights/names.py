"""Names of tensors: without the prefixes that wrappers, compilers and trainers add."""

from collections import Counter
from collections.abc import Iterable

import torch

from hvdtrain.errors import UsageError
from hvdtrain.log import few

Weights = dict[str, torch.Tensor]
# Parts of names that torch.compile, FSDP and its wrapper for checkpointed activations add.
ADDED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
WRAPPED = "module."  # of DataParallel, DistributedDataParallel and AveragedModel
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
    cleaned: dict[str, str] = {}
    for name in names:
        *path, last = name.split(".")
        removed.update(f"{part}." for part in path if part in ADDED)
        cleaned[name] = ".".join([*(part for part in path if part not in ADDED), last])
    while {clean.startswith(WRAPPED) for clean in cleaned.values() if clean != COUNTER} == {True}:
        for name, clean in list(cleaned.items()):
            if clean == COUNTER:
                del cleaned[name]
            else:
                cleaned[name] = clean.removeprefix(WRAPPED)
            removed[COUNTER if clean == COUNTER else WRAPPED] += 1
    origins: dict[str, str] = {}
    for name, clean in cleaned.items():
        if (other := origins.setdefault(clean, name)) != name:
            raise UsageError(f"the names {other} and {name} would both become {clean}")
    return origins, dict(+removed)  # without counts of 0


def without_prefix(weights: Weights, targets: Weights) -> tuple[Weights, list[str]]:
    """Return the tensors of a model that is a part of what was saved, and a note.

    Trainers keep the model as an attribute of theirs, so all its names have a prefix: Lightning's
    `model.` or `net.`, PEFT's `base_model.model.`. It is removed if the names below it are those of
    `targets`, in the same shapes except for a head's number of classes. Raises UsageError if there
    are several such parts, such as a network and its moving average.
    """
    if weights.keys() & targets.keys():
        return weights, []
    first = next(iter(targets), "")
    candidates = {n.removesuffix(first) for n in weights if n.endswith(f".{first}")}
    prefixes = sorted(prefix for prefix in candidates if _is_all_in(prefix, weights, targets))
    if not prefixes:
        return weights, []
    if len(prefixes) > 1:
        one = repr(prefixes[0])
        part = f"{{n.removeprefix({one}): t for n, t in W.items() if n.startswith({one})}}"
        raise UsageError(
            f"holds the model's weights {len(prefixes)} times, below {' and '.join(prefixes)}; "
            f"save those that you want, W being the file's: torch.save({part}, OTHER)"
        )
    (prefix,) = prefixes
    chosen = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    notes = describe_removed({prefix: len(chosen)})
    if others := [name for name in weights if not name.startswith(prefix)]:
        notes.append(f"not loaded, as their names lack {prefix}: {few(others, 3)}")
    return chosen, notes


def _is_all_in(prefix: str, weights: Weights, targets: Weights) -> bool:
    """Return whether all tensors are there below a prefix; of tied ones one is enough."""
    there = {
        name: tensor
        for name, tensor in targets.items()
        if prefix + name in weights and is_like(weights[prefix + name], tensor)
    }
    addresses = {tensor.data_ptr() for tensor in there.values()}
    return all(name in there or tensor.data_ptr() in addresses for name, tensor in targets.items())


def is_like(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether shapes are equal, except in the first dimension: a number of classes."""
    return theirs.dim() == ours.dim() and theirs.shape[1:] == ours.shape[1:]


def describe_removed(removed: dict[str, int]) -> list[str]:
    """Return a note such as ['removed from names: _orig_mod. (62 times)'], or none."""
    counted = [f"{prefix} ({times} times)" for prefix, times in removed.items()]
    return [f"removed from names: {', '.join(counted)}"] if counted else []
