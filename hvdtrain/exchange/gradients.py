"""Parameters and their gradients: which there are, in which type they are added, their memory.

A sum of bfloat16 values would be rounded at each addition, to 8 bits, and Horovod has none. So they
are added as float32, and the sum is rounded once. Complex numbers are added as pairs of reals.
"""

import cmath
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.errors import UsageError

# The types in which gradients are added, where these are not their own.
ADDED_AS = {
    torch.bfloat16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_made_dense = WeakTensorKeyDictionary()  # parameters with the hook of `make_gradients_dense`


def parameters_of(*optimizers: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of optimizers, each in the order in which its state numbers them."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def trainable_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters of an optimizer by name, in the order of the model."""
    owned = set(map(id, parameters_of(optimizer)))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in owned
    }


def make_gradients_dense(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Convert sparse gradients of `model` to dense ones as soon as a backward pass makes them, and
    conjugate them in memory where torch has put that off.

    A rank whose share is empty has no gradient and could not determine that the others send sparse
    ones; rows that are looked up twice have no fixed order of summation; norms and most optimizers
    do not support sparse gradients. Dense ones are summed, checked and used like all others, for
    any N. Raises UsageError for an optimizer that takes sparse gradients only.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam: takes sparse gradients only, but hvdtrain makes all gradients dense (on "
            "one worker too, so that N changes nothing). Use torch.optim.Adam or Adagrad"
        )
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in _made_dense:
            parameter.register_post_accumulate_grad_hook(_make_dense)
            _made_dense[parameter] = True


def _make_dense(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and (gradient.is_sparse or gradient.is_conj()):
        parameter.grad = gradient.to_dense().resolve_conj()


def laid_out_as(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the values with the strides of `parameter`, whose shape they have.

    Fused optimizers of torch (2.13) go through memory without a look at strides: where those of a
    parameter, its gradient and its state differ, they combine wrong elements, silently.
    """
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, dtype=values.dtype).copy_(values)


def is_dense(value: Any) -> bool:
    """Return whether this is a tensor whose elements are in memory one by one."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def added_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are added."""
    return ADDED_AS.get(dtype, dtype)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of real and imaginary parts; of a real type itself."""
    return added_dtype(dtype) if dtype.is_complex else dtype


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs of reals, (..., 2); of real ones itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_complex(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values of the form of `as_real` in a type: rounded, or as complex numbers."""
    return torch.view_as_complex(values) if dtype.is_complex else values.to(dtype)


def exactly(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a type that NumPy has."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def real_length(parameter: torch.Tensor) -> int:
    """Return the number of real numbers of a tensor."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def parts_of(
    flat: torch.Tensor, starts: Sequence[int], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the view of a flat tensor for each parameter, which begins at its start, in the shape
    of `as_real` of the parameter.
    """
    return [
        flat[start : start + real_length(parameter)].view(as_real(parameter.detach()).shape)
        for start, parameter in zip(starts, parameters, strict=True)
    ]


def has_finite_sum(values: torch.Tensor) -> bool:
    """Return whether the sum of all elements is finite: with an infinite one or NaN it is not."""
    return cmath.isfinite(values.sum().item())


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, which may be sparse, as a dense one without a graph."""
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
