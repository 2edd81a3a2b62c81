"""What `hvdtrain launch` shows: plain lines, and the live view as text."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from hvdtrain.launcher import view as live
from hvdtrain.launcher.ranks import Rank
from hvdtrain.launcher.supervise import Watch
from hvdtrain.launcher.view import LiveView, PlainView, headline, make_view, render, slow_ranks
from hvdtrain.log import NOTEBOOK

FIGURES = {"epoch": 2, "loss": 0.12345, "samples_per_s": 2033.4, "step_s": 0.5, "total_steps": 230}


def rank(number: int, step: int = 120, busy_s: float | None = 0.1, **fields: object) -> Rank:
    made = Rank(number, f"host{number // 2}", "running", "S", step, "exchange", busy_s=busy_s)
    made.speaks = True
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def as_text(watch: Watch, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(render(watch))
    return console.export_text()


def row_of(text: str, number: int) -> list[str]:
    (row,) = [words for line in text.splitlines() if (words := line.split())[:1] == [str(number)]]
    return row


def test_the_view_of_a_job() -> None:
    """Fails when epoch, step, loss, speed, time left or a rank's row is missing or wrong."""
    watch = Watch([rank(0), rank(1, step=119, phase="load"), rank(2)], dict(FIGURES))
    text = as_text(watch)
    first, *_ = text.splitlines()
    assert first.rstrip() == ("epoch 2  step 120/230  loss 0.1235  2,033 samples/s  0:00:55 left")
    assert row_of(text, 0) == ["0", "host0", "120", "exchange", "0.100"]
    assert row_of(text, 1) == ["1", "host0", "119", "load", "0.100"]
    assert row_of(text, 2) == ["2", "host1", "120", "exchange", "0.100"]
    assert "rank  host   step  phase     own s/step" in [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"busy_s": 0.5}, "slow"),
        ({"process_state": "T"}, "stopped (SIGSTOP)"),
        ({"process_state": "T", "busy_s": 0.5}, "stopped (SIGSTOP)"),
        ({"process_state": "t"}, "held by a debugger"),
        ({"silent_s": 44.4}, "silent for 44 s"),
        ({"silent_s": 44.4, "speaks": False}, ""),
        ({"state": "waiting", "busy_s": None}, "waiting"),
        ({"state": "lost"}, "lost"),
        ({"state": "ended", "exit_code": 0}, "ended"),
        ({"state": "ended", "exit_code": -9}, "ended with -9"),
        ({"state": "ended", "exit_code": 0, "silent_s": 99.0}, "ended"),
    ],
)
def test_a_rank_that_stands_out_is_marked(fields: dict, note: str) -> None:
    """Fails when the one that holds up the others does not stand out, or another does."""
    text = as_text(Watch([rank(0), rank(1, **fields), rank(2)], dict(FIGURES)))
    assert " ".join(row_of(text, 1)[5 if fields.get("busy_s", 1) else 4 :]) == note
    assert len(row_of(text, 0)) == len(row_of(text, 2)) == 5


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([], set()),
        ([None, None], set()),
        ([0.1], set()),
        ([9.0, None], set()),
        ([0.10, 0.11, 0.12], set()),
        ([0.10, 0.13], {1}),
        ([0.1, 0.1, 0.1, 0.1, 0.5], {4}),
        ([0.5, 0.1, 0.1, None, 0.5, 0.1], {0, 4}),
        ([0.0, 0.0, 0.0], set()),
    ],
)
def test_slow_is_well_above_the_median(times: list, slow: set[int]) -> None:
    """Fails when noise is called slow, or a rank that is fast makes all others so."""
    assert slow_ranks([rank(n, busy_s=busy_s) for n, busy_s in enumerate(times)]) == slow


