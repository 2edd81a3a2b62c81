"""Logs of a launch: every byte in its rank's file, every line once to whoever looks on."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launcher.logs import LONGEST_SHOWN, START, Logs

Shown = list[tuple[int, str]]


@pytest.fixture
def shown() -> Shown:
    return []


@pytest.fixture
def logs(tmp_path: Path, shown: Shown) -> Iterator[Logs]:
    made = Logs(tmp_path / "runs" / "a" / "logs", lambda rank, line: shown.append((rank, line)))
    yield made
    made.close()


def as_sent(data: bytes) -> str:
    """As an agent sends bytes that need not be UTF-8."""
    return data.decode("utf-8", "surrogateescape")


def test_one_file_a_rank(logs: Logs, shown: Shown) -> None:
    """Fails when ranks share a file, a line is shown twice, before it is whole, or not at all."""
    assert logs.write(0, "a") == []
    assert logs.write(1, "one\n\ntwo\n") == ["one", "", "two"]
    assert logs.write(0, "b\nc") == ["ab"]
    assert shown == [(1, "one"), (1, ""), (1, "two"), (0, "ab")]
    assert logs.path(0).read_text() == "ab\nc" and logs.path(1).read_text() == "one\n\ntwo\n"
    assert sorted(path.name for path in logs.folder.iterdir()) == [
        "horovodrun.log",
        "rank.0.log",
        "rank.1.log",
    ]


def test_every_byte_is_kept(logs: Logs, shown: Shown) -> None:
    """Fails when the file differs in a byte from what the worker wrote: an invalid one, a zero, a
    carriage return, or one of a letter that came in two pieces.
    """
    data = random.Random(0).randbytes(100_000) + "ä€😀\r\n".encode() * 100 + b"\0\x1b[1mend"
    cuts = sorted(random.Random(1).choices(range(len(data)), k=300))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        logs.write(3, as_sent(data[start:end]))
    assert logs.path(3).read_bytes() == data
    assert any("ä€😀" in line for _, line in shown)
    for _, line in shown:
        line.encode()  # can be written to any terminal


@pytest.mark.parametrize("cut", range(1, 9))
def test_letters_in_pieces_are_shown_whole(logs: Logs, shown: Shown, cut: int) -> None:
    """Fails when a letter whose bytes came in two pieces is shown as something else."""
    data = "ä€😀\n".encode()
    logs.write(0, as_sent(data[:cut]))
    logs.write(0, as_sent(data[cut:]))
    assert shown == [(0, "ä€😀")]


def test_the_last_line_needs_no_end(logs: Logs, shown: Shown) -> None:
    """Fails when what a worker wrote last (native code that gives up often ends no line) is not
    shown, is shown twice, or is taken for the beginning of another start's first line.
    """
    logs.write(0, "fine\nFatal: out of memory")
    assert logs.finish(0) == ["Fatal: out of memory"] and logs.finish(0) == []
    logs.note("start 2")
    assert logs.write(0, "again\n") == ["again"]
    assert logs.finish(1) == []
    assert logs.path(0).read_text() == "fine\nFatal: out of memory\n--- start 2\nagain\n"
    assert shown == [(0, "fine"), (0, "Fatal: out of memory"), (0, "again")]


def test_of_progress_bars_the_last_state_is_shown(logs: Logs, shown: Shown) -> None:
    """Fails when every state of a bar that rewrites its line is shown, or the file lacks one."""
    bar = "\r 10%\r 50%\r100%\n\r 1%\r\nplain\r\n"
    logs.write(0, bar)
    assert shown == [(0, "100%"), (0, " 1%"), (0, "plain")]
    assert logs.path(0).read_bytes() == bar.encode()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["\r" + "#" * 5000 + f"{n:6}" for n in range(4000)], "#" * 5000 + "  3999"),
        (["ab" * 20_000 for _ in range(500)], "ab" * 32_768 + " ... and 19,934,464 characters"),
        (["x" * 99_999, "\rshort"], "short"),
        (["whole", "\r", "\r"], "whole"),
        (["a\r", "b", "c\r\r"], "bc"),
    ],
    ids=["bar", "no end", "rewritten", "returned twice", "in pieces"],
)
def test_a_line_that_does_not_end(
    pieces: list[str], expected: str, logs: Logs, shown: Shown
) -> None:
    """Fails when what has arrived of a line is copied at each piece of it (20 MB then take minutes)
    or kept whole, what is left out is not counted, or a log lacks a byte.
    """
    began_s, longest = time.process_time(), 0
    for piece in pieces:
        assert logs.write(2, piece) == []
        longest = max(longest, len(logs._partial[2]._text))
    assert logs.finish(2) == [expected] and shown == [(2, expected)]
    assert longest <= LONGEST_SHOWN and time.process_time() - began_s < 10
    assert logs.path(2).read_bytes() == "".join(pieces).encode()


def test_notes_go_into_every_file(logs: Logs) -> None:
    """Fails when a note of the launcher's is missing in a rank's log, or has no line of its own."""
    logs.note("before anybody has spoken")
    logs.write(0, "a\n")
    logs.write(1, "no end")
    logs.note("SIGTERM: workers asked to stop")
    assert logs.path(0).read_text() == "a\n--- SIGTERM: workers asked to stop\n"
    assert logs.path(1).read_text() == "no end\n--- SIGTERM: workers asked to stop\n"
    text = (logs.folder / "horovodrun.log").read_text()
    assert text == "--- before anybody has spoken\n--- SIGTERM: workers asked to stop\n"


def test_the_last_lines_of_horovodrun(logs: Logs) -> None:
    """Fails when an earlier start's messages are shown for the last one's, or ours for its."""
    for number in (1, 2):
        logs.note(f"{START.removeprefix('--- ')}{number}: 4 workers")
        os.write(logs.horovodrun.fileno(), f"said in start {number}\n".encode() + b"\xff bytes\n")
        logs.note("a note")
    assert logs.horovodrun_lines() == ["said in start 2", "\ufffd bytes"]


def test_a_second_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    """Fails when the logs of an earlier start, which may hold the reason of a failure, are lost."""
    for text in ("first\n", "second\n"):
        logs = Logs(tmp_path, lambda rank, line: None)
        logs.write(0, text)
        logs.close()
    assert (tmp_path / "rank.0.log").read_text() == "first\nsecond\n"


def test_a_full_disk_does_not_end_the_job(tmp_path: Path, shown: Shown) -> None:
    """Fails when the launcher ends in an exception because a log cannot be written, reports it more
    than once, or shows fewer lines.
    """
    (tmp_path / "rank.2.log").mkdir()
    logs = Logs(tmp_path, lambda rank, line: shown.append((rank, line)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # no file may grow further
    try:
        written = [logs.write(rank, "x" * 10_000 + "\nand\n") for rank in (0, 1, 2)]
        logs.note("a note")
        logs.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [lines[1] for lines in written] == ["and"] * 3
    reported = [line for _, line in shown if "logs are lost" in line]
    assert reported == [f"hvdtrain launch: {tmp_path}: logs are lost: File too large"]
    assert [(rank, line) for rank, line in shown if line == "and"] == [
        (0, "and"),
        (1, "and"),
        (2, "and"),
    ]


@pytest.mark.parametrize("name", ["file", "file/below", "horovodrun"])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    """Fails when a folder for logs that cannot be made is found out only by the first line."""
    (tmp_path / "file").write_text("")
    (tmp_path / "horovodrun" / "horovodrun.log").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"{name}: logs cannot be written: .*--log-dir"):
        Logs(tmp_path / name, lambda rank, line: None)


@pytest.mark.parametrize("name", ["horovodrun.log", "rank.1.log"])
def test_a_planted_link_is_not_followed(name: str, tmp_path: Path, shown: Shown) -> None:
    """Fails when whoever may write the folder has us write into another file of the user's, or
    when the reason for a missing log is not printed.
    """
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).symlink_to(tmp_path / "precious")
    reported = f"{name} is a symbolic link"
    if name == "horovodrun.log":
        with pytest.raises(UsageError, match=reported):
            Logs(tmp_path / "logs", lambda rank, line: None)
    else:
        logs = Logs(tmp_path / "logs", lambda rank, line: shown.append((rank, line)))
        logs.write(1, "a line\n")
        logs.close()
        assert reported in shown[0][1] and shown[1] == (1, "a line")
    assert (tmp_path / "precious").read_text() == "precious"


def test_logs_follow_to_the_folder_of_the_run(tmp_path: Path, shown: Shown) -> None:
    """Fails when the logs of a script stay behind, a line is lost on the way, those of an earlier
    job are overwritten, or an empty folder is left.
    """
    run = tmp_path / "runs" / "x"
    for number in (1, 2):
        logs = Logs(tmp_path / "logs", lambda rank, line: shown.append((rank, line)), follows=True)
        logs.write(0, f"before {number}\n")
        logs.follow(str(run))  # not there yet
        run.mkdir(parents=True, exist_ok=True)
        logs.follow(str(run))
        logs.follow(str(tmp_path))  # the run of another loop
        logs.write(0, "after\n")
        logs.note("end")
        logs.close()
        folder = run / ("logs" if number == 1 else "logs-2")
        assert logs.folder == folder and not (tmp_path / "logs").exists()
        assert (folder / "rank.0.log").read_text() == f"before {number}\nafter\n--- end\n"
        assert (folder / "horovodrun.log").read_text() == "--- end\n"
    assert (0, f"hvdtrain launch: logs: {run / 'logs'}") in shown


def test_two_jobs_in_one_folder_have_logs_of_their_own(tmp_path: Path) -> None:
    """Fails when lines of two jobs are mixed in one file, or a later job cannot have the folder."""
    one, two = (Logs(tmp_path / "logs", lambda *_: None, follows=True) for _ in range(2))
    assert [one.folder.name, two.folder.name] == ["logs", "logs-2"]
    one.close()
    two.close()
    three = Logs(tmp_path / "logs", lambda *_: None, follows=True)
    assert three.folder.name == "logs"
    three.close()
