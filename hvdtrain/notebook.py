"""Workers started from Python or a notebook: `launch` calls a function on each of them.

    accuracies = hvdtrain.launch(train, args=(0.01,), np=2)

Each worker is a fresh process of this module: it reads the call, which is pickled by value, from a
folder, and leaves its result, or the report of its failure, there.
"""

import io
import json
import linecache
import math
import os
import pickle
import sys
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from hvdtrain.cli.flags import CONTROLLERS
from hvdtrain.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_USAGE,
    HvdtrainError,
    PeerFailure,
    PreflightError,
    TrainingError,
    UsageError,
    every_problem,
    refuse,
)
from hvdtrain.evidence.children import CommandProcess, wait_while
from hvdtrain.evidence.trials import scratch_folder
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import OF_PYTHON, search_path
from hvdtrain.launcher.logs import ArrivingLine
from hvdtrain.launcher.ranks import STOP_WITHIN_S
from hvdtrain.log import say
from hvdtrain.pulse import COMMAND, Pulse, stop_within_s
from hvdtrain.run.process import observers_of_failure
from hvdtrain.topology import Topology

IN_WORKER = "HVDTRAIN_IN_FUNCTION"  # set in each worker
CALL, LOG = "call.pickle", "output.log"
MESSAGES = ("hvdtrain launch: ", "hvdtrain: error")  # the beginnings of those of the launcher
ENDED = "the worker has ended without a result, with exit code"
ROUND_S = 0.1
STOP_MORE_S = 15.0  # than `hvdtrain launch` gives workers to save and end
Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    controller: str = "auto",
    timeout_s: float | None = None,
) -> list[Result]:
    """Call `function` in `np` fresh processes of this machine; return their results in rank order.

    The processes are the workers of one job, as those of `hvdtrain launch`, so the function may use
    `hvdtrain.Loop`, or `hvdtrain.init` and `hvdtrain.distribute`. A single one needs no Horovod.
    Function, arguments and results travel by cloudpickle: functions of a notebook or of the main
    script are sent with what they refer to, those of other modules are imported. Lines that a
    worker prints are printed here, with several workers after its rank: `[1] step 10`.

    `controller`: gloo, mpi, or auto. `timeout_s`: the longest time until all results are there.
    Raises UsageError for arguments that cannot be used, and within a worker; PreflightError if the
    workers cannot be started; and TrainingError, with the rank and the traceback of the worker,
    for an exception in the function, for a result that cannot be pickled, and after `timeout_s`.
    However this call is left, by Ctrl-C too, the workers are asked to stop, as by SIGTERM, and
    none of them is left behind.
    """
    kwargs = {} if kwargs is None else kwargs
    refuse(
        f"hvdtrain.launch: {problem}"
        for problem in _problems(function, args, kwargs, np, controller, timeout_s)
    )
    from hvdtrain.run import script

    if script.loops.direction is not None:  # `replay` or `evaluate` runs the script's loop itself
        return [function(*args, **kwargs)]
    call = _pickle_call(function, args, kwargs, np)
    with scratch_folder("launch") as folder:
        (folder / CALL).write_bytes(call)
        _run_workers(folder, np, controller, timeout_s)
        return [_result_of(rank, folder) for rank in range(np)]


def _problems(
    function: object,
    args: object,
    kwargs: object,
    np: object,
    controller: object,
    timeout_s: object,
) -> list[str]:
    """Return what is wrong with the arguments of `launch`, and with the process that calls it."""
    if IN_WORKER in os.environ or Topology.from_environment().launched:
        return [
            "this process is a worker itself: call it in the script or notebook that starts the "
            "workers, and start that without a launcher"
        ]
    is_time = isinstance(timeout_s, int | float) and timeout_s > 0
    return every_problem(
        (not callable(function), f"function={function!r:.60}: must be callable"),
        (not isinstance(args, tuple | list), f"args={args!r:.60}: must be a tuple or a list"),
        (not isinstance(kwargs, Mapping), f"kwargs={kwargs!r:.60}: must be a dict"),
        (type(np) is not int or np < 1, f"np={np!r:.60}: must be a whole number, at least 1"),
        (
            controller not in CONTROLLERS,
            f"controller={controller!r:.60}: choose from {', '.join(CONTROLLERS)}",
        ),
        (
            timeout_s is not None and not is_time,
            f"timeout_s={timeout_s!r:.60}: must be a number of seconds above 0, or None",
        ),
    )


