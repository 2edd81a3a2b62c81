"""Records of runs in MLflow and Weights & Biases, read back from their own files."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.records import trackers
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.trackers import Tracker, open_trackers
from tests.unit.cli.test_cli import read_summary
from tests.unit.commands import run
from tests.unit.wandb_files import read_offline

# mlflow and wandb themselves use what other libraries, and Python, have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

QUIET = {  # nothing is sent anywhere
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
TINY = ["--max-steps=6", "--global-batch-size=64", "--log-interval=2", "--output=runs"]
OWN = ("MLFLOW_", "WANDB_")
NAMES = ("mlflow", "wandb")


class Kept(NamedTuple):
    """What a tracker holds of a run."""

    status: str
    options: dict[str, str]
    points: dict[str, list[tuple[int, float]]]  # by name: step and value, in order
    summary: dict[str, Any]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """A folder with an MLflow store of its own, and no login."""
    set_place(tmp_path, monkeypatch)
    shutil.copy(store, tmp_path / "mlflow.db")


def set_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)
    for name, value in (QUIET | {"HOME": str(folder)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which a command has trained with both trackers and their defaults."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        set_place(folder, patch)
        done = run(folder, "train", *TINY, "--log-to=mlflow,wandb", "--audit-every=1")
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert "mlflow: run " in done.stdout and "wandb sync runs/" in done.stdout
        yield folder


@pytest.fixture(scope="module")
def store(first: Path) -> Path:
    """A database that MLflow has made; it takes some seconds."""
    return first / "mlflow.db"


def kept_by_mlflow(store: Path, run_id: str) -> Kept:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    found = client.get_run(run_id)
    points = {
        name: [(it.step, it.value) for it in client.get_metric_history(run_id, name)]
        for name in found.data.metrics
    }
    summary: dict[str, Any] = {**found.data.metrics, **found.data.tags}
    summary = {name[8:]: it for name, it in summary.items() if name.startswith("summary/")}
    points = {name: sorted(it) for name, it in points.items() if not name.startswith("summary/")}
    return Kept(found.info.status, found.data.params, points, summary)


def kept_by_wandb(folder: Path) -> Kept:
    """What all starts of a run have written, in their order."""
    starts = [read_offline(file) for file in sorted(folder.glob("wandb/offline-*/*.wandb"))]
    assert len({start.run_id for start in starts}) == 1
    points: dict[str, list[tuple[int, float]]] = {}
    for step, values in (point for start in starts for point in start.points):
        for name, value in values.items():
            points.setdefault(name, []).append((step, value))
    last = starts[-1]
    config = {name: str(it) for name, it in last.config.items() if name[0] != "_"}
    return Kept(str(last.exit_code), config, points, last.summary.get("summary", {}))


def kept(name: str, place: Path, folder: Path) -> Kept:
    run_id = json.loads((folder / f"{name}.json").read_text())["run_id"]
    return (
        kept_by_mlflow(place / "mlflow.db", run_id) if name == "mlflow" else kept_by_wandb(folder)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_has_what_the_folder_has(first: Path, name: str) -> None:
    """Fails if a scalar of TensorBoard, an option or a figure of the summary is missing, stands at
    another step, or the run is not marked as finished.
    """
    folder = first / "runs" / "lenet-digits"
    found = kept(name, first, folder)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    names = events.Tags()["scalars"]
    assert {"train/loss", "valid/accuracy", "phase/data_s", "lr"} <= {*names} == {*found.points}
    for scalar in names:
        expected = [(event.step, event.value) for event in events.Scalars(scalar)]
        assert found.points[scalar] == [(step, pytest.approx(v, 1e-6)) for step, v in expected]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert found.options == {option: str(value) for option, value in config.items()}
    assert found.status == {"mlflow": "FINISHED", "wandb": "0"}[name]
    summary = read_summary(folder)
    for figure in ("valid_accuracy", "params_sha256", "steps", "status", "started"):
        assert found.summary[figure] == summary[figure]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("finished", {"mlflow": "FINISHED", "wandb": "0"}),
        ("stopped", {"mlflow": "KILLED", "wandb": "1"}),
        ("failed", {"mlflow": "FAILED", "wandb": "1"}),
        ("audit_failed", {"mlflow": "FAILED", "wandb": "1"}),
    ],
)
def test_how_a_run_ended_is_marked(
    tmp_path: Path, capsys, name: str, status: str, expected: Mapping[str, str]
) -> None:
    """Fails if a run that failed or was stopped looks finished, or one that has, failed."""
    record(tmp_path, name, {2: {"train/loss": 1.0}}, status)
    found = kept(name, tmp_path, tmp_path / "one")
    assert found.status == expected[name] and found.summary["status"] == status
    assert capsys.readouterr().err == ""


Points = dict[int, dict[str, float]]


def record(
    place: Path, name: str, points: Points, status: str, recorded: int = 0, **options: Any
) -> None:
    """Write a part of the run `one`, as one start of it does."""
    directory = RunDirectory(place / "one", reopen=True)
    (tracker,) = open_trackers(name, directory, {"lr": 0.1, **options}, recorded)
    for step, values in points.items():
        tracker.scalars(step, values)
    tracker.close(status, {"status": status, "steps": max(points), "best": {"step": 2}})
    directory.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_its_record(tmp_path: Path, capsys, name: str) -> None:
    """Fails if a resumed run becomes a second one, repeats the steps after its checkpoint, loses
    later ones, keeps its old status, or an option that has changed is an error.
    """
    curve: Points = {step: {"train/loss": 1 / step} for step in (2, 4, 6, 8, 10)}
    curve[4]["valid/loss"] = 7.0
    record(tmp_path, name, {s: curve[s] for s in (2, 4, 6)}, "stopped", max_steps=8)
    # The checkpoint was of step 2.
    after = {s: curve[s] for s in (4, 6, 8, 10)}
    record(tmp_path, name, after, "finished", recorded=6, max_steps=10)
    found = kept(name, tmp_path, tmp_path / "one")
    assert found.points["train/loss"] == [(step, 1 / step) for step in curve]
    assert found.points["valid/loss"] == [(4, 7.0)]
    assert found.status == {"mlflow": "FINISHED", "wandb": "0"}[name]
    assert (found.options["lr"], found.summary["status"]) == ("0.1", "finished")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_record_is_begun_again(tmp_path: Path, store: Path, capsys, name: str) -> None:
    """Fails if a tracker added at a resume, or whose store is gone, lacks what follows."""
    record(tmp_path, name, {2: {"train/loss": 1.0}}, "stopped")
    shutil.copy(store, tmp_path / "mlflow.db")
    shutil.rmtree(tmp_path / "one" / "wandb", ignore_errors=True)
    if name == "wandb":
        (tmp_path / "one" / "wandb.json").unlink()
    record(tmp_path, name, {2: {"train/loss": 1.0}, 4: {"train/loss": 0.5}}, "finished", 2)
    found = kept(name, tmp_path, tmp_path / "one")
    assert found.points["train/loss"] == [(2, 1.0), (4, 0.5)]
    assert capsys.readouterr().err == ""


def test_odd_values_and_names_are_recorded(tmp_path: Path, capsys) -> None:
    """Fails if a loss that is not finite, or a metric with a name of the user's own, ends MLflow's
    record.
    """
    record(tmp_path, "mlflow", {2: {"a": math.nan, "b": math.inf, "train/F1 (all)": 2.0}}, "failed")
    found = kept("mlflow", tmp_path, tmp_path / "one")
    assert found.points["train/F1 _all_"] == [(2, 2.0)] and found.status == "FAILED"
    assert math.isnan(found.points["a"][0][1]) and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("names", "absent", "expected"),
    [
        ("mlflow", ("mlflow",), ["mlflow"]),
        ("mlflow", ("sqlalchemy",), ["mlflow"]),
        ("wandb,mlflow", ("mlflow", "wandb"), ["wandb", "mlflow"]),
    ],
)
def test_a_missing_library_starts_nothing(
    tmp_path: Path, names: str, absent: tuple[str, ...], expected: list[str]
) -> None:
    """Fails if training starts without it, a folder called wandb passes for the library, or one
    that is missing hides another.
    """
    (tmp_path / "mlflow.db").unlink()
    (tmp_path / "wandb").mkdir()
    done = run(tmp_path, "train", *TINY, f"--log-to={names}", absent=absent)
    assert done.returncode == 2, done.stderr
    advice = [line.rpartition("pip install ")[2] for line in done.stderr.splitlines()]
    assert advice == [f"'hvdtrain[{name}]'" for name in expected]
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


def unreachable(tmp_path: Path) -> dict[str, str]:
    return {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


def damaged(tmp_path: Path) -> dict[str, str]:
    """A store that opens the record, and then takes no metrics."""
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("ALTER TABLE metrics RENAME TO gone")
    connection.close()
    return {}


@pytest.mark.parametrize("fault", [unreachable, damaged])
def test_a_tracker_that_fails_does_not_end_the_training(
    tmp_path: Path, fault: Callable[[Path], dict[str, str]]
) -> None:
    """Fails if the run ends, its result is lost, the other tracker too, or the warning is missing
    or repeated.
    """
    variables = fault(tmp_path)
    done = run(tmp_path, "train", *TINY, "--log-to=mlflow,wandb", variables=variables)
    warnings = [line for line in done.stderr.splitlines() if "hvdtrain: warning: " in line]
    assert done.returncode == 0 and len(warnings) == 1, done.stderr
    assert "warning: --log-to mlflow: the training goes on without it: " in warnings[0]
    folder = tmp_path / "runs" / "lenet-digits"
    assert read_summary(folder)["status"] == "finished"
    assert [step for step, _ in kept_by_wandb(folder).points["train/loss"]] == [2, 4, 6]


class Stuck(trackers.Record):
    """A record whose library waits for a network."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def open(self) -> str:
        return "here"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.answer.wait()

    def end(self, status: str, summary: dict[str, Any]) -> None: ...


@pytest.mark.timeout(30)
def test_training_does_not_wait_for_a_tracker(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step, or the end of the run, waits for a tracker that does not answer."""
    monkeypatch.setattr(trackers, "CLOSE_S", 0.1)
    stuck = Stuck()
    tracker = Tracker("mlflow", lambda: stuck)
    for step in range(100):
        tracker.scalars(step, {"loss": 1.0})
    tracker.close("finished", {"status": "finished"})
    assert "TimeoutError: the last records were not taken in 0.1 s" in capsys.readouterr().err
    stuck.answer.set()
