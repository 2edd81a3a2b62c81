"""Where what is printed goes: streams that are closed, and streams that do not block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from tests.unit.commands import environment

CLI = "-m hvdtrain.cli"
LAUNCH = f"{CLI} launch -np 1 --controller=gloo -- python -c 'raise SystemExit(4)'"
SAYING = """
import os, sys
from hvdtrain import log
from hvdtrain.launcher.view import make_view
log.STALL_S, count = float(sys.argv[2]), int(sys.argv[3])
view = make_view(1, sys.stdout, "LOGS")
stream = getattr(log, sys.argv[1], lambda text: view.line(0, text))
for number in range(count):
    if number == count - 1:
        os.write(1 if stream is log.complain else 2, b"waiting\\n")
        sys.stdin.readline()
    stream(f"{number:5} " + "x" * 99)
view.close()
log.report_left_out()
"""
COUNT = 4000  # lines: several times what a pipe holds


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (f"{CLI} --version", "<&- >&- 2>&-", 0),
        (f"{CLI} --nonsense", "2>&-", 2),
        (f"{CLI} train --max-steps=1 --output=out", "<&- >&- 2>&-", 0),
        (LAUNCH, "<&-", 4),
        (LAUNCH, ">&-", 4),
        (LAUNCH, "2>&-", 4),
        ("-c 'from hvdtrain.log import say; say(1)'", ">&-", 0),
    ],
)
def test_a_closed_stream(words: str, closed: str, code: int, tmp_path: Path) -> None:
    """Fails when a command that is started with a closed stream, as by some daemons, ends with
    another code or a traceback, or prints into one of its files.
    """
    done = subprocess.run(
        ["bash", "-c", f"exec '{sys.executable}' {words} {closed}"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hvdtrain launch:" in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("function", "reader"),
    [*product(("say", "complain"), ("late", "stalled", "gone")), ("view", "late")],
)
def test_an_output_that_does_not_block(function: str, reader: str) -> None:
    """Fails when lines are lost because a program on the same pipe has set O_NONBLOCK, a reader
    that stalls is waited for without end, the number of lines that it missed is wrong or missing,
    or nothing more is written once it goes on.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    both = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both["stderr" if function == "complain" else "stdout"] = writing
    limit_s = 60 if reader == "late" else 0.2
    words = [sys.executable, "-c", SAYING, function, str(limit_s), str(COUNT)]
    with subprocess.Popen(words, text=True, **both) as process:  # type: ignore[call-overload]
        os.close(writing)
        try:
            other = process.stdout if function == "complain" else process.stderr
            if reader == "late":
                time.sleep(0.5)
            else:
                assert other.readline() == "waiting\n"
            text = os.read(reading, 1 << 20).decode() if reader != "gone" else ""
            process.stdin.write("\n")
            process.stdin.flush()
            errors = other.read() if reader == "gone" else ""
            while data := os.read(reading, 1 << 20):
                text += data.decode()
        finally:
            process.kill()
            os.close(reading)
    whole = re.findall(r"^ *(\d+) x{99}$", text, re.MULTILINE)
    noted = re.findall(r"([\d,]+) lines? not shown", errors or text)
    left_out = sum(int(number.replace(",", "")) for number in noted)
    assert [*map(int, whole)] == sorted(map(int, whole))
    assert (whole[-1] == str(COUNT - 1)) is (reader != "gone")
    if (function, reader) != ("complain", "gone"):  # then nothing is left to report it
        assert len(noted) == (reader != "late") and len(whole) + left_out == COUNT


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """Fails when a run ends because the program that showed its output has ended."""
    train = ["train", "--model=mlp", "--data=digits", "--max-steps=30", "--log-interval=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", *train, "--experiment=run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert errors == "hvdtrain: nothing reads standard output any more: continuing without it\n"
    assert (tmp_path / "runs" / "run" / "summary.json").exists()
