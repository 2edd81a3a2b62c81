"""What a script with its own training loop hands over, and messages in its words: its options as
keywords, where `train` has flags.
"""

import gc
import re
import runpy
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hvdtrain.config.keywords import OPTIONS
from hvdtrain.config.options import Option, train_options
from hvdtrain.data.splits import Splits, TensorSplit
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.log import counted
from hvdtrain.tasks import Finalize, Settings, Sums, Task
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Stateful
from hvdtrain.train.optimizers import UNSUITABLE
from hvdtrain.train.step import Step

Evaluate = Callable[[torch.nn.Module, Any], Sums]
TrialLoss = Callable[[torch.nn.Module, Any], torch.Tensor]
NOTHING = TensorSplit(torch.empty(0, 1), torch.empty(0, dtype=torch.int64))
NO_DATA = Splits("", NOTHING, NOTHING)

# What a script decides itself, by other means than an option.
OWN = {"lr": "the learning rate", "warmup_epochs": "a warmup of the learning rate"}
# --name, --name=value, and --name followed by a word, which may be its value.
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?:=([^\s:;,]+)| (\w+(?:\.\w+)*))?")


class ScriptTask(Task):
    """The task of a script: it computes losses itself, and may give functions to evaluate."""

    counts_samples = False
    computes_loss = False

    def __init__(
        self,
        evaluate: Evaluate | None,
        metrics: Sequence[str],
        valid_metrics: Sequence[str] | None,
        best: str,
        best_is_highest: bool,
        finalize: Finalize | None = None,
    ) -> None:
        super().__init__(Settings("", "", Path(), 0, torch.float32))
        self.metrics = tuple(metrics)
        self.valid_metrics = None if valid_metrics is None else tuple(valid_metrics)
        self.best, self.best_is_highest = best, best_is_highest
        self._evaluate = evaluate
        if finalize is not None:
            self.finalize = finalize  # type: ignore[method-assign, assignment]

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
        assert self._evaluate is not None  # only called with samples to validate with
        return self._evaluate(model, batch)


@dataclass(frozen=True)
class Script:
    """A script with its own training loop."""

    path: Path
    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    further_state: Sequence[Stateful]
    task: ScriptTask
    data: Splits = NO_DATA
    save_frozen: bool = True
    gathers: bool = False
    on_evaluation: Callable[[Evaluation], object] | None = None
    trial_loss: TrialLoss | None = None
    loop: int = 1  # its number among the loops of the script


