"""Hosts from Slurm and from the MPI Operator, and the recipes in launch/ for both."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.sites import hosts_of_site

LAUNCH = Path(__file__).parents[2] / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
MPIJOB = LAUNCH / "mpijob.yaml"
NOWHERE = Path("/nonexistent/hostfile")
QUICK_S = 20.0  # generous on a loaded machine; what is unbounded takes minutes or never ends
JOB_S = 30.0  # for a fake job of a moment


def slurm(nodes: str, **more: str) -> list[tuple[str, int]]:
    """(name, slots) of the hosts of a Slurm job; names of variables without SLURM_."""
    variables = {f"SLURM_{name}": value for name, value in more.items()}
    hosts = hosts_of_site({"SLURM_JOB_NODELIST": nodes, **variables}, NOWHERE)
    assert {host.source for host in hosts} == {"SLURM_JOB_NODELIST"}
    return [(host.name, host.slots) for host in hosts]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha beta"),
        ("gpu[1-3]", "gpu1 gpu2 gpu3"),
        ("gpu[008-010,12],login1", "gpu008 gpu009 gpu010 gpu12 login1"),
        ("gpu[98-101]", "gpu98 gpu99 gpu100 gpu101"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a[1,3]-ib,b[7]", "a1-ib a3-ib b7"),
        ("c[1-2].example.org", "c1.example.org c2.example.org"),
    ],
)
def test_names_of_slurm(nodes: str, expected: str) -> None:
    """Fails when a list of hosts is expanded otherwise than `scontrol show hostnames` does."""
    assert slurm(nodes) == [(name, 1) for name in expected.split()]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TASKS_PER_NODE": "2(x3),1"}, [2, 2, 2, 1]),
        ({"TASKS_PER_NODE": "2(x2),1,4"}, [2, 2, 1, 4]),
        ({"TASKS_PER_NODE": "4(x4)", "JOB_CPUS_PER_NODE": "64(x4)"}, [4, 4, 4, 4]),
        ({"TASKS_PER_NODE": "1(x4)", "NTASKS_PER_NODE": "2"}, [1, 1, 1, 1]),
        ({"NTASKS_PER_NODE": "2", "JOB_CPUS_PER_NODE": "64(x4)"}, [2, 2, 2, 2]),
        ({"JOB_CPUS_PER_NODE": "8(x3),2"}, [8, 8, 8, 2]),
        ({"JOB_CPUS_PER_NODE": "8(x3),2", "CPUS_PER_TASK": "3"}, [2, 2, 2, 1]),
        ({}, [1, 1, 1, 1]),
        ({"STEP_NUM_TASKS": "1", "HET_SIZE": "1"}, [1, 1, 1, 1]),
    ],
)
def test_slots_of_slurm(variables: dict[str, str], expected: list[int]) -> None:
    """Fails when slots are read from the wrong variable, or go to the wrong hosts."""
    assert [slots for _, slots in slurm("n[1-4]", **variables)] == expected


@pytest.mark.parametrize(
    ("nodes", "variables", "expected"),
    [
        ("a[1-3", {}, "not a list of hosts as Slurm writes it"),
        ("a]", {}, "not a list of hosts"),
        ("a[[1]]", {}, "not a list of hosts"),
        ("a,,b", {}, "not a list of hosts"),
        (",", {}, "no hosts in it"),
        ("a[]", {}, "'' is not a range"),
        ("a[3-1]", {}, "'3-1' is not a range"),
        ("a[1-x]", {}, "'1-x' is not a range"),
        ("a[1x2]", {}, "'1x2' is not a range"),
        ("a[\u0661-\u0663]", {}, "is not a range"),
        ("a[1-3],a2", {}, "a2 stands already before"),
        ("[1-2]", {}, "'1': a number is no host's name"),
        ("$(id)", {}, "cannot stand in a host's name"),
        ("-l", {}, "does not begin with '-'"),
        ("a[1-3]", {"TASKS_PER_NODE": "2"}, "speaks of 1 hosts, but SLURM_JOB_NODELIST has 3"),
        ("a[1-3]", {"TASKS_PER_NODE": "2(x4)"}, "speaks of more hosts"),
        ("a", {"TASKS_PER_NODE": "2(x1000000000)"}, "not understood"),
        ("a", {"TASKS_PER_NODE": "2(x999999999)"}, "speaks of more hosts"),
        ("a", {"TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two': not understood"),
        ("a", {"TASKS_PER_NODE": "0"}, "a host has 1 to 65,536 slots"),
        ("a", {"TASKS_PER_NODE": "65537"}, "a host has 1 to 65,536 slots"),
        ("a", {"NTASKS_PER_NODE": "x"}, "SLURM_NTASKS_PER_NODE='x'"),
        ("a", {"JOB_CPUS_PER_NODE": "8", "CPUS_PER_TASK": "0"}, "SLURM_CPUS_PER_TASK='0'"),
        ("a", {"STEP_NUM_TASKS": "4"}, "without srun"),
        ("a", {"HET_SIZE": "2"}, "heterogeneous job"),
    ],
)
def test_bad_slurm(nodes: str, variables: dict[str, str], expected: str) -> None:
    """Fails when such an environment gives hosts, or a message that does not name its fault."""
    with pytest.raises(UsageError) as caught:
        slurm(nodes, **variables)
    assert expected in str(caught.value)
    assert "SLURM_" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "nodes",
    [
        "a[0-999999999999]",
        "a[1-16385]",
        "a[1-16384],b",
        "a[1-16384][1-16384]",
        "a" + "[1-2]" * 10_000,
        "p" * 100_000 + "[1-16384]",
        "[1-1]" * 20_000,
        "a[" * 50_000,
        "[" * 100_000,
        "," * 100_000,
        "a[" + "1-9," * 25_000,
    ],
    ids=lambda nodes: nodes[:20],
)
def test_slurm_lists_without_end_are_refused_early(nodes: str) -> None:
    """Fails when such a list is expanded before it is counted: it would fill the memory."""
    start = time.monotonic()
    with pytest.raises(UsageError) as caught:
        slurm(nodes)
    assert time.monotonic() - start < QUICK_S
    assert len(str(caught.value)) < 500


@settings(deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 20), st.integers(1, 7), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    )
)
def test_slurm_reads_back(groups: list[tuple[int, int, int, int]]) -> None:
    """Fails when hosts and slots packed as Slurm packs them do not come back as they were."""
    packed, tasks, expected = [], [], []
    for letter, (first, more, width, slots) in zip("abcde", groups, strict=False):
        names = [f"{letter}{first + step:0{width}d}" for step in range(more + 1)]
        packed.append(f"{letter}[{first:0{width}d}-{first + more:0{width}d}]")
        tasks.append(f"{slots}(x{len(names)})" if more else str(slots))
        expected += [(name, slots) for name in names]
    assert slurm(",".join(packed), TASKS_PER_NODE=",".join(tasks)) == expected


@settings(deadline=None, max_examples=300)
@given(
    nodes=st.text(max_size=60) | st.text("ab[]-,019x(", min_size=1, max_size=30),
    tasks=st.text("0129x(),", max_size=12) | st.text(max_size=12),
)
def test_any_slurm_environment(nodes: str, tasks: str) -> None:
    """Fails when any values raise something else than UsageError."""
    environment = {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}
    try:
        hosts = hosts_of_site(environment, NOWHERE)
    except UsageError as error:
        assert str(error).isascii()
    else:
        assert bool(hosts) == bool(nodes)


def test_which_site(tmp_path: Path) -> None:
    """Fails when hosts are found where there is no site, or one site hides another wrongly."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("worker slots=2\n")
    assert hosts_of_site({}, NOWHERE) == ()
    assert hosts_of_site({"SLURM_JOB_NODELIST": ""}, NOWHERE) == ()
    assert hosts_of_site({}, hostfile) == (Host("worker", 2, None, f"{hostfile}:1"),)
    assert hosts_of_site({"SLURM_NODELIST": "old"}, hostfile)[0].name == "old"
    hostfile.write_text("# none yet\n")
    with pytest.raises(UsageError, match="no hosts in it"):
        hosts_of_site({}, hostfile)


