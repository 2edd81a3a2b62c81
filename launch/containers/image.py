"""The image of a cluster: found by the hash of its inputs, or else built."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build.wheel import cache_folder
from hvdtrain.log import say
from launch.containers.engine import Engine, EngineError, last_lines, run
from launch.containers.wheels import put_wheels, remove_wheels
from launch.install.torch_packages import CPU_INDEX

NAME = "hvdtrain"
DOCKERFILE = Path("docker", "Dockerfile")
SOURCES = (
    *("docker/sshd_config", "launch/containers/cluster_keys.py"),
    *("launch/constraints.txt", "setup.py", "pyproject.toml"),
)
AUTHORITIES = ("/usr/local/share/ca-certificates", "/etc/pki/ca-trust/source/anchors")
FROM_HOST = "from-host"
DEBIAN_RELEASE = "bookworm"


def ensure_image(engine: Engine, root: Path) -> str:
    """Return the tag of this checkout's image, building it if missing. Raises PreflightError."""
    try:
        with (root / DOCKERFILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one user of the build context at a time
            return _find_or_build(engine, root)
    except (OSError, ValueError) as error:
        raise PreflightError(f"the image cannot be prepared from {root}: {error}") from error


def _find_or_build(engine: Engine, root: Path) -> str:
    put_authorities(root)
    tag = f"{NAME}:{image_key(root)}"
    if engine.succeeds("image", "inspect", tag):
        return tag
    started = time.monotonic()
    _ensure_base(engine, dockerfile_default(root, "BASE"))
    try:
        remove_wheels(root)
        if not (root / "docker" / "wheels" / "complete").exists():
            _try_wheels(root)
        _build(root, tag)
    finally:  # otherwise builds by hand would use them
        remove_wheels(root)
    engine.capture("tag", tag, NAME)
    say(f"cluster: built {tag}, also called {NAME}, in {time.monotonic() - started:.0f} s")
    return tag


def _build(root: Path, tag: str) -> None:
    say(f"cluster: building the image {tag}: takes some minutes the first time")
    command = ["docker", "build", "--file", str(root / DOCKERFILE), "--tag", tag, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log = cache_folder().parent / "image-build.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout + done.stderr, "utf-8")
        raise EngineError(
            f"the image could not be built (exit code {done.returncode}; all of its output is in "
            f"{log}):\n{last_lines(done.stdout + done.stderr)}"
        )


def image_key(root: Path) -> str:
    """Return a hash of all inputs of the image, except for the wheels that are downloaded here."""
    digest = hashlib.sha256()
    for path in _inputs(root):
        content = path.read_bytes() if path.suffix not in (".whl", ".gz") else b""
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root)} {size} ".encode() + content)
    return digest.hexdigest()[:12]


def dockerfile_default(root: Path, argument: str) -> str:
    """Return the default of a build argument of the Dockerfile."""
    text = (root / DOCKERFILE).read_text("utf-8")
    (value,) = re.findall(rf"^ARG {argument}=(\S+)$", text, re.MULTILINE)
    return str(value)


def put_authorities(root: Path) -> None:
    """Copy the certificate authorities added to this machine into the build context."""
    target = root / "docker" / "ca" / FROM_HOST
    shutil.rmtree(target, ignore_errors=True)
    for folder in map(Path, AUTHORITIES):
        for certificate in sorted(folder.rglob("*.crt")):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(certificate, target / certificate.name)


def _inputs(root: Path) -> Iterator[Path]:
    yield root / DOCKERFILE
    yield from (root / name for name in SOURCES)
    for folder in ("hvdtrain", "launch/install", "docker/ca", "docker/wheels"):
        for path in sorted((root / folder).rglob("*")):
            downloaded = folder == "docker/wheels" and FROM_HOST in path.parts
            if path.is_file() and not downloaded and "__pycache__" not in path.parts:
                yield path


def _try_wheels(root: Path) -> None:
    say("cluster: collecting wheels for the image with this machine's pip")
    try:
        put_wheels(root, CPU_INDEX)
    except PreflightError as error:
        remove_wheels(root)  # an incomplete set is worse than none
        say(f"cluster: {error}\ncluster: the image's own pip will use its index instead")


def _ensure_base(engine: Engine, base: str) -> None:
    if engine.succeeds("image", "inspect", base):
        return
    say(f"cluster: pulling {base}")
    try:
        engine.capture("pull", "--quiet", base)
    except EngineError as error:
        say(f"cluster: it cannot be pulled ({str(error).splitlines()[-1]})")
        _bootstrap(base)


def _bootstrap(base: str) -> None:
    """Build the base image from Debian packages with debootstrap."""
    problems = []
    if not shutil.which("debootstrap"):
        problems.append("debootstrap is missing: apt-get install debootstrap")
    if os.geteuid() != 0:
        problems.append("only root can run it")
    if problems:
        raise PreflightError(
            f"the base image {base} can neither be pulled nor built here: {'; '.join(problems)}. "
            f"Or copy it from another machine: docker save {base}, docker load"
        )
    say(f"cluster: building {base} with debootstrap: takes a minute or two, once")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-base-") as scratch:
        tree, archive = Path(scratch, "root"), Path(scratch, "base.tar")
        run(["debootstrap", "--variant=minbase", DEBIAN_RELEASE, str(tree)], "debootstrap")
        for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*_*"):
            for leftover in tree.glob(pattern):
                leftover.unlink()
        run(["tar", "--create", "--directory", str(tree), "--file", str(archive), "."], "tar")
        run(["docker", "import", str(archive), base], "docker import")
