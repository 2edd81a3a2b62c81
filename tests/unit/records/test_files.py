"""What a run leaves on the disk: its directory and its records."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from hvdtrain.audit import AuditRecord
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.files import open_kept, open_to_read
from hvdtrain.records.directory import RunDirectory, new_directory
from hvdtrain.records.event_log import EventLog
from hvdtrain.records.folders import free_folder
from hvdtrain.records.ledger import take_cause
from hvdtrain.report.charts import write_plots
from hvdtrain.report.page import PAGE
from hvdtrain.train.checkpoint import Checkpoints, Snapshot
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.metering import Totals

HOLDS_LOCK = """
import sys
from pathlib import Path
from hvdtrain.records.directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]) / "one")
print("held", flush=True)
sys.stdin.read()
"""


def read_tree(root: Path) -> dict[str, bytes | None]:
    """Every file's bytes and every folder's name."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    """Fails when a missing --output is an error, or an empty folder counts as occupied."""
    for output in (tmp_path / "a" / "b", tmp_path):
        (tmp_path / "two").mkdir(exist_ok=True)
        directory = RunDirectory(output / "two")
        assert directory.path == output / "two" and directory.path.is_dir()
        directory.close()


@pytest.mark.parametrize(
    ("held", "expected"),
    [("config.yaml", "already holds a run"), ("thesis.pdf", r"already holds files \(thesis.pdf")],
)
def test_an_occupied_directory_is_refused(tmp_path: Path, held: str, expected: str) -> None:
    """Fails when a second run writes over a first one, or touches the user's own files."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / held).write_text("precious")
    before = read_tree(tmp_path)
    with pytest.raises(UsageError, match=expected) as caught:
        RunDirectory(tmp_path / "one")
    assert str(caught.value).startswith("--experiment=one: ")
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize(("output", "name"), [("file", "x"), (".", "file"), (".", "x" * 300)])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, output: str, name: str) -> None:
    """Fails when a file in the way, or a name too long, ends in a traceback."""
    (tmp_path / "file").write_text("precious")
    before = read_tree(tmp_path)
    with pytest.raises(UsageError, match="cannot be written: "):
        RunDirectory(tmp_path / output / name)
    assert read_tree(tmp_path) == before


def test_two_live_jobs_cannot_share_a_directory(tmp_path: Path) -> None:
    """Fails when the second job gets in, or when a closed or killed job still blocks."""
    first = RunDirectory(tmp_path / "one")
    with pytest.raises(UsageError, match="a live job is using"):
        RunDirectory(tmp_path / "one")
    first.close()
    command = [sys.executable, "-c", HOLDS_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match="a live job is using"):
            RunDirectory(tmp_path / "one")
        other.kill()
    RunDirectory(tmp_path / "one").close()


def test_a_run_that_ends_before_the_lock_is_seen(tmp_path: Path, monkeypatch) -> None:
    """Fails when a job that waited for the lock writes over the run that held it."""
    check = RunDirectory._refuse_occupied

    def check_then_the_other_job_ends(self: RunDirectory, holds_lock: bool = False) -> None:
        check(self, holds_lock)
        self.path.mkdir(exist_ok=True)
        (self.path / "config.yaml").write_text("precious")
        (self.path / "summary.json").write_text('{"status": "finished"}')

    monkeypatch.setattr(RunDirectory, "_refuse_occupied", check_then_the_other_job_ends)
    with pytest.raises(UsageError, match="already holds a run"):
        RunDirectory(tmp_path / "one")


def test_a_new_run_takes_the_first_free_name(tmp_path: Path, capsys) -> None:
    """Fails if a finished or live run, or other files under a later name, are written to, a dead
    run's folder is passed over, or the name is not printed.
    """
    paths = [tmp_path / name for name in ("one", "one-2", "one-3", "one-4", "one-5")]
    dead_run(paths[0], **KEPT["finished"])
    first = RunDirectory(paths[1])  # it has written nothing yet
    paths[2].mkdir()
    (paths[2] / "thesis.pdf").write_text("precious")
    dead_run(paths[3])
    before = {path: read_tree(path) for path in paths[:3]}
    live = [first]
    for path in paths[3:]:
        assert free_folder(paths[0]) == path
        live.append(new_directory(paths[0], numbered=True))
        assert live[-1].path == path
        assert f"{paths[0]} holds another run: this one is {path} " in capsys.readouterr().out
        live[-1].write_config({"lr": 1})
    assert {path: read_tree(path) for path in paths[:3]} == before
    for directory in live:
        directory.close()