# The recipe for Slurm, with a fake launcher and a fake Slurm.

FAKE_HVDTRAIN = """#!/bin/bash
echo "$@" >> arguments
trap 'echo TERM >> signals; sleep 0.3; exit "$ON_TERM"' TERM
touch started
for _ in $(seq "$TENTHS"); do sleep 0.1; done
exit "$AT_END"
"""
FAKE_SCONTROL = """#!/bin/bash
echo "$@" >> scontrol
if [ "$1" = show ]; then echo "JobId=7 JobName=hvdtrain JobState=$STATE Reason=None"; fi
if [ "$1" = requeue ]; then exit "$REQUEUE"; fi
"""


def start_job(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """launch/slurm.sbatch as Slurm starts it, in a folder with the fakes."""
    for name, text in {"hvdtrain": FAKE_HVDTRAIN, "scontrol": FAKE_SCONTROL}.items():
        fake = folder / ".venv/bin" / name  # the recipe puts this folder first
        fake.parent.mkdir(parents=True, exist_ok=True)
        fake.write_text(text)
        fake.chmod(0o755)
    defaults = {"ON_TERM": "143", "AT_END": "0", "TENTHS": "300", "STATE": "RUNNING"}
    return subprocess.Popen(
        ["bash", str(SBATCH), *arguments],
        cwd=folder,
        env={**os.environ, **defaults, "REQUEUE": "0", "SLURM_JOB_ID": "7", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str], folder: Path, signals: int = 0) -> tuple[int, str]:
    """Signal the script so often, as --signal=B: does, and wait; its exit code and output."""
    try:
        end = time.monotonic() + JOB_S
        while not (folder / "started").exists() and time.monotonic() < end:
            time.sleep(0.02)
        for number in range(signals):
            time.sleep(0.1 * bool(number))
            job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=JOB_S)
        return job.returncode, output
    finally:
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        else:
            job.wait()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_sbatch_is_bash_and_asks_slurm_for_what_it_needs() -> None:
    """Fails for a slip in the script's syntax, or when one of these flags is lost."""
    subprocess.run(["bash", "-n", SBATCH], check=True)
    flags = re.findall(r"^#SBATCH (\S+)$", SBATCH.read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=B:TERM@120", "--open-mode=append"} <= set(flags)
    assert {"--output=slurm-%j.out", "--nodes=2", "--ntasks-per-node=4"} <= set(flags)
    first_command = re.search(r"^[^#\n]", SBATCH.read_text(), re.MULTILINE)
    last_flag = SBATCH.read_text().rindex("\n#SBATCH")
    assert first_command is not None
    assert last_flag < first_command.start(), "sbatch reads no flags after the first command"


def test_sbatch_starts_the_launcher_once(tmp_path: Path) -> None:
    """Fails when the job's arguments do not arrive, or hosts are named that Slurm chooses."""
    job = start_job(tmp_path, "--model", "a b", "--epochs=2", TENTHS="1")
    assert finish(job, tmp_path) == (0, "")
    assert lines(tmp_path / "arguments") == [
        "launch -- train --experiment slurm-7 --resume auto --model a b --epochs=2"
    ]
    assert lines(tmp_path / "scontrol") == []


@pytest.mark.parametrize("code", [1, 2, 3, 17, 143])
def test_sbatch_does_not_requeue_a_failure(tmp_path: Path, code: int) -> None:
    """Fails when a job that failed, or was stopped by hand, comes back again and again."""
    job = start_job(tmp_path, TENTHS="1", AT_END=str(code))
    assert finish(job, tmp_path) == (code, "")
    assert lines(tmp_path / "scontrol") == []


@pytest.mark.parametrize("signals", [1, 3])
def test_sbatch_requeues_when_stopped(tmp_path: Path, signals: int) -> None:
    """Fails when the launcher hears no signal, or more than one (it would not save then), or
    when the job does not go back into the queue after it has saved.
    """
    code, output = finish(start_job(tmp_path), tmp_path, signals)
    assert (code, lines(tmp_path / "signals")) == (143, ["TERM"])
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7", "requeue 7"]
    assert "stopped and saved; requeued" in output


@pytest.mark.parametrize(
    ("variables", "code", "asked", "said"),
    [
        ({"STATE": "CANCELLED"}, 143, True, "not requeued, for the job is CANCELLED"),
        ({"STATE": "COMPLETING"}, 143, True, "not requeued, for the job is COMPLETING"),
        ({"SLURM_RESTART_COUNT": "100"}, 143, True, "not requeued, for this was done 100 times"),
        ({"ON_TERM": "0"}, 0, False, ""),
        ({"ON_TERM": "1"}, 1, False, ""),
        ({"ON_TERM": "17"}, 17, False, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sbatch_requeues_only_when_right(
    tmp_path: Path, variables: dict[str, str], code: int, asked: bool, said: str
) -> None:
    """Fails when a job is requeued that was cancelled, has finished, failed, or never ends."""
    assert finish(start_job(tmp_path, **variables), tmp_path, 1)[0] == code
    assert lines(tmp_path / "signals") == ["TERM"]
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7"] * asked


def test_sbatch_says_when_slurm_refuses(tmp_path: Path) -> None:
    """Fails when a job that Slurm will not requeue leaves without a word on how to go on."""
    code, output = finish(start_job(tmp_path, REQUEUE="1"), tmp_path, 1)
    assert code == 143
    assert "Slurm refuses to requeue" in output
    assert "--experiment slurm-7" in output


def test_sbatch_keeps_the_exit_code_whenever_signals_come(tmp_path: Path) -> None:
    """Fails when the launcher's code is lost to a signal that comes as it ends (with
    bash's `wait` alone, now and then): such a job would not be requeued, or wrongly.
    """
    folders = [tmp_path / str(number) for number in range(10)]
    jobs = [start_job(folder, ON_TERM="17") for folder in folders]
    try:
        for number, (job, folder) in enumerate(zip(jobs, folders, strict=True)):
            end = time.monotonic() + JOB_S
            while not (folder / "started").exists() and time.monotonic() < end:
                time.sleep(0.01)
            job.send_signal(signal.SIGTERM)
            time.sleep(0.26 + 0.005 * number)  # the fake launcher ends 0.3 s after its signal
            for _ in range(20):
                job.send_signal(signal.SIGTERM)
                time.sleep(0.002)
    finally:
        codes = [finish(job, folder)[0] for job, folder in zip(jobs, folders, strict=True)]
    assert codes == [17] * len(jobs)
    assert not any((folder / "scontrol").exists() for folder in folders)


# The recipe for Kubernetes.

FIELDS = {  # of the operator's v2beta1 types; a field outside them is a slip
    "job": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    | {"launcherCreationPolicy", "mpiImplementation", "runLauncherAsWorker"},
    "runPolicy": {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds"}
    | {"backoffLimit", "schedulingPolicy", "suspend", "managedBy"},
    "replica": {"replicas", "restartPolicy", "template"},
}
ROLES = ("Launcher", "Worker")


@pytest.fixture(scope="module")
def mpijob() -> dict[str, Any]:
    (job,) = yaml.safe_load_all(MPIJOB.read_text("utf-8"))
    return job


def container_of(job: dict[str, Any], role: str) -> dict[str, Any]:
    (container,) = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return container


def test_mpijob_has_the_operators_fields(mpijob: dict[str, Any]) -> None:
    """Fails for a field that the operator does not know, lacks, or that has a wrong value."""
    spec = mpijob["spec"]
    assert (mpijob["apiVersion"], mpijob["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(mpijob) == FIELDS["job"]
    assert set(spec) <= FIELDS["spec"]
    assert set(spec["runPolicy"]) <= FIELDS["runPolicy"]
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert isinstance(spec["slotsPerWorker"], int)
    assert spec["sshAuthMountPath"].startswith("/")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert tuple(spec["mpiReplicaSpecs"]) == ROLES
    for role in ROLES:
        replica = spec["mpiReplicaSpecs"][role]
        assert set(replica) == FIELDS["replica"]
        assert replica["restartPolicy"] in ("Never", "OnFailure")
        assert isinstance(replica["replicas"], int)
    assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1


@pytest.mark.parametrize("role", ROLES)
def test_mpijob_pods(mpijob: dict[str, Any], role: str) -> None:
    """Fails when a pod runs as root, lacks shared memory or resources, or mounts what is not
    there; or when the image is bound to a registry, or a secret is written into the file.
    """
    pod = mpijob["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    container = container_of(mpijob, role)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["image"] == "hvdtrain"
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"]
    assert not any("secret" in volume for volume in pod["volumes"])
    assert "env" not in container
    assert "PRIVATE KEY" not in MPIJOB.read_text("utf-8")


def test_mpijob_launcher_and_worker_fit(mpijob: dict[str, Any], tmp_path: Path) -> None:
    """Fails when the launcher's shell script does not run, does not trust the job's own key, or
    speaks to another port than the workers' sshd listens on.
    """
    launcher, worker = (container_of(mpijob, role) for role in ROLES)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "id_rsa").write_text("private\n")
    (keys / "id_rsa.pub").write_text("ecdsa public\n")
    fake = tmp_path / "hvdtrain"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    fake.chmod(0o755)
    mount = mpijob["spec"]["sshAuthMountPath"]
    (script,) = launcher["args"]
    assert mount in script
    subprocess.run(
        [*launcher["command"], script.replace(mount, str(keys))],
        env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    assert (tmp_path / ".ssh/known_hosts").read_text() == "* ecdsa public\n"
    assert (tmp_path / ".ssh/id_rsa").stat().st_mode & 0o777 == 0o600
    arguments = lines(tmp_path / "arguments")
    assert arguments[0] == "launch"
    assert arguments[arguments.index("--") + 1] == "train"
    assert not {"-H", "--hostfile", "-np"} & set(arguments), "the operator's hostfile is read"
    assert shlex.join(arguments).endswith("--resume auto")
    port = arguments[arguments.index("--ssh-port") + 1]
    assert worker["command"][0] == "/usr/sbin/sshd"
    assert {f"-oPort={port}", f"-oHostKey={mount}/id_rsa"} <= set(worker["args"])
    assert [entry["containerPort"] for entry in worker["ports"]] == [int(port)]
    assert int(port) > 1024


@pytest.mark.parametrize(
    "form",
    ["{name}-worker-{index}.{name}.{space}.svc slots={slots}", "{name}-worker-{index}:{slots}"]
    + ["{name}-worker-{index}.{name}-worker.{space}.svc slots={slots}"],
)
def test_mpijob_hostfile(mpijob: dict[str, Any], tmp_path: Path, form: str) -> None:
    """Fails when the hostfile that the operator writes for this job gives other hosts."""
    name, slots = mpijob["metadata"]["name"], mpijob["spec"]["slotsPerWorker"]
    replicas = mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    written = [
        form.format(name=name, index=index, slots=slots, space="default")
        for index in range(replicas)
    ]
    (tmp_path / "hostfile").write_text("".join(f"{line}\n" for line in written))
    hosts = hosts_of_site({}, tmp_path / "hostfile")
    assert [host.slots for host in hosts] == [slots] * replicas
    assert [host.name for host in hosts] == [re.split("[ :]", line)[0] for line in written]
