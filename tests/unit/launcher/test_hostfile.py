"""Hostfiles, `-H`, and the slots that workers take."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launcher.hosts import (
    LONGEST_LINE,
    MOST_BYTES,
    MOST_HOSTS,
    MOST_PROBLEMS,
    MOST_SLOTS,
    Host,
    parse_host_list,
    read_hostfile,
    take_slots,
)

EXAMPLE = Path(__file__).parents[3] / "launch/hosts.example"
QUICK_S = 20.0  # generous on a loaded machine; what is unbounded takes minutes or never ends


def read(folder: Path, content: str | bytes) -> list[tuple[str | None, str, int]]:
    """(user, name, slots) of each host of a file with this content."""
    path = folder / "hosts"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [(host.user, host.name, host.slots) for host in read_hostfile(path)]


def problems_of(folder: Path, content: str | bytes) -> list[str]:
    """The messages on a bad file, without the folder's name."""
    with pytest.raises(UsageError) as caught:
        read(folder, content)
    assert caught.value.exit_code == 2
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("alpha", (None, "alpha", 1)),
        ("alpha slots=4", (None, "alpha", 4)),
        ("alpha\tslots = 4  ", (None, "alpha", 4)),
        ("  alpha slots =4", (None, "alpha", 4)),
        ("alpha slots=004", (None, "alpha", 4)),
        ("alpha Slots=4", (None, "alpha", 4)),
        ("alpha cpu=4", (None, "alpha", 4)),
        ("alpha count=4", (None, "alpha", 4)),
        ("alpha slots=2 max_slots=4", (None, "alpha", 2)),
        ("alpha max-slots=4 slots=4", (None, "alpha", 4)),
        ("alpha max-slots=4", (None, "alpha", 4)),
        ("alpha slots_max=4", (None, "alpha", 4)),
        ("alpha:4", (None, "alpha", 4)),
        ("alpha:2 max_slots=4", (None, "alpha", 2)),
        (f"alpha slots={MOST_SLOTS}", (None, "alpha", MOST_SLOTS)),
        ("ann@alpha:4", ("ann", "alpha", 4)),
        ("alpha slots=4 username=ann", ("ann", "alpha", 4)),
        ("alpha slots=4 # the big one", (None, "alpha", 4)),
        ("alpha:4# the big one", (None, "alpha", 4)),
        ("alpha // the big one", (None, "alpha", 1)),
        ("node-1_a.example.org slots=4", (None, "node-1_a.example.org", 4)),
        ("192.0.2.7:4", (None, "192.0.2.7", 4)),
        ("127.1", (None, "127.1", 1)),
        ("fe80::1", (None, "fe80::1", 1)),
        ("fe80::1:2 slots=4", (None, "fe80::1:2", 4)),
        ("[fe80::1]:4", (None, "fe80::1", 4)),
        ("[fe80::1] slots=4", (None, "fe80::1", 4)),
        ("ann@[fe80::1%eth0]:4", ("ann", "fe80::1%eth0", 4)),
        ("job-worker-0.job.default.svc slots=4", (None, "job-worker-0.job.default.svc", 4)),
    ],
)
def test_a_line(tmp_path: Path, line: str, expected: tuple[str | None, str, int]) -> None:
    """Fails when one way of writing a host is not understood, or otherwise than it is meant."""
    assert read(tmp_path, line) == [expected]
    assert read(tmp_path, f"before\r\n{line}\r\n\nafter:3") == [
        (None, "before", 1),
        expected,
        (None, "after", 3),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\ufeffalpha:2\n".encode(), [(None, "alpha", 2)]),
        ("alpha:2\r\n\r\nbeta\r\n".encode("utf-16"), [(None, "alpha", 2), (None, "beta", 1)]),
        (b"alpha\rbeta", [(None, "alpha", 1), (None, "beta", 1)]),
        (b"\n\n  \n# none\n   # none\nalpha", [(None, "alpha", 1)]),
        ("alpha # caf\xe9\n".encode("latin-1"), [(None, "alpha", 1)]),
        ("alpha # caf\xe9\n".encode(), [(None, "alpha", 1)]),
    ],
    ids=["bom", "utf-16", "cr", "blank", "latin-1", "utf-8"],
)
def test_a_text_as_editors_leave_it(tmp_path: Path, content: bytes, expected: object) -> None:
    """Fails when a byte order mark, an ending of lines, or a comment's letters spoil the hosts."""
    assert read(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "hosts: no hosts in it"),
        ("\n# alpha\n", "hosts: no hosts in it"),
        ("alpha slots=0", "hosts:1: 'slots=0': the number of slots must be a whole number from 1"),
        ("alpha slots=65537", "whole number from 1 to 65,536"),
        ("alpha slots=" + "9" * 4000, "whole number from 1 to 65,536"),
        ("alpha slots=-1", "'slots=-1': the number"),
        ("alpha slots=2.0", "'slots=2.0': the number"),
        ("alpha slots=\u0663", "the number of slots must"),
        ("alpha slots=", "'slots=': the number"),
        ("alpha:", "'alpha:': the number"),
        ("alpha:x", "'alpha:x': the number"),
        ("alpha:2 slots=2", "'slots=2': the number of slots is given twice"),
        ("alpha slots=2 slots=2", "given twice"),
        ("alpha slots=4 max_slots=2", "slots=4 is above max_slots=2"),
        ("alpha:4 max-slots=2", "slots=4 is above max_slots=2"),
        ("alpha slots 2", "'slots', '2': not understood; a host's name may be followed by slots=N"),
        ("alpha beta", "'beta': not understood"),
        ("alpha sockets=2", "'sockets=2': not understood"),
        ("slots=2", "'slots=2': the name of a host must come before it"),
        ("= 2", "the name of a host must come before it"),
        ("-oProxyCommand=x", "name of a host must come before it"),
        ("-l", "'-l': a host's name does not begin with '-'"),
        ("root@-l", "'-l': a host's name does not begin with '-'"),
        ("-l@alpha", "'-l': a user's name consists of"),
        ("a$(id)", "'$' '(' ')' not allowed in a host's name"),
        ("a;b", "';' not allowed"),
        ("^alpha", "'^' not allowed"),
        ("+n0", "'+' not allowed"),
        ("alpha,beta", "',' not allowed"),
        ("b\xfcro", "is ASCII; write an international name in its xn-- form"),
        ("a..b", "between the dots"),
        (".", "between the dots"),
        ("a" * 64, "1 to 63 characters"),
        ("a." * 127, "at most 253 characters, not 254"),
        ("7", "a number is not a host's name"),
        ("1.2.3.256", "not an IPv4 address"),
        ("010.0.0.1", "not an IPv4 address"),
        ("0.0.0.0", "not the address of a single host"),
        ("[::]", "not the address of a single host"),
        ("ff02::1", "not the address of a single host"),
        ("fe80::g", "not an IPv6 address (with slots, it is written in brackets"),
        ("1:2:3:4:5:6:7:8:2", "not an IPv6 address"),
        ("[fe80::1", "brackets hold an IPv6 address"),
        ("[fe80::1]2", "brackets hold an IPv6 address"),
        ("[alpha]:2", "brackets hold an IPv6 address"),
        ("fe80::1%$x", "% must be followed by the name of a network interface"),
        ("@alpha", "the user's name before @ is missing"),
        ("ann@", "the name of a host is missing"),
        ("ann@bob@alpha", "'ann@bob': a user's name"),
        ("u" * 65 + "@alpha", "at most 64 characters"),
        ("ann@alpha username=bob", "the user is 'ann' already"),
        ("alpha username=$x", "'$x': a user's name"),
        ("hvdtrain-host-1", "reserved for the launcher"),
        (" " * LONGEST_LINE + "a", "hosts:1: longer than 4,096 characters"),
        (b"alpha\nbe\0ta", "hosts:2: holds a zero byte"),
        (b"\x7fELF\x02\x01\x01\0\0", "hosts:1: holds a zero byte"),
        (b"\xff\xfe\xff", "hosts:1: "),
    ],
)
def test_a_bad_line(tmp_path: Path, content: str | bytes, expected: str) -> None:
    """Fails when the line is taken, or when its message does not say what is wrong with it."""
    (problem,) = problems_of(tmp_path, content)
    assert problem.startswith("hosts:")
    assert expected in problem
    assert problem.isascii()
    assert len(problem) < 300


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Fails when the user must correct one line to see the next problem, or sees the wrong line."""
    problems = problems_of(tmp_path, "ok:2\n\nb!d slots=0\n# c\r\nworse :2 x\r-z\n")
    assert [problem.split(":")[:2] for problem in problems] == [
        ["hosts", "3"],
        ["hosts", "3"],
        ["hosts", "5"],
        ["hosts", "6"],
    ]


def test_problems_without_end_are_cut(tmp_path: Path) -> None:
    """Fails when a wrong file (a log, say) fills the screen, or when the cut is not mentioned."""
    problems = problems_of(tmp_path, "b!d\n" * 1000)
    assert len(problems) == MOST_PROBLEMS + 1
    assert problems[-1] == "(these are the first 20; more may follow)"


@pytest.mark.parametrize(
    ("first", "second", "other"),
    [
        ("alpha:2", "alpha slots=2", ""),
        ("alpha", "root@alpha", " (as alpha)"),
        ("root@alpha", "alpha", " (as root@alpha)"),
        ("alpha", "ALPHA", " (as alpha)"),
        ("alpha.example.org", "alpha.example.org.", " (as alpha.example.org)"),
        ("fe80::1", "[fe80:0:0::1]", " (as fe80::1)"),
    ],
)
def test_a_host_twice(tmp_path: Path, first: str, second: str, other: str) -> None:
    """Fails when a host is taken twice, or when the message does not name both lines."""
    (problem,) = problems_of(tmp_path, f"{first}\nbeta\n{second}\n")
    assert problem.startswith("hosts:3: ")
    assert f"is already listed at hosts:1{other}; keep one" in problem


@pytest.mark.parametrize("separator", ["\n", ","])
def test_names_alone_are_counted(tmp_path: Path, separator: str) -> None:
    """Fails when the nodefile of a batch system, which lists a host once for each slot, is refused
    or counted otherwise than by mpirun; or another order of hosts comes out.
    """
    text = separator.join(["beta", "alpha", "beta", "root@gamma", "beta", "root@gamma"])
    expected = [(None, "beta", 3), (None, "alpha", 1), ("root", "gamma", 2)]
    if separator == ",":
        assert [(it.user, it.name, it.slots) for it in parse_host_list(text)] == expected
    else:
        assert read(tmp_path, text) == expected


def test_sources_name_the_line(tmp_path: Path) -> None:
    """Fails when a host does not record where it was read, which later messages print."""
    path = tmp_path / "hosts"
    path.write_text("# one\nalpha\nann@beta:2\n")
    assert read_hostfile(path) == (
        Host("alpha", 1, None, f"{path}:2"),
        Host("beta", 2, "ann", f"{path}:3"),
    )
    assert [host.address for host in read_hostfile(path)] == ["alpha", "ann@beta"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Fails when such a path ends in a traceback, or in a message that does not name it."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, expected in [
        (tmp_path / "absent", "there is no such hostfile"),
        (tmp_path, "is a folder"),
        (tmp_path / "a\0b", "not a valid path of a hostfile"),
        (tmp_path / ("a" * 300), "cannot be read (File name too long)"),
        (loop, "cannot be read ("),
    ]:
        with pytest.raises(UsageError, match=r".") as caught:
            read_hostfile(path)
        assert expected in str(caught.value)


def test_what_is_too_large_is_refused_early(tmp_path: Path) -> None:
    """Fails when a huge or endless file is read to its end: in memory, time, or for ever."""
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(100 * 10**6)
    lines = tmp_path / "lines"
    lines.write_bytes(b"#\n" * (MOST_BYTES // 2 - 1))
    many = tmp_path / "many"
    many.write_text("\n".join(f"n{number}" for number in range(MOST_HOSTS + 1)))
    start = time.monotonic()
    for path, expected in [
        (huge, "larger than 1 MiB"),
        (Path("/dev/zero"), "larger than 1 MiB"),
        (lines, "no hosts in it"),
        (many, "more than 16,384 hosts"),
    ]:
        with pytest.raises(UsageError, match=expected):
            read_hostfile(path)
    assert time.monotonic() - start < QUICK_S


def test_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a pipe cannot be a hostfile (`--hostfile <(...)`), or a silent one hangs us."""
    reading, writing = os.pipe()
    os.write(writing, b"alpha:2\n")
    os.close(writing)
    assert read_hostfile(Path(f"/dev/fd/{reading}"))[0].slots == 2
    os.close(reading)
    monkeypatch.setattr("hvdtrain.launcher.hosts.SILENCE_S", 0.1)
    reading, writing = os.pipe()
    with pytest.raises(UsageError, match="no data from this pipe"):
        read_hostfile(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    os.close(writing)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=r"no hosts in it|no data"):
        read_hostfile(tmp_path / "fifo")