def test_many_ranks_leave_room() -> None:
    """Fails when hundreds of ranks push everything else off the screen, or those that are not shown
    hide one that is slow, stopped or gone.
    """
    ranks = [rank(number) for number in range(200)]
    ranks[150].busy_s = 0.9
    ranks[160].process_state = "T"
    ranks[170].state = "lost"
    text = as_text(Watch(ranks, dict(FIGURES)))
    assert len(text.splitlines()) <= live.RANKS_SHOWN + 6
    for number in (150, 160, 170):
        assert f"rank {number} on host{number // 2}" in text.replace("\n", " "), text
    assert f"and {200 - live.RANKS_SHOWN} more" in text


def test_all_of_many_ranks_may_fail() -> None:
    """Fails when the names of hidden ranks that stand out fill the screen themselves."""
    ranks = [rank(number, state="lost") for number in range(500)]
    assert len(as_text(Watch(ranks, dict(FIGURES))).splitlines()) <= live.RANKS_SHOWN + 8


def test_hosts_are_text() -> None:
    """Fails when a name in brackets is taken for markup, or one that is too long breaks a row."""
    text = as_text(Watch([rank(0, host="[red]fe80::1[/red]"), rank(1, host="h" * 300)]), width=60)
    assert "[red]fe80::1[/red]" in text
    assert all(len(line) <= 60 for line in text.splitlines())


@pytest.mark.parametrize(
    ("steps", "figures", "expected"),
    [
        ([0, 0], {}, "starting: 2 of 2 workers connected"),
        ([3, 4], {}, "step 4"),
        ([0, 0], {"total_steps": 10}, "step 0/10"),
        ([5, 5], {"epoch": 1, "loss": 0.0}, "epoch 1  step 5  loss 0.0000"),
        ([5, 5], {"loss": None, "samples_per_s": None}, "step 5"),
        ([5, 5], {"loss": float("nan")}, "step 5  loss nan"),
        ([0, 0], {"total_steps": 9000, "step_s": 1.0}, "step 0/9000  2:30:00 left"),
        ([9, 9], {"total_steps": 9, "step_s": 1.0}, "step 9/9  0:00:00 left"),
        ([12, 9], {"total_steps": 9, "step_s": 1.0}, "step 12/9  0:00:00 left"),
        ([1, 1], {"total_steps": 9, "step_s": float("inf")}, "step 1/9"),
        ([1, 1], {"total_steps": 9, "step_s": float("nan")}, "step 1/9"),
    ],
)
def test_headlines(steps: list[int], figures: dict, expected: str) -> None:
    """Fails when a figure that is not there yet is shown or raises, or time left is negative."""
    assert headline(Watch([rank(n, step=s) for n, s in enumerate(steps)], figures)) == expected


def test_before_all_are_there() -> None:
    """Fails when one cannot see how many workers a job still waits for."""
    ranks = [rank(0, step=0), Rank(1), Rank(2)]
    assert headline(Watch(ranks)) == "starting: 1 of 3 workers connected"
    assert "waiting" in as_text(Watch(ranks))
    as_text(Watch([]))


def test_plain_lines() -> None:
    """Fails when rank 0's lines are changed, others' do not name their rank, or lines of ranks of
    different lengths do not stand below one another.
    """
    output = io.StringIO()
    view = PlainView(12, output)
    lines = ((0, "[0] x"), (1, "one"), (11, "eleven"))
    view.show("\n".join(view.label(number, text) for number, text in lines))
    view.update(Watch([rank(0)]))
    view.close()
    assert output.getvalue() == "[0] x\n[ 1] one\n[11] eleven\n"


def test_the_live_view_on_a_terminal(monkeypatch) -> None:
    """Fails when lines of workers are taken for markup, rank 0's steps are shown twice, or the view
    is left on the screen unfinished.
    """
    screen = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console", lambda file: Console(file=file, force_terminal=True, width=90)
    )
    view = LiveView(2, screen)
    assert view.label(0, "step 4  loss 0.5") is None
    view.show(str(view.label(1, "step 4 of my own [bold]")))
    view.show("restart 1 of 3 [/]")
    view.update(Watch([rank(0, step=77)], {}))
    view.close()
    text = screen.getvalue()
    assert "[1] step 4 of my own [bold]" in text and "restart 1 of 3 [/]" in text
    assert "77" in text and "\x1b[?25h" in text and text.endswith("\x1b[2K")


