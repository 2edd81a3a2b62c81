"""torch and torchvision of a new environment: a build for CPUs where the machine has no GPU.

PyPI's builds for Linux contain CUDA, and work on CPUs too; PyTorch's own index has builds for CPUs,
of a tenth of the size. A torch that is there is never replaced.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.commands import run
from hvdtrain.horovod_build.environment import Environment, torchvision_for

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_BUILD = "+cpu"
LOAD_TORCHVISION = (
    "from hvdtrain.data.builtin import import_torchvision as load; load().models.resnet18"
)

Say = Callable[[str], None]


def install_torch(environment: Environment, version: str, *, for_gpus: bool, say: Say) -> None:
    """Install torch where there is none. Raises PreflightError."""
    if environment.torch is not None:
        return
    if for_gpus:
        say(f"installing torch {version} with CUDA: several GB to download")
    elif _install_cpu_build(environment, f"torch=={version}"):
        say(f"installed torch {version}, a build for CPUs; installing its requirements")
    else:
        say(
            f"no index here has torch's builds for CPUs: installing PyPI's torch {version}, which "
            "contains CUDA: several GB to download"
        )
    environment.install("torch", f"torch=={version}", "numpy", shows_progress=True)


def install_torchvision(environment: Environment, torch: str, say: Say) -> None:
    """Install the torchvision of a torch where there is none. Raises PreflightError."""
    if "torchvision" not in environment.packages:
        wanted = f"torchvision=={torchvision_for(torch)}"
        say(f"installing {wanted}")
        if not (torch.endswith(CPU_BUILD) and _install_cpu_build(environment, wanted)):
            # Its requirements are there: torch, NumPy, Pillow.
            environment.install(wanted, "--no-deps", wanted)


def load_torchvision(environment: Environment) -> None:
    """Raise PreflightError where torchvision cannot be loaded beside torch."""
    run([str(environment.python), "-c", LOAD_TORCHVISION], "load torchvision")


def _install_cpu_build(environment: Environment, wanted: str) -> bool:
    """Install a build for CPUs, without its requirements; return whether there is one."""
    index = ["--extra-index-url", CPU_INDEX]
    if environment.has_pip:
        index += ["--retries", "1", "--timeout", "15"]
    try:
        command = ["--no-deps", *index, f"{wanted}{CPU_BUILD}"]
        environment.install(wanted, *command, shows_progress=True)
    except PreflightError:
        return False
    return True
