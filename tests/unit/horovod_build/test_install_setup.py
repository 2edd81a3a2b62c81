"""launch/setup: what the machine must bring, when a checkout is set up, and the script itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.environment import Environment
from hvdtrain.horovod_build.mpi import Mpi, find_system_mpi
from hvdtrain.horovod_build.requirements import (
    Requirement,
    explain_missing,
    missing_requirements,
)
from launch.install import system
from tests.unit.programs import put

program = importlib.import_module("launch.install.__main__")

ROOT = Path(__file__).parents[3]
MPI = Mpi("4.1.4", "system")
BUILD_FILES = ("edits/sums.py", "native/waiting.h")


def read_tree(root: Path) -> dict[str, bytes]:
    """Every file's bytes, without Python's own caches."""
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_missing_requirements_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Fails when one is left out, what is there is listed, or the fix takes several lines."""
    parts = [("make", "make"), ("ssh client", "openssh-client"), ("C++ compiler", "g++")]
    requirements = tuple(Requirement(n, "why", p, lambda: None) for n, p in parts)
    there = Requirement("venv", "why", "python3-venv", lambda: "/usr/bin/venv")
    missing = missing_requirements((requirements[0], there, *requirements[1:]))
    assert missing == list(requirements)
    text = explain_missing(missing)
    assert all(f"  {name}: not found (why)" in text for name, _ in parts)
    assert "apt-get install -y make openssh-client g++" in text.splitlines()[-1]
    assert "venv" not in text
    monkeypatch.setattr(program, "missing_requirements", lambda _: missing)
    monkeypatch.setattr(sys, "argv", ["setup", "--check"])
    assert program.main() == 3
    assert text in capsys.readouterr().err


