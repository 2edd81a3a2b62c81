"""`hvdtrain bench scaling`: flags, order of runs, ratios, table and plots."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from hvdtrain.cli import make_parser
from hvdtrain.cli.bench import check_flags
from hvdtrain.errors import Stopped, UsageError
from hvdtrain.evidence.children import ChildFailure
from hvdtrain.files import json_ready
from hvdtrain.interpreter import module_argv
from hvdtrain.lab.bench.contestants import (
    CONTESTANTS,
    DDP,
    LIMIT,
    OURS,
    SAMPLES,
    Independent,
    PlainDdp,
    ScalingCase,
    is_train,
    spec_of,
)
from hvdtrain.lab.bench.jobs import logged_steps, on_workers, train_argv
from hvdtrain.lab.bench.rounds import in_turn, ratio_within_rounds
from hvdtrain.lab.bench.scaling import (
    ScalingPlan,
    draw_plots,
    examine,
    points_of,
    table,
)
from hvdtrain.lab.bench.turns import CpuTime, Results, cpu_table, measure_cases
from hvdtrain.lab.findings import publish
from hvdtrain.lab.systems import find_strategy
from hvdtrain.topology import Topology


def read(*flags: str, topology: Topology | None = None) -> dict:
    """What these flags of `bench` come to."""
    arguments, unknown = make_parser().parse_known_args(["bench", *flags])
    return check_flags(vars(arguments), arguments.explain(unknown), topology or Topology())


def plan(**changes: object) -> ScalingPlan:
    values = {"models": {"lenet": 8, "mlp": 4}, "workers": (1, 2), "modes": ("weak", "strong")}
    values |= {"rounds": 2, "turn_s": 0.1, "controller": "gloo", "time_limit_s": 60.0}
    return ScalingPlan(**values | changes)  # type: ignore[arg-type]


def test_flags_of_the_network() -> None:
    """Fails if a speed or a number of hosts that cannot be made is taken, or is lost."""
    found = read("network", "--models=mlp", "--workers=2,4", "--gbit=0.1,10")
    assert (found["workers"], found["gbit_per_s"]) == ((2, 4), (0.1, 10.0))
    found = read("network", "--models=mlp", "--workers-per-host=3")
    assert (found["workers"], found["workers_per_host"]) == ((6,), 3)
    with pytest.raises(UsageError, match=r"--workers=4,6: .* from 2 to 8 hosts of 3"):
        read("network", "--workers=4,6", "--workers-per-host=3")
    bad = ("--workers=1,2", "--workers=2,9", "--workers-per-host=0")
    for flag in (*bad, "--gbit=0", "--gbit=fast", "--gbit=1,,2"):
        with pytest.raises(UsageError) as caught:
            read("network", flag)
        assert flag in str(caught.value)


def test_each_model_has_its_usual_batch() -> None:
    """Fails if a batch goes to another model, or one for all is not for all."""
    assert read("scaling")["models"] == {"lenet": 128, "mlp": 128, "resnet18-small": 16}
    assert read("scaling", "--models", "resnet50,lenet")["models"] == {"resnet50": 16, "lenet": 128}
    flags = ("scaling", "--models", "mlp,lenet", "--batch-size")
    assert read(*flags, "3,5")["models"] == {"mlp": 3, "lenet": 5}
    assert read(*flags, "7")["models"] == {"mlp": 7, "lenet": 7}
    assert read("step", "--model", "resnet18-small")["batch_size"] == 16
    assert read("audit", "--model", "mlp")["batch_size"] == 128
    assert read("step", "--batch-size", "3")["batch_size"] == 3


def test_workers_are_counted_up_or_named() -> None:
    """Fails if -np P is not N = 1..P, or the order of named ones decides."""
    assert read("scaling", "-np", "3")["workers"] == (1, 2, 3)
    assert read("scaling", "--workers", "4,1")["workers"] == (1, 4)
    assert read("scaling", "--mode", "weak")["modes"] == ("weak",)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--models lenet,,mlp", "--models=lenet,,mlp"),
        ("--models lenet,lenet", "each once"),
        ("--batch-size 1,2", "--batch-size=1,2: expected one number"),
        ("--batch-size 0", "--batch-size=0"),
        ("--batch-size ²", "--batch-size=²"),
        ("--workers 1,x", "--workers=1,x"),
        ("--workers 2,2", "each once"),
        ("-np 0", "-np=0"),
        ("--turn-s 0", "--turn-s=0"),
        ("--rounds 0", "--rounds=0"),
        ("--time-limit-s nan", "--time-limit-s=nan"),
        ("--output setup.py", "is not a folder"),
        ("--json absent/x.json", "no such folder"),
        ("--json tests", "is a folder"),
        ("--fast", "--fast: no such flag"),
    ],
)
def test_bad_flags_are_reported(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a value that cannot be goes through, or is reported without its flag."""
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(UsageError) as caught:
        read("scaling", *flags.split())
    (problem,) = caught.value.problems
    assert expected in problem


