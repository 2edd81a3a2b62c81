"""`hvdtrain compare`: flags, judging, and what table and page make of rows."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hvdtrain.cli import make_parser
from hvdtrain.cli.compare import SYSTEMS, check_flags
from hvdtrain.errors import UsageError
from hvdtrain.evidence.children import MARK, ChildFailure, CommandProcess, explain
from hvdtrain.files import json_ready
from hvdtrain.lab.compare.comparison import as_json, examine, exit_code, make_spec
from hvdtrain.lab.compare.page import write_comparison
from hvdtrain.lab.compare.rows import (
    AGREES,
    DISAGREES,
    FAILED,
    ORACLE,
    REPORTED,
    TOLERANCE,
    Comparison,
    ComparisonPlan,
    Row,
    describe,
    heading,
    judge,
    line,
    make_row,
    notes_of,
    over_rounds,
    summary_line,
    worst_difference,
)
from hvdtrain.lab.systems.contract import Spec, Strategy, Traffic
from hvdtrain.launcher.processes import marked
from hvdtrain.train.clock import PHASES
from tests.unit.strategies import work_spec

HOSTILE = "evil.<script>:Class"
PHASES_S = dict(zip(PHASES, (0.001, 0.020, 0.003, 0.0005), strict=True))


def flags(*arguments: str) -> tuple[str, ...]:
    """The systems that these flags ask for."""
    parsed, unknown = make_parser().parse_known_args(["compare", *arguments])
    return check_flags(vars(parsed), parsed.explain(unknown))


def test_all_systems_run_unless_some_are_named() -> None:
    """Fails if one is left out, or the order is not the user's."""
    assert flags("-np", "2") == SYSTEMS
    assert flags("-np", "2", "--systems", "ring,my.own:Class") == ("ring", "my.own:Class")


@pytest.mark.parametrize(
    ("flag", "system"),
    [
        ("--servers=3", "parameter_server"),
        ("--towers-dim=1", "towers"),
        ("--towers-reduction=tensorflow", "towers"),
    ],
)
def test_flags_of_systems_that_do_not_run_are_refused(flag: str, system: str) -> None:
    """Fails if such a flag is taken without its system, or refused with it, or as a default."""
    with pytest.raises(UsageError, match=f"{flag}: has no effect without {system}: leave it out"):
        flags("-np=2", "--systems=ring", flag)
    assert flags("-np=2", "--systems=ring", "--servers=2", "--towers-dim=0") == ("ring",)
    for systems in (f"{system},ring", "my.own:Class"):
        assert flags("-np=2", f"--systems={systems}", flag)
    assert flags("-np=2", flag) == SYSTEMS


def test_all_problems_of_the_flags_are_reported_at_once(tmp_path: Path) -> None:
    """Fails if a bad value goes through, or hides another."""
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(UsageError) as caught:
        flags(
            *("-np", "1", "--steps", "0", "--lr", "nan", "--momentum", "1", "--servers", "0"),
            *("--systems", "ring,nccl", "--fast", "--output", str(taken)),
            *("--json", str(tmp_path / "absent" / "rows.json")),
        )
    reported = " | ".join(caught.value.problems)
    for word in ("-np=1", "--steps=0", "--lr=nan", "--momentum=1", "--servers=0", "nccl"):
        assert word in reported
    for word in ("--fast", "is not a folder", "no such folder"):
        assert word in reported
    assert len(caught.value.problems) == 9


def make_plan(**changes: object) -> ComparisonPlan:
    work = work_spec(**changes.pop("work", {}))  # type: ignore[arg-type]
    values = {"systems": ("ring",), "workers": 2, "servers": 2, "towers_reduction": "gluon"}
    values |= {"towers_dim": 0, "controller": "gloo", "time_limit_s": 5.0, "rounds": 1}
    return ComparisonPlan(work=work, **values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("work", "why"),
    [({}, ""), ({"dtype": "float32"}, "float32"), ({"model": "resnet18-small"}, "batch norm")],
)
def test_what_cannot_agree_is_not_judged(work: dict[str, str], why: str) -> None:
    """Fails if rounding or statistics by share are reported as a mistake, or nothing is judged."""
    setting = examine(make_plan(work=work))
    assert bool(setting.why_not) == bool(why)
    assert why in setting.why_not


