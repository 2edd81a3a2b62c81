"""What `hvdtrain launch --print-kubernetes` prints; launch/mpijob.yaml is such a text."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from hvdtrain.cli import main
from hvdtrain.cli.kubernetes import to_yaml
from hvdtrain.launcher.kubernetes import LONGEST_LABEL, SECRET_VARIABLE, dns_label

ROOT = Path(__file__).parents[3]
MPIJOB = ROOT / "launch" / "mpijob.yaml"
SCHEMA = ROOT / "tests" / "data" / "mpijob.schema.yaml"
FORMS = ("job", "mpijob")
ROLES = ("Launcher", "Worker")
TRAIN = ["--", "train", "--model", "lenet"]
SETTINGS = {
    "one-node": [*TRAIN],
    "one-node-workers": ["-np", "3", *TRAIN],
    "nodes": ["--nnodes", "4", *TRAIN],
    "gpus": ["--nnodes", "2", "-np", "16", "--restarts", "3", *TRAIN, "--device", "cuda"],
    "store": ["--nnodes", "12", *TRAIN, "--output", "s3://bucket/runs"],
    "odd-name": ["--nnodes", "4", *TRAIN, "--experiment", "9: Tést_#1"],
    "script": ["--nnodes", "2", "--", "python", "my train.py", "--note", 'it\'s $(HOME) "$$5"'],
    "file-of-the-image": ["--", "/opt/run.sh", "a: b\nbackoffLimit: 9", "# c", "\t\x07", "é\u2028"],
}
WORDS = ["1e-3", "1_000", "0x1F", "017", "y", "No", "~", "", "- a", "null", "2026-01-01", "{a: b}"]
Objects = list[dict[str, Any]]
Print = Callable[..., str]


@pytest.fixture
def text_of(tmp_path: Path, monkeypatch, capfd) -> Print:
    """The text that is printed for a form, flags and command; with no settings of the user's."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("OMP_", "HOROVOD_", "NCCL_")):
            monkeypatch.delenv(name)

    def run(form: str, *words: str) -> str:
        argv = ["hvdtrain", "launch", "--print-kubernetes", form, "--image", "hvdtrain", *words]
        monkeypatch.setattr(sys, "argv", argv)
        assert main() == 0
        output, reported = capfd.readouterr()
        assert reported == ""
        assert list(tmp_path.iterdir()) == [], "something was started"
        return output

    return run


def pods_of(objects: Objects) -> dict[str, dict[str, Any]]:
    """The specifications of the pods, by role."""
    spec = objects[-1]["spec"]
    if objects[-1]["kind"] == "Job":
        return {"Worker": spec["template"]["spec"]}
    return {role: spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ROLES}


def container_of(objects: Objects, role: str) -> dict[str, Any]:
    (container,) = pods_of(objects)[role]["containers"]
    return container


def expanded(words: list[str]) -> list[str]:
    """What the kubelet makes of a container's words, without variables: expansion.go of
    kubernetes/third_party/forked/golang.
    """
    return [re.sub(r"\$(\$|\(\w+\))", lambda part: part[1].strip("()"), word) for word in words]


