"""hvdtrain on Windows and macOS, simulated on Linux: help and version answer, commands that need
Linux are refused by name, and those that do not are run. See `tests.unit.foreign` for the limits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hvdtrain
from hvdtrain.cli import ANYWHERE, COMMANDS, SYSTEMS
from tests.data.make import CODE
from tests.data.small import Pictures
from tests.unit.foreign import LIBRARIES, missing, run_elsewhere

RUN = Path(__file__).parents[2] / "data" / "0.1.0"
PLATFORMS = ("win32", "darwin")
# Every command line, one after the other: a process each would cost a second each.
SEVERAL = """
import contextlib, io, json, sys
from hvdtrain.cli import main
ends = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["hvdtrain", *line]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:
            code = end.code or 0
    ends.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ends))
"""


def run_lines(
    platform: str, lines: list[list[str]], folder: Path, libraries: str = ""
) -> list[tuple[int, str, str]]:
    """Run command lines in a process; return exit code, output and errors of each."""
    request = json.dumps(lines)
    done = run_elsewhere(platform, SEVERAL, request, folder=folder, libraries=libraries)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def test_the_simulation_lacks_what_the_system_lacks(tmp_path: Path) -> None:
    """Fails if a name that another system lacks is there, and the other tests hold nothing."""
    code = "import os, signal, sys; print(sys.platform, hasattr(os, 'fork'), end=' ')\n"
    code += "print(hasattr(os, 'sched_getaffinity'), hasattr(signal, 'SIGUSR1'), end=' ')\n"
    code += "import fcntl"
    windows, mac = (run_elsewhere(name, code, folder=tmp_path) for name in PLATFORMS)
    assert windows.stdout == "win32 False False False "
    assert windows.stderr.endswith("ModuleNotFoundError: No module named 'fcntl'\n")
    assert (mac.stdout, mac.stderr) == ("darwin True False True ", "")
    absent = {name for name, names in missing("win32").items() if names is None}
    assert {"fcntl", "grp", "pwd", "resource", "termios", "syslog"} <= absent


@pytest.mark.parametrize("platform", PLATFORMS)
def test_help_and_version_answer(platform: str, tmp_path: Path) -> None:
    """Fails when the help of a command imports, or names, what the system lacks."""
    lines = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    lines.append(["bench", "scaling", "--help"])
    ends = run_lines(platform, lines, tmp_path)
    assert ends[0] == (0, f"hvdtrain {hvdtrain.__version__}\n", "")
    for line, (code, out, err) in zip(lines[1:], ends[1:], strict=True):
        assert (code, err) == (0, ""), (line, err)
        assert out.startswith(" ".join(["usage: hvdtrain", *line[:-1]])), line


@pytest.mark.parametrize("platform", [*PLATFORMS, "freebsd14"])
def test_commands_that_need_linux_are_refused(platform: str, tmp_path: Path) -> None:
    """Fails when such a command does anything else than print one line, or the line does not name
    command, system and what to do; or if a command is unknown to the table.
    """
    needed = {"compare": ["-np", "2"], "replay": ["run"], "bench": ["step"]}
    needed |= {name: ["job"] for name in ("attach", "logs", "stop")}
    refused = [name for name in COMMANDS if name not in ANYWHERE]
    lines = [[name, *needed.get(name, [])] for name in refused]
    lines.append(["train", "--print-config"])
    named = SYSTEMS.get(platform, platform)
    simulated = platform if platform in PLATFORMS else "darwin"
    code = f"import sys; sys.platform = {platform!r}\n{SEVERAL}"
    done = run_elsewhere(simulated, code, json.dumps(lines), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for line, (code, out, err) in zip(lines, json.loads(done.stdout), strict=True):
        assert (code, out) == (3, ""), (line, err)
        assert err.startswith(
            f"hvdtrain: error: hvdtrain {line[0]} needs Linux, and this is {named}"
        )
        assert "WSL2" in err and "container" in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert set(ANYWHERE) < set(COMMANDS)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_trained_models_are_used(platform: str, tmp_path: Path) -> None:
    """Fails when a command that is not refused needs, on its way, what the system lacks."""
    shutil.copytree(RUN, tmp_path / "run")
    image = (Pictures(1, 1000)[0][0][0].numpy() * 256).astype(np.uint8)
    Image.fromarray(image).save(tmp_path / "one.png")
    lines = {
        "export": ["run", "out.safetensors"],
        "evaluate": ["run", *CODE],
        "predict": ["run", "one.png", CODE[0]],
        "diff": ["run", "run", "--bisect", "--trust-code"],
        "report": ["run"],
    }
    assert lines.keys() == set(ANYWHERE)
    ends = run_lines(platform, [[name, *lines[name]] for name in lines], tmp_path, LIBRARIES)
    for name, (code, out, err) in zip(lines, ends, strict=True):
        assert (code, err) == (0, ""), (name, out, err)
    assert "accuracy 1.0000" in ends[1][1] and ends[2][1].startswith("one.png: top ")
    assert (tmp_path / "out.safetensors").is_file()
    assert (tmp_path / "run" / "report" / "index.html").is_file()
