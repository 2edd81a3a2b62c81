"""Digests of what a step computes: batches, local gradients, reduced gradients, parameters.

A tensor's digest is the first 64 bits of a SHA-256, as WORDS integers (int32), so that ranks can
exchange tables of them. Zeros stand for a tensor that does not exist.

SHA-256 alone would take several times as long as an update. So blocks of 4 KiB are hashed to 64
bits first, by multilinear hashing with fixed odd keys k (Lemire and Kaser, "Strongly universal
string hashing is fast", The Computer Journal 57, 2014): sum of k_i x_i mod 2^64, for 32-bit words
x_i. If one word of a block differs, its hash does. The SHA-256 is that of these hashes and of the
bytes that fill no block. It shows faults; it is no protection from somebody who makes a tensor to
have a given digest.

For the first tensor by which two computations of a step differ (`PassDigests`), gradients are taken
by hooks on tensors, not by the backward hooks of modules: those change the graph, reject modules
that work in place, and could change the order of sums.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.data.feeding import StepData
from hvdtrain.data.reading import digest_of as content_digest
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError
from hvdtrain.tensors import bytes_of, items_of, tensors_in
from hvdtrain.train.metering import StepSums

WORDS = 2
Words = NDArray[np.int32]  # of shape (..., WORDS)
Digests = dict[str, str]  # of tensors by name, in the order of computation
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


class PassDigests:
    """An audit that digests, at one step, the inputs and outputs of modules and their gradients."""

    def __init__(self, model: torch.nn.Module, step: int) -> None:
        self.parameters: Digests = {}  # before the step
        self.buffers: dict[int, Digests] = {}  # of each share, before its first pass
        self.passes: dict[int, list[Digests]] = {}  # of each share
        self.takers: dict[str, list[str]] = defaultdict(list)  # calls, by the tensor that they take
        self.indices: Indices = np.zeros(0, np.int64)  # of the samples of the global batch
        self._model, self._step = model, step
        self._is_due, self._hooks = False, ExitStack()
        self._calls: Counter[str] = Counter()  # of each module in this pass
        self._open: list[str] = []  # the calls in progress, outermost first
        self._names = WeakTensorKeyDictionary()  # of the tensors whose gradients are digested
        self._current: Digests = {}  # of this pass

    def begin(self, step: int, data: StepData) -> None:
        """Digest the parameters and register the hooks, if it is the step."""
        self._is_due = step == self._step
        if not self._is_due:
            return
        self.indices = data.indices
        for name, parameter in self._model.named_parameters():
            self.parameters[f"the parameter {name}"] = _digest(parameter)
            if parameter.requires_grad:
                hook = partial(self._parameter_is_ready, name)
                self._hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        for name, module in self._model.named_modules():
            enter = partial(self._enter, name or "the model")
            self._hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            self._hooks.callback(module.register_forward_hook(self._leave).remove)

    def begin_pass(self, share: int, batch: Any) -> None:
        if not self._is_due:
            return
        self._current = {"the batch": _digest(batch)}
        self.passes.setdefault(share, []).append(self._current)
        buffers = {
            f"the buffer {name}": _digest(buffer) for name, buffer in self._model.named_buffers()
        }
        self.buffers.setdefault(share, buffers)
        self._calls.clear()
        self._names.clear()

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Go on: passes of the step that train other optimizers may follow."""

    def updated(self, step: int, sums: StepSums) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _enter(self, name: str, module: torch.nn.Module, inputs: Any, named_inputs: Any) -> None:
        self._calls[name] += 1
        call = f"{name} (call {self._calls[name]})"
        self._open.append(call)
        self._current[f"the input of {call}"] = _digest([inputs, named_inputs])
        is_leaf = next(module.children(), None) is None
        for tensor in tensors_in([inputs, named_inputs]):
            if tensor.requires_grad:
                if tensor not in self._names:  # computed outside of modules
                    self._watch(tensor, f"the input of {call}")
                if is_leaf:
                    self.takers[f"the gradient of {self._names[tensor]}"].append(call)

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        name = f"the output of {self._open.pop()}"
        self._current[name] = _digest(output)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self._watch(tensor, name)

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        """Digest the gradient of a tensor when the backward pass has computed it."""
        self._names[tensor] = name
        hook = partial(self._gradient_is_ready, f"the gradient of {name}")
        self._hooks.callback(tensor.register_hook(hook).remove)

    def _gradient_is_ready(self, name: str, gradient: torch.Tensor) -> None:
        self._current[name] = _digest(gradient)

    def _parameter_is_ready(self, name: str, parameter: torch.Tensor) -> None:
        self._gradient_is_ready(f"the gradient of {name}", parameter.grad)  # type: ignore[arg-type]


def first_tensor(one: PassDigests, other: PassDigests, share: int) -> str | None:
    """Return the name of the first tensor by which the passes of a share differ, or None."""
    if name := _first(one.parameters, other.parameters):
        return f"{name}, before the step"
    both = zip(one.passes[share], other.passes[share], strict=False)
    number, name = next(
        ((number, first) for number, pair in enumerate(both) if (first := _first(*pair))), (0, None)
    )
    if not name:
        return None
    location = f", in pass {number}" if len(one.passes[share]) > 1 else ""
    if takers := one.takers.get(name):
        name += f", coming back from {' and '.join(dict.fromkeys(takers))}"
    if buffer := _first(one.buffers[share], other.buffers[share]):
        location += f". Before the pass {buffer} differs already"
    return f"{name}{location}"


def _first(one: Digests, other: Digests) -> str | None:
    for name, digest in one.items():
        if name not in other:
            return f"{name}, which only A has"
        if other[name] != digest:
            return name
    return next((f"{name}, which only B has" for name in other if name not in one), None)


def _digest(value: Any) -> str:
    digest = BatchDigest()
    for tensor in tensors_in(value):
        digest.add(tensor)
    return text_of(digest.words())
