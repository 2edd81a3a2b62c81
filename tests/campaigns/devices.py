"""Campaign: each place of the package that names a device is removed; the checks must find it.

    python -m tests.campaigns.devices [--only TEXT] [--unknown] [--list]

A mutant is the package without one `.to(device)`, `.cpu()`, `device=`, `map_location=`, move of a
batch or of a state, or wait for the device. It is found if a check of tests/device fails with
it. Those of EQUIVALENT change nothing, for the reason that stands there; all others must be found.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.device.jobs import of_two_workers, problem_of
from tests.device.together import EXPERIMENTS, MESSAGES
from tests.parallel.launching import BIN, CHECKOUT

PACKAGE = CHECKOUT / "hvdtrain"
ROOMS = ("train", "run", "exchange", "audit", "data", "models", "tasks", "weights")
# What `.to(...)` is given where it names a device; all else is a type.
IS_DEVICE = re.compile(r"device\b|\bCPU\b|'cpu'|^\(inputs\)$")
WAITS = ("synchronize", "wait_event")
HOROVODS = ("(hvd)", "(optimizer)", "(self._reducer)")  # they wait for the exchange
TIMEOUT_S = 180
FORKED = multiprocessing.get_context("forkserver")
AFTERWARDS = ("two_workers",)  # `tests.device.alone`, which imports the package, has them too
AT_ONCE = 2
# The name of a mutant, as --list prints it, and why no check can find it.
EQUIVALENT = {
    "exchange/gpus.py: torch.accelerator.synchronize(device)": (
        "the device for tests computes at once"
    ),
    "exchange/prove.py: torch.arange(1000, dtype=torch.float64, device=device)": (
        "runs only where Horovod has operations for GPUs, which it has not on a machine without"
    ),
    "run/balance.py: torch.accelerator.synchronize(job.device)": (
        "the device for tests computes at once, and speeds alone would change"
    ),
    "run/micro_batch.py: torch.accelerator.synchronize(job.device)": (
        "the device for tests computes at once"
    ),
    "train/built.py: values[name].cpu()": (
        "a model of this rank takes the values, from whichever device"
    ),
    "train/devices.py: beside.wait_event(ready)": (
        "the device for tests computes at once, in one stream"
    ),
    "train/checkpoint.py: torch.load(path / STATE_FILE, map_location='cpu', weights_only=True)": (
        "a checkpoint has no tensor of a device, which check_plain and check_own_loop see to"
    ),
}


@dataclass(frozen=True)
class Mutant:
    """The package without one expression."""

    path: Path  # in the package
    line: int
    start: int  # in the bytes of the file
    stop: int
    before: str
    after: str
    number: int = 1  # of those with the same text in the file

    @property
    def name(self) -> str:
        """Return a name that stays when lines move."""
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.path}: {self.before}{again}"

    def write(self, folder: Path) -> None:
        """Write the mutated package to `folder`."""
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pyc*"))
        target = folder / PACKAGE.name / self.path
        source = target.read_bytes()
        target.write_bytes(source[: self.start] + self.after.encode() + source[self.stop :])


def mutants() -> list[Mutant]:
    """Return all mutants, by file and line."""
    found: list[Mutant] = []
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            seen: Counter[str] = Counter()
            for mutant in sorted(_mutants_of(path), key=lambda it: (it.start, it.stop)):
                seen[mutant.before] += 1
                found.append(Mutant(**{**vars(mutant), "number": seen[mutant.before]}))
    return found


def _mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        for after in _without(node):
            start = lines[node.lineno - 1] + node.col_offset
            stop = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = ast.unparse(node)
            yield Mutant(path.relative_to(PACKAGE), node.lineno, start, stop, before, after)


def _without(call: ast.Call) -> Iterator[str]:
    """Yield the texts that stand in place of a call without what it says of a device."""
    function, name = call.func, ""
    value = ""
    if isinstance(function, ast.Attribute):
        name, value = function.attr, f"({ast.unparse(function.value)})"
    elif isinstance(function, ast.Name):
        name = function.id
    first = f"({ast.unparse(call.args[0])})" if call.args else ""
    if name == "to" and value and IS_DEVICE.search(first):
        copies = any(it.arg == "copy" for it in call.keywords)
        yield f"{value}.clone()" if copies else value
    elif name == "cpu" and not call.args:
        yield value
    elif name == "on" and first:
        yield f"{value}.on()"
    elif name in ("to_device", "copied_to_cpu"):
        yield first
    elif name == "pin_memory":
        yield value
    elif name == "move_state" or (name in WAITS and value not in ("", *HOROVODS)):
        yield "None"
    for keyword in call.keywords:
        if keyword.arg in ("device", "map_location") and name != "Job":  # which demands it
            kept = [it for it in call.keywords if it is not keyword]
            yield ast.unparse(ast.Call(call.func, call.args, kept))


def finding_of(mutant: Mutant) -> str | None:
    """Return what finds a mutant; None if nothing does."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-mutant-") as name:
        folder, runs = Path(name) / "package", Path(name) / "runs"
        runs.mkdir()
        mutant.write(folder)
        if found := _alone(folder, runs):
            return f"alone: {found}"
        for command in of_two_workers(runs):
            if found := _together(folder, runs, command):
                return f"two workers: {found}"
        found = _alone(folder, runs, *AFTERWARDS)
        return found and f"afterwards: {found}"