def test_an_impossible_plan_ends_before_anything_starts() -> None:
    """Fails if a worker must meet what is known beforehand."""
    plan = make_plan(systems=("tests.unit.strategies:absent",), towers_dim=4)
    with pytest.raises(UsageError) as caught:
        examine(plan)
    assert len(caught.value.problems) == 2


def test_differences_are_the_worst_of_any_process() -> None:
    """Fails if one wrong process hides behind right ones, or a tensor that is lost counts as 0."""
    oracle = {"w": [np.array([2.0, -4.0])], "b": [np.zeros(2)]}
    right, wrong = np.array([2.0, -4.0]), np.array([2.0, -3.0])
    assert worst_difference({"w": [right], "b": [np.zeros(2)]}, oracle) == 0
    assert worst_difference({"w": [right, wrong], "b": [np.zeros(2)]}, oracle) == 0.25
    assert worst_difference({"w": [right], "b": [np.full(2, 1e-3)]}, oracle) == 1e-3
    assert worst_difference({"w": [right]}, oracle) == math.inf
    assert worst_difference({"w": [right[:1]], "b": [np.zeros(2)]}, oracle) == math.inf
    nan = np.array([math.nan, -4.0])
    assert math.isnan(worst_difference({"w": [wrong, nan, right], "b": [np.zeros(2)]}, oracle))


@pytest.mark.parametrize(
    ("difference", "judged", "status"),
    [
        (None, True, ORACLE),
        (TOLERANCE, True, AGREES),
        (2 * TOLERANCE, True, DISAGREES),
        (math.nan, True, DISAGREES),
        (math.inf, True, DISAGREES),
        (0.5, False, REPORTED),
    ],
)
def test_judging(difference: float | None, judged: bool, status: str) -> None:
    """Fails if what is not a number agrees, or what is only reported is judged."""
    assert judge(difference, judged) == status


def test_rounds_give_the_median_and_the_worst() -> None:
    """Fails if one lucky or unlucky round is the result, or a wrong one is outvoted."""
    rows = [make("ring", samples_per_s=s, difference=d) for s, d in [(9, 0), (1, 2e-16), (5, 0)]]
    row = over_rounds(rows)
    assert (row.samples_per_s, row.difference, row.rates) == (5, 2e-16, [9, 1, 5])
    wrong = make("ring", DISAGREES, difference=math.nan)
    assert over_rounds([*rows, wrong]) is wrong
    assert over_rounds([*rows, ROWS[-1], wrong]) is wrong
    assert over_rounds([*rows, ROWS[-1]]) is ROWS[-1]


class TwoWorkers(Strategy):
    what = "two"

    @classmethod
    def formula(cls, spec: Spec, size: int) -> dict[str, Traffic]:
        return {name: Traffic(size, size) for name in cls.processes(spec)}


def result(name: str, begun_s: float, ended_s: float, **changes: object) -> dict[str, object]:
    values = {"samples": 60, "phases_s": PHASES_S, "traffic": {name: asdict(Traffic(8, 9, 1))}}
    values |= {"peak_memory_bytes": 1000, "notes": ["the same"], "figures": {}}
    return {"name": name, "begun_s": begun_s, "ended_s": ended_s} | values | changes


