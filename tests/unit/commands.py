"""`hvdtrain` in processes of their own, forked from one that has imported torch already.

A start takes a tenth of a second instead of three. Each pytest process has one such server:

    pytest --request, a line of JSON--> server --fork--> process with its own folder and output
           <--pid, then exit code------        <--exit--
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import hvdtrain

ROOT = Path(hvdtrain.__file__).parents[1]
LAUNCHED = ("HOROVOD_", "OMPI_", "PMIX_")  # what a launcher leaves to its workers
CALL = "import sys; from hvdtrain.cli import main; sys.exit(main())"
SERVER = """
import atexit, gc, json, os, sys, threading, warnings
import PIL.Image, sklearn.datasets, tensorboard.summary.writer.event_file_writer
import hvdtrain.run.prediction, hvdtrain.run.training, hvdtrain.train.loop, hvdtrain.weights.export
from hvdtrain.data.builtin import import_torchvision
import_torchvision()
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate([os.devnull, *request["files"]]):
    os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), number)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.modules.update(dict.fromkeys(request["absent"]))
warnings.simplefilter("error", UserWarning)
sys.argv = ["-c", *request["arguments"]]
code = 0
try:
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as ended:
    code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if code and not isinstance(ended.code, int):
        print(ended.code, file=sys.stderr)
except BaseException:
    code = 1
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as for -c
    sys.excepthook(*sys.exc_info())
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # at once: to take all modules apart would last a second
"""


def environment() -> dict[str, str]:
    """Return this process's environment, without what a launcher leaves to its workers."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHED)}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}


def command(*arguments: object) -> list[str]:
    """Return the command line of a process that is started as usual."""
    return [sys.executable, "-c", CALL, *map(str, arguments)]


def run(
    folder: Path,
    *arguments: object,
    absent: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `hvdtrain ARGUMENTS` in `folder`, without the modules in `absent`."""
    return run_code(CALL, folder, *arguments, absent=absent, variables=variables)


def run_code(
    code: str,
    folder: Path,
    *arguments: object,
    absent: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS` in `folder`, without the modules in `absent`."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        request = {
            "code": code,
            "arguments": words,
            "folder": str(folder),
            "files": [str(file) for file in files],
            "environment": environment() | dict(variables or {}),
            "absent": absent,
        }
        code = _ask(json.dumps(request), timeout_s)
        out, err = (file.read_text(errors="replace") for file in files)
    return subprocess.CompletedProcess(["-c", *words], code, out, err)


@cache
def _server() -> subprocess.Popen[bytes]:
    python = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # Unbuffered: a buffer could hold the second line already while the pipe is waited on.
    server = subprocess.Popen(python, cwd="/", env=environment(), bufsize=0, **pipes)  # type: ignore[call-overload]

    def end() -> None:  # not by the end of its input, which another child may hold open
        server.kill()
        server.communicate()

    atexit.register(end)
    return server  # type: ignore[no-any-return]


def _ask(request: str, timeout_s: float) -> int:
    server = _server()
    server.stdin.write(request.encode() + b"\n")
    child = int(server.stdout.readline())
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_s):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(child, signal.SIGKILL)
            server.stdout.readline()
            raise AssertionError(f"no end after {timeout_s} s: {request}")
    return int(server.stdout.readline())