def _alone(folder: Path, runs: Path, *names: str) -> str | None:
    """Return what the checks of one process find, in a process of its own."""
    from tests.device.preloaded import run_alone  # which has the device for tests in torch

    printed = runs.parent / "printed"
    process = FORKED.Process(target=run_alone, args=(folder, runs, printed, list(names)))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        return "does not end"
    return _cause(runs, printed.read_text()) if process.exitcode else None


def _together(folder: Path, runs: Path, command: list[str]) -> str | None:
    """Return what a job of two workers finds."""
    variables = {"PYTHONPATH": f"{folder}{os.pathsep}{CHECKOUT}", "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    options = {"cwd": folder, "env": os.environ | variables, "timeout": TIMEOUT_S}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode:
        return _cause(runs, done.stdout + done.stderr)
    for experiment in EXPERIMENTS:
        if problem := problem_of(experiment, runs, MESSAGES):
            return f"{experiment}: {_last_line(problem)}"
    return None


def _cause(runs: Path, printed: str) -> str:
    for file in runs.glob("*.json"):
        printed += file.read_text().replace("\\n", "\n")
    is_cause = re.compile(r"^(?!.*Horovod detected).*\w(Error|Mismatch)\b")
    lines = [it for it in printed.splitlines() if is_cause.search(it)]
    return _last_line("\n".join(lines) or printed)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:160] if text.strip() else ""


def reason_for(mutant: Mutant) -> str | None:
    """Return why a mutant changes nothing; None if it is not known to."""
    return EQUIVALENT.get(mutant.name)


def main() -> int:
    """Run the campaign; return 1 if a mutant was missed, or a reason has no mutant."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--unknown", action="store_true", help="leave those of EQUIVALENT out")
    parser.add_argument("--list", action="store_true", help="print the mutants alone")
    arguments = parser.parse_args()
    every = mutants()
    chosen = [it for it in every if arguments.only in it.name]
    if arguments.unknown:
        chosen = [it for it in chosen if not reason_for(it)]
    if arguments.list:
        print(*(it.name for it in chosen), sep="\n")
        return 0
    FORKED.set_forkserver_preload(["tests.device.preloaded"])
    began_s, counts = time.monotonic(), Counter[str]()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, found in zip(chosen, pool.map(finding_of, chosen), strict=True):
            reason = reason_for(mutant)
            verdict = "found" if found else "equivalent" if reason else "MISSED"
            counts[verdict] += 1
            print(f"{verdict}: {mutant.name}\n    {found or reason or ''}", flush=True)
    stale = sorted(EQUIVALENT.keys() - {it.name for it in every})
    print(*(f"no such mutant: {it}" for it in stale), sep="\n" if stale else "")
    print(f"{len(chosen)} mutants, {dict(counts)}, {time.monotonic() - began_s:.0f} s")
    return int(bool(counts["MISSED"] or stale))


if __name__ == "__main__":
    sys.exit(main())
