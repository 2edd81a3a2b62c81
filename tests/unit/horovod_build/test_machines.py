"""The campaign of fresh machines: what it reads, carries over and concludes, without a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.horovod_build.environment import NEWEST_TORCH, OLDEST_TORCH, release_of
from tests.campaigns.machines.host_settings import debian_mirrors, pip_settings
from tests.campaigns.machines.machine import first_error
from tests.campaigns.machines.scenarios import NEWEST, OLDEST, PINNED, SCENARIOS
from tests.campaigns.machines.steps import TRAIN, Outcome, readme_commands, readme_packages
from tests.campaigns.machines.table import different_hashes, table

ROOT = Path(__file__).parents[3]


def test_the_readme_has_what_the_campaign_reads() -> None:
    """Fails when the packages or the two commands cannot be read from the README."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert {"python3-venv", "python3-dev", "g++", "make"} <= set(readme_packages(readme))
    assert readme_commands(readme) == ["./launch/quickstart", "./launch/test"]


def test_by_pip_the_training_is_that_of_the_quickstart() -> None:
    """Fails when launch/quickstart trains otherwise than the wheel: their hashes would differ."""
    quickstart = (ROOT / "launch" / "quickstart").read_text("utf-8").replace("\\\n", " ").split()
    begin = quickstart.index("train")
    assert quickstart[begin : begin + len(TRAIN)] == TRAIN


def test_names_of_scenarios_differ() -> None:
    """Fails when two scenarios would write to one folder of logs."""
    assert len({it.name for it in SCENARIOS}) == len(SCENARIOS)


def test_the_oldest_the_pinned_and_the_newest_torch() -> None:
    """Fails when the campaign tries other releases of torch than the package supports and pins."""
    assert (release_of(OLDEST), release_of(NEWEST)) == (OLDEST_TORCH, NEWEST_TORCH)
    constraints = (ROOT / "launch" / "constraints.txt").read_text("utf-8").splitlines()
    assert f"torch=={PINNED}" in constraints


def test_settings_of_pip_without_the_folders_of_this_machine() -> None:
    """Fails when an index or a certificate is lost, or a local folder is carried over."""
    listing = (
        "global.cert='/etc/own.crt'\n"
        "global.extra-index-url='https://a.example/simple file:///opt/simple'\n"
        "install.find-links='/opt/wheels'\n"
        ":env:.index-url='https://b.example/simple'\n"
        ":env:.constraint='/opt/constraints.txt'\n"
        ":env:.cache-dir='/tmp/cache'\n"
    )
    found = pip_settings(listing)
    assert found.file == (
        "[global]\ncert = /etc/own.crt\nextra-index-url = https://a.example/simple\n"
    )
    assert found.variables == {"PIP_INDEX_URL": "https://b.example/simple"}
    assert found.certificates == (Path("/etc/own.crt"),)
    left_out = {"extra-index-url file:///opt/simple", "find-links /opt/wheels"}
    assert set(found.left_out) == left_out | {"constraint /opt/constraints.txt"}


def test_mirrors_of_debian_among_other_sources() -> None:
    """Fails when a source of another origin, or of updates alone, is taken for Debian's mirror."""
    targets = (
        "http://other.example/ stable main Other\n"
        "http://a.example/debian/ bookworm-updates main Debian\n"
        "http://b.example/debian/ bookworm contrib Debian\n"
        "http://c.example/debian/ bookworm main Debian\n"
        "http://d.example/security/ bookworm-security main Debian\n"
        "http://e.example/unnamed/ bookworm main\n"
    )
    assert debian_mirrors(targets) == ("http://c.example/debian/", "http://d.example/security/")
    assert debian_mirrors("") == (None, None)


@pytest.mark.parametrize(
    ("line", "before"),
    [
        (
            "common.h:343:19: error: 'logic_error' is not a member of 'std'",
            "cc1 -Werror=format x.c",
        ),
        ("setup: error: this machine has no nvcc", "setup: creating the environment"),
        ("E: Unable to locate package python3-venv", "Reading package lists..."),
        ("fatal error: mpi.h: No such file or directory", "writing error_handling.o"),
        ("the last line", "no line reports one"),
    ],
)
def test_the_first_error_of_a_log(line: str, before: str) -> None:
    """Fails when a line that reports no error is taken for the first error, or it is missed."""
    after = "\n  make: *** [all] Error 2" if line != "the last line" else ""
    assert first_error(f"{before}\n\n  {line}{after}\n") == line
    announced = f"setup: error: could not install (exit code 1):\n{line}\n"
    assert first_error(announced).endswith(f"(exit code 1): {line}")


def test_outcomes_are_compared_by_torch_and_architecture() -> None:
    """Fails when trainings that must end equally are not compared, or others are."""

    def outcome(scenario: str, torch: str, *hashes: str, architecture: str = "amd64") -> Outcome:
        found = {str(number): it for number, it in enumerate(hashes)}
        return Outcome(scenario, "c", architecture=architecture, torch=torch, hashes=found)

    readme, pip = SCENARIOS[0].name, SCENARIOS[1].name
    same = [outcome(readme, "2.13.0+cpu", "aa"), outcome(pip, "2.13.0+cu130", "aa", "aa")]
    apart = [outcome(pip, "2.6.0", "bb"), outcome(pip, "2.13.0", "cc", architecture="arm64")]
    assert different_hashes([*same, *apart]) == []
    (problem,) = different_hashes([*same, outcome(pip, "2.13.0", "aa", "dd")])
    assert "2 hashes" in problem and f"dd: {pip} 1" in problem


def test_table_of_outcomes() -> None:
    """Fails when a cell moves to another column, or a failure is not shown."""
    good = Outcome(
        SCENARIOS[0].name,
        "c",
        snapshot="Sat, 21 Nov 2026 09:15:44 UTC",
        gcc="14.2.0",
        python="3.13.5",
        torch="2.13.0+cu130",
        mpi="none",
        seconds=211.6,
        hashes={"launch": "b292670250c7", "horovodrun": "b292670250c7"},
    )
    bad = Outcome(SCENARIOS[1].name, "c", problem="install-horovod: exit code 3: no nvcc (log)")
    lines = table([good, bad]).splitlines()
    assert lines[0].startswith("| scenario | release of | gcc |")
    expected = "trixie 2026-11-21 | 14.2.0 | 3.13.5 | 2.13.0+cu130 | none | 212 | b2926702 | ok |"
    assert lines[2] == f"| {SCENARIOS[0].name} | {expected}"
    assert lines[3].endswith("| 0 |  | failed: install-horovod |")
