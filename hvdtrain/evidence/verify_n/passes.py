"""Passes of a model over one batch, whole and cut in shares, at one worker and from one state."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.data import Shares
from hvdtrain.data.feeding import Loaded, stream
from hvdtrain.data.sampler import Indices
from hvdtrain.tasks import Sums
from hvdtrain.tensors import copied_to_cpu, tensors_in
from hvdtrain.train.batchnorm import SyncBatchNorm
from hvdtrain.train.job import Job

OUTSIDE = "the task's loss, outside of its modules"

Gradient = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module in a forward pass, with copies of its tensors."""

    module: str
    taken: list[torch.Tensor]
    returned: list[torch.Tensor]


class Subject:
    """A model and one batch, read whole and in shares. Each pass starts from the same state."""

    def __init__(self, job: Job, indices: Indices, epoch: int, shares: int) -> None:
        """Read the samples of `indices`, whole and in so many shares, fewer if samples are."""
        self.job = job
        self.model = job.model
        cuts = [Shares(shares).of(indices, rank) for rank in range(shares)]
        cuts = [cut for cut in cuts if len(cut)]
        split = job.data.train
        self.whole, self.again, *self.parts = stream(split, [indices, indices, *cuts], epoch)
        self.samples = len(indices)
        self._before = copied_to_cpu(self.model.state_dict())

    def sums(self, part: Loaded, seed: int) -> Sums:
        """Return the task's sums of a training pass over `part`."""
        with torch.no_grad():
            self.model.load_state_dict(self._before)
        _seed(seed)
        return self.job.task.loss(self.model, part.on(self.job.device))

    def gradient(self, parts: Sequence[Loaded], seed: int) -> Gradient:
        """Return the gradient of the mean loss, summed over parts with seeds of their own."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p) for name, p in named.items()}
        for number, part in enumerate(parts):
            loss = self.sums(part, seed + number).loss / self.samples
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    total[name] += gradient.to_dense() if gradient.is_sparse else gradient
        return total

    def calls(self, part: Loaded, seed: int) -> list[ModuleCall]:
        """Return the calls of all modules in a pass, in the order in which they end."""
        made: list[ModuleCall] = []

        def record(name: str) -> Any:
            def hook(module: nn.Module, taken: Any, returned: Any) -> None:
                made.append(ModuleCall(name, copies(taken), copies(returned)))

            return hook

        handles = [module.register_forward_hook(record(name)) for name, module in self._modules()]
        try:
            self.sums(part, seed)
        finally:
            for handle in handles:
                handle.remove()
        return made

    def drawing(self) -> list[str]:
        """Return the names of the modules whose own code draws random numbers, in order.

        A draw belongs to the innermost module that is being called, or to OUTSIDE.
        """
        names: dict[str, None] = {}
        _seed(0)
        inside, last = [OUTSIDE], [_generators(self.job.device)]

        def note() -> None:
            now = _generators(self.job.device)
            if now != last[0]:
                names[inside[-1]] = None
            last[0] = now

        def enters(name: str) -> Any:
            def hook(module: nn.Module, taken: Any) -> None:
                note()
                inside.append(name)

            return hook

        def leaves(module: nn.Module, taken: Any, returned: Any) -> None:
            note()
            inside.pop()

        handles: list[Any] = []
        for name, module in self._modules():
            handles.append(module.register_forward_pre_hook(enters(name)))
            handles.append(module.register_forward_hook(leaves))
        try:
            self.sums(self.whole, seed=0)
            note()
        finally:
            for handle in handles:
                handle.remove()
        return list(names)

    def modules(self, names: Iterable[str]) -> list[nn.Module]:
        """Return the modules of these names."""
        wanted = set(names)
        return [module for name, module in self._modules() if name in wanted]

    def normalising(self) -> list[str]:
        """Return the names of the modules that normalise over the samples of one worker."""
        return [
            name
            for name, module in self._modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        ]

    def synchronised(self) -> list[nn.Module]:
        """Return the modules that normalise over the samples of all workers."""
        return [module for _, module in self._modules() if isinstance(module, SyncBatchNorm)]

    def _modules(self) -> Iterable[tuple[str, nn.Module]]:
        return ((name or "the model", module) for name, module in self.model.named_modules())


@contextlib.contextmanager
def switched_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put each of these modules, but not what it contains, into evaluation mode for the context."""
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def copies(value: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors_in(value)]


def digest(batch: Any) -> str:
    """Return the SHA-256 of all tensors of a batch."""
    sha256 = hashlib.sha256()
    for tensor in tensors_in(batch):
        values = tensor.detach().cpu().contiguous()
        sha256.update(f"{values.dtype}|{tuple(values.shape)}|".encode())
        sha256.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _generators(device: torch.device) -> bytes:
    """Return a digest of the state of the global generators."""
    sha256 = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        sha256.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    _, keys, position, *_ = np.random.get_state(legacy=True)
    sha256.update(np.asarray(keys).tobytes() + int(position).to_bytes(4, "little"))
    sha256.update(repr(random.getstate()).encode())
    return sha256.digest()
