"""`hvdtrain launch --print-kubernetes`: the flags, their checks, and the text in YAML."""

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import Flag, Flags, Section, each_flag, wrong_flags
from hvdtrain.cli.worker_command import (
    check_command,
    check_train,
    job_name,
    read_command,
    read_train,
)
from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import Check
from hvdtrain.errors import EXIT_OK, UsageError, attempt, every_problem, refuse
from hvdtrain.launcher.horovodrun import NCCL_SETTINGS, SETTINGS
from hvdtrain.launcher.hosts import MOST_HOSTS, MOST_SLOTS
from hvdtrain.launcher.kubernetes import (
    CLAIM,
    HOME,
    JOB_FOLDER,
    POD_STOP_WITHIN_S,
    RETRIES,
    SECRET_KEY,
    USER,
    PodJob,
    dns_label,
    indexed_job,
    mpijob,
)
from hvdtrain.log import say

FORMS = {"job": indexed_job, "mpijob": mpijob}
LONGEST_IMAGE = 500  # characters
KUBERNETES_FLAGS = Section(
    "Kubernetes",
    (
        Flag(
            "--print-kubernetes",
            "print manifests that start this on pods, as an Indexed Job or as an MPIJob of the MPI "
            "Operator, and exit",
            choices=FORMS,
        ),
        Flag(
            "--image",
            "run the pods of --print-kubernetes from this image",
            metavar="NAME",
            check=Check(
                lambda name: re.fullmatch(rf"\w[\w./:@-]{{0,{LONGEST_IMAGE - 1}}}", name, re.ASCII),
                "={}: is not the name of an image, such as registry.example/hvdtrain:1",
            ),
        ),
    ),
)
# Of `launch`: what the pods do otherwise, and those that are printed in another form.
OF_HOSTS = (
    *("hosts", "hostfile", "ssh_port", "ssh_identity_file", "detach", "dry_run"),
    *("node_rank", "rendezvous", "rendezvous_secret_file"),
)
TRANSLATED = (
    *("np", "nnodes", "nproc_per_node", "stop_within_s", "print_kubernetes", "image", "command"),
)
PLAIN = re.compile(r"(--)?[A-Za-z/][\w./:=@-]*[\w/]", re.ASCII)  # text in any version of YAML
COMMENTS = {  # by kind of object and key
    "": {
        "sidecar.istio.io/inject": "A proxy in the pod would stand between workers, and keep the "
        "pod from completing.",
        "terminationGracePeriodSeconds": "After SIGTERM (a drain, kubectl delete) to the "
        "launcher, workers save within --stop-within-s.\nA worker's pod of an MPIJob ends at once.",
        "automountServiceAccountToken": "Nothing in the pod uses the cluster's API.",
        "runAsUser": "On OpenShift remove these three: each project has a uid of its own, with "
        "group 0.",
        "resources": "To adapt. The limit of cpu is also that of compute threads. With GPUs, one "
        "for each worker:\nnvidia.com/gpu, under both.",
        "persistentVolumeClaim": "With --output in an object store, and no other files of the "
        "job, `emptyDir: {}` will do.",
        "medium": "/dev/shm, in which data loaders and workers exchange data: the default of "
        "64 MiB is too small.\nCounts as the container's memory.",
    },
    "NetworkPolicy": {
        "policyTypes": "Pods of this job reach one another; others do not reach them. With Egress "
        "they reach nothing else\nbut DNS: downloads need another rule. (The cluster's network "
        "plugin must enforce this.)",
    },
    "Service": {"clusterIP": "Headless: it only gives the pods names."},
    "Job": {
        "backoffLimit": f"Failures of pods, all together: {RETRIES} of the whole job.",
        "podFailurePolicy": "Not counted: disruptions (a drain, preemption), and ends after "
        "SIGTERM, which saves (143).\nNot started again: a mistake in flags or configuration (2), "
        "a wrong gradient or result (17).",
        "successPolicy": "The end of pod 0, with the launcher, is that of the job: with --min-np "
        "others may be lost.",
        "args": "No `command`: the image's entry point (tini) stays process 1.",
    },
    "MPIJob": {
        "slotsPerWorker": "Workers on each pod: usually one for each of its GPUs.",
        "sshAuthMountPath": "Not ~/.ssh: the mount is read-only, and known_hosts belongs beside "
        "the keys.",
        "launcherCreationPolicy": "When the sshd of all workers answers (readinessProbe below).",
        "cleanPodPolicy": "When the launcher has ended, running worker pods are deleted.",
        "backoffLimit": "How often Kubernetes restarts a failed launcher. Failures of workers are "
        "handled by\n`hvdtrain launch --restarts`.",
        "ports": "sshd without root: a port above 1024, the job's key and user, no password.",
    },
}
SETTINGS_PASSED = frozenset(
    ("OMP_NUM_THREADS", *(f"HOROVOD_{name}" for name in SETTINGS))
    + tuple(f"NCCL_{name}" for name in NCCL_SETTINGS)
)


