"""Jobs that outlive their terminal: `hvdtrain launch --detach`, and the records by which `jobs`,
`attach`, `logs` and `stop` find them.

The record of a job is $XDG_STATE_HOME/hvdtrain/jobs/HOST/NAME.json. It identifies the launcher by
process id, time of start and boot of the machine, so that no other process is taken for it.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from hvdtrain.documents import check, parse_json, read_text
from hvdtrain.errors import EXIT_FAILED, UsageError, shell_code
from hvdtrain.files import candidates, open_bytes, open_kept, replace_file, why_not_written
from hvdtrain.launcher.logs import OUTPUT, Logs
from hvdtrain.launcher.processes import boot_id, send_signal, start_of
from hvdtrain.launcher.verdict import JobOutcome
from hvdtrain.log import complain, moment, say, write_all

LOCK = ".lock"
KEPT = 100  # records of jobs that have ended
MOST_SHOWN = 1 << 20  # bytes of the output of checks
POLL_S = 0.2
CTRL_C = (signal.SIGINT,)
KINDS = {"pid": int, "begin": int, "exit_code": (int,)}  # of the fields that hold no text


@dataclass(frozen=True)
class BackgroundJob:
    """The record of a job."""

    name: str
    command: str
    folder: str  # in which it was started
    logs: str
    begin: int  # bytes in the file of output, from earlier jobs
    pid: int  # of the launcher
    process_start: str
    boot: str
    started: str
    ended: str = ""
    exit_code: int | None = None  # None: it has not ended, or was killed
    verdict: str = ""

    @property
    def runs(self) -> bool:
        """Whether the launcher is there: the process that was recorded, not one with its number."""
        return (self.boot, self.process_start) == (boot_id(), start_of(self.pid))

    @property
    def state(self) -> str:
        """Return 'running', 'ended', or 'lost': gone without having recorded an end."""
        return "running" if self.runs else "lost" if self.exit_code is None else "ended"

    @property
    def output(self) -> Path:
        return Path(self.logs, OUTPUT)

    def describe(self) -> str:
        """Return the state in words, in one line."""
        if self.runs:
            return f"running since {self.started}"
        if self.exit_code is not None:
            reason = f": {self.verdict.splitlines()[0]}" if self.verdict else ""
            return f"ended with exit code {self.exit_code} at {self.ended}{reason}"
        if self.boot != boot_id():
            return f"lost: this machine has been restarted since {self.started}"
        return f"lost: its launcher (process {self.pid}) was killed, upon which its workers save"


def run_in_background(
    name: str, command: str, logs: Logs, work: Callable[[Callable[[], None]], JobOutcome]
) -> int:
    """Do `work` in a process of its own session, and return 0 once it reports that it is under way;
    its output so far is shown. If it ends before that, return its exit code.

    In the new process, return the exit code of the work. `work` receives the function by which to
    report, which also keeps the record of the job up to date.
    """
    with open_kept(logs.folder / OUTPUT) as output:
        begin = os.fstat(output.fileno()).st_size
        reader, writer = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, CTRL_C)  # until both can respond
        if child := os.fork():
            os.close(writer)
            return _await_start(child, reader, output.fileno(), begin)
        os.close(reader)
        _leave_terminal(output.fileno())
    record = _Record(*_register(name, command, logs.folder, begin), writer)
    outcome = JobOutcome(EXIT_FAILED)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
        outcome = work(lambda: record.report(logs.folder))
    except Exception as error:
        outcome = JobOutcome(getattr(error, "exit_code", EXIT_FAILED), str(error))
        raise
    finally:
        record.end(outcome)
    return outcome.exit_code


def _await_start(child: int, reader: int, output: int, begin: int) -> int:
    """Return as `run_in_background` does; the file `output` may have moved by then."""
    with os.fdopen(reader) as pipe:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CTRL_C)
            name = pipe.read()
        except KeyboardInterrupt:
            send_signal(signal.SIGINT, [child])
            name = pipe.read()
    if text := os.pread(output, MOST_SHOWN, begin).decode(errors="replace").rstrip("\n"):
        (say if name else complain)(text)
    if not name:
        return shell_code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say(
        f"hvdtrain launch: job {name} goes on in the background (process {child})\n"
        f"  hvdtrain attach {name}    shows its output until it ends\n"
        f"  hvdtrain stop {name}      lets it save and end"
    )
    return 0


def _leave_terminal(output: int) -> None:
    """Begin a session without a terminal, no input, and this file as output."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)


