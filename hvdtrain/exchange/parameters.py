"""Hash of a model's parameters and buffers, and the check that ranks hold equal parameters."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hvdtrain.errors import TrainingError, name_ranks
from hvdtrain.exchange import Exchange


def params_sha256(model: torch.nn.Module) -> str:
    """Return the SHA-256 over parameters and buffers sorted by name.

    For each, the input is name, dtype, shape and little-endian bytes.
    """
    return _sha256(dict(model.named_parameters()) | dict(model.named_buffers()))


def _sha256(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_equal_on_all_ranks(
    model: torch.nn.Module, exchange: Exchange, when: str, with_buffers: bool = False
) -> None:
    """Collective: raise TrainingError, naming the ranks, unless all hold rank 0's parameters.

    `when`: point of the run, for the message. Buffers are compared only on request, because
    batch-norm statistics may differ between ranks.
    """
    own = params_sha256(model) if with_buffers else _sha256(dict(model.named_parameters()))
    hashes = exchange.all_gather_object(own, "hvdtrain.params_sha256")
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise TrainingError(
            f"parameters differ between ranks {when}: {name_ranks(different)} held other values "
            "than rank 0"
        )


def copied_to_cpu(value: Any) -> Any:
    """Return the same structure with tensors copied to memory of their own on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: copied_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied_to_cpu(item) for item in value)
    return value
