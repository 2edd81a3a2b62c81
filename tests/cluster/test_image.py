"""The image: its content, and training, stopping and resuming in it."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from launch.containers.image import dockerfile_default
from tests.cluster.containers import ROOT, docker, must, wait_for
from tests.hosts.trials import END_S

LARGEST = 1.8e9  # bytes; measured: 1.45e9
EVERYTHING = ["/", "-xdev", "-not", "-path", "/proc/*"]
# Programs with the owner's or the group's rights, and files that everybody may write to.
RIGHTS = "( ( -perm /6000 -type f ) -o ( -perm -0002 -not -type l -not -path /dev/* ) )"
KEY_NAMES = re.compile(r"(^|/)(ssh_host_\w+_key|host_ed25519|id_(rsa|dsa|ecdsa|ed25519)|.*\.p12)$")
KEY = "-----BEGIN PRIVATE" + " KEY-----"
KEY_CONTENT = re.compile(rb"^-----BEGIN [A-Z ]*PRIVATE KEY-----\s*$", re.MULTILINE)
LONGEST_KEY = 1 << 20
REMOVED_KEYS = """\
FROM {image}
USER root
RUN touch /etc/host_ed25519 && echo '{key}' > /etc/mine.pem
RUN rm /etc/host_ed25519 /etc/mine.pem
"""


def found_in(image: str, tests: str) -> set[str]:
    """Return the paths that `find`, run as root, prints in an image."""
    options = ["--rm", "--user", "0", "--network", "none", "--entrypoint", "/usr/bin/find"]
    return set(must(docker("run", *options, image, *EVERYTHING, *tests.split())).splitlines())


def test_adds_no_rights_to_its_base(image: str) -> None:
    """Fails when a package or a step brings a setuid program or a place that all may write to."""
    base = dockerfile_default(ROOT, "BASE")
    assert found_in(image, RIGHTS) <= found_in(base, RIGHTS)


def test_no_layer_holds_a_private_key(image: str, tmp_path: Path) -> None:
    """Fails when a key lies in any layer, and so in any file. As a control, one image on top of it
    has two keys that its last layer removes: fails when small or covered layers are not seen.
    """
    (tmp_path / "Dockerfile").write_text(REMOVED_KEYS.format(image=image, key=KEY))
    spoiled = must(docker("build", "--quiet", str(tmp_path))).split()[-1]
    try:
        keys, names = _read_layers(spoiled)
    finally:
        docker("rmi", spoiled)
    assert any(name.endswith("usr/sbin/sshd") for name in names), "the image's layers were not read"
    assert sorted(keys) == ["etc/host_ed25519", "etc/mine.pem"]


def _read_layers(image: str) -> tuple[list[str], list[str]]:
    """Return the names of the keys in any layer of an image, and of all files."""
    keys, names = [], []
    for layer in _layers(image):
        for file in layer:
            names.append(file.name)
            if KEY_NAMES.search(file.name) or _holds_key(layer, file):
                keys.append(file.name)
    return keys, names


def _layers(image: str) -> Iterator[tarfile.TarFile]:
    """Yield the layers of an image: archives in an archive, named differently by version."""
    with (
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved,
        tarfile.open(fileobj=saved.stdout, mode="r|") as archive,
    ):
        for member in archive:
            content: IO[bytes] | None = archive.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            try:
                layer = tarfile.open(fileobj=content, mode="r|*")  # noqa: SIM115 # closed below
            except tarfile.ReadError:  # a description of the image
                continue
            with layer:
                yield layer


def _holds_key(layer: tarfile.TarFile, file: tarfile.TarInfo) -> bool:
    """Return whether a file contains a key.

    Its name is not enough, as certificates have names like keys. Binary files do not count:
    programs contain the first line of a key.
    """
    if not file.isfile() or file.size > LONGEST_KEY:
        return False
    reader = layer.extractfile(file)
    content = reader.read() if reader else b""
    return b"\0" not in content and bool(KEY_CONTENT.search(content))


def test_is_not_root_and_holds_no_compiler(image: str) -> None:
    """Fails when USER is lost, when a compiler comes in, or sshd is not where recipes expect it."""
    compilers = "for name in cc gcc g++ c++ make ld; do command -v $name; done"
    program = f"id -u; getent passwd 1000; ls /usr/sbin/sshd; {compilers}"
    lines = docker("run", "--rm", image, "sh", "-c", program).stdout.splitlines()
    user = "hvdtrain:x:1000:1000::/home/hvdtrain:/bin/bash"
    assert lines == ["1000", user, "/usr/sbin/sshd"]


def test_is_not_larger_than_documented(image: str) -> None:
    """Fails when build tools, test data or CUDA libraries come in."""
    size = int(must(docker("image", "inspect", "--format", "{{.Size}}", image)))
    assert 0.5e9 < size < LARGEST


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

        wait_for(lambda: "step 20/230" in printed(), END_S, printed)
        must(docker("stop", "--time", "60", name, timeout_s=70))
        state = must(docker("inspect", "--format", "{{.State.ExitCode}}", name)).strip()
        assert state == "143", printed()
        assert "stopped by SIGTERM" in printed()
        must(docker("start", name))
        assert must(docker("wait", name, timeout_s=120)).strip() == "0", printed()
        assert "finished: 10 epochs, 230 steps" in printed()
        assert printed().count("step 10/230") == 1, "it started from the beginning"
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
