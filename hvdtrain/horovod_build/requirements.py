"""Programs and files that the system provides; all that are missing are reported at once."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WHY = "Horovod is compiled here"


@dataclass(frozen=True)
class Requirement:
    """A program or file that the system provides, and its Debian package."""

    name: str
    why: str
    debian_package: str
    find: Callable[[], str | None]


def build_requirements(python_header: Path) -> tuple[Requirement, ...]:
    """Return what a build of Horovod needs; `python_header`: where Python.h has to be."""
    return (
        Requirement("C++ compiler", WHY, "g++", _find_compiler),
        Requirement("make", WHY, "make", lambda: shutil.which("make")),
        Requirement(
            f"Python headers ({python_header})",
            WHY,
            "python3-dev",
            lambda: str(python_header) if python_header.is_file() else None,
        ),
    )


def _find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++").split(" ")[0]) or shutil.which("g++")


def missing_requirements(requirements: Sequence[Requirement]) -> list[Requirement]:
    """Return the requirements that this machine does not meet, in the order given."""
    return [requirement for requirement in requirements if requirement.find() is None]


def explain_missing(missing: list[Requirement]) -> str:
    """Return one message for all missing requirements, with the command that installs them."""
    lines = [f"  {item.name}: not found ({item.why})" for item in missing]
    packages = " ".join(dict.fromkeys(item.debian_package for item in missing))
    return "\n".join(
        [
            "this machine lacks requirements:",
            *lines,
            f"On Debian or Ubuntu: apt-get install -y {packages}",
        ]
    )
