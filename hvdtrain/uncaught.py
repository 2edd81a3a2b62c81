"""Errors of hvdtrain that a script does not catch: one message instead of a traceback, and the exit
code that they carry.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from hvdtrain.errors import HvdtrainError
from hvdtrain.log import complain

_PACKAGE = Path(__file__).parent
_before = sys.excepthook


def report_uncaught() -> None:
    """From now on, end this process in this way where it would end with such an error."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, HvdtrainError):
        _before(kind, error, trace)
        return
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _PACKAGE not in Path(frame.filename).parents]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    complain(f"hvdtrain: error{place}: {error}")
    raise SystemExit(error.exit_code)  # the interpreter ends with it, in good order