def as_one(model: torch.nn.Module | Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Return one module; of a compiled model, the one that was compiled."""
    if isinstance(model, Mapping):
        return torch.nn.ModuleDict({name: as_one(module) for name, module in model.items()})
    original = getattr(model, "_orig_mod", model)
    if not isinstance(original, torch.nn.Module):
        raise UsageError(f"hvdtrain.Loop: a model is a {type(model).__name__}, not a torch module")
    return original


def optimizer_problems(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Sequence[Stateful],
) -> Iterator[str]:
    """Yield what is wrong with the optimizers of a script, and with their parameters.

    `state`: further objects to save.
    """
    if not optimizers:
        yield "there is no optimizer"
        return
    if foreign := [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]:
        yield f"an optimizer is a {type(foreign[0]).__name__}, not one of torch"
        return
    yield from _parameter_problems(model)
    if nameless := [stateful for stateful in state if not _is_stateful(stateful)]:
        yield (
            f"state has {nameless[0]!r:.60}, which has no state_dict() and load_state_dict(): give "
            "objects such as schedules"
        )
    named = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    owned: set[int] = set()
    for optimizer in optimizers:
        yield from _problems_of(optimizer, state, named, owned)
        owned |= set(map(id, parameters_of(optimizer)))
    if missing := [name for parameter, name in named.items() if parameter not in owned]:
        yield (
            f"no optimizer has the parameter {missing[0]} ({len(missing)} of {len(named)}). Give "
            "it to one, or freeze it by requires_grad_(False)"
        )


def _problems_of(
    optimizer: torch.optim.Optimizer,
    state: Sequence[Stateful],
    named: Mapping[int, str],
    owned: Set[int],
) -> Iterator[str]:
    """Yield what is wrong with an optimizer. `named`: the trainable parameters of the models, by
    id. `owned`: the ids of those that the optimizers before it have.
    """
    kind, parameters = type(optimizer).__name__, parameters_of(optimizer)
    if reason := UNSUITABLE.get(kind.lower()):
        yield f"{kind} {reason}"
    if others := sum(p.requires_grad and id(p) not in named for p in parameters):
        yield (f"{counted(others, 'parameter')} of {kind} are not of the models that it was given")
    if shared := [named[id(p)] for p in parameters if id(p) in owned and id(p) in named]:
        yield f"two optimizers have the parameter {shared[0]}"
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    kept = [stateful for stateful in state if getattr(stateful, "optimizer", None) is optimizer]
    if (scheduled and not kept) or any(one not in kept for one in _plateaus_of(optimizer)):
        yield (
            f"{kind} has a learning rate schedule that would begin anew after a resume: give "
            "state=[schedule]"
        )


def _parameter_problems(model: torch.nn.Module) -> Iterator[str]:
    """Yield what is wrong with parameters, on any number of workers."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            yield (
                f"the parameter {name} has no shape yet, as its layer is lazy: call the model once "
                "with a batch before, and make the optimizer after that"
            )
        elif any(
            size > 1 and not stride
            for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            yield (
                f"elements of the parameter {name} share memory, so that it cannot be written to: "
                "make it of tensor.clone()"
            )


def _is_stateful(one: object) -> bool:
    return all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict"))


def _plateaus_of(optimizer: torch.optim.Optimizer) -> list[ReduceLROnPlateau]:
    """Return the schedules of this type: unlike the others they leave no mark in the optimizer."""
    holders = gc.get_referrers(optimizer)
    for holder in [*holders]:
        if isinstance(holder, dict) and holder.get("optimizer") is optimizer:  # of attributes
            holders += gc.get_referrers(holder)
    return [
        holder
        for holder in holders
        if issubclass(type(holder), ReduceLROnPlateau) and holder.optimizer is optimizer
    ]


Direction = Callable[[Script], Generator[Step, None, int]]


@dataclass
class Loops:
    """The loops of the script that this process runs."""

    begun: int = 0
    is_open: bool = False
    direction: Direction | None = None  # of one of them, in a script that `run_script` runs
    directed: int = 1  # its number


loops = Loops()


class LoopEnded(BaseException):
    """The end of a loop that was directed; the script does not go on after it."""


def run_script(command: Sequence[str], direction: Direction, run: Path, loop: int = 1) -> int:
    """Run a script in this process, up to the end of a loop; return what the direction returns.

    `command`: its path and arguments, as recorded in `run`. `direction`: yields the steps for the
    body of the loop, in place of those of a training. `loop`: its number among those of the script;
    the ones before it make no steps. Raises UsageError if there is no such script, or no such loop.
    """
    global loops
    path, exit_codes = Path(command[0]), []

    def directed(script: Script) -> Generator[Step, None, int]:
        exit_codes.append((yield from direction(script)))
        return exit_codes[0]

    if not path.is_file():
        raise UsageError(
            f"{run}: is the run of {path}, which is not there: call this in the folder where the "
            "run was started"
        )
    before = sys.argv[:], [*sys.path], loops
    loops = Loops(direction=directed, directed=loop)
    sys.argv[:] = [str(argument) for argument in command]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except LoopEnded:
        if exit_codes:
            return exit_codes[0]
        raise UsageError(f"{run}: {path} left its loop before the end of its steps") from None
    finally:
        sys.argv[:], sys.path[:], loops = before
    raise UsageError(f"{run}: {path} ended without a hvdtrain.Loop")


@contextmanager
def next_loop() -> Iterator[int]:
    """Yield the number of the loop that begins, from 1. Raises UsageError within another loop."""
    if loops.is_open:
        raise UsageError(
            "hvdtrain.Loop: a loop begins within another: leave the `with` of the other first. "
            "Several models or optimizers can be trained in one loop"
        )
    loops.begun, loops.is_open = loops.begun + 1, True
    try:
        yield loops.begun
    finally:
        loops.is_open = False


def directed_steps(script: Script) -> Iterator[Step] | None:
    """Return the steps for a loop of the script that `run_script` runs; None for all others."""
    if loops.direction is None:
        return None
    return loops.direction(script) if script.loop == loops.directed else iter(())


def is_directed(script: Script) -> bool:
    """Return whether this is the loop for which `run_script` runs the script."""
    return loops.direction is not None and script.loop == loops.directed


@contextmanager
def in_words_of_script() -> Iterator[None]:
    """Let errors raised within the context name keywords of hvdtrain.Loop instead of flags."""
    try:
        yield
    except HvdtrainError as error:
        error.args = tuple(
            as_options(argument) if isinstance(argument, str) else argument
            for argument in error.args
        )
        if isinstance(error, UsageError):
            error.problems = tuple(map(as_options, error.problems))
        raise


def as_options(text: str) -> str:
    """Return a message with experiment='a' for --experiment=a, and sync_bn=True for --sync-bn.

    Flags of other commands, such as those of `doctor`, stay.
    """
    return FLAG.sub(_as_option, text)


def _as_option(match: re.Match[str]) -> str:
    name, value, word = match[1].replace("-", "_"), match[2], match[3]
    rest = "" if word is None else f" {word}"
    if name in OWN:
        return OWN[name] + rest
    if name not in OPTIONS:
        return match[0]
    option = train_options()[name]
    if option.type is bool:
        return f"{name}=True{rest}"
    if value is None and word is not None and _is_value(word, option):
        value, rest = word, ""
    if value is None:
        return name + rest
    return f"{name}={value if option.type in (int, float) else repr(value)}{rest}"


def _is_value(word: str, option: Option) -> bool:
    """Return whether the word after a flag is its value, and not the next word of the sentence."""
    return word in (*option.choices, "auto") or word.replace(".", "").isdigit()
