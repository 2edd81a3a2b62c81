"""Export of plain weights, independent of how they were trained."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hvdtrain.errors import EXIT_OK, HvdtrainError, UsageError, every_problem, refuse
from hvdtrain.files import obey_umask, sha256_of
from hvdtrain.log import say
from hvdtrain.weights import find_weights, read_weights
from hvdtrain.weights.names import Weights, clean_names, describe_removed

SUFFIX = ".safetensors"


def export(source: Path, out: Path, force: bool = False, keep_names: bool = False) -> int:
    """Write the weights of `source` to `out` and return the exit code. Raises UsageError."""
    _refuse_unfit(out, force)
    weights = read_weights(source)
    removed: dict[str, int] = {}
    if not keep_names:
        try:
            weights, removed = clean_names(weights)
        except UsageError as error:
            raise UsageError(f"{source}: {error}; --keep-names leaves them as they are") from error
    # Each tensor in memory of its own: the format has no views, and no shared tensors.
    weights = {n: t.clone(memory_format=torch.contiguous_format) for n, t in weights.items()}
    digest = _write(weights, out, force)
    values = sum(tensor.numel() for tensor in weights.values())
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    lines = [
        f"{find_weights(source)} -> {out}",
        f"{len(weights)} tensors, {values:,} values in parameters and buffers, "
        f"{' and '.join(types)}",
        *describe_removed(removed),
        f"sha256 {digest}",
    ]
    say("\n  ".join(lines))
    return EXIT_OK


def _refuse_unfit(out: Path, force: bool) -> None:
    problems = every_problem(
        (out.suffix != SUFFIX, f"the name must end in {SUFFIX}"),
        (not out.parent.is_dir(), f"there is no folder {out.parent}"),
        (out.is_dir(), "is a folder"),
        (
            out.exists() and not out.is_dir() and not force,
            "already exists; --force replaces it",
        ),
    )
    refuse(f"{out}: {problem}" for problem in problems)


def _write(weights: Weights, out: Path, force: bool) -> str:
    """Write the file atomically, by renaming a temporary one, and return its SHA-256."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        save_file(weights, partial, metadata={"format": "pt"})
        with partial.open("r+b") as stream:
            digest = sha256_of(stream)
            os.fsync(stream.fileno())  # on Windows only of a file that is open to write
        obey_umask(partial)
        _refuse_unfit(out, force)  # writing may have taken a while
        partial.replace(out)
    except (OSError, SafetensorError, ValueError) as error:
        raise HvdtrainError(f"{out} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return digest