def test_all_problems_are_reported_at_once() -> None:
    """Fails if one bad flag hides another, or workers of a job start jobs of their own."""
    flags = ("--models", "", "--turn-s", "-3", "--rounds", "0", "--np", "2", "--workers", "0")
    with pytest.raises(UsageError) as caught:
        read("scaling", *flags, topology=Topology(1, 2, 1, launched=True))
    assert len(caught.value.problems) >= 6
    assert any("starts its workers itself" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"models": {"lenett": 8, "mlpp": 8}}, ("--models=lenett", "--models=mlpp")),
        ({"models": {"lenet": 3_000}}, ("lenet, N = 2", "lenet, N = 1")),
        ({"models": {"mlp": 1}, "modes": ("weak",)}, ("mlp, N = 1", "mlp, N = 2")),
    ],
)
def test_what_cannot_be_run_is_reported_before_the_start(
    changes: dict, expected: tuple[str, ...]
) -> None:
    """Fails if a model that is unknown, an epoch that is too short, or shares too small for batch
    norm are met only by a worker.
    """
    with pytest.raises(UsageError) as caught:
        examine(plan(**changes).models, plan(**changes).cases())
    problems = caught.value.problems
    assert len(problems) == len(expected)
    assert all(word in problem for word, problem in zip(expected, problems, strict=True))


def test_weak_and_strong_meet_at_the_most_workers() -> None:
    """Fails if a batch is not kept as its mode requires, or the same case runs twice."""
    one = plan(models={"lenet": 8}, workers=(1, 2, 4))
    sizes = {(case.workers, case.global_batch_size) for case in one.cases()}
    assert sizes == {(1, 8), (2, 16), (4, 32), (1, 32), (2, 32)}
    assert len(one.cases()) == 5


def test_a_run_ends_before_its_epoch_does() -> None:
    """Fails if an evaluation or a short last batch could come into a turn."""
    for size in (1, 6, 256, 3000):
        assert (ScalingCase("lenet", 1, size).steps + 1) * size <= SAMPLES


def test_contestants_take_turns() -> None:
    """Fails if one is left out of a round, or always follows the same one."""
    assert in_turn(CONTESTANTS, 0) == in_turn(CONTESTANTS, 2) == CONTESTANTS
    assert in_turn(CONTESTANTS, 1) == CONTESTANTS[::-1]


class MadeUp:
    """Two workers are 1.5 times as fast as one; ours are nine tenths of the limit."""

    def __init__(self, case: ScalingCase, name: str, fails: str = "") -> None:
        self._speed = {OURS: 90.0, DDP: 60.0, LIMIT: 100.0}[name] * (1 + (case.workers - 1) / 2)
        self._fails, self.turns, self.closed = fails, 0, False
        self.cores: list[CpuTime] = []  # each turn uses more of them

    def take(self, turn_s: float) -> None:
        self.turns += 1
        self.cores.append(CpuTime(0.9 * self.turns, 0.2))
        if self._fails == "turn":
            raise ChildFailure("out of paper")

    def rates(self) -> list[float]:
        if self._fails == "rates":
            raise ChildFailure("out of ink")
        return [self._speed] * self.turns

    def close(self) -> None:
        self.closed = True


def start(case: ScalingCase, name: str, folder: Path) -> MadeUp:
    return MadeUp(case, name)


