"""The Horovod that is built here: the edits of its source, the wheel's cache, the steps of the
build, and the message of a failed one.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from itertools import combinations, product
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.horovod_build import build as building
from hvdtrain.horovod_build.build import Progress, Steps, first_error
from hvdtrain.horovod_build.edits import (
    ADDED,
    SourceEditError,
    apply_edits,
    edits_for,
    edits_sha256,
    runner,
    sums,
    waiting,
)
from hvdtrain.horovod_build.wheel import WheelInputs, cached_wheel, obtain_wheel

EDITS = edits_for(has_mpi=True)
OURS = (
    *(sums.FAULTS_AND_ORDER, sums.BY_HOST, sums.CANONICAL, sums.STALLS, sums.FINITE),
    *(waiting.WAITING, waiting.AWAITED, runner.HOSTS),
)
OWN = Path(building.__file__).parent
INPUTS = WheelInputs(
    *("horovod", "edits", "2.13.0", False, 17, "cpython-311", "x86_64", "glibc-2.36"),
    mpi="openmpi-4.1.4-system",
    cuda="cuda-13.0",
    compiler="g++ 12.2.0",
)


def write_source(root: Path) -> dict[str, Path]:
    """A tree in which each edit finds its text once, between lines of other text."""
    files = {edit.path: root / edit.path for edit in EDITS}
    for folder in ADDED.values():
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(name, "old"))
    return files


def text_of(path: str, side: str) -> str:
    """The old or new texts of all edits of a file, between lines of other text."""
    parts = [getattr(edit, side) for edit in EDITS if edit.path == path]
    return f"before {path}\n" + "between\n".join(parts) + "after\n"


def read_tree(root: Path) -> dict[str, bytes]:
    """Every file's bytes, without Python's own caches."""
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_apply_edits_makes_every_edit(tmp_path: Path) -> None:
    """Fails when an edit is left out, or changes anything but its own text; or if the file that
    others include is not there.
    """
    files = write_source(tmp_path)
    apply_edits(tmp_path, EDITS)
    for name, path in files.items():
        assert path.read_text() == text_of(name, "new")
    added = {Path(name): tmp_path / folder / Path(name).name for name, folder in ADDED.items()}
    texts = [*(path.read_text() for path in added.values()), *(edit.new for edit in EDITS)]
    for source, path in added.items():
        assert path.read_text() == (OWN / source).read_text()
        uses = [f'#include "{source.name}"', f'#include "../{source.name}"']
        uses += [f'#include "../common/{source.name}"', f"horovod.runner.util.{source.stem} import"]
        uses += [f"horovod.runner.util import {source.stem}"]
        assert any(use in text for text in texts for use in uses), source


def test_a_build_without_mpi_says_so() -> None:
    """Fails when horovodrun of a build without MPI would start workers over MPI, or a build with
    it would not; or when an edit other than that differs, or includes mpi.h in what Gloo needs.
    """
    without = edits_for(has_mpi=False)
    (differing,) = [pair for pair in zip(EDITS, without, strict=True) if pair[0] != pair[1]]
    assert [edit.new.count("return True") for edit in differing] == [2, 1]
    assert "def mpi_built(verbose=False):\n    return False\n" in differing[1].new
    assert not any('sleeping_mpi.h"' in edit.new for edit in without if "/mpi" not in edit.path)
    assert "mpi.h" not in (OWN / "native" / "waiting.h").read_text()


@pytest.mark.parametrize("has_mpi", [True, False])
def test_horovod_as_published_adds_and_waits_by_itself(has_mpi: bool) -> None:
    """Fails when it has one of our edits of sums, of waiting or of hosts, or one that a build with
    all of them lacks; or when its wheel could be taken for the other one.
    """
    published = edits_for(has_mpi=has_mpi, as_published=True)
    assert set(published) < set(edits_for(has_mpi=has_mpi))
    assert not set(published) & {edit for group in OURS for edit in group}
    for one, other in combinations(product((True, False), repeat=2), 2):
        hashes = {edits_sha256(has_mpi=mpi, as_published=alone) for mpi, alone in (one, other)}
        assert len(hashes) == 2


@pytest.mark.parametrize("damage", ["absent", "twice", "missing"])
@pytest.mark.parametrize(
    "edit", {edit.path: edit for edit in EDITS}.values(), ids=lambda it: it.path
)
def test_apply_edits_refuses_another_source(tmp_path: Path, edit, damage: str) -> None:
    """Fails when unexpected text passes, or when another file is changed anyway."""
    path = write_source(tmp_path)[edit.path]
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("something else\n" if damage == "absent" else edit.old * 2)
    before = read_tree(tmp_path)
    with pytest.raises(SourceEditError) as caught:
        apply_edits(tmp_path, EDITS)
    assert edit.path in str(caught.value)
    assert ("2 times" if damage == "twice" else "0 times") in str(caught.value)
    assert read_tree(tmp_path) == before


def test_apply_edits_names_all_problems(tmp_path: Path) -> None:
    """Fails when only the first of several files is named."""
    with pytest.raises(SourceEditError) as caught:
        apply_edits(tmp_path, EDITS)
    assert all(edit.path in str(caught.value) for edit in EDITS)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WheelInputs)])
def test_key_depends_on_every_field(field: str) -> None:
    """Fails when two different wheels could share a place in the cache."""
    other = f"{getattr(INPUTS, field)}+"
    assert dataclasses.replace(INPUTS, **{field: other}).key != INPUTS.key
    assert dataclasses.replace(INPUTS).key == INPUTS.key


def test_cached_wheel_needs_the_exact_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a wheel of other inputs, or one half copied, is taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hvdtrain" / "horovod" / INPUTS.key
    assert cached_wheel(INPUTS) is None
    folder.mkdir(parents=True)
    (folder / "horovod-0.28.1-py3.whl.partial").touch()
    assert cached_wheel(INPUTS) is None
    (folder / "horovod-0.28.1-py3.whl").touch()
    assert cached_wheel(INPUTS) == folder / "horovod-0.28.1-py3.whl"
    assert cached_wheel(dataclasses.replace(INPUTS, torch="2.13.1")) is None


def test_two_builds_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the second set-up does not wait for the first one's wheel, or does not say so;
    when a failed build counts, or what it did is lost; or if its folder stays after the build.
    """
    builds: list[Path] = []
    said: list[str] = []

    def build(work: Path, log: Path) -> Path:
        builds.append(work)
        if len(builds) == 1:
            (work / "half").touch()
            raise PreflightError("the first build fails")
        assert (work / "half").exists()
        time.sleep(0.3)
        (work / "horovod-0.28.1-py3.whl").write_bytes(b"wheel")
        return work / "horovod-0.28.1-py3.whl"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PreflightError):
        obtain_wheel(INPUTS, build, said.append)
    assert cached_wheel(INPUTS) is None and said == []
    wheels: list[Path] = []
    threads = [
        threading.Thread(target=lambda: wheels.append(obtain_wheel(INPUTS, build, said.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(builds) == 2
    assert len(said) == 1 and "waiting" in said[0]
    assert [wheel.read_bytes() for wheel in wheels] == [b"wheel"] * 2
    assert not any(work.exists() for work in builds)


def test_a_build_has_no_space_in_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a compiler wrapper, which does not quote, gets a path with a space."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))

    def build(work: Path, log: Path) -> Path:
        assert " " not in str(work) and work.is_dir() and log.parent.is_dir()
        (work / "horovod-1.whl").touch()
        return work / "horovod-1.whl"

    wheel = obtain_wheel(INPUTS, build, print)
    assert wheel.is_relative_to(tmp_path) and wheel.exists()


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a cache that cannot be written ends in a traceback."""
    (tmp_path / "hvdtrain").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PreflightError, match=r"hvdtrain/horovod/.* cannot be written.*XDG_CACHE"):
        obtain_wheel(INPUTS, lambda work, log: work, print)


def test_a_step_is_done_once(tmp_path: Path) -> None:
    """Fails when a step that has ended is repeated after an interruption, one that failed is not,
    or the error that is shown is that of an earlier step.
    """
    steps = Steps(tmp_path, tmp_path / "build.log", print)
    target = tmp_path / "tools"
    fails = ["sh", "-c", f"echo 'error: one'; mkdir -p {target}; exit 3"]
    with pytest.raises(PreflightError, match=r"could not fill it \(exit code 3\): error: one"):
        steps.once("fill it", target, fails)
    steps.once("fill it", target, ["sh", "-c", f"echo x >>{target}/runs"])
    steps.once("fill it", target, ["sh", "-c", f"echo x >>{target}/runs"])
    assert (target / "runs").read_text() == "x\n"
    with pytest.raises(PreflightError, match="error: two"):
        steps.run("go on", ["sh", "-c", "echo 'error: two'; exit 1"])


def test_progress_is_printed_by_quarters(tmp_path: Path) -> None:
    """Fails when make's percentages are not found in the log, each of them becomes a line of a
    file, or the time that is left is missing.
    """
    log, said = tmp_path / "build.log", []
    log.write_text("[ 99%] of an earlier build\n")
    progress = Progress(log, log.stat().st_size, said.append)
    for percent in (0, 3, 26, 27, 50, 75, 76, 100):
        with log.open("a") as file:
            file.write(f"  [{percent:3d}%] Building CXX object a.cc.o\nfile.cc:3: [50%] of it\n")
        progress.look()
    assert [line.split(" after")[0] for line in said] == [
        f"compiling: {percent} %" for percent in (26, 75, 100)
    ]
    assert "s left" in said[0] and "left" not in said[-1]


def test_compilers_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a small machine or container would compile more files at once than fit."""
    monkeypatch.setattr(building, "limits", lambda: {"memory": 8 << 30})
    monkeypatch.setattr(building, "usable_cores", lambda: 8)
    for gib, expected in ((1, 1), (5, 2), (64, 4)):
        page = {"SC_PHYS_PAGES": gib << 18, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr(building.os, "sysconf", page.__getitem__)
        assert building.parallel_compilers() == expected


PIP_ENDS = """\
  make: *** [Makefile:136: all] Error 2
  Traceback (most recent call last):
  subprocess.CalledProcessError: Command '['cmake']' returned non-zero exit status 2.
  error: subprocess-exited-with-error

  × Building wheel for horovod (pyproject.toml) did not run successfully.
  ERROR: Failed building wheel for horovod
"""
COMPILER = """\
### build Horovod: python -m pip wheel
  -- Performing Test HAVE_ERROR_H - Failed
  controller.cc:3:9: warning: unused variable 'e' [-Werror=unused]
  mpi.h:12:10: note: in an Error class
  tensor.cc:41:7: error: no member named 'foo' in namespace 'c10'
     41 |   c10::foo();
  tensor.cc:42:7: error: another one
"""
CMAKE = """\
### build Horovod: python -m pip wheel
  CMake Warning at CMakeLists.txt:3 (message):
  CMake Error at CMakeLists.txt:12 (find_package):
    Could not find a package configuration file provided by "Torch"
  -- Configuring incomplete, errors occurred!
"""
PIP = """\
### download Horovod: python -m pip download
Looking in indexes: https://pypi.org/simple
ERROR: Could not find a version that satisfies the requirement horovod==0.28.1
ERROR: No matching distribution found for horovod==0.28.1
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (COMPILER + PIP_ENDS, "tensor.cc:41:7: error: no member named 'foo'"),
        ("cc1plus: fatal error: mpi.h: No such file\n" + PIP_ENDS, "cc1plus: fatal error: mpi.h"),
        ("a.cc:(.text+0x1): undefined reference to `x'\n" + PIP_ENDS, "a.cc:(.text+0x1): undef"),
        (CMAKE, "CMake Error at CMakeLists.txt:12 (find_package):\nCould not find a package"),
        (CMAKE + PIP_ENDS, "CMake Error at CMakeLists.txt:12 (find_package):\nCould not find"),
        (PIP, "ERROR: Could not find a version that satisfies the requirement horovod==0.28.1"),
        ("a line\nkilled\n", "killed"),
        ("", "the log is empty"),
    ],
    ids=["compiler", "fatal", "linker", "cmake", "cmake-in-pip", "pip", "unmarked", "empty"],
)
def test_first_error_is_the_cause(log: str, expected: str) -> None:
    """Fails when a warning, a later error or pip's own last words are shown instead."""
    assert first_error(log).startswith(expected)
