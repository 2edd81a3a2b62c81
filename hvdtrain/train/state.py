"""Capture and restoration of the complete state of a training loop between two steps."""

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import (
    KEEP_ORDER,
    check_equal_on_all_ranks,
    first_difference,
    lay_out_state,
)
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.tensors import copied_to_cpu, params_sha256
from hvdtrain.train.batchnorm import RUNNING
from hvdtrain.train.built import refuse_another_base, saved_base
from hvdtrain.train.checkpoint import Snapshot
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Job, Stateful
from hvdtrain.train.portable import portable
from hvdtrain.train.progress import EarlyEnd, State
from hvdtrain.train.update import not_finite
from hvdtrain.train.worker_state import WorkerState

AVERAGED = "module."  # before each name in the state of a moving average


def capture(
    job: Job, at: State, exchange: Exchange, progress: dict[str, Any], is_partner: bool = False
) -> Snapshot | None:
    """Collective: return a copy of the content of a checkpoint on rank 0; None elsewhere.

    `progress`: further plain values of rank 0 to save. `is_partner`: return one on this rank too.
    Raises TrainingError if parameters differ between ranks, naming the ranks, or if the state is
    not finite, naming the first such tensor: such a state is never saved.
    """
    at.meter.collect()
    check_equal_on_all_ranks(job.model, exchange, f"before the checkpoint of step {at.step}")
    job.base.check(job.model, at.step)
    of_rank = job.workers.states(), at.early_end.requested
    of_ranks = exchange.all_gather_object(of_rank, "hvdtrain.rank_states")
    gathered, requests = zip(*of_ranks, strict=True)
    models = _copied_models(job, exchange.rank == 0 or is_partner)
    snapshot, problem = None, None
    if models:
        requested = next(filter(None, requests), None)
        early_end = asdict(at.early_end) | {"requested": requested}
        state = _content(job, at, models, list(itertools.chain(*gathered)), progress)
        state["early_end"] = early_end
        weights = {n: t for n, t in models.evaluated.items() if isinstance(t, torch.Tensor)}
        snapshot = Snapshot(at.step, models.sha256, weights, state)
        problem = find_not_finite(state)
    if problem := exchange.broadcast_object(problem, "hvdtrain.not_finite_state"):
        raise TrainingError(
            f"after step {at.step} {problem}: it is not saved. Lower --lr, or add "
            "--warmup-epochs or --clip-grad"
        )
    return snapshot


class _Models(NamedTuple):
    """Copies of what a checkpoint holds of the model, which share memory where values are equal."""

    evaluated: dict[str, Any]
    sha256: str
    trained: dict[str, Any]
    update: dict[str, Any]


def _content(
    job: Job, at: State, models: _Models, ranks: list[WorkerState], progress: dict[str, Any]
) -> dict[str, Any]:
    """Return the state to resume from; `ranks`: the states of all workers."""
    return {
        "step": at.step,
        "samples_seen": at.samples_seen,
        "parameters": [name for name, _ in job.model.named_parameters()],
        "optimizer_order": _names_in_order(job.model, job.optimizers[0]),
        "frozen": [name for name, p in job.model.named_parameters() if not p.requires_grad],
        "base": asdict(job.base) if job.base.names else None,
        "model": models.trained,
        "built": dict(job.built),
        "optimizer": _kept(job.optimizers[0].state_dict()),
        "further_optimizers": [
            {"order": _names_in_order(job.model, opt), "state": _kept(opt.state_dict())}
            for opt in job.optimizers[1:]
        ],
        "further_state": [_kept(stateful.state_dict()) for stateful in job.further_state],
        "update": models.update,
        "meter": at.meter.state_dict(),
        "evaluation": asdict(at.evaluation) if at.evaluation else None,
        "evaluated_at": at.evaluated_at,
        "ranks": ranks,
        "data": list(job.fingerprints),
        "order": job.sampler.drawn,
        "progress": progress,
    }


def _copied_models(job: Job, is_saved_here: bool) -> _Models | None:
    """Collective: return copies of the model that is evaluated, of the one that is trained, and of
    the update's state. Their parameters are copied once. None on ranks that do not save.
    """
    average = job.update.average
    evaluated, sha256 = None, ""
    with job.evaluated_model() as model:
        if is_saved_here:
            evaluated, sha256 = _kept(job.base.left_out(model.state_dict())), params_sha256(model)
    trained = evaluated
    if average is not None:
        with job.workers.statistics(job.model):
            trained = _kept(job.base.left_out(job.model.state_dict())) if is_saved_here else None
    if evaluated is None or trained is None:
        return None
    update, shared = job.update.state_dict(), {}
    if average is not None:
        names = [name for name, _ in average.module.named_parameters(remove_duplicate=False)]
        shared = {AVERAGED + name: evaluated[name] for name in names if name in evaluated}
        update["average"] = job.base.left_out(update["average"], AVERAGED)
        update["average"].update(dict.fromkeys(shared))
    update = _kept(update)
    if shared:
        update["average"].update(shared)
    return _Models(evaluated, sha256, trained, update)


def _kept(state: Any) -> Any:
    """Return a copy of what users may hand over, in the form in which it is kept."""
    return portable(copied_to_cpu(state))


def keep_saved_weights(job: Job) -> None:
    """Collective: give the model what a checkpoint's weights have: the moving average, if any, and
    the statistics of all workers.
    """
    with job.evaluated_model() as model:
        weights = copied_to_cpu(model.state_dict())
    job.model.load_state_dict(weights)


