"""Export of plain weights, independent of how they were trained."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hvdtrain.errors import EXIT_OK, HvdtrainError, UsageError
from hvdtrain.log import say
from hvdtrain.weights import Weights, clean_names, describe_removed, find_weights, read_weights

SUFFIX = ".safetensors"


def export(source: Path, out: Path, force: bool, keep_names: bool) -> int:
    """Write the weights of `source` to `out` and return the exit code. Raises UsageError."""
    _refuse_unfit(out, force)
    weights = read_weights(source)
    removed: dict[str, int] = {}
    if not keep_names:
        try:
            weights, removed = clean_names(weights)
        except UsageError as error:
            raise UsageError(f"{source}: {error}; --keep-names leaves them as they are") from error
    digest = _write(_apart(weights), out, force)
    say("\n".join([f"{find_weights(source)} -> {out}", *_describe(weights, removed, digest)]))
    return EXIT_OK


def _refuse_unfit(out: Path, force: bool) -> None:
    problems = []
    if out.suffix != SUFFIX:
        problems.append(f"{out}: the name must end in {SUFFIX}")
    if not out.parent.is_dir():
        problems.append(f"{out}: there is no folder {out.parent}")
    if out.is_dir():
        problems.append(f"{out}: is a folder")
    elif out.exists() and not force:
        problems.append(f"{out}: already exists; --force replaces it")
    if problems:
        raise UsageError(*problems)


def _apart(weights: Weights) -> Weights:
    """Copy each tensor to memory of its own: the format has no views, and no shared tensors."""
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
    }


def _write(weights: Weights, out: Path, force: bool) -> str:
    """Write the file atomically, by renaming a temporary one, and return its SHA-256."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        save_file(weights, partial, metadata={"format": "pt"})
        content = hashlib.sha256()
        with partial.open("rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
            os.fsync(stream.fileno())
        partial.chmod(0o666 & ~_umask())  # safetensors creates files readable only by their owner
        _refuse_unfit(out, force)  # writing may have taken a while
        partial.replace(out)
    except (OSError, SafetensorError, ValueError) as error:
        raise HvdtrainError(f"{out} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return content.hexdigest()


def _umask() -> int:
    """Return the umask of the process, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _describe(weights: Weights, removed: dict[str, int], digest: str) -> list[str]:
    values = sum(tensor.numel() for tensor in weights.values())
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    return [
        f"  {len(weights)} tensors, {values:,} values in parameters and buffers, "
        f"{' and '.join(types)}",
        *(f"  {line}" for line in describe_removed(removed)),
        f"  sha256 {digest}",
    ]