def test_the_example() -> None:
    """Fails when launch/hosts.example shows a dialect that is not read, or read otherwise."""
    assert [(host.address, host.slots) for host in read_hostfile(EXAMPLE)] == [
        ("alpha", 4),
        ("beta", 4),
        ("gamma", 1),
        ("delta", 2),
        ("epsilon", 2),
        ("zeta", 2),
        ("ann@eta", 2),
        ("ann@theta", 2),
        ("192.0.2.7", 2),
        ("2001:db8::7", 2),
        ("2001:db8::8", 2),
    ]


def test_a_host_list() -> None:
    """Fails when `-H` is read otherwise than it is written."""
    assert parse_host_list("a:2, b ,user@c:1,[fe80::1]:2,fe80::2") == (
        Host("a", 2, None, "-H"),
        Host("b", 1, None, "-H"),
        Host("c", 1, "user", "-H"),
        Host("fe80::1", 2, None, "-H"),
        Host("fe80::2", 1, None, "-H"),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["-H: entry 1: is empty"]),
        ("a:2,", ["-H: entry 2: is empty"]),
        (
            "a:0,,b c:2,a",
            ["entry 1: 'a:0'", "entry 2: is empty", "entry 3: 'b c': ' ' not"],
        ),
        ("a,root@a", ["-H: root@a is already listed (as a)"]),
        ("a:2:3", ["-H: entry 1: 'a:2:3': not an IPv6 address"]),
        ("a slots=2", ["-H: entry 1: 'a slots=2': ' ' '=' not allowed"]),
        ("a" * (MOST_BYTES + 1), ["-H: longer than"]),
    ],
)
def test_a_bad_host_list(text: str, expected: list[str]) -> None:
    """Fails when such a `-H` is taken, or when a message does not name the entry."""
    with pytest.raises(UsageError) as caught:
        parse_host_list(text)
    assert len(caught.value.problems) == len(expected)
    for problem, part in zip(caught.value.problems, expected, strict=True):
        assert part in problem


HOSTS = (Host("alpha", 1), Host("beta", 2, "ann"), Host("gamma", 1))


@pytest.mark.parametrize(
    ("np", "expected"), [(1, [1]), (2, [1, 1]), (3, [1, 2]), (4, [1, 2, 1])], ids=str
)
def test_take_slots(np: int, expected: list[int]) -> None:
    """Fails when workers go to other hosts than the first ones whose slots hold them."""
    taken = take_slots(HOSTS, np)
    assert [host.slots for host in taken] == expected
    assert [host.address for host in taken] == ["alpha", "ann@beta", "gamma"][: len(expected)]


def test_too_few_slots() -> None:
    """Fails when too many workers are taken, or when the message does not count the slots."""
    with pytest.raises(UsageError, match=r"-np 6: the hosts have 4 slots \(alpha 1, ann@beta 2, "):
        take_slots(HOSTS, 6)
    with pytest.raises(UsageError, match="and 92 more"):
        take_slots([Host(f"n{number}") for number in range(100)], 101)
