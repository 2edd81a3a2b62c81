"""Batches of any structure: moved to a device, digested, and cut to no samples."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hvdtrain.audit.digests import BatchDigest
from hvdtrain.data.feeding import to_device
from hvdtrain.tensors import copied_to_cpu, tensors_in

META = torch.device("meta")  # stands for a GPU


class Encoding(collections.UserDict[str, Any]):
    """A mapping that is no dict, such as those of tokenizers."""


class Named(dict[str, Any]):
    """A dict with an attribute."""

    note = "none"


class Rows(list[Any]):
    note = "none"


class Graph:
    """An object that moves itself, such as those of PyTorch Geometric."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    word: str = "a"


Two = collections.namedtuple("Two", "one other")


def noted(kind: Any, items: Any) -> Any:
    made = kind(items)
    made.note = "kept"
    return made


def ones() -> torch.Tensor:
    return torch.ones(2, 3)


MAKERS: dict[str, Callable[[], Any]] = {
    "tensor": ones,
    "dict": lambda: {"x": ones(), "n": 3},
    "ordered": lambda: collections.OrderedDict(x=ones()),
    "defaultdict": lambda: collections.defaultdict(list, x=ones()),
    "user dict": lambda: Encoding(x=ones(), word="a"),
    "derived dict": lambda: noted(Named, {"x": ones()}),
    "read only": lambda: MappingProxyType({"x": ones()}),
    "list": lambda: [ones(), "a", None],
    "derived list": lambda: noted(Rows, [ones()]),
    "tuple": lambda: (ones(), [ones()]),
    "named tuple": lambda: Two(ones(), 4),
    "packed": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    "object": lambda: Graph(ones()),
    "dataclass": lambda: Pair(ones()),
    "nested": lambda: {"a": [Encoding(x=Graph(ones()))]},
}


def tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, PackedSequence):
        yield item.data  # the sizes stay on the CPU
    elif isinstance(item, Graph | Pair):
        yield item.x
    elif isinstance(item, collections.abc.Mapping):
        yield from tensors(list(item.values()))
    elif isinstance(item, list | tuple):
        for each in item:
            yield from tensors(each)


@pytest.mark.parametrize("name", MAKERS)
def test_batches_are_moved_whatever_holds_them(name: str) -> None:
    """Fails if a tensor stays behind, or what holds it gets another type, loses an attribute or is
    changed itself.
    """
    batch = MAKERS[name]()
    before = list(tensors(batch))
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert [(it.device, it.shape) for it in tensors(moved)] == [(META, it.shape) for it in before]
    assert all(it.device.type == "cpu" for it in tensors(batch))
    assert getattr(moved, "note", "kept") == "kept"
    here = to_device(batch, torch.device("cpu"))
    assert type(here) is type(batch)
    assert all(a.equal(b) for a, b in zip(tensors(here), before, strict=True))
    factory = getattr(batch, "default_factory", None)
    assert getattr(moved, "default_factory", None) is factory


def test_encodings_of_transformers_are_moved() -> None:
    """Fails if what a tokenizer returns stays on the CPU or becomes a dict."""
    from transformers import BatchEncoding  # takes long to import

    moved = to_device(BatchEncoding({"input_ids": ones()}), META)
    assert type(moved) is BatchEncoding and moved.input_ids.device == META


@pytest.mark.parametrize("name", MAKERS)
def test_digests_of_batches_are_of_their_content(name: str) -> None:
    """Fails if a trace overlooks a changed batch, or takes two equal ones for different."""
    digests = []
    for change in (0, 0, 1):
        batch = MAKERS[name]()
        next(tensors(batch)).add_(change)
        found = BatchDigest()
        found.add(batch)
        digests.append(found.words().tolist())
    assert digests[0] == digests[1] != digests[2]


def test_counts_are_replaced_not_added() -> None:
    """Fails if a Counter in a batch holds twice its values once it is moved."""
    moved = to_device(collections.Counter(a=torch.ones(2), b=3), torch.device("cpu"))
    assert type(moved) is collections.Counter
    assert moved["a"].tolist() == [1.0, 1.0] and moved["b"] == 3


@pytest.mark.parametrize("name", MAKERS)
def test_states_are_copied_whatever_holds_them(name: str) -> None:
    """Fails if a copy shares memory, or gets another type or loses an attribute; or if one of the
    tensors is not found.
    """
    state = MAKERS[name]()
    copied = copied_to_cpu(state)
    assert type(copied) is type(state)
    assert getattr(copied, "note", None) == getattr(state, "note", None)
    if name != "object" and name != "nested":  # only batches may have objects that move themselves
        pairs = list(zip(tensors_in(state), tensors_in(copied), strict=True))
        assert pairs and all(a.equal(b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_the_state_of_a_model_keeps_its_versions() -> None:
    """Fails if the attribute by which modules tell the version of a state is lost."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert copied_to_cpu(state)._metadata == state._metadata
    assert copied_to_cpu(collections.deque([1], 3)).maxlen == 3
