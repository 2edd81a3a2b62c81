"""The Python environment that gets Horovod: a venv, one of uv, a conda-like prefix."""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.commands import run
from hvdtrain.interpreter import WITHOUT_FOLDER, module_argv

OLDEST_TORCH, NEWEST_TORCH = (2, 6), (2, 14)  # the newest is a notice: later ones may work

DESCRIBE = """
import importlib.util, json, os, sys, sysconfig
from importlib.metadata import distributions
from pathlib import Path

paths = sysconfig.get_paths()
found = {
    "prefix": sys.prefix,
    "is_virtual": sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir(),
    "is_managed": Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists(),
    "is_writable": os.access(paths["purelib"], os.W_OK),
    "scripts": paths["scripts"],
    "include": paths["include"],
    "abi": sysconfig.get_config_var("SOABI"),
    "has_pip": importlib.util.find_spec("pip") is not None,
    "packages": {(it.metadata["Name"] or "").lower(): it.version for it in distributions()},
    "torch": None,
}
if importlib.util.find_spec("torch"):
    try:
        import torch

        found["torch"] = torch.__version__
        found["cuda"] = torch.version.cuda
        found["old_abi"] = not torch.compiled_with_cxx11_abi()
        found["built_for"] = getattr(torch._C, "_cuda_getArchFlags", lambda: "")() or ""
        if torch.cuda.is_available():
            each = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
            found["cards"] = sorted({10 * major + minor for major, minor in each})
        nccl = importlib.util.find_spec("nvidia.nccl") if torch.version.cuda else None
        found["nccl_folder"] = next(iter(nccl.submodule_search_locations), None) if nccl else None
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Torch:
    """The torch of an environment: its version, and what was built into it."""

    version: str
    cuda: str | None  # such as 13.0; None: a build for CPUs
    nccl: str | None  # the version of NVIDIA's package beside it
    nccl_folder: Path | None
    toolkit: str | None  # the version of the package cuda-toolkit beside it
    architectures: tuple[int, ...]  # of the GPUs here, or else those that torch was built for
    old_abi: bool  # built with the C++ ABI of before gcc 5

    @property
    def release(self) -> tuple[int, int]:
        return release_of(self.version)

    @property
    def cxx_standard(self) -> int:
        return 20 if self.release >= (2, 14) else 17


def release_of(version: str) -> tuple[int, int]:
    """Return major and minor number of a version such as 2.13.0+cpu."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def torchvision_for(torch: str) -> str:
    """Return the release of torchvision for a release of torch 2: each is for exactly one."""
    _, minor, patch = torch.partition("+")[0].split(".")[:3]
    return f"0.{int(minor) + 15}.{patch}"


class Environment:
    """A Python environment, described by its own interpreter when it is first asked."""

    def __init__(self, python: Path) -> None:
        self.python = python

    def forget(self) -> None:
        """Ask the interpreter anew: packages were installed."""
        self.__dict__.pop("facts", None)

    @cached_property
    def facts(self) -> dict[str, Any]:
        output = run([str(self.python), "-c", WITHOUT_FOLDER + DESCRIBE], f"run {self.python}")
        return dict(json.loads(output.splitlines()[-1]))

    @property
    def prefix(self) -> Path:
        return Path(str(self.facts["prefix"]))

    @property
    def scripts(self) -> Path:
        return Path(str(self.facts["scripts"]))

    @property
    def abi(self) -> str:
        return str(self.facts["abi"])

    @property
    def python_header(self) -> Path:
        return Path(str(self.facts["include"])) / "Python.h"

    @property
    def packages(self) -> dict[str, str]:
        """Versions of the installed packages, by lower-case name."""
        return dict(self.facts["packages"])

    @property
    def torch(self) -> Torch | None:
        """The installed torch; None if there is none. Raises PreflightError if it is broken."""
        facts = self.facts
        if problem := facts.get("problem"):
            raise PreflightError(f"torch cannot be imported in {self.prefix}: {problem}")
        if facts["torch"] is None:
            return None
        major = (facts["cuda"] or "").partition(".")[0]
        folder = facts.get("nccl_folder")
        built_for = [word.partition("_")[2] for word in facts["built_for"].split()]
        return Torch(
            version=facts["torch"],
            cuda=facts["cuda"],
            nccl=self.packages.get(f"nvidia-nccl-cu{major}"),
            nccl_folder=Path(folder) if folder else None,
            toolkit=self.packages.get("cuda-toolkit"),
            architectures=tuple(
                facts.get("cards") or sorted({int(arch) for arch in built_for if arch.isdigit()})
            ),
            old_abi=facts["old_abi"],
        )

    def require_torch(self) -> Torch:
        """Return the installed torch. Raises PreflightError if it is absent or too old."""
        torch = self.torch
        oldest = ".".join(map(str, OLDEST_TORCH))
        if torch is None:
            raise PreflightError(
                f"there is no torch in {self.prefix}, for which Horovod is built. Install it with "
                f"{self.python} -m pip install 'torch>={oldest}' (or uv pip install), and run this "
                "again"
            )
        if torch.release < OLDEST_TORCH:
            raise PreflightError(
                f"torch {torch.version} in {self.prefix} is too old: {oldest} or newer is needed"
            )
        return torch

    def check_writable(self) -> None:
        """Raise PreflightError where packages must not, or cannot, be installed."""
        fix = (
            "Make an environment (python3 -m venv ENV; source ENV/bin/activate), install torch and "
            "hvdtrain there, and run this again"
        )
        if self.facts["is_managed"] and not self.facts["is_virtual"]:
            raise PreflightError(
                f"{self.python} is the system's Python, whose packages the system's package "
                f"manager installs (PEP 668). {fix}"
            )
        if not self.facts["is_writable"]:
            raise PreflightError(f"packages cannot be written into {self.prefix}. {fix}")

    @property
    def pip(self) -> list[str]:
        return [*module_argv("pip", str(self.python)), "--disable-pip-version-check"]

    @property
    def has_pip(self) -> bool:
        return bool(self.facts["has_pip"])

    @property
    def installer(self) -> list[str]:
        """The command that installs packages here: pip's, or uv's where there is no pip.

        Raises PreflightError if there is neither.
        """
        if self.has_pip:
            return [*self.pip, "install"]
        if uv := os.environ.get("UV") or shutil.which("uv"):
            return [uv, "pip", "install", "--python", str(self.python)]
        raise PreflightError(
            f"{self.prefix} has no pip, and there is no uv on PATH, to install packages with. Run "
            f"{self.python} -m ensurepip, or install uv, and run this again"
        )

    def install(self, what: str, *arguments: str, shows_progress: bool = False) -> None:
        """Install packages into this environment. `what`: the packages, for an error's message.

        `shows_progress`: on a terminal with the installer's own lines, for a long download.
        """
        shown = shows_progress and sys.stdout.isatty()
        command = [*self.installer, *([] if shown else ["--quiet"]), *arguments]
        run(command, f"install {what}", shown=shown)
        self.forget()

    def uninstall(self, package: str) -> None:
        """Remove a package from this environment."""
        command = ["uninstall" if part == "install" else part for part in self.installer]
        run([*command, *(["--yes"] if self.has_pip else []), package], f"uninstall {package}")
        self.forget()

    def reinstall(self, wheel: Path) -> None:
        """Install a wheel in place of any installed version; its requirements where absent."""
        again = "--force-reinstall" if self.has_pip else "--reinstall"
        self.install(wheel.name, again, "--no-deps", str(wheel))
        self.install(f"the requirements of {wheel.name}", str(wheel))
