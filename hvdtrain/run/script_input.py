"""What a script gives to `hvdtrain.Loop`: its options, models and samples, checked and read."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import AUTO
from hvdtrain.config.keywords import OPTIONS
from hvdtrain.config.options import LOOP_OPTIONS, build_config, from_python, nearest, train_options
from hvdtrain.data import Split, Splits
from hvdtrain.data.adapters import split_of
from hvdtrain.data.loader_order import order_problem
from hvdtrain.data.splits import check_split
from hvdtrain.errors import UsageError
from hvdtrain.run.script import NOTHING, Script, optimizer_problems
from hvdtrain.tasks import Metric, finalizes, valid_metrics_of

Samples = Split | Dataset[Any] | DataLoader[Any] | Sequence[Any]


def problems_of(script: Script, train: Samples, valid: Any, has_half: bool) -> Iterator[str]:
    """Yield what is wrong with a script. `has_half`: only one of samples to validate with and a
    function for them.
    """
    if has_half:
        yield "give `valid` and `evaluate` together, or none of them"
    hook: Any = script.on_evaluation
    if hook is not None and not callable(hook):
        yield f"on_evaluation={hook!r:.60}: is not callable: give a function of an evaluation"
    if hook is not None and valid is None:
        yield "on_evaluation: is never called without evaluations: give `valid` and `evaluate` too"
    yield from optimizer_problems(script.model, script.optimizers, script.further_state)
    for part, source in (("train", train), ("valid", valid)):
        if isinstance(source, DataLoader) and (text := order_problem(source, part)):
            yield text
    if not script.save_frozen and all(p.requires_grad for p in script.model.parameters()):
        yield "save_frozen=False: no parameter is frozen"
    names = ("loss", *valid_metrics_of(script.task))
    if script.task.best not in names:
        yield f"best={script.task.best!r}: choose from {', '.join(names)}"
    if finalizes(script.task):
        yield from _finalize_problems(script, valid)


def _finalize_problems(script: Script, valid: Any) -> Iterator[str]:
    finalize: Any = script.task.finalize
    if not callable(finalize) and not isinstance(finalize, Metric):
        yield f"finalize is a {type(finalize).__name__}, neither a function nor a metric object"
    if valid is None:
        yield "finalize needs the outputs of samples that `evaluate` returns: give `evaluate` too"
    elif not valid_metrics_of(script.task):
        yield "finalize: name its figures, such as valid_metrics=['auc']"


def read_samples(name: str, train: Samples, valid: Samples | None, seed: int) -> Splits:
    """Return the samples of a script as splits. Raises UsageError."""
    splits = {"train": split_of(train, seed)}
    if valid is not None:
        splits["valid"] = split_of(valid, seed)
    for part, split in splits.items():
        check_split("hvdtrain.Loop", part, part, split)
    return Splits(name, splits["train"], splits.get("valid", NOTHING))


def read_options(options: Mapping[str, Any], trial_loss: object = None) -> tuple[TrainConfig, bool]:
    """Return the configuration of a script's options, and whether it names the run. Raises
    UsageError with every problem. `trial_loss`: the function for trials of a micro-batch.
    """
    outer = os.environ.get(LOOP_OPTIONS, "{}")
    try:
        replaced = json.loads(outer)
    except ValueError:
        replaced = None
    if not isinstance(replaced, dict):
        raise UsageError(f'{LOOP_OPTIONS}={outer}: expected JSON, such as {{"virtual_workers": 6}}')
    problems = list(_measurement_problems({**options, **replaced}, trial_loss))
    problems += [
        f"{source}: unknown option {name!r}{_hint(name)}"
        for source, names in (("hvdtrain.Loop", options), (LOOP_OPTIONS, replaced))
        for name in names
        if name not in OPTIONS
    ]
    parsed = {"experiment": Path(sys.argv[0]).stem or "script"}
    for name, value in {**options, **replaced}.items():
        if name in OPTIONS:
            try:
                parsed[name] = from_python(name, value)
            except ValueError as error:
                problems.append(f"hvdtrain.Loop: {error}")
    is_named = "experiment" in options and "experiment" not in replaced
    return build_config(parsed, problems), is_named


def _measurement_problems(options: Mapping[str, Any], trial_loss: object) -> Iterator[str]:
    """Yield what cannot be measured before the loop of a script, which computes in it."""
    if options.get("rank_weights") == AUTO and options.get("virtual_workers") is None:
        yield (
            "hvdtrain.Loop: rank_weights='auto': a script computes in its loop, so speeds cannot "
            "be measured before: give weights, such as '1,1,2', or virtual_workers, which move "
            "between workers as the speeds are measured"
        )
    if trial_loss is not None and not callable(trial_loss):
        yield f"hvdtrain.Loop: trial_loss={trial_loss!r:.60}: is not callable: give a function"
    if options.get("micro_batch") == AUTO and trial_loss is None:
        yield (
            "hvdtrain.Loop: micro_batch='auto': a script computes in its loop, so passes cannot be "
            "tried before: give trial_loss, a function of model and batch that returns the loss"
        )


def _hint(name: str) -> str:
    """Return the end of the message on an option that a script does not have."""
    near = nearest(name, OPTIONS)
    if name in train_options() or near not in (None, *OPTIONS):
        return ": model, data, optimizer and learning rate are the script's own"
    return f": did you mean {near}?" if near in OPTIONS else ". See help(hvdtrain.Loop)"