def test_ratios_and_efficiency(tmp_path: Path) -> None:
    """Fails if a ratio is upside down, or efficiency is not that of N against one worker."""
    points = points_of(plan(), measured(plan(), tmp_path / "plan"))
    assert len(points) == 8
    two = next(p for p in points if (p.mode, p.case.model, p.case.workers) == ("weak", "mlp", 2))
    assert two.samples_per_s == {OURS: 135.0, DDP: 90.0, LIMIT: 150.0}
    assert two.over_ddp is not None
    assert two.over_limit is not None
    assert (two.over_ddp.median, two.over_limit.median) == (1.5, 0.9)
    assert two.efficiency == dict.fromkeys(CONTESTANTS, 0.75)
    only_two = plan(workers=(2,))
    (first, *_) = points_of(only_two, measured(only_two, tmp_path / "two"))
    assert first.efficiency == dict.fromkeys(CONTESTANTS)


def measure(
    one: ScalingPlan, begin: Callable[..., MadeUp], folder: Path, report: Callable[[str], None]
) -> Results[ScalingCase]:
    how = {"rounds": one.rounds, "turn_s": one.turn_s, "folder": folder, "report": report}
    return measure_cases(one.cases(), CONTESTANTS, begin, **how)


def work_of(case: ScalingCase) -> tuple[int, int]:
    return case.global_batch_size, case.workers


def measured(one: ScalingPlan, folder: Path) -> dict:
    folder.mkdir()
    results = measure(one, start, folder, lambda line: None)
    assert (results.problems, results.stopped) == ([], None)
    return results.rates


def test_a_signal_keeps_what_is_measured(tmp_path: Path) -> None:
    """Fails if Ctrl-C loses complete cases, or passes for the end; or progress is not shown."""
    started, reported = [], []

    def begin(case: ScalingCase, name: str, folder: Path) -> MadeUp:
        started.append(case)
        if len(set(started)) == 3:
            raise Stopped(signal.SIGINT)
        return MadeUp(case, name)

    one = plan()
    results = measure(one, begin, tmp_path, reported.append)
    assert [*results.rates] == one.cases()[:2]
    assert f"(2 of {len(one.cases())}, about " in reported[1]
    assert reported[2:] == results.problems
    assert f"stopped by SIGINT: {len(one.cases()) - 2} of" in results.problems[0]
    assert len(points_of(one, results.rates)) < len(points_of(one, measured(one, tmp_path / "all")))
    with pytest.raises(Stopped):
        publish(results.findings([], one, []), {"json": None})


@pytest.mark.parametrize(
    ("fails", "reason"), [("start", "no ribbon"), ("turn", "out of paper"), ("rates", "out of ink")]
)
def test_a_failure_ends_neither_the_others_nor_unnoticed(
    fails: str, reason: str, tmp_path: Path
) -> None:
    """Fails if one's failure loses the rest, counts as a speed, breaks the JSON, or leaves one
    running.
    """
    started: list[MadeUp] = []

    def begin(case: ScalingCase, name: str, folder: Path) -> MadeUp:
        if name == DDP and fails == "start":
            raise ChildFailure("no ribbon")
        started.append(MadeUp(case, name, fails if name == DDP else ""))
        return started[-1]

    one = plan(workers=(2,), models={"lenet": 8}, modes=("weak",), rounds=3)
    reported: list[str] = []
    results = measure(one, begin, tmp_path, reported.append)
    rates, problems = results.rates, results.problems
    text = cpu_table(results, work_of)
    assert f"{one.cases()[0]}: limit" in text
    assert "DDP" not in text
    assert problems == [f"DDP, lenet, N = 2, 16 samples a step: {reason}"]
    assert problems[0] in reported
    assert all(contestant.closed for contestant in started)
    points = points_of(one, rates)
    assert (points[0].over_ddp, points[0].samples_per_s[DDP]) == (None, None)
    assert points[0].over_limit is not None
    content = json_ready(results.findings([], one, points).content)
    assert content["runs"][0]["samples_per_s"][DDP] == [None] * 3
    assert content["points"][0]["over_limit"]["median"] == 0.9
    assert reason in content["problems"][0]
    assert ratio_within_rounds([math.nan, 1.0], [1.0, math.nan]) is None


