"""Odd places to start from: temporary folders that are of no use, working folders behind links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.launcher import processes
from hvdtrain.launcher.horovodrun import horovodrun_environment, login_of
from hvdtrain.launcher.processes import programs_folder, working_folders
from hvdtrain.launcher.protocol import Orders
from tests.unit.commands import environment


def test_a_deleted_working_folder(tmp_path: Path) -> None:
    """Fails when a command in a folder that has been deleted ends in a traceback, or --version
    does not answer there.
    """
    code = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    for words, status, expected in (("doctor", 2, "gone: has been deleted"), ("--version", 0, "")):
        done = subprocess.run(
            ["bash", "-c", code, "bash", sys.executable, "-m", "hvdtrain.cli", words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status and expected in done.stderr, done.stderr
        assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize("there", ["both", "link", "real", "none"])
def test_a_working_folder_behind_a_link(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a host that has only one of the two paths of the working folder is refused, the
    real one is not preferred, or the fix names another path than that in the user's prompt.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    real, link = str(tmp_path / "real"), str(tmp_path / "link")
    monkeypatch.chdir(real)
    for pwd, folders in ((link, [real, link]), (real, [real]), ("", [real]), ("/", [real])):
        monkeypatch.setenv("PWD", pwd)
        assert working_folders() == folders
    if there in ("link", "none"):
        (tmp_path / "real").rename(tmp_path / "elsewhere")
        (tmp_path / "link").unlink()
    if there == "link":
        (tmp_path / "link").symlink_to("elsewhere")
    expected = real if there in ("both", "real") else link
    assert Orders("", [], [real, link], "", {}).folder == expected


def test_a_temporary_folder_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the ssh program lands where it cannot be executed, Open MPI is given a TMPDIR in
    which it ends, or a machine without any such folder gets no clear error.
    """
    gone = {"TMPDIR": str(tmp_path / "gone"), "HOME": "/h"}
    assert login_of(gone) == {"HOME": "/h"}
    assert "TMPDIR" not in horovodrun_environment(gone, {}, None)
    good = {"TMPDIR": str(tmp_path)}
    assert login_of(good) == good
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert programs_folder() == str(tmp_path)
    sealed = os.statvfs_result([0] * 8 + [os.ST_NOEXEC, 0])
    plain = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda it: sealed if it == str(tmp_path) else plain(it))
    assert programs_folder() != str(tmp_path)
    assert programs_folder(executable=False) == str(tmp_path)
    monkeypatch.setattr(processes, "is_writable", lambda folder: False)
    with pytest.raises(PreflightError, match=f"{tmp_path}, .*noexec; set TMPDIR to"):
        programs_folder()