def test_a_row_is_put_together_from_its_processes(tmp_path: Path) -> None:
    """Fails if speed is that of one process alone, a server's idle phases are averaged in, or
    notes are repeated.
    """
    spec = make_spec(make_plan(), "ring", tmp_path)
    save_file({"w": np.array([1.0, 2.0])}, tmp_path / "process-0.safetensors")
    idle = dict.fromkeys(PHASES, 0.0)
    results = [
        result("worker 0", 10.0, 12.0, figures={"staleness_mean": 1.0, "staleness_max": 1.0}),
        result("server 0", 10.5, 13.0, figures={"staleness_mean": 2.0, "staleness_max": 5.0}),
    ]
    results[1]["phases_s"] = idle
    row = make_row(spec, TwoWorkers, results, 80, {"w": [np.array([1.0, 2.0])]}, True)
    assert row.status == AGREES
    assert row.samples_per_s == 60 / 3
    assert row.phases_s == PHASES_S
    assert row.traffic == {"worker 0": Traffic(8, 9, 1), "server 0": Traffic(8, 9, 1)}
    assert (row.traffic_source, row.total_memory_bytes) == ("counted", 2000)
    assert row.notes == ["the same"]
    assert row.figures == {"staleness_mean": 1.5, "staleness_max": 5.0}


def test_what_cannot_be_measured_is_marked_as_formula(tmp_path: Path) -> None:
    """Fails if theory passes for a measurement."""
    spec = make_spec(make_plan(), "ring", tmp_path)
    results = [result(f"worker {rank}", 0.0, 1.0, traffic=None) for rank in range(2)]
    row = make_row(spec, TwoWorkers, results, 80, None, True)
    assert row.traffic_source == "formula"
    assert row.traffic == row.formula == {f"worker {r}": Traffic(80, 80) for r in range(2)}


def test_the_busiest_rank() -> None:
    """Fails if the bottleneck is not shown, or ranks that are alike are reported as one's load."""
    star = {"worker 0": Traffic(2, 2), "worker 1": Traffic(1, 1)}
    assert make("star", traffic=star).busiest == ("worker 0", Traffic(2, 2))
    even = dict.fromkeys(("worker 0", "worker 1"), Traffic(1, 1))
    assert make("even", traffic=even).busiest == ("each", Traffic(1, 1))
    assert make("none", traffic={"process": Traffic()}).busiest == ("", Traffic())


def test_the_first_failure_is_reported(tmp_path: Path) -> None:
    """Fails if a victim's broken connection stands for the cause, or a death without output is
    reported without a cause.
    """
    for number, (text, at) in enumerate([("connection closed", 2.0), ("out of paper", 1.0)]):
        content = {"error": text, "failed_at": at}
        (tmp_path / f"process-{number}.json").write_text(json.dumps(content))
    assert explain(tmp_path, [1, 1]) == "out of paper"
    other = tmp_path / "other"
    other.mkdir()
    (other / "process-1.log").write_text("one\ntwo\n")
    assert explain(other, [0, -9]) == "process 1 ended with code -9\none\ntwo"