class _Record:
    """The record of the job of this process."""

    def __init__(self, job: BackgroundJob, before: BackgroundJob | None, writer: int) -> None:
        """`before`: the job whose record this one has replaced."""
        self._job, self._before, self._writer = job, before, writer
        self._has_started = False

    def report(self, logs: Path) -> None:
        """Report to the command that has started the job; record where its logs are by now."""
        if not self._has_started:
            self._has_started = True
            with suppress(OSError):  # killed in the meantime
                os.write(self._writer, self._job.name.encode())
            os.close(self._writer)
        if self._job.logs != (folder := str(logs.absolute())):
            self._write(logs=folder)

    def end(self, outcome: JobOutcome) -> None:
        """Record the end. A job that was never under way leaves the records as they were."""
        if self._has_started:
            self._write(exit_code=outcome.exit_code, verdict=outcome.text, ended=moment())
        elif self._before:
            self._write(**asdict(self._before))
        else:
            record_of(self._job.name).unlink(missing_ok=True)

    def _write(self, **changes: object) -> None:
        self._job = replace(self._job, **changes)  # type: ignore[arg-type]
        try:
            _write(self._job)
        except OSError as error:
            complain(f"hvdtrain launch: {record_of(self._job.name)}: not written: {error.strerror}")


def _register(
    name: str, command: str, logs: Path, begin: int
) -> tuple[BackgroundJob, BackgroundJob | None]:
    """Record this process as a job, under NAME, or NAME-2 and so on where another one runs. Return
    its record, and the one that it replaces.
    """
    path = record_of(name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.parent):
            records = ((each.name, _read(record_of(each.name))) for each in candidates(Path(name)))
            name, before = next(
                (free, before) for free, before in records if not before or not before.runs
            )
            job = BackgroundJob(
                name=name,
                command=command,
                folder=str(Path.cwd()),
                logs=str(logs.absolute()),
                begin=begin,
                pid=os.getpid(),
                process_start=start_of(os.getpid()),
                boot=boot_id(),
                started=moment(),
            )
            _write(job)
            for old in [job for job in list_jobs() if not job.runs][:-KEPT]:
                record_of(old.name).unlink(missing_ok=True)
            return job, before
    except OSError as error:
        reason = why_not_written(path, error)
        raise UsageError(
            f"--detach: {path.parent}, which lists jobs, cannot be written: {reason}. Or set "
            "XDG_STATE_HOME to another folder"
        ) from error


def record_of(name: str) -> Path:
    """Return the path of a job's record."""
    return jobs_folder() / f"{name}.json"


def jobs_folder() -> Path:
    """Return the folder of this machine's records: several may share a home folder. Raises
    UsageError for a user who has none.
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        base = state if state.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise UsageError("there is no home folder: set HOME, or XDG_STATE_HOME") from None
    return base / "hvdtrain" / "jobs" / socket.gethostname()


def list_jobs() -> list[BackgroundJob]:
    """Return this user's jobs on this machine, in the order in which they were started.

    Files that are no records are reported and left alone.
    """
    with suppress(OSError):
        jobs = [_read(path) for path in jobs_folder().glob("*.json")]
        return sorted((job for job in jobs if job), key=lambda job: (job.started, job.name))
    return []


def find_job(name: str) -> BackgroundJob:
    """Return the job of this name, or the only one whose name begins so. Raises UsageError."""
    jobs = {job.name: job for job in list_jobs()}
    names = [name] if name in jobs else [each for each in jobs if each.startswith(name)]
    if len(names) == 1:
        return jobs[names[0]]
    several = f"{name}: may be {', '.join(names)}: give the whole name"
    listed = f"this machine has {', '.join(jobs)}" if jobs else "this machine has none of yours"
    raise UsageError(several if names else f"{name}: no such job; {listed}")


def newest(job: BackgroundJob) -> BackgroundJob:
    """Return the present record of a job."""
    present = _read(record_of(job.name))
    return present if present and present.pid == job.pid else job


def follow(path: Path, begin: int, goes_on: Callable[[], bool]) -> None:
    """Write a file to standard output from a byte on, until it is at its end and nothing `goes_on`.

    A reader that has left (`| head`) ends this process, as it does `cat`.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        stream = open_bytes(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    with stream:
        stream.seek(begin)
        while True:
            is_last = not goes_on()  # before reading: what was written until then is read
            while block := stream.read(1 << 16):
                write_all(1, block)
            if is_last:
                return
            time.sleep(POLL_S)


def stop(job: BackgroundJob) -> BackgroundJob:
    """Ask a job to save and end, wait until it has ended, and return its record."""
    if job.runs:
        os.kill(job.pid, signal.SIGTERM)
    while job.runs:
        time.sleep(POLL_S)
    return newest(job)


def _write(job: BackgroundJob) -> None:
    replace_file(record_of(job.name), [json.dumps(asdict(job), indent=2), "\n"])


def _read(path: Path) -> BackgroundJob | None:
    """Return the job of a record; None if there is none, or, with a notice, if it is damaged."""
    names = [field.name for field in fields(BackgroundJob)]
    try:
        content = parse_json(read_text(path))
        check(content, {name: KINDS.get(name, str) for name in names})
        return BackgroundJob(**{name: content[name] for name in names})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError) as error:
        complain(f"hvdtrain: {path}: is not the record of a job: {error}")
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other starts of jobs from choosing a name within the context. Raises OSError."""
    import fcntl  # not on Windows, where `--help` imports this module

    with open_kept(folder / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
