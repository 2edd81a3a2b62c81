"""Options of `hvdtrain train` that `hvdtrain.Loop` takes as keywords: those that do not concern
what the script itself decides.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

from hvdtrain.config.options import train_options

Text = str | os.PathLike[str]
Function = TypeVar("Function", bound=Callable[..., Any])


class LoopOptions(TypedDict, total=False):
    """Names and types for editors and type checkers. A test compares them with the fields."""

    device: Literal["auto", "cpu", "cuda"]
    global_batch_size: int | None
    batch_size: int | None
    grad_accum_steps: int
    micro_batch: Literal["auto"] | None
    virtual_workers: int | None
    eval_batch_size: int | None
    rank_weights: str | None
    clip_grad: float | None
    model_ema: bool
    model_ema_decay: float
    epochs: int | None
    max_steps: int | None
    patience: int | None
    min_delta: float
    amp: Literal["none", "bf16", "fp16"]
    compression: Literal["none", "fp16"]
    bucket_bytes: int | str
    sync_bn: bool
    deterministic: bool
    audit_every: int
    audit: Literal["bound", "exact"]
    audit_parts: int
    trace_every: int
    hash_every: int
    output: Text
    experiment: Text | None
    seed: int
    log_interval: int
    eval_interval: int
    eval_every: int
    checkpoint_interval: int
    memory_interval: int
    keep_checkpoints: int
    profile: str | None
    log_to: str | None
    single_worker: bool
    resume: Text | None


OPTIONS = tuple(LoopOptions.__annotations__)


def lists_options(function: Function) -> Function:
    """Return the function, whose signature lists the options, each with the default of `train`."""
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
    for name in OPTIONS:
        option = train_options()[name]
        kind = option.type | None if option.optional else option.type
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind
            )
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