def _pickle_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], np: int
) -> bytes:
    """Return what a worker needs: the call and, to be set before it is read, Python's path, the
    command line, which names runs, and the source of cells, for tracebacks. Raises UsageError.
    """
    name = getattr(function, "__name__", type(function).__name__)
    call = io.BytesIO()
    try:
        Pickler(call).dump((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise UsageError(
            f"hvdtrain.launch: {name}, its arguments, or what it refers to cannot be pickled "
            f"({type(error).__name__}: {error}): make such objects within the function"
        ) from None
    is_script = hasattr(sys.modules["__main__"], "__file__")
    argv = [*sys.argv] if is_script else [name if name.isidentifier() else "function"]
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 ("" is the folder)
    cells = {file: entry for file, entry in linecache.cache.items() if entry[1:2] == (None,)}
    return pickle.dumps((paths, argv, f"hvdtrain.launch({name}, np={np})", cells, call.getvalue()))


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, values = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return _make_code, (make, values, code.co_filename)


def _make_code(make: Callable[..., CodeType], values: tuple[Any, ...], file: str) -> CodeType:
    return make(*values).replace(co_filename=file)


class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """A pickler by value that keeps the name of the file of code, for tracebacks."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table
    )


def _run_workers(folder: Path, np: int, controller: str, timeout_s: float | None) -> None:
    """Run the workers to their end, and print their lines. Raises an error for a failure."""
    argv, outputs = [*module_argv(__name__), str(folder)], [WorkerOutput(folder / LOG)]
    if np > 1:
        flags = ["-np", str(np), "-H", f"localhost:{np}", "--controller", controller]
        flags += ["--log-dir", str(folder)]
        argv = [*module_argv("hvdtrain.cli"), "launch", *flags, "--", *argv]
        width = len(str(np - 1))
        outputs = [WorkerOutput(folder / f"rank.{n}.log", f"[{n:{width}}] ") for n in range(np)]
    environment = {**OF_PYTHON, **os.environ, "PATH": search_path(os.environ), IN_WORKER: "1"}
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    child = CommandProcess(argv, folder / LOG, environment)
    try:
        while child.exit_code() is None:
            if time.monotonic() > deadline:
                raise TrainingError(f"hvdtrain.launch: no end after {timeout_s:g} s (timeout_s)")
            for output in outputs:
                output.show()
            time.sleep(ROUND_S)
    finally:
        _stop(child)
        for output in outputs:
            output.show(to_end=True)
    if child.exit_code():
        raise _failure_of(child.exit_code() or EXIT_FAILED, folder)


def _failure_of(exit_code: int, folder: Path) -> HvdtrainError:
    """Return the first failure that a worker has reported; if none has, the verdict of `hvdtrain
    launch`, or the exit code of a single worker.
    """
    reports = [json.loads(path.read_text("utf-8")) for path in folder.glob("failure-*.json")]
    if reports:
        first = min(reports, key=lambda report: report["failed_at"])
        return TrainingError(f"hvdtrain.launch: {first['error']}")
    lines = (folder / LOG).read_text("utf-8", errors="replace").splitlines()
    lines = [line for line in lines if str(folder) not in line]  # which is removed
    starts = [n for n, line in enumerate(lines) if line.startswith(MESSAGES)]
    verdict = "\n".join(lines[starts[-1] :] if starts else [f"{ENDED} {exit_code}"])
    kinds = {EXIT_USAGE: UsageError, EXIT_PREFLIGHT: PreflightError}
    kind = kinds.get(exit_code, TrainingError) if starts else TrainingError
    return kind(f"hvdtrain.launch: {verdict.removeprefix(MESSAGES[0])}")


def _stop(child: CommandProcess) -> None:
    """Ask the workers to stop, if any is left; end those that have not ended in time."""
    try:
        child.ask_to_stop()
        limit_s = (stop_within_s() or STOP_WITHIN_S) + STOP_MORE_S
        wait_while(lambda: child.exit_code() is None, limit_s)
    finally:  # at once after a second Ctrl-C
        child.end()


class WorkerOutput:
    """The output of a worker, read from a file that grows."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path, self._prefix = path, prefix
        self._offset, self._line = 0, ArrivingLine()

    def show(self, to_end: bool = False) -> None:
        """Print the lines that were completed since the last call; `to_end`: the rest too."""
        for line in self._new_lines(to_end):
            say(self._prefix + line)

    def _new_lines(self, to_end: bool) -> Iterator[str]:
        data = b""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *pieces, rest = data.decode("utf-8", "surrogateescape").split("\n")
        yield from map(self._line.end, pieces)
        self._line.add(rest)
        if to_end and (last := self._line.end()):
            yield last


def _result_of(rank: int, folder: Path) -> Any:
    path = folder / f"result-{rank}.pickle"
    if not path.exists():
        raise TrainingError(f"hvdtrain.launch: rank {rank}: {ENDED} 0")
    return pickle.loads(path.read_bytes())


def main(folder: Path) -> int:
    """Call the function on this worker; return the exit code."""
    rank = Topology.from_environment().rank
    report = partial(_report, rank, folder / f"failure-{rank}.json")
    observers_of_failure.append(report)  # a loop of several workers ends the process itself
    try:
        content = pickle.loads((folder / CALL).read_bytes())
        sys.path[:], sys.argv[:], os.environ[COMMAND], cells, call = content
        linecache.cache.update(cells)
        function, args, kwargs = pickle.loads(call)
        _keep_result(function(*args, **kwargs), folder / f"result-{rank}.pickle")
    except BaseException as error:  # SystemExit too, which has no result
        if isinstance(error, Exception):
            Pulse.from_environment().end(error)
        report(error)
        return getattr(error, "exit_code", EXIT_FAILED)
    return EXIT_OK


def _report(rank: int, path: Path, error: BaseException) -> None:
    """Write the failure of this worker to a file, unless its cause is with another rank."""
    if isinstance(error, PeerFailure):
        return
    lines = traceback.format_exception(error)
    frame_of_main = f'File "{__file__}", line '
    text = "".join(line for line in lines if frame_of_main not in line).rstrip()
    content = {"error": f"rank {rank} failed:\n{text}", "failed_at": time.time()}
    path.write_text(json.dumps(content), "utf-8")


def _keep_result(result: object, path: Path) -> None:
    """Write the result of this worker. Raises UsageError."""
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:
        raise UsageError(
            f"the result, of type {type(result).__name__}, cannot be pickled "
            f"({type(error).__name__}: {error}): return numbers, texts, tensors or a state_dict()"
        ) from None
    path.write_bytes(data)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
