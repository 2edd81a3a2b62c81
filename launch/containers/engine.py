"""The container engine, run through the commands `docker` and Compose."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import PreflightError

LAST_LINES = 15
NO_DOCKER = (
    "there is no docker command on PATH. Install Docker Engine (on Debian or Ubuntu: apt-get "
    "install docker.io docker-compose)"
)
NO_ENGINE = (
    "no Docker engine answers: {answer}\n"
    "Start it (systemctl start docker; without systemd, as root: docker/start-engine), or, if it "
    "runs, give your user access to it (usermod -aG docker USER, and log in again)"
)
NO_COMPOSE = (
    "Docker Compose is missing, as plugin and as command. On Debian or Ubuntu: apt-get install "
    "docker-compose; from Docker's own packages: docker-compose-plugin"
)
NOT_OURS = (
    "there are containers of a Compose project {name!r} that was started from {folder}, not from "
    "{ours}; nothing was changed. Choose another name (launch/cluster --name NAME ...), or remove "
    "it from there"
)
MISSING_FIELD = "ContainerConfig"
HAVE_OWN_RUNS = (
    "{error}\nThis docker-compose cannot change running hosts, and these have runs of their own: "
    "copy them with `./launch/cluster down DIR`, then call up again; or install "
    "docker-compose-plugin"
)


class EngineError(PreflightError):
    """A command of the engine failed."""


class Engine:
    """`docker` and Compose for one cluster, identified by its name."""

    def __init__(self, cluster: str, compose_file: Path) -> None:
        self.cluster = cluster
        self.compose_file = compose_file

    def check(self) -> None:
        """Raise PreflightError unless an engine answers."""
        if not shutil.which("docker"):
            raise PreflightError(NO_DOCKER)
        done = _try(["docker", "version", "--format", "{{.Server.Version}}"])
        if done.returncode != 0:
            raise PreflightError(NO_ENGINE.format(answer=last_lines(done.stderr)))

    def capture(self, *arguments: str, stdin: str | None = None) -> str:
        """Return the standard output of a docker command. Raises EngineError when it fails."""
        return run(["docker", *arguments], f"docker {arguments[0]}", stdin).stdout

    def logs(self, container: str, lines: str) -> str:
        """Return the last lines of a container's output, including standard error (used by sshd).

        Raises EngineError when it fails.
        """
        done = run(["docker", "logs", "--tail", lines, container], "docker logs")
        return (done.stdout + done.stderr).rstrip()

    def succeeds(self, *arguments: str) -> bool:
        """Return whether a docker command ends with exit code 0."""
        return _try(["docker", *arguments]).returncode == 0

    def compose(self, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        """Run a Compose command on this cluster. Raises EngineError when it fails."""
        command = [*_compose_command(), "--project-name", self.cluster]
        command += ["--file", os.fspath(self.compose_file), *arguments]
        environment = {**os.environ, **(variables or {})}
        run(command, f"docker compose {arguments[0]}", environment=environment)

    def up(self, hosts: int, variables: Mapping[str, str], may_remove: bool) -> None:
        """Start the hosts, or change them. Raises EngineError when that fails.

        docker-compose 1 cannot change containers of an engine from version 25 on, which leaves out
        a field that it reads (docker/compose issue 11742): they are removed first, if that loses
        nothing (`may_remove`).
        """
        start = ("up", "--detach", "--remove-orphans", "--scale", f"worker={hosts}")
        try:
            self.compose(*start, variables=variables)
        except EngineError as error:
            if MISSING_FIELD not in str(error):
                raise
            if not may_remove:
                raise EngineError(HAVE_OWN_RUNS.format(error=error)) from error
            self.compose("rm", "--force", "--stop", variables=variables)
            self.compose(*start, variables=variables)

    def workers(self, running: bool = True) -> list[str]:
        """Return the names of the cluster's worker containers in the order of their numbers."""
        number = '{{.Label "com.docker.compose.container-number"}}'
        answer = self.capture(
            *("ps", *([] if running else ["--all"]), "--format", f"{number} {{{{.Names}}}}"),
            *("--filter", f"label=com.docker.compose.project={self.cluster}"),
            *("--filter", "label=com.docker.compose.service=worker"),
        )
        pairs = [line.split(maxsplit=1) for line in answer.splitlines()]
        return [name for _, name in sorted((int(number), name) for number, name in pairs)]

    def launchers(self, running: bool = False) -> list[str]:
        """Return the ids of the containers that `run`, `doctor` and `logs` have started."""
        which = [] if running else ["--all"]
        label = f"label={launcher_label(self.cluster)}"
        return self.capture("ps", *which, "--quiet", "--filter", label).split()

    def check_ours(self) -> None:
        """Raise PreflightError if another Compose project uses the name."""
        ours = self.compose_file.parent.resolve()
        answer = self.capture(
            *("ps", "--all", "--format", '{{.Label "com.docker.compose.project.working_dir"}}'),
            *("--filter", f"label=com.docker.compose.project={self.cluster}"),
        )
        for folder in filter(None, answer.splitlines()):
            if Path(folder).resolve() != ours:
                raise PreflightError(NOT_OURS.format(name=self.cluster, folder=folder, ours=ours))


def launcher_label(cluster: str) -> str:
    """Return the label of the containers that start jobs on a cluster."""
    return f"hvdtrain.launcher={cluster}"


def launcher_argv(
    cluster: str, worker: str, image: str, command: Sequence[str], terminal: bool, threads: int
) -> list[str]:
    """Return the command that runs `command` in a cluster's network, with a worker's volumes."""
    return [
        *("docker", "run", "--rm", *(["--interactive", "--tty"] if terminal else [])),
        *("--label", launcher_label(cluster), "--network", f"{cluster}_cluster"),
        *("--volumes-from", worker, "--shm-size", "1g", "--no-healthcheck"),
        *("--cap-drop", "ALL", "--cap-add", "SYS_PTRACE"),
        *("--security-opt", "no-new-privileges"),
        *("--env", "OMPI_MCA_btl_vader_single_copy_mechanism=cma"),
        *("--env", f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', threads)}"),
        *(image, *command),
    ]


def _compose_command() -> list[str]:
    if _try(["docker", "compose", "version"]).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise PreflightError(NO_COMPOSE)


def run(
    command: list[str],
    what: str,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises EngineError, which names it as `what`, when it fails."""
    done = _try(command, stdin, environment)
    if done.returncode != 0:
        output = last_lines(done.stderr or done.stdout)
        raise EngineError(f"{what} failed (exit code {done.returncode}): {output}")
    return done


def _try(
    command: list[str], stdin: str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=stdin or "", capture_output=True, text=True, check=False, env=environment
    )


def last_lines(text: str) -> str:
    """Return the end of a command's output."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])
