"""`launch/cluster`: container hosts on this machine, used like real hosts.

up      image (built if missing) ── Compose ──┬─ keys: makes the key pair, in a volume
                                              └─ worker 1 .. H: an sshd each, internal network
run     another container beside them: `hvdtrain launch` with the cluster's hostfile
down    runs are copied to runs/, then containers and volumes are removed
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cgroups import usable_cores
from hvdtrain.errors import EXIT_OK, HvdtrainError, PreflightError, UsageError
from hvdtrain.launcher.hosts import parse_hostfile
from hvdtrain.log import complain, counted, say
from launch.containers.cluster_keys import PORT
from launch.containers.engine import Engine, EngineError, launcher_argv
from launch.containers.image import ensure_image

COMMANDS = ("up", "run", "doctor", "logs", "down")
HOME = "/home/hvdtrain"
RUNS = f"{HOME}/runs"
HOSTFILE = "/etc/mpi/hostfile"  # where `hvdtrain launch` and `doctor` look by default
START_S = 60.0
STOP_S = 60
MOST_HOSTS, MOST_SLOTS = 64, 256
SHOWN_LINES = "20"
SHOW_LOGS = """\
import pathlib, subprocess, sys
found = sorted(pathlib.Path(sys.argv[1]).glob("*/logs"), key=lambda path: path.stat().st_mtime)
files = sorted(map(str, found[-1].iterdir())) if found else sys.exit("no run has logs yet")
sys.exit(subprocess.run(["tail", "-n", sys.argv[2], "-v", *files]).returncode)
"""


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = _parse(sys.argv[1:])
    root = Path(arguments.root).resolve()
    engine = Engine(arguments.name, root / "docker" / "compose.yaml")
    try:
        _check_name(arguments.name)
        options = _parse_up(arguments.rest) if arguments.command == "up" else None
        engine.check()
        if arguments.command in ("up", "down"):
            engine.check_ours()
        if options:
            up(engine, root, options)
        elif arguments.command == "down":
            down(engine, _destination(root, arguments.rest))
        elif arguments.command == "logs":
            logs(engine)
        else:
            command = {"run": "launch"}.get(arguments.command, arguments.command)
            start_beside(engine, ["hvdtrain", command, *arguments.rest])
    except HvdtrainError as error:
        complain(f"cluster: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        complain("cluster: interrupted; ./launch/cluster down removes what is there")
        return 130
    return EXIT_OK


def up(engine: Engine, root: Path, options: argparse.Namespace) -> None:
    """Start the hosts, or change them to the new options, and wait until they answer."""
    image = options.image or ensure_image(engine, root)
    variables = {"HVDTRAIN_IMAGE": image}
    if options.data:
        variables["HVDTRAIN_DATA"] = str(options.data.resolve())
    if options.output == "separate":
        variables["HVDTRAIN_RUNS"] = RUNS  # an anonymous volume: one for each container
    started = time.monotonic()
    # Of a single host it is not known whether its runs are its own.
    is_single = len(engine.workers(running=False)) == 1
    engine.up(options.hosts, variables, not is_single and len(_with_own_runs(engine)) < 2)
    workers = [_plain_name(engine, worker) for worker in engine.workers()]
    _wait_until_they_answer(engine, workers)
    lines = "".join(f"{name} slots={options.slots}\n" for name in workers)
    engine.capture("exec", "--interactive", workers[0], "tee", HOSTFILE, stdin=lines)
    say(
        f"cluster: {counted(len(workers), 'host')} with {options.slots} slots each answer after "
        f"{time.monotonic() - started:.0f} s: {', '.join(workers)}"
    )


def start_beside(engine: Engine, command: Sequence[str], running: bool = True) -> None:
    """Replace this process by a container beside the hosts that runs a command; never return."""
    worker = _workers(engine, running)[0]
    image = engine.capture("inspect", "--format", "{{.Config.Image}}", worker).strip()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    hostfile = engine.capture("exec", worker, "cat", HOSTFILE) if running else ""
    threads = compute_threads(hostfile, usable_cores())
    argv = launcher_argv(engine.cluster, worker, image, command, terminal, threads)
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def compute_threads(hostfile: str, cores: int) -> int:
    """Return the threads per worker: each host sees all cores of the machine, which they share."""
    hosts = parse_hostfile(hostfile, Path(HOSTFILE)) if hostfile else ()
    return max(1, cores // max(1, sum(host.slots for host in hosts)))


def logs(engine: Engine) -> None:
    """Print the end of each sshd's log and of each log of the newest run; never return."""
    for worker in _workers(engine, running=False):
        say(f"==> sshd of {worker} <==")
        say(engine.logs(worker, SHOWN_LINES))
    start_beside(engine, ["python", "-c", SHOW_LOGS, RUNS, SHOWN_LINES], running=False)


def down(engine: Engine, destination: Path | None) -> None:
    """Stop jobs (they save), copy the runs to `destination`, and remove the cluster."""
    _stop_jobs(engine)
    if destination:
        for worker in _with_own_runs(engine):
            _copy_runs(engine, worker, destination)
    engine.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
    say(f"cluster: {engine.cluster} is down; its containers and volumes are removed")


def _stop_jobs(engine: Engine) -> None:
    launchers = engine.launchers()
    if not launchers:
        return
    try:
        engine.capture("stop", "--time", str(STOP_S), *launchers)
    except EngineError:
        if engine.launchers(running=True):  # otherwise one ended by itself meanwhile
            raise


