"""Activations that the backward pass computes again, so that memory need not hold all of them.

A block, such as a residual block or one of attention, keeps its inputs alone; its backward pass
computes the rest once more, with the same random numbers and buffers, so with the same bits. The
blocks of a network are the children of its nn.Sequential, nn.ModuleList and nn.ModuleDict, of the
outermost that hold blocks, and modules of one class that their parent has several of. An
nn.Sequential of single layers, as in VGG, is cut into about as many parts as each has layers.

Source: T. Chen et al., "Training deep nets with sublinear memory cost" (2016).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import UsageError
from hvdtrain.log import counted
from hvdtrain.tensors import changed, tensors_in
from hvdtrain.train.batchnorm import has_batch_norm
from hvdtrain.train.worker_state import Buffers, rng_state, set_rng_state, slots_of


def use_grad_checkpointing(model: nn.Module, device: torch.device) -> str:
    """Have the model's backward passes compute activations again; return how, as a notice.

    Names of parameters, and copies by copy.deepcopy, are as before. A method of the model's own,
    `set_grad_checkpointing(True)` as in timm, is called in place of the rule for blocks, unless the
    model has batch norm, whose running statistics its second computation would change. Raises
    UsageError for a model without blocks, or whose method fails.
    """
    kind, method = type(model).__name__, getattr(model, "set_grad_checkpointing", None)
    if callable(method) and not has_batch_norm(model):
        try:
            method(True)
        except Exception as error:  # timm's raise AssertionError where they cannot
            raise UsageError(
                f"--grad-checkpointing: {kind}.set_grad_checkpointing(True) failed: "
                f"{type(error).__name__}: {error}. Leave --grad-checkpointing out"
            ) from error
        return f"{kind}.set_grad_checkpointing(True) was called"
    blocks = list(dict.fromkeys(_blocks(model)))
    if not blocks:
        raise UsageError(
            f"--grad-checkpointing: {kind} has no blocks to compute again: no nn.Sequential, and "
            "no modules of several layers that stand in an nn.ModuleList or nn.ModuleDict, or "
            "beside others of their class. Give the model a method set_grad_checkpointing(enable), "
            "or leave --grad-checkpointing out"
        )
    count = sum(len(_parts([*block.children()])) if _is_plain(block) else 1 for block in blocks)
    for block in blocks:
        # In a copy of the model, the bound method and the block are those of the copy.
        compute = _forward_in_parts if _is_plain(block) else partial(_recomputed, block.forward)
        block.forward = partial(compute, block, device)
    return f"{counted(count, 'block')} of {kind} will be computed again in backward passes"


def _is_container(module: nn.Module) -> bool:
    holds = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return holds or type(module).forward is nn.Sequential.forward


def _has_layers(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is an nn.Sequential of single layers."""
    is_sequential = type(module).forward is nn.Sequential.forward
    return is_sequential and not any(map(_has_layers, module.children()))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, as the module's docstring has it."""
    if _is_plain(module):
        if len([*module.children()]) > 1:
            yield module
        return
    children = [child for child in module.children() if _has_layers(child)]
    kinds = Counter(type(child) for child in children)
    for child in children:
        repeated = _is_container(module) or kinds[type(child)] > 1
        if repeated and not _is_container(child):
            yield child
        else:
            yield from _blocks(child)


def _parts(layers: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return the first layer of each part, and that after its last. None begins with a layer that
    works in place, which would change the input that the part keeps.
    """
    length, starts = math.ceil(math.sqrt(len(layers))), list[int]()
    for number, layer in enumerate(layers):
        is_due = not starts or number - starts[-1] >= length
        if is_due and not getattr(layer, "inplace", False):
            starts.append(number)
    return list(zip(starts, [*starts[1:], len(layers)], strict=True))


def _forward_in_parts(sequential: nn.Module, device: torch.device, inputs: Any) -> Any:
    """Compute an nn.Sequential of single layers in parts that are computed again."""
    layers = [*sequential.children()]
    parts = _parts(layers)
    for layer in layers[: parts[0][0] if parts else None]:
        inputs = layer(inputs)
    for first, end in parts:
        part = nn.Sequential(*layers[first:end])
        inputs = _recomputed(part, part, device, inputs)
    return inputs


def _recomputed(
    compute: Callable[..., Any],
    block: nn.Module,
    device: torch.device,
    *inputs: Any,
    **named: Any,
) -> Any:
    """Return what `compute` does, whose activations the backward pass will compute again."""
    # Lists of tensors are copied, as DenseNet adds to them later.
    inputs, named = changed((inputs, named), lambda tensor: tensor)
    versions = [tensor._version for tensor in tensors_in([inputs, named])]
    if torch.is_grad_enabled():
        state = _ForwardState(block, device)
        outputs = checkpoint(
            partial(compute, **named),
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # `state` does, for more generators
            context_fn=lambda: (nullcontext(), state),
        )
    else:
        outputs = compute(*inputs, **named)
    if versions != [tensor._version for tensor in tensors_in([inputs, named])]:
        raise UsageError(
            f"--grad-checkpointing: a block of class {type(block).__name__} changes its input in "
            "place, so that it could not be computed again. Let it change a copy (inplace=False), "
            "or leave --grad-checkpointing out"
        )
    return outputs


class _ForwardState:
    """A context in which a block and the random generators are as when this was constructed."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._block, self._device = block, device
        self._before = rng_state(device), _copies(self._buffers())

    def __enter__(self) -> None:
        self._after = rng_state(self._device), self._buffers()
        generators, buffers = self._before
        self._set(generators, _copies(buffers))  # may be entered again

    def __exit__(self, *_: object) -> None:
        self._set(*self._after)

    def _buffers(self) -> Buffers:
        return {name: module._buffers[key] for name, module, key in slots_of(self._block)}

    def _set(self, generators: dict[str, Any], buffers: Buffers) -> None:
        """Set tensors, in place of their values, as a graph may hold those of now."""
        set_rng_state(generators, self._device)
        for name, module, key in slots_of(self._block):
            module._buffers[key] = buffers[name]


def _copies(buffers: Buffers) -> Buffers:
    return {name: None if held is None else held.clone() for name, held in buffers.items()}
