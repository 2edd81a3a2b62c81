"""Processes of this package's own, in a folder of files named as the standard library's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.interpreter import WITHOUT_FOLDER, module_argv, python_path
from tests.unit.commands import ROOT

PACKAGE = ROOT / "hvdtrain"
SHADOWS = ("hvdtrain", "json", "numpy", "platform", "queue", "random", "runpy", "secrets", "signal")
SHADOWS += ("socket", "torch", "types")
READER = """
import multiprocessing, os
from hvdtrain.data.reading import _start_fork_server

if __name__ == "__main__":
    _start_fork_server([])
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=os.mkdir, args=("beside",))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def shadow(folder: Path) -> Path:
    """Write files that end whoever imports them; return their folder."""
    folder.mkdir(exist_ok=True)
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('imported the user\\'s {name}')\n")
    return folder


def ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_module_runs_as_by_m(tmp_path: Path) -> None:
    """Fails if a module of ours imports from its folder, or gets other arguments than by -m."""
    shadow(tmp_path)
    done = ended(
        [*module_argv("hvdtrain.cli"), "train", "--experiment=a b", "--print-config"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "experiment: a b" in done.stdout
    done = ended([*module_argv("hvdtrain.nothing"), "x"], tmp_path)
    assert "No module named hvdtrain.nothing" in done.stderr  # as the doctor's check expects


def test_modules_are_not_started_by_m() -> None:
    """Fails if a process of ours is started by -m, and so imports from the working folder."""
    found = [
        path
        for path in PACKAGE.rglob("*.py")
        if re.search('"-m", "(hvdtrain|pip)', path.read_text())
    ]
    assert found == []


def test_code_runs_without_its_folder(tmp_path: Path) -> None:
    """Fails if short programs, as the doctor runs them, import from their folder."""
    program = WITHOUT_FOLDER + "import json, secrets, types, numpy"
    done = ended([sys.executable, "-c", program], shadow(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_plug_in_finds_its_neighbours(tmp_path: Path) -> None:
    """Fails if code named by a flag gets the user's file in place of the standard library's, or
    does not find the module beside it.
    """
    (tmp_path / "mine.py").write_text("import neighbour, secrets\nmake = secrets.token_hex\n")
    (tmp_path / "neighbour.py").touch()
    program = "from hvdtrain.config.plugins import import_callable\n"
    program += "import_callable('--model', 'mine:make')()"
    done = ended([sys.executable, "-c", WITHOUT_FOLDER + program], shadow(tmp_path))
    assert done.returncode == 0, done.stderr


def test_readers_start(tmp_path: Path) -> None:
    """Fails if the server that starts the processes that read data imports from its folder, or
    they work in another folder than the one of training.
    """
    script = tmp_path / "scripts" / "reader.py"  # in a folder of its own, which it does see
    script.parent.mkdir()
    script.write_text(READER)
    done = ended([sys.executable, str(script)], shadow(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "beside").is_dir()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("/a:/b", "/a:/b"), (":/a:", "/a"), (".:/a:lib:../b", "/a"), (".", None), ("", None)],
)
def test_relative_entries_are_left_out(given: str, kept: str | None) -> None:
    """Fails if PYTHONPATH still names the working folder, of this host or of another."""
    assert python_path({"PYTHONPATH": given}).get("PYTHONPATH") == kept
    assert python_path({}) == {}
