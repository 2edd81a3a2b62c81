"""Passes of a model over one batch, whole and cut in shares, at one worker and from one state."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.data import Shares
from hvdtrain.data.feeding import Loaded, stream
from hvdtrain.data.sampler import Indices
from hvdtrain.tasks import Sums
from hvdtrain.tensors import copied_to_cpu, tensors_in, tensors_sha256
from hvdtrain.train.batchnorm import SyncBatchNorm
from hvdtrain.train.job import Job
from hvdtrain.train.worker_state import rng_state, seed_all

OUTSIDE = "the task's loss, outside of its modules"


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
        self.job, self.model, self.samples = job, job.model, len(indices)
        cuts = [Shares(shares).of(indices, rank) for rank in range(shares)]
        read = [indices, indices, *(cut for cut in cuts if len(cut))]
        self.whole, self.again, *self.parts = stream(job.data.train, read, epoch)
        self._before = copied_to_cpu(self.model.state_dict())

    def sums(self, part: Loaded, seed: int) -> Sums:
        """Return the task's sums of a training pass over `part`."""
        with torch.no_grad():
            self.model.load_state_dict(self._before)
        seed_all(seed)
        return self.job.task.loss(self.model, part.on(self.job.device))

    def gradient(self, parts: Sequence[Loaded], seed: int) -> dict[str, torch.Tensor]:
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

        def leave(name: str, module: nn.Module, taken: Any, returned: Any) -> None:
            made.append(ModuleCall(name, _copies(taken), _copies(returned)))

        with ExitStack() as hooks:
            for name, module in self._modules():
                hooks.enter_context(module.register_forward_hook(partial(leave, name)))
            self.sums(part, seed)
        return made

    def drawing(self) -> list[str]:
        """Return the names of the modules whose own code draws random numbers, in order.

        A draw belongs to the innermost module that is being called, or to OUTSIDE.
        """
        names: dict[str, None] = {}
        seed_all(0)
        inside, last = [OUTSIDE], [_generators(self.job.device)]

        def note() -> None:
            now = _generators(self.job.device)
            if now != last[0]:
                names[inside[-1]] = None
            last[0] = now

        def enter(name: str, module: nn.Module, taken: Any) -> None:
            note()
            inside.append(name)

        def leave(module: nn.Module, taken: Any, returned: Any) -> None:
            note()
            inside.pop()

        with ExitStack() as hooks:
            for name, module in self._modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
                hooks.enter_context(module.register_forward_hook(leave))
            self.sums(self.whole, seed=0)
            note()
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


@contextmanager
def switched_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put each of these modules, but not what it contains, into evaluation mode for the context."""
    with ExitStack() as undo:
        for module in modules:
            undo.callback(setattr, module, "training", module.training)
            module.training = False
        yield


def _copies(value: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors_in(value)]


def digest(batch: Any) -> str:
    """Return the SHA-256 of all tensors of a batch."""
    return tensors_sha256({str(number): t for number, t in enumerate(tensors_in(batch))})


def _generators(device: torch.device) -> list[Any]:
    """Return the state of the global generators, to compare it."""
    states = rng_state(device).values()
    return [state.tolist() if isinstance(state, torch.Tensor) else state for state in states]
