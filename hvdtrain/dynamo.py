"""The compiler of torch, imported once something is compiled and not before.

Optimizers of torch import `torch._dynamo` when they are made, to exclude parts of themselves from
compilation (torch/optim/optimizer.py, torch/_compile.py). That is a third of a worker's start, and
has no effect unless something is compiled. Scripts make their optimizers before they call hvdtrain,
so `import hvdtrain` puts it off.
"""

import importlib
import sys
import threading
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
EXCLUDED = "__dynamo_disable"  # the attribute in which torch keeps an excluded function


class DeferredDynamo(ModuleType):
    """A module in the place of `torch._dynamo` that answers what optimizers ask of it, and is
    replaced with the real one as soon as anything else is asked.
    """

    def __init__(self) -> None:
        super().__init__(NAME)
        vars(self).update(_lock=threading.Lock(), _excluded=[])

    @property
    def __spec__(self) -> ModuleSpec | None:  # type: ignore[override]
        """Return that of the real module, which exists once torch is imported."""
        return _real_spec()

    @property
    def __file__(self) -> str | None:  # type: ignore[override]
        """Return that of the real module: inspect.getmodule, by which torch.library registers
        operators, asks each module for its file.
        """
        spec = _real_spec()
        return spec.origin if spec else None

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
                vars(sys.modules["torch"]).pop("_dynamo", None)
                for function in self._excluded:
                    vars(function).pop(EXCLUDED, None)
        return importlib.import_module(NAME)


@cache
def _real_spec() -> ModuleSpec | None:
    torch = find_spec("torch")
    return PathFinder.find_spec(NAME, torch.submodule_search_locations) if torch else None


def defer_dynamo() -> None:
    """Put off the import of `torch._dynamo`, unless it has been imported."""
    sys.modules.setdefault(NAME, DeferredDynamo())