@pytest.mark.parametrize(
    ("held", "numbered", "expected"),
    [
        ("config.yaml", False, "already holds a run"),
        (".lock", False, "a live job is using"),
        ("thesis.pdf", True, "already holds files"),
    ],
)
def test_a_new_run_that_must_have_its_name_is_refused(
    tmp_path: Path, held: str, numbered: bool, expected: str
) -> None:
    """Fails if a start under the launcher, whose restarts resume by name, takes another name, or a
    name that the user gave to other files is silently changed.
    """
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / held).write_text("")
    with (tmp_path / "one" / held).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=expected):
            new_directory(tmp_path / "one", numbered)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


DEAD = (
    *("config.yaml", "metrics.jsonl", "tensorboard/events.out.tfevents.1"),
    "checkpoints/.step-00000003.partial/model.safetensors",
)
KEPT = {  # what is there besides, and why the folder is not to be used again
    "checkpoint": {"checkpoints/step-00000003/manifest.json": "{}"},
    "set aside": {"checkpoints/.step-00000003.replaced/manifest.json": "{}"},
    "finished": {"summary.json": '{"status": "finished"}'},
    "audit": {"summary.json": '{"status": "audit_failed"}'},
    "unreadable": {"summary.json": '{"sta'},
    "files": {"notes.txt": "precious"},
    "files within": {"tensorboard/notes.txt": "precious"},
    "no run of ours": {".lock": None},
}


def dead_run(folder: Path, **files: str | None) -> Path:
    """A run that has died without a checkpoint, with logs of the launcher, and these files."""
    held = {".lock": "", "logs/rank.0.log": "old"} | dict.fromkeys(DEAD, "old") | files
    for name, text in held.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("summary", [None, '{"status": "failed"}', '{"status": "stopped"}'])
def test_a_run_that_died_without_a_checkpoint_gives_its_folder_free(
    tmp_path: Path, capsys, summary: str | None
) -> None:
    """Fails if it blocks its folder, loses the logs, leaves old records, or nothing is printed."""
    folder = dead_run(tmp_path / "one", **({"summary.json": summary} if summary else {}))
    directory = RunDirectory(folder)
    assert {path.name for path in folder.iterdir()} == {".lock", "logs"}
    assert (folder / "logs" / "rank.0.log").read_text() == "old"
    assert "ended without a checkpoint: starting it again" in capsys.readouterr().out
    directory.write_config({"lr": 1.0})
    with pytest.raises(UsageError, match="already holds a run"):  # it is live now
        RunDirectory(folder)
    directory.close()


@pytest.mark.parametrize("reason", KEPT)
def test_a_run_worth_keeping_is_never_emptied(tmp_path: Path, reason: str) -> None:
    """Fails if a byte of a run with a checkpoint or a result, or of other files, is touched."""
    dead_run(tmp_path / "one", **KEPT[reason])
    before = read_tree(tmp_path)
    with pytest.raises(UsageError, match="already holds"):
        RunDirectory(tmp_path / "one")
    assert read_tree(tmp_path) == before


