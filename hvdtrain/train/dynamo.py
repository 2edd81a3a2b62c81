"""The compiler of torch, imported once something is compiled and not before.

Optimizers of torch import `torch._dynamo` at their first step, to exclude parts of themselves from
compilation (torch/optim/optimizer.py, torch/_compile.py). That is half of a worker's start, and has
no effect unless something is compiled.
"""

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
EXCLUDED = "__dynamo_disable"  # the attribute in which torch keeps an excluded function


class DeferredDynamo(ModuleType):
    """A module in the place of `torch._dynamo` that answers what optimizers ask of it, and is
    replaced with the real one as soon as anything else is asked.
    """

    def __init__(self) -> None:
        super().__init__(NAME)
        spec = importlib.util.find_spec(NAME)
        # inspect.getmodule, by which torch.library registers operators, asks each module its file.
        file = spec.origin if spec else None
        vars(self).update(__spec__=spec, __file__=file, _lock=threading.Lock(), _excluded=[])

    def graph_break(self, msg: str = "") -> None:
        """Have no effect, as outside of compiled functions."""

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that torch excludes from compilation: itself, as long as there is none.
        When there is, torch excludes it again.
        """
        if options != {"wrapping": False}:  # not called by torch/_compile.py
            return self._real().disable(function, recursive, **options)
        self._excluded.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def _real(self) -> ModuleType:
        with self._lock:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)
                for function in self._excluded:
                    vars(function).pop(EXCLUDED, None)
        return importlib.import_module(NAME)


def defer_dynamo() -> None:
    """Put off the import of `torch._dynamo`, unless it has been imported."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = DeferredDynamo()
