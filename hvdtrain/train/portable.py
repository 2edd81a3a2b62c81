"""The form in which the objects of a user's state are kept in a checkpoint.

A checkpoint is read by `torch.load(weights_only=True)`, which never runs code of a file and takes
few types: numbers, texts, tensors, lists, tuples, sets, dicts, OrderedDict and Counter. So values
of NumPy, deques, paths, dates and times are kept as such ones, marked with their kind.
"""

from __future__ import annotations

import datetime
import io
from collections import deque
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.errors import UsageError
from hvdtrain.tensors import changed, items_of

KIND = "hvdtrain.kind"


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
    return changed(state, _made, lambda value: type(value) is dict and KIND in value)


def refuse_unreadable(state: Any, name: str) -> None:
    """Raise UsageError, naming the first part that a checkpoint could not give back, if any.

    `name`: what the state is called in the message.
    """
    # Tensors are left out, as they take long.
    problem = _unreadable(changed(state, lambda tensor: torch.empty(0)), name)
    if problem:
        raise UsageError(
            f"{problem}, which a checkpoint cannot hold: its reader runs no code of a file. Keep "
            "numbers, texts, None, tensors, NumPy arrays, lists, tuples, sets or dicts of them"
        )


def _unreadable(state: Any, name: str) -> str | None:
    try:
        stream = io.BytesIO()
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


def _made(kept: dict[str, Any]) -> Any:
    return NAMES[kept[KIND]].make(kept["value"])
