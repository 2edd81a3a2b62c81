"""CUDA's compiler and NCCL, with which Horovod is built for GPUs.

NCCL is torch's own, of NVIDIA's package beside it, so that a process holds one NCCL. The compiler
is the system's if it is of the CUDA version of torch, else that of PyPI: NVIDIA's packages of
CUDA 13 hold all of it, and are installed into a folder of their own beside the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.environment import Environment, Torch

USUAL = Path("/usr/local")  # where NVIDIA's own packages install cuda-13.0 and the like
DEVICES = "/dev"  # where NVIDIA's driver shows each GPU as nvidia0, nvidia1, ...
PYPI_FOLDER = Path("nvidia") / "cu13"  # of NVIDIA's packages of CUDA 13, within their target
CC_LIST = "HOROVOD_BUILD_CUDA_CC_LIST"  # of the user: architectures, such as 80,90
PYPI = "pypi"


@dataclass(frozen=True)
class Cuda:
    """What Horovod is built with for GPUs."""

    version: str  # torch's, such as 13.0
    toolkit: str  # the version of the compiler and its source, such as 13.0.88-system
    root: Path | None  # the folder of the system's toolkit; None: PyPI's, yet to be installed
    package: str  # of PyPI, for root None
    nccl: str
    nccl_folder: Path
    architectures: str  # such as 80,90

    @property
    def identity(self) -> str:
        return (
            f"cuda-{self.version}, nvcc {self.toolkit}, nccl-{self.nccl}, sm {self.architectures}"
        )


def has_gpu(devices: str = DEVICES) -> bool:
    """Return whether the machine has a GPU of NVIDIA with a driver."""
    if any(device.name[6:].isdigit() for device in Path(devices).glob("nvidia*")):
        return True
    program = shutil.which("nvidia-smi")  # under WSL 2 there is no such device
    if program is None:
        return False
    done = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "GPU 0" in done.stdout


def find_cuda(environment: Environment, torch: Torch, wanted: bool | None) -> Cuda | None:
    """Return what to build with for GPUs; None: build for CPUs.

    `wanted`: True demands CUDA, also where there is no GPU; None takes it where torch has it and
    the machine a GPU. Raises PreflightError, with what to do, where CUDA is wanted and absent.
    """
    if wanted is False or (wanted is None and not (torch.cuda and has_gpu())):
        return None
    if torch.cuda is None:
        raise PreflightError(
            f"--cuda: torch {torch.version} in {environment.prefix} is a build for CPUs. Install a "
            "CUDA build of torch (see PyTorch's installation page), and run this again"
        )
    if torch.nccl is None or torch.nccl_folder is None:
        raise PreflightError(
            f"torch {torch.version} has CUDA {torch.cuda}, but NVIDIA's package of NCCL, by which "
            "Horovod is built, is not beside it. Install torch from PyPI or from PyTorch's index; "
            "or build for CPUs: --no-cuda"
        )
    root, version = _find_toolkit(torch.cuda)
    package = f"cuda-toolkit[nvcc,cccl]=={torch.toolkit}"
    if root is None and (torch.toolkit is None or int(torch.cuda.partition(".")[0]) < 13):
        raise PreflightError(
            f"torch {torch.version} has CUDA {torch.cuda}, and this machine has no nvcc of CUDA "
            f"{torch.cuda.partition('.')[0]} (on PATH, in CUDA_HOME or /usr/local/cuda); PyPI has "
            "that of CUDA 13 only. Install that CUDA toolkit; or install a torch with CUDA 13; or "
            "build for CPUs: --no-cuda"
        )
    return Cuda(
        version=torch.cuda,
        toolkit=f"{version}-system" if root else f"{torch.toolkit}-{PYPI}",
        root=root,
        package=package,
        nccl=torch.nccl,
        nccl_folder=torch.nccl_folder,
        architectures=os.environ.get(CC_LIST) or ",".join(map(str, torch.architectures)),
    )


def _find_toolkit(cuda: str) -> tuple[Path | None, str]:
    """Return root and version of the system's toolkit of torch's major version of CUDA."""
    for program in _compilers():
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
        if version and version.group(1).partition(".")[0] == cuda.partition(".")[0]:
            return _root_of(program), version.group(1)
    return None, ""


def _compilers() -> Iterator[str]:
    named = map(os.environ.get, ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))
    folders = [f"{folder}/bin" for folder in named if folder]
    usual = [f"{folder}/bin" for folder in sorted(USUAL.glob("cuda*"))]
    # Without a folder: on PATH.
    return filter(None, (shutil.which("nvcc", path=path) for path in [*folders, None, *usual]))


def _root_of(program: str) -> Path:
    """Return the folder of a compiler's toolkit. The program may be a script that calls nvcc."""
    command = [program, "--dryrun", "-x", "cu", "-E", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", done.stderr + done.stdout, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(program).resolve().parents[1]


def complete_toolkit(target: Path) -> Path:
    """Add to NVIDIA's packages what a toolkit has besides: the folder lib64, and names to link by.

    `target`: the folder into which they were installed. Returns the toolkit's root.
    """
    root = target / PYPI_FOLDER
    for link, to in ((root / "lib64", "lib"), (root / "lib" / "libcudart.so", "libcudart.so.13")):
        link.unlink(missing_ok=True)
        link.symlink_to(to)
    return root


def build_variables(cuda: Cuda, root: Path) -> dict[str, str]:
    """Return the variables by which Horovod's build finds the toolkit and NCCL."""
    variables = {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "shared",
        "HOROVOD_NCCL_HOME": str(cuda.nccl_folder),
        "HOROVOD_CUDA_HOME": str(root),
        "CUDA_HOME": str(root),
    }
    return variables | ({CC_LIST: cuda.architectures} if cuda.architectures else {})
