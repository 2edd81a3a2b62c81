"""The origin of a run: time, hosts, command, and the revision of the user's code; the machine and
the software, which are compared on resume.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hvdtrain import __version__
from hvdtrain.config.plugins import is_plugin
from hvdtrain.log import moment
from hvdtrain.pulse import COMMAND
from hvdtrain.train.devices import describe

GIT_LIMIT_S = 5.0  # for each call: on a network disk, git may take long to examine a large tree


def provenance(
    code: Iterable[str | Path | None], hosts: Sequence[str], command: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of the summary that describe this start of a run.

    `code`: names of user code, as given to --task, --model and --data, or the file of a script.
    `hosts`: the host of each rank. `command`: that of this process, recorded where the launcher has
    not given its own.
    """
    return {
        "started": moment(),
        "ended": None,
        "hosts": ranks_by_host(hosts),
        "command": os.environ.get(COMMAND) or shlex.join(command),
        "git": code_revision(code),
    }


def ranks_by_host(hosts: Sequence[str]) -> dict[str, str]:
    """Return the ranks of each host as text: {"alpha": "0-3", "beta": "4-6,9"}."""
    ranges_by_host: dict[str, list[list[int]]] = {}
    for rank, host in enumerate(hosts):
        ranges = ranges_by_host.setdefault(host, [])
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return {
        host: ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
        for host, ranges in ranges_by_host.items()
    }


def code_revision(code: Iterable[str | Path | None]) -> dict[str, Any] | None:
    """Return the git work tree of the user's code, its revision, and whether that is all of it.

    The code is the first file whose folder is in a work tree, else the current folder. None if
    there is no work tree with a commit, or no git.
    """
    files = [_file_of(name) for name in code if name]
    for file in (*filter(None, files), None):
        folder = file.parent if file else Path.cwd()
        lines = (_git(folder, "rev-parse", "--show-toplevel", "HEAD") or "").splitlines()
        if len(lines) == 2:
            return {
                "folder": lines[0],
                "revision": lines[1],
                "uncommitted": _is_changed(Path(lines[0]), file),
            }
    return None


def _is_changed(tree: Path, file: Path | None) -> bool | None:
    """Return whether tracked files differ from the revision, or the file is not tracked;
    None if git did not answer in time.

    Other untracked files do not count: the folder of runs often stands in the work tree.
    """
    changes = _git(tree, "status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return None
    return bool(changes) or (file is not None and not _git(tree, "ls-files", "--", str(file)))


def _file_of(code: str | Path) -> Path | None:
    if isinstance(code, Path):
        return code.resolve()
    if not is_plugin(code):
        return None
    module = code.partition(":")[0]
    name = getattr(sys.modules.get(module), "__file__", None)
    if name is None:
        with suppress(ImportError, AttributeError, ValueError):
            spec = importlib.util.find_spec(module)
            name = spec.origin if spec else None
    path = Path(name).resolve() if name else None
    return path if path and path.is_file() else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command that changes nothing; None if it failed."""
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=GIT_LIMIT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of hvdtrain, Python and the libraries that compute and exchange."""
    by_package = {
        "hvdtrain": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for package in ("horovod", "mpi4py"):
        with suppress(importlib.metadata.PackageNotFoundError):
            by_package[package] = importlib.metadata.version(package)
    return by_package


def machine(device: torch.device) -> dict[str, str]:
    """Return what the bits of results depend on, besides the configuration and the data."""
    processor = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line[:10] == "model name")
        processor = next(models, processor)
    return {
        "processor": f"{processor}, {torch.backends.cpu.get_cpu_capability()}",
        "compute_threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "device": describe(device),
    }


class GpuMeter:
    """Memory and utilisation of this process's GPU; nothing on another device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_utilisation = device, True

    def read(self) -> dict[str, float]:
        """Return the peak of allocated memory since the last call, and, as far as the driver's
        library (the package nvidia-ml-py) is there, the utilisation of the last second.
        """
        if self._device.type == "cpu":
            return {}
        module = torch.get_device_module(self._device)
        figures: dict[str, float] = {"memory_mib": module.max_memory_allocated(self._device) >> 20}
        module.reset_peak_memory_stats(self._device)
        if self._has_utilisation:
            try:
                figures["utilisation_percent"] = module.utilization(self._device)
            except Exception:  # no library, another version of it, or the driver permits no reading
                self._has_utilisation = False
        return figures


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a line for each property of the machine that has changed since `before`."""
    return [
        f"{name.replace('_', ' ')}: {value} then, {now.get(name)} now"
        for name, value in before.items()
        if now.get(name) != value
    ]
