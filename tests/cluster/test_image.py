"""The image: what is in it, and that it trains, stops and goes on."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Iterator

from hvdtrain.launcher.cluster_image import dockerfile_default
from tests.cluster.containers import ROOT, docker, must, wait_for

EVERYTHING = ["find", "/", "-xdev", "-not", "-path", "/proc/*"]
KEY_NAMES = re.compile(r"(^|/)(ssh_host_\w+_key|id_(rsa|dsa|ecdsa|ed25519)|.*\.p12)$")


def found_in(image: str, *tests: str) -> set[str]:
    """What `find` names in an image, as root."""
    options = ["--rm", "--user", "0", "--network", "none", "--entrypoint", "/usr/bin/find"]
    return set(must(docker("run", *options, image, *EVERYTHING[1:], *tests)).splitlines())


def test_adds_no_rights_to_its_base(image: str) -> None:
    """Fails when a package or a step brings a setuid program or a place that all may write to."""
    base = dockerfile_default(ROOT, "BASE")
    assert found_in(image, "-perm", "/6000", "-type", "f") <= found_in(
        base, "-perm", "/6000", "-type", "f"
    )
    writable = ["-perm", "-0002", "-not", "-type", "l", "-not", "-path", "/dev/*"]
    assert found_in(image, *writable) <= found_in(base, *writable)


def test_no_layer_holds_a_private_key(image: str) -> None:
    """Fails when a key lies in any layer, also under one that removes it, or in any file."""
    names = list(_names_in_layers(image))
    assert any(name.endswith("usr/sbin/sshd") for name in names), "no layer was read"
    assert not [name for name in names if KEY_NAMES.search(name)]
    marker = "BEGIN [A-Z ]*PRIVATE KEY-----$"
    grep = ["grep", "-rlIE", marker, "/etc", "/home", "/root", "/opt", "/usr", "/var", "/tmp"]
    options = ["--rm", "--user", "0", "--network", "none", "--entrypoint", grep[0]]
    done = docker("run", *options, image, *grep[1:])
    assert (done.returncode, done.stdout) == (1, ""), done.stdout


def _names_in_layers(image: str) -> Iterator[str]:
    with (
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved,
        tarfile.open(fileobj=saved.stdout, mode="r|") as archive,
    ):
        for member in archive:  # a layer is an archive of its own, by different names over time
            layer = archive.extractfile(member)
            if layer and member.size > 10240 and not member.name.endswith(".json"):
                with tarfile.open(fileobj=layer, mode="r|") as files:
                    yield from (file.name for file in files)


def test_is_not_root_and_holds_no_compiler(image: str) -> None:
    """Fails when USER is lost, when a compiler comes in, or sshd is not where recipes expect it."""
    program = "id -u; getent passwd 1000; ls /usr/sbin/sshd; command -v cc gcc g++ c++ make ld"
    lines = docker("run", "--rm", image, "sh", "-c", program).stdout.splitlines()
    user = "hvdtrain:x:1000:1000::/home/hvdtrain:/bin/bash"
    assert lines == ["1000", user, "/usr/sbin/sshd"]


def test_has_labels_and_a_health_check(image: str) -> None:
    """Fails when one of them is dropped from the Dockerfile."""
    (shown,) = json.loads(must(docker("image", "inspect", image)))
    assert shown["Config"]["Labels"]["org.opencontainers.image.title"] == "hvdtrain"
    assert shown["Config"]["Healthcheck"]["Test"] == ["CMD", "hvdtrain", "--version"]


def test_quickstart_stops_saves_and_goes_on(image: str) -> None:
    """`docker run IMAGE`, `docker stop`, `docker start`. Fails when process 1 swallows SIGTERM,
    nothing is saved, or the container does not go on where it was.
    """
    name = must(docker("run", "--detach", "--env", "OMP_NUM_THREADS=1", image)).strip()
    try:

        def printed() -> str:
            return docker("logs", name).stdout

        wait_for(lambda: "step 20/230" in printed(), 90, printed)
        must(docker("stop", "--time", "60", name, timeout_s=70))
        state = must(docker("inspect", "--format", "{{.State.ExitCode}}", name)).strip()
        assert state == "143", printed()
        assert "stopped by SIGTERM" in printed()
        must(docker("start", name))
        assert must(docker("wait", name, timeout_s=120)).strip() == "0", printed()
        assert "finished: 10 epochs, 230 steps" in printed()
        assert printed().count("step 10/230") == 1, "it began anew"
    finally:
        docker("rm", "--force", "--volumes", name)


def test_missing_data_is_named(image: str) -> None:
    """The data volume is not mounted. Fails when the folder is not named, or training begins."""
    data = "imagefolder:/photos"
    done = docker("run", "--rm", image, "hvdtrain", "train", "--model", "lenet", "--data", data)
    assert done.returncode == 2
    assert "/photos" in done.stdout and "Traceback" not in done.stdout


def test_output_that_cannot_be_written_is_named(image: str) -> None:
    """A read-only output volume. Fails when the message does not say so, or training begins."""
    command = ["hvdtrain", "train", "--model", "lenet", "--data", "digits", "--max-steps", "2"]
    mount = ["--tmpfs", "/home/hvdtrain/runs:ro"]
    done = docker("run", "--rm", *mount, image, *command)
    assert done.returncode in (1, 2)
    assert "runs" in done.stdout and "Read-only" in done.stdout and "Traceback" not in done.stdout
