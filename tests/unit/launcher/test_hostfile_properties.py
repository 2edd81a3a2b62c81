"""Hostfiles and `-H`: round trips through every dialect, and any bytes at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launcher.addresses import name_key
from hvdtrain.launcher.hosts import MOST_SLOTS, Host, parse_host_list, read_hostfile, take_slots

# One tmp_path for all examples is meant: each example writes the file anew.
EXAMPLES = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# Round trips: hosts that are written in any dialect come back as they were.

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
NAMES = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_-]{0,12}(\.[a-z][a-z0-9-]{0,8}){0,3}", fullmatch=True).filter(
        lambda name: not name.startswith("hvdtrain-host-")
    ),
    st.ip_addresses(v=4).filter(lambda ip: not ip.is_multicast and int(ip) != 0).map(str),
    st.ip_addresses(v=6).filter(lambda ip: not ip.is_multicast and int(ip) != 0).map(str),
)
HOST = st.builds(
    Host,
    name=NAMES,
    slots=st.integers(1, MOST_SLOTS),
    user=st.none() | st.from_regex("[a-z_][a-z0-9._-]{0,15}", fullmatch=True),
)
HOST_LISTS = st.lists(HOST, min_size=1, max_size=6, unique_by=lambda host: name_key(host.name))
SPACES = st.text(" \t", max_size=3)
ENDINGS = st.sampled_from(["\n", "\r\n", "\r", "\n\n", " # c\n", "\t// c\r\n", "\n# c d=1\n"])


def with_colon(host: Host) -> str:
    """`user@name:slots`, as -H has it."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}:{host.slots}" if host.user else f"{name}:{host.slots}"


@st.composite
def lines_of(draw: st.DrawFn, host: Host) -> str:
    """One host in one of the dialects, with spaces where they may stand."""
    equals = draw(SPACES) + "=" + draw(SPACES)
    key = draw(st.sampled_from(["slots", "cpu", "count", "max_slots", "max-slots", "slots-max"]))
    most = draw(st.integers(host.slots, MOST_SLOTS))
    forms = [
        with_colon(host),
        f"{host.address} {key}{equals}{host.slots}",
        f"{host.address}\tslots{equals}{host.slots} max_slots{equals}{most}",
        f"{host.address} max-slots{equals}{most} slots{equals}{host.slots}",
    ]
    if host.user:
        forms.append(f"{host.name} username{equals}{host.user} slots{equals}{host.slots}")
    if host.slots == 1:
        forms.append(host.address)
    return draw(SPACES) + draw(st.sampled_from(forms)) + draw(SPACES) + draw(ENDINGS)


def without_source(hosts: tuple[Host, ...]) -> list[tuple[str, int, str | None]]:
    return [(host.name, host.slots, host.user) for host in hosts]


@EXAMPLES
@given(hosts=HOST_LISTS, data=st.data(), bom=st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_every_dialect_reads_back(tmp_path: Path, hosts, data, bom: bytes) -> None:
    """Fails when hosts written in a mix of dialects do not come back as they were, in order."""
    text = "".join(data.draw(lines_of(host)) for host in hosts)
    (tmp_path / "hosts").write_bytes(bom + text.encode())
    assert without_source(read_hostfile(tmp_path / "hosts")) == without_source(hosts)


@EXAMPLES
@given(hosts=HOST_LISTS)
def test_host_lists_read_back(hosts: list[Host]) -> None:
    """Fails when hosts written as `-H` do not come back as they were."""
    text = ",".join(map(with_colon, hosts))
    assert without_source(parse_host_list(text)) == without_source(hosts)


@EXAMPLES
@given(hosts=HOST_LISTS, np=st.integers(1, 3 * MOST_SLOTS))
def test_taken_slots_add_up(hosts: list[Host], np: int) -> None:
    """Fails when the slots that are taken are not np, or not those of the first hosts."""
    total = sum(host.slots for host in hosts)
    if np > total:
        with pytest.raises(UsageError, match=f"-np {np}: the hosts have {total:,} slot"):
            take_slots(hosts, np)
        return
    taken = take_slots(hosts, np)
    assert sum(host.slots for host in taken) == np
    assert all(a.slots == b.slots for a, b in zip(taken[:-1], hosts, strict=False))
    assert [host.name for host in taken] == [host.name for host in hosts[: len(taken)]]


# Fuzzing: whatever comes, there are hosts or a clear error, and nothing unsafe is let in.

WORDS = st.sampled_from(
    [b"alpha", b"slots", b"=", b"4", b" ", b"\n", b"\r", b"#", b"//", b"@", b":", b"[", b"]", b"-"]
    + [b"fe80::1", b"%", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"max_slots", b"username"]
    + ["\u2028".encode(), "\u0663".encode(), b".", b",", b"$(x)", b"127.0.0.1", b"\x0b", b"\x85"]
)


def check_hosts(hosts: tuple[Host, ...]) -> None:
    """Every host is safe on a command line and in a configuration, and is there once."""
    assert hosts
    assert len({name_key(host.name) for host in hosts}) == len(hosts)
    for host in hosts:
        assert 1 <= host.slots <= MOST_SLOTS
        for text in filter(None, [host.name, host.user]):
            assert text.isascii()
            assert text.isprintable()
            assert not text.startswith("-")
            assert not set(text) & set(" \t\"'`$\\;&|<>(){}[]*?!~#=@,/")


@EXAMPLES
@given(content=st.binary(max_size=400) | st.lists(WORDS, max_size=60).map(b"".join))
def test_any_bytes_give_hosts_or_a_clear_error(tmp_path: Path, content: bytes) -> None:
    """Fails when any bytes raise something else than UsageError, or give an unsafe host."""
    path = tmp_path / "hosts"
    path.write_bytes(content)
    try:
        check_hosts(read_hostfile(path))
    except UsageError as error:
        assert error.problems
        assert all(problem.isascii() and len(problem) < 500 for problem in error.problems)


@EXAMPLES
@given(
    text=st.text(max_size=200)
    | st.lists(WORDS, max_size=40).map(lambda w: b"".join(w).decode("latin-1"))
)
def test_any_host_list_gives_hosts_or_a_clear_error(text: str) -> None:
    """Fails when any `-H` raises something else than UsageError, or gives an unsafe host."""
    try:
        check_hosts(parse_host_list(text))
    except UsageError as error:
        assert all(problem.isascii() for problem in error.problems)