def test_installed_services_stay_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a package may start its service, or the machine's own policy is lost."""
    policy, seen = tmp_path / "policy-rc.d", []

    def run(command: list[str], what: str) -> None:
        allowed = not policy.exists() or subprocess.run([policy], check=False).returncode != 101
        seen.append((command, allowed))
        if command[-1] == "broken":
            raise PreflightError("apt-get install failed")

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    system.install_packages(["iproute2", "openssh-server", "munge"], run, policy)
    update, install, disable = seen
    assert update[0][:2] == ["apt-get", "update"]
    assert install[0][-3:] == ["iproute2", "openssh-server", "munge"] and not install[1]
    services = ["ssh.service", "ssh.socket", "munge.service"]
    assert disable[0] == ["systemctl", "--quiet", "disable", *services]
    with pytest.raises(PreflightError):
        system.install_packages(["broken"], run, policy)
    assert not policy.exists()
    policy.write_text("#!/bin/sh\nexit 0\n")
    policy.chmod(0o755)
    system.install_packages(["g++"], run, policy)
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"
    assert len(seen) == 3 + 2 + 2  # nothing to disable in the last two


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], []),
        (["--system-packages"], ["make"]),
        (["--test-packages"], ["iproute2"]),
        (["--system-packages", "--test-packages"], ["make", "iproute2"]),
    ],
)
def test_packages_are_installed_where_asked(
    flags: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a flag installs the other's packages, or anything is installed unasked."""
    installed: list[str] = []
    there = Requirement("venv", "why", "python3-venv", lambda: "/usr/bin/venv")
    make = Requirement("make", "why", "make", lambda: None)
    tool = Requirement("ip", "why", "iproute2", lambda: None)
    monkeypatch.setattr(system, "REQUIREMENTS", (there, make))
    monkeypatch.setattr(system, "TEST_REQUIREMENTS", (there, tool))
    monkeypatch.setattr(system, "install_packages", lambda names, run: installed.extend(names))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(program, "_report", lambda checkout: 0)
    monkeypatch.setattr(sys, "argv", ["setup", "--check", *flags])
    program.main()
    assert installed == expected
    if flags:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert program.main() == 2
        assert installed == expected


def test_packages_that_bring_daemons_have_their_services_listed() -> None:
    """Fails if a package that the tests need could start its daemon at the next boot: one of a
    Slurm, say, whose services are not in the list of those that are disabled.
    """
    daemons = {
        requirement.debian_package
        for requirement in system.TEST_REQUIREMENTS
        if requirement.name.endswith(("d", "server"))
    }
    assert daemons == set(system.SERVICES)


def write_tools(folder: Path, answer: str, tools: tuple[str, ...] = ("mpirun", "mpicxx")) -> Path:
    folder.mkdir(parents=True)
    for name in tools:
        put(folder, name, f"echo '{answer}'")
    return folder


@pytest.mark.parametrize(
    ("answer", "tools", "expected"),
    [
        ("mpirun (Open MPI) 4.1.4", ("mpirun", "mpicxx"), Mpi("4.1.4", "system")),
        ("mpirun (Open MPI) 4.0.10", ("mpirun", "mpicxx"), Mpi("4.0.10", "system")),
        ("mpirun (Open MPI) 5.0.3", ("mpirun", "mpicxx"), None),
        ("mpirun (Open MPI) 14.1.4", ("mpirun", "mpicxx"), None),
        ("HYDRA build details:\n    Version: 4.1.2", ("mpirun", "mpicxx"), None),
        ("mpirun (Open MPI) 4.1.4", ("mpirun",), None),
        ("mpirun (Open MPI) 4.1.4", ("mpicxx",), None),
    ],
)
def test_find_system_mpi(
    tmp_path: Path, monkeypatch, answer: str, tools, expected: Mpi | None
) -> None:
    """Fails when an MPI that does not fit is taken, or Open MPI 4 is not."""
    folder = write_tools(tmp_path / "bin", answer, tools)
    monkeypatch.setenv("PATH", f"{tmp_path / 'none'}{os.pathsep}{os.pathsep}{folder}")
    assert find_system_mpi(outside=tmp_path / "venv") == expected


def test_find_system_mpi_looks_outside_the_environment(tmp_path: Path, monkeypatch) -> None:
    """Fails when pip's Open MPI counts as the system's, hides it, or halves are mixed."""
    own = write_tools(tmp_path / "venv" / "bin", "mpirun (Open MPI) 4.1.8")
    monkeypatch.setenv("PATH", str(own))
    assert find_system_mpi(outside=tmp_path / "venv") is None
    system = write_tools(tmp_path / "bin", "mpirun (Open MPI) 4.1.4")
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{system}")
    assert find_system_mpi(outside=tmp_path / "venv") == MPI
    other = write_tools(tmp_path / "other", "mpirun (Open MPI) 4.1.4", ("mpirun",))
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{system}")
    assert find_system_mpi(outside=tmp_path / "venv") is None


def test_find_system_mpi_passes_over_other_environments(tmp_path: Path, monkeypatch) -> None:
    """Fails when Horovod is built for an Open MPI that goes away with another environment."""
    other = write_tools(tmp_path / "other" / "bin", "mpirun (Open MPI) 4.1.8")
    monkeypatch.setenv("PATH", str(other))
    assert find_system_mpi(outside=tmp_path / "venv") == Mpi("4.1.8", "system")
    (tmp_path / "other" / "pyvenv.cfg").touch()
    assert find_system_mpi(outside=tmp_path / "venv") is None


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkout that seems to be set up, of four files and an empty interpreter."""
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(program, "find_system_mpi", lambda outside: MPI)
    build = tmp_path / "hvdtrain" / "horovod_build"
    monkeypatch.setattr(program.install, "__file__", str(build / "install.py"))
    for name in BUILD_FILES:
        (build / name).parent.mkdir(parents=True)
        (build / name).write_text("\n")
    (tmp_path / "launch").mkdir()
    (tmp_path / "setup.py").write_text("setup()\n")
    made = program.Checkout(tmp_path)
    made.constraints.write_text("torch==2.13.0\nopenmpi==4.1.8\n")
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    made.stamp.write_text(json.dumps({"inputs": made.fingerprint(), "tools": False}))
    return made


def test_fingerprint_depends_on_what_setup_depends_on(checkout, monkeypatch) -> None:
    """Fails when a changed pin, requirement, MPI, or file of Horovod's build leaves the environment
    as it is; or when tools for tests, once installed, are asked for again by a set-up without them.
    """
    assert checkout.is_up_to_date()
    for other in (None, Mpi("4.1.5", "system"), Mpi("4.1.4", "pip")):
        monkeypatch.setattr(program, "find_system_mpi", lambda outside, mpi=other: mpi)
        assert not checkout.is_up_to_date()
    monkeypatch.setattr(program, "find_system_mpi", lambda outside: MPI)
    files = [checkout.root / "hvdtrain" / "horovod_build" / name for name in BUILD_FILES]
    for path in (checkout.constraints, checkout.root / "setup.py", *files):
        before = path.read_text()
        path.write_text(before + "# changed\n")
        assert not checkout.is_up_to_date()
        path.write_text(before)
        assert checkout.is_up_to_date()
    with_tools = dataclasses.replace(checkout, test_tools=True)
    assert not with_tools.is_up_to_date()
    checkout.stamp.write_text(json.dumps({"inputs": checkout.fingerprint(), "tools": True}))
    assert checkout.is_up_to_date() and with_tools.is_up_to_date()
    assert not dataclasses.replace(checkout, for_gpus=True).is_up_to_date()
    checkout.python.unlink()
    assert not checkout.is_up_to_date()


def test_setup_that_breaks_off_is_not_up_to_date(checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the old stamp still vouches for an environment that was changed halfway."""

    def fail(*arguments: object, **options: object) -> None:
        raise PreflightError("pip was interrupted")

    monkeypatch.setattr(program, "run", fail)
    pins = checkout.constraints.read_text()
    checkout.constraints.write_text(pins + "numpy==2.0\n")
    with pytest.raises(PreflightError):
        program.set_up(checkout)
    checkout.constraints.write_text(pins)
    assert not checkout.is_up_to_date()


def test_the_torch_that_is_there_is_pinned_as_pip_knows_it(checkout) -> None:
    """Fails when torch is pinned by the version that it prints, which PyPI's package with CUDA does
    not have, so that nothing can be installed; or when a set-up without tools installs them.
    """
    environment = Environment(checkout.python)
    facts = {"torch": "2.13.0+cu130", "packages": {"torch": "2.13.0"}, "has_pip": True}
    environment.__dict__["facts"] = facts
    command = program._pip_command(checkout, environment)
    pinned = Path(command[command.index("--constraint") + 1])
    assert pinned.read_text() == "torch==2.13.0\n"
    assert command[-1] == f"{checkout.root}[distributed]"
    with_tools = dataclasses.replace(checkout, test_tools=True)
    assert "test" in program._pip_command(with_tools, environment)[-1]


def run_setup(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return subprocess.run(
        [str(root / "launch" / "setup"), *arguments],
        env=clean | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    """Fails when an old or absent interpreter gets further than one clear line."""
    old = tmp_path / "python3.9"
    text = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{text}' \"$2\"\n")
    old.chmod(0o755)
    done = run_setup(ROOT, PYTHON=str(old))
    assert done.returncode == 3
    assert done.stderr.startswith("setup: error: Python 3.10 or newer is needed")
    absent = run_setup(ROOT, PYTHON="no-such-python")
    assert absent.returncode == 3
    assert "no-such-python" in absent.stderr and "python3-venv" in absent.stderr


def test_check_reports_and_changes_nothing(tmp_path: Path) -> None:
    """Fails when --check calls a bare checkout ready, or writes anything into it."""
    (tmp_path / "hvdtrain").mkdir()
    for name in ("launch", "hvdtrain/horovod_build"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("hvdtrain/__init__.py", "hvdtrain/errors.py", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    before = read_tree(tmp_path)
    done = run_setup(tmp_path, "--check")
    assert done.returncode == 3, done.stderr
    assert f"fail  {tmp_path / '.venv'} is not set up: run launch/setup" in done.stdout
    for requirement in system.REQUIREMENTS:
        assert f"ok    {requirement.name}: " in done.stdout
    assert "ok    MPI: " in done.stdout
    assert read_tree(tmp_path) == before
    assert not (tmp_path / ".venv").exists()
