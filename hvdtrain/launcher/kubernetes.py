"""Kubernetes objects that start a job: an Indexed Job, or an MPIJob of the Kubeflow MPI Operator.

Indexed Job: every pod runs `hvdtrain launch --nnodes N --rendezvous NAME-0.NAME:PORT`; a headless
Service gives pods their names. MPIJob: the launcher's pod starts workers over SSH in the others.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import EXIT_MISMATCH, EXIT_USAGE

Object = dict[str, Any]

LONGEST_LABEL = 63  # of a DNS label (RFC 1035)
PORT = 29400  # of the rendezvous
SECRET_VARIABLE, SECRET_KEY = "HVDTRAIN_RENDEZVOUS_SECRET", "secret"
JOB_FOLDER, CLAIM = "/job", "hvdtrain-job"
USER = 1000  # of docker/Dockerfile
HOME = "/home/hvdtrain"  # of this user, where sshd and ssh look for it
RETRIES = 3  # of the whole job
POD_STOP_WITHIN_S = 110  # from SIGTERM, unless --stop-within-s has another time
END_S = 10  # to SIGKILL, after that time
STOPPED = 128 + 15
CORES, MEMORY_GI, SHM_GI = 2, 8, 1  # of each worker
DNS_PORTS = (53, 5353)  # 5353: where the pods of OpenShift's DNS listen
SSH_PORT, KEYS = 2222, "/etc/mpi-ssh"
# The workers use the job's key as their host key, so it is known in advance and host keys are
# checked. `exec` makes SIGTERM reach the launcher itself.
TAKE_KEYS = (
    f"umask 077; mkdir -p ~/.ssh; cp {KEYS}/id_rsa ~/.ssh/id_rsa; "
    f"sed 's/^/* /' {KEYS}/id_rsa.pub > ~/.ssh/known_hosts; "
    'exec "$@"'
)
# A proxy in the pod would stand between workers, and keep the pod from completing.
NO_PROXY = {"sidecar.istio.io/inject": "false"}
POD_METADATA = {"labels": NO_PROXY, "annotations": NO_PROXY}


@dataclass(frozen=True)
class PodJob:
    """A job for pods."""

    name: str  # a DNS label, with room for the suffixes of pods
    image: str
    nodes: int
    slots: int  # workers of each node
    gpus: bool  # one for each worker
    reaches_out: bool  # to addresses outside of the job
    flags: Sequence[str]  # of `hvdtrain launch`
    command: Sequence[str]  # of the workers
    environment: Mapping[str, str]
    stop_within_s: float

    @property
    def secret(self) -> str:
        """Return the name of the Secret that the pods share."""
        return f"{self.name}-rendezvous"


def dns_label(name: str, suffix: str) -> str:
    """Return a DNS label like `name`, to which `suffix` can be added.

    Where characters are cut off, or none of the name is left, a digest keeps names apart.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"hvdtrain-{label}".rstrip("-")
    room = LONGEST_LABEL - len(suffix)
    if len(label) <= room and re.search("[A-Za-z0-9]", name):
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{label[: room - len(digest) - 1].rstrip('-')}-{digest}"


def indexed_job(job: PodJob) -> list[Object]:
    """Return what `kubectl apply` takes to train without SSH."""
    label = {"batch.kubernetes.io/job-name": job.name}  # Kubernetes puts it on the pods
    words, environment = ["-np", str(job.nodes * job.slots)], [{"name": "HOME", "value": "/tmp"}]
    if job.nodes > 1:
        address = f"{job.name}-0.{job.name}:{PORT}"
        words = ["--nnodes", str(job.nodes), "--rendezvous", address, *words]
        reference = {"name": job.secret, "key": SECRET_KEY}
        source: Object = {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": reference}}
        environment.append(source)
    container = {
        "name": "hvdtrain",
        "image": job.image,
        "args": literal(["hvdtrain", "launch", *words, *job.flags, "--", *job.command]),
        "workingDir": JOB_FOLDER,
        "env": environment + _variables(job),
        "resources": _resources(job),
        **_mounted(("job", JOB_FOLDER), ("tmp", "/tmp"), ("shm", "/dev/shm")),
    }
    pod = _pod(container, job, restartPolicy="Never", subdomain=job.name)
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": RETRIES * job.nodes,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": {"metadata": POD_METADATA, "spec": pod},
    }
    objects = [_network_policy(job, label)] + ([_service(job, label)] if job.nodes > 1 else [])
    return [*objects, _object("batch/v1", "Job", job, spec)]