@pytest.mark.parametrize("terminal", [True, False])
def test_nobody_waits_for_the_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the launcher waits for a terminal or a pipe that takes nothing, holds more lines
    for it than it may, draws the view anew for every message, or does not say how many lines it
    has left out once somebody reads.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv(NOTEBOOK, raising=False)
    reading, writing = open_terminal() if terminal else os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        view = make_view(12, stream, Path("LOGS"))
        view.notice("2 workers")
        width = 60 if terminal else 1000
        count = 3 * view.view.most_waiting // width
        for number in range(count):
            view.line(1, f"{number:6} {'ä' * width}")
            view.update(Watch([rank(0, step=number)], {}))
        view.notice("the verdict")
        assert view._waiting <= view.view.most_waiting + 2000
        shown: list[bytes] = []
        reader = threading.Thread(target=read_all, args=(reading, shown))
        reader.start()
        view.close()
        if terminal:
            termios.tcdrain(writing)
    reader.join()
    os.close(reading)
    text = b"".join(shown).decode()
    numbers = [int(found) for found in re.findall(r"\[ ?1\] +(\d+) ä", text)]
    notes = re.findall(r"\.\.\. ([\d,]+) lines? not shown; all are in LOGS", text)
    left_out = sum(int(note.replace(",", "")) for note in notes)
    assert numbers[:10] == list(range(10)) and numbers == sorted(numbers)
    assert left_out and len(numbers) + left_out == count
    assert text.startswith("hvdtrain launch: 2 workers") is not terminal
    assert "hvdtrain launch: the verdict" in text
    assert text.count("own s/step") < 10


def open_terminal(columns: int = 90) -> tuple[int, int]:
    """The two ends of a terminal of this width."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    return reading, writing


def read_all(fd: int, into: list[bytes]) -> None:
    """To the end; that of a terminal is an error."""
    with suppress(OSError):
        while data := os.read(fd, 1 << 16):
            into.append(data)


@pytest.mark.parametrize(
    ("variables", "columns", "plain", "expected"),
    [
        ({}, 90, False, LiveView),
        ({}, 90, True, PlainView),
        ({"TERM": "dumb"}, 90, False, PlainView),
        ({"TERM": ""}, 90, False, PlainView),
        ({NOTEBOOK: "77"}, 90, False, PlainView),
        ({}, 0, False, PlainView),
        ({}, None, False, PlainView),
    ],
    ids=["terminal", "--plain", "dumb", "no TERM", "notebook", "no size", "pipe"],
)
def test_where_the_live_view_is(variables, columns, plain, expected, monkeypatch) -> None:
    """Fails when a pipe, a notebook or a terminal that cannot draw a line anew gets escape
    sequences, or a terminal that can gets plain lines unasked.
    """
    monkeypatch.delenv(NOTEBOOK, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    reading, writing = os.pipe() if columns is None else open_terminal(columns)
    with os.fdopen(writing, "w") as stream:
        view = make_view(4, stream, Path("LOGS"), plain)
        view.close()
    os.close(reading)
    assert type(view.view) is expected


@pytest.mark.parametrize("both", [False, True], ids=["| head", "2>&1 | head"])
@pytest.mark.timeout(60)
def test_a_job_outlives_its_terminal(both: bool) -> None:
    """Fails when `hvdtrain launch | head`, or a terminal that is closed, ends the launcher in an
    exception: it would kill the workers before they could save, and lose its exit code.
    """
    code = (
        "import sys; from hvdtrain.launcher.view import make_view\n"
        "from hvdtrain.launcher.supervise import Watch; from hvdtrain.log import complain\n"
        "view = make_view(2, sys.stdout, 'LOGS'); view.notice('a'); sys.stdin.readline()\n"
        "for n in range(3): view.line(0, 'b' * 9999); view.notice('c'); view.update(Watch([]))\n"
        "view.close(); sys.stdout.write('d'); complain('e'); sys.exit(7)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline().endswith(b" a\n")
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(b"\n", timeout=40)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (7, None if both else b"e\n")