def _with_own_runs(engine: Engine) -> list[str]:
    """Return one worker for each volume of runs: all workers share one, or each has its own."""
    template = f'{{{{range .Mounts}}}}{{{{if eq .Destination "{RUNS}"}}}}{{{{.Source}}}}'
    owners: dict[str, str] = {}
    for worker in engine.workers(running=False):
        volume = engine.capture("inspect", "--format", f"{template}{{{{end}}}}{{{{end}}}}", worker)
        owners.setdefault(volume.strip(), worker)
    return list(owners.values())


def _copy_runs(engine: Engine, worker: str, destination: Path) -> None:
    """Copy each run under a free name; existing runs are never changed."""
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination, prefix=".from-cluster-") as scratch:
            engine.capture("cp", f"{worker}:{RUNS}/.", scratch)
            for run in sorted(Path(scratch).iterdir()):
                target = _free(destination / run.name)
                run.rename(target)
                say(f"cluster: copied {run.name} to {os.path.relpath(target)}")
    except OSError as error:
        raise PreflightError(
            f"the runs cannot be copied to {destination}: {error.strerror or error}. Nothing was "
            "removed; choose a writable folder by --output, or use --discard"
        ) from error


def _free(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _workers(engine: Engine, running: bool) -> list[str]:
    workers = engine.workers(running)
    if not workers:
        raise PreflightError(
            f"there is no cluster {engine.cluster!r} here: start it with ./launch/cluster up"
        )
    return workers


def _plain_name(engine: Engine, worker: str) -> str:
    """Rename a worker: docker-compose 1 uses underscores, which Open MPI rejects in host names."""
    if "_" not in worker:
        return worker
    engine.capture("rename", worker, plain := worker.replace("_", "-"))
    return plain


def _wait_until_they_answer(engine: Engine, workers: Sequence[str]) -> None:
    deadline = time.monotonic() + START_S
    scan = ["exec", workers[0], "ssh-keyscan", "-t", "ed25519", "-T", "3"]
    scan += ["-p", str(PORT), *workers]
    while True:
        try:
            answers = engine.capture(*scan)
        except EngineError as error:  # for example, the first worker has ended
            answers, problem = "", str(error)
        silent = [name for name in workers if f"[{name}]:{PORT} " not in answers]
        if not silent:
            return
        if time.monotonic() > deadline:
            last = engine.logs(silent[0], SHOWN_LINES)
            raise PreflightError(
                f"no sshd answers on {', '.join(silent)} after {START_S:.0f} s"
                + (f" ({problem})" if not answers else "")
                + f"; the log of {silent[0]}:\n{last}"
            )
        time.sleep(0.3)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise UsageError(
            f"--name={name}: must consist of a-z, 0-9, - and _, and begin with a letter or digit"
        )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/cluster",
        usage="launch/cluster [--name NAME] up|run|doctor|logs|down [...]",
        description="Run a cluster of containers on this machine.",
        allow_abbrev=False,
        epilog="run takes the flags of `hvdtrain launch`: run -np 6 --controller mpi -- train ...; "
        "doctor those of `hvdtrain doctor`; for up and down see their --help.",
    )
    parser.add_argument("--root", default=".", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="hvdtrain", help="name of the cluster (%(default)s)")
    parser.add_argument("command", choices=COMMANDS)
    ours, rest = _split(argv)
    arguments = parser.parse_args(ours)
    arguments.rest = rest
    return arguments


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments after the command: argparse would drop a `--` of the command's own."""
    for i, word in enumerate(argv):
        if word in COMMANDS and (i == 0 or argv[i - 1] not in ("--name", "--root")):
            return argv[: i + 1], argv[i + 1 :]
    return argv, []


def _parse_up(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/cluster up")
    parser.add_argument("--hosts", type=int, default=3, metavar="H", help="start H hosts (3)")
    parser.add_argument("--slots", type=int, default=1, metavar="S", help="workers per host (1)")
    parser.add_argument("--image", help="use this image (default: built from this checkout)")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help=f"mount DIR at {HOME}/data, read-only"
    )
    parser.add_argument(
        "--output",
        choices=("shared", "separate"),
        default="shared",
        help="keep the runs in one volume for all hosts, or in one for each host (shared)",
    )
    options = parser.parse_args(argv)
    limits = {"--hosts": (options.hosts, MOST_HOSTS), "--slots": (options.slots, MOST_SLOTS)}
    problems = [
        f"{flag}={value}: must be from 1 to {most}"
        for flag, (value, most) in limits.items()
        if not 1 <= value <= most
    ]
    if options.data and not options.data.is_dir():
        problems.append(f"--data={options.data}: there is no such folder")
    if problems:
        raise UsageError(*problems)
    return options


def _destination(root: Path, argv: Sequence[str]) -> Path | None:
    parser = argparse.ArgumentParser(prog="launch/cluster down")
    parser.add_argument(
        "--output", type=Path, default=root / "runs", metavar="DIR", help="copy runs to DIR (runs)"
    )
    parser.add_argument("--discard", action="store_true", help="remove the runs, copy nothing")
    options = parser.parse_args(argv)
    return None if options.discard else options.output


if __name__ == "__main__":
    sys.exit(main())
