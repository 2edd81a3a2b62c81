"""Commands that any login shell of another host passes on unchanged."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from hvdtrain.horovod_build.runner.any_shell import for_any_shell, ssh_argv, with_quoted_folders

COMMANDS = [
    "printf %s plain",
    "printf %s 'two  spaces'",
    """printf '%s|' "it's" '$HOME' '!!' 'a\\b' '*' '~' '{a,b}' 'ä' '' '#' '%1' '^'""",
    "cd / > /dev/null 2>&1 ; A=1 env B='x y' sh -c 'printf %s $A$B; exit 3'",
    "printf %s 'line\nline'",
]


@pytest.mark.parametrize("shell", ["sh", "bash", "rbash", "tcsh", "fish"])
def test_every_shell_runs_the_same(shell: str) -> None:
    """Fails if a shell changes a word of a command, or its exit code."""
    path = shutil.which(shell)
    assert path, f"there is no {shell}: launch/setup --test-packages"
    for command in COMMANDS:
        expected = subprocess.run(["sh", "-c", command], capture_output=True, timeout=20)
        given = [path, "-c", for_any_shell(command)]
        found = subprocess.run(given, capture_output=True, timeout=20)
        seen = (found.returncode, found.stdout, found.stderr)
        assert seen == (expected.returncode, expected.stdout, expected.stderr), command


@pytest.mark.parametrize(
    "arguments",
    [
        ["beta", "orted", "-mca", "ess", '"env"'],
        ["-x", "beta", "PATH=/a ; export PATH ; orted", "-mca"],
        ["-p", "22", "-i", "key file", "-oBatchMode=yes", "-vv", "beta", "true"],
        ["-p22", "beta"],
    ],
)
def test_the_command_of_an_ssh_is_found(arguments: list[str]) -> None:
    """Fails if an option is taken for the host, or a part of the command for an option."""
    at = arguments.index("beta")
    before, command = arguments[: at + 1], " ".join(arguments[at + 1 :])
    found = ssh_argv(arguments)
    assert found[: at + 2] == ["ssh", *before]
    if not command:
        assert found[at + 2 :] == []
        return
    (given,) = found[at + 2 :]
    *_, script = shlex.split(given)
    encoded = re.search("echo ([A-Za-z0-9+/=]+) ", script)
    assert encoded is not None
    decode = ["base64", "-d"]
    text = subprocess.run(decode, input=encoded[1].encode(), capture_output=True, timeout=20)
    assert text.stdout.decode() == command


@pytest.mark.parametrize("folder", ["/opt/it's", "/opt/a b/$x", "/opt/plain"])
def test_the_folder_of_open_mpi_is_one_word(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a shell on another host splits, expands or cannot parse the folder of Open MPI or of
    Python's environment, which may be one within the other.
    """
    monkeypatch.setenv("OPAL_PREFIX", folder)
    monkeypatch.setattr(sys, "executable", f"{folder}/venv/bin/python")
    command = f'A={folder} ; B={folder}/venv/bin:"$A" ; printf %s {folder}/lib:"$B"'
    done = subprocess.run(
        ["sh", "-c", with_quoted_folders(command)], capture_output=True, text=True, timeout=20
    )
    assert (done.stdout, done.stderr) == (f"{folder}/lib:{folder}/venv/bin:{folder}", "")
