"""Output to the user, one write per message, so that lines of several workers do not interleave.

(`print` makes two writes when output is unbuffered, and Open MPI prefixes each of them.)
"""

import io
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from hvdtrain.errors import HvdtrainError, Stopped
from hvdtrain.pulse import Pulse

STALL_S = 60.0  # longest wait for the reader of an output that does not block
NOTEBOOK = "JPY_PARENT_PID"  # environment variable that Jupyter sets for kernels
_left_out: dict[int, int] = {}  # descriptor -> lines, since its reader stalled


# What steers a terminal, or turns the direction of the text, and what is no text: bytes of names
# that are not UTF-8.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def shown(text: str) -> str:
    r"""Return text as it can be shown anywhere: what is no text, and what steers a terminal, is
    escaped (\x1b). Names of files, classes and tensors, and values of configurations, may be
    anyone's.
    """
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """Write lines, as `shown`, to standard output and flush.

    A reader that has gone, such as the `tee` of a pipe or horovodrun, is not what a run is for:
    it continues without output, after one line on standard error.
    """
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        discard(sys.stdout)
        complain("hvdtrain: nothing reads standard output any more: continuing without it")


def complain(text: str) -> None:
    """Write lines, as `shown`, to standard error and flush; a failed write is ignored."""
    try:
        _write(sys.stderr, text)
    except OSError:
        discard(sys.stderr)


def _write(stream: TextIO | None, text: str) -> None:
    """Write lines and flush. Nothing is written to a stream that was closed before the start."""
    if stream is None:
        return
    text = shown(text)
    blocks = _blocks(stream)
    if blocks:
        stream.write(text + "\n")
    stream.flush()
    if not blocks:  # Python's streams would lose what is not accepted at once
        write_all(stream.fileno(), f"{text}\n".encode(stream.encoding, stream.errors or "strict"))


def _blocks(stream: TextIO) -> bool:
    try:
        return not isinstance(stream, io.TextIOWrapper) or os.get_blocking(stream.fileno())
    except (AttributeError, OSError):  # Windows; a stream in memory, or one that is closed
        return True


def write_all(descriptor: int, data: bytes) -> None:
    """Write lines to a file that may not block: a program on the same terminal or pipe can set
    O_NONBLOCK for all. Raises OSError.

    A reader that accepts nothing is waited for up to STALL_S. The lines left out by then are
    counted, and their number is written as soon as the reader goes on.
    """
    missing = _left_out.pop(descriptor, 0)
    note = f"\n... {counted(missing, 'line')} not shown: nothing was read for {STALL_S:g} s\n"
    before = note.encode() if missing else b""
    if rest := _write_for(descriptor, before + data, 0.0 if missing else STALL_S):
        is_noted = len(rest) <= len(data)
        _left_out[descriptor] = rest.count(b"\n") if is_noted else missing + data.count(b"\n")


def _write_for(descriptor: int, data: bytes, limit_s: float) -> bytes:
    """Write until nothing has been accepted for `limit_s`; return the rest."""
    rest, accepts = memoryview(data), select.poll()
    accepts.register(descriptor, select.POLLOUT)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            if not accepts.poll(limit_s * 1000):
                break
    return bytes(rest)


def report_left_out() -> None:
    """Report on standard error how many lines standard output has not accepted by the end."""
    if missing := _left_out.get(1):
        complain(
            f"hvdtrain: {counted(missing, 'line')} not shown: standard output accepted nothing for "
            f"{STALL_S:g} s"
        )


def open_missing_streams() -> None:
    """Open the null device in place of standard streams that were closed before the start (`>&-`).

    Otherwise the next files to be opened would get their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def has_screen(stream: TextIO) -> bool:
    """Return whether a stream is a terminal whose lines can be drawn anew: not a dumb one, one
    without a size, or that of a notebook.
    """
    if not stream.isatty() or NOTEBOOK in os.environ:
        return False
    dumb = os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
    return not dumb and os.get_terminal_size(stream.fileno()).columns > 0


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python does not fail to flush it at exit."""
    with suppress(OSError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def counted(number: int, noun: str) -> str:
    """Return number and noun as text: '1 file', '2,000 files'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def few(items: Sequence[object], most: int = 4, separator: str = ", ") -> str:
    """Return the first items as text, and the number of the others: 'a, b, and 3 more'."""
    others = [f"and {len(items) - most:,} more"] if len(items) > most else []
    return separator.join([*map(str, items[:most]), *others])


def rate(number: float) -> str:
    """Return a rate as text, with at least two significant digits: '2,033', '4.2', '0.031'."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def duration(seconds: float) -> str:
    """Return a duration as text: '0:00:12'."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def moment(seconds: float | None = None) -> str:
    """Return a time, by default the current one, as text: '2025-01-31T12:00:00+00:00'."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))


_before = sys.excepthook


def report_uncaught() -> None:
    """Install a hook: an uncaught HvdtrainError prints one line and sets the exit code."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, HvdtrainError):
        _before(kind, error, trace)
        return
    frames = [(frame, Path(frame.filename)) for frame in traceback.extract_tb(trace)]
    here = Path(__file__).parent
    others = [
        (frame, path)
        for frame, path in frames
        if here not in path.parents and path.name != "contextlib.py"
    ]
    users = [frame for frame, path in others if "site-packages" not in path.parts]
    users = users or [frame for frame, _ in others]
    location = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    prefix = "hvdtrain" if isinstance(error, Stopped) else f"hvdtrain: error{location}"
    complain(f"{prefix}: {error}")
    Pulse.from_environment().end(error)
    raise SystemExit(error.exit_code)  # runs the exit handlers, then ends with this code