def print_kubernetes(flags: Flags, arguments: dict[str, Any], unknown: list[str]) -> int:
    """Print the manifests for the parsed arguments of `launch`. Raises UsageError."""
    refuse(unknown)
    form = arguments["print_kubernetes"]
    if form is None:
        raise UsageError("--image: names the image of --print-kubernetes job or mpijob; add it")
    job = read_pod_job(flags, arguments, form)
    needs = _needs(job, form)
    typed = shlex.join(["hvdtrain", *sys.argv[1:]])
    origin = [f"Printed by: {typed}", ""] if typed.isascii() and typed.isprintable() else []
    documents = [to_yaml(document) for document in FORMS[form](job)]
    say("".join(f"# {line}".rstrip() + "\n" for line in origin + needs) + "---\n".join(documents))
    return EXIT_OK


def read_pod_job(flags: Flags, arguments: dict[str, Any], form: str) -> PodJob:
    """Return the job that `launch` would start on pods. Raises UsageError with every problem."""
    command = read_command(arguments["command"])
    nodes = arguments["nnodes"] or 1
    np, per_node = arguments["np"], arguments.get("nproc_per_node") or ""
    workers = nodes * int(per_node) if per_node.isdigit() else nodes if np is None else np
    problems = [*check_command(command, elsewhere=True), *wrong_flags(flags, arguments)]
    problems += _check(flags, arguments, form, nodes, workers)
    config = attempt(problems, lambda: read_train(command))
    if config is not None:
        problems += check_train(config, workers, arguments["min_np"], arguments["restarts"])
        problems += _check_train(config)
        if config.run.resume is None:  # pods are started again
            command = [*command, "--resume", "auto"]
    refuse(problems)
    output = [] if config is None else [config.run.output]
    stop_within_s = arguments["stop_within_s"] or POD_STOP_WITHIN_S
    suffix = f"-worker-{nodes - 1}" if form == "mpijob" else f"-{nodes - 1}"
    return PodJob(
        name=dns_label(job_name(command, config), max(suffix, "-launcher", key=len)),
        image=arguments["image"],
        nodes=nodes,
        slots=workers // nodes,
        gpus=config is not None and config.model.device == "cuda",
        reaches_out=any("://" in word for word in command + output),
        flags=[*_passed_on(flags, arguments), "--stop-within-s", f"{stop_within_s:g}"],
        stop_within_s=stop_within_s,
        command=command,
        environment={name: os.environ[name] for name in SETTINGS_PASSED & set(os.environ)},
    )


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return a manifest as YAML, with comments."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_text(self, text: str) -> Any:
            style = None if PLAIN.fullmatch(text) else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, Dumper.represent_text)
    # No value has a second line, so each line has the key that it seems to have.
    text = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=math.inf)
    comments = {**COMMENTS[""], **COMMENTS.get(document["kind"], {})}
    lines = []
    for line in text.splitlines():
        key = re.match(r"( *)(?:- )?([\w./]+):", line)
        if key and key[2] in comments:  # at the first of several
            lines += [f"{key[1]}# {part}" for part in comments.pop(key[2]).splitlines()]
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _check(
    flags: Flags, arguments: Mapping[str, Any], form: str, nodes: int, workers: int
) -> list[str]:
    """Return the problems of values beside one another."""
    several, per_node = form == "job" and nodes > 1, arguments.get("nproc_per_node") or "1"
    min_np = arguments["min_np"] or 0
    return every_problem(
        (arguments["image"] is None, "--print-kubernetes: which image? Give --image NAME"),
        *(
            (True, f"{flag.spelling}: does not apply to pods; leave it out")
            for flag in _given(flags, arguments)
            if flag.dest in OF_HOSTS
        ),
        (not 1 <= workers <= MOST_SLOTS, f"-np {workers}: must be from 1 to {MOST_SLOTS}"),
        (nodes > MOST_HOSTS, f"--nnodes={nodes}: must be at most {MOST_HOSTS}"),
        (nodes > 0 and workers % nodes, f"-np {workers}: must be a multiple of --nnodes={nodes}"),
        (0 < workers < min_np, f"--min-np={min_np}: is above the number of workers, {workers}"),
        (not per_node.isdigit(), f"--nproc-per-node={per_node}: must be a number, for pods"),
        (
            several and arguments["controller"] == "mpi",
            "--controller=mpi: starts processes over SSH, which pods of a Job do not have: use "
            "--print-kubernetes mpijob, or leave it out",
        ),
    )


