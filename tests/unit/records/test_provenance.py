"""The origin of a run, as its summary records it: hosts, command, revision of the user's code."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.pulse import COMMAND
from hvdtrain.records import provenance as module
from hvdtrain.records.provenance import code_revision, provenance, ranks_by_host

IDENTITY = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work tree with a committed plug-in, pack/mine_1.py, which can be imported."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    tree = tmp_path / "tree"
    (tree / "pack").mkdir(parents=True)
    (tree / "pack" / "mine_1.py").write_text("def net(shape, classes): ...\n")
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "first")
    monkeypatch.syspath_prepend(str(tree / "pack"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tree


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a"], {"a": "0"}),
        (["a", "a", "a", "b", "b"], {"a": "0-2", "b": "3-4"}),
        (["b", "a", "b", "b", "a"], {"b": "0,2-3", "a": "1,4"}),
    ],
)
def test_hosts_are_listed_with_their_ranks(hosts: list[str], expected: dict[str, str]) -> None:
    """Fails if a rank is attributed to another host, lost, or hosts lose their order."""
    assert ranks_by_host(hosts) == expected and list(ranks_by_host(hosts)) == list(expected)


def change_tracked(tree: Path) -> None:
    (tree / "pack" / "mine_1.py").write_text("def net(shape, classes): return None\n")


def add_run(tree: Path) -> None:
    (tree / "runs").mkdir()
    (tree / "runs" / "summary.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "uncommitted"),
    [(Path.exists, False), (add_run, False), (change_tracked, True)],
)
def test_the_revision_of_a_plugin(
    tree: Path, change: Callable[[Path], None], uncommitted: bool
) -> None:
    """Fails if the revision is that of the current folder, a change of the code is passed over, or
    the folder of runs counts as one.
    """
    change(tree)
    expected = {"folder": str(tree), "revision": git(tree, "rev-parse", "HEAD")}
    expected |= {"uncommitted": uncommitted}
    assert code_revision([None, "mine_1:net", "digits"]) == expected


def test_a_plugin_that_is_not_tracked(tree: Path) -> None:
    """Fails if a revision that lacks the plug-in is recorded as all of the code."""
    (tree / "pack" / "mine_2.py").write_text("def net(shape, classes): ...\n")
    found = code_revision(["mine_2:net"])
    assert found is not None and found["uncommitted"] is True


def test_the_current_folder_without_a_plugin_in_a_tree(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if an installed plug-in hides the user's own work tree, or one is found outside it."""
    (tmp_path / "elsewhere" / "mine_3.py").write_text("def net(shape, classes): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert code_revision(["mine_3:net"]) is None and code_revision(["lenet", None]) is None
    assert code_revision(["absent_module:net"]) is None
    monkeypatch.chdir(tree / "pack")
    for plugins in (["mine_3:net"], ["lenet"]):
        found = code_revision(plugins)
        assert found is not None and found["folder"] == str(tree)


@pytest.mark.parametrize("fault", ["absent", "slow", "no commit"])
def test_without_an_answer_of_git_there_is_no_revision(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Fails if a machine without git, a disk too slow for it, or a new tree ends the training."""
    monkeypatch.chdir(tree)
    if fault == "no commit":
        git(tmp_path / "elsewhere", "init", "-q")
        monkeypatch.chdir(tmp_path / "elsewhere")
    else:
        programs = tmp_path / "programs"
        programs.mkdir()
        monkeypatch.setattr(module, "GIT_LIMIT_S", 0.2)
        if fault == "slow":
            (programs / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
            (programs / "git").chmod(0o755)
        monkeypatch.setenv("PATH", str(programs))
    assert code_revision(["lenet"]) is None


def test_the_command_is_the_one_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an argument with a space is recorded as two, or the launcher's command is lost."""
    monkeypatch.delenv(COMMAND, raising=False)
    argv = ["hvdtrain", "train", "--experiment", "my run"]
    assert provenance([], ["a"], argv)["command"] == "hvdtrain train --experiment 'my run'"
    monkeypatch.setenv(COMMAND, "hvdtrain launch -np 2 -- train")
    assert provenance([], ["a"], argv)["command"] == "hvdtrain launch -np 2 -- train"