def test_a_command_and_all_that_it_started_are_ended(tmp_path: Path) -> None:
    """Fails if a grandchild in a session of its own is left behind."""
    program = "import subprocess, sys, time\n"
    program += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    program += " start_new_session=True)\ntime.sleep(60)"
    child = CommandProcess([sys.executable, "-c", program], tmp_path / "log")
    deadline = time.monotonic() + 20
    while len(marked(MARK, child._mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert child.exit_code() is None
    child.end()
    assert marked(MARK, child._mark) == {}
    assert child.exit_code() == -9


def test_a_missing_command_is_reported(tmp_path: Path) -> None:
    """Fails if a missing horovodrun ends the whole comparison with a traceback."""
    with pytest.raises(ChildFailure, match=r"is not installed\. Run hvdtrain install-horovod"):
        CommandProcess([str(tmp_path / "horovodrun")], tmp_path / "log")


def make(system: str, status: str = AGREES, **changes: object) -> Row:
    values = {"samples_per_s": 100.0, "phases_s": PHASES_S, "traffic_source": "counted"}
    values |= {"traffic": {"worker 0": Traffic(5e6, 2e6, 3), "worker 1": Traffic(1e6, 1e6, 3)}}
    values |= {"memory_bytes": {"worker 0": 3_000_000, "worker 1": 4_000_000}, "difference": 3e-16}
    processes = ["worker 0", "worker 1", "server 0"]
    return Row(system, "a way", status, processes, **values | changes)  # type: ignore[arg-type]


ROWS = [
    make("single", ORACLE, difference=None, samples_per_s=50.0),
    make("ring", figures={"staleness_mean": 1.25, "staleness_max": 4.0}),
    make(HOSTILE, DISAGREES, difference=math.nan),
    make("late", REPORTED, difference=0.2, traffic_source="formula"),
    Row("horovod", "a way", FAILED, ["worker 0"], problem="broken\n<b>badly</b>"),
]


def setting() -> Comparison:
    return Comparison(make_plan(), (1, 28, 28), 1000, 8000, "")


def test_the_table_shows_each_row() -> None:
    """Fails if columns do not line up with their headings, or a figure is in another's place."""
    names = [row.system for row in ROWS]
    titles = heading(names).splitlines()[-1]
    lines = [line(row, names, ROWS[0]) for row in ROWS]
    ring = lines[1]
    end = titles.index("samples/s") + len("samples/s")
    assert ring[:end].endswith(" 100")
    for title, value in [("x single", "2.00"), ("exchange", "3.00"), ("received", "2.000")]:
        stop = titles.index(title) + len(title)
        assert ring[:stop].endswith(f" {value}"), title
    assert "agrees 3e-16" in ring and "worker 0, counted" in ring and ring.endswith(" 7")
    assert "DISAGREES nan" in lines[2] and "2e-01" in lines[3] and "formula" in lines[3]
    assert lines[4].endswith("failed  broken")
    notes = "\n".join(notes_of(ROWS, setting()))
    assert "2 worker processes, 1 server process" in notes
    assert "staleness 1.25 updates on average, 4 at most" in notes
    assert "1,000 parameters" in describe(setting())
    assert summary_line(ROWS) == (
        f"compare: 1 agree with single within 1e-09; late reported, not judged; {HOSTILE} "
        "DISAGREE; horovod failed"
    )


def test_the_page_holds_all_and_trusts_no_name(tmp_path: Path) -> None:
    """Fails if a row is missing, a picture lies outside, or a name becomes markup."""
    path = write_comparison(ROWS, setting(), tmp_path / "page")
    page = path.read_text()
    assert page.count("data:image/png;base64,") == len(list(path.parent.glob("*.png"))) == 5
    assert "<script>" not in page and "<b>badly" not in page
    assert "evil.&lt;script&gt;:Class" in page
    for word in ("http://", "https://", 'src="/', "@import"):
        assert word not in page


def test_a_page_without_a_row_that_came_to_its_end(tmp_path: Path) -> None:
    """Fails if there is nothing to draw and so no page at all."""
    page = write_comparison(ROWS[-1:], setting(), tmp_path).read_text()
    assert "horovod" in page and "data:image/png" not in page


def test_json_is_strict_and_whole() -> None:
    """Fails if a NaN makes a file that other readers refuse, or a row loses its figures."""
    text = json.dumps(json_ready(as_json(setting(), ROWS)), allow_nan=False)
    content = json.loads(text)
    assert (content["workers"], content["model"], content["gradient_bytes"]) == (2, "lenet", 8000)
    rows = {row["system"]: row for row in content["rows"]}
    assert rows["ring"]["traffic"]["worker 0"] == {"sent": 5e6, "received": 2e6, "messages": 3}
    assert rows[HOSTILE]["difference"] is None and rows[HOSTILE]["status"] == DISAGREES


@pytest.mark.parametrize(
    ("chosen", "code"), [([0, 1, 3], 0), ([0, 1, 4], 1), ([0, 2, 4], 17), ([2], 17)]
)
def test_exit_codes(chosen: list[int], code: int) -> None:
    """Fails if a wrong result is hidden by a failure, or by what is only reported."""
    assert exit_code([ROWS[number] for number in chosen]) == code