def test_config_summary_and_records(tmp_path: Path) -> None:
    """Fails when what is read back differs, NaN breaks the JSON, or a line waits in a buffer."""
    directory = RunDirectory(tmp_path / "one")
    config = {"lr": 1e-05, "experiment": "1e3", "epochs": None, "z": 1, "a": 2}
    directory.write_config(config)
    text = (directory.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == config and text.index("z:") < text.index("a:")
    bad = {"loss": math.nan, "deep": {"list": [1.5, math.inf, (-math.inf, "NaN")]}}
    null = {"format": 1, "loss": None, "deep": {"list": [1.5, None, [None, "NaN"]]}}
    directory.write_summary({"status": "failed"})
    directory.write_summary(bad)
    assert json.loads((directory.path / "summary.json").read_text()) == null
    directory.append("metrics.jsonl", {"step": 1, "text": "two\nlines"})
    directory.append("metrics.jsonl", bad)
    lines = (directory.path / "metrics.jsonl").read_text().splitlines()
    first = {"format": 1, "step": 1, "text": "two\nlines"}
    assert [json.loads(line) for line in lines] == [first, null]
    directory.close()
    left = {"config.yaml", "summary.json", "metrics.jsonl", ".lock"}
    assert {path.name for path in directory.path.iterdir()} == left


def totals(step: int, loss: float) -> Totals:
    phases_s = {"data": 0.25, "compute": 0.5, "exchange": 0.125, "update": 0.0625}
    return Totals(step, 0, step * 8, 8, loss, {"accuracy": 0.5}, 1000.0, phases_s, 3.5)


def test_the_recorder_writes_the_same_twice(tmp_path: Path) -> None:
    """Fails when TensorBoard and metrics.jsonl differ, or a scalar stands at another step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path / "one")
    recorder = EventLog(directory, classes=["cat", "dog"])
    for step, loss in ((10, 2.5), (20, math.nan), (30, 1.25)):
        recorder.interval_end(totals(step, loss), lr=step / 1000)
    metrics = {"accuracy": 0.875, "accuracy_top5": 1.0}
    evaluation = Evaluation(8, 0.75, metrics, tables={"confusion": [[4, 1], [0, 3]]})
    recorder.evaluated(totals(20, 1.5), replace(evaluation, loss=0.5))
    recorder.epoch_end(totals(30, 1.5), evaluation, lr=0.03)
    recorder.epoch_end(totals(40, 1.5), None, lr=0.04)
    recorder.audited(AuditRecord(30, True, 2, 9, 0.125, "conv1.weight"))
    recorder.close({"status": "finished"})
    directory.close()

    events = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    scalars = {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }
    assert math.isnan(scalars["train/loss"].pop(20))
    assert scalars["train/loss"] == {10: 2.5, 30: 1.25}
    assert scalars["train/accuracy"] == {10: 0.5, 20: 0.5, 30: 0.5}
    assert scalars["lr"] == pytest.approx({10: 0.01, 20: 0.02, 30: 0.03})
    assert scalars["samples_per_s"] == {10: 1000, 20: 1000, 30: 1000}
    assert scalars["gradient_norm"] == {10: 3.5, 20: 3.5, 30: 3.5}
    assert scalars["phase/exchange_s"] == {10: 0.125, 20: 0.125, 30: 0.125}
    assert scalars["valid/loss"] == {20: 0.5, 30: 0.75}
    assert scalars["valid/accuracy"] == {20: 0.875, 30: 0.875}
    assert scalars["audit/worst_error_over_bound"] == {30: 0.125}

    steps, audits = (
        [json.loads(line) for line in (directory.path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "audit.jsonl")
    )
    within = steps.pop(3)
    assert (within["kind"], within["step"], within["valid_loss"]) == ("evaluation", 20, 0.5)
    assert within["valid_class_accuracy"] == [0.8, 1.0]
    assert [(r["kind"], r["step"], r["train_loss"]) for r in steps] == [
        *(("step", 10, 2.5), ("step", 20, None), ("step", 30, 1.25)),
        *(("epoch", 30, 1.5), ("epoch", 40, 1.5)),
    ]
    assert (steps[3]["valid_samples"], steps[3]["valid_accuracy"]) == (8, 0.875)
    assert steps[3]["valid_accuracy_top5"] == 1.0
    assert steps[3]["valid_class_accuracy"] == [0.8, 1.0]
    newest = json.loads((directory.path / "evaluation.json").read_text())
    assert (newest["step"], newest["confusion"]) == (30, [[4, 1], [0, 3]])
    assert newest["classes"] == ["cat", "dog"]
    phases = [steps[0][f"{phase}_s"] for phase in ("data", "compute", "exchange", "update")]
    assert phases == [0.25, 0.5, 0.125, 0.0625] and steps[0]["gradient_norm"] == 3.5
    assert "valid_confusion" not in steps[3]
    assert "valid_accuracy" not in steps[4]
    assert audits[0]["worst_parameter"] == "conv1.weight" and audits[0]["ok"] is True


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reopened_directory_keeps_what_is_in_it(tmp_path: Path) -> None:
    """Fails when going on with a run needs an empty folder, empties it, or ignores a live job."""
    first = RunDirectory(tmp_path / "one")
    first.write_config({"lr": 1})
    first.append("metrics.jsonl", {"step": 1})
    with pytest.raises(UsageError, match="a live job is using"):
        RunDirectory(tmp_path / "one", reopen=True)
    first.close()
    again = RunDirectory(tmp_path / "one", reopen=True)
    again.append("metrics.jsonl", {"step": 2})
    with pytest.raises(UsageError, match="a live job is using"):
        RunDirectory(tmp_path / "one", reopen=True)
    again.close()
    assert [record["step"] for record in records(again.path / "metrics.jsonl")] == [1, 2]
    assert (again.path / "config.yaml").is_file()


def test_records_after_a_step_are_forgotten(tmp_path: Path) -> None:
    """Fails when a resumed run writes a step twice, loses one, or trips on half a line."""
    directory = RunDirectory(tmp_path / "one")
    for name in ("metrics.jsonl", "audit.jsonl"):
        for step in (1, 2, 3, 10):
            directory.append(name, {"step": step, "of": name})
    directory.close()
    with (directory.path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 2, "of": "metr\xff')  # the last write before a power cut
    again = RunDirectory(tmp_path / "one", reopen=True)
    again.forget_after(2)
    again.append("metrics.jsonl", {"step": 3, "of": "again"})
    again.close()
    metrics, audits = (records(again.path / name) for name in ("metrics.jsonl", "audit.jsonl"))
    assert [(r["step"], r["of"]) for r in metrics] == [
        *((1, "metrics.jsonl"), (2, "metrics.jsonl"), (3, "again")),
    ]
    assert [record["step"] for record in audits] == [1, 2]


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[str], Path]:
    """Puts a link to a file of the user's at a place in the run's folder; returns that file."""

    def plant(name: str) -> Path:
        precious, link = tmp_path / "precious", tmp_path / "one" / name
        precious.write_text("precious")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(precious)
        return precious

    return plant


def test_links_that_others_have_planted_are_not_followed(tmp_path: Path, planted) -> None:
    """Fails when whoever may write the folder has us empty, or write into, a file elsewhere."""
    precious = planted(".lock")
    with pytest.raises(UsageError, match=r"cannot be written: \.lock is a symbolic link"):
        RunDirectory(tmp_path / "one")
    assert precious.read_text() == "precious"
    (tmp_path / "one" / ".lock").unlink()
    directory = RunDirectory(tmp_path / "one")
    for name in (".config.yaml.partial", ".summary.json.partial", "metrics.jsonl"):
        planted(name)
    directory.write_config({"lr": 1})
    directory.write_summary({"status": "failed"})
    with pytest.raises(TrainingError, match=r"metrics\.jsonl is a symbolic link"):
        directory.append("metrics.jsonl", {"step": 1})
    directory.close()
    assert precious.read_text() == "precious"
    left = {path.name for path in directory.path.iterdir()}
    assert left == {".lock", "config.yaml", "summary.json", "metrics.jsonl"}


def test_planted_links_among_checkpoints_are_not_followed(tmp_path: Path, planted) -> None:
    """Fails when saving writes through a link, removes what it leads to, or cannot go on."""
    weights = {"w": torch.arange(3.0)}
    precious = planted("checkpoints/.last.partial")
    folder = tmp_path / "one" / "checkpoints"
    (tmp_path / "kept").mkdir()
    (folder / ".step-00000001.old").symlink_to(tmp_path / "kept")
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(Snapshot(2, "of step 2", weights, {}), is_best=False)
    checkpoints.wait()
    assert (folder / "last").read_text() == "step-00000002\n" and not (folder / "last").is_symlink()
    assert precious.read_text() == "precious" and (tmp_path / "kept").is_dir()


def test_a_report_does_not_follow_links(tmp_path: Path, planted) -> None:
    """Fails when a run that came with a link in its report/ has us write over a file elsewhere."""
    precious = planted("report/index.html")
    (page,) = write_plots([], tmp_path / "one" / "report", {PAGE: "<html>"})
    assert page.read_text() == "<html>"
    assert precious.read_text() == "precious"


@pytest.mark.timeout(20)
def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    """Fails when a pipe in a file's place is waited for, or what a file holds is cut."""
    os.mkfifo(tmp_path / "pipe")
    for open_ in (open_kept, open_to_read):
        with pytest.raises(OSError, match="pipe is not a regular file"):
            open_(tmp_path / "pipe")
    (tmp_path / "kept").write_text("before, ")
    with open_kept(tmp_path / "kept") as stream:
        stream.write("after")
    assert (tmp_path / "kept").read_text() == "before, after"


@pytest.mark.timeout(20)
def test_pipes_in_place_of_our_own_files(tmp_path: Path) -> None:
    """Fails when one that was planted in a run's folder makes the next start wait for ever."""
    folder = dead_run(tmp_path / "one", **{".lock": None})
    for name in (".lock", ".failed"):
        os.mkfifo(folder / name)
    with pytest.raises(UsageError, match="already holds"):
        RunDirectory(folder)
    assert take_cause(folder) is None


def test_a_lock_that_is_removed(tmp_path: Path, capsys) -> None:
    """Fails when a run does not lock its folder again, or goes on writing beside another job."""
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()
    run.append("metrics.jsonl", {"step": 1})
    assert "was removed: it is made again" in capsys.readouterr().out
    with pytest.raises(UsageError, match="a live job is using"):
        RunDirectory(tmp_path / "run", reopen=True)
    (tmp_path / "run" / ".lock").unlink()
    other = RunDirectory(tmp_path / "run", reopen=True)
    other.append("metrics.jsonl", {"step": 2})
    for ended in (False, True):
        with pytest.raises(TrainingError, match="another job has used the folder"):
            run.append("metrics.jsonl", {"step": 3})
        with pytest.raises(TrainingError, match="another job has used the folder"):
            run.write_summary({"status": "finished"})
        if not ended:
            other.close()
    run.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
