"""The recipes in launch/: slurm.sbatch with a fake launcher and a fake Slurm, for what a real one
(tests/hosts/test_slurm.py) does not show quickly; and mpijob.yaml.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from hvdtrain.launcher.sites import hosts_of_site

LAUNCH = Path(__file__).parents[3] / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
MPIJOB = LAUNCH / "mpijob.yaml"
JOB_S = 30.0  # for a fake job of a moment

INTEGER = {"type": "integer", "minimum": 0}


def _record(**fields: object) -> dict[str, object]:
    return {"type": "object", "additionalProperties": False, "properties": fields}


# What the operator takes, but for the pods themselves and rare fields: of manifests/base/
# kubeflow.org_mpijobs.yaml (v2beta1), and the values of pkg/apis/kubeflow/v2beta1/types.go.
REPLICAS = _record(
    replicas=INTEGER, restartPolicy={"enum": ["Never", "OnFailure"]}, template={"type": "object"}
)
MPIJOB_SPEC = _record(
    slotsPerWorker=INTEGER,
    runLauncherAsWorker={"type": "boolean"},
    sshAuthMountPath={"type": "string"},
    launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
    mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
    runPolicy=_record(
        cleanPodPolicy={"enum": ["None", "Running", "All"]},
        ttlSecondsAfterFinished=INTEGER,
        activeDeadlineSeconds=INTEGER,
        backoffLimit=INTEGER,
        suspend={"type": "boolean"},
    ),
    mpiReplicaSpecs={
        "required": ["Launcher", "Worker"],
        **_record(Launcher=REPLICAS, Worker=REPLICAS),
    },
) | {"required": ["mpiReplicaSpecs"]}

FAKE_HVDTRAIN = """#!/bin/bash
echo "$@" >> arguments
trap 'echo TERM >> signals; sleep 0.3; exit "$ON_TERM"' TERM
touch started
for _ in $(seq "$TENTHS"); do sleep 0.1; done
exit "$AT_END"
"""
FAKE_SCONTROL = """#!/bin/bash
echo "$@" >> scontrol
if [ "$1" = show ]; then
    [ -e shown ] && FIRST_STATE=$STATE
    echo "JobId=7 JobName=hvdtrain JobState=${FIRST_STATE:-$STATE} Reason=None"
    touch shown
fi
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


def finish(
    job: subprocess.Popen[str],
    folder: Path,
    signals: int = 0,
    kind: signal.Signals = signal.SIGTERM,
) -> tuple[int, str]:
    """Signal the script so often, as --signal=B: does, and wait; its exit code and output."""
    try:
        end = time.monotonic() + JOB_S
        while not (folder / "started").exists() and time.monotonic() < end:
            time.sleep(0.02)
        for number in range(signals):
            time.sleep(0.1 * bool(number))
            job.send_signal(kind)
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
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1])
def test_sbatch_requeues_when_stopped(tmp_path: Path, kind: signal.Signals, signals: int) -> None:
    """Fails when the launcher receives no signal, or more than one (it would not save then), or
    when the job does not go back into the queue after it has saved.
    """
    code, output = finish(start_job(tmp_path), tmp_path, signals, kind)
    assert (code, lines(tmp_path / "signals")) == (143, ["TERM"])
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7", "requeue 7"]
    assert "stopped; requeued" in output


def test_sbatch_requeues_while_slurm_hands_out_the_signal(tmp_path: Path) -> None:
    """Fails when a job is not requeued because Slurm shows SIGNALING for a moment."""
    job = start_job(tmp_path, FIRST_STATE="SIGNALING")
    code, output = finish(job, tmp_path, 1)
    assert (code, lines(tmp_path / "signals")) == (143, ["TERM"])
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7"] * 2 + ["requeue 7"]
    assert "stopped; requeued" in output


def test_sbatch_requeues_when_its_tasks_were_stopped(tmp_path: Path) -> None:
    """Fails when a job that has saved after SIGUSR1 to all but the script does not come back."""
    code, output = finish(start_job(tmp_path, TENTHS="1", AT_END="138"), tmp_path)
    assert (code, "stopped; requeued" in output) == (138, True)


