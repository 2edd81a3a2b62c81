"""Digests of what a step computes: batches, local gradients, reduced gradients, parameters.

A tensor's digest is the first 64 bits of a SHA-256, as WORDS integers (int32), so that ranks can
exchange tables of them. Zeros stand for a tensor that does not exist.

SHA-256 alone would take several times as long as an update. So blocks of 4 KiB are hashed to 64
bits first, by multilinear hashing with fixed odd keys k (Lemire and Kaser, "Strongly universal
string hashing is fast", The Computer Journal 57, 2014): sum of k_i x_i mod 2^64, for 32-bit words
x_i. If one word of a block differs, its hash does. The SHA-256 is that of these hashes and of the
bytes that fill no block. It shows faults; it is no protection from somebody who makes a tensor to
have a given digest.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.data.reading import digest_of as content_digest
from hvdtrain.errors import UsageError
from hvdtrain.tensors import bytes_of, items_of

WORDS = 2
Words = NDArray[np.int32]  # of shape (..., WORDS)
BLOCK_BYTES = 4096
# Pseudo-random, and the same in every version of NumPy.
KEYS = np.frombuffer(hashlib.shake_256(b"hvdtrain").digest(BLOCK_BYTES * 2), "<i8") | 1


def digest_of(tensor: torch.Tensor | None) -> Words:
    """Return the digest of a tensor's bytes, of shape (WORDS,); zeros for None."""
    if tensor is None:
        return np.zeros(WORDS, np.int32)
    return _words(_hash_of(bytes_of(tensor)))


def text_of(words: Words) -> str:
    """Return a digest as 16 hexadecimal digits; an empty text if the tensor does not exist."""
    return words.astype("<i4").tobytes().hex() if words.any() else ""


class BatchDigest:
    """The digest of several batches: tensors with their types and shapes, in nested structures."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, batch: Any) -> None:
        """Add a batch: a tensor, a list, tuple or mapping of such, or another object."""
        if isinstance(batch, torch.Tensor):
            self._hash.update(f"{batch.dtype}{tuple(batch.shape)}".encode())
            self._hash.update(_hash_of(bytes_of(batch)).digest())
        elif isinstance(batch, Mapping):
            for key in batch:
                self._hash.update(repr(key).encode())
                self.add(batch[key])
        elif (items := items_of(batch)) is not None:
            self._hash.update(f"{len(items)}:".encode())
            for item in items.values():
                self.add(item)
        elif hasattr(batch, "__dict__") and not isinstance(batch, type):
            self._hash.update(_content_of(batch).encode())
        else:
            self._hash.update(repr(batch).encode())

    def words(self) -> Words:
        """Return the digest of all batches so far, of shape (WORDS,)."""
        return _words(self._hash)


class ShareDigests:
    """The digests of each share's batches and local gradients, taken during the backward pass.

    With accumulation the last pass of a share counts, whose gradients are the accumulated ones.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._hooks = ExitStack()
        self._batches: dict[int, BatchDigest] = defaultdict(BatchDigest)
        self._gradients: dict[int, Words] = defaultdict(
            lambda: np.zeros((len(parameters), WORDS), np.int32)
        )
        self._share = 0

    def begin(self) -> None:
        """Forget the last step, and digest gradients from now on until `end`.

        The hooks run before those of Horovod, which change the gradients.
        """
        self.end()
        self._batches.clear()
        self._gradients.clear()
        for number, parameter in enumerate(self._parameters):
            hook = partial(self._gradient_is_ready, number)
            self._hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)

    def begin_pass(self, share: int, batch: Any) -> None:
        """Prepare for a backward pass over a batch of a share."""
        self._share = share
        self._batches[share].add(batch)

    def end(self) -> None:
        """Stop; the digests are kept."""
        self._hooks.close()

    def table(self, shares: int) -> Words:
        """Return digests, of shape (shares, 1 + parameters, WORDS): batches, then each gradient.

        Zeros for shares of other ranks, and for missing gradients.
        """
        table = np.zeros((shares, 1 + len(self._parameters), WORDS), np.int32)
        for share, batches in self._batches.items():
            table[share, 0] = batches.words()
        for share, gradients in self._gradients.items():
            table[share, 1:] = gradients
        return table

    def _gradient_is_ready(self, number: int, parameter: torch.Tensor) -> None:
        self._gradients[self._share][number] = digest_of(parameter.grad)


def _hash_of(data: NDArray[np.uint8]) -> Any:
    """Return the SHA-256 object of the hashes of all whole blocks, and of the bytes left."""
    whole = data.size // BLOCK_BYTES * BLOCK_BYTES
    words = data[:whole].view("<u4").reshape(-1, len(KEYS))
    sha256 = hashlib.sha256(np.einsum("ij,j->i", words, KEYS, dtype=np.int64, casting="unsafe"))
    sha256.update(data[whole:].tobytes())
    return sha256


def _content_of(batch: object) -> str:
    """Return a digest of an object's content; of one that cannot be pickled, its type."""
    try:
        return content_digest(batch)
    except UsageError:
        return type(batch).__qualname__


def _words(digest: Any) -> Words:
    return np.frombuffer(digest.digest()[: 4 * WORDS], "<i4").astype(np.int32)
