"""Digests of each tensor of a step's passes, to find the first by which two computations differ.

Gradients are taken by hooks on tensors, not by the backward hooks of modules: those change the
graph, reject modules that work in place, and could change the order of sums.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.audit.digests import BatchDigest, text_of
from hvdtrain.data.feeding import StepData
from hvdtrain.data.sampler import Indices
from hvdtrain.tensors import tensors_in
from hvdtrain.train.metering import StepSums

Digests = dict[str, str]  # of tensors by name, in the order of computation


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
