"""Agreement of ranks: an action that succeeds on all of them or on none, and values that are the
same on all.
"""

import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from hvdtrain.errors import (
    EXIT_FAILED,
    AgreedFailure,
    HvdtrainError,
    TrainingError,
    UsageError,
    name_ranks,
)
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.gradients import is_dense, laid_out_as, parameters_of, trainable_of
from hvdtrain.tensors import copied_to_cpu, params_sha256

Result = TypeVar("Result")
Layout = Mapping[str, Sequence[str]]  # descriptions of tensors, by what they are
KEEP_ORDER = (
    "build and freeze the same modules in the same order, also for the optimizer: iterate over a "
    "list or sorted(...), not over a set, whose order differs between processes"
)


def run_on_all(exchange: Exchange, what: str, action: Callable[[], Result]) -> Result:
    """Collective: run `action` on every rank; return its result if it succeeded on all of them.

    Otherwise every rank raises the same AgreedFailure, which names each failing rank, so no rank is
    left waiting in a later collective. `what` names the collective ("prepare").
    """
    failure: tuple[int, str] | None = None
    try:
        result = action()
    except HvdtrainError as error:
        failure = (error.exit_code, str(error))
    except (Exception, SystemExit) as error:  # unexpected, perhaps in a user's model
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"
        failure = (EXIT_FAILED, text)
    gathered = exchange.all_gather_object(failure, f"hvdtrain.agree.{what}")
    failures = {rank: failure for rank, failure in enumerate(gathered) if failure is not None}
    if failures:
        raise AgreedFailure(failures, exchange.size)
    return result


def _check_on_all(
    exchange: Exchange, what: str, name: str, value: Any, check: Callable[[Any], None]
) -> None:
    """Collective: run `check` of rank 0's `value` on every rank; see `run_on_all`.

    `name`: of the collective that broadcasts the value.
    """
    expected = exchange.broadcast_object(value, name)
    run_on_all(exchange, what, lambda: check(expected))


def check_same_settings(exchange: Exchange, what: str, settings: Mapping[str, object]) -> None:
    """Collective: raise AgreedFailure, naming the ranks, unless all have rank 0's settings.

    With other ones, ranks would exchange tensors that others do not know, and wait for ever.
    """

    def check(expected: Mapping[str, object]) -> None:
        for name, value in settings.items():
            if value != expected[name]:
                raise UsageError(f"{what}: {name}={value!r}, on rank 0 {expected[name]!r}")

    name = f"{what}.settings"
    _check_on_all(exchange, name, f"hvdtrain.{name}", settings, check)


def agree_on_layout(
    exchange: Exchange, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Collective: raise AgreedFailure, naming the ranks, unless all have rank 0's layout."""
    layout = _layout_of(model, optimizer)
    _check_on_all(
        exchange,
        "layout",
        "hvdtrain.layout",
        layout,
        lambda expected: _check_layout(layout, expected),
    )


def adopt_optimizer_state(
    exchange: Exchange, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Collective: replace the optimizer's state by that of rank 0, whose layout all must have.

    Raises AgreedFailure, naming the ranks, if one has built another model or optimizer, or the same
    ones in another order: parameters are reduced, and state is loaded, by place.
    """
    layout = _layout_of(model, optimizer)

    def adopt(root: tuple[Layout, dict[str, Any]]) -> None:
        _check_layout(layout, root[0])
        _load_exactly(optimizer, root[1])

    # On the CPU: a broadcast tensor keeps its device, which belongs to another rank.
    root_state = (layout, copied_to_cpu(optimizer.state_dict())) if exchange.rank == 0 else None
    _check_on_all(exchange, "distribute", "hvdtrain.optimizer", root_state, adopt)


def check_equal_on_all_ranks(
    model: torch.nn.Module, exchange: Exchange, when: str, with_buffers: bool = False
) -> None:
    """Collective: raise TrainingError, naming the ranks, unless all hold rank 0's parameters.

    `when`: point of the run, for the message. Buffers are compared only on request, because
    batch-norm statistics may differ between ranks.
    """
    hashes = exchange.all_gather_object(
        params_sha256(model, with_buffers), "hvdtrain.params_sha256"
    )
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise TrainingError(
            f"parameters differ between ranks {when}: {name_ranks(different)} held other values "
            "than rank 0"
        )


def _layout_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Layout:
    """Return what all ranks must have in common: trainable parameters in the order of their
    buckets, the optimizer's parameters in that of its state, and the state of the model by name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = sorted(model.state_dict().items())
    return {
        "trainable parameter": [
            _described(*named) for named in trainable_of(model, optimizer).items()
        ],
        "optimizer's parameter": [
            _described(names.get(id(parameter), "one not in the model"), parameter)
            + ("" if parameter.requires_grad else ", frozen")
            for parameter in parameters_of(optimizer)
        ],
        "tensor of the state, by name,": [
            _described(name, value) for name, value in state if is_dense(value)
        ],
        "further state": [name for name, value in state if not is_dense(value)],
    }


def _described(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {list(tensor.shape)} {tensor.dtype}"


def _check_layout(layout: Layout, expected: Layout) -> None:
    """Raise UsageError unless this rank's layout is that of rank 0: names the first difference."""
    for kind, tensors in layout.items():
        if difference := first_difference(tensors, expected[kind]):
            raise UsageError(
                "the model or the optimizer is not built as on rank 0, so gradients and optimizer "
                f"state would go to other parameters. {kind.capitalize()} {difference.number}: "
                f"{difference.here} (rank 0: {difference.there}). On every rank, {KEEP_ORDER}"
            )


class FirstDifference(NamedTuple):
    """The first difference of two lists."""

    number: int  # from 1
    here: str
    there: str


def first_difference(here: Sequence[str], there: Sequence[str]) -> FirstDifference | None:
    """Return the first place at which the lists differ; "none" stands for what one lacks."""
    pairs = enumerate(itertools.zip_longest(here, there, fillvalue="none"), 1)
    return next(
        (FirstDifference(number, *pair) for number, pair in pairs if pair[0] != pair[1]), None
    )


def _load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load another rank's `state_dict`; keep dtypes, which `load_state_dict` casts (ASGD's)."""
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters_of(optimizer), numbers, strict=True):
        local_state = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and local_state[name].dtype != value.dtype:
                local_state[name] = value.to(local_state[name].device)
    lay_out_state(optimizer)


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Lay out a loaded state in memory as its parameters; see `laid_out_as`."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = laid_out_as(value, parameter)