def _check_train(config: TrainConfig) -> list[str]:
    """Return the problems of a `train` command in pods, which are started again after failures."""
    output, resume = config.run.output, config.run.resume
    is_elsewhere = output.startswith(("/", "~")) and not Path(output).is_relative_to(JOB_FOLDER)
    return every_problem(
        (
            is_elsewhere,
            f"train: --output={output}: is lost with the pod; give a folder below {JOB_FOLDER}, "
            "which all pods share, or a relative one, which is there too",
        ),
        (
            resume not in (None, "auto"),
            f"train: --resume={resume}: a pod that is started again continues from the newest "
            "checkpoint: use --resume auto",
        ),
    )


def _given(flags: Flags, arguments: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield the flags whose values differ from the defaults."""
    for flag in each_flag(flags):
        value = arguments.get(flag.dest)
        if value is not None and value is not False and value != flag.default:
            yield flag


def _passed_on(flags: Flags, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the flags that `launch` gets in the pods as it got them here."""
    for flag in _given(flags, arguments):
        if (name := flag.dest) not in TRANSLATED:
            yield flag.spelling
            yield from () if flag.type is bool else [str(arguments[name])]


def _needs(job: PodJob, form: str) -> list[str]:
    """Return the lines on what a cluster must have, and how to start the job."""
    share = f"all pods share it as their working folder, {JOB_FOLDER}."
    operator = (
        "- The Kubeflow MPI Operator (v2beta1). It makes keys for this job alone.",
        f"- In the image OpenSSH, and a user with uid {USER} and the home folder {HOME}.",
    )
    secret = (
        "- A secret by which the pods recognise one another, made once:",
        f"    openssl rand -hex 32 | tr -d '\\n' | kubectl create secret generic {job.secret} "
        f"--from-file={SECRET_KEY}=/dev/stdin",
    )
    label = "batch.kubernetes.io/job"
    first = f"-l {label}-name={job.name},{label}-completion-index=0"
    return [
        "Start:  kubectl apply -f FILE",
        f"Output: kubectl logs -f {f'job/{job.name}-launcher' if form == 'mpijob' else first}",
        "Needs:",
        f"- The claim `{CLAIM}`, ReadWriteMany: {share}",
        *(operator if form == "mpijob" else secret if job.nodes > 1 else ()),
    ]
