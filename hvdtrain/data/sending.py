"""What reader processes receive: whether it can be sent, and whether it has changed since."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch

from hvdtrain.errors import UsageError


def digest_of(*parts: Any) -> str:
    """Return a digest of what reader processes would receive of these objects.

    Raises UsageError for what cannot be sent to processes that are not forked.
    """
    digest = hashlib.blake2b()
    for part in parts:
        try:
            _Digester(digest).dump(part)
        except Exception as error:  # classes define how they are pickled
            raise UsageError(
                f"hvdtrain.MapSplit: reader processes cannot receive the data set or its functions "
                f"({type(error).__name__}: {error}). Define them at the top of a module, or read "
                "without processes (readers=0, num_workers=0)"
            ) from error
    return digest.hexdigest()


class _Digester(pickle.Pickler):
    """A pickler whose output only goes into a digest; large arrays are not copied."""

    def __init__(self, digest: Any) -> None:
        def add(buffer: pickle.PickleBuffer) -> None:
            digest.update(buffer.raw())

        super().__init__(_Into(digest), protocol=5, buffer_callback=add)
        self._digest = digest

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        values = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._digest.update(values.reshape(-1).view(torch.uint8).numpy())
        return str, (f"{obj.dtype} {list(obj.shape)}",)


class _Into(io.RawIOBase):
    """A file that adds what is written to a digest."""

    def __init__(self, digest: Any) -> None:
        super().__init__()
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(data)