def closed(schema: Any) -> Any:
    """A schema that takes no other fields than its own."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**{key: closed(value) for key, value in schema.items()}, **more}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_cluster_takes_the_manifests(text_of: Print, form: str, setting: str) -> None:
    """Fails for a field that Kubernetes or the operator does not have, lacks, or that has a wrong
    value; for text that another reader of YAML takes for a number; or when a mesh puts its proxy
    into pods.
    """
    text = text_of(form, *SETTINGS[setting])
    *others, last = objects = list(yaml.safe_load_all(text))
    for version in ("1.31", "1.37"):
        for each in others if form == "mpijob" else objects:
            kubernetes_validate.validate(each, version, strict=True)
        for pod in pods_of(objects).values():
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod},
                version,
                strict=True,
            )
    if form == "mpijob":
        schema = closed(yaml.safe_load(SCHEMA.read_text("utf-8")))
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.validate(last, schema)
        assert (last["apiVersion"], last["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
        assert last["spec"]["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
        assert tuple(last["spec"]["mpiReplicaSpecs"]) == ROLES
    for template in re.findall(r"template:\n +metadata:\n(?: .*\n)*? +spec:", text):
        assert template.count("sidecar.istio.io/inject: 'false'") == 2
    for token in yaml.scan(text):
        if isinstance(token, yaml.ScalarToken) and token.plain:
            assert token.value not in ("y", "n", "Y", "N")
            assert token.value.isdigit() or not re.match(r"[-+.]?\d", token.value), token.value


@pytest.mark.parametrize("form", FORMS)
def test_nodes_and_workers(text_of: Print, form: str) -> None:
    """Fails when pods are too few or too many, or have no GPU or memory for each worker."""
    objects = list(yaml.safe_load_all(text_of(form, *SETTINGS["gpus"])))
    spec, worker = objects[-1]["spec"], container_of(objects, "Worker")
    if form == "job":
        assert (spec["completions"], spec["parallelism"]) == (2, 2)
        assert spec["completionMode"] == "Indexed"
        assert worker["args"][worker["args"].index("-np") + 1] == "16"
    else:
        assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
        assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
        assert spec["slotsPerWorker"] == 8
    for amounts in worker["resources"].values():
        assert amounts == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": 8}
    objects = list(yaml.safe_load_all(text_of(form, *SETTINGS["nodes"])))
    assert set(container_of(objects, "Worker")["resources"]["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize(
    ("form", "role"), [("job", "Worker"), ("mpijob", "Launcher"), ("mpijob", "Worker")]
)
def test_pods(text_of: Print, form: str, role: str) -> None:
    """Fails when a pod runs as root, keeps a capability or a token for the cluster's API, lacks
    shared memory or time to save, or mounts what is not there.
    """
    objects = list(yaml.safe_load_all(text_of(form, *SETTINGS["nodes"])))
    pod, container = pods_of(objects)[role], container_of(objects, role)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000, "as in docker/Dockerfile"
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > 60
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == "hvdtrain"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/job"]]["persistentVolumeClaim"]
    assert container.get("workingDir") == (None if container["name"] == "worker" else "/job")
    home = {"job": "/tmp", "mpijob": "/home/hvdtrain"}[form]
    assert volumes[mounts[home]]["emptyDir"] == volumes[mounts["/tmp"]]["emptyDir"] == {}
    assert ({"name": "HOME", "value": home} in container.get("env", [])) == (form == "job")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", ["nodes", "store"])
def test_closed_to_other_pods(text_of: Print, form: str, setting: str) -> None:
    """Fails if another pod may reach the job's pods, if they may reach more than one another and
    DNS where nothing else is asked for, or if the policy comes after the pods, or is of others.
    """
    policy, *_, job = list(yaml.safe_load_all(text_of(form, *SETTINGS[setting])))
    key = {"job": "batch.kubernetes.io/job-name", "mpijob": "training.kubeflow.org/job-name"}[form]
    ours = {"matchLabels": {key: job["metadata"]["name"]}}
    dns = [
        {"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")
    ]
    ingress = {"podSelector": ours, "ingress": [{"from": [{"podSelector": ours}]}]}
    egress = {"egress": [{"to": [{"podSelector": ours}]}, {"ports": dns}]}
    assert policy["kind"] == "NetworkPolicy"
    if setting == "store":
        assert policy["spec"] == {**ingress, "policyTypes": ["Ingress"]}
    else:
        assert policy["spec"] == {**ingress, **egress, "policyTypes": ["Ingress", "Egress"]}


def test_pods_of_a_job_meet(text_of: Print) -> None:
    """Fails when pods look for the first one, or the service for pods, by another name than
    Kubernetes gives them, or when they do not get the same secret.
    """
    objects = list(yaml.safe_load_all(text_of("job", *SETTINGS["nodes"])))
    _, service, job = objects
    name, pod = job["metadata"]["name"], pods_of(objects)["Worker"]
    assert name == "lenet-digits"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    args = container_of(objects, "Worker")["args"]
    address = f"{name}-0.{pod['subdomain']}:{service['spec']['ports'][0]['port']}"
    assert args[:6] == ["hvdtrain", "launch", "--nnodes", "4", "--rendezvous", address]
    (variable,) = [
        each for each in container_of(objects, "Worker")["env"] if each["name"] == SECRET_VARIABLE
    ]
    assert variable == {
        "name": "HVDTRAIN_RENDEZVOUS_SECRET",
        "valueFrom": {"secretKeyRef": {"name": f"{name}-rendezvous", "key": "secret"}},
    }
    alone = list(yaml.safe_load_all(text_of("job", *SETTINGS["one-node"])))
    assert [each["kind"] for each in alone] == ["NetworkPolicy", "Job"]
    assert "--rendezvous" not in container_of(alone, "Worker")["args"]


def test_failures_of_a_job(text_of: Print) -> None:
    """Fails when a pod is started again that would fail in the same way, or not again after a
    disruption; or when Kubernetes would refuse the policy, as the kubelet restarts containers.
    """
    objects = list(yaml.safe_load_all(text_of("job", *SETTINGS["nodes"])))
    spec = objects[-1]["spec"]
    assert pods_of(objects)["Worker"]["restartPolicy"] == "Never"
    assert spec["backoffLimit"] == 12
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    codes = [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules[1:]]
    assert codes == [("Ignore", [143]), ("FailJob", [2, 17])]
    args = container_of(objects, "Worker")["args"]
    assert args[-2:] == ["--resume", "auto"], "each start would begin a run of its own"
    assert args.count("--resume") == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", ["script", "file-of-the-image"])
def test_words_arrive(text_of: Print, form: str, setting: str) -> None:
    """Fails when a word of the command is changed by YAML, by Kubernetes or by a shell."""
    words = [*SETTINGS[setting], *WORDS]
    objects = list(yaml.safe_load_all(text_of(form, *words)))
    args = expanded(container_of(objects, next(iter(pods_of(objects))))["args"])
    after = words[words.index("--") :]
    assert args[-len(after) :] == after


def test_comments_change_nothing() -> None:
    """Fails when a comment is put into a value, which may look like any line."""
    document = {"kind": "Job", "args": ["a\nbackoffLimit: 1\n", "args:"], "backoffLimit": 2}
    text = to_yaml(document)
    assert yaml.safe_load(text) == document
    assert text.count("#") == 2


@pytest.mark.parametrize("form", FORMS)
def test_settings_are_passed_and_secrets_are_not(text_of: Print, form: str, monkeypatch) -> None:
    """Fails when a setting of Horovod or NCCL is lost, a flag of launch, or when the value of
    another variable is printed.
    """
    monkeypatch.setenv("NCCL_DEBUG", "1e3 $(HOME)")
    for name in (SECRET_VARIABLE, "AWS_SECRET_ACCESS_KEY", "HOROVOD_SECRET_KEY", "NCCL_TOKEN"):
        monkeypatch.setenv(name, "hidden-value")
    flags = ["--metrics-port", "0", "--restarts=2", "--network-interface", "eth1", "--verbose"]
    text = text_of(form, "--nnodes", "2", *flags, *TRAIN)
    container = container_of(
        list(yaml.safe_load_all(text)), "Worker" if form == "job" else ROLES[0]
    )
    assert {"name": "NCCL_DEBUG", "value": "1e3 $$(HOME)"} in container["env"]
    assert "hidden-value" not in text
    passed = "--network-interface eth1 --restarts 2 --metrics-port 0 --verbose"
    passed += " --stop-within-s 110 -- train"
    assert passed in shlex.join(container["args"])


@pytest.mark.parametrize(
    ("name", "suffix", "label"),
    [
        ("lenet-digits", "-1", "lenet-digits"),
        ("My_Run.2", "-1", "my-run-2"),
        ("2026-run", "-1", "hvdtrain-2026-run"),
        ("--x--", "-1", "x"),
        ("a" * 61, "-1", "a" * 61),
        ("a" * 61, "-10", "a" * 51 + "-35d5fc17"),
        ("日本", "-1", "hvdtrain-"),
    ],
)
def test_names_are_dns_labels(name: str, suffix: str, label: str) -> None:
    """Fails for a name that Kubernetes refuses for a pod, or that two experiments have."""
    made = dns_label(name, suffix)
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", made)
    assert len(made + suffix) <= LONGEST_LABEL
    assert made.startswith(label)
    assert dns_label(f"{name}é" * 9, suffix) != made


def test_the_recipe_is_what_is_printed(text_of: Print) -> None:
    """Fails when launch/mpijob.yaml is not the output of the command that it names."""
    text = MPIJOB.read_text("utf-8")
    words = shlex.split(text.splitlines()[0].partition(": ")[2])
    assert words[:6] == [
        "hvdtrain",
        "launch",
        *["--print-kubernetes", "mpijob", "--image", "hvdtrain"],
    ]
    assert text_of("mpijob", *words[6:]).rstrip() == text.rstrip()
