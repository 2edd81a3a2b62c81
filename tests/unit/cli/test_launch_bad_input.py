"""Bad input to `hvdtrain launch`, to hostfiles and to `hvdtrain doctor`: reported in a paragraph
that names it and what to do, and nothing is left behind.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main
from tests.unit import bad_hosts, bad_launches, bad_pods

LONGEST = 1200  # characters: a paragraph or a few lines, no list of everything
CASES = [*bad_launches.CASES, *bad_hosts.CASES, *bad_pods.CASES]

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def quiet_place(tmp_path: Path, monkeypatch) -> None:
    """An empty working folder, no scheduler, no job around."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "HOROVOD_", "OMPI_")):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize(("argv", "expected", "code", "setup"), CASES)
def test_bad_input_is_reported(argv, expected, code, setup, tmp_path, monkeypatch, capfd) -> None:
    """Fails when bad input is launched, ends in a traceback or in another exit code, when the
    message does not name the value, where it stands and what to do, or when anything is left
    behind of a job that never started.
    """
    if setup:
        setup(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["hvdtrain", *argv])
    assert_reported(main(), code, expected, capfd, by_doctor=argv[0] == "doctor")
    if code == 2:
        assert sorted(tmp_path.rglob("*")) == before


def assert_reported(actual: int, code: int, expected: list[str], capfd, by_doctor: bool) -> None:
    output, reported = capfd.readouterr()
    assert actual == code, reported
    if by_doctor and code == 3:
        reported = output  # its findings are its output
    else:
        assert reported.startswith("hvdtrain: error"), reported
        assert len(reported) < LONGEST and not re.search(r"\n\s*\n", reported.strip()), reported
    assert "Traceback" not in reported
    missing = [text for text in expected if text not in reported]
    assert not missing, reported


def test_there_are_enough_kinds() -> None:
    """Fails when kinds of bad input are dropped, or two bear the same name."""
    names = [parameters.id for parameters in CASES]
    assert len(names) == len(set(names)) >= 100


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize(
    "flags",
    [
        "-np 2 -- train",
        "-np 2 --min-np 1 --restarts 1 -- train --batch-size 8",
        "-H a:2,b -p 22 --log-dir new/folder -- python x.py",
        "--hostfile hosts -- train --rank-weights=1,2,3",
    ],
)
def test_what_the_bad_ones_differ_from_is_good(flags, tmp_path, monkeypatch, capfd) -> None:
    """Fails when the cases above fail for another reason than theirs."""
    (tmp_path / "hosts").write_text("alpha\nbeta slots=2\n")
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "launch", "--dry-run", *flags.split()])
    assert main() == 0, capfd.readouterr().err
