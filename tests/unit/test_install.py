"""launch/setup: the edits of Horovod's source, the wheel's cache, and the message of a failed
build.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from launch.install import horovod_source, horovod_wheel
from launch.install.horovod_source import ADDED, EDITS, SourceEditError, apply_edits
from launch.install.horovod_wheel import WheelInputs, cached_wheel, obtain_wheel
from launch.install.machine import Mpi

MPI = Mpi("4.1.4", "system")
INPUTS = WheelInputs(
    *("horovod", "edits", "2.13.0", None, "cpython-311", "x86_64", "glibc-2.36", MPI.identity),
    compiler="g++ 12.2.0",
    flags=(("HOROVOD_WITH_MPI", "1"),),
)


def write_source(root: Path) -> dict[str, Path]:
    """A tree in which each edit finds its text once, between lines of other text."""
    files = {edit.path: root / edit.path for edit in EDITS}
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
    apply_edits(tmp_path)
    for name, path in files.items():
        assert path.read_text() == text_of(name, "new")
    added = {name: tmp_path / "horovod/common" / name for name in ADDED}
    for name, path in added.items():
        assert path.read_text() == Path(horovod_source.__file__).with_name(name).read_text()
        included = any(f'#include "{name}"' in other.read_text() for other in added.values())
        includes = [edit.path for edit in EDITS if f'#include "../{name}"' in edit.new]
        folders = {Path(path).parent.parent.as_posix() for path in includes}
        assert included != bool(includes) and folders <= {"horovod/common"}


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
        apply_edits(tmp_path)
    assert edit.path in str(caught.value)
    assert ("2 times" if damage == "twice" else "0 times") in str(caught.value)
    assert read_tree(tmp_path) == before


def test_apply_edits_names_all_problems(tmp_path: Path) -> None:
    """Fails when only the first of several files is named."""
    with pytest.raises(SourceEditError) as caught:
        apply_edits(tmp_path)
    assert all(edit.path in str(caught.value) for edit in EDITS)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WheelInputs)])
def test_key_depends_on_every_field(field: str) -> None:
    """Fails when two different wheels could share a place in the cache."""
    value = getattr(INPUTS, field)
    other = (("HOROVOD_WITH_MPI", "0"),) if field == "flags" else f"{value}+"
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
    """Fails when the second set-up does not wait for the first one's wheel, or a failure stays."""
    builds: list[Path] = []

    def build(scratch: Path, *rest: object) -> Path:
        builds.append(scratch)
        if len(builds) == 1:
            raise PreflightError("the first build fails, and must leave nothing")
        time.sleep(0.3)
        (scratch / "horovod-0.28.1-py3.whl").write_bytes(b"wheel")
        return scratch / "horovod-0.28.1-py3.whl"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(horovod_wheel, "_build", build)
    with pytest.raises(PreflightError):
        obtain_wheel(INPUTS, Path("python"), MPI)
    assert cached_wheel(INPUTS) is None
    wheels: list[Path] = []
    threads = [
        threading.Thread(target=lambda: wheels.append(obtain_wheel(INPUTS, Path("python"), MPI)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(builds) == 2
    assert [wheel.read_bytes() for wheel in wheels] == [b"wheel"] * 2
    assert not any(scratch.exists() for scratch in builds)


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
    assert horovod_wheel.first_error(log).startswith(expected)
