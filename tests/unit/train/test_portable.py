"""States that are known to be readable without reading them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.errors import UsageError
from hvdtrain.tensors import copied_to_cpu
from hvdtrain.train import portable


class Texts(str):
    """A type of a script's own."""


class Fields(dict):
    """Another one."""


def marked(mark: Any) -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.mark = mark
    return tensor


def model_state() -> Any:
    return copied_to_cpu(torch.nn.Sequential(torch.nn.Linear(2, 3)).state_dict())


PLAIN = {
    "a model's state": model_state(),
    "texts and numbers": {"a": [1, 2.5, True, None, ("b", -(2**63), 2**63)], 3: "\udc80 \n"},
    "tensors": [torch.ones(0, 2, dtype=kind) for kind in portable.PLAIN_DTYPES],
    "an ordered dict": OrderedDict(a=torch.ones(3)[1:], b={}),
}
OTHERS = {
    "a long integer": 2**3000,
    "a derived text": Texts("a"),
    "a derived dict": [Fields(a=1)],
    "a key": {Texts("a"): 1},
    "a value of an ordered dict": OrderedDict(a=Texts("b")),
    "a counter": Counter("abc"),
    "a queue": deque([1]),
    "a marked tensor": marked(Texts("a")),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_plain_state_is_not_read_again(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if it is, or if what counts as plain could not be read."""
    torch.save(PLAIN[case], tmp_path / "state")
    torch.load(tmp_path / "state", weights_only=True)
    monkeypatch.setattr(portable.torch, "load", lambda *args, **kwargs: pytest.fail("was read"))
    portable.refuse_unreadable_file(tmp_path / "state", PLAIN[case])


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_state_is_read(case: str, tmp_path: Path) -> None:
    """Fails if a type, a key, an attribute or a size that may not be readable counts as plain."""
    (tmp_path / "state").write_bytes(b"not a state")
    with pytest.raises(UsageError):
        portable.refuse_unreadable_file(tmp_path / "state", {"kept": OTHERS[case]})
