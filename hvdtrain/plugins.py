"""A user's own code, named as `package.module:attribute`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import HvdtrainError, UsageError

Result = TypeVar("Result")


def is_plugin(spec: str) -> bool:
    """Whether it can only be `package.module:attribute`."""
    module, colon, attribute = spec.partition(":")
    parts = [*module.split("."), attribute]
    return bool(colon) and all(part.isidentifier() for part in parts)


def import_plugin(option: str, spec: str) -> Callable[..., Any]:
    """The callable that `spec` names; the working directory is searched too.

    Raises UsageError, which begins with `option`, when there is none.
    """
    module_name, _, attribute = spec.partition(":")
    if not is_plugin(spec):
        raise UsageError(f"{option}={spec}: expected package.module:name, of names in Python")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{option}={spec}: {error} (searched from {here}, and where Python looks)"
        ) from error
    except Exception as error:
        raise UsageError(f"{option}={spec}: importing it failed: {_describe(error)}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise UsageError(f"{option}={spec}: {module_name} ({module.__file__}) has no {attribute!r}")
    if not callable(found):
        raise UsageError(
            f"{option}={spec}: is of type {type(found).__name__}, and cannot be called"
        )
    result: Callable[..., Any] = found
    return result


def call_plugin(option: str, spec: str, call: Callable[[], Result]) -> Result:
    """What `call` returns. An exception becomes a UsageError that says where it came from."""
    try:
        return call()
    except HvdtrainError:
        raise
    except Exception as error:
        raise UsageError(f"{option}={spec}: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """Type, text, and the line of code it came from."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}, in {last.name}"
    return f"{type(error).__name__}: {error} ({where})"
