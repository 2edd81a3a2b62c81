"""A model's parameters and buffers as one hash: two models are equal if and only if these are."""

from __future__ import annotations

import hashlib

import torch

from hvdtrain.errors import TrainingError, name_ranks
from hvdtrain.exchange import Exchange


def params_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over name-sorted parameters and buffers: name, dtype, shape, little-endian bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{values.dtype}|{tuple(values.shape)}|".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def check_equal_on_all_ranks(model: torch.nn.Module, exchange: Exchange, when: str) -> None:
    """Collective: raise TrainingError, naming the ranks, unless all hold rank 0's parameters.

    `when` says at which point of the run it was.
    """
    hashes = exchange.all_gather_object(params_sha256(model), "hvdtrain.params_sha256")
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise TrainingError(
            f"parameters differ between ranks {when}: what {name_ranks(different)} held "
            "was not what rank 0 held"
        )
