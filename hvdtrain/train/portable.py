"""The form in which the objects of a user's state, and the weights, are kept in a checkpoint.

A checkpoint is read by `torch.load(weights_only=True)`, which never runs code of a file and takes
few types: numbers, texts, tensors, lists, tuples, sets, dicts, OrderedDict and Counter. So values
of NumPy, deques, paths, dates and times are kept as such ones, marked with their kind. The file of
weights takes dense tensors of real numbers: others are stored as such, and their form is recorded.
"""

import datetime
import io
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.errors import UsageError
from hvdtrain.tensors import changed, items_of
from hvdtrain.train.bounded import Inflated

KIND = "hvdtrain.kind"
LARGEST_INTEGER = 2**63
PLAIN_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


class Form(NamedTuple):
    """How values of a kind are kept, and made again."""

    keep: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _bytes_of(value: np.ndarray[Any, Any]) -> torch.Tensor:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=False)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _array(content: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(io.BytesIO(content.numpy().tobytes()), allow_pickle=False)
    return array


FORMS: dict[type, Form] = {
    np.ndarray: Form(_bytes_of, _array),
    np.generic: Form(lambda scalar: _bytes_of(np.asarray(scalar)), lambda kept: _array(kept)[()]),
    deque: Form(
        lambda queue: [portable(list(queue)), queue.maxlen],
        lambda kept: deque(native(kept[0]), kept[1]),
    ),
    PosixPath: Form(str, Path),
    datetime.datetime: Form(datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: Form(datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: Form(
        lambda delta: [delta.days, delta.seconds, delta.microseconds],
        lambda kept: datetime.timedelta(*kept),
    ),
}
NAMES = {kind.__name__: form for kind, form in FORMS.items()}


def portable(state: Any) -> Any:
    """Return a state in the form in which it is kept."""
    return changed(state, _kept, lambda value: _kind_of(value) is not None)


def native(state: Any) -> Any:
    """Return the state that `portable` was given. Raises ValueError, TypeError or LookupError for
    a form that it does not make.
    """
    return changed(
        state,
        lambda kept: NAMES[kept[KIND]].make(kept["value"]),
        lambda value: type(value) is dict and KIND in value,
    )


def refuse_unreadable(state: Any, name: str) -> None:
    """Raise UsageError, naming the first part that a checkpoint could not give back, if any.

    `name`: what the state is called in the message.
    """
    # Tensors are left out, as they take long.
    if problem := _unreadable(changed(state, lambda tensor: torch.empty(0)), name):
        raise UsageError(
            f"{problem}, which a checkpoint cannot hold: its reader runs no code of a file. Keep "
            "numbers, texts, None, tensors, NumPy arrays, lists, tuples, sets or dicts of them"
        )


def refuse_unreadable_file(path: Path, state: Mapping[str, Any]) -> None:
    """Raise UsageError unless the state just written can be read; tensors are not read. One of
    plain values can be, which is known without reading it.
    """
    if _is_plain(state):
        return
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        refuse_unreadable(native(state), "state")
        raise UsageError(f"the state that was written cannot be read: {error}") from error


def _is_plain(value: Any) -> bool:
    """Return whether a state has only dense tensors, numbers, texts and dicts, lists and tuples of
    these, and nothing of a derived type.
    """
    kind = type(value)
    if kind is OrderedDict and not _is_plain(vars(value)):
        return False
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is int:
        return bool(-LARGEST_INTEGER <= value <= LARGEST_INTEGER)
    if kind is torch.Tensor:
        return value.layout is torch.strided and value.dtype in PLAIN_DTYPES and not vars(value)
    return kind in (str, float, bool, type(None))


def _unreadable(state: Any, name: str) -> str | None:
    stream = io.BytesIO()
    try:
        torch.save(portable(state), stream)
        stream.seek(0)
        native(torch.load(stream, weights_only=True))
        return None
    except Exception:  # a user's type may raise anything
        for key, item in (items_of(state) or {}).items():
            if problem := _unreadable(item, f"{name}[{key!r}]"):
                return problem
        return f"{name} is of type {type(state).__qualname__}"


def _kind_of(value: Any) -> type | None:
    if isinstance(value, np.generic):
        return np.generic
    kind = type(value)
    if kind not in FORMS or (kind is np.ndarray and value.dtype.kind in "OV"):
        return None
    zone = getattr(value, "tzinfo", None)
    return kind if zone is None or type(zone) is datetime.timezone else None


def _kept(value: Any) -> dict[str, Any]:
    kind = _kind_of(value)
    assert kind is not None
    return {KIND: kind.__name__, "value": FORMS[kind].keep(value)}


class _Stored(NamedTuple):
    """A kind of tensor that the file of weights does not have, and how it is stored there."""

    applies: Callable[[torch.Tensor], bool]
    save: Callable[[torch.Tensor], torch.Tensor]
    load: Callable[[torch.Tensor], torch.Tensor]
    most_bytes: Callable[[torch.Tensor], int]  # of what `load` makes


def _sparse_bytes(stored: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements other than 0, each with an index a dimension."""
    rows = 8 * (len(stored) + 1) if stored.dim() else 0
    return int(stored.count_nonzero()) * (stored.element_size() + 8 * stored.dim()) + rows


STORED = {
    "complex": _Stored(
        torch.Tensor.is_complex, torch.view_as_real, torch.view_as_complex, lambda t: t.nbytes
    ),
    "sparse": _Stored(
        lambda t: t.layout is torch.sparse_coo,
        torch.Tensor.to_dense,
        torch.Tensor.to_sparse,
        _sparse_bytes,
    ),
    "sparse rows": _Stored(
        lambda t: t.layout is torch.sparse_csr,
        torch.Tensor.to_dense,
        torch.Tensor.to_sparse_csr,
        _sparse_bytes,
    ),
}


def as_stored(
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the weights as they are stored, and the form of those that are stored otherwise."""
    forms = {
        name: form
        for name, tensor in weights.items()
        for form, kind in STORED.items()
        if kind.applies(tensor)
    }
    changed_ones = {name: STORED[form].save(weights[name]) for name, form in forms.items()}
    return {**weights, **changed_ones}, forms


def from_stored(
    weights: Mapping[str, torch.Tensor], forms: Mapping[str, str], most: int
) -> dict[str, torch.Tensor]:
    """Return the weights as they were. Raises Inflated if sparse ones take over `most` bytes."""
    if sum(STORED[form].most_bytes(weights[name]) for name, form in forms.items()) > most:
        raise Inflated("its sparse tensors would take far more memory than the file has")
    return {**weights, **{n: STORED[form].load(weights[n]) for n, form in forms.items()}}