def test_the_table(tmp_path: Path) -> None:
    """Fails if a column or a mode is missing, or what is not known shows as a number."""
    one = plan(workers=(2,))
    rates = measured(one, tmp_path / "plan")
    rates[one.case("weak", "mlp", 2)][LIMIT] = [math.nan, math.nan]
    text = table(one, points_of(one, rates))
    assert "2 rounds of turns; hvdtrain on gloo" in text
    assert "weak scaling" in text
    assert "strong scaling" in text
    (row, *_) = [line.split() for line in text.splitlines() if line.startswith("  lenet")]
    assert row[:6] == ["lenet", "2", "16", "135", "90", "150"]
    assert row[6:12] == ["1.500", "(1.500", "to", "1.500)", "0.900", "(0.900"]
    assert row[-3:] == ["-", "-", "-"]
    (row, *_) = [line.split() for line in text.splitlines() if line.startswith("  mlp")]
    assert row[3:6] == ["135", "90", "-"]


def test_the_table_of_cpu_time(tmp_path: Path) -> None:
    """Fails if CPU time is not that of one worker and one step, or the rest not what is left."""
    one = plan(workers=(2,), models={"lenet": 8}, modes=("weak",))
    rows = cpu_table(measure(one, start, tmp_path, print), work_of).splitlines()
    # 16 samples at 135 a second take 118.5 ms, in which each of two workers has 1.35 and 0.2 cores.
    (row,) = [line for line in rows if line.startswith("  lenet, N = 2, 16 samples a step: hvd")]
    assert row.split()[-4:] == ["118.5", "80.0", "11.9", "26.7"]


def test_the_plots(tmp_path: Path) -> None:
    """Fails if a plot cannot be drawn, also where runs have failed, or nothing came of any."""
    one = plan(modes=("weak",))
    rates = measured(one, tmp_path / "plan")
    rates[one.cases()[0]][DDP][0] = math.nan
    plots = draw_plots(one, rates, points_of(one, rates))
    assert [plot.name for plot in plots] == ["scaling", "ratios"]
    assert all(len(plot.png) > 5000 for plot in plots)
    nothing = {case: {name: [math.nan] for name in CONTESTANTS} for case in one.cases()}
    assert draw_plots(one, nothing, points_of(one, nothing)) == []


def test_ours_is_what_a_user_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if workers are started otherwise than by `launch`'s horovodrun and settings, or one
    worker needs horovodrun.
    """
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    train = train_argv(tmp_path, ["--model", "lenet"])
    assert train[:7] == [*module_argv("hvdtrain.cli"), "train", "--model", "lenet"]
    assert on_workers(train, 1, "mpi")[0] == train
    argv, environment = on_workers(train, 2, "mpi")
    assert Path(argv[0]).name == "horovodrun"
    assert argv[1:6] == ["-np", "2", "--mpi", "-H", "localhost:2"]
    assert argv[-len(train) :] == train
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert environment["HOROVOD_FUSION_THRESHOLD"] == "0"


def test_times_are_those_of_the_logged_steps(tmp_path: Path) -> None:
    """Fails if a step's time is not the one at which it was logged."""
    writer = SummaryWriter(str(tmp_path / "run" / "tensorboard"))
    for step, at_s in ((10, 100.5), (20, 101.25)):
        writer.add_scalar("train/loss", 1.0, step, walltime=at_s)
    writer.close()
    assert [(logged.step, logged.at_s) for logged in logged_steps(tmp_path)] == [
        (10, 100.5),
        (20, 101.25),
    ]


def test_peers_are_found_by_the_processes_that_run_them(tmp_path: Path) -> None:
    """Fails if a peer's process would look for a class that is not there."""
    for strategy in (PlainDdp, Independent):
        spec = spec_of(plan().cases()[0], strategy, tmp_path, 60.0)
        assert find_strategy(spec.system) is strategy


def test_a_worker_is_distinguished_from_processes_that_name_it(tmp_path: Path) -> None:
    """Fails if horovodrun or mpirun, whose arguments hold the same words, would get the signal."""
    worker = [*module_argv("hvdtrain.cli"), "train"]
    naming = [sys.executable, "-c", "import time; time.sleep(60)", *worker]
    with subprocess.Popen(naming) as process:
        assert not is_train(process.pid)
        process.kill()
    with subprocess.Popen(worker, cwd=tmp_path, stdout=-3, stderr=-3) as process:
        deadline = time.monotonic() + 20  # until it has become that
        while not (found := is_train(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert found
    assert not is_train(process.pid)
