"""Import and call of user code, named as `package.module:callable`.

An exception in it becomes an error of one line with its file and line; it stays attached as cause.
"""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.errors import HvdtrainError, TrainingError, UsageError

PLACES = ("imagefolder",)  # kinds of built-in data that name a folder
KINDS = (*PLACES, "synthetic")  # of built-in data, as in imagefolder:DIR
PACKAGE = Path(__file__).parents[1]
LIBRARIES = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}


def is_plugin(name: str) -> bool:
    """Return whether `name` has the form `module:callable` rather than `kind:details`."""
    module_name, colon, attribute = name.partition(":")
    parts = [*module_name.split("."), attribute]
    return bool(colon) and module_name not in KINDS and all(part.isidentifier() for part in parts)


def import_callable(flag: str, name: str) -> Callable[..., Any]:
    """Return the callable that `module:callable` names. The working directory is searched too,
    before what is installed, but after the standard library.

    `flag`: the flag that was given the name, for messages. Raises UsageError.
    """
    if not is_plugin(name):
        raise UsageError(f"{flag}={name}: expected package.module:callable")
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        ends = [n for n, entry in enumerate(sys.path, 1) if Path(entry).name == "lib-dynload"]
        sys.path.insert(max(ends, default=0), here)
    try:
        module = importlib.import_module(module_name)
    except HvdtrainError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if f"{module_name}.".startswith(f"{missing}."):  # it or a parent, not one that it imports
            text = f"{error}; searched {here} and what is installed"
        else:
            text = f"{_location(error)}{_describe(error)}"
        raise UsageError(f"{flag}={name}: {text}") from error
    target = getattr(module, attribute, None)
    if target is None:
        raise UsageError(f"{flag}={name}: {module_name} has no {attribute!r}")
    if not callable(target):
        raise UsageError(f"{flag}={name}: is of type {type(target).__name__}, and cannot be called")
    return target  # type: ignore[no-any-return]


def refuse_code_of(
    source: Path, named: Mapping[str, Any], script: Sequence[str] | None = None
) -> None:
    """Raise UsageError if the checkpoint of `source`, an untrusted file, names code to run.

    `named`: its value for each flag, such as {"--model": "mine:network"}. A built-in name is not
    code. `script`: the command line of a script with a loop of its own, if any.
    """
    if script is not None:
        raise UsageError(
            f"{source}: is the run of a script, {' '.join(map(str, script))}, which must be run up "
            "to its loop. Nothing was run. If you trust that code, give --trust-code"
        )
    code = {flag: str(name) for flag, name in named.items() if is_plugin(str(name))}
    if code:
        raise UsageError(
            f"{source}: its checkpoint names code to run, {', '.join(code.values())}, found in the "
            "working directory or in what is installed. Nothing was run. If you trust that code, "
            f"give {' '.join(f'{flag} {name}' for flag, name in code.items())}, or --trust-code"
        )


def refuse_data_of(source: Path, data: Any) -> None:
    """Raise UsageError if the checkpoint of `source`, an untrusted file, names a place to read.

    `data`: its --data; None if it is given. A built-in name is no place.
    """
    if data is not None and ":" in str(data) and str(data).partition(":")[0] in PLACES:
        raise UsageError(
            f"{source}: its checkpoint names data to read, {data}. Nothing was read. If these are "
            f"what you mean, give --data {data}, or --trust-code"
        )


def call(flag: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of the user's function. Raises UsageError when the function raises."""
    try:
        return function(*arguments)
    except HvdtrainError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit()
        location = _location(error) or _definition(function)
        shown = ", ".join(map(str, arguments))
        called = f"called with ({shown}), " if arguments else ""
        raise UsageError(f"{flag}={name}: {called}{location}{_describe(error)}") from error


@contextmanager
def exits_as_failures() -> Iterator[None]:
    """Convert sys.exit() of user code within the context to a TrainingError that names the place.

    Otherwise the process would end silently, perhaps with exit code 0, while other ranks wait.
    """
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        location = _location(error).removesuffix(": ") or "a library"
        raise TrainingError(f"ended by sys.exit({code}) in {location}") from error


def _describe(error: BaseException) -> str:
    # The text of a SyntaxError repeats its place, which the message already names.
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"


def _location(error: BaseException) -> str:
    """Return 'FILE:LINE: ' of the user code that raised `error`, or '' if none was reached. This is
    the innermost frame that belongs neither to hvdtrain nor to a library.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if PACKAGE not in Path(frame.filename).parents
        and not frame.filename.startswith("<frozen importlib")
        and Path(frame.filename) != Path(importlib.__file__)
    ]
    if not frames:
        return ""
    user_frames = [frame for frame in frames if not LIBRARIES & {*Path(frame.filename).parents}]
    if not user_frames:  # the user code is an installed package itself
        folder = Path(frames[0].filename).parent
        user_frames = [frame for frame in frames if Path(frame.filename).parent == folder]
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: "


def _definition(function: Callable[..., Any]) -> str:
    """Return 'FILE:LINE: ' of the definition of a function that rejected its arguments, or ''."""
    made_by = vars(function).get("__init__") if isinstance(function, type) else function
    code = getattr(made_by, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