def mpijob(job: PodJob) -> list[Object]:
    """Return what `kubectl apply` takes to train under the Kubeflow MPI Operator (v2beta1)."""
    label = {"training.kubeflow.org/job-name": job.name}  # the operator puts it on the pods
    mounts = _mounted(("job", JOB_FOLDER), ("home", HOME), ("tmp", "/tmp"), ("shm", "/dev/shm"))
    launch = ["hvdtrain", "launch", "--ssh-port", str(SSH_PORT), *job.flags, "--", *job.command]
    variables = _variables(job)
    launcher = {
        "name": "launcher",
        "image": job.image,
        "command": ["/bin/sh", "-euc"],
        "args": [TAKE_KEYS, "launcher", *literal(launch)],
        "workingDir": JOB_FOLDER,
        **({"env": variables} if variables else {}),
        "resources": _equal({"cpu": "1", "memory": "2Gi"}),
        **mounts,
    }
    worker = {
        "name": "worker",
        "image": job.image,
        "command": ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null"],
        "args": [f"-o{option}" for option in _sshd_options()],
        "ports": [{"containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}},
        "resources": _resources(job),
        **mounts,
    }
    spec = {
        "slotsPerWorker": job.slots,
        "sshAuthMountPath": KEYS,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RETRIES},
        "mpiReplicaSpecs": {
            "Launcher": _replicas(1, "Never", _pod(launcher, job)),
            "Worker": _replicas(job.nodes, "OnFailure", _pod(worker, job)),
        },
    }
    return [_network_policy(job, label), _object("kubeflow.org/v2beta1", "MPIJob", job, spec)]


def literal(words: Sequence[str]) -> list[str]:
    """Return words in which Kubernetes expands no `$(NAME)`."""
    return [word.replace("$", "$$") for word in words]


def _object(version: str, kind: str, job: PodJob, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def _network_policy(job: PodJob, label: Mapping[str, str]) -> Object:
    """Return a policy by which the job's pods are reached by, and reach, one another and DNS."""
    pods = {"podSelector": {"matchLabels": label}}
    dns = [{"protocol": kind, "port": port} for port in DNS_PORTS for kind in ("UDP", "TCP")]
    spec: Object = {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    if not job.reaches_out:
        egress = [{"to": [pods]}, {"ports": dns}]
        spec = {**spec, "policyTypes": ["Ingress", "Egress"], "egress": egress}
    return _object("networking.k8s.io/v1", "NetworkPolicy", job, spec)


def _service(job: PodJob, label: Mapping[str, str]) -> Object:
    """Return a service that gives the pods names: NAME-0.NAME for the first."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": label,
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return _object("v1", "Service", job, spec)


def _failure_rules() -> list[Object]:
    """Return which ends of a pod do not count as failures, and which end the job at once."""
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]

    def codes(*values: int) -> Object:
        return {"onExitCodes": {"operator": "In", "values": list(values)}}

    return [
        {"action": "Ignore", "onPodConditions": disrupted},
        {"action": "Ignore", **codes(STOPPED)},
        {"action": "FailJob", **codes(EXIT_USAGE, EXIT_MISMATCH)},
    ]


def _replicas(count: int, restart_policy: str, pod: Object) -> Object:
    template = {"metadata": POD_METADATA, "spec": pod}
    return {"replicas": count, "restartPolicy": restart_policy, "template": template}


def _pod(container: Object, job: PodJob, **more: object) -> Object:
    """Return a pod's specification, without rights and without files of the image to write."""
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_GI * job.slots}Gi"}}
    kinds = {"job": {"persistentVolumeClaim": {"claimName": CLAIM}}, "shm": memory}
    names = [mount["name"] for mount in container["volumeMounts"]]
    restrictions = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return {
        **more,
        "terminationGracePeriodSeconds": math.ceil(job.stop_within_s) + END_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{**container, "securityContext": restrictions}],
        "volumes": [{"name": name, **kinds.get(name, {"emptyDir": {}})} for name in names],
    }


def _mounted(*volumes: tuple[str, str]) -> Object:
    return {"volumeMounts": [{"name": name, "mountPath": path} for name, path in volumes]}


def _resources(job: PodJob) -> Object:
    amounts = {"cpu": str(CORES * job.slots), "memory": f"{MEMORY_GI * job.slots}Gi"}
    return _equal({**amounts, **({"nvidia.com/gpu": job.slots} if job.gpus else {})})


def _equal(amounts: Object) -> Object:
    return {"requests": amounts, "limits": amounts}


def _variables(job: PodJob) -> list[Object]:
    names = job.environment
    return [{"name": name, "value": literal([names[name]])[0]} for name in sorted(names)]


def _sshd_options() -> list[str]:
    """Return the settings of an sshd without root: the job's key and user only, no password.

    The mounted keys belong to root, which StrictModes would reject.
    """
    keys = [f"HostKey={KEYS}/id_rsa", f"AuthorizedKeysFile={KEYS}/authorized_keys"]
    off = ("StrictModes", "UsePAM", "PasswordAuthentication", "KbdInteractiveAuthentication")
    return [f"Port={SSH_PORT}", *keys, "PidFile=none", *(f"{name}=no" for name in off)]
