"""The release: source archive and wheel, and training with this wheel outside the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import hvdtrain
from tests.parallel.launching import BIN, CHECKOUT, run

SOURCES = ("hvdtrain", "tests", "examples", "launch", "docs")
FILES = ("setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in")
FLAGS = ("--model", "lenet", "--data", "digits", "--max-steps", "4", "--global-batch-size", "30")
DEAD_LINK = re.compile(r"\]\((?!https?:|#)")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive, and the wheel that is built from that archive."""
    source = tmp_path_factory.mktemp("source")
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in SOURCES:
        shutil.copytree(CHECKOUT / name, source / name, ignore=skipped)
    for name in FILES:
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, source)
    # With the setuptools that is installed, so that nothing is downloaded.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel, and all else from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    bin_folder = folder / "bin"
    (own,), shared = folder.glob("lib/python*/site-packages"), sysconfig.get_paths()
    # A folder in a .pth file is searched; .pth files in it, as of editable packages, are not read.
    lines = dict.fromkeys([shared["purelib"], shared["platlib"]])
    (own / "a-shared.pth").write_text("\n".join(lines) + "\n")
    if (shim := Path(shared["purelib"], "distutils-precedence.pth")).exists():  # for horovodrun
        shutil.copy(shim, own)
    horovodrun = (BIN / "horovodrun").read_text().split("\n", 1)[1]
    (bin_folder / "horovodrun").write_text(f"#!{bin_folder}/python\n{horovodrun}")
    (bin_folder / "horovodrun").chmod(0o755)
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), "install"]
    pip += ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return bin_folder


def call(environment: Path, folder: Path, *command: str) -> str:
    """Run a command of the environment in a folder; return its output."""
    path = f"{environment}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": "", "VIRTUAL_ENV": str(environment.parent)}
    words = [str(environment / command[0]), *command[1:]]
    done = run(words, timeout_s=200, cwd=folder, variables=variables)
    assert done.exit_code == 0, done.output
    return done.output


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(content.read(name))


def test_an_index_takes_both(dist: Path, wheel: Path) -> None:
    """Fails if the archives lack metadata, or the README cannot be rendered, or would show links
    to files that are not there.
    """
    version = hvdtrain.__version__
    names = {f"hvdtrain-{version}.tar.gz", f"hvdtrain-{version}-py3-none-any.whl"}
    assert {path.name for path in dist.iterdir()} == names
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    done = subprocess.run(check, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr
    page = str(metadata_of(wheel).get_payload())
    assert page.startswith("# hvdtrain\n") and not DEAD_LINK.search(page) and "![" not in page
    assert "hvdtrain.Loop" in page and metadata_of(wheel)["Version"] == version


def test_the_wheel_holds_the_package_alone(dist: Path, wheel: Path) -> None:
    """Fails when a package, a template, a header or py.typed is left out, or anything else is in
    the wheel, as tests; or if the source archive lacks a file of the package.
    """
    paths = [path for path in (CHECKOUT / "hvdtrain").rglob("*") if path.is_file()]
    own = {str(path.relative_to(CHECKOUT)) for path in paths if "__pycache__" not in path.parts}
    needed = {name for name in own if not name.endswith(".md")}  # pages may be left out
    with zipfile.ZipFile(wheel) as content:
        held = {name for name in content.namelist() if ".dist-info/" not in name}
    assert needed <= held <= own
    assert {"hvdtrain/py.typed", "hvdtrain/report/page.html.jinja"} <= held
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert needed | {"README.md", "LICENSE", "setup.py", "pyproject.toml"} <= sources


@pytest.mark.parametrize(("installer", "version"), [("pip", "2.6.0"), ("uv", "2.14.0")])
def test_the_torch_that_is_there_stays(
    installer: str, version: str, wheel: Path, tmp_path: Path
) -> None:
    """Fails when installing the wheel would replace an older or a newer torch, or bring a
    torchvision, which is for one torch; or would install nothing at all.
    """
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    torch = packages / f"torch-{version}.dist-info"
    torch.mkdir()
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    for name, content in {"METADATA": text, "INSTALLER": "pip\n", "RECORD": ""}.items():
        (torch / name).write_text(content)
    commands = {
        "pip": ["pip", "--python", str(python), "install", "--dry-run"],
        "uv": ["uv", "pip", "install", "--dry-run", "--python", str(python)],
    }
    command = [sys.executable, "-m", *commands[installer], str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    installed = done.stdout.rpartition("Would install")[2] if installer == "pip" else done.stderr
    assert re.search(rf"\bhvdtrain(-|==){hvdtrain.__version__}", installed), installed
    assert not re.search(r"\btorch(vision)?(-|==)\d", installed), installed


def test_the_wheel_trains_outside_the_checkout(environment: Path, tmp_path: Path) -> None:
    """Fails when the package needs the checkout, or the two ways to start workers end with other
    parameters.
    """
    place = call(environment, tmp_path, "python", "-c", "import hvdtrain; print(hvdtrain.__file__)")
    assert Path(place.strip()).is_relative_to(environment.parent), place
    version = call(environment, tmp_path, "hvdtrain", "--version")
    assert version == f"hvdtrain {hvdtrain.__version__}\n"
    train = ["train", *FLAGS]
    plain = ["horovodrun", "-np", "2", "--gloo", "hvdtrain", *train, "--experiment", "plain"]
    call(environment, tmp_path, *plain)
    launch = ["hvdtrain", "launch", "-np", "2", "--", *train, "--experiment", "launched"]
    call(environment, tmp_path, *launch)
    runs = [tmp_path / "runs" / name for name in ("plain", "launched")]
    found = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [(it["status"], it["world_size"], it["steps"]) for it in found] == [
        ("finished", 2, 4),
        ("finished", 2, 4),
    ]
    assert found[0]["params_sha256"] == found[1]["params_sha256"]
    call(environment, tmp_path, "hvdtrain", "report", *map(str, runs))  # from the templates
    assert (tmp_path / "report" / "index.html").is_file()
