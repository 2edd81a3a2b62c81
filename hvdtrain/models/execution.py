"""Ways to compute a network: the memory format of its images, and compilation."""

import copy
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import TrainingError, UsageError

# Of one network: shares have a few sizes, in training and in evaluations. torch's limit of 8 is
# soon reached.
MOST_COMPILATIONS = 64


def use_channels_last(model: nn.Module) -> None:
    """Lay out kernels, and every batch of images that the model receives, with channels last."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    model.register_forward_pre_hook(_with_channels_last, with_kwargs=True)


def _with_channels_last(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_laid_out, inputs)), {name: _laid_out(value) for name, value in named.items()}


def _laid_out(value: Any) -> Any:
    is_images = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_images else value


def require_compiler(device: torch.device) -> None:
    """Raise UsageError unless torch.compile finds the C++ compiler that it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about parts of torch itself
        from torch._inductor import cpp_builder, exc
    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--compile: torch.compile needs a C++ compiler on every host: {reason}. Install g++, "
            "name another compiler in CXX, or leave --compile out"
        ) from error


def compile_forward(model: nn.Module) -> None:
    """Compile the calls of a model by torch.compile, in place: names and state stay as they are.

    Each shape of a batch is compiled by itself, so that the code for it, and the bits of its
    results, do not depend on the shapes that this process has met before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing them warns about parts of torch itself
        from torch import _dynamo
        from torch._inductor import compile_fx  # noqa: F401
    call_once: Callable[..., Any] = model._call_impl

    def call(*inputs: Any, **named: Any) -> Any:
        return call_once(*inputs, **named)

    _dynamo.config.recompile_limit = MOST_COMPILATIONS
    _dynamo.config.fail_on_recompile_limit_hit = True  # otherwise the rest is not compiled
    compiled = torch.compile(call, dynamic=False)

    def call_compiled(*inputs: Any, **named: Any) -> Any:
        try:
            return compiled(*inputs, **named)
        except _dynamo.exc.FailOnRecompileLimitHit as error:
            raise TrainingError(
                f"--compile: the network has met batches of more than {MOST_COMPILATIONS} kinds, "
                "and is compiled for each by itself. Give batches fewer shapes, by padding, or "
                "leave --compile out"
            ) from error

    # As Module.compile, which has no effect on an nn.Sequential: it skips frames of torch itself.
    model._compiled_call_impl = call_compiled


def is_compiled(model: nn.Module) -> bool:
    """Return whether calls of the model are compiled."""
    return model._compiled_call_impl is not None


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy that computes as the model does; copy.deepcopy drops the compilation."""
    twin = copy.deepcopy(model)
    if is_compiled(model):
        compile_forward(twin)
    return twin
