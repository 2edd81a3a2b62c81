"""The types in which gradients are added, where these are not their own.

A sum of bfloat16 values would be rounded at each addition, to 8 bits, and Horovod has none. So they
are added as float32, and the sum is rounded once. Complex numbers are added as pairs of reals.
"""

from __future__ import annotations

import torch

ADDED_AS = {
    torch.bfloat16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


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
