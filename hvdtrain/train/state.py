"""Capture and restoration of the complete state of a training loop between two steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.errors import TrainingError, name_ranks
from hvdtrain.exchange import Exchange, check_equal_on_all_ranks, copied_to_cpu, params_sha256
from hvdtrain.log import counted
from hvdtrain.train.batchnorm import SyncBatchNorm, has_batch_norm
from hvdtrain.train.checkpoint import Snapshot
from hvdtrain.train.loop import Job, State
from hvdtrain.train.update import not_finite

# Statistics of normalisation layers; other buffers may be infinite.
RUNNING = ("running_mean", "running_var")


def capture(job: Job, at: State, exchange: Exchange, progress: dict[str, Any]) -> Snapshot | None:
    """Collective: return a copy of the content of a checkpoint on rank 0; None elsewhere.

    `progress`: further plain values of rank 0 to save. Raises TrainingError if parameters differ
    between ranks, naming the ranks, or if the state is not finite, naming the first such tensor:
    such a state is never saved.
    """
    at.meter.collect()
    check_equal_on_all_ranks(job.model, exchange, f"before the checkpoint of step {at.step}")
    own = {"buffers": copied_to_cpu(dict(job.model.named_buffers())), "rng": _rng_state(job.device)}
    of_ranks = exchange.all_gather_object(own, "hvdtrain.rank_states")
    with job.evaluated_model(exchange) as model:
        weights, digest = copied_to_cpu(model.state_dict()), params_sha256(model)
    with job.with_all_statistics(job.model, exchange):
        model_state = copied_to_cpu(job.model.state_dict())
    snapshot, problem = None, None
    if exchange.rank == 0:
        state = {
            "step": at.step,
            "samples_seen": at.samples_seen,
            "parameters": [name for name, _ in job.model.named_parameters()],
            "frozen": [name for name, it in job.model.named_parameters() if not it.requires_grad],
            "model": model_state,
            "optimizer": copied_to_cpu(job.optimizer.state_dict()),
            "update": copied_to_cpu(job.update.state_dict()),
            "meter": at.meter.state_dict(),
            "ranks": of_ranks,
            "data": list(job.fingerprints),
            "progress": progress,
        }
        snapshot = Snapshot(at.step, digest, weights, state)
        problem = find_not_finite(state)
    problem = exchange.broadcast_object(problem, "hvdtrain.not_finite_state")
    if problem:
        raise TrainingError(
            f"after step {at.step} {problem}: it is not saved. Lower --lr, or add "
            "--warmup-epochs or --clip-grad"
        )
    return snapshot


def find_not_finite(state: Mapping[str, Any]) -> str | None:
    """Return a description of the first tensor of a captured state that must be finite but is not.

    Trainable parameters, optimizer state, the moving average and running statistics must be; frozen
    parameters and other buffers may hold infinities (for example, a mask).
    """
    buffers = state["ranks"][0]["buffers"]
    # In the order of the optimizer; checkpoints of earlier versions do not name them.
    names = state.get("parameters") or [name for name in state["model"] if name not in buffers]
    trainable = sorted(set(names) - set(state.get("frozen", ())))
    tensors = {f"the parameter {name}": state["model"][name] for name in trainable}
    for number, held in state["optimizer"]["state"].items():
        own = names[number] if number < len(names) else f"parameter {number}"
        tensors |= {f"the optimizer's {key} of {own}": value for key, value in held.items()}
    if average := state["update"]["average"]:
        tensors |= {
            f"the moving average of {name}": average[f"module.{name}"] for name in trainable
        }
    for rank, of_rank in enumerate(state["ranks"]):
        for name, value in of_rank["buffers"].items():
            if name.endswith(RUNNING):
                tensors[f"{name} of rank {rank}"] = value
    found = not_finite({name: it for name, it in tensors.items() if isinstance(it, torch.Tensor)})
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    return f"{found[0]} is not finite{more}" if found else None


def restore(state: dict[str, Any], job: Job, at: State, exchange: Exchange) -> str | None:
    """Restore a captured state into a job whose optimizer is already distributed.

    With the same number of ranks, each restores its own buffers and random generators, and the run
    continues bit for bit. With another number, running statistics are averaged over the old ranks,
    only ranks that existed before restore random generators, and this loss is returned as text.
    """
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.update.load_state_dict(state["update"])
    at.meter.load_state_dict(state["meter"])
    at.step, at.samples_seen = state["step"], state["samples_seen"]
    ranks = state["ranks"]
    if exchange.rank < len(ranks):
        _set_rng_state(ranks[exchange.rank]["rng"], job.device)
    if len(ranks) != exchange.size:
        synchronised = any(isinstance(module, SyncBatchNorm) for module in job.model.modules())
        own_statistics = has_batch_norm(job.model) and not synchronised
        return _describe_loss(len(ranks), exchange.size, own_statistics)
    own = ranks[exchange.rank]
    for name, buffer in job.model.named_buffers():
        buffer.copy_(own["buffers"][name])
        if job.update.average is not None:
            job.update.average.module.get_buffer(name).copy_(own["buffers"][name])
    return None


def _describe_loss(before: int, now: int, own_statistics: bool) -> str:
    text = f"{counted(now, 'worker')} instead of {before}: "
    if now > before:
        text += f"the random numbers of {name_ranks([*range(before, now)])} start at the seed"
    else:
        text += f"the random numbers of {name_ranks([*range(now, before)])} are dropped"
    return text + "; running statistics are the average of the old ranks'" * own_statistics


def _rng_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def _set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
