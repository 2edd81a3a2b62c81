"""`hvdtrain stage`: what it refuses, and the copies of one host (tests/hosts has whole hosts)."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.launcher.doctor import Facts
from hvdtrain.launcher.receiver import (
    RECORD,
    Copy,
    StageError,
    identity,
    listing,
    look,
    receive,
    remove,
)
from hvdtrain.launcher.receiver import system as system_here
from hvdtrain.launcher.staging import problems_of, trees_of
from tests.unit.commands import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with a file, a write-protected folder, a link, and a name of odd bytes."""
    folder = tmp_path / "source"
    (folder / "closed").mkdir(parents=True)
    (folder / "closed" / "file").write_text("in a closed folder")
    (folder / "closed").chmod(0o555)
    folder.chmod(0o750)
    (folder / "script").write_text("first")
    (folder / "script").chmod(0o755)
    (folder / "link").symlink_to("/no/where")
    Path(os.fsdecode(bytes(folder) + b"/\xff")).write_text("odd")
    return folder


def archive_of(source: Path, target: Path, names: set[str], end: bytes = b"commit\n") -> io.BytesIO:
    """Return what the launcher would send for a copy at `target`."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in names:
            archive.add(source / name, f"{target}/{name}")
    stream.write(bytes(-stream.tell() % RECORD) + end)  # as tar pads it
    stream.seek(0)
    return stream


def stage(source: Path, target: Path, end: bytes = b"commit\n") -> set[str]:
    """Copy `source` to `target`; return the names of the files that were needed."""
    copy = Copy(target, listing(source))
    receive([copy], archive_of(source, target, copy.needed, end))
    return copy.needed


def test_a_copy_is_exact_and_the_next_one_brings_only_changes(source: Path, tmp_path: Path) -> None:
    """Fails if a mode, time, link or name is lost, if a file is not found to be unchanged, or if a
    file that is gone here stays there.
    """
    target = tmp_path / "new" / "folder" / "target"
    assert stage(source, target) == {"closed/file", "script", "\udcff"}
    assert listing(target) == listing(source)
    assert (target / "closed" / "file").read_text() == "in a closed folder"
    (source / "script").write_text("other")  # of the same size
    (source / "link").unlink()
    (target / "made there").write_text("by a job")
    assert stage(source, target) == {"script"}
    assert set(listing(target)) == {*listing(source), "made there"}
    assert (target / "script").read_text() == "other"


def test_files_of_jobs_stay_in_a_folder_that_is_gone(source: Path, tmp_path: Path) -> None:
    """Fails if a folder is gone here and has files of a job there, and then no copy can be made, or
    the files are lost.
    """
    target = tmp_path / "target"
    (source / "package" / "inner").mkdir(parents=True)
    (source / "package" / "inner" / "module.py").write_text("")
    stage(source, target)
    (target / "package" / "inner" / "module.pyc").write_text("derived")
    shutil.rmtree(source / "package")
    (source / "package").write_text("a file now")
    with pytest.raises(StageError, match=r"inner is of a job, and package no folder any more"):
        stage(source, target)
    (source / "package").unlink()
    stage(source, target)
    assert set(listing(target)) - set(listing(source)) == {
        *("package", "package/inner", "package/inner/module.pyc"),
    }
    assert (target / "package" / "inner" / "module.pyc").read_text() == "derived"


@pytest.mark.parametrize("fault", ["no commit", "changed", "cut off", "unreadable"])
def test_what_breaks_off_leaves_the_old_copy(source: Path, tmp_path: Path, fault: str) -> None:
    """Fails if an incomplete or inconsistent copy takes the place of the old one, or is left."""
    target = tmp_path / "target"
    stage(source, target)
    before = listing(tmp_path)
    (source / "script").write_text("second")
    (source / "added").write_text("new")
    copy = Copy(target, listing(source))
    if fault == "changed":
        (source / "script").write_text("third, longer")
    names = copy.needed - ({"added"} if fault == "unreadable" else set())
    stream = archive_of(source, target, names, b"" if fault == "no commit" else b"commit\n")
    if fault == "cut off":
        stream.truncate(700)
    with pytest.raises((StageError, tarfile.TarError)):
        receive([copy], stream)
    assert {it for it in listing(tmp_path) if it.startswith("target")} == {
        it for it in before if it.startswith("target")
    }
    assert (target / "script").read_text() == "first"
    assert sorted(it.name for it in tmp_path.iterdir()) == ["source", "target"]


def test_two_commands_do_not_meet(source: Path, tmp_path: Path) -> None:
    """Fails if a command removes the unfinished copy of another one."""
    other = Copy(tmp_path / "target", listing(source))
    other.begin()
    with pytest.raises(StageError, match="is being staged by another command"):
        stage(source, tmp_path / "target")
    assert other.beside.is_dir()
    other.clean()
    stage(source, tmp_path / "target")


def test_only_what_was_staged_is_removed(source: Path, tmp_path: Path) -> None:
    """Fails if a file of a job, or one that was changed there, is removed; or folders stay."""
    target = tmp_path / "new" / "folder"
    stage(source, target)
    (target / "script").write_text("work of somebody")
    (target / "made there").write_text("by a job")
    (target / "__pycache__").mkdir()
    (target / "__pycache__" / "derived.pyc").write_text("")
    assert sorted(remove(target)) == ["made there", "script"]
    assert sorted(it.name for it in target.iterdir())[1:] == ["made there", "script"]
    for name in ("made there", "script"):
        (target / name).unlink()
    assert remove(target) == []
    assert not target.parent.exists()
    assert remove(source) == []  # not staged
    assert (source / "script").exists()


def test_folders_of_others_are_refused(source: Path, tmp_path: Path) -> None:
    """Fails if a folder that was not staged, or belongs to another user, would be replaced."""
    assert look(source, identity(source)) == {"shared": True}
    assert "was not brought by hvdtrain stage" in look(source, [0, 0])["problem"]
    (tmp_path / "link").symlink_to(source)
    assert "was not brought by hvdtrain stage" in look(tmp_path / "link", [0, 0])["problem"]
    assert look(tmp_path / "new" / "folder", [0, 0]) == {"digest": ""}
    assert "cannot write to" in look(source / "script" / "folder", [0, 0])["problem"]
    stage(source, tmp_path / "target")
    if os.geteuid() == 0:
        os.chown(tmp_path / "target", 1234, -1)
        assert "belongs to uid 1234" in look(tmp_path / "target", [0, 0])["problem"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("abi", "cpython-39-aarch64-linux-gnu", "its Python is cpython-39-aarch64-linux-gnu"),
        ("glibc", "2.9", "its glibc 2.9 is older than"),
        ("home", "/home/bob", "the home there is /home/bob"),
    ],
)
def test_other_systems_are_refused(name: str, value: str, words: str) -> None:
    """Fails if another kind of Python or processor, an older libc or another home is taken; or
    hides a problem of a folder.
    """
    states = {str(Path.home() / "job"): {"digest": ""}, "/srv": {"problem": "is full"}}
    here = {**system_here(), "states": states}
    assert problems_of(Facts(here)) == ["is full"]
    first, second = problems_of(Facts({**here, name: value}))
    assert (first, words in second) == ("is full", True)


def test_a_folder_inside_another_one_is_staged_once(tmp_path: Path) -> None:
    """Fails if an environment inside the job's folder is copied twice."""
    root = Path(sys.prefix).parent
    assert list(trees_of({root: ("runs",), root / "inside": ()})).count(str(root)) == 1
    assert str(root / "inside") not in trees_of({root: (), root / "inside": ()})


def test_without_a_virtual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the system's own Python would be copied over that of a host."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(PreflightError, match="is not a virtual environment"):
        trees_of({})


def test_all_mistakes_are_reported(tmp_path: Path) -> None:
    """Fails if only the first mistake is reported, or ssh is called."""
    done = run(tmp_path, "stage", "-p", "0", "no/such/folder")
    for words in ("no/such/folder: there is no such folder", "--ssh-port=0", "no hosts are given"):
        assert words in done.stderr
    assert done.returncode == 2