def test_sbatch_says_that_there_is_no_hvdtrain(tmp_path: Path) -> None:
    """Fails when a job whose PATH was emptied ends with a riddle of srun or bash."""
    done = subprocess.run(
        ["/bin/bash", str(SBATCH)],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    assert done.returncode == 127
    assert "no hvdtrain in" in done.stderr and "--export=NONE" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("variables", "code", "asked", "said"),
    [
        ({"SLURM_RESTART_COUNT": "100"}, 143, True, "not requeued, as this was done 100 times"),
        ({"ON_TERM": "0"}, 0, False, ""),
        ({"ON_TERM": "1"}, 1, False, ""),
        ({"ON_TERM": "17"}, 17, False, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sbatch_requeues_only_when_right(
    tmp_path: Path, variables: dict[str, str], code: int, asked: bool, said: str
) -> None:
    """Fails when a job is requeued that has finished, failed, or never ends."""
    assert finish(start_job(tmp_path, **variables), tmp_path, 1)[0] == code
    assert lines(tmp_path / "signals") == ["TERM"]
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7"] * asked


def test_sbatch_reports_a_refusal_of_slurm(tmp_path: Path) -> None:
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
def objects() -> list[dict[str, Any]]:
    """What kubectl creates, in its order."""
    return list(yaml.safe_load_all(MPIJOB.read_text("utf-8")))


@pytest.fixture(scope="module")
def mpijob(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return objects[-1]


def container_of(job: dict[str, Any], role: str) -> dict[str, Any]:
    (container,) = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return container


def test_mpijob_has_the_operators_fields(mpijob: dict[str, Any]) -> None:
    """Fails for a field that the operator does not have, lacks, or that has a wrong value."""
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


def test_mpijob_is_closed_to_other_pods(objects: list[dict[str, Any]]) -> None:
    """Fails if another pod may reach the job's pods, if they may reach more than one another and
    DNS, if the policy comes after pods that it is to protect, or selects those of another job.
    """
    assert [thing["kind"] for thing in objects] == ["NetworkPolicy", "MPIJob"]
    policy, job = objects
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    ours = {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}
    dns = [
        {"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")
    ]
    assert policy["spec"] == {
        "podSelector": ours,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": ours}]}],
        "egress": [{"to": [{"podSelector": ours}]}, {"ports": dns}],
    }
    assert policy["metadata"].get("namespace") == job["metadata"].get("namespace")


@pytest.mark.parametrize("role", ROLES)
def test_mpijob_pods(mpijob: dict[str, Any], role: str) -> None:
    """Fails when a pod runs as root, keeps a capability or a token for the cluster's API, lacks
    shared memory or resources, or mounts what is not there; or when the image is bound to a
    registry, or a secret is written into the file.
    """
    pod = mpijob["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    container = container_of(mpijob, role)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"] == "hvdtrain"
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {path for path, name in mounts.items() if volumes[name].get("emptyDir") == {}} == {
        "/home/hvdtrain",
        "/tmp",
    }
    assert not any("secret" in volume for volume in pod["volumes"])
    assert "env" not in container
    assert "PRIVATE KEY" not in MPIJOB.read_text("utf-8")


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_kubernetes_takes_the_manifest(
    objects: list[dict[str, Any]], mpijob: dict[str, Any], version: str
) -> None:
    """Fails for a field that Kubernetes or the operator does not know, or of another type, in the
    policy, in the job or in its pods; or if a mesh puts its proxy into them.
    """
    kubernetes_validate.validate(objects[0], version, strict=True)
    jsonschema.validate(mpijob["spec"], MPIJOB_SPEC)
    for role in ROLES:
        template = mpijob["spec"]["mpiReplicaSpecs"][role]["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, version, strict=True)
        for kind in ("labels", "annotations"):
            assert template["metadata"][kind] == {"sidecar.istio.io/inject": "false"}


def test_mpijob_launcher_and_worker_fit(mpijob: dict[str, Any], tmp_path: Path) -> None:
    """Fails when the launcher's shell script does not run, does not trust the job's own key, or
    connects to another port than the workers' sshd listens on.
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