def find_not_finite(state: Mapping[str, Any]) -> str | None:
    """Return a description of the first tensor of a captured state that must be finite but is not.

    Trainable parameters, optimizer state, the moving average and running statistics must be; frozen
    parameters and other buffers may hold infinities (for example, a mask).
    """
    buffers = state["ranks"][0]["buffers"]
    # Checkpoints of earlier versions do not name them; their optimizers had the model's order.
    names = state.get("parameters") or [name for name in state["model"] if name not in buffers]
    optimizers = _optimizers_of(state)
    optimizers[0]["order"] = optimizers[0]["order"] or names
    trainable = sorted(set(names) - set(state.get("frozen", ())))
    tensors = {f"the parameter {name}": state["model"][name] for name in trainable}
    for optimizer in optimizers:
        order = optimizer["order"]
        for number, held in optimizer["state"]["state"].items():
            param = order[number] if number < len(order) else f"parameter {number}"
            tensors |= {f"the optimizer's {key} of {param}": value for key, value in held.items()}
    if average := state["update"]["average"]:
        tensors |= {f"the moving average of {name}": average[AVERAGED + name] for name in trainable}
    for number, own_state in enumerate(state["ranks"]):
        kind = "rank" if own_state["rng"] else "virtual worker"
        for name, value in own_state["buffers"].items():
            if name.endswith(RUNNING):  # other buffers may be infinite
                tensors[f"{name} of {kind} {number}"] = value
    faulty = not_finite({name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    more = f" (and {len(faulty) - 1} more)" if faulty[1:] else ""
    return f"{faulty[0]} is not finite{more}" if faulty else None


def _optimizers_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return order of parameters (None if an earlier version saved it) and state of each."""
    first = {"order": state.get("optimizer_order"), "state": state["optimizer"]}
    return [first, *state.get("further_optimizers", [])]


def _names_in_order(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, as its state numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters_of(optimizer)]


def load_optimizers(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    further_state: Sequence[Stateful],
) -> None:
    """Load the part of a captured state that belongs to optimizers and to a script's objects.

    Raises UsageError, naming the first difference, if an optimizer has other parameters than in the
    run, or in another order: its state is numbered, so it would go to other parameters.
    """
    for optimizer, saved in zip(optimizers, _optimizers_of(state), strict=True):
        _add_groups(optimizer, model, saved)
        names = _names_in_order(model, optimizer)
        if difference := first_difference(names, saved["order"] or names):
            raise UsageError(
                f"--resume: parameter {difference.number} of the optimizer is {difference.here}, "
                f"and was {difference.there} when the checkpoint was saved. In every process, "
                f"{KEEP_ORDER}"
            )
        optimizer.load_state_dict(saved["state"])
        lay_out_state(optimizer)
    for stateful, saved_state in zip(further_state, state.get("further_state", []), strict=True):
        stateful.load_state_dict(saved_state)


def _add_groups(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: Mapping[str, Any]
) -> None:
    """Add the groups of parameters that the run has added since it began (`add_param_group`)."""
    order, groups = saved["order"], saved["state"]["param_groups"]
    names = _names_in_order(model, optimizer)
    if not order or order[: len(names)] != names:
        return  # other parameters: an error
    for group in groups[len(optimizer.param_groups) :]:
        added = [model.get_parameter(order[number]) for number in group["params"]]
        optimizer.add_param_group(dict(group) | {"params": added})


def completed(
    weights: dict[str, Any], state: Mapping[str, Any], model: torch.nn.Module
) -> dict[str, Any]:
    """Return a checkpoint's weights with what the file of weights does not hold: what modules
    return by `get_extra_state`, from the captured state; and the base, which `model` has. Raises
    UsageError if it has another.
    """
    refuse_another_base(state, model)
    extra = {n: t for n, t in state["model"].items() if not isinstance(t, torch.Tensor)}
    return saved_base(state).filled(weights | extra, model)


def load_model(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights of this version of the model, whose layers' versions files do not hold."""
    state = OrderedDict(weights)
    state._metadata = getattr(model.state_dict(), "_metadata", {})  # type: ignore[attr-defined]
    model.load_state_dict(state)


def evaluation_in(state: Mapping[str, Any]) -> Evaluation | None:
    """Return the newest evaluation of a captured state; None if there was none."""
    saved = state.get("evaluation")
    return Evaluation(**saved) if saved else None


def restore(state: dict[str, Any], job: Job, at: State) -> str | None:
    """Restore a captured state into a job whose optimizer is already distributed. Raises
    UsageError if an optimizer is built otherwise (`load_optimizers`).

    With the same number of workers the run continues bit for bit. With another number, running
    statistics are averaged over the old ones, only workers that existed before restore random
    generators, and this loss is returned as text.
    """
    job.sampler.check_drawn(state.get("order"))
    update, base = state["update"], saved_base(state)
    if update["average"] is not None:
        update = update | {"average": base.filled(update["average"], job.model, AVERAGED)}
    load_model(job.model, base.filled(state["model"], job.model))
    if "frozen" in state:  # by the script, perhaps since the run began
        frozen = set(state["frozen"])
        for name, parameter in job.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    load_optimizers(state, job.model, job.optimizers, job.further_state)
    job.update.load_state_dict(update)
    at.meter.load_state_dict(state["meter"])
    at.step, at.samples_seen = state["step"], state["samples_seen"]
    at.evaluation = evaluation_in(state) or at.evaluation
    at.evaluated_at = state.get("evaluated_at", 0)
    at.early_end = EarlyEnd(**state.get("early_end", {}))
    average = job.update.average
    models = [job.model] if average is None else [job.model, average.module]
    return job.workers.restore(state["ranks"], models)
