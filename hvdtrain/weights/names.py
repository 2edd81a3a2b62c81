"""Names as the model itself has them, without what wrappers put before them.

    DataParallel, DDP            module.fc.weight
    torch.compile                _orig_mod.fc.weight, or of a part: features._orig_mod.0.weight
    AveragedModel (EMA, SWA)     module.fc.weight, and a counter n_averaged

in any order and number. `_orig_mod` is torch's own word, so it goes wherever it stands. `module`
may be an attribute of the model: it goes from the front alone, and only where all names begin so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hvdtrain.errors import UsageError
from hvdtrain.weights.reading import Weights

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
